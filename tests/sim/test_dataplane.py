"""The simulated data plane: right plans get right tokens, wrong ones are noticed."""

from tripool.core.messages import (
    Failed,
    Fetch,
    Fetched,
    Grant,
    Load,
    Loaded,
    Part,
    Pull,
    Pulled,
    Ran,
    Run,
    Store,
    Stored,
)
from tripool.core.plan import BlockRef, Chunk, Grow, Join, Section, StepPlan
from tripool.core.request import Limits, Request, Sampling, pack_tokens, unpack_tokens
from tripool.sim.dataplane import SimDataPlane, toy_facts
from tripool.sim.memory import SimMemory
from tripool.sim.toy import STOP_TOKEN, expected_output, next_token

WIDTH = 4
PROMPT = [11, 12, 13, 14, 15, 16]
LIMITS = Limits(max_tokens=5)


class Plane:
    """A data plane that answers at once."""

    def __init__(self, memory=None, member="hybrid-0") -> None:
        self.memory = memory or SimMemory()
        self.plane = SimDataPlane(member, "life", toy_facts(8, WIDTH), self.memory)
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


def test_a_row_of_a_prefill_instance_rests_after_its_token_until_it_is_asked_to_leave():
    plane = Plane()

    assert emitted(plane.join(decodes=False)) == wanted(1)
    assert emitted(plane.step()) == []
    assert plane.step(leaves=(0,)).result.ranks[0].left[0].reason is None


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
