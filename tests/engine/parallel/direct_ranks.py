"""What each rank does in `test_direct`: a process of its own that leaves what it saw in files."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.engine.parallel.builders import CAPACITY, COUNTS, exchanged, experts, geometry, picks, tokens
from tripool.core.errors import AbortedError, LostRanksError
from tripool.engine.model.turns import Turns, all_to_the_end
from tripool.engine.parallel.direct import DirectExchange
from tripool.engine.parallel.exchange import CollectiveExchange
from tripool.engine.parallel.groups import file_store, join_group
from tripool.engine.parallel.native import kernels
from tripool.engine.parallel.segment import Geometry, Segment

SLOTS = {2: (3, 1), 4: (2, 0, 3, 1), 8: (1, 2, 1, 0, 1, 1, 2, 1)}
TURNS = 24                          # layers that two microbatches take in turns
MODES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "bfloat16"))


def layout_of(num_ranks: int, mode: tuple[str, str]) -> Geometry:
    return geometry(SLOTS[num_ranks], rows=mode[0], results=mode[1])


def mixes(num_ranks: int) -> list[tuple[int, ...]]:
    """Tokens of each rank in each layer: all mixes for two ranks, some for more, and every count on every rank."""
    if num_ranks == 2:
        return [(a, b) for a in COUNTS for b in COUNTS]
    draw = random.Random(num_ranks)
    return [(count,) * num_ranks for count in COUNTS] + [
        tuple(draw.choice(COUNTS) for _ in range(num_ranks)) for _ in range(24)]


def layer_input(mode: tuple[str, str], layout: Geometry, layer: int, rank: int, count: int) -> tuple[Any, Any]:
    """Every third layer all tokens want the experts of the first rank that has enough of them."""
    dtype = torch.bfloat16 if mode[0] == "bfloat16" else torch.float32
    crowded = [rank for rank, slots in enumerate(layout.slots_of_rank) if slots >= layout.num_picks][:1]
    return (tokens(count, 100 * layer + rank, dtype=dtype),
            picks(count, layout, 100 * layer + rank, ranks=crowded if layer % 3 == 2 else None))


def opened(place: str, layout: Geometry, rank: int, **options: Any) -> DirectExchange:
    """This rank's end of a segment that lives in another process."""
    torch.set_num_threads(1)
    fd = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    try:
        return DirectExchange(Segment(fd, layout), rank, **options)
    finally:
        os.close(fd)


def note(folder: Path, rank: int, **found: Any) -> None:
    (folder / f"note{rank}.json").write_text(json.dumps(found))


def all_mixes(rank: int, num_ranks: int, folder: Path, places: list[str], level: int) -> None:
    """All modes and mixes, layer after layer, ranks late by chance; then two layers in flight at once."""
    results: dict[str, torch.Tensor] = {}
    nap = random.Random(rank)
    for mode, place in zip(MODES, places, strict=True):
        layout = layout_of(num_ranks, mode)
        exchange = opened(place, layout, rank, kernels=kernels(level))
        for layer, counts in enumerate(mixes(num_ranks)):
            if nap.random() < 0.2:
                time.sleep(nap.random() * 0.005)
            x, slot = layer_input(mode, layout, layer, rank, counts[rank])
            results[f"{mode[0]}.{layer}"] = exchanged(exchange, rank, layout, x, slot)
        for pair in range(4):           # microbatches: more than fits in one of them, nothing in another
            halves = [layer_input(mode, layout, pair, rank, (0, 3, 2 * CAPACITY + 1)[(pair + rank + half) % 3])
                      for half in (0, 1)]
            flying = [exchange.dispatch(*half) for half in halves]
            for half, (arrived, handle) in enumerate(flying):
                y = experts(arrived.x_ND, arrived.expert_NK + layout.first_slot[rank])
                results[f"{mode[0]}.half.{pair}.{half}"] = exchange.combine(handle, y)
        outputs = all_to_the_end([layers_of_half(exchange, mode, layout, rank, half) for half in (0, 1)])
        results |= {f"{mode[0]}.turn.{half}": output for half, output in enumerate(outputs)}
    save_file(results, folder / f"rank{rank}.safetensors")


def half_input(mode: tuple[str, str], layout: Geometry, layer: int, rank: int, half: int) -> tuple[Any, Any]:
    """Of two microbatches in each layer: nothing in one of them, or as much as fits in both."""
    return layer_input(mode, layout, layer, rank, (0, CAPACITY, 1, 3)[(layer + rank + half) % 4])


def layers_of_half(exchange: DirectExchange, mode: tuple[str, str], layout: Geometry, rank: int, half: int) -> Turns:
    """One microbatch through many layers, as a model runs it; all its results."""
    nap, outputs = random.Random(10 * rank + half), []
    for layer in range(TURNS):
        sent = exchange.begin_dispatch(*half_input(mode, layout, layer, rank, half))
        yield
        if nap.random() < 0.2:
            time.sleep(nap.random() * 0.003)
        arrived, handle = exchange.finish_dispatch(sent)
        back = exchange.begin_combine(handle, experts(arrived.x_ND, arrived.expert_NK + layout.first_slot[rank]))
        yield
        outputs.append(exchange.finish_combine(back))
    return torch.cat(outputs)


def collective_mixes(rank: int, num_ranks: int, folder: Path) -> None:
    """The same over gloo, in float32."""
    torch.set_num_threads(1)
    layout = layout_of(num_ranks, MODES[0])
    group = join_group(rank, num_ranks, file_store(folder / "store", num_ranks), timeout_s=60)
    exchange = CollectiveExchange(group, layout.slots_of_rank)
    save_file({f"float32.{layer}": exchanged(exchange, rank, layout,
                                             *layer_input(MODES[0], layout, layer, rank, counts[rank]))
               for layer, counts in enumerate(mixes(num_ranks)[:12])}, folder / f"collective{rank}.safetensors")


