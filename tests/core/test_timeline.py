"""A timeline is played to fresh machines, and every other decision is told with its place."""

from tripool.core.machine import Send
from tripool.core.messages import Tick
from tripool.core.timeline import Mismatch, Record, replay


class Counter:
    """Says how many messages it has had, and when."""

    def __init__(self) -> None:
        self.count = 0

    def handle(self, message, now):
        self.count += 1
        return [Send("elsewhere", Tick(f"{now:g}", self.count))]


def records(*times: float) -> list[Record]:
    machine = Counter()
    return [Record(at, "counter", Tick("any"), tuple(machine.handle(Tick("any"), at))) for at in times]


def test_fresh_machines_say_the_same_again():
    assert replay({"counter": Counter()}, records(0.0, 1.5, 1.5)) == []


def test_every_other_decision_is_told_with_what_was_said_instead():
    recorded = records(0.0, 1.0, 2.0)

    mismatches = replay({"counter": Counter()}, [recorded[0], recorded[2]])

    assert mismatches == [Mismatch(1, recorded[2], (Send("elsewhere", Tick("2", 2)),))]
    assert "record 1: counter at 2.000000 s" in str(mismatches[0])


def test_records_of_machines_that_are_not_there_are_passed_over():
    assert replay({}, records(0.0)) == []
