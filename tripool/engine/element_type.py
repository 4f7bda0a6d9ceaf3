"""In which numbers a model is computed. Decided without torch, so that commands which compute nothing can tell too."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tripool.core.shape import ModelShape

WIDENED_BYTES = 4 << 30      # of float32 weights: beyond, memory is dearer than time

BF16_PRODUCTS = {"avx512_bf16", "amx_bf16"}
"""Of these a processor has one or both whose instructions add several products of bfloat16, as compiled kernels use
them."""

_FLAGS = {                   # of processors that multiply a type as it is; oneDNN asks for the same
    "bfloat16": ({"avx512vl", "avx512bw", "avx512dq"}, {"bf16"}),
    "float16": ({"avx512_fp16"}, {"asimdhp"}),
}


def element_type(own: str, shape: ModelShape, dtype: str = "auto", *, deterministic: bool = False,
                 device: str = "cpu", stays: bool = False) -> str:
    """The element type of rows and cache: as told, or the checkpoint's own, or float32 where bits must not vary.

    Left to itself it is float32 on a CPU also for a model whose weights stay bfloat16 (`stays`, see `keeps_weights`),
    and on a processor that multiplies the checkpoint's type by converting every number, which takes several times as
    long, for one whose weights stay as they are and for a small one.
    """
    if deterministic:
        return "float32"
    if dtype != "auto":
        return dtype
    if device.partition(":")[0] == "cpu" and ((stays and own == "bfloat16") or (not multiplies(own) and (
            stays or 4 * shape.params(mtp=True) <= WIDENED_BYTES))):
        return "float32"
    return own


def rounds_rows(own: str, dtype: str = "auto", *, deterministic: bool = False, device: str = "cpu") -> bool:
    """Whether kernels round float32 rows to bfloat16 for attention, and for products with weights of other types.

    Only where nobody asked for other numbers than the checkpoint's own, and this processor is faster for it.
    """
    return (own == "bfloat16" and dtype == "auto" and not deterministic and device.partition(":")[0] == "cpu"
            and not BF16_PRODUCTS.isdisjoint(processor_flags()))


def keeps_weights(quantisation: str) -> bool:
    """Whether kernels multiply weights of this method of quantising in the type in which they are stored."""
    return quantisation != "fp8" and _has_kernels()


def _has_kernels() -> bool:
    return find_spec("tripool._native") is not None


def multiplies(dtype: str) -> bool:
    """Whether this processor has instructions for products of a type."""
    return dtype == "float32" or any(flags <= processor_flags() for flags in _FLAGS[dtype])


def warnings_of(dtype: str, device: str = "cpu") -> list[str]:
    """What makes rows of a type slow here: a processor without instructions for it, kernels that do not take it."""
    if device.partition(":")[0] != "cpu":
        return []
    found = []
    if not multiplies(dtype):
        lacking = ", ".join(sorted(_FLAGS[dtype][0] - processor_flags()))
        found.append(f"this processor has no instructions for products of {dtype} (it lacks {lacking}): every number "
                     "is converted first, which takes several times as long")
    if dtype != "float32" and _has_kernels():
        found.append(f"rows of {dtype} go through PyTorch, in several times the time of compiled kernels, which take "
                     "rows of float32 and round them where that is faster: --dtype auto has those unless the "
                     "checkpoint is FP8 or float16")
    return found


def processor_flags() -> set[str]:
    """Features of this processor, as the kernel calls them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.partition(":")[2].split()}
