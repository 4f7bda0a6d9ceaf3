"""From what a person called a model to a checked folder. Runs in the launcher, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import tripool
from tripool.core.deployment import Deployment, InstanceConfig, ModelConfig
from tripool.core.errors import ConfigError
from tripool.engine.checkpoint import Checkpoint, open_checkpoint
from tripool.engine.hub import model_folder

EMBEDDED = Path(tripool.__file__).parent / "models" / "tiny"
EMBEDDED_NAME = "tripool-tiny"


def resolve(deployment: Deployment,
            notify: Callable[[str], None] = lambda text: None) -> tuple[Deployment, Checkpoint]:
    """A deployment whose model is a checked folder, and what the folder holds.

    Raises:
        CheckpointError: the folder cannot be used; every problem is listed.
        ConfigError: no such model, or the deployment does not fit it.
    """
    model, checkpoint = resolve_model(deployment.model, notify)
    num_experts = checkpoint.shape.num_routed_experts
    for role in ("prefill", "decode", "hybrid"):
        config: InstanceConfig = getattr(deployment, role)
        if config.count and config.ranks > 1 and num_experts % config.ranks:
            raise ConfigError(f"{role}.ranks is {config.ranks}, which does not divide the model's {num_experts} routed "
                              "experts; choose a --dp-size that does")
    return replace(deployment, model=model), checkpoint


def resolve_model(model: ModelConfig,
                  notify: Callable[[str], None] = lambda text: None) -> tuple[ModelConfig, Checkpoint]:
    """The same configuration with an absolute folder and a name, and what the folder holds.

    Raises:
        CheckpointError: the folder cannot be used; every problem is listed.
        ConfigError: no such model, or it cannot be downloaded.
    """
    folder = EMBEDDED if not model.path else model_folder(model.path, model.revision, notify=notify)
    checkpoint = open_checkpoint(folder)
    if model.max_model_len > checkpoint.shape.max_position:
        raise ConfigError(f"model.max_model_len is {model.max_model_len}, but the model was made for "
                          f"{checkpoint.shape.max_position} tokens; give at most that, or leave it out")
    for name in ("tokenizer", "chat_template"):
        given = getattr(model, name)
        if given and not Path(given).exists():
            raise ConfigError(f"model.{name} is {given}, which does not exist")
    served_name = model.served_name or (EMBEDDED_NAME if not model.path else model.path.rstrip("/").rpartition("/")[2])
    resolved = replace(
        model, path=str(folder.resolve()), served_name=served_name,
        tokenizer=str(Path(model.tokenizer).resolve()) if model.tokenizer else "",
        chat_template=str(Path(model.chat_template).resolve()) if model.chat_template else "")
    return resolved, checkpoint
