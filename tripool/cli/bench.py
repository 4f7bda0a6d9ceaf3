"""`tripool bench serve`: put a load on a running server and report what its users would see."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.table import Table

from tripool.cli.chat import served_model
from tripool.cli.client import Client, parse_server
from tripool.cli.files import check_writable
from tripool.cli.flags import DEFAULT_URL, ApiKey, Url
from tripool.cli.load import CHAT, COMPLETIONS, TIMES, Arrivals, Job, Limits, run_load, summarise
from tripool.cli.screen import err, loading, out
from tripool.core.errors import ConfigError, TripoolError

DATASETS = ("random", "shared-prefix", "prompts")
SAMPLE_TEXT = (
    "The river bent slowly around the old stone mill, and every evening the miller walked along the bank, counted "
    "seven boats, wrote their names into a small green book, and wondered which of them would come back with spring. "
    "Nobody in the village had ever asked him why; some said it was love, others arithmetic."
)
LARGEST_SEED = (1 << 31) - 1

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure a running server.")


@app.callback()
def options() -> None:
    """Measure a running server."""


@app.command("serve")
def bench_serve(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    model: Annotated[str, typer.Option(help="The model; without it, the one that is served.")] = "",
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    dataset: Annotated[str, typer.Option("--dataset-name", "--dataset", help=", ".join(DATASETS) + ".")] = "random",
    dataset_path: Annotated[Path | None, typer.Option(help="For prompts: a text file with a prompt a line, or JSON "
                                                      "lines with `prompt` or `messages`.", show_default=False)] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 100,
    input_len: Annotated[int, typer.Option("--input-len", "--random-input-len", min=1,
                                           help="Prompt tokens of a random request.")] = 256,
    output_len: Annotated[int, typer.Option("--output-len", "--random-output-len", min=1,
                                            help="Tokens to generate.")] = 64,
    range_ratio: Annotated[float, typer.Option("--range-ratio", "--random-range-ratio", min=0, max=1,
                                               help="Lengths vary by up to this share of themselves.")] = 0,
    prefix_len: Annotated[int, typer.Option(min=0, help="For shared-prefix: tokens of each shared beginning.")] = 512,
    num_prefixes: Annotated[int, typer.Option(min=1, help="For shared-prefix: how many beginnings.")] = 4,
    request_rate: Annotated[float, typer.Option(help="Open loop: requests per second; inf sends all at once.")]
    = float("inf"),
    burstiness: Annotated[float, typer.Option(help="1 is a Poisson process; less is burstier, more steadier.")] = 1.0,
    max_concurrency: Annotated[int, typer.Option(help="Closed loop: requests under way at once; 0 is no limit.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos/--respect-eos",
                                             help="Generate the full length whatever the model says.")] = True,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    goodput: Annotated[list[str] | None, typer.Option(help="A limit a good request keeps, in ms: ttft:500, tpot:50 or "
                                                      "e2e:2000; may be repeated.", show_default=False)] = None,
    warmup: Annotated[int, typer.Option("--warmup-requests", min=0, help="Requests sent before, not counted.")] = 1,
    flush_cache: Annotated[bool, typer.Option("--flush-cache", help="Empty the context cache before.")] = False,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request has failed.")] = 600.0,
    result: Annotated[Path | None, typer.Option("--json", "--output-file", help="Write the result here; - prints it "
                                                "instead of the table.", show_default=False)] = None,
) -> None:
    """Put a load on a server and report what its users would see.

    Open loop sends at a given rate, whatever comes back; closed loop keeps a number of requests under way.

        tripool bench serve --request-rate 4 --num-prompts 200
        tripool bench serve --max-concurrency 8 --input-len 512 --output-len 128
        tripool bench serve --dataset shared-prefix --prefix-len 1024 --num-prefixes 2
        tripool bench serve --request-rate 10 --goodput ttft:500 --goodput tpot:50 --json result.json

    ttft: until the first output. itl: between tokens; gap: between the events that carry them. tpot: (end - first) /
    (tokens - 1). Token counts are the server's. Failed requests are counted apart and are in no time.
    """
    if dataset not in DATASETS:
        raise ConfigError(f"--dataset is {dataset!r}; known are {', '.join(DATASETS)}")
    if endpoint not in ("completions", "chat"):
        raise ConfigError(f"--endpoint is {endpoint!r}; known are completions and chat")
    if (dataset == "prompts") != (dataset_path is not None):
        raise ConfigError("--dataset prompts and --dataset-path FILE belong together")
    if result is not None and str(result) != "-":
        check_writable(result, "--json")
    limits = parse_limits(goodput or [])
    arrivals = Arrivals(request_rate, burstiness, max_concurrency, seed)
    server = parse_server(url, api_key)
    generator = random.Random(seed)
    sizes = Sizes(input_len, output_len, range_ratio, prefix_len if dataset == "shared-prefix" else 0, num_prefixes)

    async def body() -> tuple[dict[str, Any], str]:
        async with Client(server) as client:
            name = model or await served_model(client)
            if dataset_path is not None:
                prompts = read_prompts(dataset_path)
            else:
                prompts = await random_prompts(client, name, num_prompts + warmup, sizes, generator,
                                               as_text=endpoint == "chat")
            common = {"model": name, "temperature": temperature, "ignore_eos": ignore_eos}
            jobs = [make_job(prompts[i % len(prompts)], endpoint, common, sizes.draw(sizes.output_len, generator),
                             generator.randint(0, LARGEST_SEED)) for i in range(num_prompts + warmup)]
            if warmup:
                await run_load(server, jobs[num_prompts:], Arrivals(max_concurrency=4), timeout_s=timeout)
            if flush_cache:
                (await client.ask("POST", "/flush_cache")).json()
        err.print(f"sending {num_prompts} requests to {server.url}", style="dim")
        with loading("answered") as bar:
            run = await run_load(server, jobs[:num_prompts], arrivals, timeout_s=timeout,
                                 progress=lambda ended: bar(f"{ended} answered", ended / num_prompts))
        return summarise(run, limits), name

    figures, name = uvloop.run(body())
    parameters = {"dataset": dataset, "endpoint": endpoint, "num_prompts": num_prompts, **asdict(sizes),
                  "request_rate": "inf" if request_rate == float("inf") else request_rate, "burstiness": burstiness,
                  "max_concurrency": max_concurrency, "ignore_eos": ignore_eos, "temperature": temperature,
                  "seed": seed, "model": name}
    text = json.dumps({"parameters": parameters, "figures": figures}, indent=1)
    if result is not None and str(result) == "-":
        out.print(text, markup=False)
    else:
        show(figures)
        if result is not None:
            result.write_text(text + "\n")
    if figures["completed"] == 0:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long random prompts and answers are, in tokens."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0              # of beginnings that prompts share
    num_prefixes: int = 1

    def draw(self, length: int, generator: random.Random) -> int:
        """A length near another."""
        ratio = self.range_ratio
        return max(1, round(length * generator.uniform(1 - ratio, 1 + ratio))) if ratio else length


async def random_prompts(client: Client, model: str, count: int, sizes: Sizes, generator: random.Random, *,
                         as_text: bool) -> list[dict[str, Any]]:
    """Prompts of ordinary tokens in random order, which have nothing in common but their shared beginnings."""
    ordinary = await ordinary_tokens(client, model)
    prefixes = [generator.choices(ordinary, k=sizes.prefix_len) for _ in range(sizes.num_prefixes)]
    prompts: list[dict[str, Any]] = []
    for i in range(count):
        tokens = prefixes[i % len(prefixes)] + generator.choices(ordinary, k=sizes.draw(sizes.input_len, generator))
        prompts.append({"prompt": await text_of(client, model, tokens) if as_text else tokens})
    return prompts


def make_job(prompt: dict[str, Any], endpoint: str, common: dict[str, Any], max_tokens: int, seed: int) -> Job:
    """One request of the load. A prompt is text, token ids or messages; chat takes text as the user's message."""
    body = {**common, "max_tokens": max_tokens, "seed": seed}
    if endpoint == "completions":
        if "prompt" not in prompt:
            raise ConfigError("the prompts are messages; use --endpoint chat")
        return Job(COMPLETIONS, {**body, "prompt": prompt["prompt"]})
    messages = prompt.get("messages") or [{"role": "user", "content": prompt["prompt"]}]
    return Job(CHAT, {**body, "messages": messages})


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Prompts of a file: a line each, or JSON lines with `prompt` or `messages`.

    Raises:
        ConfigError: unreadable, empty, or a line is not what it should be.
    """
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}") from error
    if not lines:
        raise ConfigError(f"{path} holds no prompt")
    if path.suffix not in (".jsonl", ".json"):
        return [{"prompt": line} for line in lines]
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(value, dict) or not (value.keys() & {"prompt", "messages"}):
            raise ConfigError(f"{path}, line {number} has neither `prompt` nor `messages`")
        prompts.append(value)
    return prompts


def parse_limits(words: Sequence[str]) -> Limits | None:
    """Limits from words like `ttft:500`.

    Raises:
        ConfigError: a word is not of that form.
    """
    given: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        name = {"e2el": "e2e"}.get(name, name)
        try:
            given[f"{name}_ms"] = float(value)
        except ValueError as error:
            raise ConfigError(f"--goodput is {word!r}; write for example ttft:500 (milliseconds)") from error
        if name not in ("ttft", "tpot", "e2e"):
            raise ConfigError(f"--goodput knows ttft, tpot and e2e, not {name!r}")
    return Limits(**given) if given else None


async def ordinary_tokens(client: Client, model: str) -> list[int]:
    """Token ids that occur in plain text, so that a random prompt has no special ones.

    Raises:
        TripoolError: the server cannot say; then only one's own prompts can be sent.
    """
    try:
        answer = await client.post("/tokenize", {"model": model, "prompt": SAMPLE_TEXT, "add_special_tokens": False})
        tokens = sorted(set(answer["tokens"]))
    except (TripoolError, KeyError, TypeError) as error:
        raise ConfigError(f"the server's /tokenize does not answer ({error}); random prompts need it. "
                          "Send your own with --dataset prompts --dataset-path FILE") from error
    return tokens


async def text_of(client: Client, model: str, tokens: list[int]) -> str:
    """Tokens as text, for a chat message."""
    return str((await client.post("/detokenize", {"model": model, "tokens": tokens}))["prompt"])


def show(figures: dict[str, Any]) -> None:
    """The figures as a table."""
    table = Table(box=None, header_style="dim")
    for column in ("ms", "mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    for name in (*TIMES, "send_delay"):
        spread = figures[f"{name}_ms"]
        if spread is not None:
            table.add_row(name, *(f"{spread[key]:.1f}" for key in ("mean", "p50", "p90", "p99", "max")))
    out.print(f"{figures['completed']} of {figures['requests']} requests completed in {figures['duration_s']:.2f} s: "
              f"{figures['request_rate']:.2f} requests/s, {figures['output_rate']:.1f} output tokens/s, "
              f"{figures['total_rate']:.1f} tokens/s in all")
    out.print(f"{figures['prompt_tokens']} prompt tokens ({figures['cached_tokens']} cached), "
              f"{figures['output_tokens']} output tokens ({figures['reasoning_tokens']} of thought)")
    for cause, count in figures["failures"].items():
        out.print(f"failed: {count} x {cause}", style="red", markup=False)
    out.print(table)
    if "goodput" in figures:
        good = figures["goodput"]
        out.print(f"goodput: {good['rate']:.2f} requests/s keep {good['limits']} ({good['share']:.0%})", markup=False)
