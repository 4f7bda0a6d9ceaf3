import argparse
import json
from pathlib import Path

import pytest

import engine
from common import Report
from engine import Cell, Found
from tests.checkpoints import tiny_config, write_checkpoint

PREFILL, DECODE = Cell("prefill", 512), Cell("decode", 1)


def figures(report):
    return {figure["name"]: figure for figure in report.as_json()["figures"]}


def found(readings, cell=PREFILL, group=0):
    """Rates of engines, round by round; the first round warms up."""
    gathered = Found()
    for name, rates in readings.items():
        for number, rate in enumerate(rates):
            gathered.note(cell, name, (group, number), rate)
    return gathered


def test_ratios_are_of_the_same_round_and_warming_up_does_not_count():
    gathered = found({"tripool": [1, 20, 30], "transformers": [9, 10, 10]})

    assert gathered.ratios(PREFILL, "tripool", "transformers") == [2, 3]
    assert gathered.samples(PREFILL, "tripool") == [20, 30]


def test_a_single_reading_is_held_against_the_median_beside_it():
    gathered = found({"tripool": [1, 20, 30, 40], "transformers": [10]})

    assert gathered.ratios(PREFILL, "tripool", "transformers") == [3]
    assert gathered.samples(PREFILL, "transformers") == [10]


def test_peers_of_another_group_are_held_against_ours_beside_them():
    gathered = found({"tripool": [1, 20], "transformers": [1, 10]})
    for name, rate in (("tripool", 40), ("vllm-bf16", 10)):
        gathered.note(PREFILL, name, (1, 1), rate)

    assert gathered.ratios(PREFILL, "tripool", "transformers") == [2]
    assert gathered.ratios(PREFILL, "tripool", "vllm-bf16") == [4]
    assert gathered.worst(PREFILL, "tripool", engine.BF16_PEERS) == ("transformers", [2])


def test_int8_is_held_against_all_peers_and_bf16_against_those_in_bf16():
    gathered = found({"tripool": [1, 20], "tripool-int8": [1, 40], "transformers": [1, 16], "llamacpp-q8_0": [1, 32]})
    for name in ("tripool", "transformers"):
        gathered.note(DECODE, name, (0, 1), 7)
    gathered.steps[DECODE] = {"tripool": 32, "transformers": 4}
    report = Report("?")
    engine.add_figures(report, gathered, {}, [PREFILL, DECODE], {}, embedded=False)

    named = figures(report)
    best = named["engine.prefill_vs_best_peer_512"]
    assert (best["value"], best["peer"], best["bar"]) == (1.25, "llamacpp-q8_0", ">= 1.5")
    worst = named["engine.bf16_worst_vs_best_peer"]
    assert (worst["value"], worst["peer"], worst["cell"], worst["bar"]) == (1, "transformers", "decode_b1", ">= 1")
    assert named["engine.decode_b1_transformers"]["steps"] == 4
    assert named["engine.prefill_512_tripool-int8_vs_transformers"]["value"] == 2.5
    assert "engine.decode_ratio_b1" not in named          # of the embedded model only


def test_the_share_of_the_bandwidth_is_of_weights_and_cache_that_a_step_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "LEAST_BYTES", 0)
    config = tiny_config("v3", mtp=1)
    stored = write_checkpoint(tmp_path, config, num_shards=2)

    every, expert = engine.weight_bytes(tmp_path)
    rounded, _ = engine.weight_bytes(tmp_path, "int8")
    main = {name: value for name, value in stored.items() if ".layers.3." not in name and "embed" not in name}
    experts = sum(2 * value.numel() for name, value in main.items() if ".experts." in name)
    assert expert == experts / 8
    assert every == sum((4 if "bias" in name else 2) * value.numel() for name, value in main.items()) - experts
    head = stored["lm_head.weight"]
    assert every - rounded == head.numel() - 4 * len(head)

    gathered = Found()
    for name, rate in (("tripool", 10.0), ("tripool-int8", 20.0)):
        gathered.note(DECODE, name, (0, 1), rate)
        gathered.steps.setdefault(DECODE, {})[name] = 31
        gathered.distinct.setdefault(DECODE, {})[name] = {(0, 1): 3.0}
        gathered.read.setdefault(DECODE, {})[name] = {(0, 1): 1e8}
    report = Report("?")
    engine.add_bandwidth(report, gathered, {"tripool": tmp_path, "tripool-int8": tmp_path},
                         {"tripool": 1000, "tripool-int8": 1000})

    figure = figures(report)["engine.decode_of_bandwidth_b1"]
    assert figure["value"] == pytest.approx((every + 3 * expert + 1000 * 48) * 10 / 1e8)
    assert (figure["engine"], figure["bar"]) == ("tripool", ">= 0.75")


def test_peers_are_up_together_as_far_as_memory_allows():
    needs = {"a": 3.0, "b": 9.0, "c": 5.0, "d": 1.0}

    assert engine.in_groups("abcd", needs, 8.0) == [["a", "c"], ["b"], ["d"]]      # b alone, and maybe too much
    assert engine.in_groups("abcd", needs, 9.0) == [["a", "c", "d"], ["b"]]
    assert engine.in_groups("", needs, 8.0) == [[]]


