"""`tripool generate`: text from a model here and now, in one process, without a server.

It uses the same scheduler and engine as a hybrid instance, so its times are those of the engine alone.
"""

from __future__ import annotations

import importlib
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tripool import __version__
from tripool.api.settings import ApiSettings, load_settings
from tripool.api.tokenizer import Detokenizer
from tripool.cli.bench import read_prompts
from tripool.cli.flags import BATCH, MODEL, read_deployment, takes_flags
from tripool.cli.screen import err, loading, out
from tripool.core.deployment import Deployment
from tripool.core.errors import ConfigError, RequestError
from tripool.core.messages import Output
from tripool.core.request import Limits, Request, pack_tokens, unpack_tokens
from tripool.core.shape import ModelShape
from tripool.serve.budget import usable_cores
from tripool.serve.models import resolve
from tripool.serve.process import set_up_logs

SAMPLING = "Sampling"


@dataclass
class Story:
    """One request and what came of it."""

    prompt: str
    request: Request
    detokenizer: Detokenizer
    text: str = ""
    num_tokens: int = 0
    num_cached: int = 0
    finish: str = ""
    asked_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0

    def take(self, output: Output, now: float) -> str:
        """Add an output; the text that it brought."""
        if output.error is not None:
            raise RequestError(output.error, status=output.status)
        tokens = unpack_tokens(output.tokens)
        if tokens:
            self.first_s, self.last_s = self.first_s or now, now
            self.num_tokens += len(tokens)
        self.num_cached = output.num_cached_tokens or self.num_cached
        text = "".join(self.detokenizer.step(token) for token in tokens)
        if output.finish is not None:
            text += self.detokenizer.flush()
            self.finish = output.finish
        self.text += text
        return text


