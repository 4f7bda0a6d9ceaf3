"""A rank is lost, steps are given up, and nothing is lost or done twice but what that rank held."""

from array import array

import pytest

from tests.control.builders import Instance, decode_with, request, whole_output
from tripool.core import messages as m
from tripool.core.placement import EMPTY, even_geometry, initial_placement

NUM_LAYERS = 2


def expert_facts(num_ranks, *, num_routed=4, num_redundant=4):
    geometry = even_geometry(num_ranks, num_routed, num_redundant=num_redundant)
    return m.ExpertFacts(geometry, initial_placement(geometry, NUM_LAYERS).pack(), 1000, 1e-6, 64)


def two_ranks(**options):
    """A hybrid instance with one request on each rank, both decoding."""
    instance = Instance(num_ranks=2, experts=expert_facts(2), **options)
    asked = [request(1, max_tokens=6), request(2, max_tokens=6)]
    for each in asked:
        instance.prefill(each)
    instance.step()
    instance.step()
    return instance, asked


def failed(instance):
    return [(each.request_id, each.retry) for each in instance.told(m.AttemptFailed)]


def test_rows_of_living_ranks_go_on_and_those_of_the_lost_one_are_failed_to_be_tried_again():
    instance, (first, _) = two_ranks()
    instance.give_up_step(1)
    assert failed(instance) == [(2, True)]
    instance.work()
    assert instance.output(1) == whole_output(first)
    assert instance.is_at_rest()
    assert instance.stats.aborted_steps == 1


def test_a_rank_that_goes_while_nothing_runs_is_noticed_too():
    instance = Instance(num_ranks=2, experts=expert_facts(2))
    instance.lose(1)
    req = request(1)
    instance.prefill(req)
    plan = instance.verb(m.Run).plan
    assert plan.lost_ranks == (1,)
    instance.work()
    assert instance.output(1) == whole_output(req)


def test_a_result_that_was_ready_before_the_rank_went_counts_for_the_others():
    instance, (first, _) = two_ranks()
    instance.lose(1)
    assert failed(instance) == []               # blocks of an unanswered step stay where they are
    instance.step()
    assert failed(instance) == [(2, True)]
    instance.engines[1].rows.clear()
    instance.work()
    assert instance.output(1) == whole_output(first)
    assert instance.is_at_rest()


def test_ranks_that_were_through_with_the_step_keep_its_tokens():
    instance = Instance(num_ranks=3, experts=expert_facts(3))
    asked = [request(number, max_tokens=6) for number in (1, 2, 3)]
    for each in asked:
        instance.prefill(each)
    instance.step()
    before = len(instance.output(1))
    instance.give_up_step(2, took=(0,))
    assert len(instance.output(1)) == before + 1
    instance.work()
    assert instance.output(1) == whole_output(asked[0])
    assert instance.output(2) == whole_output(asked[1])
    assert failed(instance) == [(3, True)]
    assert instance.is_at_rest()


def test_nothing_begins_on_a_lost_rank_until_it_is_back():
    instance, _ = two_ranks()
    instance.give_up_step(1)
    more = [request(number) for number in (3, 4, 5)]
    for each in more:
        instance.prefill(each)
    instance.work()
    assert not instance.machine.ranks[1].slots
    assert all(instance.output(each.request_id) == whole_output(each) for each in more)
    instance.bring_back(1)
    assert instance.machine.lost_ranks == []
    for number in (6, 7):
        instance.prefill(request(number))
    assert instance.machine.ranks[1].slots
    assert instance.verb(m.Run).plan.lost_ranks == ()
    instance.work()
    assert instance.is_at_rest()


def test_a_rank_that_is_back_before_its_step_was_answered_waits_for_the_answer():
    instance, (first, _) = two_ranks()
    instance.lose(1)
    instance.bring_back(1)
    assert instance.machine.lost_ranks == [1]
    instance.give_up_step(1)
    assert instance.machine.lost_ranks == []
    assert failed(instance) == [(2, True)]
    instance.work()
    assert instance.output(1) == whole_output(first)
    assert instance.is_at_rest()