def test_engines_that_cannot_run_are_named_with_the_reason():
    engines = ["tripool", "tripool-int8", "transformers-float32", "llamacpp-bf16", "vllm-bf16", "vllm-int8"]
    args = argparse.Namespace(engines=engines, model=Path("m"), int8=None, llamacpp=Path("env"), vllm=None, threads=2,
                              batches=[1], prefill=[])
    command, not_run = engine.commands(args)

    assert list(command) == ["tripool", "transformers-float32", "llamacpp-bf16"]
    assert command["transformers-float32"][-2:] == ["--dtype", "float32"]
    assert command["llamacpp-bf16"][0] == "env/bin/python"
    assert command["llamacpp-bf16"][-2:] == ["--weights", "bf16"]
    assert not_run["tripool-int8"] == "no INT8 folder was given (--int8)"
    assert not_run["vllm-int8"] == "no environment was given (--vllm)"
    assert not_run["transformers"] == "left out by --engines"


class Fake:
    """An engine that takes so long for each token."""

    def __init__(self, seconds, dies_at=1000):
        self.seconds = seconds
        self.dies_at = dies_at
        self.asked = []

    @property
    def is_gone(self):
        return len(self.asked) >= self.dies_at

    def ask(self, request):
        self.asked.append(request)
        if self.is_gone:
            raise engine.EngineFailed("out of memory")
        if "prefill" in request:
            return {"seconds": self.seconds * len(request["prefill"])}
        steps = len(request["forced"][0])
        return {"seconds": [self.seconds * len(request["forced"])] * steps, "distinct_experts": 3.0}


def test_all_get_the_same_tokens_and_slow_ones_fewer_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "READ_BYTES", 1 << 20)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    bench = engine.Bench(argparse.Namespace(quick=True, prefill=[512, 2048, 4096], batches=[2],
                                            model=tmp_path, threads=1))
    fakes = {"tripool": Fake(0.001), "transformers": Fake(0.01), "vllm-bf16": Fake(0.6)}
    bench.measure(fakes, 0)

    def asked(name, kind):
        return [request for request in fakes[name].asked if kind in request]

    assert asked("tripool", "prefill") == asked("transformers", "prefill")
    assert len(asked("tripool", "prefill")) == 9
    assert len(asked("vllm-bf16", "prefill")) == 1           # 307 s: once is enough, and 2,048 tokens too much
    assert list(bench.found.failed) == ["prefill_2048 vllm-bf16", "prefill_4096 vllm-bf16"]
    assert bench.found.failed["prefill_2048 vllm-bf16"].startswith("left out, would take 1229 s")
    assert bench.found.single == ["prefill_512 vllm-bf16", "decode_b2 vllm-bf16"]
    ours, theirs = asked("tripool", "decode"), asked("transformers", "decode")
    assert [request["forced"] for request in ours] == [request["forced"] for request in theirs]
    assert ours[1]["forced"] != ours[2]["forced"]
    assert all(request.get("count_experts") for request in ours)
    assert bench.found.steps[Cell("decode", 2)] == {"tripool": 8, "transformers": 8, "vllm-bf16": 4}


def test_an_engine_that_dies_is_asked_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "READ_BYTES", 1 << 20)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    bench = engine.Bench(argparse.Namespace(quick=True, prefill=[512], batches=[2, 4], model=tmp_path, threads=1))
    fakes = {"tripool": Fake(0.001), "vllm-bf16": Fake(0.001, dies_at=5)}
    bench.measure(fakes, 0)

    assert bench.found.failed == {"decode_b2 and after it vllm-bf16": "out of memory"}
    assert len(fakes["vllm-bf16"].asked) == 5
    assert len(fakes["tripool"].asked) == 9


@pytest.mark.slow
@pytest.mark.bench
def test_the_bench_runs(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "tiny", tiny_config("v3"))
    write_checkpoint(tmp_path / "int8", tiny_config("v3"), dtype="int8")
    monkeypatch.setattr("sys.argv", [
        "engine.py", "--quick", "--model", str(tmp_path / "tiny"), "--int8", str(tmp_path / "int8"), "--threads", "1",
        "--prefill", "64", "--batches", "1", "--vllm", str(tmp_path), "--json", str(tmp_path / "engine.json")])

    engine.main()

    result = json.loads((tmp_path / "engine.json").read_text())
    names = {figure["name"] for figure in result["figures"]}
    assert {"engine.prefill_vs_best_peer_64", "engine.decode_vs_best_peer_b1", "engine.bf16_worst_vs_best_peer",
            "engine.read_gbps", "engine.distinct_experts_decode_b1_tripool"} <= names
    assert set(result["parameters"]["engines"]) == {"tripool", "tripool-int8", "transformers", "transformers-float32"}
    assert "No such file" in result["parameters"]["not_run"]["vllm-int8"]
