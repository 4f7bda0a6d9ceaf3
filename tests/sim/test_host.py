"""The virtual host: time, order, lives."""

import random

from tripool.core.machine import Send
from tripool.core.messages import Tick
from tripool.sim.host import SimHost
from tripool.sim.links import FaultRates, FaultyLinks, HealthyLinks, Outage


class Echo:
    """Notes what it gets, and says what it was told to say to it."""

    def __init__(self, replies=None) -> None:
        self.got = []
        self.replies = replies or {}

    def handle(self, message, now):
        self.got.append((now, message.token))
        return self.replies.get(message.token, [])


def test_messages_at_one_time_come_in_the_order_in_which_they_were_sent():
    host, echo = SimHost(), Echo()
    host.add("a", echo)
    for number in range(20):
        host.post("a", Tick("", number), 1.0)

    host.run_until(1.0)

    assert [token for _, token in echo.got] == list(range(20))


def test_messages_are_handled_in_order_of_time_however_far_ahead_they_were_sent():
    generator = random.Random(1)
    times_s = [generator.randrange(1, 400) / 64 for _ in range(300)] + [1000.0, 0.125, 0.124999, 30.0]
    host, echo = SimHost(), Echo({0: [Send("a", Tick("", 1000 + number), delay_s)
                                      for number, delay_s in enumerate(times_s)]})
    host.add("a", echo)
    for number, at_s in enumerate(times_s, start=1):
        host.post("a", Tick("", number), at_s)
    host.post("a", Tick("", 0), 0.0)

    for end_s in (0.3, 2.0, 2.0, 500.0, 2000.0):
        host.run_until(end_s)
        assert all(at_s <= end_s for at_s, _ in echo.got)

    sent = [(at_s, number) for number, at_s in enumerate(times_s, start=1)]
    again = [(at_s, 1000 + number) for number, at_s in enumerate(times_s)]
    assert echo.got[1:] == sorted(sent + again, key=lambda each: each[0])


def test_a_message_that_is_taken_back_is_not_delivered_and_others_are():
    host, echo = SimHost(), Echo()
    host.add("a", echo)
    numbers = [host.post("a", Tick("", token), 1.0) for token in range(3)]
    due = host.post("a", Tick("", 3))

    host.withdraw(numbers[1])
    host.withdraw(due)                         # too late
    host.run_until(2.0)

    assert [token for _, token in echo.got] == [3, 0, 2]


def test_a_link_between_processes_takes_time_and_the_inside_of_one_does_not():
    host = SimHost(HealthyLinks(0.25))
    one = Echo({0: [Send("a/near", Tick("", 1)), Send("b", Tick("", 2)), Send("a", Tick("", 3), 2.0)]})
    near, far = Echo(), Echo()
    for address, machine in (("a", one), ("a/near", near), ("b", far)):
        host.add(address, machine)
    host.post("a", Tick("", 0), 1.0)

    host.run_until(10.0)

    assert near.got == [(1.0, 1)] and far.got == [(1.25, 2)] and one.got == [(1.0, 0), (3.0, 3)]
    assert host.now == 10.0


def test_a_killed_process_takes_its_timers_with_it():
    host, echo = SimHost(), Echo({0: [Send("a", Tick("", 1), 2.0)]})
    host.add("a", echo)
    host.post("a", Tick("", 0), 0.0)
    host.run_until(1.0)
    host.kill("a")
    again = Echo()
    host.add("a", again)
    host.post("a", Tick("", 5))

    host.run_until(9.0)

    assert again.got == [(1.0, 5)]


def test_a_stopped_process_gets_late_what_came_meanwhile():
    host, echo = SimHost(), Echo()
    host.add("a", echo)
    host.stop("a")
    host.post("a", Tick("", 1), 1.0)
    host.run_until(5.0)
    assert echo.got == []

    host.resume("a")
    host.run_until(6.0)

    assert echo.got == [(5.0, 1)]


def test_faulty_links_lose_repeat_and_delay_and_are_healthy_afterwards():
    links = FaultyLinks(random.Random(1), FaultRates(0.3, 0.3, 0.3, max_delay_s=2.0), end_s=10.0, latency_s=0.1)
    kinds = {len(links.delays_s("a", "b", 1.0)) for _ in range(100)}
    late = [delay for _ in range(100) for delay in links.delays_s("a", "b", 1.0) if delay > 0.1]

    assert kinds == {0, 1, 2} and late and max(late) <= 2.1
    assert {links.delays_s("a", "b", 10.0) for _ in range(100)} == {(0.1,)}


def test_an_outage_cuts_a_process_off_in_both_directions():
    links = FaultyLinks(random.Random(1), FaultRates(), (Outage("b", 1.0, 2.0),))

    assert links.delays_s("a", "b", 1.5) == links.delays_s("b", "a", 1.5) == ()
    assert links.delays_s("a", "b", 2.0) != () and links.delays_s("a", "c", 1.5) != ()
