"""The router: who gets what, how long one waits, and what is refused."""

from collections import Counter

from tripool.control.router import Router
from tripool.core.deployment import GatewayConfig
from tripool.core.machine import Send
from tripool.core.messages import (
    Facts,
    Finished,
    Grant,
    MemberChanged,
    Placed,
    PlaceElsewhere,
    Prefilled,
    Rejected,
    Route,
    Started,
    Tick,
)

BLOCK_TOKENS = 16


def router(**config) -> Router:
    return Router(GatewayConfig(**config))


def member(machine, name, *, state="up", boot="a", layout="layout", blocks=1000, free=None, running=0, waiting=0,
           room=100, at=0.0, role=None):
    facts = Facts("m", "f", layout, 4096, BLOCK_TOKENS, blocks)
    return machine.handle(MemberChanged(name, role or name.partition("-")[0], boot, state, facts, running, waiting,
                                        blocks if free is None else free, line_room=room), at)


def route(machine, request_id, *, tokens=32, attempt=1, at=0.0, **more):
    return machine.handle(Route(request_id, attempt, tokens, **more), at)


def prefilled(machine, request_id, source, *, tokens=33, attempt=1, layout="layout", at=0.0):
    grant = Grant(source, "a", layout, tokens - 1, ())
    return machine.handle(Prefilled(request_id, attempt, grant, tokens), at)


def placed(sends: list[Send]) -> list[tuple[int, str, str]]:
    return [(each.message.request_id, each.message.stage, each.message.member)
            for each in sends if isinstance(each.message, Placed)]


def rejected(sends: list[Send]) -> list[Rejected]:
    return [each.message for each in sends if isinstance(each.message, Rejected)]


def three_pools(**config) -> Router:
    machine = router(**config)
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        member(machine, name)
    return machine


def test_a_request_goes_to_a_prefill_and_then_to_a_decode_instance_with_its_grant():
    machine = three_pools()

    first = route(machine, 1)
    second = prefilled(machine, 1, "prefill-0")

    assert placed(first) == [(1, "prefill", "prefill-0")]
    assert placed(second) == [(1, "decode", "decode-0")]
    assert second[0].message.grant.source == "prefill-0"


def test_requests_spread_over_the_shortest_queues():
    machine = three_pools()

    chosen = [placed(route(machine, number, tokens=tokens))[0][2]
              for number, tokens in enumerate([300, 100, 100, 50, 100])]

    assert chosen == ["prefill-0", "prefill-1", "prefill-1", "prefill-1", "prefill-1"]


def test_decode_instances_share_the_load_evenly():
    machine = three_pools()
    for number in range(10):
        source = placed(route(machine, number))[0][2]
        prefilled(machine, number, source)

    assert Counter(entry.member for entry in machine.attempts.values()) == {"decode-0": 5, "decode-1": 5}


def test_a_decode_instance_short_of_blocks_yields_to_one_that_has_them():
    machine = three_pools()
    member(machine, "decode-0", free=1, running=0)
    member(machine, "decode-1", free=500, running=30)
    source = placed(route(machine, 1))[0][2]

    assert placed(prefilled(machine, 1, source)) == [(1, "decode", "decode-1")]


def test_what_was_just_placed_counts_before_the_member_reports_it():
    machine = three_pools()
    member(machine, "decode-0", free=4)
    member(machine, "decode-1", free=3)
    for number in (1, 2):
        prefilled(machine, number, placed(route(machine, number))[0][2])

    assert sorted(entry.member for entry in machine.attempts.values()) == ["decode-0", "decode-1"]


def test_what_was_placed_counts_until_the_second_report_and_never_more_than_is_still_there():
    machine = three_pools()
    route(machine, 1)                                            # to prefill-0; the next report may be too old for it
    first = machine.members["prefill-0"]

    queued = []
    for waiting in (0, 0, 500):
        machine.handle(MemberChanged("prefill-0", "prefill", "a", "up", None, 0, waiting, 1000), 0.0)
        queued.append(first.queued_tokens)

    assert queued == [32, 0, 32]


