"""The five verbs with a toy price, on blocks that remember what was written to them.

There is no model here. A token is a function of the request's seed and its number alone, as it is in the real
engine in deterministic mode, so that everybody can reckon what a request must get. In place of latent entries a
block keeps a digest of all tokens from the first of the sequence to the last one written, and how many of its
places are filled. A row looks at all its blocks in every step; where one does not hold what it should, the token
comes out wrong, and the memory's `wrongs` say why. Copies are proved by generation and checksum like the real ones.

Contents of all instances are in this one process: pulls read the arena of another, fetches and stores a pool
that all share. An arena outlives its process, as a sealed memory file does.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tripool.core.machine import Address, Message, Send
from tripool.core.messages import (
    Facts,
    Failed,
    Fetch,
    Fetched,
    FinishReason,
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
from tripool.core.plan import (
    BlockId,
    BlockRef,
    Emitted,
    Join,
    Left,
    RankResult,
    Section,
    Slot,
    StepPlan,
    StepResult,
    TokenLogprobs,
    token_columns,
)
from tripool.core.request import TOKEN_BYTES, Limits, Request, RequestId, TokenBytes, pack_tokens

VOCAB = 1000
STOP_TOKEN = 7
SEED_AND_NUMBER = struct.Struct("<qq")

Verb = Fetch | Run | Store | Pull | Load


# ---------------------------------------------------------------- what a request must get


def next_token(seed: int, number: int, limits: Limits) -> int:
    """Output token `number` of a request with this seed."""
    token = zlib.crc32(SEED_AND_NUMBER.pack(seed, number)) % VOCAB
    while number < limits.min_tokens and token in limits.stop_token_ids:
        token = (token + 1) % VOCAB
    return token


def expected_output(request: Request) -> tuple[TokenBytes, FinishReason]:
    """All tokens that a request must get, and why they end."""
    tokens: list[int] = []
    while len(tokens) < request.limits.max_tokens:
        tokens.append(next_token(request.sampling.seed, len(tokens), request.limits))
        if tokens[-1] in request.limits.stop_token_ids:
            return pack_tokens(tokens), "stop"
    return pack_tokens(tokens), "length"


# ---------------------------------------------------------------- blocks


@dataclass(frozen=True, slots=True)
class Content:
    """What a block holds: a digest of every token up to its last filled place, and how many places are filled."""

    digest: int = 0
    num_filled: int = 0

    @property
    def checksum(self) -> int:
        return self.digest << 16 | self.num_filled


EMPTY = Content()


class SimArena:
    """The blocks of one rank in one life of a process."""

    def __init__(self, num_blocks: int) -> None:
        self.generations = [0] * num_blocks
        self.contents = [EMPTY] * num_blocks


class SimMemory:
    """What lies outside of any one process: the arenas of all lives, and the pool."""

    def __init__(self, pool_blocks: int = 1 << 30) -> None:
        self.arenas: dict[tuple[Address, str], list[SimArena]] = {}
        self.pool: dict[bytes, Content] = {}
        self.wrongs: list[str] = []        # what no right scheduler and no right data plane lets happen
        self.pool_blocks = pool_blocks

    def put(self, key: bytes, content: Content) -> bool:
        """Keep a block; the one that was stored longest ago gives way. False: it was there already."""
        if key in self.pool:
            return False
        if len(self.pool) >= self.pool_blocks:
            del self.pool[next(iter(self.pool))]
        self.pool[key] = content
        return True


# ---------------------------------------------------------------- prices and faults


@dataclass(frozen=True, slots=True)
class ToyPrice:
    """What a verb takes, in seconds: something to begin with and something for each piece."""

    step_s: float = 0.010
    chunk_token_s: float = 50e-6
    decode_row_s: float = 200e-6
    copy_s: float = 0.0005
    block_s: float = 0.0001
    load_s: float = 0.5


@dataclass(slots=True)
class VerbFaults:
    """Verbs that fail or take long, drawn from a generator until `end_s`."""

    generator: random.Random
    fail: float = 0.0
    slow: float = 0.0
    max_slow_s: float = 1.0
    end_s: float = float("inf")

    def draw(self, verb: Verb, now: float) -> tuple[bool, float]:
        """Whether a verb fails, and by how much it is late."""
        if now >= self.end_s or isinstance(verb, Load):
            return False, 0.0
        rare = 0.25 if isinstance(verb, Run) else 1.0      # a failed step costs every request in it
        fails = self.generator.random() < self.fail * rare
        late_s = self.generator.random() * self.max_slow_s if self.generator.random() < self.slow else 0.0
        return fails, late_s


@dataclass(frozen=True, slots=True)
class Sabotage:
    """Checks to leave out, to see that their lack is noticed."""

    skip_pull_proof: bool = False


# ---------------------------------------------------------------- the engine's rows


@dataclass(slots=True)
class Row:
    """A request in a slot of the engine."""

    join: Join
    tokens: bytearray
    num_computed: int
    blocks: list[BlockId]
    expected: list[Content]            # of its blocks, as far as they are filled
    resting: bool = False              # has sampled its last token here

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_to_compute(self) -> int:
        return self.num_tokens - self.num_computed

    def left(self, reason: FinishReason | None, stop_token: int | None = None) -> Left:
        return Left(self.join.slot, reason, bytes(self.tokens), self.num_computed, stop_token)


@dataclass(slots=True)
class StepOutput:
    """What the rows of one rank bring in a step, in the making."""

    rows: dict[Address, list[tuple[RequestId, int, int, bytes]]] = field(default_factory=dict)
    logprobs: dict[Address, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[Address, list[TokenLogprobs]] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    need: list[Slot] = field(default_factory=list)
    num_chunk_tokens: int = 0
    num_decode_tokens: int = 0

    def emitted(self) -> tuple[Emitted, ...]:
        readers = dict.fromkeys([*self.rows, *self.prompt_logprobs])
        return tuple(Emitted(reader, token_columns(self.rows.get(reader, [])), tuple(self.logprobs.get(reader, ())),
                             tuple(self.prompt_logprobs.get(reader, ()))) for reader in readers)


@dataclass(frozen=True, slots=True)
class Due:
    """The data plane's timer to itself: a verb is done, or has failed."""

    verb: Verb
    cause: str = ""


