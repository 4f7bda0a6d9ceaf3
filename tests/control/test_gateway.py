"""The gateway's record: every request ends exactly once, whatever becomes of the members it is on."""

from tripool.control.gateway import Gateway
from tripool.core.deployment import GatewayConfig
from tripool.core.messages import (
    Abort,
    Admit,
    AttemptFailed,
    Cancel,
    Done,
    Finished,
    Grant,
    HandOn,
    Heartbeat,
    MemberChanged,
    Output,
    Placed,
    PlaceElsewhere,
    Prefill,
    Rejected,
    Route,
    Started,
    Submit,
    Tick,
    Tokens,
)
from tripool.core.plan import Emitted, TokenLogprobs, token_columns
from tripool.core.request import Limits, Request, Sampling, pack_tokens, unpack_tokens

CONFIG = GatewayConfig(max_attempts=3, prefill_deadline_s=20.0, decode_deadline_s=5.0, place_deadline_s=10.0)
PROMPT = [1, 2, 3, 4]


class Talk:
    """A gateway, and all that it said so far."""

    def __init__(self, **limits) -> None:
        self.machine = Gateway(CONFIG)
        self.sends = []
        self.now = 0.0
        for name, role in (("prefill-0", "prefill"), ("prefill-1", "prefill"), ("decode-0", "decode"),
                           ("decode-1", "decode"), ("hybrid-0", "hybrid")):
            self.change(name, role)
        self.request = Request(1, pack_tokens(PROMPT), Sampling(seed=7), Limits(**{"max_tokens": 8, **limits}))

    def say(self, message, at=None):
        self.now = self.now if at is None else at
        sends = self.machine.handle(message, self.now)
        self.machine.check_invariants()
        self.sends += sends
        return sends

    def change(self, name, role, state="up"):
        return self.say(MemberChanged(name, role, "a", state, None, cause="gone" if state == "down" else ""))

    def submit(self):
        return self.say(Submit(self.request))

    def place(self, member, attempt=1, grant=None):
        return self.say(Placed(1, attempt, "decode" if grant else "prefill", member, grant))

    def tokens(self, source, token_ids, start, *, attempt=1, done=None, cached=None, logprobs=()):
        emitted = Emitted("gateway", token_columns([(1, attempt, start, pack_tokens(token_ids))]), tuple(logprobs))
        ends = (Done(1, attempt, done, start + len(token_ids)),) if done else ()
        reused = ((1, attempt, cached),) if cached is not None else ()
        return self.say(Tokens(source, (emitted,), ends, reused))

    def begin_prefill(self):
        self.submit()
        return self.place("prefill-0")

    def begin_decode(self):
        self.begin_prefill()
        self.tokens("prefill-0", [10], 0)
        return self.place("decode-0", grant=grant(4))

    def retry(self, attempt=2):
        return self.say(Tick("retry", 1), self.now + 1.0)

    @property
    def outputs(self):
        return [each.message for each in self.sends if isinstance(each.message, Output)]

    @property
    def received(self):
        return [token for output in self.outputs for token in unpack_tokens(output.tokens)]

    @property
    def finals(self):
        return [each for each in self.outputs if each.finish or each.error]


def grant(num_tokens, source="prefill-0"):
    return Grant(source, "a", "layout", num_tokens, ())


def to(sends, address):
    return [each.message for each in sends if each.to == address]


# ------------------------------------------------------------------------------------------------ the ordinary way


def test_a_request_goes_through_prefill_and_decode_to_one_end():
    talk = Talk()
    assert to(talk.submit(), "gateway/router") == [Route(1, 1, 4)]
    assert to(talk.place("prefill-0"), "prefill-0") == [Prefill(talk.request, 1, b"")]
    assert to(talk.tokens("prefill-0", [10], 0), "gateway/router") == [Started(1, 1)]
    admit = Admit(talk.request, 1, pack_tokens([10]), grant(4))
    assert to(talk.place("decode-0", grant=grant(4)), "decode-0") == [admit]
    talk.tokens("decode-0", [11, 12], 1)
    last = talk.tokens("decode-0", [13], 3, done="stop")

    assert talk.received == [10, 11, 12, 13]
    assert [each.finish for each in talk.finals] == ["stop"]
    assert to(last, "gateway/router") == [Finished(1, 1)]
    assert talk.machine.entries == {}


