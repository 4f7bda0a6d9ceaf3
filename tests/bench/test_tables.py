"""The README's figures are those of the result files."""

import pytest

import tables


@pytest.mark.parametrize("page", list(tables.PAGES))
def test_the_readme_shows_the_figures_of_the_result_files(page):
    assert tables.rewritten(page) == (tables.ROOT / page).read_text(), "run `make tables`"


def test_every_result_says_what_kind_of_number_it_is():
    for path in tables.RESULTS.glob("*.json"):
        result = tables.json.loads(path.read_text())
        assert result["commit"]
        for figure in result["figures"]:
            assert figure["kind"] in ("measured", "simulated", "published", "derived")
            assert figure["kind"] != "measured" or result["samples"].get(figure["name"])


def test_the_table_of_engines_says_who_ran_and_who_did_not(tmp_path, monkeypatch):
    rates = {"prefill_512_tripool": 812.3, "decode_b1_tripool": 41.26, "decode_b1_vllm-bf16": 9.0}
    result = {
        "question": "How fast?", "commit": "abc", "samples": {"engine.decode_vs_best_peer_b1": [4, 5, 6]},
        "machine": {"cpu": "some", "cores": 2, "load_1min": 0, "packages": {"torch": "2", "transformers": "5"}},
        "parameters": {
            "model": "mid", "threads": 2, "not_run": {"vllm-int8": "no environment was given"},
            "failed": {"prefill_512 vllm-bf16": "out of memory"}, "single_readings": ["decode_b1 vllm-bf16"],
            "engines": {"vllm-bf16": {"engine": "vllm", "version": "0.32", "weights": "bfloat16"}}},
        "figures": [*({"name": f"engine.{name}", "value": rate, "unit": "tokens/s"} for name, rate in rates.items()),
                    {"name": "engine.decode_vs_best_peer_b1", "value": 5.0, "unit": "ratio", "kind": "derived",
                     "peer": "vllm-bf16", "bar": ">= 1.5"}]}
    (tmp_path / "engine-mid.json").write_text(tables.json.dumps(result))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    text = tables.figures_table(tables.PAGES["README.md"])

    assert "| `engine.decode_vs_best_peer_b1` (mid) | 5× (vllm-bf16) | ≥ 1.5 | derived | 3 |" in text
    assert "| tokens/s, checkpoint `mid`, threads: 2 | prefill 512 | decode b1 |" in text
    assert "| tripool | 812 | 41.3 |\n| vllm-bf16 (vllm 0.32, bfloat16) | - | 9 |" in text
    assert "Did not run: vllm-int8: no environment was given; prefill_512 vllm-bf16: out of memory." in text
    assert "Read once: decode_b1 vllm-bf16." in text
    assert "- `bench/engine.py` (mid): How fast?" in text
