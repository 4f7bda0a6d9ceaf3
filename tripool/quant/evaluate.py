"""What a conversion costs at the end of the model: perplexity before and after, and what each technique contributes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tripool.engine.checkpoint import Checkpoint, open_checkpoint
from tripool.quant.blocks import Figure
from tripool.quant.calibrate import Texts
from tripool.quant.convert import Options, convert
from tripool.quant.forward import Model
from tripool.quant.recipe import STEPS, Recipe

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one recipe came to."""

    name: str
    recipe: Recipe
    error: float                 # mean over tensors, of products
    layer_errors: dict[int, float]
    perplexity: float
    increase: float              # of perplexity, a part of the float model's
    exact_match: float | None    # the share of right answers, where it was asked for


def mean_error(figures: Sequence[Figure]) -> float:
    """Of the products of all tensors that calibration rows were there for, or of all tensors without any."""
    errors = [each.error for each in figures if not each.imagined] or [each.error for each in figures]
    return sum(errors) / max(1, len(errors))


def layer_errors(figures: Sequence[Figure]) -> dict[int, float]:
    """Mean error of products by layer; tensors outside of layers are left out."""
    return {layer: sum(each.error for each in group) / len(group) for layer, group in _by_layer(figures).items()}


def plain_errors(figures: Sequence[Figure]) -> dict[int, float]:
    """The same of round to nearest."""
    return {layer: sum(each.plain_error for each in group) / len(group) for layer, group in _by_layer(figures).items()}


def _by_layer(figures: Sequence[Figure]) -> dict[int, list[Figure]]:
    layers: dict[int, list[Figure]] = {}
    for each in figures:
        if found := _LAYER.match(each.tensor):
            layers.setdefault(int(found[1]), []).append(each)
    return dict(sorted(layers.items()))


def perplexity(folder: Path | Checkpoint, texts: Texts, *, threads: int = 2) -> float:
    """Of a folder; INT8 weights are multiplied as INT8, by the definition."""
    checkpoint = folder if isinstance(folder, Checkpoint) else open_checkpoint(folder, verify_checksums=False)
    return Model(checkpoint, threads=threads).perplexity(texts)


def compare(source: Path | Checkpoint, options: Options, texts: Texts, held_out: Texts, *,
            before: float, beside: Path, steps: Sequence[tuple[str, Recipe]] = STEPS,
            exact_match: Callable[[str, Path], float | None] = lambda name, folder: None,
            progress: Callable[[str, float], None] = lambda words, part: None) -> list[Outcome]:
    """Convert with one technique more at a time, each time into a folder that is thrown away.

    `before` is the source's perplexity; `exact_match` is told a step's name and folder and may answer them too.
    """
    outcomes = []
    for index, (name, recipe) in enumerate(steps):
        progress(f"comparing: {name}", index / len(steps))
        with tempfile.TemporaryDirectory(dir=beside, prefix=".tripool-compare-") as place:
            done = convert(source, Path(place) / "model", replace(options, recipe=recipe), texts=texts)
            after = perplexity(Path(place) / "model", held_out, threads=options.threads)
            outcomes.append(Outcome(name, recipe, mean_error(done.figures), layer_errors(done.figures), after,
                                    after / before - 1, exact_match(name, Path(place) / "model")))
    return outcomes


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    return asdict(outcome)