def test_a_hybrid_needs_no_second_member():
    talk = Talk()
    talk.submit()
    talk.place("hybrid-0")
    talk.tokens("hybrid-0", [10], 0)
    talk.tokens("hybrid-0", [11], 1, done="length")

    assert talk.received == [10, 11] and talk.finals[0].finish == "length"


def test_a_request_may_end_with_its_first_token():
    talk = Talk(max_tokens=1)
    talk.begin_prefill()
    talk.tokens("prefill-0", [10], 0, done="length")

    assert [each.finish for each in talk.finals] == ["length"]


def test_a_decode_member_chosen_before_the_first_token_is_here_waits_for_it():
    talk = Talk()
    talk.begin_prefill()
    assert to(talk.place("decode-0", grant=grant(4)), "decode-0") == []

    assert to(talk.tokens("prefill-0", [10], 0), "decode-0") == [Admit(talk.request, 1, pack_tokens([10]), grant(4))]


def test_a_grant_that_does_not_match_the_tokens_is_not_admitted():
    talk = Talk()
    talk.begin_prefill()
    talk.tokens("prefill-0", [10], 0)

    sends = talk.place("decode-0", grant=grant(9))

    assert to(sends, "decode-0") == [Abort(1, 1)]
    assert talk.machine.stats.retried == {"gap": 1}


def test_cached_tokens_are_reported_once_and_a_later_attempt_changes_nothing():
    talk = Talk()
    talk.begin_prefill()
    talk.tokens("prefill-0", [10], 0, cached=3)
    talk.say(AttemptFailed(1, 1, "prefill-0", "broken"))
    talk.retry()
    talk.place("hybrid-0", attempt=2)
    talk.tokens("hybrid-0", [11], 1, attempt=2, cached=0, done="stop")

    assert [each.num_cached_tokens for each in talk.outputs] == [3, 3]
    assert talk.machine.stats.cached_tokens == 3 and talk.machine.stats.prompt_tokens == 4


# ------------------------------------------------------------------------------------------------ trying again


def test_a_lost_decode_member_costs_the_client_nothing():
    talk = Talk()
    talk.begin_decode()
    talk.tokens("decode-0", [11, 12], 1)
    sends = talk.change("decode-0", "decode", "down")

    assert to(sends, "prefill-0") == to(sends, "decode-0") == [Abort(1, 1)]
    assert to(sends, "gateway/router") == [Finished(1, 1)]
    assert to(talk.retry(), "gateway/router") == [Route(1, 2, 7, avoid="decode-0")]
    assert to(talk.place("prefill-1", attempt=2), "prefill-1") == [Prefill(talk.request, 2, pack_tokens([10, 11, 12]))]
    talk.tokens("prefill-1", [13], 3, attempt=2)
    talk.place("decode-1", attempt=2, grant=grant(7, "prefill-1"))
    talk.tokens("decode-1", [14], 4, attempt=2, done="stop")

    assert talk.received == [10, 11, 12, 13, 14]
    assert len(talk.finals) == 1


def test_the_retry_comes_a_little_later_each_time():
    talk = Talk()
    delays = []
    talk.submit()
    for attempt in (1, 2):
        talk.place("hybrid-0", attempt)
        sends = talk.say(AttemptFailed(1, attempt, "hybrid-0", "broken"))
        delays += [each.delay_s for each in sends if each.message == Tick("retry", 1)]
        talk.retry()

    assert delays[0] < delays[1] < 1.0


def test_what_an_ended_attempt_still_sends_is_dropped():
    talk = Talk()
    talk.begin_decode()
    talk.tokens("decode-0", [11], 1)
    talk.change("decode-0", "decode", "down")
    talk.retry()
    talk.place("hybrid-0", attempt=2)

    assert talk.tokens("decode-0", [12], 2) == []
    talk.tokens("hybrid-0", [12], 2, attempt=2)
    assert talk.tokens("decode-0", [13], 3, done="stop") == []

    assert talk.received == [10, 11, 12] and talk.finals == []
    assert talk.machine.stats.late_tokens == 2