class SimDataPlane:
    """Answers the verbs of one life of one instance."""

    def __init__(self, member: Address, boot_id: str, facts: Facts, memory: SimMemory, *, price: ToyPrice | None = None,
                 faults: VerbFaults | None = None, sabotage: Sabotage | None = None) -> None:
        self.member = member
        self.address = f"{member}/data"
        self.facts = facts
        self.wrongs = memory.wrongs
        self.unanswered: dict[int, Verb] = {}
        self.num_stale_pulls = 0
        self.num_pulled_blocks = 0
        self.num_fetched_blocks = 0
        self.num_steps = 0
        self._memory = memory
        self._price = price or ToyPrice()
        self._faults = faults
        self._sabotage = sabotage or Sabotage()
        self._verb_ids: dict[int, None] = {}
        self._arenas = [SimArena(facts.num_blocks // facts.num_ranks) for _ in range(facts.num_ranks)]
        self._rows: list[dict[Slot, Row]] = [{} for _ in self._arenas]
        self._asked_to_leave: list[list[Left]] = [[] for _ in self._arenas]
        self._in_rows: list[dict[BlockId, int]] = [{} for _ in self._arenas]     # how many rows have the block
        self._being_copied: list[dict[BlockId, int]] = [{} for _ in self._arenas]
        memory.arenas[member, boot_id] = self._arenas

    def handle(self, message: Message, now: float) -> list[Send]:
        match message:
            case Due(verb, cause):
                del self.unanswered[verb.verb_id]
                return [Send(self.member, self._end(verb, cause))]
            case Fetch() | Run() | Store() | Pull() | Load():
                return self._take(message, now)
        return []

    def named_blocks(self, rank: int) -> list[BlockId]:
        """Blocks that a row of the engine or an unanswered copy may touch: nobody may give them out."""
        in_use = [*self._in_rows[rank].items(), *self._being_copied[rank].items()]
        return [block for block, count in in_use if count]

    def _take(self, verb: Verb, now: float) -> list[Send]:
        if verb.verb_id in self._verb_ids:
            self.wrongs.append(f"{self.member} used verb id {verb.verb_id} twice")
        self._verb_ids[verb.verb_id] = None
        if isinstance(verb, Run) and any(isinstance(other, Run) for other in self.unanswered.values()):
            self.wrongs.append(f"{self.member} asked for step {verb.plan.step} while another runs")
        self.unanswered[verb.verb_id] = verb
        self._begin(verb)
        fails, late_s = self._faults.draw(verb, now) if self._faults is not None else (False, 0.0)
        price_s = self._price_s(verb) + late_s
        cause = f"{type(verb).__name__} failed by chance" if fails else ""
        if price_s > verb.deadline_s:
            price_s, cause = verb.deadline_s, f"{type(verb).__name__} did not end within {verb.deadline_s:g} s"
        return [Send(self.address, Due(verb, cause), price_s)]

    def _price_s(self, verb: Verb) -> float:
        price = self._price
        match verb:
            case Run(_, _, plan):
                tokens = max(sum(chunk.num_tokens for chunk in section.chunks) for section in plan.sections)
                return price.step_s + tokens * price.chunk_token_s + max(map(len, self._rows)) * price.decode_row_s
            case Load():
                return price.load_s
            case Store():
                return price.copy_s + len(verb.blocks) * price.block_s
            case _:
                return price.copy_s + len(verb.into) * price.block_s

    def _begin(self, verb: Verb) -> None:
        """What happens before any time has passed: rows come and go, and blocks that will be written are renewed."""
        match verb:
            case Run(_, _, plan):
                for rank, section in enumerate(plan.sections):
                    self._begin_section(rank, section, plan)
            case Fetch() | Pull():
                self._renew(verb.rank, verb.into)
                self._count_copies(verb, 1)
            case Store():
                self._count_copies(verb, 1)

    def _end(self, verb: Verb, cause: str) -> Message:
        if not isinstance(verb, Run | Load):
            self._count_copies(verb, -1)
        match verb:
            case Run(verb_id, _, plan):
                if cause:
                    self._drop_rows()
                    return Failed(verb_id, cause)
                self.num_steps += 1
                ranks = tuple(self._end_section(rank, section) for rank, section in enumerate(plan.sections))
                return Ran(verb_id, StepResult(plan.step, ranks))
            case Load(verb_id):
                return Failed(verb_id, cause) if cause else Loaded(verb_id, self.facts)
            case Store():
                return Failed(verb.verb_id, cause) if cause else self._store(verb)
            case Fetch():
                return Failed(verb.verb_id, cause) if cause else self._fetch(verb)
            case Pull():
                return Failed(verb.verb_id, cause) if cause else self._pull(verb)

    # ------------------------------------------------------------ copies

    def _renew(self, rank: int, refs: Sequence[BlockRef]) -> None:
        """Publish a new generation before the first write. Nobody may still have the block."""
        arena = self._arenas[rank]
        for ref in refs:
            # The same one again is what a copy brought nothing into, and a row writes after all.
            if ref.generation < arena.generations[ref.block]:
                self.wrongs.append(f"{self.member} block {ref.block}: generation {ref.generation} is not new")
            if self._in_rows[rank].get(ref.block):
                self.wrongs.append(f"{self.member} block {ref.block} was given out while a row has it")
            if self._being_copied[rank].get(ref.block):
                self.wrongs.append(f"{self.member} block {ref.block} was given out while a verb names it")
            arena.generations[ref.block] = ref.generation
            arena.contents[ref.block] = EMPTY

    def _count_copies(self, verb: Fetch | Pull | Store, sign: int) -> None:
        counts = self._being_copied[verb.rank]
        for ref in verb.blocks if isinstance(verb, Store) else verb.into:
            counts[ref.block] = counts.get(ref.block, 0) + sign
            if sign < 0 and self._arenas[verb.rank].generations[ref.block] != ref.generation:
                self.wrongs.append(f"{self.member} block {ref.block} was renewed under an unanswered "
                                   f"{type(verb).__name__}")

    def _fetch(self, verb: Fetch) -> Fetched:
        contents = []
        for key in verb.keys:
            content = self._memory.pool.get(key)
            if content is None:
                break
            contents.append(content)
        for ref, content in zip(verb.into, contents, strict=False):
            self._arenas[verb.rank].contents[ref.block] = content
        self.num_fetched_blocks += len(contents)
        return Fetched(verb.verb_id, len(contents), tuple(content.checksum for content in contents))

    def _store(self, verb: Store) -> Stored:
        num_new = 0
        for key, ref in zip(verb.keys, verb.blocks, strict=True):
            content = self._arenas[verb.rank].contents[ref.block]
            if content.num_filled != self.facts.block_tokens:
                self.wrongs.append(f"{self.member} stored block {ref.block}, which is not full")
            if self._memory.pool.get(key, content) != content:
                self.wrongs.append(f"{self.member} stored other contents under a key that the pool has")
            num_new += self._memory.put(key, content)
        return Stored(verb.verb_id, num_new)

    def _pull(self, verb: Pull) -> Pulled | Failed:
        grant = verb.grant
        source = self._memory.arenas.get((grant.source, grant.boot_id))
        if source is None:
            return Failed(verb.verb_id, f"{grant.source} is not mapped")
        if len(grant.parts) != len(verb.into):
            self.wrongs.append(f"{self.member} pulls {len(grant.parts)} blocks into {len(verb.into)}")
        for part, ref in zip(grant.parts, verb.into, strict=False):
            arena = source[part.rank]
            if not self._sabotage.skip_pull_proof and not _proves(arena, part):
                self.num_stale_pulls += 1
                return Failed(verb.verb_id, f"block {part.block} of {grant.source} is not the one that was granted")
            self._arenas[verb.rank].contents[ref.block] = arena.contents[part.block]
        self.num_pulled_blocks += len(verb.into)
        return Pulled(verb.verb_id)

    # ------------------------------------------------------------ steps

    def _begin_section(self, rank: int, section: Section, plan: StepPlan) -> None:
        rows = self._rows[rank]
        for slot in section.leaves:
            row = rows.pop(slot, None)
            if row is None:
                self.wrongs.append(f"{self.member} step {plan.step} asks slot {slot} to leave, which is empty")
                continue
            self._count_blocks(rank, row.blocks, -1)
            self._asked_to_leave[rank].append(row.left(None))
        self._renew(rank, section.fresh)
        for join in section.joins:
            if join.slot in rows:
                self.wrongs.append(f"{self.member} step {plan.step} puts two requests into slot {join.slot}")
            rows[join.slot] = self._join(join)
            self._count_blocks(rank, join.blocks, 1)
        for grow in section.grows:
            rows[grow.slot].blocks += grow.blocks
            self._count_blocks(rank, grow.blocks, 1)

    def _end_section(self, rank: int, section: Section) -> RankResult:
        rows = self._rows[rank]
        output = StepOutput(left=self._asked_to_leave[rank])
        self._asked_to_leave[rank] = []
        chunks = {chunk.slot: chunk.num_tokens for chunk in section.chunks}
        for slot in sorted(rows):
            self._advance(rank, rows[slot], chunks.pop(slot, 0), output)
        for slot in chunks:
            self.wrongs.append(f"{self.member} has no row in slot {slot} to compute a chunk of")
        for left in output.left:
            if left.reason is not None:
                self._count_blocks(rank, rows.pop(left.slot).blocks, -1)
        contents = self._arenas[rank].contents
        sums = tuple((block, contents[block].checksum) for block in section.seals)
        return RankResult(output.emitted(), tuple(output.left), tuple(output.need), sums, output.num_chunk_tokens,
                          output.num_decode_tokens)

    def _join(self, join: Join) -> Row:
        row = Row(join, bytearray(join.tokens), join.num_computed, list(join.blocks), [])
        if row.num_to_compute < 1:
            self.wrongs.append(f"request {join.request_id} joined with no token left to compute")
        digest, width = 0, self.facts.block_tokens
        for first in range(0, join.num_computed, width):
            last = min(first + width, join.num_computed)
            digest = zlib.crc32(row.tokens[first * TOKEN_BYTES:last * TOKEN_BYTES], digest)
            row.expected.append(Content(digest, last - first))
        return row

    def _advance(self, rank: int, row: Row, num_asked: int, output: StepOutput) -> None:
        """One row's part in a step: compute its chunk or its last token, and sample when nothing is left."""
        if row.resting:
            return
        is_decode = row.num_to_compute == 1
        num_tokens = 1 if is_decode else min(num_asked, row.num_to_compute)
        if num_asked > row.num_to_compute:
            self.wrongs.append(f"request {row.join.request_id} has {row.num_to_compute} tokens to compute, "
                               f"not {num_asked}")
        has_room = (row.num_computed + num_tokens) <= len(row.blocks) * self.facts.block_tokens
        if not has_room and not is_decode:
            self.wrongs.append(f"request {row.join.request_id} has no block for its chunk")
        if not num_tokens or not has_room:
            self._note_need(row, output)
            return
        self._score_prompt(row, num_tokens, output)
        self._write(rank, row, num_tokens)
        output.num_decode_tokens += is_decode
        output.num_chunk_tokens += 0 if is_decode else num_tokens
        if not row.num_to_compute:
            self._sample(rank, row, output)
        self._note_need(row, output)

    def _note_need(self, row: Row, output: StepOutput) -> None:
        """Whether the row will lack a block to write to in the next step."""
        is_decode = row.num_to_compute == 1 and not row.resting
        if is_decode and row.num_computed + 1 > len(row.blocks) * self.facts.block_tokens:
            output.need.append(row.join.slot)

    def _write(self, rank: int, row: Row, num_tokens: int) -> None:
        contents, width = self._arenas[rank].contents, self.facts.block_tokens
        end = row.num_computed + num_tokens
        while row.num_computed < end:
            index, place = divmod(row.num_computed, width)
            last = min(end, (index + 1) * width)
            block = row.blocks[index]
            if contents[block].num_filled != place:
                self.wrongs.append(f"{self.member} block {block} has {contents[block].num_filled} places filled, where "
                                   f"request {row.join.request_id} writes place {place}")
            before = row.expected[index - (place == 0)].digest if row.expected else 0
            digest = zlib.crc32(row.tokens[row.num_computed * TOKEN_BYTES:last * TOKEN_BYTES], before)
            contents[block] = Content(digest, last - index * width)
            row.expected[index:] = [contents[block]]
            row.num_computed = last

    def _sample(self, rank: int, row: Row, output: StepOutput) -> None:
        join = row.join
        number = row.num_tokens - join.num_prompt
        token = next_token(join.sampling.seed, number, join.limits)
        contents = self._arenas[rank].contents
        if [contents[block] for block in row.blocks[:len(row.expected)]] != row.expected:
            self.wrongs.append(f"request {join.request_id} on {self.member} read a block that is not its own")
            token = (token + 1) % VOCAB
        row.tokens += token.to_bytes(TOKEN_BYTES, "little")
        emitted = (join.request_id, join.attempt, number, bytes(row.tokens[-TOKEN_BYTES:]))
        output.rows.setdefault(join.reply_to, []).append(emitted)
        if join.sampling.num_logprobs >= 0:
            part = TokenLogprobs(join.request_id, join.attempt, number, (toy_logprob(number),))
            output.logprobs.setdefault(join.reply_to, []).append(part)
        row.resting = True
        if token in join.limits.stop_token_ids:
            output.left.append(row.left("stop", token))
        elif number + 1 >= join.limits.max_tokens:
            output.left.append(row.left("length"))
        else:
            row.resting = not join.decodes

    @staticmethod
    def _score_prompt(row: Row, num_tokens: int, output: StepOutput) -> None:
        join = row.join
        if join.sampling.num_prompt_logprobs < 0:
            return
        first, last = max(1, row.num_computed), min(row.num_computed + num_tokens, join.num_prompt)
        if first < last:
            values = tuple(toy_logprob(position) for position in range(first, last))
            part = TokenLogprobs(join.request_id, join.attempt, first, values)
            output.prompt_logprobs.setdefault(join.reply_to, []).append(part)

    def _count_blocks(self, rank: int, blocks: Sequence[BlockId], sign: int) -> None:
        counts = self._in_rows[rank]
        for block in blocks:
            counts[block] = counts.get(block, 0) + sign

    def _drop_rows(self) -> None:
        """After a failed step the engine is empty."""
        for rank in range(len(self._rows)):
            self._rows[rank].clear()
            self._in_rows[rank].clear()
            self._asked_to_leave[rank].clear()


def toy_logprob(number: int) -> float:
    """A log-probability that can be recognised."""
    return -float(number % 13) / 8


def _proves(arena: SimArena, part: Part) -> bool:
    return (arena.generations[part.block] == part.generation
            and arena.contents[part.block].checksum == part.checksum)


def toy_facts(num_blocks: int, block_tokens: int, *, num_ranks: int = 1, layout: str = "toy",
              max_model_len: int = 1 << 20) -> Facts:
    """What a simulated instance says of itself; `num_blocks` is of one rank."""
    return replace(Facts("toy", "toy", layout, max_model_len, block_tokens, num_blocks), num_ranks=num_ranks,
                   num_blocks=num_blocks * num_ranks)
