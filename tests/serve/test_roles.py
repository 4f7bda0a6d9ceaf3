"""Instances change between prefill and decode while requests run, and nobody but the operator sees it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fleet import Served, served
from tripool.core.deployment import ScalingConfig
from tripool.serve.recording import replay_recording

READILY = ScalingConfig(enabled=True, short_load=0.2, spare_load=0.19, hold_s=0.2, cool_down_s=0.4)
"""Six rows on each decode instance are much, or fourteen tokens that wait at each prefill instance."""

PATIENTLY = dict(stall_s=60.0, pull_deadline_s=60.0, gateway=dict(prefill_deadline_s=300.0, decode_deadline_s=300.0))
"""However slow the machine is, nothing is tried again for that."""

NUM_TOKENS = 8


def roles(pools: Served) -> list[str]:
    """Of all instances that are up, sorted."""
    return sorted(each["role"] for each in pools.info()["members"] if each["state"] == "up")


def changes(pools: Served) -> dict[str, int]:
    return dict(pools.info()["settings"]["scaling"]["changes"])


def ask_until(pools: Served, role: str, prompts, num_tokens: int, answers: list) -> None:
    """Keep asking, many at a time, until an instance has come to a role; note what was asked and answered."""
    before = changes(pools).get(role, 0)
    with ThreadPoolExecutor(24) as workers:
        for _ in range(40):
            answers += zip(prompts, workers.map(lambda prompt: pools.token_ids(prompt, num_tokens), prompts),
                           strict=True)
            if changes(pools).get(role, 0) > before:
                return
    raise AssertionError(f"nobody came to {role}; loads are {pools.info()['settings']['scaling']['loads']}")


@pytest.mark.timeout(900)
def test_instances_change_their_roles_under_load_and_every_token_is_that_of_a_plain_forward_pass(
        oracle, prompts, tmp_path):
    with served(prefill=1, decode=2, cache=1, scaling=READILY, record_dir=tmp_path, heartbeat_s=0.05,
                instance={"max_num_seqs": 32, "max_num_batched_tokens": 72, "num_speculative_tokens": 1},
                model_fields={"max_model_len": 512}, **PATIENTLY) as pools:
        pools.wait_for(lambda: roles(pools) == ["decode", "decode", "prefill"])
        answers: list = []
        with ThreadPoolExecutor(2) as streams:
            long = [streams.submit(lambda prompt: list(pools.stream_ids(prompt, 150)), prompt)
                    for prompt in prompts(2, seed=21)]
            ask_until(pools, "prefill", prompts(48, seed=22, shortest=150), NUM_TOKENS, answers)
            answers += zip(prompts(2, seed=21), [each.result() for each in long], strict=True)
        assert "decode" in roles(pools)
        page = pools.http.get("/metrics").text
        assert 'tripool:role_changes_total{model_name="tripool-tiny",to="prefill"}' in page

        ask_until(pools, "decode", prompts(24, seed=23, longest=8)[::2], 120, answers)
        for prompt, answer in answers:
            oracle.check(prompt, answer)
        gateway = pools.info()["settings"]["gateway"]
        assert gateway["failed"] == {} and gateway["retried"] == {}, gateway
        pools.assert_conserved()

    played = {path.name.partition(".")[0]: replay_recording(path) for path in tmp_path.iterdir()}
    assert sorted(played) == ["decode-0", "decode-1", "gateway", "prefill-0"]
    for name, (num_played, mismatches) in played.items():
        assert num_played > 100 and mismatches == [], f"{name}: {mismatches[:2]}"