def test_tokens_that_come_twice_are_passed_on_once():
    talk = Talk()
    talk.begin_decode()
    talk.tokens("decode-0", [11, 12], 1)
    talk.tokens("decode-0", [11, 12], 1)
    talk.tokens("decode-0", [12, 13], 2)

    assert talk.received == [10, 11, 12, 13]


def test_a_gap_in_the_tokens_ends_the_attempt_and_nothing_wrong_goes_out():
    talk = Talk()
    talk.begin_decode()
    sends = talk.tokens("decode-0", [13], 3, done="stop")

    assert talk.received == [10] and talk.finals == []
    assert to(sends, "decode-0") == [Abort(1, 1)]
    assert talk.machine.stats.retried == {"gap": 1}


def test_an_end_that_counts_more_tokens_than_are_here_is_not_believed():
    talk = Talk()
    talk.begin_decode()
    talk.say(Tokens("decode-0", (), (Done(1, 1, "stop", 5),)))

    assert talk.finals == [] and talk.machine.stats.retried == {"gap": 1}


def test_a_request_whose_tokens_are_all_here_ends_though_the_word_of_its_end_is_lost():
    talk = Talk(max_tokens=3)
    talk.begin_decode()
    talk.tokens("decode-0", [11, 12], 1)
    talk.change("decode-0", "decode", "down")

    assert [each.finish for each in talk.finals] == ["length"]


def test_a_stop_token_that_came_is_an_end_too_but_not_before_the_least_number():
    for min_tokens, finish in ((0, ["stop"]), (2, [])):
        talk = Talk(stop_token_ids=(11,), min_tokens=min_tokens)
        talk.begin_decode()
        talk.tokens("decode-0", [11], 1)
        talk.change("decode-0", "decode", "down")

        assert [each.finish for each in talk.finals] == finish


def test_the_death_of_a_prefill_does_not_touch_a_request_that_decodes():
    talk = Talk()
    talk.begin_decode()

    assert talk.change("prefill-0", "prefill", "down") == []
    talk.tokens("decode-0", [11], 1)
    assert talk.received == [10, 11]


def test_the_death_of_a_prefill_before_the_hand_over_starts_another_attempt():
    talk = Talk()
    talk.begin_prefill()
    talk.tokens("prefill-0", [10], 0)

    talk.change("prefill-0", "prefill", "down")

    assert to(talk.retry(), "gateway/router") == [Route(1, 2, 5, avoid="prefill-0")]


def test_a_member_that_is_known_to_be_down_is_not_used_though_it_was_chosen():
    talk = Talk()
    talk.submit()
    talk.change("prefill-0", "prefill", "down")
    sends = talk.place("prefill-0")

    assert not any(isinstance(each, Prefill) for each in to(sends, "prefill-0"))
    assert talk.machine.stats.retried == {"member_down": 1}


def test_failures_told_by_others_than_the_member_in_charge_are_ignored():
    talk = Talk()
    talk.begin_decode()

    assert talk.say(AttemptFailed(1, 1, "prefill-0", "late word")) == []
    assert talk.say(AttemptFailed(1, 2, "decode-0", "of an attempt to come")) == []


def test_when_the_attempts_are_spent_the_client_learns_the_first_cause():
    talk = Talk()
    talk.submit()
    for attempt, cause in ((1, "the first trouble"), (2, "a second"), (3, "a third")):
        talk.place("hybrid-0", attempt)
        talk.say(AttemptFailed(1, attempt, "hybrid-0", cause))
        talk.retry()

    assert [(each.status, each.finish) for each in talk.finals] == [(503, None)]
    assert "the first trouble" in talk.finals[0].error and "3 times" in talk.finals[0].error
    assert talk.machine.stats.failed == {"attempt_failed": 1} and talk.machine.entries == {}


def test_a_failure_that_no_other_member_could_avoid_ends_the_request_at_once():
    talk = Talk()
    talk.begin_prefill()
    talk.say(AttemptFailed(1, 1, "prefill-0", "too large for any cache", retry=False))

    assert talk.finals[0].status == 500 and "too large" in talk.finals[0].error


