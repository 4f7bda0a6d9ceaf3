"""How near to the memory's speed are the native operations, and how much faster than torch's?

Weights are larger than the caches and used in turn, as the layers of a model are: matrices of 1408 by 2048 for the
INT8 linear layer, experts of 2048/1408 with six picks a row for the expert FFN. `fp32` and `bf16` are the same in
torch; experts are called as the model does it (one after another), float32 weights lie as the model turns them. A
linear layer's weights are as many bytes there, so fewer matrices. `float_linear_bf16` and the like are the native
operations on weights that are not quantised, against both of torch. `read` only reads the bytes that the native
operation reads. All of them use the same number of threads (`--threads`, one unless given) and take turns; a reading is
the mean time of a call in one turn, and a ratio is one of two readings of the same round.

    make bench NAME=ops ARGS='--json out/ops.json'
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common import Report, flags, in_turn, median
from tripool.core.shape import model_shape
from tripool.engine.model.moe import Experts
from tripool.engine.ops import native
from tripool.engine.ops.expert_ffn import Int8Experts, expert_ffn, pack_experts
from tripool.engine.ops.float_experts import FloatExperts, float_experts
from tripool.engine.ops.float_experts import pack_experts as pack_float_experts
from tripool.engine.ops.float_linear import FloatWeight, float_linear
from tripool.engine.ops.float_linear import pack as pack_floats
from tripool.engine.ops.head_product import head_product
from tripool.engine.ops.int8_linear import Int8Weight, int8_linear, pack
from tripool.engine.ops.rms_norm import add_and_norm, rms_norm_int8
from tripool.engine.ops.rotary import rotate, write_entries
from tripool.engine.ops.router import route
from tripool.engine.ops.tiles import whole
from tripool.engine.ops.weighted_sum import weighted_sum
from tripool.engine.parallel.exchange import Arrived
from tripool.engine.parallel.quantise import dequantise
from tripool.serve.models import EMBEDDED

ROWS = (1, 16, 256)
WIDTH, HIDDEN, PICKS = 2048, 1408, 6
BARS = {"of_bandwidth_m1": ">= 0.85", "of_bandwidth_m16": ">= 0.85"}
GLUE_ROWS, GLUE_CALLS = (1, 8, 32), 15
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}

Call = Callable[[], Any]


def matrices(*shape: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Quantised weights and their scales."""
    return (torch.randint(-127, 128, shape, dtype=torch.int8, generator=chance),
            torch.full(shape[:-1], 2e-2 / 127))


