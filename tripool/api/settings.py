"""What the HTTP side is told once, when it is built.

The gateway process reads the checkpoint's text files and the deployment with `load_settings`; everything
after that works on this frozen value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tripool.api.chat import ChatTemplate, load_chat_template
from tripool.api.tokenizer import Tokenizer, load_tokenizer, read_json
from tripool.core.deployment import GatewayConfig
from tripool.core.errors import CheckpointError
from tripool.core.request import Sampling


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Everything that requests are read and answered by."""

    model_name: str                            # the name that clients use
    tokenizer: Tokenizer
    vocab_size: int                            # ids that the model takes; may exceed the tokenizer's
    max_model_len: int
    template: ChatTemplate | None = None       # None: chat is refused
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: Sampling = field(default_factory=Sampling)   # of the checkpoint; what a request leaves out
    seed: int | None = None                    # of requests that bring none
    api_keys: tuple[str, ...] = ()             # none: open
    admin_keys: tuple[str, ...] = ()           # none: admin paths answer only the loopback
    max_body_bytes: int = 8 << 20
    reasoning_fields: str = "both"             # both, reasoning, reasoning_content
    keep_alive_s: float = 15.0                 # a comment line in a stream that is silent for so long
    output_deadline_s: float = 900.0           # without a word from the backend, which has shorter deadlines of its own
    version: str = "0"
    model_path: str = ""
    tokenizer_path: str = ""
    shown: Mapping[str, object] = field(default_factory=dict)      # settings in force, for /server_info

    @property
    def shown_reasoning_fields(self) -> tuple[str, ...]:
        return ("reasoning_content", "reasoning") if self.reasoning_fields == "both" else (self.reasoning_fields,)


def load_settings(folder: Path, gateway: GatewayConfig, *, model_name: str, vocab_size: int, max_model_len: int,
                  version: str, tokenizer_folder: Path | None = None, chat_template: Path | None = None,
                  shown: Mapping[str, object] | None = None) -> ApiSettings:
    """Settings for the model in a folder, of which only the text files are read.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    source = tokenizer_folder or folder
    tokenizer = load_tokenizer(source)
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            str(source),
            [
                f"tokenizer.json has ids up to {tokenizer.vocab_size - 1}, but the model's vocabulary "
                f"has {vocab_size}; is it the tokenizer of another model?"
            ],
        )
    generation = read_json(folder / "generation_config.json")
    return ApiSettings(
        model_name=model_name,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        template=load_chat_template(source, tokenizer, chat_template),
        eos_token_ids=_eos_token_ids(generation, read_json(folder / "config.json"), tokenizer),
        default_sampling=_default_sampling(generation, folder) if gateway.sampling_defaults == "model" else Sampling(),
        seed=gateway.seed,
        api_keys=gateway.api_keys,
        admin_keys=gateway.admin_keys,
        max_body_bytes=gateway.max_body_bytes,
        reasoning_fields=gateway.reasoning_fields,
        output_deadline_s=gateway.max_attempts * (gateway.place_deadline_s + gateway.prefill_deadline_s
                                                  + gateway.decode_deadline_s),
        version=version,
        model_path=str(folder),
        tokenizer_path=str(source),
        shown=shown or {},
    )


def _eos_token_ids(generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end a text: from the generation settings, else the model's configuration, and the tokenizer's."""
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return tuple(dict.fromkeys(ids))


def _default_sampling(generation: Mapping[str, Any], folder: Path) -> Sampling:
    """Generation settings as a checkpoint publishes them. `do_sample: false` means greedy."""
    def number(name: str, otherwise: float) -> float:
        value = generation.get(name)
        if value is None:
            return otherwise
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(str(folder), [f"generation_config.json: {name} is {value!r}, not a number"])
        return value
    greedy = generation.get("do_sample") is False
    return Sampling(
        temperature=0.0 if greedy else float(number("temperature", 1.0)),
        top_p=float(number("top_p", 1.0)),
        top_k=int(number("top_k", 0)),
        min_p=float(number("min_p", 0.0)),
        repetition_penalty=float(number("repetition_penalty", 1.0)),
    )
