"""One instance from the first message to the last: what it computes, what it holds, and how it lets go."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.control.builders import (
    GATEWAY,
    HEALTH,
    ROUTER,
    Instance,
    decode_with,
    hash_of,
    make_grant,
    output_token,
    request,
    whole_output,
)
from tripool.control import context, decode, ended, scheduler
from tripool.control.stats import ALARMING_DRAFTS, SchedulerStats
from tripool.core import messages as m
from tripool.core.machine import Send
from tripool.core.request import pack_tokens


def failures(instance):
    return [(failed.request_id, failed.retry) for failed in instance.told(m.AttemptFailed)]


# ---------------------------------------------------------------- starting and telling


def test_an_instance_says_hello_and_loads_before_anything_else():
    instance = Instance("prefill", load=False)

    assert instance.told(m.Hello, HEALTH) == [m.Hello("prefill-0", "prefill", "boot-1")]
    assert instance.told(m.Heartbeat, HEALTH)[0].state == "loading"
    assert isinstance(instance.verb(m.Load), m.Load)


def test_a_second_start_changes_nothing():
    instance = Instance(load=False)

    assert instance.say(m.Tick("start")) == []
    assert len(instance.verbs) == 1


def test_a_request_that_comes_while_loading_is_sent_back():
    instance = Instance(load=False)
    instance.prefill(request(1))

    assert failures(instance) == [(1, True)]
    assert "is loading" in instance.told(m.AttemptFailed)[0].cause


def test_progress_of_loading_is_told():
    instance = Instance(load=False)
    instance.say(m.LoadProgress(0.5))
    instance.beat()

    assert instance.told(m.Heartbeat)[-1].load_fraction == 0.5


def test_an_instance_that_cannot_load_is_down():
    instance = Instance(load=False)
    instance.fail(instance.verb(m.Load))

    assert instance.told(m.Heartbeat)[-1].state == "down"


def test_a_heartbeat_tells_load_and_comes_again():
    instance = Instance("prefill", num_blocks=10, budget=8)
    instance.prefill(request(1, 20))
    instance.prefill(request(2, 8))

    due = instance.next_beat
    sends = instance.machine.handle(due, 0.2)

    beat = next(send.message for send in sends if send.to == HEALTH)
    assert (beat.state, beat.role, beat.in_step) == ("up", "prefill", True)
    assert (beat.num_running, beat.num_waiting, beat.num_waiting_tokens, beat.num_free_blocks) == (1, 1, 28, 3)
    assert beat.facts == instance.facts
    assert Send("prefill-0", m.Tick("heartbeat", due.token + 1), 0.2) in sends


def test_a_heartbeat_timer_that_comes_twice_does_not_beat_twice():
    instance = Instance()
    due = instance.next_beat
    assert len(instance.say(due)) == 1

    assert instance.say(due) == []


def test_progress_grows_with_every_step():
    instance = Instance()
    instance.prefill(request(1, 4, max_tokens=6))
    progress = []
    for _ in range(3):
        instance.beat()
        progress.append(instance.told(m.Heartbeat)[-1].progress)
        instance.step()

    assert progress[0] < progress[1] < progress[2]


def test_heartbeats_name_attempts_that_are_old_the_oldest_first():
    instance = Instance("prefill", num_blocks=8)
    instance.prefill(request(2, 8), attempt=3)
    instance.work()                                      # handed over, waits for a release
    instance.say(m.Prefill(request(1, 8), 1), after_s=2.0)
    instance.work()
    instance.beat(after_s=scheduler.HELD_AFTER_S - 1.0)

    assert instance.told(m.Heartbeat)[-1].held == ((2, 3),)


# ---------------------------------------------------------------- a request alone


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 16, 17, 40])
def test_a_hybrid_instance_computes_a_request_to_its_end(num_prompt):
    instance = Instance("hybrid")
    req = request(1, num_prompt, max_tokens=7)
    instance.prefill(req)
    instance.work()

    assert instance.output(1) == whole_output(req)
    assert instance.done(1) == [m.Done(1, 1, "length", 7)]
    assert instance.is_at_rest()


def test_a_stop_token_ends_a_request():
    stop = output_token(1, 2)
    instance = Instance("hybrid")
    instance.prefill(request(1, 5, max_tokens=7, stop=[stop]))
    instance.work()

    assert instance.done(1) == [m.Done(1, 1, "stop", 3, stop)]
    assert instance.is_at_rest()


def test_a_request_of_one_token_ends_on_the_prefill_instance():
    instance = Instance("prefill")
    instance.prefill(request(1, 9, max_tokens=1))
    instance.work()

    assert instance.done(1) == [m.Done(1, 1, "length", 1)]
    assert instance.told(m.Prefilled) == []
    assert instance.is_at_rest()


def test_what_earlier_attempts_emitted_is_computed_like_the_prompt():
    instance = Instance("hybrid")
    req = request(1, 6, max_tokens=6)
    instance.prefill(req, attempt=2, emitted=whole_output(req)[:3])
    instance.work()

    assert instance.output(1) == whole_output(req)[3:]
    assert instance.done(1) == [m.Done(1, 2, "length", 6)]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget():
    instance = Instance("prefill", budget=16)
    instance.prefill(request(1, 40))
    instance.work()

    assert [chunks for chunks in instance.chunk_log if chunks] == [{0: 16}, {0: 16}, {0: 8}]


def test_a_chunk_that_leaves_one_token_is_followed_by_a_step_that_names_none():
    instance = Instance("prefill", budget=16)
    req = request(1, 17)
    instance.prefill(req)
    instance.step()
    assert instance.output(1) == []
    instance.step()

    assert instance.chunk_log == [{0: 16}, {}]
    assert instance.output(1) == whole_output(req)[:1]


def test_an_idle_instance_runs_no_steps():
    instance = Instance("hybrid")
    instance.prefill(request(1, 4, max_tokens=3))

    assert instance.work() == 3
    instance.beat()
    assert instance.verbs == []


def test_tokens_go_to_each_gateway_once_per_step():
    instance = Instance("hybrid", budget=32)
    for number, gateway in ((1, "gateway"), (2, "gateway-b"), (3, "gateway")):
        instance.prefill(replace(request(number, 4, max_tokens=2), reply_to=gateway))
    instance.step()                            # the first request alone: the others came while it ran
    instance.sent.clear()
    instance.step()

    assert [send.to for send in instance.sent] == ["gateway", "gateway-b"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(("role", "prompt", "retry", "word"), [
    ("prefill", 400, False, "128 tokens"), ("hybrid", 128, False, "32 blocks"),
    ("hybrid", 0, False, "at least one token"), ("decode", 8, True, "decode instance"),
])
def test_a_request_that_can_never_be_computed_is_refused_with_the_reason(role, prompt, retry, word):
    instance = Instance(role)
    instance.prefill(request(1, prompt))

    (failed,) = instance.told(m.AttemptFailed)
    assert (failed.retry, word in failed.cause) == (retry, True), failed.cause
    assert instance.is_at_rest()


def test_a_request_beyond_the_context_window_is_refused():
    instance = Instance("hybrid", max_model_len=10)
    instance.prefill(request(1, 10))

    (failed,) = instance.told(m.AttemptFailed)
    assert not failed.retry and "context window of 10" in failed.cause


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(12, 5), (16, 1)])
def test_a_request_that_fits_exactly_runs_alone(num_prompt, max_tokens):
    instance = Instance("hybrid", num_blocks=4)
    req = request(1, num_prompt, max_tokens)
    instance.prefill(req)
    instance.work()

    assert instance.output(1) == whole_output(req)


# ---------------------------------------------------------------- handing over


def test_a_prefilled_request_is_offered_with_the_sum_of_every_block():
    instance = Instance("prefill")
    req = request(1, 10, max_tokens=5)
    instance.prefill(req)
    instance.step()

    (prefilled,) = instance.told(m.Prefilled, ROUTER)
    grant = prefilled.grant
    assert prefilled.num_tokens == 11
    assert (grant.source, grant.boot_id, grant.layout, grant.num_tokens) == ("prefill-0", "boot-1", "layout", 10)
    arena = instance.arenas[0]
    assert [part.checksum for part in grant.parts] == [hash_of(arena.contents[part.block]) for part in grant.parts]
    assert [part.generation for part in grant.parts] == [arena.generations[part.block] for part in grant.parts]
    assert len(grant.parts) == 3


def test_the_first_token_is_sent_before_the_blocks_are_offered():
    instance = Instance("prefill")
    instance.prefill(request(1, 10))
    instance.sent.clear()
    instance.step()

    assert [type(send.message) for send in instance.sent] == [m.Tokens, m.Prefilled]


def test_blocks_of_a_long_prompt_are_summed_as_they_fill():
    instance = Instance("prefill", budget=8)
    instance.prefill(request(1, 18))
    sealed = []
    while not instance.told(m.Prefilled):
        sealed.append(len(instance.verb(m.Run).plan.sections[0].seals))
        instance.step()

    assert sealed == [2, 2, 1]


def test_a_block_is_summed_only_once():
    instance = Instance("prefill", budget=64)
    for number in (1, 2):
        instance.prefill(request(number, prompt=[*range(8), number]))
        instance.work()

    seals = [len(verb.plan.sections[0].seals) for verb in instance.done_verbs if isinstance(verb, m.Run)]
    assert [count for count in seals if count] == [3, 1]


def test_handed_over_blocks_stay_until_they_are_released():
    instance = Instance("prefill", num_blocks=4, prefix_caching=False)
    instance.prefill(request(1, 14))
    instance.work()
    instance.prefill(request(2, 8))
    assert not instance.has_verb(m.Run)                    # no room: the first request's blocks are promised
    assert instance.stats.num_handed_over == 1

    instance.say(m.Release(1, 1))
    instance.work()

    assert [prefilled.request_id for prefilled in instance.told(m.Prefilled)] == [1, 2]


def test_a_release_of_another_attempt_is_ignored():
    instance = Instance("prefill")
    instance.prefill(request(1, 8), attempt=2)
    instance.work()
    instance.say(m.Release(1, 1))

    assert instance.stats.num_handed_over == 1


def test_a_release_before_the_row_has_left_frees_nothing_under_the_engine():
    instance = Instance("prefill", prefix_caching=False)
    instance.prefill(request(1, 8))
    instance.step()
    instance.say(m.Release(1, 1))
    assert instance.stats.num_quarantined_blocks == 2
    instance.step()

    assert instance.is_at_rest() and instance.stats.num_free_blocks == 32


def test_an_engine_that_does_not_sum_a_block_fails_the_attempt_only():
    instance = Instance("prefill")
    instance.prefill(request(1, 8))
    run = instance.verb(m.Run)
    instance.verbs.remove(run)
    ran = instance._carry_out(run)
    ranks = (replace(ran.result.ranks[0], sums=()),)
    instance.say(replace(ran, result=replace(ran.result, ranks=ranks)))
    instance.work()

    assert failures(instance) == [(1, True)]
    assert instance.is_at_rest()


# ---------------------------------------------------------------- cached context


def test_a_cached_prefix_is_not_computed_again():
    instance = Instance("hybrid", budget=64)
    shared = list(range(20))
    first, second = request(1, prompt=[*shared, 50]), request(2, prompt=[*shared, 60, 61])
    instance.prefill(first)
    instance.work()
    instance.prefill(second)
    instance.work()

    assert (instance.cached(1), instance.cached(2)) == ([0], [20])
    assert instance.output(2) == whole_output(second)
    assert instance.stats.local_hit_tokens == 20
    assert instance.is_at_rest()


def test_at_least_the_last_token_is_computed_even_if_the_whole_prompt_is_cached():
    instance = Instance("hybrid")
    for number in (1, 2):
        instance.prefill(request(number, prompt=list(range(16))))
        instance.work()

    assert instance.cached(2) == [12]


def test_running_requests_share_the_blocks_of_a_common_prefix():
    instance = Instance("hybrid", num_blocks=9, budget=64, max_num_seqs=2)
    shared = list(range(24))
    instance.prefill(request(1, prompt=[*shared, 1], max_tokens=8))
    instance.step()
    instance.prefill(request(2, prompt=[*shared, 2], max_tokens=3))
    instance.step()

    assert instance.stats.num_running == 2
    assert instance.stats.num_held_blocks == 9 - instance.stats.num_free_blocks < 2 * 7
    instance.work()
    assert [len(instance.output(number)) for number in (1, 2)] == [8, 3]
    assert instance.is_at_rest()


def test_a_cached_prefix_is_evicted_from_its_end():
    instance = Instance("hybrid", num_blocks=5, budget=64)
    instance.prefill(request(1, prompt=list(range(13)), max_tokens=1))
    instance.work()
    instance.prefill(request(2, 10, max_tokens=1))            # takes the two free blocks and one that is cached
    instance.work()
    instance.prefill(request(3, prompt=list(range(13)), max_tokens=1))
    instance.work()

    assert instance.cached(3) == [8]


def test_a_cached_block_of_a_grant_goes_on_serving_others():
    instance = Instance("prefill", num_blocks=8, budget=64)
    shared = list(range(8))
    for number in (1, 2):
        instance.prefill(request(number, prompt=[*shared, number]))
        instance.work()
    first, second = (prefilled.grant.parts for prefilled in instance.told(m.Prefilled))
    assert first[:2] == second[:2] and first[2] != second[2]

    instance.say(m.Release(1, 1))
    assert instance.stats.num_held_blocks == 3
    instance.say(m.Release(2, 1))
    assert instance.is_at_rest() and instance.stats.num_cached_blocks == 2


def test_tenants_with_different_salts_share_nothing():
    instance = Instance("hybrid")
    for number, salt in ((1, b"a"), (2, b"b")):
        instance.prefill(request(number, prompt=list(range(16)), salt=salt))
        instance.work()

    assert instance.cached(2) == [0]


def test_nothing_is_reused_or_stored_with_prefix_caching_off():
    instance = Instance("hybrid", prefix_caching=False, cache=True)
    for number in (1, 2):
        instance.prefill(request(number, prompt=list(range(16))))
        instance.work()

    assert instance.cached(2) == [0]
    assert instance.stats.num_cached_blocks == 0
    assert not any(isinstance(verb, m.Fetch | m.Store) for verb in instance.done_verbs)


def test_a_request_that_wants_log_probabilities_of_its_prompt_takes_no_cached_prefix():
    instance = Instance("hybrid", budget=64)
    instance.prefill(request(1, prompt=list(range(16))))
    instance.work()
    instance.prefill(request(2, prompt=list(range(16)), num_prompt_logprobs=0))
    instance.work()

    assert instance.cached(2) == [0]
    assert instance.output(2) == whole_output(request(2))


def test_flushing_forgets_what_nobody_uses():
    instance = Instance("hybrid")
    instance.prefill(request(1, prompt=list(range(16))))
    instance.work()
    instance.say(m.Flush())
    instance.prefill(request(2, prompt=list(range(16))))
    instance.work()

    assert instance.cached(2) == [0]


# ---------------------------------------------------------------- the pool


def test_what_one_instance_computed_another_fetches_from_the_pool():
    pool = {}
    first = Instance("prefill", cache=True, pool=pool, budget=64)
    first.prefill(request(1, prompt=list(range(22))))
    first.work()
    second = Instance("prefill", cache=True, pool=pool, budget=64, member="prefill-1")
    second.prefill(request(2, prompt=list(range(22))))
    second.work()

    assert len(pool) == 5
    assert second.cached(2) == [20] and second.stats.pool_hit_tokens == 20
    grants = [instance.told(m.Prefilled)[0].grant for instance in (first, second)]
    assert [part.checksum for part in grants[0].parts] == [part.checksum for part in grants[1].parts]


def test_local_blocks_come_first_and_only_the_following_keys_are_fetched():
    pool = {}
    other = Instance("prefill", cache=True, pool=pool, budget=64)
    other.prefill(request(1, prompt=list(range(30))))
    other.work()
    instance = Instance("hybrid", cache=True, pool=pool, budget=64)
    instance.prefill(request(2, prompt=list(range(10)), max_tokens=1))
    instance.work()
    instance.prefill(request(3, prompt=list(range(30)), max_tokens=1))

    fetch = instance.verb(m.Fetch)
    assert len(fetch.keys) == 5                    # of seven full blocks before the last token, two are here
    instance.work()
    assert instance.cached(3) == [28]


def test_a_fetch_delays_only_its_own_request():
    instance = Instance("prefill", cache=True, budget=64)
    instance.prefill(request(1, 20))
    instance.prefill(request(2, 3))                # has no full block to ask for

    assert instance.has_verb(m.Fetch)
    instance.step()
    assert [prefilled.request_id for prefilled in instance.told(m.Prefilled)] == [2]


def test_a_failed_fetch_is_a_miss():
    instance = Instance("hybrid", cache=True)
    req = request(1, 20)
    instance.prefill(req)
    instance.fail(instance.verb(m.Fetch))
    instance.work()

    assert instance.cached(1) == [0] and instance.output(1) == whole_output(req)
    assert instance.is_at_rest()


def test_only_blocks_that_the_pool_lacks_are_stored():
    instance = Instance("hybrid", cache=True, budget=64, store_generated=False)
    instance.prefill(request(1, prompt=list(range(12)), max_tokens=2))
    instance.work()
    instance.prefill(request(2, prompt=[*range(12), 90, 91, 92, 93, 94], max_tokens=2))
    instance.work()

    stores = [verb for verb in instance.done_verbs if isinstance(verb, m.Store)]
    assert [len(store.keys) for store in stores] == [3, 1]


def test_two_requests_that_computed_the_same_offer_it_once():
    instance = Instance("hybrid", cache=True, budget=64)
    for number in (1, 2):
        instance.prefill(request(number, prompt=list(range(8)), max_tokens=1))
    instance.work()

    assert sum(len(verb.keys) for verb in instance.done_verbs if isinstance(verb, m.Store)) == 2


def test_blocks_written_while_decoding_are_stored_when_asked_for():
    def stored(store_generated):
        instance = Instance("hybrid", cache=True, budget=64, store_generated=store_generated)
        instance.prefill(request(1, 8, max_tokens=10))
        instance.work()
        return len(instance.pool)

    assert (stored(True), stored(False)) == (4, 2)


def test_a_failed_store_is_tried_again_by_the_next_user():
    instance = Instance("hybrid", cache=True, budget=64)
    for number in (1, 2):
        instance.prefill(request(number, prompt=list(range(9)), max_tokens=1))
        while instance.verbs:
            if isinstance(instance.verbs[0], m.Store) and number == 1:
                instance.fail(instance.verbs[0])
            else:
                instance.answer(instance.verbs[0])

    assert len(instance.pool) == 2
    assert instance.is_at_rest()


def test_blocks_that_are_being_stored_are_not_given_out():
    instance = Instance("hybrid", num_blocks=4, cache=True, budget=64)
    instance.prefill(request(1, 12, max_tokens=1))
    instance.answer(instance.verb(m.Fetch))
    instance.step()
    assert instance.stats.num_quarantined_blocks == 1
    instance.prefill(request(2, 14, max_tokens=1))
    assert not instance.has_verb(m.Run) and not instance.has_verb(m.Fetch)

    instance.work()
    assert instance.done(2)


def test_a_slow_pool_keeps_only_a_part_of_the_blocks_from_being_used():
    instance = Instance("hybrid", num_blocks=32, cache=True, budget=64)
    for number in range(1, 8):
        instance.prefill(request(number, 12, max_tokens=1))
        instance.answer(instance.verb(m.Fetch))
        instance.step()

    assert [len(verb.blocks) for verb in instance.verbs if isinstance(verb, m.Store)] == [3, 3, 2]
    assert instance.stats.num_quarantined_blocks == 32 // context.STORE_SHARE
    assert instance.stats.stores_skipped_blocks > 0
    instance.work()
    assert instance.is_at_rest()


def test_after_a_failed_fetch_the_pool_is_left_alone_for_a_while():
    instance = Instance("hybrid", cache=True)
    instance.prefill(request(1, 8))
    instance.fail(instance.verb(m.Fetch))
    instance.prefill(request(2, 8))
    assert not instance.has_verb(m.Fetch)

    instance.say(m.Prefill(request(3, 8), 1), after_s=context.FETCH_PAUSE_S)
    assert instance.has_verb(m.Fetch)


def test_what_was_pulled_is_not_stored_again():
    req = request(1, 8, max_tokens=10)
    instance, grants = decode_with(req, cache=True)
    instance.admit(req, grants[1])
    instance.work()

    assert len(instance.pool) == 2                     # of four full blocks, the prefill instance offered two


# ---------------------------------------------------------------- sharing a step


def test_a_short_request_gets_its_first_token_beside_a_long_one():
    instance = Instance("prefill", budget=16, num_blocks=256)
    instance.prefill(request(1, 400))
    instance.step()
    instance.prefill(request(2, 8))                 # while the second chunk runs
    instance.step()
    instance.step()

    assert instance.output(2) == whole_output(request(2))[:1]
    assert instance.output(1) == []


def test_a_long_request_is_done_in_the_end_though_short_ones_keep_coming():
    instance = Instance("prefill", budget=16, num_blocks=256)
    instance.prefill(request(1, 160))
    number, steps = 2, 0
    while not instance.output(1):
        instance.prefill(request(number, 16))
        instance.step()
        for prefilled in instance.told(m.Prefilled):
            instance.say(m.Release(prefilled.request_id, 1))
        number, steps = number + 1, steps + 1
        assert steps < 60, "the long request starves"

    assert steps >= 160 // 16


def test_the_more_urgent_request_is_computed_first():
    instance = Instance("prefill", budget=8)
    instance.prefill(request(1, 8))
    instance.prefill(request(2, 24, priority=1))
    instance.prefill(request(3, 24, priority=0))
    instance.work()

    assert [prefilled.request_id for prefilled in instance.told(m.Prefilled)] == [1, 3, 2]


def test_decoding_rows_take_their_part_of_the_budget_first():
    instance = Instance("hybrid", budget=16, num_blocks=128)
    for number in (1, 2, 3):
        instance.prefill(request(number, 4, max_tokens=50))
    instance.step()
    instance.step()
    instance.prefill(request(4, 100))
    instance.step()
    before = instance.stats.generated_tokens
    instance.step()

    assert instance.chunk_log[-1] == {3: 13}
    assert instance.stats.generated_tokens == before + 3


def test_the_budget_bounds_the_rows_too():
    instance = Instance("hybrid", budget=4, max_num_seqs=8, num_blocks=128)
    for number in range(1, 8):
        instance.prefill(request(number, 3, max_tokens=9))
    for _ in range(12):
        instance.step()
        assert instance.stats.num_running <= 4
    instance.work()
    assert all(len(instance.output(number)) == 9 for number in range(1, 8))


def test_no_more_rows_run_than_there_are_slots():
    instance = Instance("hybrid", max_num_seqs=2, num_blocks=64, budget=64)
    for number in (1, 2, 3):
        instance.prefill(request(number, 4, max_tokens=4))
    instance.step()
    instance.step()

    assert (instance.stats.num_running, instance.stats.num_waiting) == (2, 1)
    instance.work()
    assert instance.done(3)


def test_a_step_of_rows_that_only_decode_names_nobody():
    instance = Instance("hybrid", budget=64, block_tokens=64)
    for number in (1, 2):
        instance.prefill(request(number, 4, max_tokens=9))
    instance.step()
    instance.step()

    (section,) = instance.verb(m.Run).plan.sections
    assert (section.joins, section.chunks, section.grows, section.leaves) == ((), (), (), ())


def test_requests_are_spread_over_the_ranks():
    instance = Instance("hybrid", num_ranks=2, budget=64)
    for number in (1, 2, 3):
        instance.prefill(request(number, 8, max_tokens=6))
    instance.step()
    instance.step()

    assert [len(engine.rows) for engine in instance.engines] == [2, 1]
    instance.work()
    assert all(instance.output(number) == whole_output(request(number, 8, 6)) for number in (1, 2, 3))
    assert instance.is_at_rest()


def test_a_rank_without_work_takes_the_step_too():
    instance = Instance("hybrid", num_ranks=2)
    instance.prefill(request(1, 4))

    assert len(instance.verb(m.Run).plan.sections) == 2


# ---------------------------------------------------------------- admitting and pulling


def test_an_admitted_request_is_pulled_released_and_decoded():
    req = request(1, 10, max_tokens=6)
    instance, grants = decode_with(req)
    instance.admit(req, grants[1])
    instance.answer(instance.verb(m.Pull))
    assert instance.told(m.Release, "prefill-1") == [m.Release(1, 1)]
    instance.work()

    assert instance.output(1) == whole_output(req)[1:]
    assert instance.done(1) == [m.Done(1, 1, "length", 6)]
    assert instance.cached(1) == []                          # the prefill instance has told that
    assert instance.is_at_rest()


def test_a_failed_pull_fails_the_attempt_and_releases_the_source():
    req = request(1, 10)
    instance, grants = decode_with(req)
    instance.admit(req, grants[1])
    instance.fail(instance.verb(m.Pull), "the generation differs")

    assert failures(instance) == [(1, True)]
    assert "the generation differs" in instance.told(m.AttemptFailed)[0].cause
    assert instance.told(m.Release, "prefill-1") == [m.Release(1, 1)]
    assert instance.is_at_rest()


def test_a_request_waits_for_room_before_it_pulls():
    requests = [request(number, 12, max_tokens=4) for number in (1, 2)]
    instance, grants = decode_with(*requests, num_blocks=6)
    for req in requests:
        instance.admit(req, grants[req.request_id])

    assert [verb.grant.source for verb in instance.verbs] == ["prefill-1"]
    instance.work()
    assert [instance.output(number) for number in (1, 2)] == [whole_output(req)[1:] for req in requests]


def test_admission_keeps_blocks_in_hand_for_rows_that_may_grow():
    growing = [request(number, 8, max_tokens=100) for number in (1, 2)]
    ending = [request(number, 8, max_tokens=3) for number in (3, 4)]

    def num_pulls(requests):
        instance, grants = decode_with(*requests, num_blocks=7)
        for req in requests:
            instance.admit(req, grants[req.request_id])
        return len(instance.verbs)

    assert (num_pulls(growing), num_pulls(ending)) == (1, 2)


@pytest.mark.parametrize("why", ["draining", "layout", "loading", "role"])
def test_a_refused_grant_goes_back_untouched(why):                # case C14
    req = request(1, 12)
    instance, grants = decode_with(req, load=why != "loading")
    grant = grants[1]
    if why == "draining":
        instance.say(m.Drain("decode-0"))
    if why == "layout":
        grant = replace(grant, layout="another")
    if why == "role":
        instance = Instance("hybrid")
    instance.admit(req, grant)

    (failed,) = instance.told(m.AttemptFailed)
    assert failed.retry and failed.grant == grant
    assert instance.told(m.Release) == [] and not instance.has_verb(m.Pull)
    assert instance.machine.sequences == {}


def full_instance(**options):
    """A decode instance with one row, and as many waiting as it lets wait; then one request more, and its grant."""
    requests = [request(number, 8, max_tokens=4) for number in range(1, decode.LINE_ROUNDS + 3)]
    instance, grants = decode_with(*requests, **options)
    for req in requests[:-1]:
        instance.admit(req, grants[req.request_id])
    assert instance.told(m.AttemptFailed) == []
    return instance, requests[-1], grants[requests[-1].request_id]


@pytest.mark.parametrize("options", [dict(max_num_seqs=1), dict(num_blocks=3)])         # in slots; in blocks
def test_a_full_instance_gives_the_grant_back_and_takes_it_when_there_is_room(options):            # case C14
    instance, late, grant = full_instance(**options)
    instance.beat()
    assert instance.told(m.Heartbeat)[-1].line_room == 0
    instance.admit(late, grant)

    (failed,) = instance.told(m.AttemptFailed)
    assert (failed.request_id, failed.retry, failed.full, failed.turn) == (late.request_id, True, True, 1)
    assert failed.grant == grant and instance.told(m.Release) == []
    instance.abort(2)                                   # makes room for one
    instance.beat()
    assert instance.told(m.Heartbeat)[-1].line_room == 1
    assert instance.admit(late, grant) == [], "the refused offer once more is not a new one"
    instance.admit(late, grant, turn=2)
    instance.work()

    assert instance.output(late.request_id) == whole_output(late)[1:]
    assert [release.request_id for release in instance.told(m.Release)].count(late.request_id) == 1
    assert instance.stats.failures == {"full": 1}
    assert instance.is_at_rest()


@pytest.mark.parametrize("why", ["never fits", "grant"])
def test_a_grant_that_is_of_no_use_elsewhere_is_released_at_once(why):
    req = request(1, 12)
    instance, grants = decode_with(req, num_blocks=3 if why == "never fits" else 32)
    grant = replace(grants[1], num_tokens=13) if why == "grant" else grants[1]
    instance.admit(req, grant)

    (failed,) = instance.told(m.AttemptFailed)
    assert failed.retry == (why == "grant") and failed.grant is None
    assert instance.told(m.Release, "prefill-1") == [m.Release(1, 1)]
    assert instance.is_at_rest()


def test_an_admit_that_was_refused_neither_begins_nor_releases_anything_when_it_comes_again():
    req = request(1, 12)
    instance, grants = decode_with(req, load=False)
    instance.admit(req, grants[1])
    instance.answer(instance.verb(m.Load))                         # it would be taken now, but another may have it

    assert instance.admit(req, grants[1]) == []
    assert instance.abort(1) == [] and instance.admit(req, grants[1]) == []
    assert instance.is_at_rest()


def test_an_offer_that_its_abort_overtakes_is_released_though_an_earlier_one_was_refused():
    req = request(1, 12)
    instance, grants = decode_with(req, load=False)
    instance.admit(req, grants[1])
    instance.answer(instance.verb(m.Load))
    instance.abort(1)
    instance.admit(req, grants[1], turn=2)

    assert instance.told(m.Release, "prefill-1") == [m.Release(1, 1)]
    assert instance.is_at_rest()


def test_a_late_abort_of_an_older_attempt_does_not_end_one_that_was_refused():
    req = request(1, 12)
    instance, grants = decode_with(req, load=False)
    instance.admit(req, grants[1], attempt=2)
    instance.answer(instance.verb(m.Load))
    instance.abort(1, attempt=1)
    instance.admit(req, grants[1], attempt=2, turn=2)

    assert instance.has_verb(m.Pull)


def test_a_later_attempt_is_taken_where_an_earlier_one_was_refused():
    req = request(1, 12)
    instance, grants = decode_with(req, load=False)
    instance.admit(req, grants[1])
    instance.answer(instance.verb(m.Load))
    instance.admit(req, grants[1], attempt=2)
    instance.work()

    assert instance.output(1) == whole_output(req)[1:]
    assert instance.told(m.Release, "prefill-1") == [m.Release(1, 2)]


def test_an_admit_that_comes_after_its_abort_releases_the_prefill_instance():
    req = request(1, 12)
    instance, grants = decode_with(req)
    instance.abort(1)
    instance.admit(req, grants[1])

    assert instance.told(m.Release, "prefill-1") == [m.Release(1, 1)]
    assert instance.is_at_rest()


def test_a_draining_instance_finishes_what_it_has():
    first, second = request(1, 8, max_tokens=5), request(2, 8)
    instance = Instance("hybrid")
    instance.prefill(first)
    instance.say(m.Drain("hybrid-0"))
    instance.prefill(second)
    instance.work()

    assert failures(instance) == [(2, True)]
    assert instance.output(1) == whole_output(first)
    assert instance.told(m.Heartbeat)[-1].state == "draining"
    assert instance.is_at_rest()


# ---------------------------------------------------------------- growing and stepping back


def test_a_row_gets_blocks_as_it_grows():
    req = request(1, 3, max_tokens=30)
    instance = Instance("hybrid")
    instance.prefill(req)
    instance.work()

    assert instance.output(1) == whole_output(req)
    assert instance.stats.preemptions == 0


def test_the_youngest_row_steps_back_and_resumes_with_the_same_tokens():
    old, young = request(1, 8, max_tokens=24), request(2, 8, max_tokens=24)
    instance = Instance("hybrid", num_blocks=10, budget=64)
    for req in (old, young):
        instance.prefill(req)
    instance.work()

    assert instance.stats.preemptions >= 1
    assert [instance.output(number) for number in (1, 2)] == [whole_output(old), whole_output(young)]
    assert instance.cached(2) == [0], "a resumed request tells its reused tokens only once"
    assert instance.told(m.Tokens)[-1].done == (m.Done(2, 1, "length", 24),)
    assert instance.is_at_rest()


def test_one_that_stepped_back_resumes_before_younger_ones_begin():
    instance = Instance("hybrid", num_blocks=10, budget=64)
    for number in (1, 2):
        instance.prefill(request(number, 8, max_tokens=24))
    while not instance.stats.preemptions:
        instance.step()
    instance.prefill(request(3, 4, max_tokens=2))
    instance.work()

    first_of = {number: next(at for at, send in enumerate(instance.sent) if isinstance(send.message, m.Tokens)
                             and any(done.request_id == number for done in send.message.done)) for number in (1, 2, 3)}
    assert first_of[1] < first_of[3]
    assert instance.is_at_rest()


def test_a_request_that_outgrows_the_cache_alone_ends_and_names_the_limit():
    instance = Instance("hybrid", num_blocks=4)
    instance.prefill(request(1, 8, max_tokens=100))
    instance.work()

    (failed,) = instance.told(m.AttemptFailed)
    assert not failed.retry and "16 tokens (4 blocks of 4)" in failed.cause
    assert len(instance.output(1)) == 9
    assert instance.is_at_rest()


@pytest.mark.parametrize("block_tokens", [1, 2, 4])
def test_requests_that_take_turns_in_a_small_cache_all_end(block_tokens):
    instance = Instance("hybrid", num_blocks=24 // block_tokens, block_tokens=block_tokens, max_num_seqs=4, budget=64)
    requests = [request(number, number % 3 + 1, max_tokens=20) for number in range(1, 9)]
    for req in requests:
        instance.prefill(req)
    instance.work()

    assert instance.stats.preemptions > 0
    assert [instance.output(req.request_id) for req in requests] == [whole_output(req) for req in requests]
    assert instance.is_at_rest()


@pytest.mark.parametrize("block_tokens", [2, 4])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_rows_that_draft_take_turns_in_a_small_cache_and_save_steps(block_tokens, num_drafts):
    requests = [request(number, number % 3 + 1, max_tokens=20) for number in range(1, 9)]
    steps = []
    for drafts in (0, num_drafts):
        instance = Instance("hybrid", num_blocks=24 // block_tokens, block_tokens=block_tokens, max_num_seqs=4,
                            budget=64, num_speculative_tokens=drafts)
        for req in requests:
            instance.prefill(req)
        steps.append(instance.work())
        assert [instance.output(req.request_id) for req in requests] == [whole_output(req) for req in requests]
        assert instance.is_at_rest()

    assert steps[1] < 0.8 * steps[0]
    assert instance.stats.accepted_tokens["position=1"] > 0.4 * instance.stats.drafted_tokens["position=1"]


def test_nobody_steps_back_for_drafts():
    instance = Instance("hybrid", num_blocks=4, num_speculative_tokens=3)
    instance.prefill(request(1, 9, max_tokens=8))          # 17 tokens, the last is never computed: 4 blocks of 4
    instance.work()

    assert instance.output(1) == whole_output(request(1, 9, max_tokens=8))
    assert instance.stats.preemptions == 0 and instance.is_at_rest()


def test_drafts_count_in_the_budget_of_a_step():
    instance = Instance("hybrid", num_blocks=64, budget=9, max_num_seqs=8, num_speculative_tokens=2)
    assert instance.machine.ranks[0].num_slots == 3
    for number in (1, 2):
        instance.prefill(request(number, 4, max_tokens=30))
        instance.step()
    instance.prefill(request(3, 30, max_tokens=2))
    instance.step()
    instance.step()

    assert instance.chunk_log[-1] == {2: 3}
    instance.work()


def test_drafts_that_are_never_right_raise_an_alarm():
    stats = SchedulerStats()
    stats.count_drafts((ALARMING_DRAFTS - 1, 5), (0, 0))
    assert stats.draft_alarm == 0
    stats.count_drafts((1, 0), (0, 0))
    assert (stats.draft_alarm, stats.drafts_rejected_in_a_row) == (1, ALARMING_DRAFTS)
    stats.count_drafts((8, 3), (1, 0))
    assert stats.draft_alarm == 0
    assert stats.drafted_tokens == {"position=1": ALARMING_DRAFTS + 8, "position=2": 8}
    assert stats.accepted_tokens == {"position=1": 1, "position=2": 0}


def test_rows_go_on_though_the_pool_does_not_take_the_blocks_of_one_that_stepped_back():
    instance = Instance("hybrid", num_blocks=32, budget=64, cache=True)
    for number in range(1, 6):
        instance.prefill(request(number, 8, max_tokens=24))
        instance.answer(instance.verb(m.Fetch))
    while not instance.done(1):                        # no Store is answered meanwhile
        instance.step()

    assert instance.stats.preemptions == 1
    instance.work()
    assert [len(instance.output(number)) for number in range(1, 6)] == [24] * 5
    assert instance.is_at_rest()


def test_a_decode_instance_for_four_serves_sixteen():           # case C16
    requests = [request(number, 12, max_tokens=40) for number in range(1, 17)]
    instance, grants = decode_with(*requests, num_blocks=4 * 13, max_num_seqs=16, budget=64)
    for req in requests:
        instance.admit(req, grants[req.request_id])
    stepped_back = None
    while instance.verbs:
        instance.answer(instance.verbs[0])
        back = [number for number, each in instance.machine.sequences.items() if each.stepped_back and not each.blocks]
        if back and stepped_back is None:
            stepped_back = back[0]
            instance.abort(stepped_back)

    assert stepped_back is not None, "nobody had to step back"
    for req in requests:
        whole, emitted = whole_output(req)[1:], instance.output(req.request_id)
        assert emitted == (whole if req.request_id != stepped_back else whole[:len(emitted)])
    stats = instance.stats
    assert stats.failures == {}
    assert stats.generated_tokens / (stats.generated_tokens + stats.computed_tokens) > 0.7, "too much is computed again"
    assert instance.is_at_rest()


def test_nobody_steps_back_where_an_aborted_row_makes_room():
    instance = Instance("hybrid", num_blocks=15, budget=64, prefix_caching=False)
    for number in (1, 2, 3):
        instance.prefill(request(number, 8, max_tokens=16))
    while len(instance.output(1)) < 12:                   # the next step brings a need, and all blocks are out
        instance.step()
    assert instance.blocks().num_available == 0
    instance.abort(3)
    instance.work()

    assert instance.stats.preemptions == 0
    assert [instance.output(number) for number in (1, 2)] == [whole_output(request(number, 8, 16)) for number in (1, 2)]


def test_a_row_that_could_grow_into_blocks_that_are_being_stored_waits_for_them():
    instance = Instance("hybrid", num_blocks=8, budget=64, cache=True)
    instance.prefill(request(1, 8, max_tokens=1))
    instance.answer(instance.verb(m.Fetch))
    instance.step()
    store = instance.verb(m.Store)
    instance.prefill(request(2, 3, max_tokens=28))
    while instance.has_verb(m.Run):
        instance.step()
    assert instance.told(m.AttemptFailed) == []
    instance.answer(store)
    instance.work()

    assert instance.output(2) == whole_output(request(2, 3, 28))


def test_the_oldest_row_waits_for_blocks_that_a_fetch_names():
    instance = Instance("hybrid", num_blocks=8, budget=64, cache=True)
    instance.prefill(request(1, 3, max_tokens=29))
    instance.step()
    instance.prefill(request(2, 8, max_tokens=2))
    fetch = instance.verb(m.Fetch)
    while instance.has_verb(m.Run):
        instance.step()
    assert instance.told(m.AttemptFailed) == []
    instance.answer(fetch)
    instance.work()

    assert [len(instance.output(number)) for number in (1, 2)] == [29, 2]
    assert instance.is_at_rest()


def test_a_prompt_that_steps_back_half_computed_does_not_count_its_own_blocks_as_reused():
    instance = Instance("hybrid", num_blocks=16, budget=4)
    instance.prefill(request(1, 8, max_tokens=40))
    instance.step()
    instance.step()
    instance.prefill(request(2, 40, max_tokens=2))
    while not instance.stats.preemptions:
        assert not instance.output(2)
        instance.step()
    instance.work()

    assert instance.cached(2) == [0]
    assert instance.output(2) == whole_output(request(2, 40, 2))


def test_a_request_that_stepped_back_resumes_from_the_pool_where_its_blocks_were_evicted():
    old, young = request(1, 8, max_tokens=28), request(2, 8, max_tokens=28)
    instance = Instance("hybrid", num_blocks=10, budget=64, cache=True)
    for req in (old, young):
        instance.prefill(req)
    instance.work()

    assert instance.stats.preemptions >= 1
    assert instance.stats.pool_hit_tokens > 0
    assert [instance.output(number) for number in (1, 2)] == [whole_output(old), whole_output(young)]
    assert instance.is_at_rest()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_log_probabilities_of_the_prompt_are_computed_once_though_the_request_steps_back(prefix_caching):
    instance = Instance("hybrid", num_blocks=10, budget=64, prefix_caching=prefix_caching)
    instance.prefill(request(1, 8, max_tokens=24))
    instance.prefill(request(2, 8, max_tokens=24, num_prompt_logprobs=0))
    scored = 0
    while instance.verbs:
        instance.answer(instance.verbs[0])
        scored += instance.engines[0].scored.count(2)

    assert instance.stats.preemptions >= 1
    assert scored == 1


# ---------------------------------------------------------------- aborting, in every phase (case C15)


def test_a_waiting_request_is_aborted_without_a_trace():
    instance = Instance("prefill", num_blocks=4, prefix_caching=False)
    instance.prefill(request(1, 14))
    instance.work()
    instance.prefill(request(2, 14))
    instance.abort(2)
    instance.say(m.Release(1, 1))

    assert instance.stats.aborts == {"waiting": 1}
    assert instance.is_at_rest()


def test_a_waiting_admit_that_is_aborted_releases_its_source():
    first, second = request(1, 12, max_tokens=9), request(2, 12, max_tokens=9)
    instance, grants = decode_with(first, second, num_blocks=5)
    instance.admit(first, grants[1])
    instance.admit(second, grants[2])
    instance.abort(2)

    assert instance.told(m.Release, "prefill-2") == [m.Release(2, 1)]


def test_a_fetching_request_keeps_its_blocks_in_quarantine_until_the_answer():
    instance = Instance("prefill", cache=True)
    instance.prefill(request(1, 20))
    fetch = instance.verb(m.Fetch)
    instance.abort(1)
    assert instance.stats.num_quarantined_blocks == 5
    instance.answer(fetch)

    assert instance.is_at_rest() and instance.stats.num_free_blocks == 32


@pytest.mark.parametrize("answers", [True, False])
def test_a_pulling_request_releases_its_source_only_after_the_answer(answers):
    req = request(1, 10)
    instance, grants = decode_with(req)
    instance.admit(req, grants[1])
    pull = instance.verb(m.Pull)
    instance.abort(1)
    assert instance.told(m.Release) == []
    assert instance.stats.num_quarantined_blocks == 3
    if answers:
        instance.answer(pull)
    else:
        instance.fail(pull)

    assert instance.told(m.Release, "prefill-1") == [m.Release(1, 1)]
    assert instance.told(m.AttemptFailed) == []
    assert instance.is_at_rest()


def test_a_prefill_stops_at_the_next_chunk_border_and_a_short_request_follows_at_once():
    instance = Instance("prefill", budget=16, num_blocks=256)
    instance.prefill(request(1, 40 * 16))
    for _ in range(3):
        instance.step()
    instance.abort(1)                                      # while the fourth chunk runs
    instance.prefill(request(2, 8))
    num_steps = 0
    while not instance.output(2):
        instance.step()
        num_steps += 1
    instance.work()

    assert num_steps == 2
    assert instance.chunk_log[3:5] == [{0: 16}, {1: 8}]
    assert instance.stats.aborts == {"computing": 1}
    instance.say(m.Release(2, 1))
    assert instance.is_at_rest()


def test_blocks_of_a_running_request_are_not_given_out_before_its_row_has_left():
    instance = Instance("hybrid", num_blocks=5, prefix_caching=False, budget=64)
    instance.prefill(request(1, 14, max_tokens=50))
    instance.step()
    instance.abort(1)
    instance.prefill(request(2, 14, max_tokens=2))

    assert instance.stats.num_quarantined_blocks == 4
    instance.step()
    (section,) = instance.verb(m.Run).plan.sections
    assert section.leaves == (0,) and section.joins == ()
    instance.work()
    assert instance.output(2) == whole_output(request(2, 14, 2))
    assert instance.output(1) == whole_output(request(1, 14, 50))[:2]
    assert instance.is_at_rest()


def test_an_aborted_request_that_stops_in_the_same_step_is_not_reported_as_done():
    instance = Instance("hybrid")
    instance.prefill(request(1, 8, max_tokens=1))
    instance.abort(1)
    instance.work()

    assert instance.done(1) == []
    assert instance.is_at_rest()


def test_a_row_that_is_aborted_as_it_comes_to_need_a_block_gets_none():
    instance = Instance("hybrid")
    instance.prefill(request(1, 8, max_tokens=20))
    while len(instance.output(1)) < 4:
        instance.step()
    instance.abort(1)
    instance.step()                                        # its result asks for a block

    (section,) = instance.verb(m.Run).plan.sections
    assert section.grows == ()
    instance.work()
    assert instance.is_at_rest()


def test_a_handed_over_request_that_is_aborted_frees_its_blocks():
    instance = Instance("prefill", prefix_caching=False)
    instance.prefill(request(1, 8))
    instance.work()
    instance.abort(1)

    assert instance.stats.aborts == {"handed over": 1}
    assert instance.is_at_rest()


def test_a_request_that_is_aborted_while_it_steps_back_is_gone():
    instance = Instance("hybrid", num_blocks=10, budget=64)
    for number in (1, 2):
        instance.prefill(request(number, 8, max_tokens=24))
    while not any(section.leaves for section in instance.verb(m.Run).plan.sections):
        instance.step()
    instance.abort(2)
    instance.work()

    assert instance.output(1) == whole_output(request(1, 8, 24))
    assert instance.done(2) == []
    assert instance.is_at_rest()


# ---------------------------------------------------------------- failures


def test_a_failed_step_fails_every_request_of_it_and_only_those():
    instance = Instance("hybrid", max_num_seqs=2, budget=64)
    for number in (1, 2, 3):
        instance.prefill(request(number, 8))
    instance.step()
    instance.fail(instance.verb(m.Run), "out of memory")
    instance.work()

    assert failures(instance) == [(1, True), (2, True)]
    assert all("out of memory" in failed.cause for failed in instance.told(m.AttemptFailed))
    assert instance.output(3) == whole_output(request(3))
    assert instance.stats.failures == {"run": 2}
    assert instance.is_at_rest()


def test_blocks_that_were_handed_over_survive_a_failed_step():
    instance = Instance("prefill", prefix_caching=False)
    instance.prefill(request(1, 8))
    instance.prefill(request(2, 8))
    instance.step()                                         # the first is handed over, the second runs
    instance.fail(instance.verb(m.Run))

    assert failures(instance) == [(2, True)]
    assert instance.stats.num_handed_over == 1
    instance.say(m.Release(1, 1))
    assert instance.is_at_rest()


def test_an_aborted_request_in_a_failed_step_is_not_reported_again():
    instance = Instance("hybrid")
    instance.prefill(request(1, 8))
    instance.abort(1)
    instance.fail(instance.verb(m.Run))

    assert failures(instance) == []
    assert instance.is_at_rest()


def test_messages_that_come_twice_do_nothing_the_second_time():
    req = request(1, 10, max_tokens=4)
    instance, grants = decode_with(req)
    instance.admit(req, grants[1])
    instance.admit(req, grants[1])
    pull = instance.verb(m.Pull)
    instance.answer(pull)
    instance.say(m.Pulled(pull.verb_id))
    instance.work()
    run = instance.done_verbs[-1]
    instance.say(m.Failed(run.verb_id, "too late"))
    instance.abort(1)
    instance.abort(1)
    instance.admit(req, grants[1])

    assert sum(isinstance(verb, m.Pull) for verb in instance.done_verbs) == 1
    assert instance.output(1) == whole_output(req)[1:]
    assert len(instance.done(1)) == 1
    assert instance.is_at_rest()


def test_an_abort_that_overtakes_its_request_is_remembered():
    instance = Instance("hybrid")
    instance.abort(1, attempt=2)
    instance.prefill(request(1), attempt=2)
    assert instance.verbs == []

    instance.prefill(request(1), attempt=3)
    instance.work()
    assert instance.done(1) == [m.Done(1, 3, "length", 4)]


def test_a_new_attempt_ends_the_old_one():
    req = request(1, 8, max_tokens=6)
    instance = Instance("hybrid", budget=64)
    instance.prefill(req)
    instance.step()
    instance.prefill(req, attempt=2, emitted=whole_output(req)[:1])
    instance.work()

    assert instance.done(1) == [m.Done(1, 2, "length", 6)]
    assert instance.is_at_rest()


def test_an_older_attempt_than_the_known_one_is_ignored():
    req = request(1, 8, max_tokens=6)
    instance = Instance("hybrid", budget=64)
    instance.prefill(req, attempt=2)
    instance.prefill(req, attempt=1)
    instance.abort(1, attempt=1)
    instance.work()

    assert instance.done(1) == [m.Done(1, 2, "length", 6)]


def test_an_older_admit_releases_its_own_source_only():
    old, new = request(1, 10), request(1, 10)
    instance, grants = decode_with(new)
    instance.admit(new, grants[1], attempt=2)
    instance.admit(old, replace(grants[1], source="prefill-7"), attempt=1)

    assert instance.told(m.Release) == [m.Release(1, 1)]
    assert instance.told(m.Release, "prefill-7") == [m.Release(1, 1)]


def test_unknown_messages_do_no_harm():
    instance = Instance("hybrid")
    for message in (m.Release(9, 1), m.Abort(9, 1), m.Ran(99, None), m.Fetched(98, 3), m.Stored(97, 1), m.Pulled(96),
                    m.Failed(95, "?"), m.Finished(1, 1), m.Tick("?"), "a word"):
        assert instance.say(message) == []


def test_ended_attempts_are_remembered_only_so_long(monkeypatch):
    monkeypatch.setattr(ended, "MAX_REMEMBERED", 3)
    instance = Instance("hybrid")
    for number in range(1, 10):
        instance.abort(number)
    instance.prefill(request(1))

    assert instance.has_verb(m.Run)


# ---------------------------------------------------------------- everything at once


@st.composite
def schedules(draw):
    """What happens to an instance: requests, aborts, answers in any order, failures."""
    return draw(st.lists(st.one_of(
        st.tuples(st.just("request"), st.integers(1, 8), st.integers(1, 26), st.integers(1, 14)),
        st.tuples(st.just("again"), st.integers(1, 8)),
        st.tuples(st.just("abort"), st.integers(1, 8)),
        st.tuples(st.just("release"), st.integers(1, 8)),
        st.tuples(st.just("answer"), st.integers(0, 5)),
        st.tuples(st.just("answer"), st.integers(0, 5)),
        st.tuples(st.just("answer"), st.integers(0, 5)),
        st.tuples(st.just("fail"), st.integers(0, 5)),
        st.tuples(st.just("flush")),
    ), max_size=70))


def play(instance, schedule, make_request, begin):
    """Do what the schedule says; returns the last attempt of each request."""
    attempts, live = {}, {}
    for what, *details in schedule:
        match what:
            case "request":
                number, num_prompt, max_tokens = details
                if number not in attempts:
                    attempts[number] = 1
                    live[number] = make_request(number, num_prompt, max_tokens)
                    begin(live[number], 1)
            case "again" if details[0] in attempts:
                attempts[details[0]] += 1
                begin(live[details[0]], attempts[details[0]])
            case "abort" if details[0] in attempts:
                instance.abort(details[0], attempts[details[0]])
            case "release" if details[0] in attempts:
                instance.say(m.Release(details[0], attempts[details[0]]))
            case "answer" if instance.verbs:
                instance.answer(instance.verbs[details[0] % len(instance.verbs)])
            case "fail" if instance.verbs:
                instance.fail(instance.verbs[details[0] % len(instance.verbs)])
            case "flush":
                instance.say(m.Flush())
    return attempts


def last_attempt_output(instance, number, attempt):
    tokens = []
    for message in instance.told(m.Tokens):
        for emitted in message.emitted:
            tokens += [(start, packed) for each, which, start, packed in emitted.columns.rows()
                       if (each, which) == (number, attempt)]
    return [start for start, _ in tokens], b"".join(packed for _, packed in tokens)


@pytest.mark.parametrize("role", ["hybrid", "prefill", "decode"])
@settings(max_examples=60)
@given(schedule=schedules(), num_ranks=st.integers(1, 2), cache=st.booleans(), num_blocks=st.integers(7, 14))
def test_whatever_happens_every_block_comes_back_and_every_token_is_right(role, schedule, num_ranks, cache, num_blocks):
    peers = {}
    instance = Instance(role, num_ranks=num_ranks, cache=cache, num_blocks=num_blocks, max_num_seqs=3, budget=12,
                        arenas=peers)

    def make_request(number, num_prompt, max_tokens):
        return request(number, prompt=[number % 2, *range(1, num_prompt)], max_tokens=max_tokens)

    def begin(req, attempt):
        if role == "decode":
            source = f"prefill-{req.request_id}-{attempt}"
            wide = replace(req, limits=replace(req.limits, max_tokens=req.limits.max_tokens + 1))
            grant, arenas = make_grant(source, wide)
            peers[source] = arenas
            instance.admit(wide, grant, attempt)
        else:
            instance.prefill(req, attempt)

    attempts = play(instance, schedule, make_request, begin)
    instance.work()
    failed = {(each.request_id, each.attempt) for each in instance.told(m.AttemptFailed)}
    for number, attempt in attempts.items():
        starts, tokens = last_attempt_output(instance, number, attempt)
        first = 1 if role == "decode" else 0
        assert starts == list(range(first, first + len(starts)))
        assert tokens == pack_tokens(output_token(number, start) for start in starts)
        instance.say(m.Release(number, attempt))
        instance.abort(number, attempt)
    instance.work()
    assert instance.is_at_rest()
    ended = {(done.request_id, done.attempt) for message in instance.told(m.Tokens) for done in message.done}
    assert not ended & failed, "an attempt ended twice"


# ---------------------------------------------------------------- another role


def change_role(instance, role, number=1, boot_id="boot-1", heard=False):
    return instance.say(m.ChangeRole(instance.member, boot_id, number, role, heard=heard))


def beats(instance):
    """State, role and role to come of each heartbeat."""
    return [(beat.state, beat.role, beat.becomes) for beat in instance.told(m.Heartbeat, HEALTH)]


def test_a_prefill_instance_that_is_to_decode_says_so_finishes_and_then_decodes():
    req, other = request(1, 10, 4), request(2, 10, 4)
    instance = Instance("prefill", budget=6)
    instance.prefill(req)

    change_role(instance, "decode")
    assert beats(instance)[-1] == ("draining", "prefill", "decode")
    instance.prefill(other)                    # was on its way
    change_role(instance, "decode", heard=True)
    instance.beat()
    assert instance.machine.role == "prefill"

    instance.work()
    assert [each.request_id for each in instance.told(m.Prefilled)] == [1, 2] and failures(instance) == []
    assert beats(instance)[-1] == ("up", "decode", None)
    assert instance.stats.num_handed_over == 2 and instance.stats.role_changes == 1

    grant, arenas = make_grant("prefill-9", request(3, 9, 4))
    instance.peers["prefill-9"] = arenas
    instance.admit(request(3, 9, 4), grant)
    instance.work()
    assert [output_token(3, 0), *instance.output(3)] == whole_output(request(3, 9, 4))
    for number in (1, 2):
        instance.say(m.Release(number, 1))
    assert instance.is_at_rest()


def test_blocks_handed_over_before_a_change_of_role_can_still_be_pulled():
    req = request(1, 10, 4)
    source = Instance("prefill")
    source.prefill(req)
    source.work()
    change_role(source, "decode")
    change_role(source, "decode", heard=True)
    assert source.machine.role == "decode"

    reader = Instance("decode", arenas={source.member: source.arenas})
    reader.admit(req, source.told(m.Prefilled)[0].grant)
    reader.work()

    assert [output_token(1, 0), *reader.output(1)] == whole_output(req)


def test_a_row_that_lacks_a_block_waits_for_those_that_were_handed_over_before_the_change():
    old, req = request(1, 12, 4), request(2, 6, 30)
    instance = Instance("prefill", num_blocks=9)
    instance.prefill(old)
    instance.work()
    change_role(instance, "decode")
    change_role(instance, "decode", heard=True)
    grant, instance.peers["prefill-9"] = make_grant("prefill-9", req)
    instance.admit(req, grant)
    instance.work()
    assert instance.machine.sequences[2].phase.value == "decoding" and failures(instance) == []

    instance.say(m.Release(1, 1))
    instance.work()

    assert [output_token(2, 0), *instance.output(2)] == whole_output(req)
    assert instance.is_at_rest()


def handed_on(instance):
    return [(each.request_id, each.grant.num_tokens) for each in instance.told(m.HandOn, GATEWAY)]


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("num_steps", range(1, 9))
def test_a_decode_instance_that_is_to_prefill_hands_its_rows_on_with_all_they_have_computed(num_steps, drafts):
    req = request(1, 9, 40)
    grant, arenas = make_grant("prefill-9", req)
    instance = Instance("decode", arenas={"prefill-9": arenas}, num_speculative_tokens=drafts)
    instance.admit(req, grant)
    instance.answer(instance.verb(m.Pull))
    for _ in range(num_steps):
        instance.step()
    change_role(instance, "prefill")
    assert beats(instance)[-1] == ("draining", "decode", "prefill")
    instance.step()
    assert handed_on(instance) == [] and instance.machine.role == "decode"

    change_role(instance, "prefill", heard=True)
    instance.work()

    emitted = [output_token(1, 0), *instance.output(1)]
    assert num_steps + 2 <= len(emitted) < 40 and handed_on(instance) == [(1, 9 + len(emitted) - 1)]
    assert beats(instance)[-1] == ("up", "prefill", None) and instance.stats.handed_on == 1

    other = Instance("decode", member="decode-1", arenas={instance.member: instance.arenas})
    other.admit(req, instance.told(m.HandOn)[0].grant, emitted=emitted, turn=2)
    other.work()
    assert emitted + other.output(1) == whole_output(req)
    instance.say(m.Release(1, 1))
    assert instance.is_at_rest() and other.is_at_rest()


def test_tokens_of_a_row_are_told_before_it_is_handed_on():
    req = request(1, 9, 24)
    grant, arenas = make_grant("prefill-9", req)
    instance = Instance("decode", arenas={"prefill-9": arenas})
    instance.admit(req, grant)
    instance.answer(instance.verb(m.Pull))
    instance.step()
    change_role(instance, "prefill")
    change_role(instance, "prefill", heard=True)
    instance.work()

    kinds = [type(send.message) for send in instance.sent if send.to == GATEWAY]
    assert kinds[-1] is m.HandOn and kinds.count(m.HandOn) == 1


def test_what_is_not_decoding_yet_is_handed_on_when_it_is():
    first, second = request(1, 9, 24), request(2, 9, 24)
    instance = Instance("decode", max_num_seqs=1)
    for req in (first, second):
        grant, instance.peers[f"prefill-{req.request_id}"] = make_grant(f"prefill-{req.request_id}", req)
        instance.admit(req, grant)
    change_role(instance, "prefill")
    change_role(instance, "prefill", heard=True)
    instance.work()

    assert [number for number, _ in handed_on(instance)] == [1, 2] and instance.machine.role == "prefill"


@pytest.mark.parametrize("how", ["ends", "is aborted", "is given up", "fails"])
def test_a_row_that_cannot_be_handed_on_holds_nothing_up(how):
    """It ends with the step that runs, nobody wants it any more, or its step is not taken."""
    req = request(1, 9, 4 if how == "ends" else 24)
    grant, arenas = make_grant("prefill-9", req)
    instance = Instance("decode", arenas={"prefill-9": arenas})
    instance.admit(req, grant)
    instance.answer(instance.verb(m.Pull))
    instance.step()
    instance.step()
    change_role(instance, "prefill")
    change_role(instance, "prefill", heard=True)
    match how:
        case "is aborted":
            instance.abort(1)
        case "is given up":
            instance.step()
            instance.give_up_step()
        case "fails":
            instance.fail(instance.verb(m.Run))
    instance.work()

    assert instance.machine.role == "prefill"
    assert len(handed_on(instance)) == (how == "is given up")
    if how == "is given up":
        assert handed_on(instance) == [(1, 9 + len(instance.output(1)))]
        instance.say(m.Release(1, 1))
    assert instance.is_at_rest()


def test_a_row_that_was_handed_on_may_come_back():
    req = request(1, 9, 24)
    grant, arenas = make_grant("prefill-9", req)
    instance = Instance("decode", arenas={"prefill-9": arenas})
    instance.admit(req, grant)
    instance.answer(instance.verb(m.Pull))
    instance.step()
    change_role(instance, "prefill")
    change_role(instance, "prefill", heard=True)
    instance.work()
    num_emitted = 1 + len(instance.output(1))
    instance.say(m.Release(1, 1))
    change_role(instance, "decode", number=2)
    change_role(instance, "decode", number=2, heard=True)
    longer = request(1, prompt=[*range(1000, 1009), *whole_output(req)[:num_emitted - 1]], max_tokens=24)
    back, arenas = make_grant("decode-5", longer)
    instance.peers["decode-5"] = arenas

    instance.admit(req, back, emitted=whole_output(req)[:num_emitted], turn=1)      # late: it was for the first time
    assert not instance.machine.sequences
    instance.admit(req, back, emitted=whole_output(req)[:num_emitted], turn=3)
    instance.work()

    assert [output_token(1, 0), *instance.output(1)] == whole_output(req)
    assert instance.told(m.Release, "decode-5") == [m.Release(1, 1)]


def test_what_an_instance_cached_while_it_decoded_is_found_and_granted_when_it_prefills():
    req = request(1, 9, 12)
    grant, arenas = make_grant("prefill-9", req)
    instance = Instance("decode", arenas={"prefill-9": arenas})
    instance.admit(req, grant)
    instance.work()
    change_role(instance, "prefill")
    change_role(instance, "prefill", heard=True)

    again = request(2, prompt=[*range(1000, 1009), *whole_output(req)], max_tokens=3)
    instance.prefill(again)
    instance.work()

    assert instance.cached(2) == [20]
    granted = instance.told(m.Prefilled)[0].grant
    reader = Instance("decode", member="decode-1", arenas={instance.member: instance.arenas})
    reader.admit(again, granted)
    reader.work()
    assert [output_token(2, 0), *reader.output(2)] == whole_output(again)


def test_work_of_the_old_role_that_comes_after_the_change_is_sent_back():
    instance = Instance("prefill")
    change_role(instance, "decode")
    change_role(instance, "decode", heard=True)
    instance.prefill(request(1))

    assert failures(instance) == [(1, True)]


def test_the_old_role_ends_only_when_it_was_heard_that_it_will():
    """Until then a request may have been sent to it: it comes before the word that says so."""
    instance = Instance("prefill")
    change_role(instance, "decode")
    for _ in range(3):
        instance.beat()
    assert beats(instance)[-1] == ("draining", "prefill", "decode")

    instance.prefill(request(1))
    instance.work()
    assert failures(instance) == [] and len(instance.told(m.Prefilled)) == 1

    change_role(instance, "decode", heard=True)
    assert beats(instance)[-1] == ("up", "decode", None)


def test_the_last_word_about_a_role_counts_whatever_order_they_come_in():
    instance = Instance("prefill")
    instance.prefill(request(1))
    change_role(instance, "prefill", number=2)
    change_role(instance, "decode", number=1)
    assert instance.machine.becomes is None

    change_role(instance, "decode", number=3)
    change_role(instance, "prefill", number=4)
    change_role(instance, "decode", number=3)
    assert beats(instance)[-1] == ("up", "prefill", None)


def test_an_instance_whose_own_deployment_has_fixed_roles_keeps_its_own():
    """Another machine's file may not say that roles change: nobody could read the blocks of this one."""
    instance = Instance("decode", role_changes=False)
    change_role(instance, "prefill")

    assert instance.machine.becomes is None


@pytest.mark.parametrize("boot_id", ["boot-0", "boot-1"])
def test_an_earlier_life_a_hybrid_and_an_instance_that_leaves_do_not_change(boot_id):
    for instance in (Instance("hybrid"), Instance("prefill")):
        if boot_id == "boot-1":
            instance.say(m.Drain(instance.member))
        role = instance.machine.role
        change_role(instance, "decode", boot_id=boot_id)
        change_role(instance, "decode", boot_id=boot_id, heard=True)
        assert instance.machine.role == role


def test_an_instance_that_is_told_to_leave_while_it_changes_leaves():
    instance = Instance("prefill")
    change_role(instance, "decode")
    instance.say(m.Drain(instance.member))
    change_role(instance, "decode", heard=True)
    instance.beat()

    assert beats(instance)[-1] == ("draining", "prefill", None)
