"""Real processes killed, stopped and slowed: streams go on with the same tokens, or end with a clear error."""

import collections
import itertools
import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.fleet import TINY, served
from tripool.serve import launch
from tripool.serve.recording import replay_recording

pytestmark = pytest.mark.timeout(300)


def errors_of(events):
    return [event["error"] for event in events if "error" in event]


def counters_about(pools, word):
    """Names on the metrics page, those about single members left out: one thing is counted under one name."""
    names = [line.partition("{")[0] for line in pools.http.get("/metrics").text.splitlines() if line[:1] != "#"]
    return {name for name in names if word in name and not name.startswith("tripool:member_")}


@pytest.mark.parametrize("num_prompts", [12, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
def test_streams_survive_instances_killed_at_random(oracle, prompts, num_prompts, monkeypatch, tmp_path):
    """Prefill or decode: the same tokens as one plain forward pass, each exactly once, usage counted once.

    What every process decided meanwhile is recorded, and replays to identical decisions.
    """
    monkeypatch.setattr(launch, "MAX_RESTARTS", 1000)        # a launcher gives up on a process that keeps dying
    asked = prompts(num_prompts, seed=20, longest=120)
    rng = random.Random(20)
    slow = {f"{role}-{i}": {"run": 0.05} for role in ("prefill", "decode") for i in range(2)}     # or it ends too soon
    with served(prefill=2, decode=2, cache=1, restart=True, record_dir=tmp_path, gateway={"max_attempts": 20},
                faults=slow) as pools:
        stop = threading.Event()

        def num_running(member):
            return pools.reports().get(member, {}).get("num_running", 0)

        def kill_now_and_then():                    # whoever has more to lose, or nothing might be hit
            roles = itertools.cycle(["decode", "prefill"])
            while not stop.wait(rng.uniform(0.5, 2.0)):
                role = next(roles)
                while not stop.is_set() and not all(pools.state(f"{role}-{i}") == "up" for i in range(2)):
                    time.sleep(0.1)
                if not stop.is_set():
                    pair = [f"{role}-{i}" for i in range(2)]
                    pools.kill(max(pair, key=lambda each: (num_running(each), rng.random())))

        killer = threading.Thread(target=kill_now_and_then)
        killer.start()
        try:
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda prompt: pools.complete(prompt, 40), asked))
        finally:
            stop.set()
            killer.join()
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer["usage"]["completion_tokens"] == 40
            oracle.check(prompt, answer["choices"][0]["token_ids"])
        retried = pools.info()["settings"]["gateway"]["retried"]
        assert sum(retried.values()) > 0, "nothing was killed in the middle of anything"
        pools.wait_for(lambda: pools.health() == 200, 60)
        pools.assert_conserved()
    members, num_decisions = set(), collections.Counter()
    for path in sorted(tmp_path.iterdir()):
        num_played, mismatches = replay_recording(path)
        assert not mismatches, f"{path}: {mismatches[0]}"
        members.add(path.name.partition(".")[0])
        num_decisions[path.name.partition("-")[0].partition(".")[0]] += num_played
    assert members == {"gateway", "prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert set(num_decisions) == {"gateway", "prefill", "decode"}
    assert min(num_decisions.values()) > 10, num_decisions    # of one member there may be none: they died with it


@pytest.fixture(scope="class")
def one_of_each():
    """1P1D whose decode steps take 50 ms, so that something can happen in the middle of a stream."""
    with served(prefill=1, decode=1, restart=True, faults={"decode-0": {"run": 0.05}}) as running:
        yield running


class TestOneOfEach:
    @pytest.fixture
    def pools(self, one_of_each):
        return one_of_each

    def test_a_stream_goes_on_when_the_only_decode_instance_is_killed(self, pools, oracle, prompts):
        prompt = prompts(1, seed=21, longest=60)[0]
        answer = []
        for token in pools.stream_ids(prompt, 30):
            answer.append(token)
            if len(answer) == 10:
                pools.kill("decode-0")
        assert len(answer) == 30
        oracle.check(prompt, answer)
        pools.wait_for(lambda: pools.health() == 200, 60)
        pools.assert_conserved()

    def test_decode_goes_on_and_stays_ready_when_its_prefill_is_killed(self, pools, oracle, prompts):
        prompt = prompts(1, seed=22, longest=60)[0]
        answer = []
        for token in pools.stream_ids(prompt, 30):
            answer.append(token)
            if len(answer) == 5:
                pools.kill("prefill-0")
            if len(answer) == 20:
                assert pools.state("decode-0") == "up"
        oracle.check(prompt, answer)
        pools.revive("prefill-0")
        pools.wait_for(lambda: pools.health() == 200, 60)
        pools.assert_conserved()

    def test_a_client_that_leaves_frees_everything(self, pools, prompts):
        prompt = prompts(1, seed=23)[0]
        for _, _token in zip(range(3), pools.stream_ids(prompt, 1000), strict=False):
            pass
        pools.assert_conserved()
        aborted = pools.info()["settings"]["gateway"]["aborted"]
        assert aborted.get("decode", 0) >= 1
        assert counters_about(pools, "abort") == {"tripool:num_aborted_requests_total"}

    def test_a_stopped_decode_instance_is_not_ready_and_its_late_tokens_are_dropped(self, pools, oracle, prompts):
        prompt = prompts(1, seed=24, longest=60)[0]
        answer = []
        for token in pools.stream_ids(prompt, 30):
            answer.append(token)
            if len(answer) == 10:
                pools.pause("decode-0")
                pools.wait_for(lambda: pools.health() == 503, 30)
                pools.resume("decode-0")
        assert len(answer) == 30
        oracle.check(prompt, answer)
        pools.wait_for(lambda: pools.health() == 200, 30)
        pools.assert_conserved()

    def test_an_idle_deployment_stays_ready(self, pools):
        time.sleep(7)                       # longer than stall_s
        assert pools.health() == 200


CHUNK_S = 0.2


@pytest.fixture(scope="class")
def slow_transfers():
    with served(prefill=1, decode=1, restart=True, faults={"prefill-0": {"run": CHUNK_S}, "decode-0": {"pull": 2.0}},
                pull_deadline_s=10.0, instance={"cache_bytes": 40 << 20, "max_num_seqs": 4,
                                                "max_num_batched_tokens": 64}) as running:
        yield running


class TestSlowTransfers:
    """C13: who owns the pages while a hand-over is slow."""

    @pytest.fixture
    def pools(self, slow_transfers):
        return slow_transfers

    def test_blocks_of_an_aborted_request_are_not_reused_under_its_copy(self, pools, oracle, prompts):
        """And C15, in the middle of the transfer."""
        before = sum(pools.info()["settings"]["gateway"]["aborted"].values())
        first, second = prompts(2, seed=26, shortest=100)
        with pools.http.stream("POST", "/v1/completions", json={
                "model": "tripool-tiny", "prompt": first, "stream": True, "max_tokens": 8, "temperature": 0}) as answer:
            next(answer.iter_lines())          # prefilled; now the pull is waiting
        oracle.check(second, pools.token_ids(second, 8))
        pools.assert_conserved()
        aborted = pools.info()["settings"]["gateway"]["aborted"]
        assert sum(aborted.values()) == before + 1, aborted

    def test_a_client_that_leaves_before_its_first_token_stops_the_prefill(self, pools):
        """C15: the short request behind it does not wait for the long one."""
        computed = pools.reports()["prefill-0"]["computed_tokens"]
        before = sum(pools.info()["settings"]["gateway"]["aborted"].values())
        body = {"model": "tripool-tiny", "prompt": [30] * 2560, "stream": True, "max_tokens": 4, "temperature": 0}
        with pytest.raises(httpx.ReadTimeout):        # nothing comes before the first token; then we hang up
            httpx.post(f"{pools.url}/v1/completions", json=body, timeout=4 * CHUNK_S)
        begun = time.monotonic()
        next(pools.stream_ids([40, 50, 60], 1))
        assert time.monotonic() - begun < 20 * CHUNK_S        # 40 chunks would have taken 40
        pools.assert_conserved()
        assert pools.reports()["prefill-0"]["computed_tokens"] - computed < 1600
        assert sum(pools.info()["settings"]["gateway"]["aborted"].values()) == before + 1

    def test_blocks_are_pulled_even_from_a_prefill_that_has_died(self, pools, oracle, prompts):
        prompt = prompts(1, seed=27, shortest=100)[0]
        before = pools.reports()["decode-0"]           # a pull whose client had left may have failed
        answer = []
        for token in pools.stream_ids(prompt, 8):
            answer.append(token)
            if len(answer) == 1:
                pools.kill("prefill-0")        # in the middle of the hand-over
        oracle.check(prompt, answer)
        pools.wait_for(lambda: pools.reports()["decode-0"]["pulled_blocks"] > before["pulled_blocks"], 5)
        assert pools.reports()["decode-0"]["failed_pulls"] == before["failed_pulls"]
        pools.revive("prefill-0")
        pools.wait_for(lambda: pools.health() == 200, 60)
        pools.assert_conserved()


def test_decode_that_runs_out_of_blocks_steps_back_and_everybody_finishes(oracle, prompts):
    """C16: room for about four of ten long requests; one of them leaves."""
    asked = prompts(10, seed=28, longest=60)
    with served(prefill=1, decode=1, cache=1, block_tokens=16, model_fields={"max_model_len": 384},
                instance={"cache_bytes": 5 << 20, "max_num_seqs": 10}) as pools:
        with ThreadPoolExecutor(10) as pool:
            leaver = pool.submit(lambda: [token for _, token in zip(range(20), pools.stream_ids(asked[0], 120),
                                                                    strict=False)])
            answers = list(pool.map(lambda prompt: pools.token_ids(prompt, 120), asked[1:]))
            assert len(leaver.result()) == 20
        for prompt, answer in zip(asked[1:], answers, strict=True):
            assert len(answer) == 120
            oracle.check(prompt, answer)
        pools.wait_for(lambda: pools.reports()["decode-0"]["preemptions"] > 0, 5)    # or the test proves nothing
        pools.assert_conserved()


@pytest.fixture(scope="class")
def two_to_leave():
    with served(prefill=1, decode=2, faults={"decode-0": {"run": 0.03}, "decode-1": {"run": 0.03}},
                gateway={"place_deadline_s": 2.0, "max_attempts": 2}) as running:
        yield running


class TestTwoToLeave:
    """First one decode instance, then the other."""

    @pytest.fixture
    def pools(self, two_to_leave):
        return two_to_leave

    def test_a_member_that_is_told_to_leave_finishes_its_streams(self, pools, oracle, prompts):
        """C23: SIGTERM to a decode instance with running streams; clients notice nothing."""
        asked = prompts(4, seed=29, longest=60)
        pools.wait_for(lambda: pools.state("decode-0") == pools.state("decode-1") == "up")     # or the first would do
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(lambda prompt: list(pools.stream_ids(prompt, 60)), prompt) for prompt in asked]
            pools.wait_for(lambda: pools.reports()["decode-0"]["num_running"] > 0)
            leaving = pools.fleet.processes.pop("decode-0").popen
            leaving.send_signal(signal.SIGTERM)
            pools.wait_for(lambda: pools.state("decode-0") in ("draining", "down"))
            for prompt, answer in zip(asked, answers, strict=True):
                tokens = answer.result()
                assert len(tokens) == 60
                oracle.check(prompt, tokens)
        assert leaving.wait(timeout=15) == 0
        assert pools.info()["settings"]["gateway"]["retried"] == {}
        assert pools.health() == 200
        pools.assert_conserved()

    def test_when_nobody_is_left_the_stream_ends_with_an_error_and_the_terminator(self, pools, prompts):
        prompt = prompts(1, seed=25, longest=60)[0]
        events = []
        for event in pools.stream(prompt, 200):       # checks the terminator
            events.append(event)
            if len(events) == 6:
                for member in [each for each in pools.fleet.pids if each.startswith("decode")]:
                    pools.kill(member)
        errors = errors_of(events)
        assert len(errors) == 1
        assert errors[0]["request_id"]
        assert not any(choice.get("finish_reason") for event in events for choice in event.get("choices", ()))
        whole = pools.http.post("/v1/completions", json={"model": "tripool-tiny", "prompt": prompt})
        assert whole.status_code == 503
        assert whole.json()["error"]["message"]
        assert sum(pools.info()["settings"]["gateway"]["failed"].values()) >= 1
        assert counters_about(pools, "fail") == {"tripool:request_failure_total"}
        pools.assert_conserved()


