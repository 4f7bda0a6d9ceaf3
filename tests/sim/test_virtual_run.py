"""Many requests through the real control plane in virtual time."""

import hashlib
import random
from dataclasses import replace

import pytest

from tests.sim.builders import NO_CAPS, cluster, run
from tripool.core.deployment import InstanceConfig, ScalingConfig
from tripool.core.messages import Cancel, ChangeRole, Drain, Release
from tripool.core.request import TOKEN_BYTES
from tripool.sim.cluster import Sizes
from tripool.sim.dataplane import ToyPrice
from tripool.sim.host import SimHost
from tripool.sim.links import HealthyLinks
from tripool.sim.workload import SyntheticLoad

FEW = SyntheticLoad(120, 100.0, prompt_tokens=(4, 150), output_tokens=(1, 40), cancel=0.05, logprobs=0.1)


def digest_of_run(seed: int) -> str:
    """Of every message that any machine took, with its time and what was said to it."""
    digest = hashlib.sha256()
    run(cluster(SimHost(record=lambda record: digest.update(repr(record).encode()))), FEW, seed=seed)
    return digest.hexdigest()


@pytest.mark.timeout(900)          # about ten seconds of one core, but the machine may be shared by many
def test_ten_thousand_requests_each_get_their_tokens_and_leave_nothing_behind():
    host = SimHost()
    made = cluster(host)

    run(made, SyntheticLoad(10_000, 500.0, prompt_tokens=(4, 60), output_tokens=(1, 8)), seed=2)

    stats = made.gateway.stats
    assert stats.submitted == 10_000
    assert sum(stats.finished.values()) == 10_000 and stats.failed == {} and stats.retried == {}
    assert stats.late_tokens == stats.forgotten_attempts == 0
    assert stats.cached_tokens > 0
    assert {name.partition("-")[0] for name in made.router.stats.placed} == {"prefill", "decode", "hybrid"}
    assert sum(plane.num_stale_pulls for plane in made.planes.values()) == 0


def test_two_runs_with_one_seed_are_alike_to_the_last_byte_and_another_seed_is_not():
    first = digest_of_run(3)

    assert digest_of_run(3) == first
    assert digest_of_run(4) != first


def test_a_load_on_a_tenth_of_the_blocks_steps_back_and_ends_right():
    made = cluster(SimHost(), prefill=1, decode=1, hybrid=0, sizes=Sizes(200, 40, 1))

    run(made, SyntheticLoad(60, 50.0, prompt_tokens=(16, 64), output_tokens=(100, 200), prefix_tokens=(16, 64),
                            stop=0.0))

    assert made.schedulers["decode-0"].stats.preemptions > 0
    assert made.gateway.stats.retried == {}


def seconds_for_sixteen(num_blocks: int, *, give_up_one: bool) -> float:
    """How long sixteen long outputs take on a decode instance with so many blocks; a request needs 9 in the end."""
    host = SimHost()
    made = cluster(host, prefill=1, decode=1, hybrid=0, sizes=Sizes(600, num_blocks, 1),
                   price=ToyPrice(step_s=0.0005, decode_row_s=0.003))           # a price that rows pay for
    load = SyntheticLoad(16, 1000.0, prompt_tokens=(60, 68), output_tokens=(60, 68), share=0.0, stop=0.0)
    made.start_all()
    made.submit([replace(each, at_s=each.at_s + 1.0) for each in load.arrivals(random.Random(1))])
    decode = made.schedulers["decode-0"]
    if give_up_one:
        assert host.run_while(lambda: decode.stats.preemptions == 0, end_s=20.0)
        host.run_until(host.now + 0.1)
        given_up = next(number for number, each in decode.sequences.items() if each.stepped_back)
        made.client.streams[given_up].cancelled = True
        host.post("gateway", Cancel(given_up))

    assert host.run_while(lambda: made.client.num_open > 0, end_s=100.0)
    seconds = host.now - 1.0

    host.run_until(host.now + 5.0)
    made.check_idle()
    assert made.wrongs == [] and made.gateway.stats.retried == {}
    assert made.schedulers["prefill-0"].stats.requests == 16                     # nobody was prefilled twice
    return seconds


def test_a_decode_cache_for_four_serves_sixteen_though_one_that_stepped_back_is_given_up():
    """Case C16, with its bound on the throughput."""
    assert seconds_for_sixteen(36, give_up_one=True) < seconds_for_sixteen(600, give_up_one=False) / 0.7


def test_the_ranks_of_an_instance_share_its_requests():
    pair = InstanceConfig(count=1, ranks=2, exchange="collective", max_num_seqs=16)
    made = cluster(SimHost(), prefill=0, decode=0, hybrid=pair)

    run(made, FEW)

    first, second = made.schedulers["hybrid-0"].ranks
    assert first.blocks.num_cached and second.blocks.num_cached


