"""One instance from the first message to the last: how it starts, what it computes, whom it refuses."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.control.builders import (
    GATEWAY,
    HEALTH,
    Instance,
    failures,
    make_grant,
    output_token,
    request,
    whole_output,
)
from tripool.control import scheduler
from tripool.core import messages as m
from tripool.core.machine import Send
from tripool.core.request import pack_tokens

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


def decoding(req):
    """A decode instance that pulled the request and took its first step."""
    grant, arenas = make_grant("prefill-9", req)
    instance = Instance("decode", arenas={"prefill-9": arenas})
    instance.admit(req, grant)
    instance.answer(instance.verb(m.Pull))
    instance.step()
    return instance


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
    instance = decoding(req)
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


@pytest.mark.parametrize("word", [m.Release(1, 1), m.Abort(1, 1, 2)], ids=["released", "dropped"])
@pytest.mark.parametrize("released", ["before", "after"])
def test_a_row_that_was_handed_on_may_come_back(released, word):
    """Its Release comes over another link than the row, so it may come later, or not at all; then it is told to drop
    what it held up to the second turn, which is no longer true when it has the third."""
    req = request(1, 9, 24)
    instance = decoding(req)
    change_role(instance, "prefill")
    change_role(instance, "prefill", heard=True)
    instance.work()
    num_emitted = 1 + len(instance.output(1))
    if released == "before":
        instance.say(word)
    change_role(instance, "decode", number=2)
    change_role(instance, "decode", number=2, heard=True)
    longer = request(1, prompt=[*range(1000, 1009), *whole_output(req)[:num_emitted - 1]], max_tokens=24)
    back, arenas = make_grant("decode-5", longer)
    instance.peers["decode-5"] = arenas

    instance.admit(req, back, emitted=whole_output(req)[:num_emitted], turn=1)      # late: it was for the first time
    assert len(instance.machine.sequences) == (released == "after") and not instance.has_verb(m.Pull)
    instance.sent = [send for send in instance.sent if send.to != "decode-5"]
    instance.admit(req, back, emitted=whole_output(req)[:num_emitted], turn=3)
    assert instance.told(m.Release, "decode-5") == []
    if released == "after":
        instance.say(word)
    instance.work()

    assert [output_token(1, 0), *instance.output(1)] == whole_output(req)
    assert instance.told(m.Release, "decode-5") == [m.Release(1, 1)] and instance.is_at_rest()


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