def test_a_refusal_of_the_router_reaches_the_client_with_its_retry_after():
    talk = Talk()
    talk.submit()
    talk.say(Rejected(1, 1, "the queue is full", 429, 3.5))

    assert [(each.status, each.retry_after_s) for each in talk.finals] == [(429, 3.5)]
    assert talk.machine.stats.failed == {"queue_full": 1}


def test_no_decode_member_after_the_prefill_is_a_reason_to_try_again():
    talk = Talk()
    talk.begin_prefill()
    talk.tokens("prefill-0", [10], 0)
    talk.say(Rejected(1, 1, "no decode instance", 503, 1.0))

    assert talk.finals == []
    assert to(talk.retry(), "gateway/router")[0].attempt == 2


# ------------------------------------------------------------------------------------ a decode member refuses (C14)


def refuse(talk, member, attempt=1, turn=1, full=False):
    cause = "full" if full else "draining"
    return talk.say(AttemptFailed(1, attempt, member, cause, grant=grant(4), full=full, turn=turn))


def test_a_request_that_a_decode_member_refuses_goes_to_another_without_a_second_prefill():
    talk = Talk()
    talk.begin_decode()
    sends = refuse(talk, "decode-0")

    assert to(sends, "gateway/router") == [PlaceElsewhere(1, 1, "decode-0")]
    assert to(sends, "prefill-0") == to(sends, "decode-0") == []
    admit = Admit(talk.request, 1, pack_tokens([10]), grant(4), turn=2)
    assert to(talk.place("decode-1", grant=grant(4)), "decode-1") == [admit]
    talk.tokens("decode-1", [11], 1, done="stop")
    assert talk.received == [10, 11] and [each.finish for each in talk.finals] == ["stop"]
    assert talk.machine.stats.retried == {} and talk.machine.stats.placed_elsewhere == 1


def test_a_member_known_to_leave_since_it_was_chosen_is_not_even_asked():
    for state in ("draining", "down"):
        talk = Talk()
        talk.begin_prefill()
        talk.place("decode-0", grant=grant(4))
        talk.change("decode-0", "decode", state)
        sends = talk.tokens("prefill-0", [10], 0)

        assert to(sends, "decode-0") == []
        assert to(sends, "gateway/router") == [Started(1, 1), PlaceElsewhere(1, 1, "decode-0")]
        assert len(to(talk.place("decode-1", grant=grant(4)), "decode-1")) == 1


def test_words_of_a_refusal_or_of_its_placement_that_come_again_change_nothing():
    talk = Talk()
    talk.begin_decode()
    refuse(talk, "decode-0")
    assert refuse(talk, "decode-0") == talk.place("decode-0", grant=grant(4)) == []
    talk.place("decode-1", grant=grant(4))

    assert refuse(talk, "decode-0") == [], "the grant is with another member now"
    assert talk.place("decode-0", grant=grant(4)) == []
    assert to(hold(talk, "decode-1", 1.0), "decode-1") == []
    assert to(hold(talk, "decode-0", 1.0), "decode-0") == [Abort(1, 1, turn=2)]


def test_a_second_refusal_frees_the_blocks_and_begins_a_new_attempt():
    talk = Talk()
    talk.begin_decode()
    refuse(talk, "decode-0")
    talk.place("decode-1", grant=grant(4))
    sends = refuse(talk, "decode-1", turn=2)

    assert to(sends, "prefill-0") == [Abort(1, 1)] and to(sends, "gateway/router") == [Finished(1, 1)]
    assert to(talk.retry(), "gateway/router") == [Route(1, 2, 5, avoid="decode-1")]
    talk.place("prefill-0", attempt=2)
    talk.tokens("prefill-0", [11], 1, attempt=2)
    talk.place("decode-0", attempt=2, grant=grant(5))
    assert to(refuse(talk, "decode-0", attempt=2), "gateway/router") == [PlaceElsewhere(1, 2, "decode-0")]


def test_a_refusal_that_nobody_else_can_take_frees_the_blocks_and_avoids_who_refused():
    talk = Talk()
    talk.begin_decode()
    refuse(talk, "decode-0")
    sends = talk.say(Rejected(1, 1, "no other", 503, 1.0))

    assert to(sends, "prefill-0") == [Abort(1, 1)]
    assert to(talk.retry(), "gateway/router") == [Route(1, 2, 5, avoid="decode-0")]


