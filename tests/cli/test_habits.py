"""What users of other servers type: passed over where it is so anyway, answered with a sentence where it is not."""

import pytest

from tests.cli.fake_server import tripool
from tripool.cli.flags import FLAGS
from tripool.cli.habits import HABITS, without_habits
from tripool.core.errors import ConfigError


@pytest.mark.parametrize("words", [
    ("--tp-size", "1"), ("--tensor-parallel-size=1",), ("--kv-cache-dtype", "auto"), ("--enable-metrics",),
    ("--reasoning-parser", "deepseek_r1"), ("--reasoning-parser", "deepseek-r1"), ("--generation-config", "auto"),
    ("--quantization", "FP8"), ("--quantization", "compressed-tensors"), ("--init-expert-location", "trivial"),
    ("--eplb-rebalance-layers-per-chunk=1",),
    ("--eplb-config", '{"use_async": true, "log_balancedness": true, "policy": "default"}'),
])
def test_what_is_so_anyway_is_passed_over(words):
    assert without_habits(["--port", "9", *words, "model"]) == ["--port", "9", "model"]


@pytest.mark.parametrize(("words", "instead"), [
    (("--gpu-memory-utilization", "0.9"), "--max-total-tokens"),
    (("--tp-size", "8"), "--dp-size"),
    (("--ep-size=4",), "--dp-size"),
    (("--kv-cache-dtype", "fp8"), "--dtype"),
    (("--quantization", "awq"), "`tripool quantize` makes INT8"),
    (("--speculative-config", '{"method":"mtp"}'), "num_speculative_tokens is null"),
    (("--speculative-config", '{"method":"ngram","num_speculative_tokens":2}'), "method is 'ngram'; known is mtp"),
    (("--speculative-config", '{"num_speculative_tokens":0}'), "num_speculative_tokens is 0; give"),
    (("--speculative-config", '{"num_speculative_tokens":9}'), "num_speculative_tokens is 9; give"),
    (("--speculative-config", '{"num_speculative_tokens":"2"}'), 'num_speculative_tokens is "2"; give'),
    (("--speculative-config", '{"num_speculative_tokens":1,"draft_model":"x"}'), "draft_model is not known"),
    (("--speculative-config", "mtp"), "not JSON"),
    (("--speculative-config", "[1]"), "no JSON object"),
    (("--speculative-config.method", "mtp"), "one object"),
    (("--speculative-algorithm", "EAGLE"), "--num-speculative-tokens"),
    (("--tool-call-parser", "deepseek_v3"), "not parsed yet"),
    (("--eplb-algorithm", "deepseek_hierarchical"), "--rebalance-steps"),
    (("--eplb-config", '{"window_size": 100}'), "leave it out"),
    (("--eplb-config", '{"colour": 1}'), "colour is not known"),
    (("--eplb-config", "[1]"), "no JSON object"),
    (("--eplb-config", "num_redundant_experts=4"), "not JSON"),
    (("--elastic-ep",), "goes on without a rank"),
    (("--disaggregation-mode", "prefill"), "--role"),
    (("--nnodes", "2"), "--accept-members"),
    (("--trust-remote-code",), "never run"),
    (("--speculative-config",), "not JSON"),
])
def test_what_is_not_there_is_answered_with_what_to_use(words, instead):
    done = tripool("serve", *words)
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(words[0].partition("=")[0])
    assert instead in str(done.exception)


@pytest.mark.parametrize("words", [
    ("--eplb-config", '{"num_redundant_experts": 4, "step_interval": 300}'),
    ('--eplb-config={"num_redundant_experts": 4, "step_interval": 300}',),
    ("--eplb-config.num_redundant_experts", "4", "--eplb-config.step_interval=300"),
])
def test_a_balancing_configuration_becomes_our_flags(words):
    assert without_habits([*words, "model"]) == ["--redundant-experts", "4", "--rebalance-steps", "300", "model"]


@pytest.mark.parametrize("words", [
    ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'),
    ('--speculative-config={"method":"deepseek_mtp","num_speculative_tokens":2}',),
    ("--speculative-config", '{"num_speculative_tokens": 2}', "--speculative-eagle-topk", "1"),
])
def test_a_drafting_configuration_becomes_our_flag(words):
    assert without_habits([*words, "model"]) == ["--num-speculative-tokens", "2", "model"]


def test_after_a_double_dash_nothing_is_a_flag():
    assert without_habits(["--", "--tp-size", "8"]) == ["--", "--tp-size", "8"]


def test_no_flag_is_both_ours_and_a_habit():
    ours = {part for flag in FLAGS for name in flag.names for part in name.split("/")}
    named = [name for habit in HABITS for name in habit.names]
    assert not ours & set(named)
    assert len(named) == len(set(named))


def test_every_habit_that_can_be_refused_says_what_to_do():
    assert all(habit.instead for habit in HABITS if not (habit.is_switch and habit.harmless))
