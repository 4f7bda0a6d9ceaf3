"""Rows grow until blocks run out: who gives way, who waits, and that all end."""


import pytest

from tests.control.builders import Instance, decode_with, request, whole_output
from tripool.control.stats import ALARMING_DRAFTS, SchedulerStats
from tripool.core import messages as m


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