def test_a_decode_instance_has_what_it_reports_and_what_we_placed_there_whichever_is_more():
    machine = three_pools()
    for number in range(1, 4):
        route(machine, number)
    assert placed(prefilled(machine, 1, "prefill-0")) == [(1, "decode", "decode-0")]
    for _ in range(2):
        for name in ("decode-0", "decode-1"):
            member(machine, name)                                # reports that count none of ours

    assert placed(prefilled(machine, 2, "prefill-1")) == [(2, "decode", "decode-1")]
    for name, running in (("decode-0", 5), ("decode-1", 0)):
        for _ in range(2):
            member(machine, name, running=running)
    assert placed(prefilled(machine, 3, "prefill-0")) == [(3, "decode", "decode-1")]


def test_a_member_that_is_down_draining_or_loading_is_never_chosen():
    machine = three_pools()
    member(machine, "prefill-0", state="down")
    member(machine, "decode-0", state="draining")
    member(machine, "decode-1", state="loading")
    member(machine, "decode-2")

    assert placed(route(machine, 1)) == [(1, "prefill", "prefill-1")]
    assert placed(prefilled(machine, 1, "prefill-1")) == [(1, "decode", "decode-2")]


def test_only_members_with_equal_layouts_are_paired():
    machine = router()
    member(machine, "prefill-0", layout="old")
    member(machine, "prefill-1", layout="new")
    member(machine, "decode-0", layout="new")

    assert placed(route(machine, 1)) == [(1, "prefill", "prefill-1")]
    assert placed(prefilled(machine, 1, "prefill-1", layout="new")) == [(1, "decode", "decode-0")]


def test_a_hybrid_serves_when_no_prefill_is_up():
    machine = three_pools()
    member(machine, "prefill-0", state="down")
    member(machine, "prefill-1", state="down")
    member(machine, "hybrid-0")

    assert placed(route(machine, 1)) == [(1, "prefill", "hybrid-0")]


def test_a_hybrid_serves_when_no_decode_instance_is_up():
    machine = three_pools()
    member(machine, "decode-0", state="down")
    member(machine, "decode-1", state="down")
    member(machine, "hybrid-0")

    assert placed(route(machine, 1)) == [(1, "prefill", "hybrid-0")]


def test_an_idle_hybrid_yields_to_an_idle_prefill_and_helps_when_queues_grow():
    machine = three_pools()
    member(machine, "hybrid-0")

    chosen = [placed(route(machine, number))[0][2] for number in (1, 2, 3)]

    assert chosen == ["prefill-0", "prefill-1", "hybrid-0"]


def test_the_member_where_the_last_attempt_failed_is_avoided_while_there_is_another():
    machine = three_pools()

    assert placed(route(machine, 1, attempt=2, avoid="prefill-0")) == [(1, "prefill", "prefill-1")]

    member(machine, "prefill-1", state="down")
    assert placed(route(machine, 2, attempt=2, avoid="prefill-0")) == [(2, "prefill", "prefill-0")]


def test_a_request_waits_for_a_member_and_the_more_urgent_goes_first():
    machine = router()
    assert placed(route(machine, 1, priority=1)) == []
    assert placed(route(machine, 2, priority=0)) == []
    member(machine, "decode-0")

    assert placed(member(machine, "prefill-0")) == [(2, "prefill", "prefill-0"), (1, "prefill", "prefill-0")]


def test_whoever_waits_too_long_is_told_that_nobody_is_up():
    machine = router(place_deadline_s=5.0)
    timer = route(machine, 1, at=10.0)
    assert timer == [Send("gateway/router", Tick("place", 1), 5.0)]

    sends = machine.handle(Tick("place", 1), 15.0)

    assert [(each.status, each.request_id) for each in rejected(sends)] == [(503, 1)]
    assert "5 s" in rejected(sends)[0].cause
    assert machine.attempts == {} and machine.num_queued == 0


def test_a_decode_placement_waits_until_a_decode_instance_is_up():
    machine = router(place_deadline_s=5.0)
    member(machine, "prefill-0")
    member(machine, "decode-0")
    route(machine, 1)
    member(machine, "decode-0", state="down")

    assert placed(prefilled(machine, 1, "prefill-0")) == []
    assert placed(member(machine, "decode-1")) == [(1, "decode", "decode-1")]