@takes_flags(MODEL, BATCH)
def generate(
    given: dict[str, Any],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", show_default=False, help="What to go on "
                                                        "from; without any, standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="More prompts: a line each, or JSON lines with `prompt` or "
                                                     "`messages`.", show_default=False)] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat each prompt as a user's message.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest output.", rich_help_panel=SAMPLING)] = 128,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 always takes the likeliest token; the default is "
                                                      "the model's.", show_default=False,
                                                      rich_help_panel=SAMPLING)] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, show_default=False, rich_help_panel=SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(min=0, show_default=False, rich_help_panel=SAMPLING)] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.", show_default=False,
                                             rich_help_panel=SAMPLING)] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to the full length.",
                                             rich_help_panel=SAMPLING)] = False,
    timing: Annotated[bool, typer.Option("--timing/--no-timing", help="Show counts and times at the end.")] = True,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Generate text here and now, without a server.

        tripool generate "Once upon a time"
        tripool generate --chat "Tell me a story about a fox." --temperature 0.7 --seed 1
        tripool generate --model ./DeepSeek-V2-Lite --prompt-file prompts.txt --max-tokens 64

    Prompts run together in one batch; with one prompt, its text appears as it is generated.
    """
    set_up_logs("generate", log_level)
    deployment = read_deployment(None, {**given, "hybrid": 1}, usable_cores())
    deployment, checkpoint = resolve(deployment)
    settings = settings_of(deployment, checkpoint.shape)
    texts: list[dict[str, Any]] = [{"prompt": text} for text in prompts or []]
    if prompt_file is not None:
        texts += read_prompts(prompt_file)
    if not texts:
        if sys.stdin.isatty():
            err.print("type the prompt; Ctrl-D ends it", style="dim")
        texts = [{"prompt": sys.stdin.read().rstrip("\n")}]
    default = settings.default_sampling
    sampling = replace(
        default, temperature=default.temperature if temperature is None else temperature,
        top_p=default.top_p if top_p is None else top_p, top_k=default.top_k if top_k is None else top_k)
    first_seed = secrets.randbits(31) if seed is None else seed
    stories = []
    for i, each in enumerate(texts):
        tokens = prompt_tokens(each, settings, chat)
        room = settings.max_model_len - len(tokens)
        if room < 1:
            raise ConfigError(f"prompt {i + 1} has {len(tokens)} tokens, but there is room for "
                              f"{settings.max_model_len} with the answer; shorten it"
                              + (", or raise --max-model-len" if deployment.model.max_model_len else ""))
        limits = Limits(min(max_tokens, room), stop_token_ids=() if ignore_eos else settings.eos_token_ids)
        request = Request(i + 1, pack_tokens(tokens), replace(sampling, seed=first_seed + i), limits)
        shown = each.get("prompt") or each["messages"][-1]["content"]
        stories.append(Story(str(shown), request, settings.tokenizer.detokenizer(skip_special_tokens=not chat)))
    run(deployment, stories, timing)


def run(deployment: Deployment, stories: Sequence[Story], timing: bool) -> None:
    """Generate all stories together and show them."""
    # The engine loads torch, which takes seconds; only this command needs it in its own process.
    offline = importlib.import_module("tripool.serve.offline")
    by_id = {story.request.request_id: story for story in stories}
    alone = len(stories) == 1

    def on_output(output: Output) -> None:
        text = by_id[output.request_id].take(output, time.perf_counter())
        if alone:
            out.print(text, end="", markup=False)

    with loading("loading the model") as show:
        engine = offline.Offline(deployment, lambda fraction: show("loading the model", fraction))
    try:
        start_s = time.perf_counter()
        for story in stories:
            story.asked_s = start_s
        engine.generate([story.request for story in stories], on_output)
        seconds = time.perf_counter() - start_s
    finally:
        engine.close()
    if alone:
        out.print()
    else:
        for story in stories:
            out.print(f"{story.prompt!r}", style="dim", markup=False)
            out.print(story.text, markup=False)
            out.print()
    if timing:
        err.print(timing_table(stories, seconds))


def settings_of(deployment: Deployment, shape: ModelShape) -> ApiSettings:
    """Tokenizer, template and defaults of a resolved model, as a server would have them."""
    model = deployment.model
    return load_settings(
        Path(model.path), deployment.gateway, model_name=model.served_name, vocab_size=shape.vocab_size,
        max_model_len=model.max_model_len or shape.max_position, version=__version__,
        tokenizer_folder=Path(model.tokenizer) if model.tokenizer else None,
        chat_template=Path(model.chat_template) if model.chat_template else None)


def prompt_tokens(prompt: dict[str, Any], settings: ApiSettings, chat: bool) -> list[int]:
    """Token ids of a prompt: of text, or of messages through the model's template."""
    if not chat and "messages" not in prompt:
        return settings.tokenizer.encode(str(prompt["prompt"]), add_special_tokens=True)
    if settings.template is None:
        raise ConfigError("this model has no chat template; give one with --chat-template, or leave out --chat")
    messages = prompt.get("messages") or [{"role": "user", "content": prompt["prompt"]}]
    rendered = settings.template.render(messages)
    return settings.tokenizer.encode(rendered.text, add_special_tokens=False)


def timing_table(stories: Sequence[Story], seconds: float) -> Table:
    """Counts and times of each story and of all."""
    table = Table(box=None, header_style="dim")
    for column in ("", "prompt", "cached", "tokens", "first token", "then each", "tokens/s", "ended by"):
        table.add_column(column, justify="right" if column != "ended by" else "left")
    for number, story in enumerate(stories, 1):
        if story.first_s is None:
            table.add_row(str(number), str(story.request.num_prompt_tokens), "0", "0", "-", "-", "-", story.finish)
            continue
        each_s = (story.last_s - story.first_s) / (story.num_tokens - 1) if story.num_tokens > 1 else None
        table.add_row(
            str(number), str(story.request.num_prompt_tokens), str(story.num_cached), str(story.num_tokens),
            f"{(story.first_s - story.asked_s) * 1e3:.0f} ms", "-" if each_s is None else f"{each_s * 1e3:.1f} ms",
            f"{story.num_tokens / (story.last_s - story.asked_s):.1f}", story.finish)
    total = sum(story.num_tokens for story in stories)
    if len(stories) > 1:
        table.add_row("all", str(sum(story.request.num_prompt_tokens for story in stories)), "", str(total), "", "",
                      f"{total / seconds:.1f}", "")
    return table
