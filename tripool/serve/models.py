"""From what a person called a model to a checked folder. Runs in the launcher, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import tripool
from tripool.core.deployment import EMBEDDED_NAME, Deployment, InstanceConfig, ModelConfig
from tripool.core.errors import ConfigError
from tripool.core.messages import ROLES
from tripool.core.placement import Geometry, even_geometry, initial_placement
from tripool.core.shape import ModelShape
from tripool.engine.checkpoint import Checkpoint, open_checkpoint
from tripool.engine.element_type import element_type, keeps_weights
from tripool.engine.hub import model_folder
from tripool.engine.model.layout import check_mtp
from tripool.engine.parallel.segment import exchange_geometry

EMBEDDED = Path(tripool.__file__).parent / "models" / "tiny"


def resolve(deployment: Deployment,
            notify: Callable[[str], None] = lambda text: None) -> tuple[Deployment, Checkpoint]:
    """A deployment whose model is a checked folder, and what the folder holds.

    Raises:
        CheckpointError: the folder cannot be used; every problem is listed.
        ConfigError: no such model, or the deployment does not fit it.
    """
    model, checkpoint = resolve_model(deployment.model, notify)
    for role in ROLES:
        config: InstanceConfig = getattr(deployment, role)
        if config.count:
            try:
                check_experts(checkpoint, model, config)
            except ConfigError as error:
                raise ConfigError(f"{role}: {error}") from error
    return replace(deployment, model=model), checkpoint


def check_experts(checkpoint: Checkpoint, model: ModelConfig, config: InstanceConfig) -> None:
    """See that experts and exchange of an instance can be laid out, and that there is a layer to draft with.

    Raises:
        ConfigError: they cannot, or there is none; names the number to change.
    """
    if config.num_speculative_tokens:
        check_mtp(checkpoint.shape)
    geometry = expert_geometry(checkpoint.shape, config)
    if config.how_to_exchange == "direct":
        exchange_geometry(checkpoint.shape, config, initial_placement(geometry, 1), kind_of(checkpoint, model))


def kind_of(checkpoint: Checkpoint, model: ModelConfig) -> str:
    """The element type in which a model is computed."""
    return element_type(checkpoint.dtype, checkpoint.shape, model.dtype, deterministic=model.deterministic,
                        device=model.device, stays=keeps_weights(checkpoint.quantisation.method))


def expert_geometry(shape: ModelShape, config: InstanceConfig) -> Geometry:
    """The expert slots of each rank of an instance.

    Raises:
        ConfigError: no map of experts fits; names the number to change.
    """
    if config.shared_expert_copies and shape.num_shared_experts != 1:
        raise ConfigError(f"shared_expert_copies is {config.shared_expert_copies}, but the model's shared expert is "
                          f"{shape.num_shared_experts} times as wide as a routed one, and slots hold one: set it to 0")
    return even_geometry(config.ranks, shape.num_routed_experts, num_redundant=config.redundant_experts,
                         num_shared_copies=config.shared_expert_copies, num_groups=shape.num_groups,
                         num_nodes=config.expert_nodes)


def folder_of(model: str, revision: str | None = None, notify: Callable[[str], None] = lambda text: None) -> Path:
    """The folder of a model: the embedded one's for no name and for its own, unless a folder here has that name.

    Raises:
        ConfigError: no such model, or it cannot be downloaded.
    """
    if not model or (model == EMBEDDED_NAME and not Path(model).exists()):
        return EMBEDDED
    return model_folder(model, revision, notify=notify)


def resolve_model(model: ModelConfig,
                  notify: Callable[[str], None] = lambda text: None) -> tuple[ModelConfig, Checkpoint]:
    """The same configuration with an absolute folder and a name, and what the folder holds.

    Raises:
        CheckpointError: the folder cannot be used; every problem is listed.
        ConfigError: no such model, or it cannot be downloaded.
    """
    folder = folder_of(model.path, model.revision, notify)
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
