"""The tour: each page's commands run as they stand, and both languages show the same ones."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).resolve().parents[1] / "docs" / "tour").glob("[0-9][0-9]-*.md"))
ENGLISH = [page for page in PAGES if not page.name.endswith(".zh-CN.md")]


def commands(page: Path) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.stem)
def test_both_languages_show_the_same_commands_and_pictures(page):
    twin = page.with_name(page.name.replace(".md", ".zh-CN.md"))
    assert commands(twin) == commands(page)
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", page.read_text())
    assert pictures
    assert re.findall(r"!\[.*?\]\((.*?)\)", twin.read_text()) == pictures
    assert all((page.parent / picture).exists() for picture in pictures)


def one_request(said: str, folder: Path) -> None:
    assert "'cached_tokens': 0" in said
    assert re.search(r"'cached_tokens': [1-9]", said), "the second request found no cached prefix"
    assert (folder / "in-peace.txt").read_text().rstrip().endswith("200")
    assert (folder / "while-killed.txt").read_text().rstrip().endswith("200"), "the killed answer is not whole"
    assert ", 0 came out otherwise" in said
    assert (folder / "request.svg").read_text().startswith("<svg")


def experts(said: str, folder: Path) -> None:
    assert said.count("960 tokens") == 3, "24 stories of 40 tokens each, also while a rank was killed"
    before, after = (float(found) for found in re.findall(r"worst +([0-9.]+)", said)[-2:])
    assert after < before
    assert (folder / "experts.png").read_bytes().startswith(b"\x89PNG")
    assert "rank 1 is gone" in (folder / "server.log").read_text()
    assert "[225.0, 420.0]" in said
    assert "of shared memory in all" in said


def int8_and_mtp(said: str, folder: Path) -> None:
    whole, rounded, absorbed = (float(found) for found in re.findall(r"in INT8 \(([-+][0-9.]+)%\)", said))
    assert abs(whole) < 1 and abs(absorbed) < 1
    assert rounded > 1, "outliers that do not hurt show nothing"
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert said.count("the same, with drafts and without") == 2
    drafted, accepted = ([float(count) for count in re.findall(rf"member_{name}_tokens_total{{.*}} ([0-9.]+)", said)]
                         for name in ("drafted", "accepted"))
    assert len(drafted) == len(accepted) == 2
    assert 0 < accepted[1] < accepted[0] < drafted[0]
    shares = [f"{right / made:.0%}" for right, made in zip(accepted, drafted, strict=True)]
    assert " ".join(shares) in said, "top and metrics differ"


def supernode(said: str, folder: Path) -> None:
    assert "768 dies" in said
    for table in ("table10_switch", "table4_slo", "table2_prefill", "table3_decode", "table6_comm",
                  "fig23_context_cache"):
        assert (folder / "paper" / f"{table}.png").read_bytes().startswith(b"\x89PNG")
    assert said.count("held-out numbers") == 6
    assert "<svg" in (folder / "report.html").read_text()
    assert json.loads((folder / "run.json").read_text())["traceEvents"]
    broken = json.loads((folder / "broken.json").read_text())
    assert broken["requests"]["served"] == broken["requests"]["sent"], "what was lost came again"
    assert (folder / "front.png").read_bytes().startswith(b"\x89PNG")
    planned = json.loads((folder / "planned.json").read_text())
    assert planned["goodput"]["share"] >= 0.9


CHECKS = {"01-one-request": one_request, "02-experts": experts, "03-int8-and-mtp": int8_and_mtp,
          "04-supernode": supernode}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_as_they_stand(page, tmp_path):
    script = "set -euo pipefail\n" + "".join(commands(page)[1:])      # the first block sets the path
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env={**os.environ, "PATH": path, "COLUMNS": "120"},
                          capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{(tmp_path / 'server.log').read_text()}"
    CHECKS[page.stem](done.stdout, tmp_path)
