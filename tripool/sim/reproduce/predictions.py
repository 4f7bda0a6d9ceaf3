"""What the simulator says of each published number that it can say something of.

A number is named `table/row/column` as in `paper_tables.json`. Of published values only those are read here that the
split calls inputs.
"""

from __future__ import annotations

from functools import cached_property

from tripool.sim.costs.apart import ApartStep, step_apart
from tripool.sim.costs.instance import Instance
from tripool.sim.costs.residuals import Residuals
from tripool.sim.costs.states import decode_state, prefill_state
from tripool.sim.costs.steps import OperatorCosts
from tripool.sim.costs.transfers import ConnectionMap, TransferCosts, model_loading
from tripool.sim.costs.work import entry_bytes, work_of
from tripool.sim.hardware.topology import switch_use
from tripool.sim.reproduce import settings
from tripool.sim.reproduce.tables import published

DIES = settings.DIES
MS, US = 1e-3, 1e-6

ACCEPTED = 1.7                             # tokens of a step with one draft of which 70 % are right (section 5.1)
ACCEPTED_XDS = 1.9                         # arXiv 2508.02520: about 90 %
ACCEPTED_SGLANG = 1.6                      # the blog assumes 60 %

BATCHES = (8, 16, 24, 32, 48, 64, 96, 128)       # per NPU: where Fig. 22a may have looked
LENGTHS = (512, 1024, 2048, 4096)                # of prompts, where Fig. 21a may have looked
BLOCK_TOKENS = 128                         # section 4.4.2: 128 to 512 tokens; all of them round 90 % of 4,096 to 3,584
REUSE = (0.125, 0.25, 0.5, 0.75, 0.9)