@pytest.mark.slow
def test_a_leaving_decode_instance_is_not_chosen_and_costs_no_second_prefill(oracle, prompts):
    """C14: it says so at once, long before its next heartbeat. (One that refuses all the same: `tests/control`.)"""
    large, small, asked = [*prompts(1, seed=32, shortest=150), [40, 50, 60], *prompts(1, seed=33, longest=60)]
    slow = {"run": 0.1}
    with served(prefill=1, decode=2, faults={"decode-0": slow, "decode-1": slow}, block_tokens=16, heartbeat_s=5.0,
                stall_s=30.0, shutdown_s=60.0) as pools, ThreadPoolExecutor(2) as pool:
        pools.wait_for(lambda: pools.state("decode-0") == pools.state("decode-1") == "up")     # or the first would do
        first = pool.submit(pools.token_ids, small, 120)
        second = pool.submit(pools.token_ids, large, 120)
        pools.wait_for(lambda: pools.reports()["prefill-0"]["requests"] == 2)
        leaving = pools.fleet.processes.pop("decode-0").popen
        leaving.send_signal(signal.SIGTERM)
        pools.wait_for(lambda: pools.state("decode-0") != "up", deadline_s=2.5)
        oracle.check(asked, pools.token_ids(asked, 8))

        assert pools.info()["settings"]["gateway"]["placed_elsewhere"] == 0
        for prompt, answer in ((small, first), (large, second)):
            oracle.check(prompt, answer.result())
        assert leaving.wait(timeout=15) == 0
        assert pools.info()["settings"]["gateway"]["retried"] == {}
        pools.wait_for(lambda: pools.reports()["prefill-0"]["requests"] >= 3)
        assert pools.reports()["prefill-0"]["requests"] == 3


