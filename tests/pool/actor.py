"""A client process that does what it is told, line by line, and can be stopped or killed at any point of it.

    python -m tests.pool.actor SOCKET

Each line on standard input is a JSON list, a method of `Actor` and its arguments; the answer is a line of JSON.
"""

import json
import os
import signal
import sys
from pathlib import Path

from xxhash import xxh3_64_intdigest

from tests.pool.builders import BLOCK_BYTES, arena_mappings, contents, item, key, keys, places
from tripool.pool.link import BlockView, Link
from tripool.pool.sdk import PoolClient
from tripool.pool.wire import Lease, Leased, Reserve, Reserved, Seal, Sealed, Slot

DEADLINE_S = 1e9          # a stopped actor goes on where it was


class Actor:
    def __init__(self, path: Path) -> None:
        self.client = PoolClient({"cache": path}, timeout_s=20.0)
        self.link = Link("cache", path)
        self.link.connect(20.0)
        self.reserved: dict[int, tuple[str, int, Slot]] = {}
        self.views: dict[int, BlockView] = {}

    def reserve(self, number: int, num_bytes: int = BLOCK_BYTES) -> str:
        reply = self.link.ask(
            Reserved, lambda call: Reserve(call, Link.first_hold(call), [key(number)], [num_bytes]), DEADLINE_S)
        if reply.slots[0] is not None:
            self.reserved[number] = reply.boot_id, Link.first_hold(reply.call), reply.slots[0]
        return reply.statuses[0].name

    def write(self, number: int) -> None:
        boot_id, _, slot = self.reserved[number]
        room = self.link.room(boot_id, slot)
        room[:] = contents(number, slot.num_bytes)

    def seal(self, number: int) -> str:
        _, hold, slot = self.reserved.pop(number)
        checksum = xxh3_64_intdigest(contents(number, slot.num_bytes))
        return self.link.ask(Sealed, lambda call: Seal(call, [hold], [checksum]), DEADLINE_S).statuses[0].name

    def lease(self, *numbers: int) -> int:
        reply = self.link.ask(
            Leased, lambda call: Lease(call, Link.first_hold(call), keys(*numbers), False), DEADLINE_S)
        views = dict(zip(numbers, self.link.views(reply, keys(*numbers)), strict=True))
        self.views |= {number: view for number, view in views.items() if view is not None}
        return len(self.views)

    def all_views_are_right(self) -> bool:
        return bool(self.views) and all(
            view.is_current() and bytes(view.data) == contents(number, view.num_bytes)
            for number, view in self.views.items())

    def close_views(self) -> None:
        for view in self.views.values():
            view.close()
        self.views.clear()

    def drop_socket(self) -> None:
        self.link._socket.close()
        self.link._socket = None

    def reconnect(self) -> None:
        self.link.connect(20.0)

    def put(self, *numbers: int) -> list[str]:
        return [status.name for status in self.client.put([item(number) for number in numbers])]

    def fetch(self, *numbers: int) -> int:
        """How many blocks of a prefix came; -1 when one of them is wrong."""
        into = places(len(numbers))
        count = len(self.client.fetch_prefix(keys(*numbers), into))
        right = all(bytes(into[i]) == contents(numbers[i]) for i in range(count))
        return count if right else -1

    def fork(self) -> int:
        """A child that inherits everything and does nothing."""
        pid = os.fork()
        if pid == 0:
            os.close(0)
            os.close(1)
            signal.pause()
            os._exit(0)
        return pid

    def what_a_forked_child_sees(self, number: int) -> list[object]:
        """(whether it finds a block that exists, its mappings of arenas)."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            answer = [self.client.exists([key(number)])[0], arena_mappings()]
            self.close_views()
            os.write(writing, json.dumps(answer).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            answer = json.loads(pipe.read())
        os.waitpid(pid, 0)
        return answer


if __name__ == "__main__":
    actor = Actor(Path(sys.argv[1]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(actor, method)(*arguments)), flush=True)
