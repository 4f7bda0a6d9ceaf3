"""`tripool quantize SRC DST`: a model folder in INT8, and what that cost.

The work and its numbers are the room `quant`; here are the flags, the progress and the table. A reader of this file
need not know how a scale is found.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tripool.cli.files import check_writable
from tripool.cli.flags import parse_bytes, show_bytes
from tripool.cli.quantize_picture import draw
from tripool.cli.screen import err, loading, out
from tripool.core.errors import ConfigError
from tripool.engine.checkpoint import Checkpoint, open_checkpoint
from tripool.engine.threads import set_threads
from tripool.pool.arena import available_memory_bytes
from tripool.quant.blocks import Figure
from tripool.quant.calibrate import BUILT_IN, HELD_OUT, Texts, read_texts
from tripool.quant.convert import SHARD_BYTES, Conversion, Options, convert, running_bytes
from tripool.quant.evaluate import Outcome, compare, outcome_json, perplexity
from tripool.quant.policy import RULES, rule_of
from tripool.quant.recipe import Recipe
from tripool.serve.budget import usable_cores
from tripool.serve.models import folder_of

MEMORY_SHARE = 0.7                 # of what is free, unless told otherwise
EVALUATION_TOKENS = 1 << 14
SMALL_PARAMS = 100_000_000         # products of a smaller model are slower with two threads than with one
WORST_SHOWN = 5


def quantize(
    source: Annotated[str | None, typer.Argument(metavar="SRC", help="A folder in BF16, FP16, FP32 or FP8, a hub id, "
                                                 "or tripool-tiny, the embedded model.", show_default=False)] = None,
    folder: Annotated[Path | None, typer.Argument(metavar="DST", help="The folder to write; it must not be there.",
                                                  show_default=False)] = None,
    show_policy: Annotated[bool, typer.Option("--show-policy", help="Show which tensors become INT8.")] = False,
    mixed_precision: Annotated[bool, typer.Option(help="Keep router, head and other sensitive matrices as they are "
                                                  "(see --show-policy).")] = True,
    rotation: Annotated[bool, typer.Option(help="Turn outliers of activations away, where that lowers errors.")] = True,
    absorption: Annotated[bool, typer.Option(help="Move outliers of activations into norms and weights.")] = True,
    scale_search: Annotated[bool, typer.Option(help="Find scales by trying.")] = True,
    clipping: Annotated[bool, typer.Option(help="Clip each block by what its output loses least by.")] = True,
    compensation: Annotated[bool, typer.Option(help="Make up for a column's rounding in the columns after it.")] = True,
    plain: Annotated[bool, typer.Option("--plain", help="Round to nearest: none of the five before this one.")] = False,
    calibration: Annotated[str, typer.Option(help="A text file to calibrate with (texts between lines of %%), "
                                             "built-in, or none: nothing is run.")] = "built-in",
    calibration_tokens: Annotated[int, typer.Option(min=2, help="Tokens of it to use.")] = 4096,
    evaluation: Annotated[str, typer.Option(help="A text file for perplexity before and after, built-in, or none.",
                                            )] = "built-in",
    compare_steps: Annotated[bool, typer.Option("--compare", help="Say what each technique brings; converts several "
                                                "times.")] = False,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory to take, beyond the process itself. "
                                               "Without it, most of what is free.", show_default=False)] = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file.")] = f"{SHARD_BYTES >> 30}GiB",
    threads: Annotated[int | None, typer.Option(min=1, help="Without it, as many as help.",
                                                show_default=False)] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Throw away what an interrupted conversion left.")] = False,
    report: Annotated[Path | None, typer.Option(metavar="PATH", help="Write all figures as JSON, with a picture "
                                                "beside it.", show_default=False)] = None,
) -> None:
    """Convert a model to INT8 (W8A8, the compressed-tensors format that other engines load too).

        tripool quantize tripool-tiny ./tiny-int8
        tripool quantize ./DeepSeek-V2-Lite ./DeepSeek-V2-Lite-INT8
        tripool quantize SRC DST --calibration my-texts.txt --report report.json
        tripool quantize SRC --show-policy

    An interrupted conversion goes on when the same command is given again. DST appears when it is complete.
    """
    recipe = Recipe(mixed_precision, *(flag and not plain
                                       for flag in (rotation, absorption, scale_search, clipping, compensation)))
    checkpoint = open_checkpoint(folder_of(source)) if source else None
    if show_policy:
        show_rules(checkpoint)
        return
    if checkpoint is None or folder is None:
        raise ConfigError("give a folder to convert and a folder to write: tripool quantize SRC DST")
    if report is not None:
        check_writable(report, "--report")
    cores = threads or (usable_cores() if checkpoint.shape.params() > SMALL_PARAMS else 1)
    set_threads(cores)
    memory_bytes = parse_bytes(memory) if memory else int(MEMORY_SHARE * available_memory_bytes())
    options = Options(recipe, memory_bytes, max(1, parse_bytes(shard_size)), cores, restart)
    texts = _texts(calibration, BUILT_IN, checkpoint, calibration_tokens)
    held_out = _texts(evaluation, HELD_OUT, checkpoint, EVALUATION_TOKENS)
    if held_out and running_bytes(checkpoint) > memory_bytes:
        err.print(f"note: perplexity is not measured: running the model takes {show_bytes(running_bytes(checkpoint))}, "
                  "more than --memory", style="yellow", markup=False)
        held_out = []
    with loading("quantising") as progress:
        done = convert(checkpoint, folder, options, texts=texts, progress=progress)
        before, after, outcomes = _evaluate(checkpoint, folder, options, texts, held_out, compare_steps, progress)
    show(done, before, after, outcomes)
    if report is not None:
        report.write_text(json.dumps(_as_json(done, before, after, outcomes), indent=1, ensure_ascii=False) + "\n")
        picture = report.with_suffix(".png")
        draw(done.figures, outcomes, picture)
        out.print(f"all figures: {report}, a picture: {picture}", markup=False)


def _texts(given: str, built_in: Path, checkpoint: Checkpoint, max_tokens: int) -> Texts:
    if given == "none":
        return []
    file = built_in if given == "built-in" else Path(given)
    return read_texts(file, checkpoint.folder, checkpoint.shape.vocab_size, max_tokens)


def _evaluate(checkpoint: Checkpoint, folder: Path, options: Options, texts: Texts, held_out: Texts, steps: bool,
              progress: Callable[[str, float], None]) -> tuple[float | None, float | None, list[Outcome]]:
    if not held_out:
        return None, None, []
    progress("perplexity", 1.0)
    before = perplexity(checkpoint, held_out, threads=options.threads)
    after = perplexity(folder, held_out, threads=options.threads)
    outcomes = compare(checkpoint, options, texts, held_out, before=before,
                       beside=folder.absolute().parent, progress=progress) if steps else []
    return before, after, outcomes


def _as_json(done: Conversion, before: float | None, after: float | None, outcomes: list[Outcome]) -> dict[str, Any]:
    perplexities = None
    if before is not None and after is not None:
        perplexities = {"before": before, "after": after, "increase": after / before - 1}
    return {**done.as_json(), "perplexity": perplexities, "techniques": [outcome_json(each) for each in outcomes]}


# ------------------------------------------------------------------------------- showing


def show_rules(checkpoint: Checkpoint | None) -> None:
    """The policy, with what it means for a model."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("tensors", "stored as", *(("number", "now") if checkpoint else ()), "because"):
        table.add_column(column, justify="right" if column in ("number", "now") else "left")
    counts: dict[str, list[int]] = defaultdict(list)
    for tensor in checkpoint.tensors.values() if checkpoint else ():
        counts[rule_of(tensor.name).name].append(tensor.num_bytes)
    for rule in RULES:
        sizes = counts[rule.name]
        numbers = (str(len(sizes)), show_bytes(sum(sizes))) if checkpoint else ()
        table.add_row(rule.name, "INT8" if rule.precision == "int8" else "as they are", *numbers, rule.reason)
    out.print(table)