@pytest.fixture(scope="class")
def slow_hybrid():
    with served(hybrid=1, faults={"hybrid-0": {"run": 0.05}}, instance={"max_num_seqs": 2},
                gateway={"max_queued_requests": 4}) as running:
        yield running


class TestSlowHybrid:
    """C23: overload, and the end of everything, which comes last."""

    @pytest.fixture
    def pools(self, slow_hybrid):
        return slow_hybrid

    def test_over_the_caps_requests_are_refused_at_once_and_accepted_ones_finish(self, pools):
        """C23: overload."""
        def ask(i: int) -> httpx.Response:
            return httpx.post(f"{pools.url}/v1/completions", timeout=60, json={
                "model": "tripool-tiny", "prompt": [30 + i] * 10, "max_tokens": 10, "ignore_eos": True})
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(ask, range(40)))
        codes = [answer.status_code for answer in answers]
        assert codes.count(200) >= 4
        assert codes.count(200) + codes.count(429) + codes.count(503) == 40
        refused = [answer for answer in answers if answer.status_code != 200]
        assert refused
        assert all(float(answer.headers["retry-after"]) > 0 for answer in refused)
        pools.assert_conserved()

    def test_a_gateway_that_is_told_to_leave_finishes_its_streams(self, pools):
        """C23: ready 503, live 200, no new work, running streams finish, exit code 0."""
        stream = pools.stream_ids([30, 40, 50], 60)
        next(stream)
        gateway = pools.fleet.processes["gateway"].popen
        gateway.send_signal(signal.SIGTERM)
        fresh = httpx.Client(base_url=pools.url)
        pools.wait_for(lambda: fresh.get("/health").status_code == 503, 10)
        assert fresh.get("/live").status_code == 200
        refused = fresh.post("/v1/completions", json={"model": "tripool-tiny", "prompt": [1]})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert len(list(stream)) == 59
        assert gateway.wait(timeout=15) == 0
        pools.fleet.kill()


