import argparse
import sys
import textwrap
from pathlib import Path

import pytest

import serve
from common import Report
from peers import drive_vllm
from peers.servers import ServerFailed, free_port, peer
from serve import Batch
from tripool.cli.client import Server

WELL = """
    import http.server, sys

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words):
            pass

    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def batch(tokens_per_s: float, itl_p99_ms: float) -> Batch:
    return Batch(ttft_ms=1.0, itl_ms=1.0, tokens_per_s=tokens_per_s, itl_p99_ms=itl_p99_ms)


def asked(**more) -> argparse.Namespace:
    return argparse.Namespace(**{"beside": None, "beside_int8": None, "beside_threads": 2, "vllm": None,
                                 "llamacpp": None, "servers": list(serve.SERVERS), **more})


def figures(report: Report) -> dict[str, dict]:
    return {figure["name"]: figure for figure in report.figures}


def test_our_better_int8_deployment_is_held_against_the_peer_that_does_best_in_each():
    report = Report("?")
    serve.add_beside_figures(report, {32: {
        "tripool-int8": {0: batch(60, 10), 1: batch(90, 10), 2: batch(75, 20)},
        "tripool-int8-1p1d": {0: batch(50, 1), 1: batch(50, 1), 2: batch(50, 1)},
        "llamacpp-q8_0": {0: batch(20, 5), 1: batch(30, 5), 2: batch(25, 5)},
        "vllm-bf16": {0: batch(30, 40), 1: batch(30, 40), 2: batch(30, 40)}}})

    found = figures(report)
    throughput, p99 = found["serve.throughput_vs_best_peer_c32"], found["serve.itl_p99_vs_best_peer_c32"]
    assert (throughput["value"], throughput["ours"], throughput["peer"]) == (2.5, "tripool-int8", "vllm-bf16")
    assert (p99["value"], p99["peer"]) == (2.0, "llamacpp-q8_0")
    assert report.samples["serve.throughput_vs_best_peer_c32"] == [2.0, 3.0, 2.5]
    assert report.samples["serve.vllm-bf16_itl_p99_ms_c32"] == [40, 40, 40]


def test_a_peer_that_missed_a_round_is_compared_in_the_others():
    by_server = {"tripool-int8": {0: batch(60, 1), 1: batch(90, 1)}, "vllm-bf16": {1: batch(30, 1)}}
    assert serve.worst(by_server, "tripool-int8", ["vllm-bf16"], "tokens_per_s", min) == ("vllm-bf16", [3.0])


def test_without_a_peer_nothing_is_said_about_the_best_one():
    report = Report("?")
    serve.add_beside_figures(report, {8: {"tripool-int8": {0: batch(60, 1)}}})
    assert not [name for name in figures(report) if "best_peer" in name]


def test_servers_that_cannot_run_are_named_with_the_reason(tmp_path):
    found, not_run = serve.candidates(asked(beside=tmp_path, llamacpp=tmp_path, servers=["tripool-bf16", "vllm-bf16",
                                                                                         "llamacpp-q8_0", "vllm-int8"]))
    assert list(found) == ["tripool-bf16", "llamacpp-q8_0"]
    assert not_run["vllm-bf16"] == "no environment was given (--vllm)"
    assert not_run["vllm-int8"] == "no folder was given (--beside-int8)"
    assert not_run["tripool-int8"] == "left out by --servers"


def test_the_99th_percentile_of_gaps():
    assert serve.percentile_99([1.0]) == 1.0
    assert serve.percentile_99([float(value) for value in range(101)]) == 99.0


def test_a_peer_is_up_for_its_turn_and_then_gone(tmp_path):
    script, port = tmp_path / "server.py", free_port()
    script.write_text(textwrap.dedent(WELL))

    with peer([sys.executable, str(script), str(port)], {}, port) as server:
        assert server == Server("127.0.0.1", port)

    with pytest.raises(ServerFailed, match="it ended with"), peer([sys.executable, "-c", "raise OSError"], {}, port):
        pass                          # nobody answers at that port any more, so the failure is seen


def test_a_peer_that_cannot_start_says_why():
    with (pytest.raises(ServerFailed, match="ended with 1; last: ValueError: no such model"),
          peer([sys.executable, "-c", "raise ValueError('no such model')"], {}, free_port())):
        pass
    with pytest.raises(ServerFailed, match="No such file"), peer(["./no-such-program"], {}, free_port()):
        pass


def test_vllm_gets_as_many_cores_as_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {5, 2, 3}, raising=False)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()

    found = drive_vllm.in_process(tmp_path, 2)

    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert found["OMP_NUM_THREADS"] == "2"
    assert str(tmp_path / "lib" / "libiomp5.so") in found["LD_PRELOAD"]
    assert "OMP_NUM_THREADS" not in drive_vllm.environment(tmp_path, 2)      # its server decides for each process
    assert Path(drive_vllm.server_command(tmp_path, tmp_path / "mid", 1, 32)[0]) == tmp_path / "bin" / "python"
