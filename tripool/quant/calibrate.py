"""What activations look like: rows that the model's products see while it reads some text.

For each layer three kinds of rows are kept, and who chose which expert; all else follows from them and the weights of
the layer. The model runs as it always does; a stage's inputs are looked at from outside. Without a run, rows are
imagined: a norm gives rows of unit size times its weights, so normal numbers times these weights stand for them. Such
rows know of the norms' outliers and of no others, and say nothing of which inputs rise together.

N rows · D model width · V all heads' values · K picks
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tripool.core.errors import ConfigError
from tripool.engine.model.moe import MixtureOfExperts
from tripool.quant.forward import Model, in_batches, runs_seen

Texts = Sequence[Sequence[int]]
Keep = Callable[[str, Tensor], None]
See = Callable[[Any, Any, Any], None]
BUILT_IN = Path(__file__).parent / "calibration.txt"
HELD_OUT = Path(__file__).parent / "held_out.txt"
SEPARATOR = "\n%%\n"
LONGEST = 512                # tokens of one text
LEAST_ROWS = 64              # of an expert: rows that it was not chosen for fill up
IMAGINED_ROWS = 256


@dataclass(frozen=True, slots=True)
class LayerRows:
    """What one layer saw."""

    attention_ND: Tensor             # after the norm before attention
    value_NV: Tensor | None          # what the output projection sees; None if it is to be worked out
    feed_forward_ND: Tensor          # after the norm before the feed-forward
    expert_NK: Tensor | None         # who was chosen
    imagined: bool = False

    def rows_of(self, expert: int | None) -> Tensor:
        """Indices of the rows that an expert sees, with others if they are few; all rows for one that sees all."""
        every = torch.arange(self.feed_forward_ND.shape[0])
        if expert is None or self.expert_NK is None:
            return every
        own = (self.expert_NK == expert).any(-1)
        return torch.cat([every[own], every[~own][:max(0, LEAST_ROWS - int(own.sum()))]])


def calibrate(model: Model, texts: Texts) -> dict[str, Tensor]:
    """Run the model over texts and keep what its layers see, by layer number and name."""
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str, rows: Tensor) -> None:
        seen.setdefault(name, []).append(rows.float().clone())

    with torch.inference_mode(), ExitStack() as stack:
        for index, layer in enumerate(model.engine.layers):
            stack.enter_context(runs_seen(layer.attention, _attention_seer(index, keep)))
            if isinstance(layer.feed_forward, MixtureOfExperts):
                stack.enter_context(runs_seen(layer.feed_forward, _router_seer(index, keep)))
            else:
                stack.enter_context(runs_seen(layer, _dense_seer(index, keep)))
        for part in in_batches(texts):
            model.hidden(part)
    return {name: torch.cat(rows) for name, rows in seen.items()}


def _attention_seer(index: int, keep: Keep) -> See:
    def see(stage: Any, inputs: Any, _result: Any) -> None:
        if stage.__name__ == "project":
            keep(f"{index}.attention", inputs[0])
        elif stage.__name__ == "output":
            keep(f"{index}.value", inputs[0].flatten(1))
    return see


def _router_seer(index: int, keep: Keep) -> See:
    def see(_stage: Any, inputs: Any, result: Any) -> None:
        if isinstance(result, tuple):            # the router's: experts and weights
            keep(f"{index}.feed_forward", inputs[0])
            keep(f"{index}.expert", result[0])
    return see


def _dense_seer(index: int, keep: Keep) -> See:
    def see(stage: Any, inputs: Any, _result: Any) -> None:
        if stage.__name__ == "_gated":
            keep(f"{index}.feed_forward", inputs[0])
    return see


class Calibration:
    """Rows of every layer, kept in a file and read a layer at a time; imagined where there are none."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @classmethod
    def write(cls, path: Path, rows: dict[str, Tensor]) -> Calibration:
        part = path.with_suffix(".part")
        save_file(rows, part)
        part.rename(path)
        return cls(path)

    def layer(self, index: int, attention_norm_D: Tensor, feed_forward_norm_D: Tensor) -> LayerRows:
        """What a layer saw."""
        if self.path is not None:
            with safe_open(self.path, "pt") as file:
                if f"{index}.attention" in file.keys():      # noqa: SIM118 (no container)
                    expert = f"{index}.expert"
                    return LayerRows(
                        file.get_tensor(f"{index}.attention"), file.get_tensor(f"{index}.value"),
                        file.get_tensor(f"{index}.feed_forward"),
                        file.get_tensor(expert).long() if expert in file.keys() else None)     # noqa: SIM118
        generator = torch.Generator().manual_seed(index)
        normal_ND = torch.randn(IMAGINED_ROWS, attention_norm_D.shape[0], generator=generator)
        return LayerRows(normal_ND * attention_norm_D, None, normal_ND * feed_forward_norm_D, None, imagined=True)


# --- texts ---------------------------------------------------------------------------------------------------------


def read_texts(file: Path, folder: Path, vocab_size: int, max_tokens: int) -> list[list[int]]:
    """Texts of a file (between lines of %%) as tokens of a folder's tokenizer, up to a number of tokens in all.

    Raises:
        ConfigError: there is no tokenizer, or no text.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder} has no tokenizer.json, so that no text can be read: give --calibration none and "
                          "--evaluation none")
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as text: {error}") from error
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts: list[list[int]] = []
    left = max_tokens
    for text in content.split(SEPARATOR):
        tokens = [token for token in tokenizer.encode(text.strip("\n"), add_special_tokens=False).ids
                  if token < vocab_size]
        for first in range(0, len(tokens), LONGEST):
            piece = tokens[first:first + min(LONGEST, left)]
            if len(piece) > 1:
                texts.append(piece)
                left -= len(piece)
            if left < 2:
                return texts
    if not texts:
        raise ConfigError(f"{file} holds no text")
    return texts


def digest_of(texts: Texts) -> str:
    """A name for some texts."""
    return hashlib.sha256(repr([list(text) for text in texts]).encode()).hexdigest()
