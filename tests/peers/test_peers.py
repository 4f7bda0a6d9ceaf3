"""Other people's tools, unmodified, against a running server.

They live in an environment of their own, which `make test-all` makes.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fleet import TINY, Served, served

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

QUESTIONS = [
    {"question": "What is 7 + 5?", "answer": "12", "choices": ["12", "a fox"], "label": 0},
    {"question": "What is the capital of Japan?", "answer": "Tokyo", "choices": ["a kite", "Tokyo"], "label": 1},
]
TASK = """
task: tripool_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
CHOICE = TASK + """
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GENERATE = TASK + """
doc_to_target: answer
generation_kwargs: {{until: ["\\n"], max_gen_toks: 16}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def tool(name: str) -> str:
    """A tool on the path, or the reason why there is no test of it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; `make test-all` installs it")
    return found


def run(folder: Path, *command: str) -> str:
    """Run a tool where it can reach no hub; its output."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub"),
                                "COLUMNS": "160"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600,
                          check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def server() -> Served:
    with served(prefill=1, decode=1, cache=1) as running:
        yield running


def test_lm_eval_scores_and_generates(server, tmp_path):
    lm_eval = tool("lm_eval")
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "tasks").mkdir()
    for kind, task in (("multiple_choice", CHOICE), ("generate_until", GENERATE)):
        (tmp_path / "tasks" / f"{kind}.yaml").write_text(task.format(kind=kind, data=data))

    run(tmp_path, lm_eval, "--model", "local-completions", "--model_args",
        f"model=tripool-tiny,base_url={server.url}/v1/completions,tokenizer_backend=huggingface,tokenizer={TINY},"
        "num_concurrent=2,max_retries=1", "--tasks", "tripool_multiple_choice,tripool_generate_until",
        "--include_path", "tasks", "--output_path", "out")

    results = json.loads(next((tmp_path / "out").rglob("results*.json")).read_text())
    assert {name: samples["effective"] for name, samples in results["n-samples"].items()} == {
        "tripool_multiple_choice": 2, "tripool_generate_until": 2}
    assert results["results"]["tripool_multiple_choice"]["acc,none"] in (0, 0.5, 1)
    server.assert_conserved()


@pytest.mark.parametrize("request_format", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_measures_a_load(server, tmp_path, request_format):
    guidellm = tool("guidellm")
    run(tmp_path, guidellm, "run",
        "--backend", f"kind=openai_http,target={server.url},model=tripool-tiny,request_format={request_format}",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
        "--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=6",
        "--tokenizer", f"kind=huggingface_auto,model={TINY}", "--output", "kind=json,path=out.json",
        "--disable-console-interactive")

    totals = json.loads((tmp_path / "out.json").read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (6, 0, 0)
    server.assert_conserved()