def test_a_decode_placement_that_waits_is_given_up_after_its_own_deadline():
    machine = router(place_deadline_s=5.0)
    member(machine, "prefill-0")
    member(machine, "decode-0")
    route(machine, 1, at=0.0)
    member(machine, "decode-0", state="down")
    prefilled(machine, 1, "prefill-0", at=3.0)

    assert rejected(machine.handle(Tick("place", 1), 5.0)) == []
    assert [each.status for each in rejected(machine.handle(Tick("place", 1), 8.0))] == [503]


def refused(machine, request_id, member, *, attempt=1, full=False, at=1.0):
    sends = machine.handle(PlaceElsewhere(request_id, attempt, member, full), at)
    machine.check_invariants()
    return sends


def test_a_request_that_a_decode_instance_refused_goes_to_another_with_the_same_grant():       # case C14
    machine = three_pools()
    route(machine, 1)
    first = prefilled(machine, 1, "prefill-0")

    second = refused(machine, 1, "decode-0")

    assert placed(second) == [(1, "decode", "decode-1")]
    assert second[0].message.grant is first[0].message.grant
    assert refused(machine, 1, "decode-0") == [], "a word that comes twice places nothing twice"
    assert {name: each.num_decoding for name, each in machine.members.items()} == {
        "prefill-0": 0, "prefill-1": 0, "decode-0": 0, "decode-1": 1}


def test_a_refusal_that_nobody_else_can_take_is_told_at_once():
    for other in ("down", "layout", "cache"):
        machine = router()
        member(machine, "prefill-0")
        member(machine, "decode-0")
        route(machine, 1)
        prefilled(machine, 1, "prefill-0")
        member(machine, "decode-1", state="down" if other == "down" else "up", blocks=1 if other == "cache" else 1000,
               layout="another" if other == "layout" else "layout")

        assert [each.status for each in rejected(refused(machine, 1, "decode-0"))] == [503], other
        assert machine.attempts == {}


def test_a_refusal_by_a_member_that_has_gone_down_since_is_placed_too():
    machine = three_pools()
    route(machine, 1)
    prefilled(machine, 1, "prefill-0")
    member(machine, "decode-0", state="down")

    assert placed(refused(machine, 1, "decode-0")) == [(1, "decode", "decode-1")]


def test_a_full_decode_instance_is_passed_over_until_it_reports_room():                        # case C14
    machine = three_pools()
    for number in (1, 2, 3):
        route(machine, number)
    prefilled(machine, 1, "prefill-0")

    assert placed(refused(machine, 1, "decode-0", full=True)) == [(1, "decode", "decode-1")]
    assert placed(prefilled(machine, 2, "prefill-1")) == [(2, "decode", "decode-1")]       # though it has more to do
    member(machine, "decode-0", room=1)
    assert placed(prefilled(machine, 3, "prefill-0")) == [(3, "decode", "decode-0")]


def test_where_all_are_full_a_request_waits_for_the_first_that_has_room():
    machine = three_pools()
    member(machine, "decode-1", room=0)
    route(machine, 1)
    prefilled(machine, 1, "prefill-0", at=1.0)
    grant = machine.attempts[1].grant

    assert placed(refused(machine, 1, "decode-0", full=True, at=2.0)) == []
    assert placed(member(machine, "decode-1", room=0)) == []
    again = member(machine, "decode-0", room=1)

    assert placed(again) == [(1, "decode", "decode-0")]
    assert again[0].message.grant is grant


def test_no_more_are_sent_to_an_instance_than_it_has_room_for_and_the_first_goes_first():
    machine = router()
    member(machine, "prefill-0")
    member(machine, "decode-0", room=0)
    for number in range(1, 6):
        route(machine, number)
        assert placed(prefilled(machine, number, "prefill-0")) == []

    assert placed(member(machine, "decode-0", room=2)) == [(1, "decode", "decode-0"), (2, "decode", "decode-0")]
    route(machine, 6)
    assert placed(prefilled(machine, 6, "prefill-0")) == [], "those that came before wait too"
    assert [number for number, *_ in placed(member(machine, "decode-0", room=10))] == [3, 4, 5, 6]


