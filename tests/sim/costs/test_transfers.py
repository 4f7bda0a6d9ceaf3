import pytest

from tripool.core.errors import ConfigError
from tripool.sim.costs.residuals import Residuals
from tripool.sim.costs.transfers import ConnectionMap, TransferCosts, model_loading
from tripool.sim.hardware.description import read_hardware

CM384 = read_hardware("cloudmatrix384")


def test_the_pool_is_read_at_what_dies_and_sockets_allow():
    costs = TransferCosts(CM384)
    assert costs.wire_gbps("scale_up") == 160 * 4 / 16        # 16 dies of a node share the links of its four CPUs
    assert costs.wire_gbps("management") == 50 / 16


def test_a_prompt_is_handed_over_in_eleven_milliseconds():
    assert TransferCosts(CM384).hand_over_s(4096 * 70_272) == pytest.approx(11.5e-3, rel=0.01)
    assert TransferCosts(CM384).hand_over_s(4096 * 70_272, sharing=10) == pytest.approx(115e-3, rel=0.01)


def test_the_software_of_the_pool_handles_bytes_once_over_ub_and_twice_over_the_management_plane():
    bare, slow = TransferCosts(CM384), TransferCosts(CM384, residuals=Residuals(pool_gbps=2.0))
    assert slow.fetch_s(1e9) - bare.fetch_s(1e9) == pytest.approx(0.5)
    assert slow.fetch_s(1e9, "management") - bare.fetch_s(1e9, "management") == pytest.approx(1.0)
    assert slow.fetch_s(0) == 0.0


def test_a_machine_whose_dies_cannot_read_host_memory_says_so():
    rdma_only = read_hardware("cpu")
    assert TransferCosts(rdma_only).wire_gbps("scale_up") == 5


def test_weights_come_from_the_pool_a_disk_or_the_object_store():
    costs = TransferCosts(CM384)
    share = 671e9 / 32                     # of one of 32 dies
    assert costs.load_s(share) == pytest.approx(share / 40e9, rel=1e-3)
    assert costs.load_s(share, readers=32, source="disk") == pytest.approx(16 * share / 50e9)
    assert costs.load_s(share, readers=32, source="bucket") == pytest.approx(268.4)       # 671 GB at 2.5 GB/s
    with pytest.raises(ConfigError, match="source is 'tape'"):
        costs.load_s(share, source="tape")


def test_the_evaluated_connection_map_has_groups_of_ten():
    pairs = ConnectionMap(prefill_tp=32, decode_tp=1, decode_dp=320)
    assert (pairs.ratio, pairs.group_size) == (32, 10)
    readers = [sum(pairs.prefill_rank(rank) == source for rank in range(320)) for source in range(32)]
    assert readers == [10] * 32


def test_a_connection_map_with_two_ranks_of_decode_tensor_parallelism():
    pairs = ConnectionMap(prefill_tp=8, decode_tp=2, decode_dp=8)
    assert (pairs.ratio, pairs.group_size) == (4, 2)
    assert [pairs.prefill_rank(rank, 1) for rank in range(8)] == [1, 1, 3, 3, 5, 5, 7, 7]


@pytest.mark.parametrize(("sizes", "complaint"), [((32, 3, 320), "decode_tp 3"), ((32, 1, 100), "decode_dp is 100")])
def test_sizes_that_do_not_divide_are_refused(sizes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ConnectionMap(*sizes)


def test_model_loading_is_table_1():
    how = dict(instances=8, read_s=320.0, warm_s=5.0, models=8)
    none, local, pool = (model_loading(name, **how) for name in ("no cache", "local DRAM", "EMS"))
    assert (none.cold_start_s, local.cold_start_s, pool.cold_start_s) == (2560, 2560, 320)
    assert (none.switch_s, round(local.switch_s), pool.switch_s) == (320, 281, 5)
    assert (none.memory_copies, local.memory_copies, pool.memory_copies) == (0, 8, 1)
    with pytest.raises(ConfigError, match="strategy is 'hope'"):
        model_loading("hope", **how)