def test_a_prefix_computed_by_one_prefill_is_fetched_by_another():
    host = SimHost()
    made = cluster(host, hybrid=0)
    for member in ("prefill-0", "decode-0"):
        made.start(member)
    load = SyntheticLoad(40, 10.0, prompt_tokens=(4, 20), output_tokens=(1, 5), num_prefixes=1, share=1.0,
                         prefix_tokens=(64, 64))
    made.submit(load.arrivals(random.Random(1)))
    host.run_until(1.5)
    made.start("prefill-1")
    host.run_until(2.1)
    host.post("gateway/health", Drain("prefill-0"))

    assert host.run_while(lambda: made.client.num_open > 0, end_s=100.0)

    assert made.wrongs == []
    assert made.planes["prefill-1"].num_fetched_blocks >= 4


def test_a_killed_decode_instance_costs_its_clients_time_but_no_token():
    host = SimHost()
    made = cluster(host, hybrid=0)
    made.start_all()
    made.submit(SyntheticLoad(60, 100.0, output_tokens=(40, 60), stop=0.0).arrivals(random.Random(1)))
    host.run_until(1.0)
    made.kill("decode-1")

    assert host.run_while(lambda: made.client.num_open > 0, end_s=100.0)

    assert made.wrongs == [] and made.gateway.stats.failed == {}
    assert made.gateway.stats.retried["member_down"] > 0


def test_an_instance_that_drains_finishes_what_it_has_and_gets_no_more():
    host = SimHost()
    made = cluster(host, hybrid=0)
    made.start_all()
    made.submit(SyntheticLoad(100, 50.0, output_tokens=(40, 60), stop=0.0).arrivals(random.Random(1)))
    host.run_until(1.5)
    host.post("gateway/health", Drain("decode-1"))
    host.run_until(1.6)
    placed = made.router.stats.placed["decode-1"]

    assert host.run_while(lambda: made.client.num_open > 0, end_s=100.0)

    assert made.router.stats.placed["decode-1"] == placed > 0
    assert made.wrongs == [] and made.gateway.stats.failed == made.gateway.stats.retried == {}
    assert made.schedulers["decode-1"].is_idle


class Forgetful(HealthyLinks):
    """Loses the next message of each process in `muted`."""

    def __init__(self) -> None:
        super().__init__()
        self.muted: set[str] = set()

    def delays_s(self, source: str, target: str, now: float) -> tuple[float, ...]:
        if source in self.muted:
            self.muted.discard(source)
            return ()
        return super().delays_s(source, target, now)


def leave_silently(*members: str, hybrid: int):
    """A run in which decode members drain and the word of it is lost: others place requests there until the next."""
    links = Forgetful()
    host = SimHost(links)
    made = cluster(host, prefill=1, decode=2, hybrid=hybrid, heartbeat_s=0.4)
    made.start_all()
    made.submit(SyntheticLoad(100, 50.0, output_tokens=(40, 60), stop=0.0).arrivals(random.Random(1)))
    host.run_until(1.3)
    for member in members:
        host.post(member, Drain(member))
        links.muted.add(member)
    assert host.run_while(lambda: made.client.num_open > 0, end_s=100.0)
    host.run_until(host.now + 5.0)
    made.check_idle()
    assert made.wrongs == [] and made.gateway.stats.failed == {}
    return made


def test_requests_that_a_draining_decode_instance_refuses_are_prefilled_once():
    """Case C14."""
    made = leave_silently("decode-0", hybrid=0)

    stats = made.gateway.stats
    assert stats.placed_elsewhere > 5 and stats.retried == {}
    assert made.schedulers["prefill-0"].stats.requests == 100
    assert made.schedulers["decode-0"].stats.failures == {"draining": stats.placed_elsewhere}


LONG = SyntheticLoad(60, 200.0, prompt_tokens=(60, 120), output_tokens=(20, 30), share=0.0, stop=0.0)
FAST = ToyPrice(step_s=0.002, chunk_token_s=5e-6)


def test_requests_that_a_full_decode_instance_refuses_go_to_another_or_wait_and_are_prefilled_once():
    """Case C14: decode-0 has room for one request at a time; soon its line is full, and then that of the other too."""
    made = cluster(SimHost(), prefill=1, decode=2, hybrid=0, sizes=Sizes(1000, 40, 1, {"decode-0": 10}), price=FAST)

    run(made, LONG)

    tiny, large = made.schedulers["decode-0"].stats, made.schedulers["decode-1"].stats
    assert tiny.failures["full"] > 0 and large.failures["full"] > 0
    assert tiny.finished > 0 and tiny.finished + large.finished == 60
    assert made.gateway.stats.placed_elsewhere == tiny.failures["full"] + large.failures["full"]
    assert made.schedulers["prefill-0"].stats.requests == 60
    assert made.gateway.stats.retried == made.gateway.stats.failed == {}