def test_whoever_came_first_is_first_though_a_refusal_made_it_wait_last():
    machine = router()
    member(machine, "prefill-0")
    member(machine, "decode-0", room=1)
    for number in (1, 2):
        route(machine, number)
        prefilled(machine, number, "prefill-0")
    assert refused(machine, 1, "decode-0", full=True) != []

    assert placed(member(machine, "decode-0", room=1)) == [(1, "decode", "decode-0")]


def test_a_request_that_finds_no_room_in_time_is_told_so_however_often_it_was_placed():
    machine = router(place_deadline_s=5.0)
    member(machine, "prefill-0")
    member(machine, "decode-0")
    route(machine, 1, at=0.0)
    prefilled(machine, 1, "prefill-0", at=3.0)
    assert refused(machine, 1, "decode-0", full=True, at=4.0) == [Send("gateway/router", Tick("place", 1), 4.0)]
    member(machine, "decode-0", at=5.0)
    refused(machine, 1, "decode-0", full=True, at=6.0)

    assert rejected(machine.handle(Tick("place", 1), 7.0)) == []
    sends = machine.handle(Tick("place", 1), 8.0)

    assert [(each.status, "full for 5 s" in each.cause) for each in rejected(sends)] == [(429, True)]
    assert machine.attempts == {} and machine.handle(Tick("place", 1), 8.0) == []


def test_one_that_leaves_is_not_asked_again_by_a_request_that_waits_for_room_elsewhere():
    machine = three_pools()
    member(machine, "decode-1", room=0)
    route(machine, 1)
    prefilled(machine, 1, "prefill-0")
    assert placed(refused(machine, 1, "decode-0")) == []

    assert placed(member(machine, "decode-0")) == []
    assert placed(member(machine, "decode-1", room=1)) == [(1, "decode", "decode-1")]


def test_a_refusal_of_what_is_not_placed_for_decode_changes_nothing():
    machine = three_pools()
    route(machine, 1)
    assert refused(machine, 1, "prefill-0") == [], "it is still prefilled"
    for name in ("decode-0", "decode-1"):
        member(machine, name, state="down")
    prefilled(machine, 1, "prefill-0")
    assert refused(machine, 1, "decode-0") == [], "it waits for a decode instance already"
    assert refused(machine, 1, "decode-0", attempt=2) == refused(machine, 2, "decode-0") == []
    assert placed(member(machine, "decode-1")) == [(1, "decode", "decode-1")]


def test_too_many_queued_requests_are_refused_with_429():
    machine = three_pools(max_queued_requests=2)
    route(machine, 1)
    route(machine, 2)

    refusal = rejected(route(machine, 3))

    assert [(each.request_id, each.status) for each in refusal] == [(3, 429)]
    assert refusal[0].retry_after_s >= 1.0


def test_too_many_queued_prompt_tokens_are_refused_but_one_large_prompt_alone_is_not():
    machine = three_pools(max_queued_tokens=100)

    assert placed(route(machine, 1, tokens=5000)) != []
    assert [each.status for each in rejected(route(machine, 2, tokens=10))] == [429]


def test_a_request_leaves_the_queue_with_its_first_token():
    machine = three_pools(max_queued_requests=1)
    route(machine, 1)
    assert rejected(route(machine, 2)) != []

    machine.handle(Started(1, 1), 1.0)

    assert placed(route(machine, 3)) != []


def test_a_retry_is_let_in_whatever_the_caps():
    machine = three_pools(max_queued_requests=1)
    route(machine, 1)

    assert placed(route(machine, 2, attempt=2)) != []


def test_retry_after_follows_the_rate_at_which_prompts_finish():
    machine = three_pools(max_queued_tokens=1000)
    for number in range(10):
        route(machine, number, tokens=100, at=number)
        machine.handle(Started(number, 1), number + 0.5)
    for number in range(10, 20):
        route(machine, number, tokens=100, at=10.0)

    refusal = rejected(route(machine, 20, tokens=100, at=10.0))[0]

    assert 5.0 <= refusal.retry_after_s <= 20.0        # 1000 tokens wait, 100 a second finish


def test_a_prompt_that_fits_no_instance_is_refused_at_once():
    machine = router()
    member(machine, "prefill-0", blocks=4)
    member(machine, "decode-0", blocks=4)

    refusal = rejected(route(machine, 1, tokens=4 * BLOCK_TOKENS + 1))

    assert [each.status for each in refusal] == [400]
    assert "64" in refusal[0].cause