def idle_then_busy(rank: int, num_ranks: int, folder: Path, place: str, layout: Geometry, num_layers: int) -> None:
    """All tokens are rank 0's, then nobody's, then anyone's; says how much processor time it took."""
    exchange = opened(place, layout, rank)
    draw = random.Random(1)
    right = True
    for layer in range(num_layers):
        counts = [layer % 2 * 3 if each == 0 else 0 for each in range(num_ranks)]
        if layer > num_layers // 2:
            counts = [draw.choice((0, 1, CAPACITY)) for _ in range(num_ranks)]
        x, slot = tokens(counts[rank], layer), picks(counts[rank], layout, layer)
        right &= torch.equal(exchanged(exchange, rank, layout, x, slot), experts(x, slot))
    note(folder, rank, right=right, layers=num_layers)


def late_sender(rank: int, num_ranks: int, folder: Path, place: str, layout: Geometry) -> None:
    """Rank 0 is long asleep when the others begin."""
    exchange = opened(place, layout, rank)
    exchanged(exchange, rank, layout, tokens(1, 1), picks(1, layout, 1))
    before = exchange.counted
    if rank:
        time.sleep(0.4)
    x, slot = tokens(2, rank), picks(2, layout, rank)
    out = exchanged(exchange, rank, layout, x, slot)
    note(folder, rank, right=torch.equal(out, experts(x, slot)),
         **{name: count - before[name] for name, count in exchange.counted.items()})


def dies(rank: int, num_ranks: int, folder: Path, place: str, layout: Geometry, phase: str) -> None:
    """The last rank is killed before it takes part in a phase; the others go on without it."""
    exchange = opened(place, layout, rank, timeout_s=30.0)
    exchanged(exchange, rank, layout, tokens(2, rank), picks(2, layout, rank))
    exchange.timeout_s = 2.0
    lost = num_ranks - 1
    if rank == lost and phase == "dispatch":
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        arrived, handle = exchange.dispatch(tokens(2, rank), picks(2, layout, rank))
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange.combine(handle, experts(arrived.x_ND, arrived.expert_NK + layout.first_slot[rank]))
        error: Exception | None = None
    except (LostRanksError, AbortedError) as caught:
        error = caught
        exchange.abort()
    waited_s = time.monotonic() - begun
    exchange.timeout_s = 30.0
    exchange.reset(1, range(lost))
    x, slot = tokens(3 * CAPACITY, rank), picks(3 * CAPACITY, layout, rank, ranks=range(lost))
    right = torch.equal(exchanged(exchange, rank, layout, x, slot), experts(x, slot))
    note(folder, rank, right=right, waited_s=waited_s, kind=type(error).__name__, message=str(error),
         ranks=list(getattr(error, "ranks", [])), phase=getattr(error, "phase", ""))


def stops_and_comes_back(rank: int, num_ranks: int, folder: Path, place: str, layout: Geometry) -> None:
    """The last rank stops; the others mask it, work on, and take it back when it runs again."""
    exchange = opened(place, layout, rank, timeout_s=30.0)
    exchanged(exchange, rank, layout, tokens(2, rank), picks(2, layout, rank))
    lost, right = num_ranks - 1, True
    if rank == lost:
        (folder / "stopping").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)                       # the test wakes it when the others are done
    else:
        exchange.timeout_s = 1.0
    try:
        exchanged(exchange, rank, layout, tokens(2, rank), picks(2, layout, rank))
        error = ""
    except (LostRanksError, AbortedError) as caught:
        error = type(caught).__name__
        if rank != lost:
            exchange.abort()
    exchange.timeout_s = 60.0
    if rank != lost:
        exchange.reset(1, range(lost))
        for layer in range(5):
            x, slot = tokens(layer, rank), picks(layer, layout, rank, ranks=range(lost))
            right &= torch.equal(exchanged(exchange, rank, layout, x, slot), experts(x, slot))
        (folder / f"without{rank}").touch()
    exchange.reset(2, range(num_ranks))
    for layer in range(5):
        x, slot = tokens(2 * layer, rank), picks(2 * layer, layout, rank)
        right &= torch.equal(exchanged(exchange, rank, layout, x, slot), experts(x, slot))
    note(folder, rank, right=right, error=error)


def waits_long(rank: int, num_ranks: int, folder: Path, place: str, layout: Geometry) -> None:
    """The last rank never comes, and the deadline is far; someone else aborts."""
    exchange = opened(place, layout, rank, timeout_s=300.0)
    (folder / f"waiting{rank}").touch()
    try:
        exchange.dispatch(tokens(1, rank), picks(1, layout, rank))
        found = "nothing"
    except AbortedError:
        found = "aborted"
    note(folder, rank, found=found, ended=time.monotonic())


def obeys(rank: int, num_ranks: int, place: str, layout: Geometry, orders: Any) -> None:
    """Runs layers in the epochs it is told, and says how each ended: whether all results were right, and the error."""
    exchange = opened(place, layout, rank)
    while (order := orders.recv()) is not None:
        epoch, live, num_layers, timeout_s = order
        right, error = True, ""
        try:
            exchange.timeout_s = 30.0
            exchange.reset(epoch, live)
            exchange.timeout_s = timeout_s
            for layer in range(num_layers):
                count = COUNTS[(epoch + layer + rank) % len(COUNTS)]
                x, slot = tokens(count, layer), picks(count, layout, layer, ranks=live)
                right &= torch.equal(exchanged(exchange, rank, layout, x, slot), experts(x, slot))
        except (LostRanksError, AbortedError) as caught:
            error = type(caught).__name__
            exchange.abort()
        orders.send((right, error))
