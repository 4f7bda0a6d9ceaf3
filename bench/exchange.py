"""What does a direct exchange save against three collectives?

Every rank has T tokens of width 7,168 (BF16) and one expert, as at the paper's EP320; each token goes to K ranks drawn
at random. `direct`: dispatch with early INT8 and combine in BF16, through shared memory. `gloo`: the conventional
sequence of three all-to-alls, metadata, BF16 tokens, BF16 results, of one row for each token and expert. The experts
do nothing. Both take turns in the same processes; a reading is one exchange there and back, of the slowest rank.

    make bench NAME=exchange ARGS='--json out/exchange.json'
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import Report, flags, in_turn, median
from tripool.engine.parallel import native
from tripool.engine.parallel.direct import DirectExchange
from tripool.engine.parallel.groups import Group, file_store, join_group
from tripool.engine.parallel.segment import Geometry, Segment, create_segment

WIDTH = 7168
TOKENS = (8, 32, 128)
RANKS = (2, 4, 8)
BARS = {"direct_vs_gloo_r2_t8": ">= 10", "direct_vs_gloo_r2_t32": ">= 8", "direct_vs_gloo_r2_t128": ">= 2",
        "direct_r8_t8_p99_us": "<= 2000"}
DEADLINE_S = 300.0


def picks(num_tokens: int, num_ranks: int, num_picks: int, rank: int) -> Tensor:
    """Different ranks for each token; a rank has one slot, so these are slots."""
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(num_tokens, num_ranks, generator=generator).argsort(-1)[:, :num_picks].contiguous()


def directly(exchange: DirectExchange, x_TD: Tensor, slot_TK: Tensor, y_NKD: Tensor) -> None:
    """There and back; results are those that an expert would have left."""
    _, handle = exchange.dispatch(x_TD, slot_TK)
    exchange.combine(handle, y_NKD)


def by_collectives(group: Group, x_TD: Tensor, slot_TK: Tensor, y_ND: Tensor) -> None:
    """Metadata in messages of one size (count, then the token and expert of each row), tokens, results."""
    num_picks, num_ranks = slot_TK.shape[1], group.num_ranks
    slot_P = slot_TK.flatten()
    order_P = slot_P.argsort(stable=True)
    sent = torch.bincount(slot_P, minlength=num_ranks).tolist()
    room = 1 + 2 * x_TD.shape[0]
    metadata = torch.zeros(num_ranks, room, dtype=torch.int32)
    first = 0
    for rank, count in enumerate(sent):
        metadata[rank, 0] = count
        metadata[rank, 1:1 + count] = order_P[first:first + count] // num_picks
        metadata[rank, 1 + count:1 + 2 * count] = slot_P[order_P[first:first + count]]
        first += count
    ones = [1] * num_ranks
    received = group.all_to_all(metadata, ones, ones)[:, 0].tolist()
    group.all_to_all(x_TD.index_select(0, order_P // num_picks).view(torch.int32), sent, received)
    back_PD = group.all_to_all(y_ND.view(torch.int32), received, sent).view(torch.bfloat16)
    torch.empty_like(back_PD).index_copy_(0, order_P, back_PD)


def rank_main(rank: int, num_ranks: int, folder: str, place: str, layout: Geometry, rounds: int, calls: int,
              spin: int | None) -> None:
    """Readings of this rank, for each number of tokens and each way, into a file."""
    torch.set_num_threads(1)
    group = join_group(rank, num_ranks, file_store(Path(folder) / "store", num_ranks), timeout_s=DEADLINE_S)
    fd = os.open(place, os.O_RDWR)
    exchange = DirectExchange(Segment(fd, layout), rank, timeout_s=DEADLINE_S, spin=spin)
    os.close(fd)
    found: dict[str, list[float]] = {}
    for num_tokens in TOKENS:
        x_TD = torch.randn(num_tokens, WIDTH).to(torch.bfloat16)
        slot_TK = picks(num_tokens, num_ranks, layout.num_picks, rank)
        num_pairs = sum(int((picks(num_tokens, num_ranks, layout.num_picks, each) == rank).sum())
                        for each in range(num_ranks))
        y_ND = torch.randn(num_pairs, WIDTH).to(torch.bfloat16)
        ways: dict[str, Callable[[], None]] = {
            "direct": lambda x=x_TD, slot=slot_TK, y=y_ND.unsqueeze(1): directly(exchange, x, slot, y),
            "gloo": lambda x=x_TD, slot=slot_TK, y=y_ND: by_collectives(group, x, slot, y),
        }
        for _, way in in_turn(list(ways), rounds):
            call = ways[way]
            group.exchange_counts([0] * num_ranks)              # all begin a turn together
            for number in range(-2, calls):                     # and warm up in it
                begun = time.perf_counter()
                call()
                if number >= 0:
                    found.setdefault(f"{way}_t{num_tokens}", []).append((time.perf_counter() - begun) * 1e6)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))


def readings(num_ranks: int, num_picks: int, rounds: int, calls: int, spin: int | None) -> dict[str, list[float]]:
    """Microseconds of each exchange, of its slowest rank."""
    layout = Geometry((1,) * num_ranks, max(TOKENS), num_picks, WIDTH)
    fd = create_segment(layout, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    server = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        place = f"/proc/{os.getpid()}/fd/{fd}"
        arguments = (num_ranks, folder, place, layout, rounds, calls, spin)
        processes = [server.Process(target=rank_main, args=(rank, *arguments)) for rank in range(num_ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=2 * DEADLINE_S)
        os.close(fd)
        if any(process.exitcode for process in processes):
            raise SystemExit(f"ranks ended with {[process.exitcode for process in processes]}")
        of_ranks = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
    return {name: [max(readings) for readings in zip(*(found[name] for found in of_ranks), strict=True)]
            for name in of_ranks[0]}


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def add_figures(report: Report, num_ranks: int, found: dict[str, list[float]], suffix: str = "") -> None:
    for num_tokens in TOKENS:
        case = f"r{num_ranks}_t{num_tokens}{suffix}"
        for way in ("direct", "gloo"):
            samples = found[f"{way}_t{num_tokens}"]
            report.figure(f"exchange.{way}_{case}_p50_us", median(samples), "us", samples=samples)
            name = f"{way}_{case}_p99_us"
            bar: dict[str, Any] = {"bar": BARS[name]} if name in BARS else {}
            report.figure(f"exchange.{name}", percentile(samples, 0.99), "us", samples=samples, **bar)
        name = f"direct_vs_gloo_{case}"
        bar = {"bar": BARS[name]} if name in BARS else {}
        ratio = median(found[f"gloo_t{num_tokens}"]) / median(found[f"direct_t{num_tokens}"])
        report.figure(f"exchange.{name}", ratio, "ratio", "derived", **bar)


def add_bytes(report: Report, num_picks: int) -> None:
    """What one rank of eight writes for 128 tokens; of padding, what is written and not what is reserved."""
    num_ranks, num_tokens = 8, 128
    int8, plain = (Geometry((1,) * num_ranks, num_tokens, num_picks, WIDTH, rows) for rows in ("int8", "bfloat16"))
    pairs = num_tokens * num_picks
    report.figure("exchange.dispatch_bytes_int8", pairs * int8.packet_bytes, "bytes", "derived")
    report.figure("exchange.dispatch_bytes_bf16", pairs * plain.packet_bytes, "bytes", "derived")
    report.figure("exchange.combine_bytes_bf16", pairs * int8.result_bytes, "bytes", "derived")
    report.figure("exchange.early_int8_bytes_ratio", 2 * WIDTH / int8.packet_bytes, "ratio", "derived", bar=">= 1.8")


def main() -> None:
    parser = flags(__doc__.splitlines()[0])
    parser.add_argument("--picks", type=int, default=2, help="ranks that each token goes to")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS), help="numbers of ranks")
    parser.add_argument("--spin", type=int, help="pauses before a rank sleeps (default: by ranks and cores)")
    args = parser.parse_args()
    rounds, calls = (3, 10) if args.quick else (10, 50)
    if not native.is_built():
        print("the native module is not built: `direct` runs its slow definition", file=sys.stderr)
    report = Report(__doc__.splitlines()[0], {
        "width": WIDTH, "tokens": TOKENS, "picks": args.picks, "slots_per_rank": 1, "spin": args.spin,
        "rounds": rounds, "calls": calls,
        "native_level": native.kernels().level})
    for num_ranks in args.ranks:
        add_figures(report, num_ranks, readings(num_ranks, args.picks, rounds, calls, args.spin))
    add_bytes(report, args.picks)
    report.write(args.json)


if __name__ == "__main__":
    main()