def test_a_request_for_which_no_decode_instance_has_room_in_time_ends_with_one_error_and_holds_nothing():
    gateway = replace(NO_CAPS, place_deadline_s=2.0)
    made = cluster(SimHost(), prefill=1, decode=1, hybrid=0, sizes=Sizes(1000, 10, 1), gateway=gateway)

    run(made, LONG)

    late = [stream for stream in made.client.streams.values() if stream.error is not None]
    assert len(late) == made.gateway.stats.failed["queue_full"] > 0
    assert {stream.status for stream in late} == {429} and all("was full for 2 s" in each.error for each in late)
    assert made.schedulers["prefill-0"].stats.requests == 60 and made.gateway.stats.retried == {}


def test_a_stream_that_is_handed_on_and_finds_no_room_is_never_told_that_it_has_not_begun():
    """decode-0 gives its rows away, and decode-1 has room for one at a time."""
    host, gateway = SimHost(), replace(NO_CAPS, place_deadline_s=2.0, max_attempts=2)
    made = cluster(host, prefill=1, decode=2, hybrid=0, sizes=Sizes(1000, 1000, 1, {"decode-1": 16}), gateway=gateway,
                   scaling=ScalingConfig(enabled=True, hold_s=1e6))
    made.start_all()
    load = replace(LONG, output_tokens=(100, 120))
    made.submit([replace(each, at_s=each.at_s + 1.0) for each in load.arrivals(random.Random(1))])
    host.run_until(1.6)
    change = ChangeRole("decode-0", made.schedulers["decode-0"].boot_id, 1, "prefill")
    host.post("decode-0", change)
    host.post("decode-0", replace(change, heard=True), 1.7)
    assert host.run_while(lambda: made.client.num_open > 0, end_s=100.0)
    host.run_until(host.now + 5.0)
    made.check_idle()

    stats, ended = made.gateway.stats, list(made.client.streams.values())
    assert made.wrongs == [] and stats.handed_on > 50
    assert stats.retried["queue_full"] >= stats.failed["queue_full"] > 10
    assert {each.status for each in ended if len(each.tokens) > TOKEN_BYTES} == {200, 503}
    assert any("failed 2 times; first: every decode instance" in each.error for each in ended if each.error)


def test_a_row_comes_back_to_an_instance_that_was_told_to_drop_what_it_held_of_it():
    """decode-0 hands it on, never hears that its blocks were copied, is told to drop them, and then gets it back."""
    host = SimHost()
    made = cluster(host, prefill=1, decode=2, hybrid=0, scaling=ScalingConfig(enabled=True, hold_s=1e6))
    made.start_all()
    load = SyntheticLoad(1, 1000.0, output_tokens=(1200, 1200), stop=0.0)
    made.submit([replace(each, at_s=1.0) for each in load.arrivals(random.Random(1))])
    first = made.schedulers["decode-0"]
    hear = first.handle
    first.handle = lambda message, now: hear(message, now) if not isinstance(message, Release) else []
    for at_s, member, number, role in ((2.0, "decode-0", 1, "prefill"), (6.0, "decode-0", 2, "decode"),
                                       (7.0, "decode-1", 3, "prefill")):
        change = ChangeRole(member, made.schedulers[member].boot_id, number, role)
        host.post(member, change, at_s)
        host.post(member, replace(change, heard=True), at_s + 0.1)
    assert host.run_while(lambda: made.client.num_open > 0, end_s=100.0)
    host.run_until(host.now + 5.0)
    made.check_idle()

    stats = made.gateway.stats
    assert stats.handed_on == 2 and stats.forgotten_attempts > 0
    assert made.wrongs == [] and stats.finished == {"length": 1} and stats.retried == {}


def test_requests_that_every_decode_instance_refuses_go_on_as_another_attempt():
    made = leave_silently("decode-0", "decode-1", hybrid=1)

    assert made.gateway.stats.retried["attempt_failed"] > 0
    assert made.schedulers["hybrid-0"].stats.finished > 0


def test_a_rank_that_is_lost_again_while_the_step_runs_in_which_it_came_back_is_lost():
    host = SimHost()
    pair = InstanceConfig(count=1, ranks=2, exchange="collective", redundant_experts=6, max_num_seqs=8)
    made = cluster(host, prefill=0, decode=0, hybrid=pair, price=ToyPrice(step_s=1.0, load_s=0.2))
    made.start_all()
    made.submit(SyntheticLoad(12, 1000.0, prompt_tokens=(4, 8), output_tokens=(8, 8)).arrivals(random.Random(1)))
    plane, scheduler = made.planes["hybrid-0"], made.schedulers["hybrid-0"]
    host.run_until(1.5)
    made.lose_rank("hybrid-0", 1)
    host.run_until(1.6)                        # a step runs without it, for a second
    made.return_rank("hybrid-0", 1)
    host.run_until(1.9)
    assert plane.lost == {}
    made.lose_rank("hybrid-0", 1)

    assert host.run_while(lambda: made.client.num_open > 0, end_s=100.0)

    assert plane.num_lost_ranks == 2 and scheduler.lost_ranks == [1]
    assert made.wrongs == [] and made.gateway.stats.failed == {}
