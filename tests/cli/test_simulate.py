"""`tripool simulate` says what came out as a table, JSON, a page and a trace, and what is wrong before it runs."""

import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tripool.cli.main import app
from tripool.cli.simulate_page import plot
from tripool.core.errors import ConfigError
from tripool.sim.hardware.description import FOLDER

EXCERPT = Path(__file__).parents[1] / "sim" / "data" / "mooncake_excerpt.jsonl"
DEPLOYMENT = """
block_tokens = 128
[prefill]
count = 1
ranks = 32
redundant_experts = 32
cache_tokens = 50_000
max_num_batched_tokens = 4096
[decode]
count = 2
ranks = 32
redundant_experts = 32
cache_tokens = 50_000
num_speculative_tokens = 1
[cache]
count = 1
bytes = 10_000_000_000
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "deployment.toml").write_text(DEPLOYMENT)
    return [str(tmp_path / "deployment.toml"), "--model", "deepseek-r1", "--hardware", "cloudmatrix384",
            "--acceptance", "0.7"]


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["simulate", *words], catch_exceptions=False, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


RATE = ("--rate", "5", "--duration", "6", "--output-tokens", "30", "--seed", "3")


def test_a_made_up_workload_is_told_on_one_screen(files):
    told = run(*files, *RATE, "--slo-ttft", "1", "--slo-tpot", "0.03")

    assert len(told.splitlines()) < 36, "80 columns wide"
    for words in ("synthetic: ", "TTFT", "p99", "goodput", "1 × 32 rank(s)", "plane RDMA", "drafts", "48 NPUs",
                  "per million tokens", "layer_overhead 0.4579", "experts decode-0"):
        assert words in told


def test_all_figures_are_json_and_the_same_for_the_same_seed(files, tmp_path):
    told = run(*files, *RATE, "--json", "-")
    run(*files, *RATE, "--json", str(tmp_path / "figures.json"))

    assert (tmp_path / "figures.json").read_text() == told
    figures = json.loads(told)
    assert figures["requests"]["served"] == figures["workload"]["requests"] > 10
    assert figures["latency"]["ttft_s"]["p50"] > 0 and figures["kind"] == "simulated"


def test_a_trace_is_replayed_at_another_pace_and_through_failures(files):
    told = json.loads(run(*files, "--workload", str(EXCERPT), "--limit", "8", "--speed-up", "10", "--json", "-",
                          "--failure", "instance:decode-1@1+1", "--failure", "plane:RDMA@4+1"))

    assert told["workload"]["span_s"] == 9.0 and told["workload"]["requests"] == 8
    assert told["failures"] == ["instance:decode-1@1+1", "plane:RDMA@4+1"]
    assert told["requests"]["served"] == 8


def test_the_page_holds_all_plots_and_asks_for_nothing(files, tmp_path):
    page = tmp_path / "page.html"
    run(*files, *RATE, "--html", str(page))

    text = page.read_text()
    drawn = [ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in text.split("<svg")[1:]]
    titles = [picture.find("{http://www.w3.org/2000/svg}text").text for picture in drawn]
    assert titles == ["TTFT: time to the first token", "TPOT: mean time per token", "ITL: gaps between outputs",
                      "E2E: time to the end", "Pools: time in steps", "Rows in the engines", "Requests on their way",
                      "Blocks in the pool", "Experts: the busiest rank's tokens", "Planes: bandwidth in use"]
    lines = {title: len(picture.findall("{http://www.w3.org/2000/svg}polyline"))
             for title, picture in zip(titles, drawn, strict=True)}
    assert lines["Pools: time in steps"] == 2 and lines["Planes: bandwidth in use"] == 3
    assert "src=" not in text and "href=" not in text and "chunk_tokens" in text


def test_roles_that_change_are_told_on_the_screen_and_drawn_over_time(files, tmp_path):
    each = "count = 2\nranks = 32\nredundant_experts = 32\ncache_tokens = 50_000\nmax_num_batched_tokens = 1024\n"
    Path(files[0]).write_text(f"[prefill]\n{each}[decode]\n{each}[scaling]\nenabled = true\nhold_s = 0.5\n"
                              "cool_down_s = 1.0\n")

    told = run(*files, "--rate", "250", "--duration", "4", "--prompt-tokens", "1000", "--output-tokens", "4",
               "--html", str(tmp_path / "page.html"))

    assert "changed: 1 to prefill; 0 withdrawn" in " ".join(told.split())
    assert "Instances in each role" in (tmp_path / "page.html").read_text()


def test_a_line_goes_from_corner_to_corner_of_its_plot():
    drawn = ElementTree.fromstring(plot("a plot", {"line": [(0.0, 0.0), (10.0, 2.0)]}, "x", "y"))

    line = drawn.find("{http://www.w3.org/2000/svg}polyline")
    assert line.get("points") == "56.0,200.0 536.0,34.0"


def test_words_of_a_plot_are_within_it_and_apart():
    lines = {"a line with a long name, of those that there are": [(0.0175, 0.0), (0.02, 4000.0)], "another one of them":
             [(0.018, 1.0)]}
    drawn = ElementTree.fromstring(plot("a plot", lines, "what is shared of a prompt", "% of requests",
                                        logarithmic=True))

    placed: dict[str, list[tuple[float, float, str]]] = {}
    for text in drawn.findall("{http://www.w3.org/2000/svg}text"):
        wide = 6.0 * len(text.text)
        begin = float(text.get("x")) - {"end": wide, "middle": wide / 2}.get(text.get("text-anchor"), 0.0)
        placed.setdefault(text.get("y"), []).append((begin, begin + wide, text.text))
    for row in placed.values():
        assert all(begin >= 0 and end <= 560 for begin, end, _ in row), row
        assert all(one[1] <= other[0] for one, other in pairwise(sorted(row))), row
    words = [text for row in placed.values() for _, _, text in row]
    assert "4,000" in words and "0.019" in words and not any("e+" in each for each in words)


def test_the_trace_has_every_step_copy_and_request_in_order_of_time(files, tmp_path):
    trace = tmp_path / "trace.json"
    figures = json.loads(run(*files, *RATE, "--trace", str(trace), "--json", "-"))

    told = json.loads(trace.read_text())
    names = {event["pid"]: event["args"]["name"] for event in told["traceEvents"] if event["ph"] == "M"}
    assert {"prefill-0", "decode-0", "decode-1", "plane UB", "plane RDMA", "requests"} == set(names.values())
    bars = [event for event in told["traceEvents"] if event["ph"] == "X"]
    assert sum(event["args"]["steps"] for event in bars) == sum(pool["steps"] for pool in figures["pools"].values())
    for pid in names:
        own = sorted((event["ts"], event["dur"]) for event in bars if event["pid"] == pid)
        assert all(start + lasts <= after + 0.002 for (start, lasts), (after, _) in pairwise(own))
    begun = [event for event in told["traceEvents"] if event["ph"] == "b"]
    ended = [event for event in told["traceEvents"] if event["ph"] == "e"]
    assert len(begun) == len(ended) and told["otherData"]["events left out"] == 0
    assert sum(names[event["pid"]] == "requests" for event in begun) == 2 * figures["requests"]["sent"]


def test_a_part_of_a_trace_can_be_had(files, tmp_path):
    trace = tmp_path / "trace.json"
    done = CliRunner().invoke(app, ["simulate", *files, *RATE, "--trace", str(trace), "--trace-window", "1:2"])
    assert "are not in" not in done.stderr, "they were not asked for"

    told = json.loads(trace.read_text())
    bars = [event for event in told["traceEvents"] if event["ph"] == "X"]
    assert all(event["ts"] + event["dur"] >= 1e6 and event["ts"] <= 2e6 for event in bars) and len(bars) > 10
    assert told["otherData"]["events left out"] > 0


@pytest.mark.parametrize(("words", "told"), [
    ((), "give --workload FILE or"),
    (("--rate", "1", "--workload", "x.jsonl"), "give --workload FILE or"),
    (("--workload", "x.jsonl"), "cannot read x.jsonl"),
    (("--rate", "1", "--failure", "decode-1"), "the failure 'decode-1' is not understood"),
    (("--rate", "1", "--failure", "instance:decode-7@1"), "there is no instance 'decode-7'"),
    (("--rate", "1", "--html", "no/folder/page.html"), "--html is no/folder/page.html"),
    (("--rate", "1", "--share", "0.5"), "there are 0 prefixes"),
    (("--rate", "1", "--prefixes", "3", "--prefix-tokens", "9"), "no prompt begins with one; give share, too"),
    (("--rate", "1", "--burst-seconds", "5"), "no burst ever begins; give burst_every_s, too"),
    (("--rate", "1", "--burst-times", "2"), "burst_times is 2, but burst_every_s is 0"),
    (("--rate", "1", "--burst-every", "5", "--burst-seconds", "1"), "burst_times is 1, "),
    (("--rate", "1", "--expert-drift", "60"), "--expert-drift is 60, but --expert-spread is 0"),
    (("--rate", "1", "--concurrency", "2", "--burst-every", "5", "--burst-seconds", "1", "--burst-times", "2"),
     "at their times; leave out --burst-every"),
    (("--workload", str(EXCERPT), "--concurrency", "2", "--speed-up", "2"), "at their times; leave out --speed-up"),
    (("--rate", "1", "--trace-window", "a:b", "--trace", "t.json"), "--trace-window is 'a:b'"),
    (("--rate", "1", "--trace-window", "2:1", "--trace", "t.json"), "--trace-window is 2:1"),
    (("--rate", "1", "--trace-window", "nan:", "--trace", "t.json"), "--trace-window is nan:"),
    (("--rate", "1", "--trace-window", "1:2"), "--trace-window is 1:2, but there is no --trace"),
    (("--rate", "1", "--html", "one", "--json", "one"), "--html and --json are both one; give each a file of its own"),
    (("--rate", "1", "--failure", "instance:decode-1@1+0"), "'instance:decode-1@1+0' lasts no time"),
    (("--rate", "1", "--expert-spread", "1", "--perfect-balance"), "--expert-spread is 1, but with --perfect-balance"),
    (("--rate", "1", "--limit", "3"), "--limit is 3, but there is no trace"),
    (("--workload", str(EXCERPT), "--prompt-tokens", "7"), "leave out the options of a made-up workload"),
    (("--workload", str(EXCERPT), "--duration", "7"), "leave out the options of a made-up workload"),
    (("--rate", "1", "--hardware", "cloudmatrix"), "there is no hardware 'cloudmatrix'; known are cloudmatrix384"),
    (("--rate", "1", "--model", "llama"), "there is no model 'llama'"),
    (("--rate", "1", "--hardware", "cpu"), "ranks is 32, and cpu has 1 dies"),
    (("--rate", "1", "--failure", "plane:NVLink@1"), "there is no plane 'NVLink'; there are UB, RDMA, VPC"),
    (("--rate", "1", "--slo-ttft", "0.01"), "no request can have its first token within 0.01 s: request 1 comes"),
    (("--rate", "1", "--slo-tpot", "0.001"), "no request can have 0.001 s between its tokens: a step of a decode"),
])
def test_what_is_wrong_is_told_before_anything_runs(files, tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=None) as caught:
        run(*files, *words)
    assert told in str(caught.value)


@pytest.mark.parametrize("words", [("--until", "inf"), ("--npu-hour-price", "inf"), ("--expert-spread", "1000")])
def test_a_number_without_bounds_is_refused_by_its_flag(files, words):
    done = CliRunner().invoke(app, ["simulate", *files, "--rate", "1", *words], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and f"{words[0]}': Input should be less" in done.output


def test_a_seed_is_not_negative(files):
    done = CliRunner().invoke(app, ["simulate", *files, "--rate", "1", "--seed", "-5"], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "--seed': Input should be greater" in done.output


@pytest.mark.parametrize("flag", ["--json", "--html", "--trace"])
def test_a_full_disk_is_told_with_the_flag(files, flag):
    with pytest.raises(ConfigError, match=f"{flag} is /dev/full, which cannot be written: No space left"):
        run(*files, "--rate", "1", "--duration", "2", flag, "/dev/full")


@pytest.mark.parametrize(("old", "new", "told"), [
    ("ranks = 32", "ranks = 16", r"prefill: the model does not fit: each die of cloudmatrix384 has 64\.0 GB and 16"),
    ("count = 2", "count = 30", "the deployment needs 992 dies, and cloudmatrix384 has 768"),
    ("cache_tokens = 50_000", "cache_tokens = 5_000_000", "cache of 5000000 tokens 357"),
])
def test_a_deployment_that_the_machine_cannot_hold_is_refused_with_the_bytes(files, tmp_path, old, new, told):
    (tmp_path / "deployment.toml").write_text(DEPLOYMENT.replace(old, new, 1))
    with pytest.raises(ConfigError, match=told):
        run(*files, "--rate", "1")


def test_a_failure_after_the_end_is_told_and_not_listed(files):
    done = CliRunner().invoke(app, ["simulate", *files, *RATE, "--failure", "instance:decode-1@3+1",
                                    "--failure", "cache:cache-0@1000"], env={"COLUMNS": "200"})

    assert done.exit_code == 0 and "the failure cache:cache-0@1000 did not happen: the run had ended" in done.stderr
    assert [line.split() for line in done.stdout.splitlines() if "failures" in line] == [
        ["failures", "instance:decode-1@3+1"]]


def test_a_prompt_longer_than_an_instance_holds_is_told_with_both_sizes(files, tmp_path):
    (tmp_path / "deployment.toml").write_text(DEPLOYMENT.replace("50_000", "4_096"))

    told = run(*files, "--rate", "2", "--duration", "2", "--seed", "3", "--prompt-tokens", "5000", "--spread", "0.01")
    causes = next(line for line in told.splitlines() if line.startswith(" causes "))
    assert re.fullmatch(r" causes +400: \d+ tokens do not fit; the largest instance holds 4096 *", causes)


def test_the_screen_says_what_prices_of_steps_rest_on(files):
    told = next(line for line in run(*files, *RATE).splitlines() if line.startswith(" steps "))
    assert "prefill efficiency " in told and "decode efficiency " in told and "residual " in told
    assert "speed of light" in run(*files, *RATE, "--level", "speed of light", "--no-corrections")


def test_the_screen_says_what_copies_rest_on(files):
    told = [line for line in run(*files, *RATE).splitlines() if line.startswith(" plane ")]
    assert told and all(line.rstrip().endswith("; efficiency") for line in told)


def test_answers_that_are_cut_are_told(files):
    done = CliRunner().invoke(app, ["simulate", *files, *RATE, "--max-tokens", "29"], env={"COLUMNS": "200"})
    assert re.search(r"\d+ answers are longer than 29 tokens and are cut there", done.stderr)
    whole = CliRunner().invoke(app, ["simulate", *files, *RATE], env={"COLUMNS": "200"})
    assert "are cut there" not in whole.stderr


def test_a_trace_of_months_is_asked_for_its_unit(files, tmp_path):
    """Microseconds that are read as milliseconds would be simulated for hours."""
    rows = [json.dumps({"timestamp": at, "input_length": 512, "output_length": 4, "hash_ids": [1]})
            for at in (0, 40 * 86_400_000)]
    (tmp_path / "slow.jsonl").write_text("\n".join(rows))
    done = CliRunner().invoke(app, ["simulate", *files, "--workload", str(tmp_path / "slow.jsonl"), "--until", "1"],
                              env={"COLUMNS": "200"})
    assert "comes 40 days after the first" in done.stderr and done.exit_code == 0


def test_costs_are_of_what_the_machine_calls_its_accelerators(files):
    told = run(*files, *RATE, "--hardware", "h800")
    assert "96 GPUs, " in told and "NPU" not in told


def test_switches_that_can_block_are_told(files, tmp_path):
    own = tmp_path / "own.toml"
    text = (FOLDER / "cloudmatrix384.toml").read_text()
    own.write_text(text.replace("l1_uplinks = 16", "l1_uplinks = 4"))

    done = CliRunner().invoke(app, ["simulate", *files, *RATE, "--hardware", str(own)], env={"COLUMNS": "200"})

    assert done.exit_code == 0
    assert "UB of cloudmatrix384 can block: a node's dies send 3136 GB/s, its L1 chips have uplinks for" in done.stderr


def test_the_command_teaches_itself():
    told = run("--help")

    assert "--workload" in told and "Mooncake" in told and "instance:decode-1@60+30" in told
