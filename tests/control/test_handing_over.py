"""A prefilled request goes from one instance to another: offered, pulled, released, or given back."""

from dataclasses import replace

import pytest

from tests.control.builders import ROUTER, Instance, decode_with, failures, hash_of, request, whole_output
from tripool.control import decode
from tripool.core import messages as m
from tripool.core.plan import IDLE_SECTION

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


def test_a_row_leaves_with_the_step_that_ends_its_prompt():
    """No step is run only to let it go, and its slot is another's at once."""
    instance = Instance("prefill", max_num_seqs=1, prefix_caching=False)
    instance.prefill(request(1, 8))
    instance.prefill(request(2, 8))
    instance.step()

    (section,) = instance.verb(m.Run).plan.sections
    assert [join.request_id for join in section.joins] == [2] and section.leaves == ()
    instance.step()
    assert not instance.has_verb(m.Run)
    for request_id in (1, 2):
        instance.say(m.Release(request_id, 1))
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


def test_a_pulled_row_decodes_from_the_step_on_in_which_it_joins():
    """So that the step after it is like any other, and may be taken together with those that follow."""
    req = request(1, 10, max_tokens=6)
    instance, grants = decode_with(req)
    instance.admit(req, grants[1])
    instance.answer(instance.verb(m.Pull))
    assert instance.verb(m.Run).plan.sections[0].joins and not instance.machine.has_plans

    instance.step()
    assert instance.verb(m.Run).plan.sections == (IDLE_SECTION,)


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