def in_floats(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The same weights for torch. BF16 stays as it is: with it turned, the bench took more than five times as long."""
    weight = dequantise(q, scale, dtype)
    return weight.mT.contiguous().mT if dtype == torch.float32 else weight


def read(*weights: Int8Weight | FloatWeight, matrix: int = 0) -> None:
    """Only read one matrix of each stack."""
    for weight in weights:
        data = weight.data[matrix]
        native.module().read_memory(native.chosen_level(), data.data_ptr(), data.nbytes)


Calls = Callable[[int], dict[str, Iterator[Call]]]


def linear_calls(num_matrices: int, chance: torch.Generator) -> Callable[[int], dict[str, Iterator[Call]]]:
    """For so many rows, endless calls of each way, each with the next weights."""
    plain = [matrices(HIDDEN, WIDTH, chance=chance) for _ in range(num_matrices)]
    packed = [pack(*each) for each in plain]
    floats = {name: [in_floats(*each, dtype) for each in plain[:max(4, num_matrices // dtype.itemsize)]]
              for name, dtype in FLOATS.items()}

    def calls(num_rows: int) -> dict[str, Iterator[Call]]:
        x = torch.randn(num_rows, WIDTH, generator=chance)
        ways = {"read": repeat(packed, read), "int8": repeat(packed, lambda weight: int8_linear(x, weight))}
        for name, dtype in FLOATS.items():
            ways[name] = repeat(floats[name], lambda weight, rows=x.to(dtype): F.linear(rows, weight))
        return ways

    return calls


def float_linear_calls(kind: str, num_matrices: int, chance: torch.Generator) -> Calls:
    """The same with weights that are floats; torch has them in both forms."""
    plain = [torch.randn(HIDDEN, WIDTH, generator=chance) / WIDTH ** 0.5 for _ in range(num_matrices)]
    packed = [pack_floats(each.to(FLOATS[kind])) for each in plain]
    floats = {"fp32": [each.mT.contiguous().mT for each in plain],
              "bf16": [each.bfloat16() for each in plain]}

    def calls(num_rows: int) -> dict[str, Iterator[Call]]:
        x = torch.randn(num_rows, WIDTH, generator=chance)
        ways = {"read": repeat(packed, read), "ours": repeat(packed, lambda weight: float_linear(x, weight))}
        for name, dtype in FLOATS.items():
            ways[name] = repeat(floats[name], lambda weight, rows=x.to(dtype): F.linear(rows, weight))
        return ways

    return calls


def expert_calls(num_experts: int, chance: torch.Generator) -> Callable[[int], dict[str, Iterator[Call]]]:
    """The same for experts; each call has its own picks, the same for all ways."""
    given = (*matrices(num_experts, 2 * HIDDEN, WIDTH, chance=chance),
             *matrices(num_experts, WIDTH, HIDDEN, chance=chance))
    packed = pack_experts(*given)
    floats = {name: Experts(in_floats(*given[:2], dtype), in_floats(*given[2:], dtype), PICKS, whole, tiled=False)
              for name, dtype in FLOATS.items()}

    def calls(num_rows: int) -> dict[str, Iterator[Call]]:
        x = torch.randn(num_rows, WIDTH, generator=chance)
        picks = [torch.rand(num_rows, num_experts, generator=chance).argsort(-1)[:, :PICKS].contiguous()
                 for _ in range(8)]
        row = torch.arange(num_rows).repeat_interleave(PICKS)
        hit = [pick.unique().tolist() for pick in picks]
        ways = {"read": repeat(hit, lambda each: read_experts(packed, each)),
                "int8": repeat(picks, lambda pick: expert_ffn(x, row, pick.flatten(), packed))}
        for name, dtype in FLOATS.items():
            ways[name] = repeat(picks, lambda pick, rows=x.to(dtype), way=floats[name]: way(Arrived(rows, pick)))
        return ways

    return calls


def float_expert_calls(kind: str, num_experts: int, chance: torch.Generator) -> Calls:
    """The same for experts."""
    given = (torch.randn(num_experts, 2 * HIDDEN, WIDTH, generator=chance) / WIDTH ** 0.5,
             torch.randn(num_experts, WIDTH, HIDDEN, generator=chance) / HIDDEN ** 0.5)
    packed = pack_float_experts(*(each.to(FLOATS[kind]) for each in given))
    floats = {"fp32": Experts(*(each.mT.contiguous().mT for each in given), PICKS, whole, tiled=False),
              "bf16": Experts(*(each.bfloat16() for each in given), PICKS, whole, tiled=False)}

    def calls(num_rows: int) -> dict[str, Iterator[Call]]:
        x = torch.randn(num_rows, WIDTH, generator=chance)
        picks = [torch.rand(num_rows, num_experts, generator=chance).argsort(-1)[:, :PICKS].contiguous()
                 for _ in range(8)]
        row = torch.arange(num_rows).repeat_interleave(PICKS)
        hit = [pick.unique().tolist() for pick in picks]
        ways = {"read": repeat(hit, lambda each: read_experts(packed, each)),
                "ours": repeat(picks, lambda pick: float_experts(x, row, pick.flatten(), packed))}
        for name, dtype in FLOATS.items():
            ways[name] = repeat(picks, lambda pick, rows=x.to(dtype), way=floats[name]: way(Arrived(rows, pick)))
        return ways

    return calls


def read_experts(experts: Int8Experts | FloatExperts, hit: list[int]) -> None:
    for expert in hit:
        read(experts.gate_up, experts.down, matrix=expert)


def repeat(things: list[Any], call: Callable[[Any], Any]) -> Iterator[Call]:
    while True:
        for each in things:
            yield lambda each=each: call(each)


def timed(calls: Iterator[Call], count: int) -> float:
    """Microseconds of a call."""
    chosen = [next(calls) for _ in range(count)]
    begun = time.perf_counter()
    for call in chosen:
        call()
    return (time.perf_counter() - begun) / count * 1e6


def add_figures(report: Report, op: str, ways: dict[str, Iterator[Call]], num_rows: int, rounds: int,
                count: int) -> None:
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number, way in in_turn(list(ways), rounds + 1):
        taken = timed(ways[way], count)
        if number:                                              # the first round warms up
            found[way].append(taken)
    for way, samples in found.items():
        report.figure(f"ops.{op}_{way}_m{num_rows}_us", median(samples), "us", samples=samples)
    native_way = list(ways)[1]
    of_bandwidth = [fast / ours for fast, ours in zip(found["read"], found[native_way], strict=True)]
    name = f"of_bandwidth_m{num_rows}"
    bar: dict[str, Any] = {"bar": BARS[name]} if name in BARS and native_way == "int8" else {}
    report.figure(f"ops.{op}_{name}", median(of_bandwidth), "ratio", "derived", samples=of_bandwidth, **bar)
    for way in FLOATS:
        ratios = [theirs / ours for theirs, ours in zip(found[way], found[native_way], strict=True)]
        report.figure(f"ops.{op}_vs_{way}_m{num_rows}", median(ratios), "ratio", "derived", samples=ratios)


def glue_calls(num_rows: int, dtype: torch.dtype, chance: torch.Generator) -> dict[str, tuple[Call, Call]]:
    """What lies between the products of a layer of DeepSeek-V3's form (7,168 wide, 256 experts; 16 heads of the
    attention): compiled, and as torch does it."""
    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance).to(dtype)

    shape = model_shape(json.loads((EMBEDDED / "config.json").read_text()) | {
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4})
    latent, rotary, heads, width = 512, 64, 16, 7168
    x, y, norm, latent_norm = floats(num_rows, width), floats(num_rows, width), floats(width), floats(latent)
    query, key = floats(num_rows, heads, 128 + rotary), floats(heads, 128, latent)
    entry, entries = floats(num_rows, latent + rotary), torch.zeros(num_rows, 16, latent + rotary, dtype=dtype)
    table = torch.polar(torch.ones(num_rows, rotary // 2), torch.rand(num_rows, rotary // 2, generator=chance))
    block = torch.arange(num_rows)
    logits, bias = torch.randn(num_rows, 256, generator=chance), torch.randn(256, generator=chance) / 100
    picked, weight = floats(num_rows, 8, width), torch.rand(num_rows, 8, generator=chance)

    def both(op: Callable[..., Any], *args: Any) -> tuple[Call, Call]:
        return partial(op, *args), partial(op, *args, level=-1)

    return {"add_and_norm": both(add_and_norm, x, y, norm, 1e-6),
            "rms_norm_int8": both(rms_norm_int8, x, norm, 1e-6),
            "rotate": both(rotate, query[..., 128:], table, True),
            "write_entries": both(write_entries, entry, latent_norm, 1e-6, table, True, entries, block, block % 16),
            "route": both(route, logits, bias, shape),
            "weighted_sum": both(weighted_sum, picked, weight, x, y),
            # Float32 is left to torch, but in deterministic mode.
            **({"head_product": both(head_product, query[..., :128], key)} if dtype == torch.bfloat16 else {})}


def add_glue(report: Report, rounds: int, chance: torch.Generator) -> None:
    for (name, dtype), num_rows in itertools.product(FLOATS.items(), GLUE_ROWS):
        for op, (ours, theirs) in glue_calls(num_rows, dtype, chance).items():
            found: dict[str, list[float]] = {"ours": [], "torch": []}
            for number, way in in_turn(list(found), rounds + 1):
                taken = timed(repeat([None], lambda _, call=ours if way == "ours" else theirs: call()), GLUE_CALLS)
                if number:
                    found[way].append(taken)
            label = f"{op}_{name}_m{num_rows}"
            ratios = [theirs / ours for theirs, ours in zip(found["torch"], found["ours"], strict=True)]
            report.figure(f"ops.{label}_us", median(found["ours"]), "us", samples=found["ours"])
            report.figure(f"ops.{label.replace('_m', '_vs_torch_m')}", median(ratios), "ratio", "derived",
                          samples=ratios)


def main() -> None:
    parser = flags(__doc__.splitlines()[0])
    parser.add_argument("--matrices", type=int, help="of the linear layer (default 64; --quick 16)")
    parser.add_argument("--experts", type=int, help="in the stack (default 32; --quick 8)")
    parser.add_argument("--threads", type=int, default=1, help="of kernels and of torch (default 1)")
    args = parser.parse_args()
    if not native.is_built():
        sys.exit("the native module is not built (run `make native`): there is nothing to measure")
    torch.set_num_threads(args.threads)
    native.use_threads(args.threads)
    rounds = 2 if args.quick else 7
    num_matrices = args.matrices or (16 if args.quick else 64)
    num_experts = args.experts or (8 if args.quick else 32)
    report = Report(__doc__.splitlines()[0], {
        "rows": ROWS, "width": WIDTH, "hidden": HIDDEN, "picks": PICKS, "matrices": num_matrices,
        "experts": num_experts, "rounds": rounds, "threads": args.threads, "native_level": native.chosen_level()})
    chance = torch.Generator().manual_seed(0)
    calls_of: dict[str, Callable[[], Calls]] = {
        "int8_linear": lambda: linear_calls(num_matrices, chance),
        "expert_ffn": lambda: expert_calls(num_experts, chance)}
    for kind in FLOATS:
        calls_of[f"float_linear_{kind}"] = lambda kind=kind: float_linear_calls(kind, max(4, num_matrices // 4), chance)
        calls_of[f"float_experts_{kind}"] = lambda kind=kind: float_expert_calls(kind, num_experts, chance)
    for op, make_calls in calls_of.items():
        calls = make_calls()
        for num_rows in ROWS:
            most = num_matrices if "linear" in op else num_experts // PICKS
            count = max(1, most if num_rows == 1 else most // 2 if num_rows < 100 else most // 16)
            add_figures(report, op, calls(num_rows), num_rows, rounds, count)
    add_glue(report, rounds, chance)
    reading = [HIDDEN * WIDTH / 1e3 / each for each in report.samples["ops.int8_linear_read_m1_us"]]
    report.figure("ops.read_gbps", median(reading), "GB/s", samples=reading)
    report.write(args.json)


if __name__ == "__main__":
    main()