def test_cached_context_outlives_a_restart_but_not_a_change_of_weights(tmp_path, prompts):
    """C21: the pool stays up; what other weights wrote is a miss, and what the same weights wrote is a hit again."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    weights = folder / "model.safetensors"
    original = weights.read_bytes()
    prompt = prompts(1, seed=31, shortest=190)[0]
    whole_blocks = (len(prompt) - 1) // 64 * 64
    with served(hybrid=1, cache=1, restart=True, model=folder) as pools:

        def restarted_answer() -> tuple[int, list[int]]:
            before = pools.fleet.processes["hybrid-0"].restarts
            pools.kill("hybrid-0")
            pools.wait_for(lambda: pools.fleet.processes["hybrid-0"].restarts > before)
            pools.wait_for(lambda: pools.state("hybrid-0") == "up", 90)
            answer = pools.complete(prompt)
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["token_ids"]

        cold = pools.token_ids(prompt)
        pools.wait_for(lambda: pools.reports()["hybrid-0"]["stored_blocks"] > 0)
        tensors = load_file(weights)
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
        save_file(tensors, weights)
        num_cached, _ = restarted_answer()
        assert num_cached == 0
        weights.write_bytes(original)
        assert restarted_answer() == (whole_blocks, cold)
        pools.assert_conserved()