def test_a_row_that_lacked_a_block_joins_again_with_one():
    instance = Instance(num_ranks=2, block_tokens=2, num_blocks=16, experts=expert_facts(2))
    req = request(1, num_prompt=3, max_tokens=8)
    instance.prefill(req)
    for _ in range(20):
        if not instance.has_verb(m.Run):
            break
        instance.give_up_step()
        instance.step()
    instance.work()
    assert instance.output(1) == whole_output(req)
    assert instance.is_at_rest()


def test_a_row_that_was_asked_to_step_back_does_so_when_its_step_is_given_up():
    instance = Instance(num_ranks=2, num_blocks=10, budget=64, experts=expert_facts(2))
    asked = [request(number, num_prompt=8, max_tokens=24) for number in (1, 2, 3, 4)]
    for each in asked:
        instance.prefill(each)
    turn = 0
    while instance.has_verb(m.Run):
        turn += 1
        leaves = any(section.leaves for section in instance.verb(m.Run).plan.sections)
        instance.give_up_step() if leaves or turn % 3 == 0 else instance.step()
    assert instance.stats.preemptions > 0, "blocks never ran out; the test proves nothing"
    for each in asked:
        assert instance.output(each.request_id) == whole_output(each)
    assert instance.is_at_rest()


def test_one_whose_client_left_is_let_go_when_its_step_is_given_up():
    instance, _ = two_ranks()
    instance.abort(1)
    instance.abort(2)
    instance.give_up_step(1)
    instance.work()
    assert failed(instance) == []
    assert instance.is_at_rest()


def test_blocks_that_wait_to_be_pulled_outlive_their_rank():
    instance = Instance("prefill", num_ranks=2, experts=expert_facts(2))
    for number in (1, 2):
        instance.prefill(request(number))
    instance.step()
    instance.step()
    assert len(instance.told(m.Prefilled)) == 2
    instance.prefill(request(3))
    instance.give_up_step(1)
    assert failed(instance) == []
    assert instance.stats.num_handed_over == 2
    instance.work()
    for number in (1, 2, 3):
        instance.say(m.Release(number, 1))
    instance.work()
    assert instance.is_at_rest()


def test_blocks_of_a_chunk_whose_step_was_given_up_are_summed_after_all():
    instance = Instance("prefill", num_ranks=2, experts=expert_facts(2))
    instance.prefill(request(1, num_prompt=9))
    instance.give_up_step()
    instance.step()
    (prefilled,) = instance.told(m.Prefilled)
    assert [part.checksum for part in prefilled.grant.parts] == [
        instance.engines[0].checksum(part.block) for part in prefilled.grant.parts]
    instance.say(m.Release(1, 1))
    instance.work()
    assert instance.is_at_rest()


def test_what_is_pulled_to_a_rank_that_went_meanwhile_is_failed_and_released():
    asked = [request(1), request(2)]
    instance, grants = decode_with(*asked, num_ranks=2, experts=expert_facts(2))
    for each in asked:
        instance.admit(each, grants[each.request_id])
    pulls = [verb for verb in instance.verbs if isinstance(verb, m.Pull)]
    lost = next(verb for verb in pulls if verb.rank == 1)
    instance.lose(1)
    assert failed(instance) == []
    instance.answer(lost)
    assert len(failed(instance)) == 1
    instance.work()
    assert {each.request_id for each in instance.told(m.Release)} == {1, 2}
    assert instance.is_at_rest()


def test_steps_that_are_given_up_again_and_again_without_a_lost_rank_end_their_requests():
    instance = Instance(num_ranks=2, experts=expert_facts(2))
    instance.prefill(request(1))
    for _ in range(4):
        instance.give_up_step()
    assert failed(instance) == [(1, True)]
    instance.work()
    assert instance.is_at_rest()


# ---------------------------------------------------------------- the map


def test_a_plan_repeats_map_changes_until_a_step_was_taken_with_them():
    instance, _ = two_ranks()
    instance.lose(1)
    instance.give_up_step()
    changes = instance.verb(m.Run).plan.map_changes
    assert changes
    instance.give_up_step()
    assert instance.verb(m.Run).plan.map_changes == changes
    instance.step()
    assert instance.verb(m.Run).plan.map_changes == ()
    assert instance.verb(m.Run).plan.map_version == changes[-1].version