def test_a_refusal_after_the_prefill_has_died_begins_a_new_attempt():
    for dies_first in (True, False):
        talk = Talk()
        talk.begin_decode()
        if dies_first:
            assert talk.change("prefill-0", "prefill", "down") == []
        sends = refuse(talk, "decode-0")
        if not dies_first:
            sends = talk.change("prefill-0", "prefill", "down")

        assert Finished(1, 1) in to(sends, "gateway/router")
        assert to(talk.retry(), "gateway/router")[0].attempt == 2


def test_a_grant_given_back_for_an_attempt_that_is_over_is_freed_at_its_source():
    talk = Talk()
    talk.begin_decode()
    talk.say(Cancel(1))
    assert refuse(talk, "decode-0") == refuse(talk, "decode-0")
    assert to(refuse(talk, "decode-0"), "prefill-0") == [Abort(1, 1)]
    assert talk.say(AttemptFailed(1, 1, "decode-0", "late word")) == []


def test_a_full_decode_member_may_be_asked_again_and_its_old_refusal_does_not_count_again():
    talk = Talk()
    talk.begin_decode()
    for turn in (1, 2, 3):
        sends = refuse(talk, "decode-0", turn=turn, full=True)
        assert to(sends, "gateway/router") == [PlaceElsewhere(1, 1, "decode-0", full=True)]
        assert to(sends, "prefill-0") == to(sends, "decode-0") == []
        admit = Admit(talk.request, 1, pack_tokens([10]), grant(4), turn + 1)
        assert to(talk.place("decode-0", grant=grant(4)), "decode-0") == [admit]

    assert refuse(talk, "decode-0", turn=3, full=True) == [], "it may have taken the fourth offer"
    talk.tokens("decode-0", [11], 1, done="stop")
    assert talk.received == [10, 11] and talk.machine.stats.retried == {}


def test_a_member_that_leaves_is_refused_by_once_however_often_others_were_full():
    talk = Talk()
    talk.begin_decode()
    refuse(talk, "decode-0", full=True)
    talk.place("decode-1", grant=grant(4))
    sends = refuse(talk, "decode-1", turn=2)
    assert to(sends, "gateway/router") == [PlaceElsewhere(1, 1, "decode-1")]
    talk.place("decode-0", grant=grant(4))
    sends = refuse(talk, "decode-0", turn=3, full=True)
    assert to(sends, "gateway/router") == [PlaceElsewhere(1, 1, "decode-0", full=True)]
    talk.place("decode-0", grant=grant(4))

    assert Finished(1, 1) in to(refuse(talk, "decode-0", turn=4), "gateway/router")


def test_no_room_by_the_deadline_ends_the_request_with_one_error_and_frees_the_blocks():
    talk = Talk()
    talk.begin_decode()
    refuse(talk, "decode-0", full=True)
    sends = talk.say(Rejected(1, 1, "every decode instance was full", 429, 3.0))

    assert to(sends, "prefill-0") == [Abort(1, 1)]
    assert [(each.status, each.retry_after_s) for each in talk.finals] == [(429, 3.0)]
    assert "every decode instance was full" in talk.finals[0].error
    assert talk.machine.entries == {}


def test_a_client_that_leaves_between_two_decode_members_frees_the_blocks():
    talk = Talk()
    talk.begin_decode()
    refuse(talk, "decode-0")
    sends = talk.say(Cancel(1))

    assert [each.to for each in sends if each.message == Abort(1, 1)] == ["prefill-0"]
    assert talk.place("decode-1", grant=grant(4)) == []


# ------------------------------------------------------------------------------------------------ deadlines


def expire(talk, at):
    return talk.say(Tick("deadline", 1), at)


def test_every_phase_has_a_deadline_with_its_name():
    for begin, patience_s, kind in ((Talk.submit, 11.0, "placing"), (Talk.begin_prefill, 20.0, "prefill"),
                                    (Talk.begin_decode, 5.0, "admitted")):
        talk = Talk()
        begin(talk)
        assert min(each.delay_s for each in talk.sends if each.message == Tick("deadline", 1)) <= patience_s

        expire(talk, patience_s - 0.1)
        assert talk.machine.stats.retried == {}
        expire(talk, patience_s)
        assert talk.machine.stats.retried == {f"{kind}_deadline": 1}


