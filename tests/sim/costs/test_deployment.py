from dataclasses import replace

import numpy as np
import pytest

from tripool.core.deployment import CacheConfig, Deployment, InstanceConfig
from tripool.core.errors import ConfigError
from tripool.core.placement import even_geometry
from tripool.sim.costs.deployment import PAPER, Style, deployment_costs
from tripool.sim.costs.instance import Instance
from tripool.sim.costs.loads import ExpertBalance
from tripool.sim.costs.models import read_shape
from tripool.sim.costs.residuals import Residuals, fitted_residuals
from tripool.sim.costs.states import decode_state, prefill_state
from tripool.sim.costs.steps import OperatorCosts
from tripool.sim.hardware.description import read_hardware

R1, CM384 = read_shape("deepseek-r1"), read_hardware("cloudmatrix384")


def paper(**changes) -> Deployment:
    """6 x 16 NPUs of prefill, 160 of decode (section 5.1)."""
    roles = dict(prefill=InstanceConfig(count=6, ranks=32, redundant_experts=32, expert_nodes=2),
                 decode=InstanceConfig(count=1, ranks=320, redundant_experts=32, shared_expert_copies=32,
                                       num_speculative_tokens=1, max_num_seqs=48)) | changes
    return Deployment(**roles)


def test_a_model_is_known_by_its_name_and_by_its_hub_id():
    assert read_shape("deepseek-ai/DeepSeek-R1") == R1


def test_the_papers_deployment_has_prices_and_room():
    costs = deployment_costs(paper(), R1, CM384, residuals=fitted_residuals())
    assert costs.num_dies == 512
    assert sorted(costs.steps) == ["decode", "prefill"]
    assert costs.cache_tokens["decode"] > 48 * 4352
    step = costs.steps["decode"].step_time(decode_state(320, 48, 4224, drafts=1, microbatches=2)).total_s
    assert 0.08 < step < 0.1
    assert costs.steps["prefill"].step_time(prefill_state(32, 2, 4096, microbatches=2)).total_s < 3.5


def test_a_deployment_larger_than_the_machine_is_refused():
    with pytest.raises(ConfigError, match="needs 832 dies, and cloudmatrix384 has 768"):
        deployment_costs(paper(prefill=InstanceConfig(count=16, ranks=32, redundant_experts=32)), R1, CM384)


def test_a_cache_larger_than_the_memory_of_nodes_is_refused_where_that_is_known():
    large = paper(cache=CacheConfig(count=50, bytes=10**12))          # of 48 nodes two have to have two
    assert deployment_costs(large, R1, CM384).num_dies == 512
    enough, less = (replace(CM384, node=replace(CM384.node, host_memory_gb=each)) for each in (2000.0, 1999.0))
    assert deployment_costs(large, R1, enough).num_dies == 512
    with pytest.raises(ConfigError, match=r"cache\.bytes is 1000000000000, and a node .* 2 of 50 .* has 1999 GB"):
        deployment_costs(large, R1, less)


def test_a_model_that_does_not_fit_names_the_role_and_the_bytes():
    small = paper(decode=InstanceConfig(count=1, ranks=8))
    with pytest.raises(ConfigError, match=r"decode: the model does not fit: each die of cloudmatrix384 has 64\.0 GB"):
        deployment_costs(small, R1, CM384)
    with pytest.raises(ConfigError, match="cache of 1000000 tokens"):
        deployment_costs(paper(hybrid=InstanceConfig(count=1, ranks=64, redundant_experts=32, cache_tokens=1_000_000)),
                         R1, CM384)


def test_the_style_of_the_paper_is_the_default_and_can_be_changed():
    state = prefill_state(32, 2, 4096, microbatches=2)
    theirs, plain = (deployment_costs(paper(), R1, CM384, style=style).steps["prefill"] for style in (PAPER, Style()))
    names = {part.name for part in theirs.step_time(state).parts}
    assert "all-gather" in names and "routing" not in names
    assert "all-gather" not in {part.name for part in plain.step_time(state).parts}


def test_known_expert_loads_replace_the_skew():
    geometry = even_geometry(32, 256, num_redundant=32)
    instance = Instance(R1, CM384, 32, geometry)
    hot = np.ones(256)
    hot[0] = 40.0                          # the placement knows it and gives it copies
    known = OperatorCosts(instance, residuals=Residuals(expert_skew=2.6), balance=ExpertBalance(geometry, 8, 0.0, hot))
    unknown = OperatorCosts(instance, residuals=Residuals(expert_skew=2.6))
    state = prefill_state(32, 2, 4096)
    assert known.step_time(state).total_s < unknown.step_time(state).total_s
