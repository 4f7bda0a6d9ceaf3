"""Shapes of models that are simulated and never loaded, by name or by the folder of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import tripool
from tripool.core.errors import ConfigError
from tripool.core.shape import ModelShape, model_shape

FOLDER = Path(tripool.__file__).parent / "models"


def known_models() -> list[str]:
    """Names of the models whose configuration comes with the package."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def read_shape(name_or_path: str) -> ModelShape:
    """The shape of a model: a known name, also at the end of a hub id, a folder with a `config.json`, or such a file.

    Raises:
        ConfigError: nothing was named, it is neither known nor a file, or it is not of the family.
    """
    if not name_or_path:
        raise ConfigError(f"no model was named; give one of {', '.join(known_models())}, or the folder of a checkpoint")
    path = Path(name_or_path)
    name = path.name.lower()
    if name in known_models() and not path.exists():           # deepseek-r1, and deepseek-ai/DeepSeek-R1
        path = FOLDER / name / "config.json"
    elif path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"there is no model {name_or_path!r}: known are {', '.join(known_models())}, and {path} "
                          f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a model's configuration")
    return model_shape(config)
