"""The arithmetic of bench/routing: a router that follows caches does, and a crossover is between two bandwidths."""

import pytest

import routing
from tripool.core.deployment import GatewayConfig
from tripool.core.messages import Facts, MemberChanged, Placed, Route
from tripool.sim.requests import Workload, WorkRequest

PROMPTS = (((1, 512), (2, 512)), ((3, 512),), ((1, 512), (2, 512), (4, 100)), ((1, 512), (5, 512)))
WORK = Workload("test", tuple(WorkRequest(float(at), parts, 5) for at, parts in enumerate(PROMPTS)))


def router(instance_tokens: int = 10_000) -> routing.FollowingRouter:
    made = routing.FollowingRouter(GatewayConfig(), WORK, instance_tokens)
    for member, role in (("prefill-0", "prefill"), ("prefill-1", "prefill"), ("decode-0", "decode")):
        facts = Facts("m", "m", "layout", 4096, 512, 100)
        made.handle(MemberChanged(member, role, "life", "up", facts, num_free_blocks=100, line_room=10), 0.0)
    return made


def placed(made: routing.FollowingRouter, number: int) -> str:
    tokens = WORK.requests[number].num_prompt
    return next(send.message.member for send in made.handle(Route(number + 1, 1, tokens), float(number))
                if isinstance(send.message, Placed))


def test_a_prompt_goes_where_most_of_it_was_sent_before():
    made = router()
    first = placed(made, 0)
    other = placed(made, 1)
    assert first != other
    made.members[first].num_prefilling_tokens = made.members[other].num_prefilling_tokens = 0      # both are idle again
    assert placed(made, 2) == first


def test_a_busy_instance_is_left_alone_and_what_does_not_fit_is_forgotten():
    made = router(instance_tokens=1024)
    first = placed(made, 0)
    made.members[first].tokens_since.add(5000)
    made.members[first].num_prefilling_tokens = 5000
    assert placed(made, 2) != first
    held = made._held[first]
    made._put(made.attempts[3], made.members[first])
    assert sum(held.values()) <= 1024 + 512 and 1 not in held


def test_a_plot_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(routing, "run", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr("sys.argv", ["routing.py", "--quick", "--plot", str(tmp_path)])
    with pytest.raises(SystemExit):
        routing.main()
    assert "argument --plot" in capsys.readouterr().err


@pytest.mark.parametrize(("goodputs", "goal", "expected"), [
    ([5.0, 6.0, 7.0], 4.0, 0.0), ([1.0, 3.0, 7.0], 3.0, 2.0), ([1.0, 3.0, 7.0], 2.0, 2**0.5),
    ([1.0, 2.0, 3.0], 4.0, None),
])
def test_the_crossover_is_between_two_bandwidths(goodputs, goal, expected):
    assert routing.crossover((1.0, 2.0, 4.0), goodputs, goal) == pytest.approx(expected)
