"""The simulated data plane: right plans get right tokens, wrong ones are noticed."""

import random
from array import array
from dataclasses import replace

import pytest

from tripool.core.deployment import InstanceConfig
from tripool.core.messages import (
    ExpertsMoved,
    Failed,
    Fetch,
    Fetched,
    Grant,
    Load,
    Loaded,
    MoveExperts,
    Part,
    Pull,
    Pulled,
    Ran,
    RankBack,
    RankLost,
    Run,
    Store,
    Stored,
)
from tripool.core.placement import DISK, EMPTY, Edit, MapChange, Move, pack_edits, unpack
from tripool.core.plan import BlockRef, Chunk, Grow, Join, RankResult, Section, StepPlan
from tripool.core.request import Limits, Request, Sampling, pack_tokens, unpack_tokens
from tripool.sim.dataplane import LoseRank, ReturnRank, SimDataPlane, ToyPrice, VerbFaults, toy_facts
from tripool.sim.experts import SimExperts, ToyMixture
from tripool.sim.memory import SimMemory
from tripool.sim.toy import STOP_TOKEN, expected_output, next_token

WIDTH = 4
PROMPT = [11, 12, 13, 14, 15, 16]
LIMITS = Limits(max_tokens=5)


class Plane:
    """A data plane that answers at once."""

    def __init__(self, memory=None, member="hybrid-0", num_drafts=0) -> None:
        self.memory = memory or SimMemory()
        self.plane = SimDataPlane(member, "life", toy_facts(8, WIDTH), self.memory, num_drafts=num_drafts)
        self.num_verbs = 0
        self.num_steps = 0

    def ask(self, kind, *arguments):
        self.num_verbs += 1
        (timer,) = self.plane.handle(kind(self.num_verbs, 60.0, *arguments), 0.0)
        (answer,) = self.plane.handle(timer.message, timer.delay_s)
        return answer.message

    def step(self, **section):
        self.num_steps += 1
        return self.ask(Run, StepPlan(self.num_steps, (Section(**section),)))

    def join(self, *, slot=0, blocks=(0, 1), generation=1, computed=0, decodes=True, fresh=None, tokens=PROMPT):
        row = Join(slot, 1, 1, "gateway", pack_tokens(tokens), len(PROMPT), computed, blocks, Sampling(seed=3), LIMITS,
                   decodes)
        fresh = blocks[-(-computed // WIDTH):] if fresh is None else fresh
        chunks = (Chunk(slot, len(tokens) - computed),) if len(tokens) - computed > 1 else ()
        return self.step(fresh=tuple(BlockRef(block, generation) for block in fresh), joins=(row,), chunks=chunks,
                         seals=blocks)


def emitted(ran: Ran) -> list[int]:
    return [token for part in ran.result.ranks[0].emitted for *_, tokens in part.columns.rows()
            for token in unpack_tokens(tokens)]


def wanted(count: int) -> list[int]:
    return [next_token(3, number, LIMITS) for number in range(count)]


def test_what_a_request_must_get_depends_on_its_seed_and_limits_alone():
    request = Request(1, pack_tokens(PROMPT), Sampling(seed=3), LIMITS)
    stops = Request(2, b"", Sampling(seed=3), Limits(5000, min_tokens=0, stop_token_ids=(STOP_TOKEN,)))
    later = Request(2, b"", Sampling(seed=3), Limits(5000, min_tokens=4000, stop_token_ids=(STOP_TOKEN,)))

    assert expected_output(request) == (pack_tokens(wanted(5)), "length")
    assert expected_output(stops)[1] == "stop"
    assert len(expected_output(stops)[0]) < 4000 * 4 <= len(expected_output(later)[0])


def test_a_row_emits_its_tokens_and_leaves_by_itself():
    plane = Plane()

    tokens = emitted(plane.join())
    tokens += emitted(plane.step())
    last = plane.step()                        # position 7 fills the second block
    tokens += emitted(last)
    assert last.result.ranks[0].need == (0,)
    assert emitted(plane.step()) == []         # without a block it waits
    for _ in range(2):
        last = plane.step(grows=(Grow(0, (2,)),), fresh=(BlockRef(2, 1),)) if len(tokens) == 3 else plane.step()
        tokens += emitted(last)

    assert tokens == wanted(5)
    left = last.result.ranks[0].left[0]
    assert (left.reason, left.num_computed, unpack_tokens(left.tokens)) == ("length", 10, PROMPT + wanted(5))
    assert plane.memory.wrongs == []


@pytest.mark.parametrize(("are_right", "emits"), [(True, [1, 2, 2]), (False, [1, 1, 1, 1, 1])])
def test_right_drafts_bring_the_same_tokens_in_fewer_steps(monkeypatch, are_right, emits):
    """Of two blocks the prompt leaves two places: room for one draft."""
    monkeypatch.setattr("tripool.sim.engine.guesses_right", lambda seed, number: are_right)
    plane = Plane(num_drafts=2)
    steps = [plane.join(), plane.step()]
    assert steps[0].result.ranks[0].want == (0,)
    steps.append(plane.step(grows=(Grow(0, (2,)),), fresh=(BlockRef(2, 1),)))
    while not steps[-1].result.ranks[0].left:
        steps.append(plane.step())

    results = [step.result.ranks[0] for step in steps]
    assert [token for step in steps for token in emitted(step)] == wanted(5)
    assert [len(emitted(step)) for step in steps] == emits
    assert [result.num_decode_tokens for result in results] == [0, *emits[1:]]
    assert [sum(result.num_accepted) for result in results] == [0, *(count - 1 for count in emits[1:])]
    assert [result.num_drafted for result in results][:2] == [(0, 0), (1, 0)]
    assert plane.memory.wrongs == []


def test_a_row_that_may_not_be_drafted_for_is_not():
    plane, quiet = Plane(num_drafts=2), Sampling(seed=3, drafts=False)
    row = Join(0, 1, 1, "gateway", pack_tokens(PROMPT), len(PROMPT), 0, (0, 1, 2), quiet, LIMITS, True)
    plane.step(fresh=tuple(BlockRef(block, 1) for block in range(3)), joins=(row,), chunks=(Chunk(0, 6),))
    result = plane.step().result.ranks[0]
    assert (result.num_drafted, result.num_decode_tokens, result.want) == ((0, 0), 1, ())


def test_a_row_of_a_prefill_instance_leaves_with_its_token():
    plane = Plane()
    ran = plane.join(decodes=False)

    assert emitted(ran) == wanted(1)
    assert [(left.slot, left.reason) for left in ran.result.ranks[0].left] == [(0, None)]
    assert emitted(plane.step()) == []


def test_a_prompt_in_chunks_gives_the_same_contents_as_in_one():
    whole, chunked = Plane(), Plane()
    sums = whole.join().result.ranks[0].sums
    row = Join(0, 1, 1, "gateway", pack_tokens(PROMPT), len(PROMPT), 0, (0, 1), Sampling(seed=3), LIMITS, True)
    chunked.step(fresh=(BlockRef(0, 1), BlockRef(1, 1)), joins=(row,), chunks=(Chunk(0, 3),))
    last = chunked.step(chunks=(Chunk(0, 3),), seals=(0, 1))

    assert last.result.ranks[0].sums == sums and emitted(last) == wanted(1)


def test_foreign_contents_give_a_wrong_token_and_are_noticed():
    plane = Plane()
    plane.join(tokens=[91, 92, 93, 94, 95, 96])

    token = emitted(plane.join(slot=1, blocks=(0, 2), computed=4, fresh=(2,)))

    assert token != wanted(1)
    assert "not its own" in plane.memory.wrongs[0]


def test_a_block_that_is_written_without_a_new_generation_is_noticed():
    plane = Plane()
    plane.join()
    plane.join(slot=1, blocks=(0, 1), fresh=())

    assert "places filled" in plane.memory.wrongs[0]


def test_a_block_that_is_given_out_while_a_row_has_it_is_noticed():
    plane = Plane()
    plane.join()
    plane.join(slot=1, blocks=(0, 2), generation=2)

    assert "while a row has it" in plane.memory.wrongs[0]


def test_a_block_that_is_given_out_while_a_copy_writes_it_is_noticed():
    plane = Plane()
    plane.plane.handle(Fetch(100, 1.0, 0, (b"key",), (BlockRef(0, 1),)), 0.0)
    plane.join(generation=2)

    assert "while a verb names it" in plane.memory.wrongs[0]


def test_the_pool_gives_back_what_was_stored_up_to_the_first_miss():
    plane = Plane()
    plane.join()

    assert plane.ask(Store, 0, (b"a",), (BlockRef(0, 1),)) == Stored(2, 1)
    assert plane.ask(Store, 0, (b"a",), (BlockRef(0, 1),)) == Stored(3, 0)
    fetched = plane.ask(Fetch, 0, (b"a", b"b", b"a"), tuple(BlockRef(block, 1) for block in (4, 5, 6)))

    assert isinstance(fetched, Fetched) and fetched.num_blocks == len(fetched.checksums) == 1


def test_other_contents_under_a_known_key_are_noticed():
    plane = Plane()
    plane.join()
    plane.join(slot=1, blocks=(2, 3), tokens=[91, 92, 93, 94, 95, 96])
    plane.ask(Store, 0, (b"a",), (BlockRef(0, 1),))
    plane.ask(Store, 0, (b"a",), (BlockRef(2, 1),))

    assert "under a key" in plane.memory.wrongs[0]


def handed_over(memory):
    """A prefill instance with a finished prompt, and the grant of its blocks."""
    source = Plane(memory, "prefill-0")
    sums = source.join(decodes=False).result.ranks[0].sums
    parts = tuple(Part(0, block, 1, each) for block, each in sums)
    return source, Grant("prefill-0", "life", "toy", len(PROMPT), parts)


def test_pulled_blocks_go_on_where_the_prefill_ended():
    memory = SimMemory()
    _, grant = handed_over(memory)
    decode = Plane(memory, "decode-0")

    assert decode.ask(Pull, 0, grant, (BlockRef(3, 1), BlockRef(4, 1))) == Pulled(1)
    token = emitted(decode.join(blocks=(3, 4), computed=6, tokens=PROMPT + wanted(1), fresh=()))

    assert token == wanted(2)[1:] and memory.wrongs == []


def test_a_pull_of_a_block_in_another_generation_fails():
    memory = SimMemory()
    source, grant = handed_over(memory)
    source.step(leaves=(0,))
    source.join(slot=1, blocks=(1, 2), generation=2)

    answer = Plane(memory, "decode-0").ask(Pull, 0, grant, (BlockRef(3, 1), BlockRef(4, 1)))

    assert isinstance(answer, Failed) and "not the one that was granted" in answer.cause


def test_a_verb_is_answered_at_its_deadline_if_it_is_not_done_by_then():
    plane = SimDataPlane("hybrid-0", "life", toy_facts(8, WIDTH), SimMemory())

    (timer,) = plane.handle(Load(1, 0.1), 0.0)
    (answer,) = plane.handle(timer.message, 0.1)

    assert timer.delay_s == 0.1 and isinstance(answer.message, Failed)


def test_loading_tells_the_facts():
    assert Plane().ask(Load) == Loaded(1, toy_facts(8, WIDTH))


def test_a_second_step_while_one_runs_is_noticed():
    plane = Plane()
    for verb_id in (1, 2):
        plane.plane.handle(Run(verb_id, 1.0, StepPlan(verb_id, (Section(),))), 0.0)

    assert "while another runs" in plane.memory.wrongs[0]


# ---------------------------------------------------------------- ranks and experts


class Trio:
    """A data plane of three ranks with experts, which answers when it is told to. Without rank 1 no expert is lost."""

    def __init__(self, faults=None) -> None:
        self.memory = SimMemory()
        mixture, config = ToyMixture(), InstanceConfig(ranks=3, redundant_experts=6, exchange="collective")
        experts = SimExperts("hybrid-0", mixture, mixture.geometry(config), self.memory.wrongs)
        self.plane = SimDataPlane("hybrid-0", "life", toy_facts(8, WIDTH, num_ranks=3), self.memory, experts=experts,
                                  faults=faults)
        self.num_verbs = 0
        self.now = 0.0
        (self.loaded,) = self.end(self.begin(Load))

    def begin(self, kind, *arguments):
        self.num_verbs += 1
        return self.plane.handle(kind(self.num_verbs, 60.0, *arguments), self.now)

    def end(self, sends):
        """What was said, or what comes of the timer that was set."""
        if len(sends) == 1 and sends[0].to == self.plane.address:
            self.now += sends[0].delay_s
            sends = self.plane.handle(sends[0].message, self.now)
        return [send.message for send in sends]

    def run(self, *sections, lost=(), unnamed=()):
        """A step; slots in `unnamed` of both layers name nothing from then on."""
        sections = (*sections, *[Section()] * (3 - len(sections)))
        edits = [Edit(layer, slot, EMPTY) for layer in (0, 1) for slot in unnamed]
        changes = (MapChange(1, 2, pack_edits(edits)),) if edits else ()
        return self.begin(Run, StepPlan(self.num_verbs, sections, 1 + len(changes), changes, lost))

    def lose(self, rank=1):
        return [send.message for send in self.plane.handle(LoseRank(rank), self.now)]


JOINING = Section(
    fresh=(BlockRef(0, 1), BlockRef(1, 1)), chunks=(Chunk(0, 6),),
    joins=(Join(0, 1, 1, "gateway", pack_tokens(PROMPT), 6, 0, (0, 1), Sampling(seed=3), LIMITS, True),))
AGAIN = replace(JOINING, fresh=())                         # its blocks are published
SLOTS_OF_1 = (4, 5, 6, 7)


def test_loading_tells_of_the_experts():
    trio = Trio()

    assert trio.loaded.experts.geometry.num_ranks == 3
    assert unpack(trio.loaded.experts.placement).layers == ((0, 1, 2, 3, 2, 3, 0, 1, 4, 5, 0, 1),) * 2


def test_a_step_is_given_up_when_a_rank_is_lost_and_rows_leave_as_they_were():
    trio = Trio()
    timer = trio.run(JOINING, JOINING)

    lost, ran = trio.lose()

    assert (lost.rank, ran.result.aborted) == (1, "ranks [1] are gone")
    first, second, third = ran.result.ranks
    assert [(left.slot, left.reason, left.num_computed, left.tokens) for left in first.left] == \
        [(0, None, 0, pack_tokens(PROMPT))]
    assert (first.aborted, second, third) == (True, RankResult(), RankResult(aborted=True))
    assert trio.end(timer) == []                           # its time comes, but it was answered


def test_rows_that_a_given_up_step_brought_back_join_the_next_one():
    trio = Trio()
    trio.run(JOINING, JOINING)
    trio.lose()

    (ran,) = trio.end(trio.run(AGAIN, lost=(1,), unnamed=SLOTS_OF_1))

    assert emitted(ran) == wanted(1) and trio.memory.wrongs == []


def test_ranks_that_are_through_with_a_step_keep_what_came_of_it():
    class HalfDone(VerbFaults):
        def draw_finished(self, num_ranks, now):
            return [True, False, False]

    trio = Trio(HalfDone(random.Random(1)))
    trio.run(JOINING, JOINING, JOINING)

    _, ran = trio.lose()

    first, second, third = ran.result.ranks
    assert emitted(ran) == wanted(1) and not first.aborted
    assert second == RankResult() and third.aborted and len(third.left) == 1
    assert ran.result.aborted and trio.plane.num_steps_given_up_in_part == 1


def test_a_step_may_be_given_up_though_no_rank_is_lost():
    class NoneDone(VerbFaults):
        def draw_finished(self, num_ranks, now):
            return [False] * num_ranks

    trio = Trio(NoneDone(random.Random(1), give_up=1.0))

    (ran,) = trio.end(trio.run(JOINING))

    assert ran.result.aborted == "a rank was late" and all(each.aborted for each in ran.result.ranks)
    assert len(ran.result.ranks[0].left) == 1 and trio.plane.lost == {}


def test_a_plan_that_does_not_know_of_a_loss_is_given_up_at_once():
    trio = Trio()
    assert [type(message) for message in trio.lose()] == [RankLost]

    (ran,) = trio.end(trio.run(JOINING, JOINING))

    assert ran.result.ranks[0].aborted and len(ran.result.ranks[0].left) == 1
    assert trio.plane.num_stale_plans == 1 and trio.memory.wrongs == []
    trio.now += 1.0
    trio.run()
    assert "was planned with rank 1, lost since" in trio.memory.wrongs[0]


def test_a_plan_that_names_slots_of_a_lost_rank_is_noticed():
    trio = Trio()
    trio.lose()

    trio.run(lost=(1,))

    assert "names expert 2 in slot 4 of layer 0, but there is -1" in trio.memory.wrongs[0]


def test_a_plan_that_asks_something_of_a_lost_rank_is_noticed():
    trio = Trio()
    trio.lose()

    trio.run(Section(), JOINING, lost=(1,), unnamed=SLOTS_OF_1)

    assert "asks something of rank 1, which is lost" in trio.memory.wrongs[0]


def test_a_lost_rank_comes_back_after_it_has_loaded():
    trio = Trio()
    assert trio.end(trio.plane.handle(ReturnRank(1), 0.0)) == []
    trio.lose()

    (timer,) = trio.plane.handle(ReturnRank(1), trio.now)
    assert trio.plane.handle(ReturnRank(1), trio.now) == []
    (back,) = trio.end([timer])

    assert timer.delay_s > 0 and back == RankBack(1, array("h", [2, 3, 0, 1] * 2).tobytes())
    assert trio.plane.lost == {}


def test_the_first_rank_is_the_instance_itself_and_cannot_be_lost_alone():
    assert Trio().lose(0) == []


def test_copies_into_a_lost_rank_fail_and_leave_its_blocks_alone():
    trio = Trio()
    running = trio.begin(Fetch, 1, (b"key",), (BlockRef(3, 1),))
    trio.lose()
    (answer,) = trio.end(running)
    assert isinstance(answer, Failed)

    (answer,) = trio.end(trio.begin(Fetch, 1, (b"key",), (BlockRef(4, 1),)))

    assert isinstance(answer, Failed) and trio.plane._arenas[1].generations[4] == 0
    assert trio.memory.wrongs == []


def test_moving_experts_takes_as_long_as_the_busiest_rank_copies():
    trio = Trio()
    trio.end(trio.run(unnamed=(7, 11)))

    (timer,) = trio.begin(MoveExperts, (Move(0, 9, 7, 5), Move(1, DISK, 7, 5), Move(1, 8, 11, 4)))

    assert timer.delay_s == pytest.approx(ToyPrice().copy_s + 3 * (1 << 20) / 1e9)
    assert trio.end([timer]) == [ExpertsMoved(3)]
    assert [layer[7] for layer in trio.plane.experts.held] == [5, 5] and trio.memory.wrongs == []


def test_a_move_that_fails_by_chance_leaves_nothing_in_its_slot():
    trio = Trio(VerbFaults(random.Random(1), fail_moves=1.0))
    trio.end(trio.run(unnamed=(7,)))

    (answer,) = trio.end(trio.begin(MoveExperts, (Move(0, 9, 7, 5),)))

    assert isinstance(answer, Failed) and trio.plane.experts.held[0][7] == EMPTY