def test_no_step_is_asked_for_while_experts_are_nowhere():
    instance = Instance(num_ranks=2, experts=expert_facts(2, num_redundant=0))
    req = request(1)
    instance.prefill(req)
    instance.give_up_step(1)
    assert not instance.has_verb(m.Run)
    assert instance.told(m.Heartbeat)[-1].state == "loading", "told at once: nobody sends what would be refused"
    instance.prefill(request(2))
    assert failed(instance) == [(2, True)]              # somebody else may take it at once
    slots = range(2, 4)
    placement = initial_placement(even_geometry(2, 4), NUM_LAYERS)
    held = array("h", [layer[slot] for layer in placement.layers for slot in slots])
    instance.bring_back(1, held.tobytes())
    assert instance.told(m.Heartbeat)[-1].state == "up"
    instance.work()
    assert instance.output(1) == whole_output(req)


def test_a_heartbeat_says_how_many_ranks_are_gone_and_counts_no_block_of_theirs():
    instance = Instance(num_ranks=2, num_blocks=10, experts=expert_facts(2))
    for change, told in ((lambda: None, (0, 20)), (lambda: instance.lose(1), (1, 10)),
                         (lambda: instance.bring_back(1), (0, 20))):
        change()
        instance.say(instance.next_beat)
        beat = instance.told(m.Heartbeat)[-1]
        assert (beat.num_lost_ranks, beat.num_free_blocks) == told


def test_lost_experts_are_loaded_into_slots_of_copies():
    instance = Instance(num_ranks=3, experts=expert_facts(3, num_routed=4, num_redundant=2))
    req = request(1)
    instance.prefill(req)
    instance.give_up_step(2)
    move = instance.verb(m.MoveExperts)
    assert {each.expert for each in move.moves} <= set(range(4))
    assert not instance.has_verb(m.Run)
    instance.answer(move)
    while instance.has_verb(m.MoveExperts):
        instance.answer(instance.verb(m.MoveExperts))
    instance.work()
    assert instance.output(1) == whole_output(req)
    named = instance.machine.rebalancer.placement
    assert not named.missing()
    assert all(layer[slot] == EMPTY for layer in named.layers for slot in named.slots_of_rank(2))


def test_expert_loads_are_asked_for_now_and_then_and_move_experts():
    instance = Instance(num_ranks=2, experts=expert_facts(2), rebalance_steps=4, max_num_seqs=4)
    counts = array("i", [100, 1, 1, 1] * NUM_LAYERS).tobytes()
    asked = [request(number, max_tokens=30) for number in (1, 2)]
    for each in asked:
        instance.prefill(each)
    reported = 0
    carry_out = instance._carry_out

    def with_counts(verb):
        nonlocal reported
        answer = carry_out(verb)
        if isinstance(verb, m.Run) and verb.plan.reports_experts:
            reported += 1
            object.__setattr__(answer.result, "expert_counts", counts)
        return answer

    instance._carry_out = with_counts
    instance.work()
    steps = instance.stats.steps
    assert steps // 4 - 1 <= reported <= steps // 4 + 1
    figures = instance.machine.rebalancer.figures()
    assert figures.num_steps >= 4 * (reported - 1)
    assert figures.num_planned > 0
    assert instance.output(1) == whole_output(asked[0])


@pytest.mark.parametrize(("tokens", "halves"), [(1, 1), (2, 2), (64, 2), (65, 1)])
def test_a_step_is_cut_in_two_where_each_half_fits_an_exchange(tokens, halves):
    instance = Instance(num_ranks=2, experts=expert_facts(2), microbatches=True, budget=128, num_blocks=64)
    instance.prefill(request(1, num_prompt=tokens))
    assert instance.verb(m.Run).plan.num_microbatches == halves


def test_a_rank_back_that_was_never_told_lost_has_lost_its_rows():
    instance, (first, _) = two_ranks()
    instance.bring_back(1)
    instance.step()
    instance.engines[1].rows.clear()
    assert failed(instance) == [(2, True)]
    instance.work()
    assert instance.output(1) == whole_output(first)
