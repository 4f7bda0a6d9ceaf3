"""How near to the memory's speed are the native operations, and how much faster than torch's?

Weights are larger than the caches and used in turn, as the layers of a model are: matrices of 1408 by 2048 for the
INT8 linear layer, experts of 2048/1408 with six picks a row for the expert FFN. `fp32` and `bf16` are the same in
torch; experts are called as the model does it (one after another), float32 weights lie as the model turns them. A
linear layer's weights are as many bytes there, so fewer matrices. `float_linear_bf16` and the like are the native
operations on weights that are not quantised, against both of torch; rows are rounded to bfloat16 where the engine does
so. `read` only reads the bytes that the native
operation reads.

Attention: 16 heads, 512 + 64 wide entries, contexts of 2,048 in turn. Its roofline is the longer of two times, probed
beside it: reading the entries once, and as many multiplications at the rate of a loop that does nothing else (in
float32, or in bfloat16 where attention rounds to it; without AMX this is mostly the longer one).

`sample` draws the next tokens from 129,280 logits a row. Torch's way draws from `topk` where few tokens are kept, from
a whole sort where a share is, else from the softmax; the definition sorts wherever something is dropped. `logprobs`
tells the log-probability of one token and those of the 20 likeliest; torch's way is `log_softmax` and `topk`.

All of them use the same number of threads (`--threads`, one unless given) and take turns; a reading is the mean time of
a call in one turn, and a ratio is one of two readings of the same round.

    make bench NAME=ops ARGS='--json out/ops.json'
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import Report, flags, in_turn, median
from tripool.core.shape import model_shape
from tripool.engine.element_type import rounds_rows
from tripool.engine.model.moe import Experts
from tripool.engine.ops import native
from tripool.engine.ops.expert_ffn import Int8Experts, expert_ffn, pack_experts
from tripool.engine.ops.float_experts import FloatExperts, float_experts
from tripool.engine.ops.float_experts import pack_experts as pack_float_experts
from tripool.engine.ops.float_linear import FloatWeight, WidenedWeight, float_linear, pack_scaled
from tripool.engine.ops.float_linear import pack as pack_floats
from tripool.engine.ops.head_product import head_product
from tripool.engine.ops.int8_linear import Int8Weight, int8_linear, pack
from tripool.engine.ops.logprobs import logprobs
from tripool.engine.ops.mla import absorbed_attention, absorbed_definition, expanded_attention, expanded_definition
from tripool.engine.ops.rms_norm import add_and_norm, rms_norm_int8
from tripool.engine.ops.rotary import rotate, write_entries
from tripool.engine.ops.router import route
from tripool.engine.ops.sample import DRAW, sample
from tripool.engine.ops.tiles import whole
from tripool.engine.ops.weighted_sum import weighted_sum
from tripool.engine.parallel.exchange import Arrived
from tripool.engine.parallel.quantise import dequantise
from tripool.serve.models import EMBEDDED

ROWS = (1, 16, 256)
WIDTH, HIDDEN, PICKS = 2048, 1408, 6
BARS = {"of_bandwidth_m1": ">= 0.85", "of_bandwidth_m16": ">= 0.85"}
GLUE_ROWS, GLUE_CALLS = (1, 8, 32), 15
OPS = ("mla_decode", "mla_prefill", "int8_linear", "expert_ffn", "float_linear", "float_experts", "add_and_norm",
       "rms_norm_int8", "rotate", "write_entries", "route", "weighted_sum", "head_product", "sample", "logprobs")
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}

Call = Callable[[], Any]
Widened = TypeVar("Widened", bound=WidenedWeight)


def matrices(*shape: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Quantised weights and their scales."""
    return (torch.randint(-127, 128, shape, dtype=torch.int8, generator=chance),
            torch.full(shape[:-1], 2e-2 / 127))


