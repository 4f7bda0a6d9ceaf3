"""What a model is called: by those who simulate its shape, and by those who serve its weights."""

from __future__ import annotations

from pathlib import Path

from tripool.core.deployment import EMBEDDED_NAME
from tripool.core.shape import ModelShape
from tripool.sim.costs.models import read_shape

SERVED = {"deepseek-r1": "deepseek-ai/DeepSeek-R1", "tiny": EMBEDDED_NAME}
"""Of the shapes that are known by name, where their weights are."""


def shape_of(name: str) -> ModelShape:
    """The shape of a model by any of its names: a known one, what a deployment calls it, a folder.

    Raises:
        ConfigError: there is no such model, or it is not of the family.
    """
    known = {path: short for short, path in SERVED.items()}
    return read_shape(name if Path(name).exists() else known.get(name, name))


def path_of(name: str) -> str:
    """What a deployment calls a model of that shape, so that `serve` finds its weights and `simulate` its shape."""
    path = Path(name)
    if path.exists():
        return str(path.parent if path.is_file() else path)
    return SERVED.get(name.lower(), name)
