"""A machine described in a file: what is said is taken, what is wrong or missing is told by its key."""

import pytest

from tripool.core.errors import ConfigError
from tripool.sim.pricing import LinearCosts, Plane
from tripool.sim.rig import read_rig

TEXT = """
token_bytes = 70272
npus_per_rank = 0.5
npu_hour_price = 2.5
acceptance = [0.7]

[cache_tokens]
prefill = 400_000

[costs.prefill]
step_s = 8e-3
chunk_token_s = 150e-6
[costs.decode]
step_s = 15e-3
level = "efficiency"

[planes]
pull = "rdma"
pool = "ub"
control = "ub"
[planes.ub]
bytes_per_s = 98e9
[planes.rdma]
bytes_per_s = 25e9
latency_s = 10e-6

[factors]
"prefill.skew" = 1.18
"""


def read(tmp_path, text=TEXT):
    path = tmp_path / "machine.toml"
    path.write_text(text)
    return read_rig(path)


def test_a_machine_is_what_its_file_says(tmp_path):
    rig = read(tmp_path)

    assert (rig.token_bytes, rig.npus_per_rank, rig.npu_hour_price, rig.acceptance) == (70272, 0.5, 2.5, (0.7,))
    assert rig.costs == {"prefill": LinearCosts(step_s=8e-3, chunk_token_s=150e-6),
                         "decode": LinearCosts(step_s=15e-3, level="efficiency")}
    assert rig.cache_tokens == {"prefill": 400_000}
    assert rig.planes.planes == {"ub": Plane(98e9), "rdma": Plane(25e9, 10e-6)}
    assert (rig.planes.pull, rig.planes.pool, rig.planes.control) == ("rdma", "ub", "ub")
    assert rig.factors == {"prefill.skew": 1.18}


@pytest.mark.parametrize(("old", "new", "told"), [
    ("token_bytes = 70272", "", "token_bytes is missing"),
    ("token_bytes = 70272", "token_bytes = 7e4", "token_bytes is 70000.0"),
    ("npus_per_rank", "npus_per_die", "unknown key 'npus_per_die'"),
    ("step_s = 8e-3", "step_ms = 8", "unknown key 'costs.prefill.step_ms'"),
    ("step_s = 15e-3", "step_s = -1.0", "costs.decode.step_s is -1"),
    ('level = "efficiency"', 'level = "guess"', "costs.decode.level is 'guess'"),
    ("[costs.decode]", "[costs.decoding]", "unknown key 'costs.decoding'"),
    ('pull = "rdma"', "", "planes.pull is missing"),
    ('pull = "rdma"', 'pull = "moon"', "pull is 'moon', which is no plane"),
    ("bytes_per_s = 98e9", "gbps = 1", "planes.ub must be a table with bytes_per_s"),
    ("bytes_per_s = 25e9", "bytes_per_s = 0", "planes.rdma.bytes_per_s is 0"),
    ("acceptance = [0.7]", "acceptance = [7]", "acceptance is [7.0]"),
    ("prefill = 400_000", "prefil = 400_000", "unknown key 'cache_tokens.prefil'"),
    ("npu_hour_price = 2.5", 'npu_hour_price = "dear"', "npu_hour_price is 'dear'"),
])
def test_what_is_wrong_with_a_machine_is_told_by_its_key(tmp_path, old, new, told):
    assert old in TEXT
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, TEXT.replace(old, new))
    assert told in str(caught.value) and str(tmp_path) in str(caught.value)