def test_a_hand_over_that_does_not_come_is_not_waited_for_for_ever():
    talk = Talk()
    talk.begin_prefill()
    talk.tokens("prefill-0", [10], 0)
    expire(talk, 11.0)

    assert talk.machine.stats.retried == {"handover_deadline": 1}


def test_each_token_puts_the_deadline_off():
    talk = Talk()
    talk.begin_decode()
    talk.now = 4.0
    talk.tokens("decode-0", [11], 1)

    again = expire(talk, 5.0)

    assert [each.message for each in again] == [Tick("deadline", 1)] and again[0].delay_s == 4.0
    expire(talk, 9.0)
    assert talk.machine.stats.retried == {"decode_deadline": 1}


def hold(talk, member, at, attempt=1):
    return talk.say(Heartbeat(member, "a", "up", 1, 1, 0, 0, 10, held=((1, attempt),)), at)


def test_a_request_that_waits_in_its_decode_member_is_not_lost_but_its_wait_is_bounded():
    talk = Talk()
    talk.begin_decode()
    for at in range(1, 20):
        assert hold(talk, "decode-0", at) == []
        expire(talk, at + 0.5)
    assert talk.machine.stats.retried == {}

    expire(talk, 20.0)
    assert talk.machine.stats.retried == {"admitted_deadline": 1}


# -------------------------------------------------------------------------------------------- leaving nothing behind


def test_a_client_that_leaves_frees_everything_in_every_phase():
    for begin, phase, members in ((Talk.submit, "placing", []), (Talk.begin_prefill, "prefill", ["prefill-0"]),
                                  (Talk.begin_decode, "admitted", ["prefill-0", "decode-0"])):
        talk = Talk()
        begin(talk)
        sends = talk.say(Cancel(1))

        assert [each.to for each in sends if each.message == Abort(1, 1)] == members
        assert to(sends, "gateway/router") == [Finished(1, 1)]
        assert [each.finish for each in talk.finals] == ["abort"]
        assert talk.machine.stats.aborted == {phase: 1} and talk.machine.entries == {}


def test_a_client_that_leaves_twice_or_after_the_end_changes_nothing():
    talk = Talk()
    talk.submit()
    talk.say(Cancel(1))

    assert talk.say(Cancel(1)) == []
    assert len(talk.finals) == 1


def test_a_retry_that_is_due_after_the_client_left_does_not_happen():
    talk = Talk()
    talk.begin_prefill()
    talk.change("prefill-0", "prefill", "down")
    talk.say(Cancel(1))

    assert talk.retry() == []


def test_a_member_that_holds_what_nobody_waits_for_is_told_to_drop_it():
    talk = Talk()
    assert to(hold(talk, "decode-0", 1.0), "decode-0") == [Abort(1, 1)]

    talk.begin_decode()
    assert hold(talk, "decode-0", 2.0) == hold(talk, "prefill-0", 2.0) == []
    assert to(hold(talk, "decode-1", 2.0), "decode-1") == [Abort(1, 1, turn=1)]
    talk.tokens("decode-0", [11], 1)
    assert to(hold(talk, "prefill-0", 3.0), "prefill-0") == [Abort(1, 1, turn=1)]     # its Release was lost
    assert talk.machine.stats.forgotten_attempts == 3


# ------------------------------------------------------------------------------------------------ log-probabilities


def test_log_probabilities_go_with_their_tokens_and_are_cut_like_them():
    talk = Talk()
    talk.begin_decode()
    part = TokenLogprobs(1, 1, 1, (-0.1, -0.2))
    talk.tokens("decode-0", [11, 12], 1, logprobs=[part])
    overlap = TokenLogprobs(1, 1, 2, (-0.2, -0.3), ((12,), (13,)), ((-0.2,), (-0.3,)))
    talk.tokens("decode-0", [12, 13], 2, logprobs=[overlap])

    first, second = (each.logprobs for each in talk.outputs[1:])
    assert first == part
    assert (second.start, second.chosen, second.top_ids) == (3, (-0.3,), ((13,),))


