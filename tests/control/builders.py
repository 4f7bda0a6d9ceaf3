"""An instance's scheduler on a scripted data plane: its engine moves rows, its verbs wait until a test answers them.

The engine does what `core.plan` says, with tokens that are a function of the request's seed and their number. It
remembers which tokens each block holds and looks at all of them in every step, so that a block that was given away
too early shows at once. Fetches, stores and pulls keep contents too, so a resumed or pulled request is proved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tripool.control.scheduler import InstanceScheduler
from tripool.core import messages as m
from tripool.core.deployment import CacheConfig, Deployment, InstanceConfig, ScalingConfig
from tripool.core.placement import Placement
from tripool.core.plan import Emitted, Join, Left, RankResult, StepResult, token_columns
from tripool.core.request import Limits, Request, Sampling, num_tokens, pack_tokens, unpack_tokens

GATEWAY, ROUTER, HEALTH = "gateway", "gateway/router", "gateway/health"
BLOCK_TOKENS = 4


def output_token(seed: int, number: int) -> int:
    return 1000 + (seed * 31 + number * 7) % 997


def request(request_id, num_prompt=8, max_tokens=4, *, prompt=None, priority=0, stop=(), salt=b"", **sampling):
    """A request whose prompt is its own unless one is given."""
    tokens = prompt if prompt is not None else [request_id * 1000 + position for position in range(num_prompt)]
    return Request(request_id, pack_tokens(tokens), Sampling(seed=request_id, **sampling),
                   Limits(max_tokens, stop_token_ids=tuple(stop)), salt=salt, priority=priority)


def whole_output(req):
    """What the request must get."""
    tokens = []
    while len(tokens) < req.limits.max_tokens:
        tokens.append(output_token(req.sampling.seed, len(tokens)))
        if tokens[-1] in req.limits.stop_token_ids:
            break
    return tokens


@dataclass
class EngineRow:
    join: Join
    tokens: list[int]
    num_computed: int
    blocks: list[int]


@dataclass
class Arena:
    """What the blocks of one rank hold, by generation."""

    generations: dict[int, int] = field(default_factory=dict)
    contents: dict[int, list[int]] = field(default_factory=dict)

    def publish(self, refs):
        for ref in refs:
            assert ref.generation > self.generations.get(ref.block, 0), f"block {ref.block} is no new one"
            self.generations[ref.block] = ref.generation
            self.contents[ref.block] = []


class Engine:
    """The rows of one rank. Of the drafts of a row two in three are right, as its seed and the place say."""

    def __init__(self, arena, block_tokens, num_drafts=0):
        self.arena, self.block_tokens, self.num_drafts = arena, block_tokens, num_drafts
        self.rows: dict[int, EngineRow] = {}

    def begin(self, section):
        """Rows go, come and grow; returns those that went."""
        left = [self._left(slot, self.rows.pop(slot), None) for slot in section.leaves]
        self.arena.publish(section.fresh)
        for join in section.joins:
            assert join.slot not in self.rows, f"slot {join.slot} is taken"
            assert join.num_computed < num_tokens(join.tokens)
            self.rows[join.slot] = EngineRow(join, unpack_tokens(join.tokens), join.num_computed, list(join.blocks))
        for grow in section.grows:
            self.rows[grow.slot].blocks += grow.blocks
        return left

    def give_up(self, section):
        """The step is not taken: everybody leaves as they were."""
        left = self.begin(section)
        left += [self._left(slot, row, None) for slot, row in sorted(self.rows.items())]
        self.rows.clear()
        return RankResult(left=tuple(left), aborted=True)

    def run(self, section):
        need, emitted, scores = [], {}, []
        asked, left = self.begin(section), []
        chunks = {chunk.slot: chunk.num_tokens for chunk in section.chunks}
        num_chunk_tokens = num_decode_tokens = 0
        drafted, accepted = [0] * self.num_drafts, [0] * self.num_drafts
        for slot, row in sorted(self.rows.items()):
            remaining = len(row.tokens) - row.num_computed
            count = 1 if remaining == 1 else chunks.pop(slot, 0)
            if remaining == 1 and row.num_computed >= len(row.blocks) * self.block_tokens:
                count = 0
            if not count:
                continue
            num_chunk_tokens += count if remaining > 1 else 0
            num_decode_tokens += remaining == 1
            if row.join.sampling.num_prompt_logprobs >= 0 and row.num_computed < row.join.num_prompt:
                scores.append(row.join.request_id)
            num_left = self._num_drafts(row)
            self._compute(slot, row, count)
            if row.num_computed == len(row.tokens):
                start = len(row.tokens)
                num_drafts = num_left if remaining == 1 else 0
                stopped = self._sample(row, emitted)
                for draft in range(num_drafts):
                    drafted[draft] += 1
                    right = len(row.tokens) - start == draft + 1 and (row.join.sampling.seed + len(row.tokens)) % 3 != 0
                    if right and stopped is None:
                        accepted[draft] += 1
                        num_decode_tokens += 1
                        self._compute(slot, row, 1)
                        stopped = self._sample(row, emitted)
                if stopped is not None:
                    left.append(self._left(slot, row, *stopped))
                elif row.join.decodes and row.num_computed >= len(row.blocks) * self.block_tokens:
                    need.append(slot)
        assert not chunks, f"chunks for rows that take none: {chunks}"
        for each in left:
            del self.rows[each.slot]
        need += [slot for slot, row in self.rows.items()
                 if slot not in need and row.join.decodes and len(row.tokens) - row.num_computed == 1
                 and row.num_computed >= len(row.blocks) * self.block_tokens]
        columns = tuple(Emitted(to, token_columns(rows)) for to, rows in emitted.items())
        sums = tuple((block, self.checksum(block)) for block in section.seals)
        self.scored = scores
        want = [slot for slot, row in self.rows.items() if row.join.decodes and len(row.tokens) - row.num_computed == 1
                and self._num_drafts(row) < self._most_drafts(row)]
        return RankResult(columns, (*asked, *left), tuple(need), sums, num_chunk_tokens, num_decode_tokens,
                          want=tuple(want), num_drafted=tuple(drafted), num_accepted=tuple(accepted))

    def _most_drafts(self, row):
        end = row.join.num_prompt + row.join.limits.max_tokens
        return max(0, min(self.num_drafts, end - len(row.tokens) - 1)) if row.join.decodes else 0

    def _num_drafts(self, row):
        return max(0, min(self._most_drafts(row), len(row.blocks) * self.block_tokens - len(row.tokens)))

    def checksum(self, block):
        return hash_of(self.arena.contents[block])

    def _compute(self, slot, row, count):
        assert row.num_computed + count <= len(row.tokens), f"slot {slot} has fewer tokens to compute"
        assert row.num_computed + count <= len(row.blocks) * self.block_tokens, f"slot {slot} lacks a block"
        for position in range(row.num_computed, row.num_computed + count):
            held = self.arena.contents[row.blocks[position // self.block_tokens]]
            del held[position % self.block_tokens:]
            held.append(row.tokens[position])
        row.num_computed += count
        seen = [token for block in row.blocks for token in self.arena.contents[block]]
        assert seen[:row.num_computed] == row.tokens[:row.num_computed], (
            f"request {row.join.request_id} reads a block that is not its own")

    def _sample(self, row, emitted):
        number = len(row.tokens) - row.join.num_prompt
        token = output_token(row.join.sampling.seed, number)
        row.tokens.append(token)
        emitted.setdefault(row.join.reply_to, []).append(
            (row.join.request_id, row.join.attempt, number, pack_tokens([token])))
        if token in row.join.limits.stop_token_ids:
            return "stop", token
        if number + 1 == row.join.limits.max_tokens:
            return "length", None
        return None if row.join.decodes else (None, None)

    @staticmethod
    def _left(slot, row, reason, stop_token=None):
        return Left(slot, reason, pack_tokens(row.tokens), row.num_computed, stop_token)


def hash_of(tokens):
    return sum((position + 1) * token for position, token in enumerate(tokens)) + 1


class Instance:
    """A scheduler, its data plane, and everything it has said."""

    def __init__(self, role="hybrid", *, num_blocks=32, num_ranks=1, block_tokens=BLOCK_TOKENS, max_num_seqs=8,
                 budget=16, cache=False, prefix_caching=True, store_generated=True, max_model_len=10_000, pool=None,
                 arenas=None, member=None, load=True, experts=None, role_changes=True, **config_fields):
        config = InstanceConfig(count=1, ranks=num_ranks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
                                enable_prefix_caching=prefix_caching, store_generated=store_generated,
                                exchange="collective" if num_ranks > 1 else "local", **config_fields)
        deployment = Deployment(prefill=config, decode=config, block_tokens=block_tokens,
                                cache=CacheConfig(count=int(cache)), scaling=ScalingConfig(enabled=role_changes))
        self.member = member or f"{role}-0"
        self.machine = InstanceScheduler(self.member, role, config, deployment, "boot-1")
        self.facts = m.Facts("toy", "fingerprint", "layout", max_model_len, block_tokens, num_blocks * num_ranks,
                             num_ranks)
        self.experts = experts
        self.now = 0.0
        self.next_beat = None                  # the tick that is due next
        self.sent: list = []                   # everything said to others, verbs left out
        self.verbs: list = []                  # unanswered
        self.done_verbs: list = []
        self.arenas = [Arena() for _ in range(num_ranks)]
        self.engines = [Engine(arena, block_tokens, config.num_speculative_tokens) for arena in self.arenas]
        self.pool = {} if pool is None else pool           # key -> tokens
        self.peers = {} if arenas is None else arenas      # member -> its arenas
        self.peers[self.member] = self.arenas
        self.chunk_log: list[dict[int, int]] = []
        self.say(m.Tick("start"))
        if load:
            self.answer(self.verb(m.Load))

    # ---------------------------------------------------------- talking

    def say(self, message, *, after_s=0.0):
        """Give the machine a message; returns what it said to others."""
        self.now += after_s
        sends = self.machine.handle(message, self.now)
        self.machine.check_invariants()
        said = []
        for send in sends:
            if send.to == f"{self.member}/data":
                self.verbs.append(send.message)
            elif send.delay_s == 0.0:
                said.append(send)
            elif send.message.about == "heartbeat":
                self.next_beat = send.message
        self.sent += said
        return said

    def beat(self, *, after_s=0.0):
        """Its time for a heartbeat has come."""
        return self.say(self.next_beat, after_s=after_s)

    def prefill(self, req, attempt=1, emitted=()):
        return self.say(m.Prefill(req, attempt, pack_tokens(emitted)))

    def admit(self, req, grant, attempt=1, emitted=None, turn=1):
        emitted = emitted if emitted is not None else [output_token(req.sampling.seed, 0)]
        return self.say(m.Admit(req, attempt, pack_tokens(emitted), grant, turn))

    def abort(self, request_id, attempt=1):
        return self.say(m.Abort(request_id, attempt))

    def verb(self, kind):
        """The oldest unanswered verb of a kind."""
        found = [verb for verb in self.verbs if isinstance(verb, kind)]
        assert found, f"no {kind.__name__} is unanswered"
        return found[0]

    def has_verb(self, kind):
        return any(isinstance(verb, kind) for verb in self.verbs)

    # ---------------------------------------------------------- answering

    def answer(self, verb):
        """Carry the verb out and give the machine its answer."""
        self.verbs.remove(verb)
        self.done_verbs.append(verb)
        return self.say(self._carry_out(verb))

    def fail(self, verb, cause="it broke"):
        self.verbs.remove(verb)
        self.done_verbs.append(verb)
        if isinstance(verb, m.Run):
            for engine in self.engines:
                engine.rows.clear()
        elif isinstance(verb, m.Fetch | m.Pull):
            self.arenas[verb.rank].publish(verb.into)
        return self.say(m.Failed(verb.verb_id, cause))

    def step(self):
        """Answer the running step."""
        return self.answer(self.verb(m.Run))

    def give_up_step(self, *lost, took=()):
        """The running step fails on all ranks but those that `took` it, because those that are `lost` are gone."""
        verb = self.verb(m.Run)
        self.verbs.remove(verb)
        for rank in lost:
            if rank not in self.machine.lost_ranks:
                self.lose(rank)
        results = []
        for rank, (engine, section) in enumerate(zip(self.engines, verb.plan.sections, strict=True)):
            if rank in lost:
                engine.rows.clear()
                results.append(RankResult())
            else:
                results.append(engine.run(section) if rank in took else engine.give_up(section))
        return self.say(m.Ran(verb.verb_id, StepResult(verb.plan.step, tuple(results), aborted="a rank is gone")))

    def lose(self, rank):
        """A rank's process ends."""
        if not self.has_verb(m.Run):
            self.engines[rank].rows.clear()
        return self.say(m.RankLost(rank, "killed"))

    def bring_back(self, rank, held=b""):
        """A new process has the rank."""
        return self.say(m.RankBack(rank, held))

    def work(self, max_answers=2000):
        """Answer everything until nothing is left to answer; returns how many steps were run."""
        steps = 0
        for _ in range(max_answers):
            if not self.verbs:
                return steps
            steps += isinstance(self.verbs[0], m.Run)
            self.answer(self.verbs[0])
        raise AssertionError("the instance does not come to rest")

    def _carry_out(self, verb):
        match verb:
            case m.Load():
                return m.Loaded(verb.verb_id, self.facts, self.experts)
            case m.MoveExperts():
                return m.ExpertsMoved(verb.verb_id)
            case m.Run(verb_id, _, plan):
                self.chunk_log += [{chunk.slot: chunk.num_tokens for chunk in each.chunks} for each in plan.sections]
                ranks = tuple(engine.run(section) for engine, section in zip(self.engines, plan.sections, strict=True))
                for result in ranks:
                    num_computed = result.num_chunk_tokens + result.num_decode_tokens
                    assert num_computed <= self.machine.config.max_num_batched_tokens, "the budget was exceeded"
                return m.Ran(verb_id, StepResult(plan.step, ranks, 0.001))
            case m.Fetch(verb_id, _, rank, keys, into):
                self.arenas[rank].publish(into)
                sums = []
                for key, ref in zip(keys, into, strict=True):
                    if key not in self.pool:
                        break
                    self.arenas[rank].contents[ref.block] = list(self.pool[key])
                    sums.append(hash_of(self.pool[key]))
                return m.Fetched(verb_id, len(sums), tuple(sums))
            case m.Store(verb_id, _, rank, keys, blocks):
                num_new = 0
                for key, ref in zip(keys, blocks, strict=True):
                    assert self.arenas[rank].generations[ref.block] == ref.generation, "a block changed under a Store"
                    held = list(self.arenas[rank].contents[ref.block])
                    assert self.pool.setdefault(key, held) == held and len(held) == self.facts.block_tokens
                    num_new += 1
                return m.Stored(verb_id, num_new)
            case m.Pull(verb_id, _, rank, grant, into):
                self.arenas[rank].publish(into)
                for part, ref in zip(grant.parts, into, strict=True):
                    source = self.peers[grant.source][part.rank]
                    assert source.generations[part.block] == part.generation, "a granted block was given away"
                    assert hash_of(source.contents[part.block]) == part.checksum, "a granted block was written to"
                    self.arenas[rank].contents[ref.block] = list(source.contents[part.block])
                return m.Pulled(verb_id)

    # ---------------------------------------------------------- looking

    @property
    def stats(self):
        return self.machine.stats

    def blocks(self, rank=0):
        return self.machine.ranks[rank].blocks

    def told(self, kind, to=None):
        """All messages of a kind that were sent, to an address if one is given."""
        return [send.message for send in self.sent if isinstance(send.message, kind) and to in (None, send.to)]

    def output(self, request_id):
        """All tokens emitted here for a request, in one run of numbers."""
        tokens = {}
        for message in self.told(m.Tokens):
            for emitted in message.emitted:
                for number, _, start, packed in emitted.columns.rows():
                    if number == request_id:
                        for index, token in enumerate(unpack_tokens(packed)):
                            assert start + index not in tokens, "a token was emitted twice"
                            tokens[start + index] = token
        first = min(tokens, default=0)
        return [tokens[number] for number in range(first, first + len(tokens))]

    def done(self, request_id):
        return [done for message in self.told(m.Tokens) for done in message.done if done.request_id == request_id]

    def cached(self, request_id):
        """What was told of reused prompt tokens."""
        return [count for message in self.told(m.Tokens) for number, _, count in message.cached if number == request_id]

    def is_at_rest(self):
        """Nothing is held, nothing runs, nothing is in the engine."""
        stats = self.stats
        return (self.machine.is_idle and stats.num_held_blocks == stats.num_quarantined_blocks == 0
                and not any(engine.rows for engine in self.engines))


def make_grant(source, req, *, num_blocks=64):
    """A grant for a request's prompt, as a prefill instance that is not looked at any further would give it."""
    prefill = Instance("prefill", member=source, num_blocks=num_blocks, budget=1024)
    prefill.prefill(req)
    prefill.work()
    (prefilled,) = prefill.told(m.Prefilled)
    return replace(prefilled.grant, source=source), prefill.arenas


def decode_with(*requests, **options):
    """A decode instance and the grants of requests it may be asked to admit."""
    grants, peers = {}, {}
    for req in requests:
        grants[req.request_id], peers[f"prefill-{req.request_id}"] = make_grant(f"prefill-{req.request_id}", req)
    return Instance("decode", arenas=peers, **options), grants


def failures(instance):
    """Attempts that it said have failed: request, and whether to try again."""
    return [(failed.request_id, failed.retry) for failed in instance.told(m.AttemptFailed)]


def as_placement(geometry, *layers):
    """The first version of an expert map with these layers."""
    return Placement(1, geometry.num_experts, geometry.slots_per_rank, tuple(tuple(layer) for layer in layers))
