"""What a configuration says of how weights are quantised.

Two ways are known: FP8 (E4M3) with a scale for each block, as the published V3 and R1 come, and INT8 with a scale for
each row (output channel) and activations quantised per token when the model runs: the compressed-tensors format
`int-quantized`, as `tripool quantize` and others write it. Anything else is refused by name, never guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tripool.core.errors import ConfigError

SCALE_SUFFIXES = {"F8_E4M3": "_scale_inv", "I8": "_scale"}      # after the name of the tensor they belong to
KINDS = {"F8_E4M3": "FP8", "I8": "INT8"}
LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\..*(_proj|_with_mqa)\.weight")
"""Weights that every writer of the format takes for `Linear`; gate and MTP join differ from one to another."""

KNOWN = ("known are fp8 with block scales, and compressed-tensors of format int-quantized with symmetric 8-bit integer "
         "weights per channel and dynamic symmetric 8-bit integer activations per token")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the weights of a folder are stored."""

    method: Literal["", "fp8", "compressed-tensors"] = ""
    block: tuple[int, int] = (128, 128)       # rows and columns that share one scale of FP8
    ignored: tuple[str, ...] = ()             # modules that stay as they are; `re:` begins a pattern

    def kind_of(self, dtype: str) -> str:
        """Of a stored element type that needs scales, for people."""
        return KINDS[dtype]

    def scale_tile(self, dtype: str, columns: int) -> tuple[int, int]:
        """Rows and columns that share one scale."""
        return (1, columns) if dtype == "I8" else self.block

    def scale_shape(self, dtype: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """What shape the scales of a matrix have, and why."""
        tile = self.scale_tile(dtype, max(1, shape[1]))
        meaning = "a scale for each row" if dtype == "I8" else f"a scale for each block of {tile[0]} by {tile[1]}"
        return tuple(-(-length // each) for length, each in zip(shape, tile, strict=True)), meaning

    def covers(self, tensor: str) -> bool:
        """Whether a tensor is one of those that the configuration says are quantised."""
        module = tensor.removesuffix(".weight")
        return LINEAR.fullmatch(tensor) is not None and not any(
            re.match(each[3:], module) if each.startswith("re:") else each == module for each in self.ignored)


def read_quantisation(config: Mapping[str, Any]) -> Quantisation:
    """What `config.json` says.

    Raises:
        ConfigError: a way of quantising that is not known.
    """
    given = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(given, Mapping):
        raise ConfigError("quantization_config is not an object")
    if not given:
        return Quantisation()
    method = given.get("quant_method", "fp8")
    if method == "compressed-tensors":
        return _compressed_tensors(given)
    if method != "fp8":
        raise ConfigError(f"quantization_config.quant_method is {method!r}; {KNOWN}")
    block = given.get("weight_block_size") or (128, 128)
    if len(block) != 2 or min(block) < 1:
        raise ConfigError(f"quantization_config.weight_block_size is {block!r}; give two positive numbers")
    return Quantisation("fp8", (int(block[0]), int(block[1])))


def _compressed_tensors(given: Mapping[str, Any]) -> Quantisation:
    groups = given.get("config_groups")
    if given.get("format") != "int-quantized":
        raise ConfigError(f"quantization_config.format is {given.get('format')!r}; {KNOWN}")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"quantization_config.config_groups is {groups!r}, so that it is not said what is quantised; "
                          f"{KNOWN}")
    for name, group in groups.items():
        field = f"quantization_config.config_groups.{name}"
        if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
            raise ConfigError(f"{field}.targets is not ['Linear'], the only target that is known")
        wanted = {"weights": {"strategy": "channel", "dynamic": False},
                  "input_activations": {"strategy": "token", "dynamic": True}}
        for part, values in wanted.items():
            found = group.get(part)
            for key, value in {"num_bits": 8, "type": "int", "symmetric": True, **values}.items():
                has = found.get(key, False if key == "dynamic" else None) if isinstance(found, Mapping) else None
                if has != value:
                    raise ConfigError(f"{field}.{part}.{key} is {has!r}, not {value!r}; {KNOWN}")
        if group.get("output_activations"):
            raise ConfigError(f"{field}.output_activations is given; {KNOWN}")
    if given.get("kv_cache_scheme"):
        raise ConfigError(f"quantization_config.kv_cache_scheme is given, a quantised cache; {KNOWN}")
    ignored = given.get("ignore") or []
    for each in ignored:
        try:
            re.compile(str(each).removeprefix("re:"))
        except re.error as error:
            raise ConfigError(f"quantization_config.ignore has {each!r}, which is no pattern: {error}") from error
    return Quantisation("compressed-tensors", ignored=tuple(map(str, ignored)))