def test_prompt_log_probabilities_go_out_once_though_the_prompt_is_computed_twice():
    talk = Talk()

    def score(start, values, attempt):
        part = TokenLogprobs(1, attempt, start, values)
        return talk.say(Tokens("prefill-0", (Emitted("gateway", token_columns([]), prompt_logprobs=(part,)),)))

    talk.begin_prefill()
    score(1, (-1.0, -2.0), 1)
    talk.say(AttemptFailed(1, 1, "prefill-0", "broken"))
    talk.retry()
    talk.place("prefill-0", attempt=2)
    score(1, (-1.0,), 2)
    score(2, (-2.0, -3.0), 2)

    assert [(each.prompt_logprobs.start, each.prompt_logprobs.chosen) for each in talk.outputs] == [
        (1, (-1.0, -2.0)), (3, (-3.0,))]


def test_prompt_log_probabilities_that_one_attempt_computes_again_go_out_once():
    """A row that steps back in the middle of its prompt begins the prompt anew, in chunks of any size."""
    talk = Talk()
    talk.begin_prefill()
    for start, values in ((1, (-1.0, -2.0)), (1, (-1.0,)), (2, (-2.0,)), (1, (-1.0, -2.0, -3.0)), (3, (-3.0,))):
        ids, tops = tuple((round(-value),) for value in values), tuple((value,) for value in values)
        part = TokenLogprobs(1, 1, start, values, ids, tops)
        talk.say(Tokens("prefill-0", (Emitted("gateway", token_columns([]), prompt_logprobs=(part,)),)))

    assert [each.prompt_logprobs for each in talk.outputs] == [
        TokenLogprobs(1, 1, 1, (-1.0, -2.0), ((1,), (2,)), ((-1.0,), (-2.0,))),
        TokenLogprobs(1, 1, 3, (-3.0,), ((3,),), ((-3.0,),))]
    assert talk.machine.stats.retried == {}


def test_lost_prompt_log_probabilities_are_a_gap():
    talk = Talk()
    talk.begin_prefill()
    part = TokenLogprobs(1, 1, 3, (-3.0,))
    talk.say(Tokens("prefill-0", (Emitted("gateway", token_columns([]), prompt_logprobs=(part,)),)))

    assert talk.outputs == [] and talk.machine.stats.retried == {"gap": 1}


# ------------------------------------------------------------------------------------------------ rows handed on


def hand_on(talk, member="decode-0", num_tokens=6, attempt=1, turn=1):
    return talk.say(HandOn(1, attempt, member, grant(num_tokens, member), turn))


def test_a_row_that_its_decode_member_hands_on_is_decoded_elsewhere_in_the_same_attempt():
    talk = Talk()
    talk.begin_decode()
    talk.tokens("decode-0", [11, 12], 1)

    (elsewhere,) = to(hand_on(talk), "gateway/router")
    assert elsewhere == PlaceElsewhere(1, 1, "decode-0", grant=grant(6, "decode-0"))
    sends = talk.place("decode-1", grant=grant(6, "decode-0"))
    assert to(sends, "decode-1") == [Admit(talk.request, 1, pack_tokens([10, 11, 12]), grant(6, "decode-0"), 2)]

    talk.tokens("decode-1", [13, 14, 15, 16, 17], 3, done="length")
    assert talk.received == [10, 11, 12, 13, 14, 15, 16, 17] and [each.finish for each in talk.finals] == ["length"]
    assert talk.machine.stats.handed_on == 1 and talk.machine.stats.retried == {}


def test_a_row_may_be_handed_on_again_and_refused_in_between():
    talk = Talk()
    talk.begin_decode()
    talk.tokens("decode-0", [11], 1)
    hand_on(talk, num_tokens=5)
    talk.place("decode-1", grant=grant(5, "decode-0"))
    talk.say(AttemptFailed(1, 1, "decode-1", "it drains", grant=grant(5, "decode-0"), turn=2))
    talk.place("decode-2", grant=grant(5, "decode-0"))
    talk.tokens("decode-2", [12], 2)
    hand_on(talk, "decode-2", 6, turn=3)

    sends = talk.place("decode-0", grant=grant(6, "decode-2"))

    assert to(sends, "decode-0")[0].turn == 4
    assert talk.machine.stats.retried == {} and talk.machine.stats.handed_on == 2