class Predictions:
    """All numbers under one set of residuals."""

    def __init__(self, residuals: Residuals) -> None:
        self.residuals = residuals

    def _costs(self, instance: Instance) -> OperatorCosts:
        return OperatorCosts(instance, residuals=self.residuals)

    # ------------------------------------------------------------ decode on CloudMatrix384

    @cached_property
    def _decode(self) -> OperatorCosts:
        return self._costs(settings.cm384_decode())

    def decode_step_s(self, batch: int, context: int, *, drafts: int = 1, microbatches: int | None = None) -> float:
        """A step with `batch` requests on each NPU; with two microbatches where that is faster, unless told."""
        wanted = (1, 2) if microbatches is None else (microbatches,)
        return min(self._decode.step_time(decode_state(320, batch // DIES, context, drafts=drafts,
                                                       microbatches=count)).total_s for count in wanted)

    def decode_layer_s(self, batch: int, context: int, *, drafts: int = 1, microbatches: int = 2) -> float:
        state = decode_state(320, batch // DIES, context, drafts=drafts, microbatches=microbatches)
        return self._decode.decode_stages(state).layer_s

    def microbatch_gain(self, batch: int) -> float:
        """By how many percent more a decode instance gives with two microbatches (Fig. 20a)."""
        return 100 * (self.decode_step_s(batch, 4096, microbatches=1)
                      / self.decode_step_s(batch, 4096, microbatches=2) - 1)

    def draft_gain(self, batch: int) -> float:
        """The same of drafting one token (Fig. 22a)."""
        return 100 * (ACCEPTED * self.decode_step_s(batch, 4096, drafts=0) / self.decode_step_s(batch, 4096) - 1)

    # ------------------------------------------------------------ prefill on CloudMatrix384

    def prefill_s(self, *, perfect: bool = False, length: int = 4096, microbatches: int = 2,
                  reuse: float = 0.0) -> float:
        """16,384 tokens on each NPU, `reuse` of which are in the cache, as far as they fill whole blocks."""
        costs = self._costs(settings.cm384_prefill(perfect=perfect))
        cached = int(reuse * length) // BLOCK_TOKENS * BLOCK_TOKENS
        state = prefill_state(32, 16384 // DIES // length, length, cached=cached, microbatches=microbatches)
        return costs.step_time(state).total_s

    def prefill_microbatch_gains(self) -> list[float]:
        return [100 * (self.prefill_s(length=length, microbatches=1) / self.prefill_s(length=length) - 1)
                for length in LENGTHS]

    def cached_ttft_s(self, reuse: float, plane: str = "scale_up") -> float:
        """First the cached context is fetched, then the rest is computed (section 4.4.2).

        Experts are balanced here: the TTFT without a cache that the published cuts and percentages imply, 2.54 s, is
        that of perfect balance (2.45 s in Table 2) and not that of the default (2.90 s).
        """
        instance = settings.cm384_prefill(perfect=True)
        costs = TransferCosts(instance.hardware, residuals=self.residuals)
        tokens = 16384 / DIES / 4096 * (int(reuse * 4096) // BLOCK_TOKENS * BLOCK_TOKENS)
        fetched = tokens * entry_bytes(instance.shape, instance.numbers, instance.shape.num_layers)
        return self.prefill_s(reuse=reuse, perfect=True) + costs.fetch_s(fetched, "management" if plane == "management"
                                                           else "scale_up")

    # ------------------------------------------------------------ second sources on the same machine

    def cann_decode_step_s(self) -> float:
        return self._costs(settings.cann_decode()).step_time(decode_state(128, 48, 4096, drafts=1)).total_s

    def cann_prefill_s(self, microbatches: int) -> float:
        return self._costs(settings.cann_prefill()).step_time(
            prefill_state(32, 2, 4096, microbatches=microbatches)).total_s

    @cached_property
    def _xdeepserve(self) -> OperatorCosts:
        return self._costs(settings.xdeepserve())

    def xdeepserve_step_s(self) -> float:
        """Colocated: the iteration and its gap."""
        return self._xdeepserve.step_time(settings.xdeepserve_state()).total_s

    def xdeepserve_exchange_s(self) -> tuple[float, float]:
        """Dispatch and combine as ranks see them: with waiting for the slowest attention and the busiest experts."""
        state = settings.xdeepserve_state()
        stages = self._xdeepserve.decode_stages(state)
        return (stages.dispatch_s + stages.attention_s - stages.attention_mean_s,
                stages.combine_s + stages.experts_s - self._xdeepserve.mean_experts_s(state))

    def disaggregated(self) -> ApartStep:
        """Attention on 480 dies in three domains, experts on 288 (arXiv 2508.02520, section 7.1): on each die two
        microbatches of 48 requests with a draft each."""
        return step_apart(self._xdeepserve, domain_dies=160, domains=3, rows=48, context=3072)

    def xdeepserve_shares(self) -> dict[str, float]:
        """Kernels' shares of a step, percent; operators within a layer."""
        state = settings.xdeepserve_state()
        stages = self._xdeepserve.decode_stages(state)
        dispatch, combine = self.xdeepserve_exchange_s()
        per = 100 / self.xdeepserve_step_s() * 62
        mean = self._xdeepserve.mean_experts_s(state)
        return {"QuantBatchMatmul": (stages.attention["output projection"] + mean) * per,
                "MultiLatentAttention": stages.attention["attention core"] * per,
                "MoE-Combine": combine * per, "MoE-Dispatch": dispatch * per,
                "MlaPreprocess": stages.attention["MLAProlog"] * per}

    # ------------------------------------------------------------ GPUs

    def gpu_prefill_tokens_per_s(self, name: str, *, perfect: bool, length: int = 4096,
                                 microbatches: int = 2) -> float:
        costs = self._costs(settings.gpu_prefill(name, perfect=perfect))
        return 16384 / costs.step_time(prefill_state(32, 16384 // length, length, microbatches=microbatches)).total_s

    def h800_decode_tokens_per_s(self) -> float:
        return 128 / self._costs(settings.h800_decode()).step_time(decode_state(128, 128, 4096, microbatches=2)).total_s

    def sglang_decode_tokens_per_s(self, batch: int, context: int, *, drafts: int, microbatches: int = 2) -> float:
        costs = self._costs(settings.sglang_decode())
        state = decode_state(72, batch, context, drafts=drafts, microbatches=microbatches)
        return batch * (ACCEPTED_SGLANG if drafts else 1.0) / costs.step_time(state).total_s

    # ------------------------------------------------------------ by the names of cells

    def cells(self) -> dict[str, float]:
        """All of them."""
        found: dict[str, float] = {}
        for part in (self._arithmetic, self._prefill_cells, self._decode_cells, self._second_sources, self._gpu_cells):
            found |= part()
        return found

    def _prefill_cells(self) -> dict[str, float]:
        default, perfect = (16384 / self.prefill_s(perfect=each) for each in (False, True))
        gains = self.prefill_microbatch_gains()
        base = self.cached_ttft_s(0.0)
        ub = {reuse: self.cached_ttft_s(reuse) for reuse in REUSE}
        vpc = {reuse: self.cached_ttft_s(reuse, "management") for reuse in REUSE}
        cut50, cut90 = base - ub[0.5], base - ub[0.9]
        ratio = self.prefill_s(perfect=False) / self.prefill_s(perfect=True)
        peak = 1504
        return {
            "table2_prefill/2/tokens_per_s": default, "table2_prefill/5/tokens_per_s": perfect,
            "table2_prefill/2/tokens_per_s_per_tflops": default / peak,
            "table2_prefill/5/tokens_per_s_per_tflops": perfect / peak,
            "fig21_microbatch_prefill/0/low": min(gains), "fig21_microbatch_prefill/0/high": max(gains),
            "fig21_microbatch_prefill/1/low": 100 * (1 - 1 / (1 + gains[-1] / 100)),
            "fig21_microbatch_prefill/1/high": 100 * (1 - 1 / (1 + gains[-1] / 100)),
            "fig23_context_cache/0/value": ub[0.125] / ub[0.5], "fig23_context_cache/1/value": base / ub[0.9],
            "fig23_context_cache/2/value": max(vpc[reuse] / ub[reuse] for reuse in REUSE),
            "fig23_context_cache/3/value": cut50 / MS, "fig23_context_cache/4/value": 100 * cut50 / base,
            "fig23_context_cache/5/value": cut90 / MS, "fig23_context_cache/6/value": 100 * cut90 / base,
            "derived_checks/7/value": 16384 / default, "derived_checks/8/value": 16384 / perfect,
            "derived_checks/9/value": ratio, "derived_checks/12/value": base / MS,
        }

    def _decode_cells(self) -> dict[str, float]:
        found = {}
        for row in range(5):
            prompt, output, batch = (published("input")[f"table4_slo/{row}/{name}"]
                                     for name in ("prompt", "output", "batch"))
            tpot = self.decode_step_s(batch, prompt + output // 2) / ACCEPTED
            found[f"table4_slo/{row}/tpot_ms"] = tpot / MS
            found[f"table4_slo/{row}/tokens_per_s_per_npu"] = batch / tpot
        found["table3_decode/3/tpot_ms"] = found["table4_slo/2/tpot_ms"]
        found["table3_decode/3/tokens_per_s"] = found["table4_slo/2/tokens_per_s_per_npu"]
        found["table3_decode/3/tokens_per_s_per_tflops"] = found["table3_decode/3/tokens_per_s"] / 1504
        for row in range(3):
            batch = published("input")[f"fig20_microbatch_decode/{row}/batch"]
            found[f"fig20_microbatch_decode/{row}/throughput_gain_pct"] = self.microbatch_gain(batch)
        without, with_draft = (self.decode_layer_s(96, 4096, drafts=count) / US for count in (0, 1))
        gains = [self.draft_gain(batch) for batch in BATCHES]
        step, layers = found["table4_slo/2/tpot_ms"] * ACCEPTED, with_draft * 61 * US / MS
        return found | {
            "fig22_mtp/0/value": without, "fig22_mtp/1/value": with_draft,
            "fig22_mtp/2/value": 100 * (with_draft / without - 1),
            "fig22_mtp/4/value": min(gains), "fig22_mtp/5/value": max(gains),
            "derived_checks/4/value": step, "derived_checks/5/value": layers, "derived_checks/6/value": step - layers,
            "derived_checks/13/value": 96 / (self.decode_step_s(96, 4096, microbatches=1) / ACCEPTED),
        }

    def _second_sources(self) -> dict[str, float]:
        tpot = self.cann_decode_step_s() / ACCEPTED
        apart, step = self.disaggregated(), self.xdeepserve_step_s()
        dispatch, combine = self.xdeepserve_exchange_s()
        found = {
            "cann_decode_r1/0/tpot_ms": tpot / MS, "cann_decode_r1/0/tokens_per_s_per_chip": 96 / tpot,
            "xdeepserve_decode/0/iteration_ms": step / MS - self.residuals.step_overhead_ms,
            "xdeepserve_decode/0/gap_ms": self.residuals.step_overhead_ms,
            "xdeepserve_decode/0/tpot_ms": step / ACCEPTED_XDS / MS,
            "xdeepserve_decode/0/tokens_per_s_per_chip": 60 * DIES * ACCEPTED_XDS / step,
            "xdeepserve_decode/1/iteration_ms": apart.iteration_s / MS,
            "xdeepserve_decode/1/tpot_ms": apart.iteration_s / ACCEPTED_XDS / MS,
            "xdeepserve_decode/1/tokens_per_s_per_chip":
                96 * 480 / 384 * ACCEPTED_XDS / apart.iteration_s,
            "xdeepserve_comm/0/avg_us": dispatch / US, "xdeepserve_comm/1/avg_us": combine / US,
            "xdeepserve_comm/2/avg_us": apart.away_s / US, "xdeepserve_comm/3/avg_us": apart.back_s / US,
        }
        for row, microbatches in enumerate((1, 2)):
            seconds = self.cann_prefill_s(microbatches)
            found[f"cann_prefill_r1/{row}/latency_ms"] = seconds / MS
            found[f"cann_prefill_r1/{row}/tokens_per_s"] = 64 * 4096 / seconds
            found[f"cann_prefill_r1/{row}/tokens_per_s_per_chip"] = 64 * 4096 / 16 / seconds
        shares = self.xdeepserve_shares()
        for row, name in enumerate(("QuantBatchMatmul", "MultiLatentAttention", "MoE-Combine", "MoE-Dispatch")):
            found[f"xdeepserve_breakdown/{row}/share_pct"] = shares[name]
        found["xdeepserve_breakdown/4/share_pct"] = 100 - sum(shares.values())
        found["xdeepserve_breakdown/5/share_pct"] = shares["MlaPreprocess"]
        return found

    def _gpu_cells(self) -> dict[str, float]:
        profile = self.gpu_prefill_tokens_per_s("h800", perfect=True)
        perfect = self.gpu_prefill_tokens_per_s("h100", perfect=True)
        default = self.gpu_prefill_tokens_per_s("h100", perfect=False)
        decode, drafting = self.h800_decode_tokens_per_s(), self.sglang_decode_tokens_per_s(128, 4000, drafts=1)
        plain = self.sglang_decode_tokens_per_s(256, 2000, drafts=0)
        found = {}
        for row, value in ((1, default), (3, profile), (4, perfect)):
            found[f"table2_prefill/{row}/tokens_per_s"] = value
            found[f"table2_prefill/{row}/tokens_per_s_per_tflops"] = value / 1979
        for row, value in ((1, decode), (2, drafting)):
            found[f"table3_decode/{row}/tokens_per_s"] = value
            found[f"table3_decode/{row}/tokens_per_s_per_tflops"] = value / 1979
        for row, value in ((1, profile), (2, default), (3, perfect)):
            found[f"sglang_prefill/{row}/tokens_per_s_node"] = 8 * value
        for row, value in ((1, decode), (2, plain), (3, drafting)):
            found[f"sglang_decode/{row}/tokens_per_s_node"] = 8 * value
        for row, length in enumerate((1024, 2048, 4096)):
            found[f"sglang_prefill_by_len/{row}/tokens_per_s_node"] = \
                8 * self.gpu_prefill_tokens_per_s("h100", perfect=False, length=length)
        gains = [self.gpu_prefill_tokens_per_s("h100", perfect=False, length=length)
                 / self.gpu_prefill_tokens_per_s("h100", perfect=False, length=length, microbatches=1)
                 for length in (1024, 2048, 4096)]
        found["sglang_tbo/0/gain_pct"], found["sglang_tbo/1/gain_pct"] = (
            100 * (each(gains) - 1) for each in (min, max))
        for row, (batch, context, drafts) in ((2, (256, 2000, 0)), (3, (32, 2000, 0)), (4, (128, 4000, 1))):
            one, two = (self.sglang_decode_tokens_per_s(batch, context, drafts=drafts, microbatches=count)
                        for count in (1, 2))
            found[f"sglang_tbo/{row}/gain_pct"] = 100 * (two / one - 1)
        return found

    # ------------------------------------------------------------ what follows from inputs alone

    def _arithmetic(self) -> dict[str, float]:
        instance = settings.cm384_decode()
        machine, shape, numbers = instance.hardware, instance.shape, instance.numbers
        found = {}
        given = published("input")
        loading = dict(instances=8, read_s=given["table1_model_loading/0/ems"],
                       warm_s=given["table1_model_loading/1/ems"], models=8)
        for column, strategy in (("no_cache", "no cache"), ("local_dram", "local DRAM"), ("ems", "EMS")):
            table = model_loading(strategy, **loading)
            for row, value in enumerate((table.cold_start_s, table.warm_start_s, table.memory_copies,
                                         100 * table.hit_rate, table.switch_s)):
                if value is not None:
                    found[f"table1_model_loading/{row}/{column}"] = float(value)
        switches = machine.planes.scale_up.switches
        assert switches is not None
        for row in range(5):
            use = switch_use(switches, given[f"table10_switch/{row}/nodes"])
            found[f"table10_switch/{row}/switches"] = float(use.num_switches)
            found[f"table10_switch/{row}/utilization_pct"] = 100 * use.utilisation
        mib = 2.0**20
        for row, name in enumerate(("dispatch", "combine")):
            ranks, tokens, kib = (given[f"fused_op_buffers/{row}/{column}"]
                                  for column in ("ranks", "max_tokens", "msg_kib"))
            found[f"fused_op_buffers/{row}/buffer_mib"] = ranks * tokens * kib * 1024 / mib
            for at, each in enumerate(each for each in machine.exchange.times if each.op == name):
                found[f"table6_comm/{6 * row + at}/cm384_gbs"] = \
                    each.tokens * each.picks * each.message_bytes / each.microseconds / 1e3
            for at, each in enumerate(each for each in settings.machine("h800").exchange.times if each.op == name):
                rate = each.tokens * each.picks * each.message_bytes / each.microseconds / 1e3
                found[f"table6_comm/{6 * row + at}/h800_gbs"] = found[f"deepep_ll_2025_02/{at}/{name}_gbs"] = rate
        found["fused_op_buffers/2/buffer_mib"] = instance.exchange_buffer_bytes(96) / mib
        for row in range(6):
            groups, m, n, k, percent = (given[f"table9_gemm/{row}/{name}"]
                                        for name in ("groups", "m", "n", "k", "compute_util_pct"))
            seconds = 2 * groups * m * n * k / (percent / 100 * machine.die.peak_8bit_tops * 1e12)
            found[f"table9_gemm/{row}/memory_bw"] = groups * (m * k + k * n + 2 * m * n) / seconds / 1e9
        for row in range(2):
            achieved, peak = (given[f"table8_mla_memory/{row}/{name}"] for name in ("achieved", "peak"))
            found[f"table8_mla_memory/{row}/utilization_pct"] = 100 * achieved / peak
        work = work_of(shape)
        pairs = ConnectionMap(prefill_tp=32, decode_tp=1, decode_dp=320)
        return found | {
            "derived_checks/0/value": entry_bytes(shape, numbers, shape.num_layers),
            "derived_checks/1/value": float(work.prolog_params + work.decode_output_params),
            "derived_checks/2/value": float(work.expert_params),
            "derived_checks/3/value": shape.params() / 1e9,
            "derived_checks/10/value": 128 * 8 * 7680 / 1e6, "derived_checks/11/value": 128 * 8 * 14336 / 1e6,
            "derived_checks/14/value": float(pairs.group_size),
        }
