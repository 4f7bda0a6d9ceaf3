"""Deployments: read from TOML, checked when built, every complaint naming its field."""

import dataclasses

import pytest

from tripool.core.deployment import Deployment, InstanceConfig, ScalingConfig, parse_deployment, read_table
from tripool.core.errors import ConfigError
from tripool.core.messages import ROLES

SPLIT = "[prefill]\ncount = 2\n[decode]\ncount = 1\n[cache]\ncount = 1\n"


def test_a_file_says_what_runs():
    deployment = parse_deployment(SPLIT + '[gateway]\nport = 9000\napi_keys = ["a"]\nprefill_deadline_s = 7\n')
    assert (deployment.prefill.count, deployment.decode.count, deployment.cache.count) == (2, 1, 1)
    assert deployment.gateway.port == 9000
    assert deployment.gateway.api_keys == ("a",)
    assert deployment.gateway.prefill_deadline_s == 7.0


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Deployment(hybrid=InstanceConfig(count=1)).block_tokens = 3     # type: ignore[misc]


@pytest.mark.parametrize(("text", "named"), [
    ("", "no instance can compute"),
    ("[prefill]\ncount = 1", "no decode instance"),
    ("[decode]\ncount = 1", "no prefill instance"),
    ("[hybrid]\ncont = 1", "unknown key 'hybrid.cont'"),
    ("hybrid = 3", "hybrid must be a table"),
    ('[hybrid]\ncount = "1"', "count must be int"),
    ("[hybrid]\ncount = true", "count must be int"),
    ("[hybrid]\ncount = -1", "count is -1"),
    ("[hybrid]\ncount = 1\nthreads = -1", "threads is -1"),
    ("[hybrid]\ncount = 1\ncache_bytes = 5\ncache_tokens = 5", "give one of them"),
    ("[hybrid]\ncount = 1\n[gateway]\nsampling_defaults = 'x'", "sampling_defaults"),
    ("[hybrid]\ncount = 1\nranks = 2\nexchange = 'local'", "exchange is local"),
    ("[hybrid]\ncount = 1\nranks = 2\nexchange = 'collective'\nexchange_rows = 'int8'", "sends rows as they are"),
    ('[hybrid]\ncount = 1\n[model]\ndtype = "int3"', "model.dtype"),
    ('[hybrid]\ncount = 1\n[model]\ndtype = "bfloat16"\ndeterministic = true', "deterministic"),
    ("[hybrid]\ncount = 1\n[gateway]\nport = 70000", "gateway.port"),
    ('[hybrid]\ncount = 1\nranks = 2\nexchange = "collective"\n[model]\ndevice = "cuda:0"', "ranks is 2 .* cuda:0"),
    ("block_tokens = 0\n[hybrid]\ncount = 1", "block_tokens is 0"),
    ("shutdown_s = -1.0\n[hybrid]\ncount = 1", "shutdown_s is -1"),
    ("[hybrid]\ncount = 1\n[cache]\nfetch_deadline_s = 0", "cache.fetch_deadline_s is 0.0; give a positive"),
    ("pull_deadline_s = inf\n[hybrid]\ncount = 1", "pull_deadline_s must be a finite number, not inf"),
    ("[hybrid]\ncount = 1\n[scaling]\nshort_load = nan", "scaling.short_load must be a finite number, not nan"),
    ("[gateway]\nport = true", "the deployment file: gateway.port must be int"),
    ("[hybrid]\ncount = 1\nnum_speculative_tokens = 9", "num_speculative_tokens is 9; the most is 8"),
    ("[hybrid]\ncount = 1\nnum_speculative_tokens = -1", "num_speculative_tokens is -1"),
    ("[hybrid]\ncount = 1\nmax_num_batched_tokens = 3\nnum_speculative_tokens = 3", "give at least 4"),
    ("[hybrid]\ncount = 1\nranks = 2\nmax_num_seqs = 8\nexchange_tokens = 15\nnum_speculative_tokens = 1",
     "8 rows of 2 tokens in a step; give at least 16"),
    ("[hybrid", "not valid TOML"),
    ("[hybrid]\ncount = 1\n[scaling]\nenabled = true", "no prefill and decode instances that could"),
    ("[prefill]\ncount = 2\nmax_num_seqs = 8\n[decode]\ncount = 2\n[scaling]\nenabled = true",
     "decode.max_num_seqs is 32, but prefill.max_num_seqs is 8; .* give both the same"),
    ("[hybrid]\ncount = 1\n[scaling]\nshort_load = 0.0", "scaling.short_load is 0.0"),
    ("[hybrid]\ncount = 1\n[scaling]\nspare_load = 0.9", "scaling.spare_load is 0.9; .* below short_load 0.9"),
    ("[hybrid]\ncount = 1\n[scaling]\ncool_down_s = 0", "scaling.cool_down_s is 0.0"),
    ("[hybrid]\ncount = 1\n[scaling]\nmin_decode = 0", "scaling.min_decode is 0; the least is 1"),
])
def test_what_is_wrong_is_named(text, named):
    with pytest.raises(ConfigError, match=named):
        parse_deployment(text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        read_table(tmp_path / "nowhere.toml")


def test_who_may_come_to_decode_can_draft():
    each = InstanceConfig(count=2, num_speculative_tokens=2)
    fixed = Deployment(prefill=each, decode=each)
    adaptive = dataclasses.replace(fixed, scaling=ScalingConfig(enabled=True))

    assert [fixed.num_drafts(role) for role in ROLES] == [0, 2, 0]
    assert [adaptive.num_drafts(role) for role in ROLES] == [2, 2, 0]