def test_words_of_a_hand_on_that_come_again_or_too_late_change_nothing():
    talk = Talk()
    talk.begin_decode()
    talk.tokens("decode-0", [11, 12], 1)
    hand_on(talk)
    assert hand_on(talk) == []
    talk.place("decode-1", grant=grant(6, "decode-0"))
    assert hand_on(talk) == []
    talk.tokens("decode-1", [13], 3)
    assert hand_on(talk) == []

    talk.say(Cancel(1))
    assert to(hand_on(talk), "decode-0") == [Abort(1, 1)]


def test_a_client_that_leaves_while_a_row_moves_frees_its_blocks():
    talk = Talk()
    talk.begin_decode()
    talk.tokens("decode-0", [11, 12], 1)
    hand_on(talk)

    assert to(talk.say(Cancel(1)), "decode-0") == [Abort(1, 1)]


def test_a_member_that_holds_a_row_it_handed_on_is_not_told_to_drop_it_before_it_was_pulled():
    talk = Talk()
    talk.begin_decode()
    talk.tokens("decode-0", [11, 12], 1)
    hand_on(talk)
    talk.place("decode-1", grant=grant(6, "decode-0"))
    assert hold(talk, "decode-0", 1.0) == []

    talk.tokens("decode-1", [13], 3)
    assert to(hold(talk, "decode-0", 2.0), "decode-0") == [Abort(1, 1, turn=2)]

    hand_on(talk, "decode-1", 7, turn=2)
    assert to(hold(talk, "decode-0", 2.0), "decode-0") == [Abort(1, 1, turn=2)]
    assert to(talk.place("decode-0", grant=grant(7, "decode-1")), "decode-0")[0].turn == 3


def test_a_member_that_dies_with_a_row_it_hands_on_costs_an_attempt():
    talk = Talk()
    talk.begin_decode()
    talk.tokens("decode-0", [11, 12], 1)
    hand_on(talk)
    talk.change("decode-0", "decode", "down")

    assert to(talk.retry(), "gateway/router") == [Route(1, 2, 7, avoid="decode-0")]


def test_a_row_that_is_handed_on_and_finds_no_room_is_tried_again_and_ends_as_what_was_begun():
    talk = Talk()
    talk.begin_decode()
    talk.tokens("decode-0", [11, 12], 1)
    hand_on(talk)
    full = "every decode instance was full for 10 s"
    sends = talk.say(Rejected(1, 1, full, 429, 3.0))

    assert to(sends, "decode-0") == [Abort(1, 1)] and talk.finals == []
    for attempt in (2, 3):
        assert to(talk.retry(), "gateway/router")[0].num_tokens == 5 + attempt
        talk.place("prefill-0", attempt=attempt)
        talk.tokens("prefill-0", [11 + attempt], 1 + attempt, attempt=attempt)
        talk.say(Rejected(1, attempt, full, 429, 3.0))

    assert [(each.status, full in each.error) for each in talk.finals] == [(503, True)]
    assert talk.machine.stats.retried == {"queue_full": 2} and talk.machine.stats.failed == {"queue_full": 1}


def test_a_row_that_is_handed_on_and_fits_nobody_else_ends_with_an_error_of_ours():
    talk = Talk()
    talk.begin_decode()
    talk.tokens("decode-0", [11, 12], 1)
    hand_on(talk)
    talk.say(Rejected(1, 1, "7 tokens do not fit", 400, None))

    assert [(each.status, each.error) for each in talk.finals] == [(500, "7 tokens do not fit")]


def test_a_row_that_was_handed_on_with_other_tokens_than_are_here_begins_a_new_attempt():
    talk = Talk()
    talk.begin_decode()
    talk.tokens("decode-0", [11], 1)
    hand_on(talk, num_tokens=6)

    talk.place("decode-1", grant=grant(6, "decode-0"))

    assert talk.machine.stats.retried == {"gap": 1}