def in_floats(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The same weights for torch. BF16 stays as it is: with it turned, the bench took more than five times as long."""
    weight = dequantise(q, scale, dtype)
    return weight.mT.contiguous().mT if dtype == torch.float32 else weight


def as_multiplied(weight: Widened) -> Widened:
    """With rows as the engine has them: rounded for bfloat16 and integers, where this processor is faster for it."""
    return replace(weight, rounds=is_rounded(weight.data.dtype))


@cache
def is_rounded(dtype: torch.dtype) -> bool:
    """Whether the engine rounds to bfloat16 what it multiplies with numbers of this type."""
    return dtype != torch.float32 and rounds_rows("bfloat16")


def read(*weights: Int8Weight | FloatWeight, matrix: int = 0) -> None:
    """Only read one matrix of each stack."""
    for weight in weights:
        data = weight.data[matrix]
        native.module().read_memory(native.chosen_level(), data.data_ptr(), data.nbytes)


Calls = Callable[[int], dict[str, Iterator[Call]]]


def in_both(weights: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Weights as torch has them: float32 ones turned, as the model turns them where torch multiplies."""
    weights = list(weights)
    return {"fp32": [each.mT.contiguous().mT for each in weights], "bf16": [each.bfloat16() for each in weights]}


def ways_of_linear(name: str, packed: list[Any], ours: Callable[[Tensor, Any], Tensor], floats: dict[str, list[Tensor]],
                   chance: torch.Generator) -> Calls:
    """Reading, our way (by this name) and those of torch, on the same rows."""
    def calls(num_rows: int) -> dict[str, Iterator[Call]]:
        x = torch.randn(num_rows, WIDTH, generator=chance)
        ways = {"read": repeat(packed, read), name: repeat(packed, lambda weight: ours(x, weight))}
        for kind, dtype in FLOATS.items():
            ways[kind] = repeat(floats[kind], lambda weight, rows=x.to(dtype): F.linear(rows, weight))
        return ways

    return calls


def ways_of_experts(name: str, packed: Any, ours: Callable[..., Tensor], floats: dict[str, list[Tensor]],
                    chance: torch.Generator) -> Calls:
    """The same for experts; each call has its own picks, the same for all ways."""
    num_experts = packed.num_experts
    stacks = {kind: Experts(*each, PICKS, whole, tiled=False) for kind, each in floats.items()}

    def calls(num_rows: int) -> dict[str, Iterator[Call]]:
        x = torch.randn(num_rows, WIDTH, generator=chance)
        picks = [torch.rand(num_rows, num_experts, generator=chance).argsort(-1)[:, :PICKS].contiguous()
                 for _ in range(8)]
        row = torch.arange(num_rows).repeat_interleave(PICKS)
        hit = [pick.unique().tolist() for pick in picks]
        ways = {"read": repeat(hit, lambda each: read_experts(packed, each)),
                name: repeat(picks, lambda pick: ours(x, row, pick.flatten(), packed))}
        for kind, dtype in FLOATS.items():
            ways[kind] = repeat(picks, lambda pick, rows=x.to(dtype), way=stacks[kind]: way(Arrived(rows, pick)))
        return ways

    return calls


def linear_calls(num_matrices: int, chance: torch.Generator) -> Calls:
    """For so many rows, endless calls of each way, each with the next weights."""
    plain = [matrices(HIDDEN, WIDTH, chance=chance) for _ in range(num_matrices)]
    floats = {kind: [in_floats(*each, dtype) for each in plain[:max(4, num_matrices // dtype.itemsize)]]
              for kind, dtype in FLOATS.items()}
    return ways_of_linear("int8", [pack(*each) for each in plain], int8_linear, floats, chance)


def float_linear_calls(kind: str, num_matrices: int, chance: torch.Generator) -> Calls:
    """The same with weights that are floats; torch has them in both forms."""
    plain = [torch.randn(HIDDEN, WIDTH, generator=chance) / WIDTH ** 0.5 for _ in range(num_matrices)]
    packed = [as_multiplied(pack_floats(each.to(FLOATS[kind]))) for each in plain]
    return ways_of_linear("ours", packed, float_linear, in_both(plain), chance)


def expert_calls(num_experts: int, chance: torch.Generator) -> Calls:
    given = (*matrices(num_experts, 2 * HIDDEN, WIDTH, chance=chance),
             *matrices(num_experts, WIDTH, HIDDEN, chance=chance))
    floats = {kind: [in_floats(*given[:2], dtype), in_floats(*given[2:], dtype)] for kind, dtype in FLOATS.items()}
    return ways_of_experts("int8", pack_experts(*given), expert_ffn, floats, chance)


def float_expert_calls(kind: str, num_experts: int, chance: torch.Generator) -> Calls:
    given = (torch.randn(num_experts, 2 * HIDDEN, WIDTH, generator=chance) / WIDTH ** 0.5,
             torch.randn(num_experts, WIDTH, HIDDEN, generator=chance) / HIDDEN ** 0.5)
    packed = pack_float_experts(*(each.to(FLOATS[kind]) for each in given))
    packed = FloatExperts(as_multiplied(packed.gate_up), as_multiplied(packed.down))
    return ways_of_experts("ours", packed, float_experts, in_both(given), chance)


def read_experts(experts: Int8Experts | FloatExperts, hit: list[int]) -> None:
    for expert in hit:
        read(experts.gate_up, experts.down, matrix=expert)


HEADS, LATENT, ROTARY, PLAIN, VALUE, CONTEXT, BLOCK_TOKENS = 16, 512, 64, 128, 128, 2048, 64
MULTIPLIES = 1 << 24                       # of the probe: long beside what a call from Python takes
SCALE = 0.05
QUERY_TILE = 128


def add_decode(report: Report, dtype: torch.dtype, num_contexts: int, num_tokens: int, rounds: int,
               chance: torch.Generator) -> None:
    """Absorbed attention of one row with so many tokens, over a context that lies scattered in memory."""
    width, num_blocks = LATENT + ROTARY, CONTEXT // BLOCK_TOKENS
    entries = torch.randn(num_contexts * num_blocks, BLOCK_TOKENS, width, generator=chance).to(dtype)
    tables = torch.randperm(num_contexts * num_blocks, generator=chance).view(num_contexts, 1, num_blocks)
    query = torch.randn(num_tokens, HEADS, width, generator=chance).to(dtype)
    row = torch.tensor([CONTEXT - num_tokens]), torch.tensor([num_tokens])
    barred = torch.zeros(1, 1, CONTEXT, dtype=dtype)
    context_bytes = CONTEXT * width * dtype.itemsize

    def best_torch(table: Tensor) -> Tensor:
        entry_1NW = entries.flatten(1).index_select(0, table[0]).view(1, CONTEXT, width)
        logits = torch.baddbmm(barred, query.view(1, -1, width), entry_1NW.transpose(1, 2), alpha=SCALE)
        return torch.bmm(logits.softmax(-1), entry_1NW[..., :LATENT])

    ways = {
        "read": repeat(list(range(num_contexts)), lambda number: native.module().read_memory(
            native.chosen_level(), entries.data_ptr() + number * context_bytes, context_bytes)),
        "multiply": multiplying(dtype),
        "native": repeat(list(tables), lambda table: absorbed_attention(query, entries, table, *row, scale=SCALE,
                                                                        latent=LATENT, rounds=is_rounded(dtype))),
        "torch": repeat(list(tables), best_torch),
        "definition": repeat(list(tables), lambda table: absorbed_definition(query, entries, table, *row, SCALE, LATENT,
                                                                             0)),
    }
    multiplies = CONTEXT * num_tokens * HEADS * (width + LATENT)
    name = f"mla_decode_{'bf16' if dtype == torch.bfloat16 else 'fp32'}_q{num_tokens}"
    found = readings(ways, rounds, num_contexts)
    roof = [max(read, multiply * multiplies / MULTIPLIES)
            for read, multiply in zip(found["read"], found["multiply"], strict=True)]
    add_attention(report, name, found, roof, "ops.mla_decode_of_roofline" if name == "mla_decode_bf16_q1" else "")


def add_prefill(report: Report, dtype: torch.dtype, num_tokens: int, rounds: int, chance: torch.Generator) -> None:
    """Expanded attention of a prompt."""
    expanded = torch.randn(num_tokens, HEADS, PLAIN + VALUE, generator=chance).to(dtype)
    key, value = expanded.split([PLAIN, VALUE], dim=-1)
    rotary = torch.randn(num_tokens, ROTARY, generator=chance).to(dtype)
    query, rotated = (torch.randn(num_tokens, HEADS, each, generator=chance).to(dtype) for each in (PLAIN, ROTARY))

    def best_torch(_: None) -> Tensor:
        key_HxN = torch.cat([key, rotary.unsqueeze(1).expand(-1, HEADS, -1)], dim=-1).permute(1, 2, 0)
        query_HCx, value_HNv = torch.cat([query, rotated], dim=-1).transpose(0, 1) * SCALE, value.transpose(0, 1)
        parts = []
        for start in range(0, num_tokens, QUERY_TILE):
            stop = min(start + QUERY_TILE, num_tokens)
            logits = torch.bmm(query_HCx[:, start:stop], key_HxN[..., :stop])
            logits[..., start:] += torch.full((stop - start, stop - start), -torch.inf, dtype=dtype).triu_(1)
            parts.append(torch.bmm(logits.softmax(-1), value_HNv[:, :stop]).transpose(0, 1))
        return torch.cat(parts)

    given = (query, rotated, key, rotary, value)
    ways = {
        "multiply": multiplying(dtype),
        "native": repeat([None], lambda _: expanded_attention(*given, first=0, scale=SCALE, rounds=is_rounded(dtype))),
        "torch": repeat([None], best_torch),
        "definition": repeat([None], lambda _: expanded_definition(*given, 0, SCALE)),
    }
    multiplies = num_tokens * (num_tokens + 1) // 2 * HEADS * (PLAIN + ROTARY + VALUE)
    found = readings(ways, rounds, 1)
    roof = [multiply * multiplies / MULTIPLIES for multiply in found["multiply"]]
    add_attention(report, f"mla_prefill_{'bf16' if dtype == torch.bfloat16 else 'fp32'}_{num_tokens}", found, roof, "")


def multiplying(dtype: torch.dtype) -> Iterator[Call]:
    """Products from registers, of numbers as attention multiplies them."""
    return repeat([MULTIPLIES], lambda count: native.module().multiply_numbers(
        native.chosen_level(), is_rounded(dtype), count))


def readings(ways: dict[str, Iterator[Call]], rounds: int, count: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number, way in in_turn(list(ways), rounds + 1):
        taken = timed(ways[way], 1 if way == "definition" else count)
        if number:                                              # the first round warms up
            found[way].append(taken)
    return found


def add_attention(report: Report, name: str, found: dict[str, list[float]], roof: list[float], barred: str) -> None:
    for way, samples in found.items():
        report.figure(f"ops.{name}_{way}_us", median(samples), "us", samples=samples)
    of_roof = [least / ours for least, ours in zip(roof, found["native"], strict=True)]
    report.figure(f"ops.{name}_of_roofline", median(of_roof), "ratio", "derived", samples=of_roof)
    if barred:
        report.figure(barred, median(of_roof), "ratio", "derived", samples=of_roof, bar=">= 0.6")
    for way in ("torch", "definition"):
        ratios = [theirs / ours for theirs, ours in zip(found[way], found["native"], strict=True)]
        report.figure(f"ops.{name}_vs_{way}", median(ratios), "ratio", "derived", samples=ratios)


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
    plain, (q, scale) = query[..., :128], matrices(heads, 128, latent, chance=chance)
    absorbed = as_multiplied(pack_floats(key.transpose(1, 2)))
    absorbed_int8 = as_multiplied(pack_scaled(q.transpose(1, 2), scale.unsqueeze(1)))
    entry, entries = floats(num_rows, latent + rotary), torch.zeros(num_rows, 16, latent + rotary, dtype=dtype)
    table = torch.polar(torch.ones(num_rows, rotary // 2), torch.rand(num_rows, rotary // 2, generator=chance))
    block = torch.arange(num_rows)
    logits, bias = torch.randn(num_rows, 256, generator=chance), torch.randn(256, generator=chance) / 100
    picked, weight = floats(num_rows, 8, width), torch.rand(num_rows, 8, generator=chance)

    def both(op: Callable[..., Any], *args: Any) -> tuple[Call, Call]:
        return partial(op, *args), partial(op, *args, level=-1)

    def by_torch() -> Tensor:
        return torch.bmm(plain.transpose(0, 1), key).transpose(0, 1)

    return {"add_and_norm": both(add_and_norm, x, y, norm, 1e-6),
            "rms_norm_int8": both(rms_norm_int8, x, norm, 1e-6),
            "rotate": both(rotate, query[..., 128:], table, True),
            "write_entries": both(write_entries, entry, latent_norm, 1e-6, table, True, entries, block, block % 16),
            "route": both(route, logits, bias, shape),
            "weighted_sum": both(weighted_sum, picked, weight, x, y),
            "head_product": (partial(head_product, plain, absorbed), by_torch),
            "head_product_int8": (partial(head_product, plain, absorbed_int8), by_torch)}


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


VOCABULARY = 129_280
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0}, "plain": {}, "top_k": {"top_k": 50}, "top_p": {"top_p": 0.9},
    "top_k_p": {"top_k": 50, "top_p": 0.9}, "large_k_p": {"top_k": 1000, "top_p": 0.95}, "min_p": {"min_p": 0.05}}


def best_torch(logits: Tensor, filters: dict[str, float]) -> Tensor:
    """Tokens drawn as others do it, with torch's own randomness."""
    if filters.get("temperature") == 0:
        return logits.argmax(-1)
    top_k, top_p, min_p = int(filters.get("top_k", 0)), filters.get("top_p", 1.0), filters.get("min_p", 0.0)
    ids = None
    if top_k:
        logits, ids = logits.topk(top_k, -1)
    elif top_p < 1:
        logits, ids = logits.sort(-1, descending=True)
    share = logits.softmax(-1)
    if top_p < 1:
        share.masked_fill_(share.cumsum(-1) - share >= top_p, 0.0)
    if min_p:
        share.masked_fill_(share < min_p * share.amax(-1, keepdim=True), 0.0)
    token = torch.multinomial(share, 1)
    return token if ids is None else ids.gather(-1, token)


def add_sampling(report: Report, rounds: int, chance: torch.Generator) -> None:
    """The next token of each row, for each kind of filter."""
    for num_rows, (name, filters) in itertools.product(GLUE_ROWS, FILTERS.items()):
        logits = torch.randn(num_rows, VOCABULARY, generator=chance) * 3
        draw = np.zeros(num_rows, DRAW)
        draw["temperature"] = draw["top_p"] = 1.0
        draw["position"] = np.arange(num_rows)
        for field, value in filters.items():
            draw[field] = value
        calls: dict[str, Call] = {"ours": partial(sample, logits, draw), "torch": partial(best_torch, logits, filters),
                                  "definition": partial(sample, logits, draw, level=-1)}
        ways = {way: repeat([None], lambda _, call=call: call()) for way, call in calls.items()}
        found = readings(ways, rounds, 3)
        report.figure(f"ops.sample_{name}_m{num_rows}_us", median(found["ours"]), "us", samples=found["ours"])
        for way in ("torch", "definition"):
            ratios = [theirs / ours for theirs, ours in zip(found[way], found["ours"], strict=True)]
            report.figure(f"ops.sample_{name}_vs_{way}_m{num_rows}", median(ratios), "ratio", "derived", samples=ratios)


def add_summary(report: Report) -> None:
    """Each operation beside the best that torch can do, over all cells: the least of the means, and the worst cell.

    Float32 weights that are rounded to bfloat16 are others, so this is no way to multiply by them.
    """
    cells: dict[str, dict[str, float]] = {op: {} for op in OPS}
    for figure in report.figures:
        found = re.fullmatch(r"ops\.(\w+?)_vs_(torch|fp32|bf16)(_m\d+)?", figure["name"])
        if found and not (found[1].endswith("_fp32") and found[2] == "bf16"):
            op, cell = next(each for each in OPS if found[1].startswith(each)), f"{found[1]}{found[3] or ''}"
            cells[op][cell] = min(figure["value"], cells[op].get(cell, math.inf))
    means = {op: statistics.geometric_mean(each.values()) for op, each in cells.items() if each}
    least = min(means, key=lambda op: means[op])
    report.figure("ops.geomean_vs_torch", means[least], "ratio", "derived", op=least, all=means, bar=">= 1.5")
    every = {cell: ratio for each in cells.values() for cell, ratio in each.items()}
    worst = min(every, key=lambda cell: every[cell])
    report.figure("ops.worst_vs_torch", every[worst], "ratio", "derived", cell=worst, bar=">= 0.95")


def add_logprobs(report: Report, rounds: int, chance: torch.Generator) -> None:
    """Log-probabilities of a token of each row, and of the 20 likeliest."""
    for num_rows in GLUE_ROWS:
        logits = torch.randn(num_rows, VOCABULARY, generator=chance) * 3
        row, token = np.arange(num_rows), np.arange(num_rows)

        def by_torch(logits: Tensor = logits, token: Tensor = torch.from_numpy(token)) -> tuple[Tensor, ...]:
            logprob = logits.log_softmax(-1)
            return logprob.gather(1, token.unsqueeze(-1)), *logprob.topk(20, -1)

        calls: dict[str, Call] = {"ours": partial(logprobs, logits, row, token, 20), "torch": by_torch}
        found = readings({way: repeat([None], lambda _, call=call: call()) for way, call in calls.items()}, rounds, 3)
        ratios = [theirs / ours for theirs, ours in zip(found["torch"], found["ours"], strict=True)]
        report.figure(f"ops.logprobs_m{num_rows}_us", median(found["ours"]), "us", samples=found["ours"])
        report.figure(f"ops.logprobs_vs_torch_m{num_rows}", median(ratios), "ratio", "derived", samples=ratios)


def main() -> None:
    parser = flags(__doc__.splitlines()[0])
    parser.add_argument("--matrices", type=int, help="of the linear layer (default 64; --quick 16)")
    parser.add_argument("--experts", type=int, help="in the stack (default 32; --quick 8)")
    parser.add_argument("--threads", type=int, default=1, help="of kernels and of torch (default 1)")
    parser.add_argument("--contexts", type=int, default=8, help="of attention, that take turns")
    args = parser.parse_args()
    if not native.is_built():
        sys.exit("the native module is not built (run `make native`): there is nothing to measure")
    torch.set_num_threads(args.threads)
    native.use_threads(args.threads)
    rounds = 2 if args.quick else 7
    num_matrices = args.matrices or (16 if args.quick else 64)
    num_experts = args.experts or (8 if args.quick else 32)
    chance = torch.Generator().manual_seed(0)
    report = Report(__doc__.splitlines()[0], {
        "attention": {"heads": HEADS, "latent": LATENT, "rotary": ROTARY, "context": CONTEXT,
                      "contexts": args.contexts},
        "rows": ROWS, "width": WIDTH, "hidden": HIDDEN, "picks": PICKS, "matrices": num_matrices,
        "experts": num_experts, "rounds": rounds, "threads": args.threads, "native_level": native.chosen_level()})
    for dtype in FLOATS.values():
        for num_tokens in (1, 4):
            add_decode(report, dtype, args.contexts, num_tokens, rounds, chance)
        add_prefill(report, dtype, 128 if args.quick else 512, rounds, chance)
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
    add_sampling(report, rounds, chance)
    add_logprobs(report, rounds, chance)
    add_summary(report)
    reading = [HIDDEN * WIDTH / 1e3 / each for each in report.samples["ops.int8_linear_read_m1_us"]]
    report.figure("ops.read_gbps", median(reading), "GB/s", samples=reading)
    report.write(args.json)


if __name__ == "__main__":
    main()