def show(done: Conversion, before: float | None, after: float | None, outcomes: list[Outcome]) -> None:
    out.print(f"{done.folder}: {show_bytes(done.written_bytes)} of weights, {show_bytes(done.int8_bytes)} of them "
              f"INT8; {show_bytes(done.read_bytes)} before; {done.seconds:.0f} s", markup=False)
    if done.resumed_files:
        out.print(f"{done.resumed_files} file(s) were there from an interrupted conversion")
    if done.dropped:
        out.print(f"left out, because the model does not need them: {', '.join(done.dropped[:8])}", markup=False)
    if done.recipe.rotation:
        show_rotation(done)
    show_errors(done.figures)
    if before is not None and after is not None:
        out.print(f"\nperplexity: {before:.4f} before, {after:.4f} in INT8 ({after / before - 1:+.2%})")
    if outcomes:
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), title="one technique more at a time")
        table.add_column("techniques")
        for column in ("mean error", "perplexity", "increase"):
            table.add_column(column, justify="right")
        table.add_column("")
        most = max(1e-12, *(abs(each.increase) for each in outcomes))
        for each in outcomes:
            table.add_row(each.name, f"{each.error:.3%}", f"{each.perplexity:.4f}", f"{each.increase:+.3%}",
                          "█" * round(24 * abs(each.increase) / most))
        out.print(table)


def show_rotation(done: Conversion) -> None:
    choice, own = done.rotation, sum(each.rotated for each in done.figures)
    errors = ""
    if choice.error_as_it_was is not None and choice.error_turned is not None:
        errors = f" (products that read it: {choice.error_as_it_was:.3%} as it was, {choice.error_turned:.3%} turned)"
    out.print(f"rotation: residual stream {'turned' if choice.used else 'as it was'}, {choice.reason}{errors}; "
              f"{own} products of attention turned on their own", markup=False)


def show_errors(figures: list[Figure]) -> None:
    """Errors of products by kind of tensor, and the worst tensors."""
    kinds: dict[str, list[Figure]] = defaultdict(list)
    for each in figures:
        kinds[rule_of(each.tensor).name].append(each)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("error of products")
    for column in ("tensors", "mean", "worst", "rounded plainly", "compensated"):
        table.add_column(column, justify="right")
    for kind, group in kinds.items():
        errors = [each.error for each in group]
        plain = sum(each.plain_error for each in group) / len(group)
        table.add_row(kind, str(len(group)), f"{sum(errors) / len(errors):.3%}", f"{max(errors):.3%}", f"{plain:.3%}",
                      str(sum(each.compensated for each in group)))
    out.print(table)
    worst = sorted(figures, key=lambda each: -each.error)[:WORST_SHOWN]
    out.print("worst: " + ", ".join(f"{each.tensor} {each.error:.2%}" for each in worst), style="dim", markup=False)