def test_a_prefilled_of_a_member_that_was_not_chosen_places_nothing():
    machine = three_pools()
    route(machine, 1)

    assert prefilled(machine, 1, "prefill-1") == []
    assert placed(prefilled(machine, 1, "prefill-0")) == [(1, "decode", "decode-0")]


def test_a_second_prefilled_of_one_attempt_places_nothing():
    machine = three_pools()
    source = placed(route(machine, 1))[0][2]

    assert placed(prefilled(machine, 1, source)) != []
    assert prefilled(machine, 1, source) == []


def test_words_about_an_older_attempt_change_nothing():
    machine = three_pools()
    route(machine, 1, attempt=1)
    machine.handle(Finished(1, 1), 0.0)
    route(machine, 1, attempt=2)

    machine.handle(Finished(1, 1), 0.0)
    machine.handle(Started(1, 1), 0.0)

    assert machine.attempts[1].attempt == 2 and machine.num_queued == 1
    assert prefilled(machine, 1, machine.attempts[1].member, attempt=1) == []


def test_a_new_life_of_a_member_starts_with_nothing_on_it():
    machine = three_pools()
    for number in range(6):
        route(machine, number)

    member(machine, "prefill-0", boot="b")

    assert machine.members["prefill-0"].num_prefilling == 0
    machine.check_invariants()
    for number in range(6):
        machine.handle(Finished(number, 1), 1.0)
    machine.check_invariants()
    assert machine.num_queued == 0


def test_the_same_words_in_the_same_order_give_the_same_choices():
    def run() -> list[Send]:
        machine = three_pools()
        return [send for number in range(50) for send in route(machine, number, tokens=number * 7 % 90 + 1)]

    assert run() == run()


def test_an_instance_that_has_changed_its_role_is_chosen_for_the_new_one_alone():
    machine = three_pools()
    member(machine, "prefill-0", state="draining")
    member(machine, "prefill-0", role="decode")
    member(machine, "decode-0", running=5)
    member(machine, "decode-1", running=5)

    assert placed(route(machine, 1)) == [(1, "prefill", "prefill-1")]
    assert placed(prefilled(machine, 1, "prefill-1")) == [(1, "decode", "prefill-0")]
    machine.check_invariants()


def test_an_instance_does_not_pull_from_itself_after_it_has_changed_its_role():
    machine = three_pools()
    route(machine, 1)
    route(machine, 2)
    member(machine, "prefill-0", role="decode")
    member(machine, "decode-0", running=5)
    member(machine, "decode-1", running=5)
    assert placed(prefilled(machine, 1, "prefill-0")) == [(1, "decode", "decode-0")]

    member(machine, "decode-0", state="down")
    member(machine, "decode-1", state="down")
    (refused,) = rejected(machine.handle(PlaceElsewhere(1, 1, "decode-0"), 0.0))
    assert refused.status == 503        # tried again, it is prefilled by somebody else
    machine.check_invariants()


def test_a_row_that_was_handed_on_is_placed_with_its_own_blocks_and_not_where_they_are():
    machine = three_pools(place_deadline_s=10.0)
    route(machine, 1)
    prefilled(machine, 1, "prefill-0")
    grant = Grant("decode-0", "a", "layout", 80, ())

    sends = machine.handle(PlaceElsewhere(1, 1, "decode-0", grant=grant), 100.0)

    assert placed(sends) == [(1, "decode", "decode-1")] and sends[0].message.grant == grant
    assert machine.members["decode-1"].num_decoding == 1 and machine.members["decode-0"].num_decoding == 0
    machine.check_invariants()


def test_a_row_that_was_handed_on_waits_for_room_as_long_as_any_other():
    machine = three_pools(place_deadline_s=10.0)
    route(machine, 1)
    prefilled(machine, 1, "prefill-0")
    member(machine, "decode-1", room=0)

    (timer,) = machine.handle(PlaceElsewhere(1, 1, "decode-0", grant=Grant("decode-0", "a", "layout", 80, ())), 100.0)

    assert timer.message == Tick("place", 1) and timer.delay_s == 10.0
    assert placed(member(machine, "decode-1", room=1)) == [(1, "decode", "decode-1")]
