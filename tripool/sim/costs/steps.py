"""What a step of an instance costs, from its operators up: decode rows, prompt chunks, drafts, two microbatches.

A layer is two stages. *Attention* (MLAProlog, attention core, output projection) differs between ranks with their
rows and contexts, and the exchange waits for the slowest. *Experts* (gate, dispatch, feed-forward, combine) wait for
the rank with the busiest experts (`costs/loads.py`). With two microbatches a decode step runs one's attention beside
the other's experts, on cores divided as the machine's file says (section 4.2.3), or, where it divides none, only the
exchange beside both; a prefill step runs the exchange beside everything else, and, where the instance is built so,
what lays tokens out for it, too (section 4.3.2).

A step with rows and chunks is one pass, as the engine takes it: products over all tokens, so that weights are read
once; attention cores apart, absorbed for rows and expanded for chunks; one dispatch and one combine; experts wait for
the rank that is busiest with both. It is the pass of its chunks, and what rows add to it, under the names that they
have in a decode step. With two microbatches it is cut as a prefill step is. Nobody has published what such a step takes
on a supernode; nothing in `sim/reproduce` has one.

Parts add up to the step: what runs beside something longer is not listed, and what is left of it is. Names and levels
are the same in each step, so that a table of them can be summed.

R ranks · C chunks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tripool.sim.costs.exchange import ExchangeCosts
from tripool.sim.costs.instance import Instance
from tripool.sim.costs.loads import ExpertBalance, balance_of
from tripool.sim.costs.rates import OperatorLevel, Rates
from tripool.sim.costs.residuals import NONE, Residuals
from tripool.sim.costs.state import Breakdown, Part, StepState
from tripool.sim.costs.work import entry_bytes, work_of

Reals = npt.NDArray[np.float64]
Times = dict[str, float]

OVERHEAD, SKEW, STEP = "layer overhead", "expert skew", "step overhead"
RESIDUALS = (OVERHEAD, SKEW, STEP)
LEFT_OVER = "exchange, left over"
EXCHANGE = ("dispatch", "combine", LEFT_OVER, "all-gather", "all-to-all")  # parts in which tokens are on their way
SAMPLED_BYTES = 4.0 * 2                    # a logit in FP32, written by the head and read by the sampler
MANY_ROWS = 8192                           # of one expert: enough to be computed at the best efficiency
GATE_BYTES = 4.0                           # of an element of the gate's matrix, which stays FP32


@dataclass(frozen=True, slots=True)
class Stages:
    """One layer with experts, all microbatches together, seconds. Operators as they are within a layer."""

    attention: Times                       # of the slowest rank, by operator
    attention_mean_s: float                # over ranks
    gate_s: float
    dispatch_s: float
    experts_s: float                       # of the busiest rank
    skew_s: float                          # of this what loads that the placement did not know take longer
    combine_s: float
    streams: tuple[float, float]           # what runs one after the other, and what runs beside it
    attention_cores: int                   # attention is the first stream, experts the second; 0: cores and exchange

    @property
    def attention_s(self) -> float:
        return sum(self.attention.values())

    @property
    def layer_s(self) -> float:
        """With two streams each microbatch waits for the slower one."""
        return max(self.streams)

    def listed(self) -> Times:
        """Parts that add up to the layer: those of the longer stream."""
        gate_and_experts = {"gate": self.gate_s, "expert FFN": self.experts_s - self.skew_s, SKEW: self.skew_s}
        exchange = {"dispatch": self.dispatch_s, "combine": self.combine_s}
        if self.streams[1] == 0.0:
            return self.attention | gate_and_experts | exchange
        first, second = (self.attention, gate_and_experts | exchange)
        if not self.attention_cores:
            first, second = (self.attention | gate_and_experts, exchange)
        return first if self.streams[0] >= self.streams[1] else second


@dataclass(frozen=True, slots=True)
class PrefillLayer:
    """One layer with experts of a prefill step, seconds, without layer overhead. Attention is in dense layers too."""

    attention: Times
    attention_cores_s: float               # of it what cores do, which the layer overhead lengthens
    experts: Times
    expert_cores_s: float


class OperatorCosts:
    """Prices the steps of one instance. Fulfils `StepCosts`."""

    def __init__(self, instance: Instance, *, level: OperatorLevel = "efficiency", residuals: Residuals = NONE,
                 balance: ExpertBalance | None = None) -> None:
        """`balance`: of expert loads that are known, a trace's for example; else of what `residuals` say of them.

        At the speed of light there are no residuals.
        """
        shape = instance.shape
        residuals = NONE if level == "speed of light" else residuals
        self.instance, self.level, self.residuals = instance, level, residuals
        self._work = work_of(shape)
        self._rates = Rates(instance.hardware, level)
        self._exchange = ExchangeCosts(shape, instance.hardware, instance.numbers, instance.ranks, level)
        self._slowdown = 1.0 + residuals.layer_overhead
        work, numbers = self._work, instance.numbers
        rotary = work.absorbed_rotary_operations
        latent = work.absorbed_operations - rotary
        in_8bit = numbers.latent_bytes <= 1.0
        self._pair_s = self._rates.attention_operations(rotary + (0 if in_8bit else latent), latent if in_8bit else 0)
        self._read_s = entry_bytes(shape, numbers, 1) / self._rates.attention_bytes_per_s
        self._tables: dict[tuple[float, int], Reals] = {}
        self._balance = balance
        if instance.geometry is not None and balance is None:
            skew = 0.0 if instance.perfect_balance else residuals.expert_skew
            self._balance = balance_of(instance.geometry, shape.num_experts_per_token, skew)
        self._moe_layers = instance.num_moe_layers
        self._dense_layers = shape.num_layers - self._moe_layers
        self._split = instance.hardware.decode_split
        self._cores = instance.hardware.die.matrix_cores

    # ------------------------------------------------------------ a step

    def step_time(self, state: StepState) -> Breakdown:
        """All parts of a step.

        Every rank takes every step: one in which nobody computes anything still tells each layer's peers so.
        """
        times: Times = {}
        if state.chunk_tokens_C.size and state.chunk_tokens_C.any():
            self._with_chunks(state, times)
        elif state.rows_R.any():
            self._decode(state, times)
        if not times and self._balance is not None:
            for op in ("dispatch", "combine"):
                _add(times, op, self._exchange.fused_s(op, 0.0) * self._moe_layers)
        times[STEP] = self.residuals.step_overhead_ms * 1e-3
        return Breakdown(tuple(Part(name, seconds, "residual" if name in RESIDUALS else self.level)
                               for name, seconds in times.items() if seconds))

    # ------------------------------------------------------------ decode

    def _decode(self, state: StepState, times: Times) -> None:
        layer = self._decode_layer(state)
        _add_all(times, layer, self._moe_layers)
        dense = self._dense_layer(state) if self._dense_layers or not self._moe_layers else {}
        _add_all(times, dense, self._dense_layers)
        self._add_head(times, float((state.rows_R + state.drafts_R).max()))
        self._add_drafts(state, layer if self._moe_layers else dense, times)

    def _add_drafts(self, state: StepState, layer: Times, times: Times) -> None:
        """What guesses of a step's rows take, and the host. `layer` is one of these rows, with experts if there are."""
        instance, work = self.instance, self._work
        drafts_R = state.drafts_R
        num_drafts = int(np.ceil((drafts_R / np.maximum(state.rows_R, 1)).max())) if drafts_R.any() else 0
        most_tokens, most_rows = float((state.rows_R + drafts_R).max()), float(state.rows_R.max())
        for draft in range(num_drafts):    # the first sees all tokens that were verified, later ones what was guessed
            tokens = most_tokens if draft == 0 else most_rows
            if draft == 1:
                layer = self._row_layer(replace(state, drafts_R=np.zeros_like(drafts_R)))
            guess = dict(layer)
            overhead = guess.pop(OVERHEAD, 0.0)
            joined = self._product(tokens, work.draft_params)
            _add(times, "MTP layer", sum(guess.values()) + joined)
            _add(times, OVERHEAD, overhead + joined * self.residuals.layer_overhead)
            self._add_head(times, most_rows)
        if not instance.device_sampling:
            _add(times, "host launch", (1 + num_drafts) * instance.hardware.graph_launch_ms * 1e-3)

    def decode_stages(self, state: StepState) -> Stages:
        """The stages of one layer with experts, of the decode rows of a step."""
        assert self._balance is not None, "a model without experts has no such layer"
        micro = max(1, state.num_microbatches)
        is_split = micro > 1 and self._split.attention_cores > 0
        tokens_R = state.rows_R + state.drafts_R
        most, mean = float(tokens_R.max()) / micro, float(tokens_R.mean()) / micro
        busiest = (state.balance or self._balance).busiest(float(state.rows_R.sum()) / micro)
        slow = self._slowdown * micro
        gate = self._gate(most) * slow
        dispatch = self._exchange.fused_s("dispatch", most, busiest, state.link_share) * slow
        combine = self._exchange.fused_s("combine", most, busiest, state.link_share) * slow
        attention_cores, expert_cores = self._cores, self._cores
        if is_split:
            attention_cores, expert_cores = self._split.attention_cores, self._split.expert_cores
        rank, mean_s = self._slowest_rank(state, attention_cores / self._cores, micro)
        if is_split and self._split.adaptive:
            total = attention_cores + expert_cores

            def streams_with(cores: int) -> tuple[float, float]:
                attention = sum(self._decode_attention(state, rank, cores / self._cores, micro).values())
                experts = self._experts(mean, most, busiest, (total - cores) / self._cores)
                return attention * slow, gate + dispatch + experts * slow + combine

            attention_cores = _balanced(streams_with, total)
            expert_cores = total - attention_cores
            rank, mean_s = self._slowest_rank(state, attention_cores / self._cores, micro)
        attention = {name: seconds * slow for name, seconds in
                     self._decode_attention(state, rank, attention_cores / self._cores, micro).items()}
        experts = self._experts(mean, most, busiest, expert_cores / self._cores) * slow
        even = min(self._balance.even, busiest)
        skew = experts - self._experts(mean, most, even, expert_cores / self._cores) * slow
        attention_s = sum(attention.values())
        streams = (attention_s, gate + dispatch + experts + combine)
        if micro > 1 and not is_split:
            streams = (attention_s + gate + experts, dispatch + combine)
        return Stages(attention, mean_s * slow, gate, dispatch, experts, skew, combine,
                      streams if micro > 1 else (sum(streams), 0.0), attention_cores if is_split else 0)

    @property
    def seconds_per_expert_token(self) -> float:
        """So much longer a layer takes per token more on the busiest rank, where computing is what is waited for."""
        params, weight_bytes = self._work.expert_params, self.instance.numbers.weight_bytes
        return self._rates.product("expert", MANY_ROWS, params, weight_bytes) / MANY_ROWS * self._slowdown

    def mean_experts_s(self, state: StepState) -> float:
        """Feed-forward of a rank with as many tokens as the mean, within a layer and without microbatches."""
        mean = float((state.rows_R + state.drafts_R).mean())
        return self._experts(mean, mean, 1.0, 1.0) * self._slowdown

    def _row_layer(self, state: StepState) -> Times:
        """Parts of one layer of a step's rows alone, with experts if the model has any."""
        return self._decode_layer(state) if self._moe_layers else self._dense_layer(state)

    def _decode_layer(self, state: StepState) -> Times:
        """Parts of one layer with experts, the layer overhead apart."""
        if self._balance is None:
            return {}
        stages = self.decode_stages(state)
        parts = {name: seconds / self._slowdown for name, seconds in stages.listed().items()}
        return parts | {OVERHEAD: stages.layer_s * (1.0 - 1.0 / self._slowdown)}

    def _dense_layer(self, state: StepState) -> Times:
        """Parts of one layer without experts: no microbatches, because nothing is exchanged."""
        rank, _ = self._slowest_rank(state, 1.0, 1)
        parts = self._decode_attention(state, rank, 1.0, 1)
        parts["dense FFN"] = self._product(float((state.rows_R + state.drafts_R).max()), self._work.dense_params)
        return parts | {OVERHEAD: sum(parts.values()) * self.residuals.layer_overhead}

    def _slowest_rank(self, state: StepState, share: float, micro: int) -> tuple[int, float]:
        """The rank that others wait for after the attention stage of a microbatch, and the mean over all, seconds."""
        tokens_R = state.rows_R + state.drafts_R
        around_R = self._around_attention(int(tokens_R.max()), share, micro)[tokens_R]
        total_R = around_R + self._row_cores(state, share) / micro
        return int(total_R.argmax()), float(total_R.mean())

    def _row_cores(self, state: StepState, share: float) -> Reals:
        """The attention core of each rank's rows."""
        pairs_R = state.context_R * ((state.rows_R + state.drafts_R) / np.maximum(state.rows_R, 1))
        cores_R: Reals = np.maximum(pairs_R * (self._pair_s / share), state.context_R * self._read_s)
        return cores_R

    def _around_attention(self, most_tokens: int, share: float, micro: int) -> Reals:
        """What the attention stage does besides its core, by the number of a rank's tokens; reckoned once."""
        table = self._tables.get((share, micro))
        if table is None or len(table) <= most_tokens:
            size = max(256, 2 * most_tokens)
            table = np.array([sum(self._projections(tokens / micro, share).values()) for tokens in range(size)])
            self._tables[share, micro] = table
        return table

    def _projections(self, tokens: float, share: float) -> Times:
        work, numbers = self._work, self.instance.numbers
        return {
            "MLAProlog": self._product(tokens, work.prolog_params, share),
            "output projection": self._product(tokens, work.decode_output_params, share),
            "norms": self._rates.vector(tokens * work.norm_elements * numbers.activation_bytes),
        }

    def _decode_attention(self, state: StepState, rank: int, share: float, micro: int) -> Times:
        """One microbatch of the attention stage of a rank, by operator."""
        rows, drafts = float(state.rows_R[rank]), float(state.drafts_R[rank])
        context = float(state.context_R[rank]) / micro
        pairs = context * (1.0 + drafts / max(rows, 1.0))      # of a query token and a token of its context
        core = max(pairs * self._pair_s / share, context * self._read_s)
        return self._projections((rows + drafts) / micro, share) | {"attention core": core}

    # ------------------------------------------------------------ experts

    def _gate(self, tokens: float) -> float:
        return self._rates.product_16bit(tokens, self._work.gate_params, GATE_BYTES)

    def _experts(self, mean_tokens: float, own_tokens: float, busiest: float, share: float) -> float:
        """Feed-forward of the rank with `busiest` times the mean, with tokens per rank before they were dispatched."""
        instance, shape, work = self.instance, self.instance.shape, self._work
        assert self._balance is not None
        picks = shape.num_experts_per_token + (1 if instance.shared_is_placed else 0)
        rows = mean_tokens * picks * busiest
        seconds = self._rates.product("expert", rows, work.expert_params, instance.numbers.weight_bytes, share=share,
                                      groups=self._balance.slots_per_rank)
        if shape.num_shared_experts and not instance.shared_is_placed:
            params = shape.num_shared_experts * work.expert_params
            seconds += self._rates.product("expert", own_tokens, params, instance.numbers.weight_bytes, share=share)
            rows += own_tokens * shape.num_shared_experts
        return seconds + self._rates.vector(rows * work.gated_elements * instance.numbers.activation_bytes)

    # ------------------------------------------------------------ chunks, and rows beside them

    def _with_chunks(self, state: StepState, times: Times) -> None:
        layer = self.prefill_layer(state)
        for name, seconds in layer.attention.items():
            _add(times, name, seconds * (self._moe_layers + self._dense_layers))
        for name, seconds in layer.experts.items():
            _add(times, name, seconds * self._moe_layers)
        row_tokens_R = state.rows_R + state.drafts_R
        tokens = float((self._chunk_tokens(state) + row_tokens_R).max())
        dense = self._product(tokens, self._work.dense_params) * self._dense_layers
        _add(times, "dense FFN", dense)
        slow = self.residuals.layer_overhead
        _add(times, OVERHEAD, slow * (dense + layer.attention_cores_s * (self._moe_layers + self._dense_layers)
                                      + layer.expert_cores_s * self._moe_layers))
        prompts_R = np.bincount(state.chunk_rank_C, minlength=self.instance.ranks)
        self._add_head(times, float((prompts_R + row_tokens_R).max()))
        if state.rows_R.any():
            self._add_drafts(state, self._row_layer(state) if state.drafts_R.any() else {}, times)

    def _chunk_tokens(self, state: StepState) -> Reals:
        """Tokens of chunks that each rank computes outside the attention core."""
        ranks = self.instance.ranks
        tokens_R: Reals = np.bincount(state.chunk_rank_C, state.chunk_tokens_C, ranks).astype(np.float64)
        if self.instance.sequence_parallel:
            tokens_R[:] = tokens_R.sum() / ranks
        return tokens_R

    def prefill_layer(self, state: StepState) -> PrefillLayer:
        """One layer with experts, of the chunks of a step and the rows beside them."""
        instance, ranks = self.instance, self.instance.ranks
        micro = max(1, state.num_microbatches)
        bulk = instance.hardware.exchange.bulk
        # Cores that move tokens do not multiply; what only waits for memory does not miss them.
        left = 1.0 - bulk.cores / instance.hardware.die.matrix_cores if micro > 1 else 1.0
        first_C, tokens_C = state.chunk_first_C.astype(np.float64), state.chunk_tokens_C.astype(np.float64)
        own_R, row_tokens_R = self._chunk_tokens(state), state.rows_R + state.drafts_R
        pairs_C = tokens_C * first_C + tokens_C * (tokens_C + 1.0) / 2.0
        wires: Times = {}
        heads_over = ranks if instance.sequence_parallel else 1
        if heads_over > 1:                                     # up projections and attention: heads over ranks
            new, old = float(tokens_C.sum()), float(first_C.sum())
            up_R, cached_R, pairs_R = (np.full(ranks, each) for each in (new, old, pairs_C.sum()))
            wires = self._attention_collectives(new, old, state.link_share)
        else:
            up_R = own_R
            cached_R, pairs_R = (np.bincount(state.chunk_rank_C, each, ranks) for each in (first_C, pairs_C))
        places: dict[tuple[float, float, float, float, float], int] = {}
        which_R = [places.setdefault(key, len(places)) for key in zip(
            own_R.tolist(), up_R.tolist(), cached_R.tolist(), pairs_R.tolist(), row_tokens_R.tolist(), strict=True)]
        distinct = [self._pass_attention(*key, heads_over, micro) for key in places]
        row_cores_R = self._row_cores(state, 1.0)
        slowest = int(np.argmax(np.array([sum(each.values()) for each in distinct])[which_R] + row_cores_R))
        attention = distinct[which_R[slowest]]
        attention["attention core"] += float(row_cores_R[slowest])
        attention = {name: seconds if name == "norms" else seconds / left for name, seconds in attention.items()}
        attention_cores_s = sum(attention.values())
        attention |= wires
        if instance.geometry is None:
            return PrefillLayer(attention, attention_cores_s, {}, 0.0)
        assert self._balance is not None
        busiest = self._busiest_of_both(state, micro)
        tokens_R = own_R + row_tokens_R
        mean, most = float(tokens_R.mean()), float(tokens_R.max())
        even, all_of_it = (self._experts(mean / micro, most / micro, each, 1.0) * micro / left
                           for each in (min(self._balance.even, busiest), busiest))
        experts = {"gate": self._gate(most / micro) * micro / left, "expert FFN": even, SKEW: all_of_it - even}
        own, of_rows, share = float(own_R.max()), float(row_tokens_R.max()), state.link_share
        laid_out = self._routing_bytes(own, float(own_R.mean()) * busiest)
        routing = {"routing": self._rates.vector(laid_out) if ranks > 1 else 0.0}
        bulk_s = {op: self._exchange.bulk_s(op, own, busiest, share) for op in ("dispatch", "combine")}
        # Rows' tokens travel at the rate that they have in a decode step, and start with the others.
        direct_s = {op: self._exchange.fused_s(op, of_rows, busiest, share) - self._exchange.fused_s(op, 0.0)
                    for op in bulk_s}
        moved = {op: bulk_s[op] + direct_s[op] for op in bulk_s}
        if micro > 1:                      # beside what the cores do for the other microbatch; what is longer remains
            cores_s = attention_cores_s + sum(experts.values())
            if instance.vector_routing:
                routing = {"routing, left over": max(0.0, routing["routing"] - cores_s)}
            slow = self._slowdown if bulk.mover == "cores" else 1.0
            beside = (cores_s + sum(routing.values())) * self._slowdown + sum(wires.values())
            moving_s = sum(bulk_s.values()) * slow + sum(direct_s.values()) * self._slowdown
            moved = {LEFT_OVER: max(0.0, moving_s - beside) / slow}
            direct_s = {}
        experts |= routing
        expert_cores_s = sum(experts.values()) + sum((moved if bulk.mover == "cores" else direct_s).values())
        return PrefillLayer(attention, attention_cores_s, experts | moved, expert_cores_s)

    def _busiest_of_both(self, state: StepState, micro: int) -> float:
        """The busiest rank over the mean, as if rows and chunks asked most of the same one."""
        assert self._balance is not None, "a model without experts has no such layer"
        balance = state.balance or self._balance
        of_chunks = balance.busiest(state.chunk_tokens_C.size / micro)
        row_tokens, chunk_tokens = int((state.rows_R + state.drafts_R).sum()), int(state.chunk_tokens_C.sum())
        if not row_tokens:
            return of_chunks
        of_rows = balance.busiest(float(state.rows_R.sum()) / micro)
        return (of_chunks * chunk_tokens + of_rows * row_tokens) / (chunk_tokens + row_tokens)

    def _pass_attention(self, own: float, up: float, cached: float, pairs: float, row_tokens: float, ranks: int,
                        micro: int) -> Times:
        """Attention of a rank's chunks and rows, but for the core of the rows.

        Chunks are given as `_prefill_attention` takes them. Rows join in the products that both forms have; absorption
        is theirs alone. Where heads are divided over ranks, chunks need a part of the queries' weights and rows all.
        """
        parts = self._prefill_attention(own, up, cached, pairs, ranks, micro)
        if not row_tokens:
            return parts
        work = self._work

        def more(tokens: float, params: int) -> float:
            alone = self._product(tokens / micro, params)
            return max(0.0, self._product((tokens + row_tokens) / micro, params) - alone) * micro

        queries = work.up_params - work.up_cache_params
        parts["MLAProlog"] = (more(own, work.down_params) + more(up if ranks == 1 else 0.0, queries)
                              + more(0.0, work.absorbed_key_params))
        parts["output projection"] += more(own, work.output_params) + more(0.0, work.absorbed_value_params)
        parts["norms"] += self._rates.vector(row_tokens * work.norm_elements * self.instance.numbers.activation_bytes)
        return parts

    def _prefill_attention(self, own: float, up: float, cached: float, pairs: float, ranks: int,
                           micro: int) -> Times:
        """Attention of `own` tokens; up projections and the core for `up` tokens, the heads divided over `ranks`."""
        work, numbers = self._work, self.instance.numbers
        return {
            "down projections": self._product(own / micro, work.down_params) * micro,
            "up projections": (self._product(up / micro, work.up_params / ranks)
                               + self._product(cached / micro, work.up_cache_params / ranks)) * micro,
            "attention core": self._rates.attention_operations(pairs / ranks * work.expanded_operations),
            "output projection": self._product(own / micro, work.output_params) * micro,
            "norms": self._rates.vector(own * work.norm_elements * numbers.activation_bytes),
        }

    def _routing_bytes(self, own_tokens: float, arriving_tokens: float) -> float:
        """Reads and writes that lay tokens out for their way, for their experts, and back.

        Copies for each chosen expert: expanded and quantised for their way, and summed by the owner of the token; with
        double routing sorted by expert and back, besides, where they arrive. Copies for each rank: quantised once,
        copied to each expert, summed before the way back, and summed again.
        """
        shape, numbers = self.instance.shape, self.instance.numbers
        picks, ranks = shape.num_experts_per_token, self.instance.ranks
        full, sent = shape.hidden_size * numbers.activation_bytes, shape.hidden_size * numbers.sent_bytes
        if self.instance.hardware.exchange.bulk.copies == "expert":
            sorted_again = 0.0 if self.instance.vector_routing else arriving_tokens * picks * 2 * (sent + full)
            return own_tokens * (picks * (full + sent) + (picks + 1) * full) + sorted_again
        copies = ranks * (1.0 - (1.0 - 1.0 / ranks) ** picks)
        return (own_tokens * (full + sent) + arriving_tokens * (copies + picks) * sent
                + arriving_tokens * (picks + copies) * full + own_tokens * 2 * full)

    def _attention_collectives(self, tokens: float, cached: float, share: float) -> Times:
        """SP-TP-SP: gather what the down projections gave, and give back what heads gave (section 4.3.1).

        Queries are gathered as the next product takes them, cache entries as they are; each rank gets those of all.
        """
        instance, shape, numbers = self.instance, self.instance.shape, self.instance.numbers
        ranks = instance.ranks
        plane = instance.hardware.exchange_plane(ranks)
        query = (shape.q_lora_rank or shape.hidden_size) * numbers.sent_bytes
        entry = entry_bytes(shape, numbers, 1)
        others = (ranks - 1) / ranks
        gathered = (tokens * (query + entry) + cached * entry) * others
        heads = tokens / ranks * shape.num_heads * shape.v_head_dim * numbers.activation_bytes * others
        gbps = plane.die_gbps if self.level == "speed of light" else plane.write_gbps
        if share < 1.0:
            gbps = min(gbps, plane.die_gbps * share)
        startup = plane.engine_startup_us * 1e-6
        return {"all-gather": gathered / (gbps * 1e9) + startup, "all-to-all": heads / (gbps * 1e9) + startup}

    # ------------------------------------------------------------ what is not in a layer

    def _add_head(self, times: Times, tokens: float) -> None:
        _add(times, "head", self._rates.product_16bit(tokens, self._work.head_params,
                                                      self.instance.numbers.table_bytes))
        _add(times, "sampling", self._rates.vector(tokens * self.instance.shape.vocab_size * SAMPLED_BYTES))

    def _product(self, tokens: float, params: float, share: float = 1.0) -> float:
        return self._rates.product("projection", tokens, params, self.instance.numbers.weight_bytes, share=share)


def _balanced(streams_with: Callable[[int], tuple[float, float]], total: int) -> int:
    """So many of `total` cores for the first stream that the longer of the two is as short as can be."""
    low, high = 1, total - 1               # the first stream shrinks with its cores, the second grows
    while low < high:
        middle = (low + high) // 2
        first, second = streams_with(middle)
        if first <= second:
            high = middle
        else:
            low = middle + 1
    return min((each for each in (low - 1, low) if each > 0), key=lambda cores: max(streams_with(cores)))


def _add(times: Times, name: str, seconds: float) -> None:
    times[name] = times.get(name, 0.0) + seconds


def _add_all(times: Times, parts: Times, count: int) -> None:
    for name, seconds in parts.items():
        _add(times, name, seconds * count)
