"""Requests that are aborted, fail or come twice let go of what they hold, when nobody uses it any more."""

from dataclasses import replace

import pytest

from tests.control.builders import Instance, decode_with, failures, request, whole_output
from tripool.control import ended
from tripool.core import messages as m

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
