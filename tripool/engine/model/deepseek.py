"""The whole model: from a batch of tokens to hidden states, with the cache written on the way.

It works out the mathematics and nothing else: how tokens reach their experts is the exchange's affair, where blocks
lie is the batch's, which token comes next is the sampler's. In deterministic mode a row's numbers are the same bits
whatever shares the batch, however the prompt was cut, cached or not, and on any number of ranks.

A forward pass does not run the MTP layer, but its cache entries are written with the others, so that drafting can start
at any position. The entry at position i joins the embedding of token i with the final-normed hidden state of token
i - 1, so it depends on nothing later. Position 0 has no state before it and takes zeros; training knows no such entry,
so attention of the MTP layer begins at position 1. `draft` runs it. As a draft is only a guess, which the forward pass
proves, it is computed the fast way in deterministic mode too.

T tokens · N chosen tokens · D model width · V vocabulary · R rows
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tripool.core.errors import ConfigError
from tripool.core.placement import Placement
from tripool.core.shape import ModelShape
from tripool.engine.batch import Batch, LatentCache
from tripool.engine.model.context import ForwardContext, forward_context
from tripool.engine.model.layers import rotary_table
from tripool.engine.model.layout import check_mtp, moe_layers
from tripool.engine.model.mla import LatentAttention
from tripool.engine.model.moe import ONE_CALL_ROWS, MixtureOfExperts
from tripool.engine.model.products import Packed, PackedGated, Weights, packed
from tripool.engine.model.turns import Turns, all_to_the_end, to_the_end
from tripool.engine.ops.forward import Forward, MtpParts, WholeLayer
from tripool.engine.ops.layer import DenseLayer, ExpertLayer
from tripool.engine.ops.rms_norm import add_and_norm, rms_norm
from tripool.engine.ops.sample import Draws, Ints
from tripool.engine.ops.tiles import Stage, in_tiles, whole
from tripool.engine.parallel.exchange import Arrived, Exchange
from tripool.engine.parallel.placement import SlotTable

FEW_ROWS, MORE_ROWS = 16, 64     # of one expert, to see what a row costs; multiples of what deterministic tiles take
LEAST_READINGS = 5
MEASURED_S = 0.005
SHORTEST_S = 1e-9


class DeepseekModel:
    """DeepSeek-V2, V2-Lite, V3 or R1 with the weights that `layout.weight_plan` names."""

    def __init__(self, shape: ModelShape, tensors: MutableMapping[str, Tensor], exchange: Exchange, *,
                 deterministic: bool = False, drafts: bool = False, plain: bool = False, int8_head: bool = False,
                 rounds_rows: bool = False, packed: Mapping[str, Packed] | None = None) -> None:
        """Build the model around its weights, some `packed` already; what is packed anew is taken out of `tensors`.

        `drafts`: the MTP layer is to be run. `plain`: with torch's products alone. `int8_head`, `rounds_rows`: see
        `Weights`.

        Raises:
            ConfigError: the model is of no supported form, or has no such layer.
        """
        if drafts:
            check_mtp(shape)
        if shape.num_mtp_layers > 1:
            raise ConfigError(f"num_nextn_predict_layers is {shape.num_mtp_layers}; at most 1 is served")
        weights = Weights(tensors, deterministic=deterministic, plain=plain, int8_head=int8_head,
                          rounds_rows=rounds_rows, packed=packed)
        self.shape = shape
        self.deterministic = deterministic
        self.run: Callable = in_tiles if deterministic and not weights.row_by_row else whole
        self.embed_VD = weights["embed"]
        self.dtype = weights.dtype
        if deterministic and self.dtype != torch.float32:
            raise ConfigError(f"the element type is {self.dtype}; deterministic mode needs float32")
        self.head = weights.matrix("embed" if shape.tie_embeddings else "head")
        self.norm_D = weights["norm"]
        self.layers = [Layer(shape, weights, layer, exchange, self.run, deterministic)
                       for layer in range(shape.num_layers)]
        self.mtp_entries = [MtpEntries(shape, weights, layer, self.run, deterministic)
                            for layer in range(shape.num_layers, shape.num_cached_layers)]
        self.mtp_layer = MtpLayer(shape, weights, exchange, self.mtp_entries[0]) if drafts else None
        self.rotary = rotary_table(shape, self.embed_VD.device)
        self.moe_blocks = [self._moe_block(layer) for layer in moe_layers(shape)]
        self.one_call = self._in_one_call() if weights.row_by_row else None
        self._places_are_plain = True
        self._placed: tuple[tuple[int, ...], ...] = ()
        self._placed_for = (0, 0)

    def _moe_block(self, layer: int) -> MixtureOfExperts | None:
        """The experts of a layer, counted over all; none where they are not run (the MTP layer's, without drafting)."""
        if layer >= self.shape.num_layers:
            if self.mtp_layer is None:
                return None
            block = self.mtp_layer.layer.feed_forward
        else:
            block = self.layers[layer].feed_forward
        assert isinstance(block, MixtureOfExperts), f"layer {layer} has experts, but not here"
        return block

    def _in_one_call(self) -> Forward | None:
        """The whole forward pass, for a rank that is alone."""
        layers = [each for layer in self.layers if (each := layer.in_calls) is not None]
        layer = None if self.mtp_layer is None else self.mtp_layer.layer.in_calls
        if len(layers) < len(self.layers) or (self.mtp_layer is not None and layer is None):
            return None
        parts = None
        if self.mtp_entries:
            norm_D = None if self.mtp_layer is None else self.mtp_layer.norm_D
            parts = self.mtp_entries[0].parts(layer, norm_D)
        head = packed(self.head)
        assert head is not None, "there is a head"
        return Forward(self.shape, self.embed_VD, self.norm_D, self.rotary, head, layers, parts)

    @property
    def plain_call(self) -> Forward | None:
        """Whole passes in one call, as long as expert i is in slot i."""
        return self.one_call if self._places_are_plain else None

    def _fits_one_call(self, batch: Batch, *, one_by_one: bool = False) -> bool:
        """Few tokens, all of which attend over the cache as it lies, and expert i in slot i."""
        return (self._places_are_plain and 0 < batch.num_tokens <= ONE_CALL_ROWS
                and (one_by_one or batch.num_decode_rows == batch.num_rows))

    def use_placement(self, placement: Placement, rank: int) -> None:
        """From the next step on tokens go where this map says; ranks' stacks hold what it names.

        Only the tables of layers that differ from the last map are made anew.
        """
        device, placed_for = self.embed_VD.device, (placement.num_experts, rank)
        before = self._placed if placed_for == self._placed_for else ()
        for index, (block, experts) in enumerate(zip(self.moe_blocks, placement.layers, strict=True)):
            if block is not None and (not before or before[index] != experts):
                block.slot_table = SlotTable(experts, placement.num_experts, source_rank=rank, device=device)
        self._placed, self._placed_for = placement.layers, placed_for
        self._places_are_plain = all(block is None or block.places_are_plain for block in self.moe_blocks)

    @torch.inference_mode()
    def seconds_per_token(self) -> float:
        """How much longer one expert takes for each row more: the price at which experts are rebalanced.

        Measured within some milliseconds (for large experts, a few runs). Where this rank holds none, no price.
        """
        held = [block.experts for block in self.moe_blocks if block is not None and block.experts.num_experts]
        if not held:
            return SHORTEST_S
        experts, device = held[0], self.embed_VD.device
        x_ND = torch.ones(FEW_ROWS + MORE_ROWS, self.shape.hidden_size, dtype=self.dtype, device=device)
        expert_N1 = torch.zeros(FEW_ROWS + MORE_ROWS, 1, dtype=torch.int64, device=device)

        def seconds(num_rows: int) -> float:
            begun = time.perf_counter()
            experts(Arrived(x_ND[:num_rows], expert_N1[:num_rows]))[:1].cpu()
            return time.perf_counter() - begun

        until = time.perf_counter() + MEASURED_S
        seconds(FEW_ROWS + MORE_ROWS)                       # weights come into the cache
        readings: list[float] = []
        while len(readings) < LEAST_READINGS or time.perf_counter() < until:
            few_s = seconds(FEW_ROWS)
            readings.append((seconds(FEW_ROWS + MORE_ROWS) - few_s) / MORE_ROWS)
        return max(statistics.median(readings), SHORTEST_S)

    def forward(self, batch: Batch, cache: LatentCache) -> Tensor:
        """The final-normed hidden state of every token, `[T, D]`. Writes the tokens' entries of all layers.

        Raises as `forward_together` does.
        """
        if self.one_call is not None and self._fits_one_call(batch, one_by_one=self.deterministic):
            hidden_TD, expert_LTK = self.one_call(batch, cache)
            for block, expert_TK in zip(self.moe_blocks, expert_LTK, strict=False):      # not that of the MTP layer
                assert block is not None, "a layer of the model has its experts"
                block.count(expert_TK)
            return hidden_TD
        return self.forward_together([batch], cache)[0]

    @torch.inference_mode()
    def forward_together(self, batches: Sequence[Batch], cache: LatentCache) -> list[Tensor]:
        """The same for batches that take turns: one computes while the tokens or results of another travel.

        Raises:
            ExchangeError: nothing came of it, for none of them. Of the cache no more has changed than entries of the
                tokens that were to be computed.
        """
        return all_to_the_end([self._in_turns(batch, cache) for batch in batches])

    def _in_turns(self, batch: Batch, cache: LatentCache) -> Turns:
        assert cache.data.dtype == self.dtype, f"the cache holds {cache.data.dtype}, the model computes in {self.dtype}"
        context = forward_context(batch, self.rotary, cache.entries(0), one_by_one=self.deterministic)
        previous_RD = self._hidden_before(batch, cache) if self.mtp_entries else None
        if context.fresh_blocks.numel():
            cache.data.index_fill_(0, context.fresh_blocks, 0)
        embedded_TD = F.embedding(batch.token_T, self.embed_VD).to(self.dtype)
        x_TD = embedded_TD
        for index, layer in enumerate(self.layers):
            x_TD = yield from layer.in_turns(x_TD, context, cache.entries(index))
        hidden_TD = self.run(self._final_norm, x_TD)
        yield                       # a block keeps the state of its last token: no sooner than all batches are through
        if previous_RD is not None:
            self._write_mtp(batch, context, cache, embedded_TD, hidden_TD, previous_RD)
        return hidden_TD

    @torch.inference_mode()
    def draft(self, batch: Batch, cache: LatentCache, previous_TD: Tensor | None = None) -> Tensor:
        """Run the MTP layer on one token of each row: the states from which the head guesses the next one, `[T, D]`.

        `previous_TD` is what this gave for the tokens before; None: these are computed, their states are in the cache.
        Entries of the layer are written on the way; the forward pass that computes the tokens writes them again.
        """
        assert self.mtp_layer is not None, "this model was built without drafting"
        if self.one_call is not None and self._fits_one_call(batch):
            state_TD, expert_TK = self.one_call.draft(batch, cache, previous_TD)
            if (block := self.moe_blocks[-1]) is not None:
                block.count(expert_TK)
            return state_TD
        if previous_TD is None:
            previous_TD = self._hidden_before(batch, cache)
        entries = cache.entries(self.shape.num_layers)
        context = forward_context(batch, self.rotary, entries, one_by_one=False, first_seen=1)
        if context.fresh_blocks.numel():
            cache.data.index_fill_(0, context.fresh_blocks, 0)
        embedded_TD = F.embedding(batch.token_T, self.embed_VD).to(self.dtype)
        return to_the_end(self.mtp_layer.in_turns(embedded_TD, previous_TD, context, entries))

    def guess(self, batch: Batch, cache: LatentCache, num_drafts_R: Ints, draw_R: Draws) -> Ints | None:
        """As `Forward.guess`; None where that has to be done draft by draft."""
        assert self.mtp_layer is not None, "this model was built without drafting"
        if self.one_call is None or not self._fits_one_call(batch):
            return None
        draft_RJ, expert_XK = self.one_call.guess(batch, cache, num_drafts_R, draw_R)
        if (block := self.moe_blocks[-1]) is not None:
            block.count(expert_XK)
        return draft_RJ

    @torch.inference_mode()
    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Float32 logits of chosen tokens, `[N, V]`."""
        return self.run(self._head, hidden_ND)

    def _final_norm(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.norm_D, self.shape.rms_norm_eps)

    def _head(self, hidden_ND: Tensor) -> Tensor:
        return self.head(hidden_ND).float()

    def _hidden_before(self, batch: Batch, cache: LatentCache) -> Tensor:
        """The hidden state of the token before each row's first, zeros at position 0. Read before it is overwritten."""
        if not batch.num_rows:
            return self.norm_D.new_empty(0, self.shape.hidden_size)
        first_R = torch.tensor(batch.first_R, device=batch.token_T.device)
        block_R = batch.block_table_RB.gather(1, (first_R - 1).clamp(min=0).unsqueeze(-1) // cache.block_tokens)
        previous_RD = cache.hidden.index_select(0, block_R.squeeze(-1))
        return previous_RD.masked_fill_((first_R == 0).unsqueeze(-1), 0)

    def _write_mtp(self, batch: Batch, context: ForwardContext, cache: LatentCache, embedded_TD: Tensor,
                   hidden_TD: Tensor, previous_RD: Tensor) -> None:
        previous_TD = previous_RD
        if batch.num_tokens != batch.num_rows or 0 in batch.count_R:
            previous_TD = torch.empty_like(hidden_TD)
            previous_TD[1:] = hidden_TD[:-1]
            starts, rows, start = [], [], 0
            for row, count in enumerate(batch.count_R):
                if count:
                    starts.append(start)
                    rows.append(row)
                start += count
            previous_TD[starts] = previous_RD[rows]
        for index, layer in enumerate(self.mtp_entries, start=self.shape.num_layers):
            layer.attention.write(self.run(layer, embedded_TD, previous_TD), context, cache.entries(index))
        kept = context.kept_tokens
        cache.hidden.index_copy_(0, context.block_T.index_select(0, kept), hidden_TD.index_select(0, kept))


class Layer:
    """Attention, then a dense feed-forward or experts."""

    def __init__(self, shape: ModelShape, weights: Weights, layer: int, exchange: Exchange,
                 run: Callable, deterministic: bool) -> None:
        name = f"layers.{layer}"
        self.run = run
        self.eps = shape.rms_norm_eps
        self.input_norm_D = weights[f"{name}.input_norm"]
        self.post_norm_D = weights[f"{name}.post_norm"]
        self.attention = LatentAttention(shape, weights, layer, run, deterministic)
        self.attention_call = (self.attention.in_one_call(self.input_norm_D, self.post_norm_D)
                               if weights.row_by_row else None)
        self.feed_forward: Stage
        second_call: ExpertLayer | DenseLayer | None = None
        if shape.is_moe(layer):
            self.feed_forward = MixtureOfExperts(shape, weights, layer, exchange, run, deterministic)
            second_call = self.feed_forward.one_call
        else:
            self.dense = weights.gated(f"{name}.dense")
            self.feed_forward = self._dense
            if isinstance(self.dense, PackedGated):
                second_call = DenseLayer(self.dense.stack.gate_up, self.dense.stack.down)
        self.in_calls: WholeLayer | None = None              # both halves, if each is one call
        if self.attention_call is not None and second_call is not None:
            self.in_calls = self.attention_call, second_call

    def in_turns(self, x_TD: Tensor, context: ForwardContext, entries: Tensor) -> Turns:
        if self.attention_call is not None and context.step is not None:
            x_TD, y_TD = self.attention_call(x_TD, context.step, entries)
        else:
            attended_TD = self.attention(self.run(self._before_attention, x_TD), context, entries)
            x_TD, y_TD = self.run(self._before_feed_forward, x_TD, attended_TD)
        if isinstance(self.feed_forward, MixtureOfExperts):
            return (yield from self.feed_forward.in_turns(y_TD, x_TD))
        return x_TD + self.feed_forward(y_TD)

    def _before_attention(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.input_norm_D, self.eps)

    def _before_feed_forward(self, x_TD: Tensor, attended_TD: Tensor) -> tuple[Tensor, Tensor]:
        return add_and_norm(x_TD, attended_TD, self.post_norm_D, self.eps)

    def _dense(self, x_TD: Tensor) -> Tensor:
        return self.run(self._gated, x_TD)

    def _gated(self, x_TD: Tensor) -> Tensor:
        return self.dense(x_TD)


class MtpEntries:
    """The cache entries of the MTP layer: what its attention will read, without running the layer."""

    def __init__(self, shape: ModelShape, weights: Weights, layer: int, run: Callable,
                 deterministic: bool) -> None:
        name = f"layers.{layer}"
        self.eps = shape.rms_norm_eps
        self.embed_norm_D = weights[f"{name}.mtp.embed_norm"]
        self.hidden_norm_D = weights[f"{name}.mtp.hidden_norm"]
        self.join_in = weights.matrix(f"{name}.mtp.join")
        self.input_norm_D = weights[f"{name}.input_norm"]
        self.attention = LatentAttention(shape, weights, layer, run, deterministic, attends=False)

    def __call__(self, embedded_TD: Tensor, previous_TD: Tensor) -> Tensor:
        """Entries before norm and rotation."""
        x_TD = self.join(embedded_TD, previous_TD)
        return self.attention.entry(rms_norm(x_TD, self.input_norm_D, self.eps))

    def parts(self, layer: WholeLayer | None, norm_D: Tensor | None) -> MtpParts:
        """The same, and the layer where it is run, for one call."""
        join, entry = packed(self.join_in), packed(self.attention.entry_in)
        assert join is not None and entry is not None, "there are such matrices"
        return MtpParts(self.embed_norm_D, self.hidden_norm_D, self.input_norm_D, self.attention.latent_norm_L, join,
                        entry, layer, norm_D)

    def join(self, embedded_TD: Tensor, previous_TD: Tensor) -> Tensor:
        """The input of the layer."""
        joined = torch.cat([rms_norm(embedded_TD, self.embed_norm_D, self.eps),
                            rms_norm(previous_TD, self.hidden_norm_D, self.eps)], dim=-1)
        return self.join_in(joined)


class MtpLayer:
    """The MTP layer as it is run to draft."""

    def __init__(self, shape: ModelShape, weights: Weights, exchange: Exchange,
                 entries: MtpEntries) -> None:
        index = shape.num_layers
        self.join = entries.join
        self.layer = Layer(shape, weights, index, exchange, whole, deterministic=False)
        self.norm_D = weights[f"layers.{index}.mtp.norm"]

    def in_turns(self, embedded_TD: Tensor, previous_TD: Tensor, context: ForwardContext, entries: Tensor) -> Turns:
        x_TD = yield from self.layer.in_turns(self.join(embedded_TD, previous_TD), context, entries)
        return rms_norm(x_TD, self.norm_D, self.layer.eps)
