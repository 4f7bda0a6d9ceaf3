"""How experts are used, for operators: what is told, what is unknown, and who is told to spread them anew."""

from array import array

import pytest

from tests.api.builders import application, get, ids, post
from tests.api.scripted import Script, ScriptedBackend
from tripool.api.experts import member_experts
from tripool.control.experts import ExpertFigures
from tripool.core.placement import Placement
from tripool.serve.wire import ExpertReport

FIRST = Placement(1, 4, (3, 2), ((0, 1, 3, 2, 3), (0, 1, 2, 2, 3)))
NOW = Placement(5, 4, (3, 2), ((0, 1, 3, 2, 0), (0, 1, 2, 2, 3)))
LOADS = (8.0, 2.0, 2.0, 4.0, 1.0, 1.0, 1.0, 1.0)
EXCHANGE = ({"sleeps": 3, "wakes": 2, "waited_ns": 1_500_000_000, "sent_bytes": 4096}, {})


def figures(**changes) -> ExpertFigures:
    values = dict(version=5, oldest_version=4, runnable=True, before=(1.75, 1.0), after=(1.25, 1.25), lost_ranks=(),
                  num_steps=200, num_planned=1, num_gated=1, num_changed=2, num_blocked=3, num_moves=4,
                  moved_bytes=4000, num_failures=0, cause="")
    return ExpertFigures(**(values | changes))


def report(member: str = "prefill-0", **changes) -> ExpertReport:
    return ExpertReport(member, figures(**changes), 4, array("f", LOADS).tobytes(), FIRST.pack(), NOW.pack(), EXCHANGE)


def backend(*reports: ExpertReport, **more) -> ScriptedBackend:
    return ScriptedBackend(Script(ids("Yes")), told_experts=[member_experts(each) for each in reports], **more)


def test_loads_of_ranks_follow_from_the_map_and_the_loads_of_experts():
    told = member_experts(report())
    assert told.layers[0].loads == [8, 2, 2, 4]
    assert told.layers[0].first_rank_loads == [8 + 2 + 2, 2 + 2]        # expert 3 has two copies
    assert told.layers[0].rank_loads == [4 + 2 + 4, 2 + 4]              # now it is expert 0
    assert told.layers[1].first_rank_loads == told.layers[1].rank_loads == [2.5, 1.5]
    assert (told.map_version, told.layers[0].slots, told.slots_per_rank) == (5, [0, 1, 3, 2, 0], [3, 2])


def test_what_is_not_known_yet_is_null():
    told = member_experts(report())
    assert [each.max_over_mean_before for each in told.layers] == [1.75, None]      # one layer was looked at
    idle = ExpertReport("prefill-0", figures(), 4, array("f", [*LOADS[:4], 0, 0, 0, 0]).tobytes(), FIRST.pack(),
                        NOW.pack(), EXCHANGE)
    assert [each.max_over_mean for each in member_experts(idle).layers] == [1.25, None]
    assert told.exchange[1] is None
    assert (told.exchange[0].wait_seconds, told.exchange[0].sent_bytes) == (1.5, 4096)


def test_experts_of_all_instances_or_of_one():
    app = application(backend(report()))
    page = get(app, "/experts").json
    assert page["members"][0]["layers"][0]["loads"] == [8, 2, 2, 4] and page["without"] == {}
    assert get(app, "/experts?member=prefill-0").json == page
    refused = get(app, "/experts?member=decode-7")
    assert refused.status == 404 and refused.error["message"].endswith("there are prefill-0")


@pytest.mark.parametrize(("state", "why"), [({}, "its model has none"), ({"ready": False}, "it is loading")])
def test_an_instance_that_has_told_nothing_is_told_with_the_reason(state, why):
    page = get(application(backend(**state)), "/experts").json
    assert page["members"] == [] and why in page["without"]["prefill-0"]


@pytest.mark.parametrize("body", [None, {}, {"member": "prefill-0"}])
def test_instances_are_told_to_spread_their_experts(body):
    scripted = backend(report())
    reply = post(application(scripted), "/rebalance", body if body is not None else b"")
    assert (reply.status, reply.json) == (200, {"members": ["prefill-0"]})
    assert scripted.rebalanced == ["prefill-0"]


def test_nobody_is_told_where_there_are_no_experts():
    scripted = backend()
    assert post(application(scripted), "/rebalance", {}).json == {"members": []}
    assert post(application(scripted), "/rebalance", {"member": "prefill-0"}).error["code"] == "no_experts"
    assert post(application(scripted), "/rebalance", {"member": "nobody"}).error["code"] == "member_not_found"
    assert post(application(scripted), "/rebalance", {"member": 3}).status == 400
    assert scripted.rebalanced == []


def test_operators_alone_see_and_move_experts():
    app = application(backend(report()), admin_keys=("root",), api_keys=("k",))
    for path, method in (("/experts", "GET"), ("/rebalance", "POST")):
        for key, status in (("k", 401), ("root", 200)):
            assert post(app, path, b"", method=method, headers={"authorization": f"Bearer {key}"}).status == status
