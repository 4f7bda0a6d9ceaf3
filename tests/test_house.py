"""The house around the code: what a stranger finds in the repository has to be true."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT_SUFFIXES = {".py", ".md", ".toml", ".cff", ".json", ".jinja", ".txt", ".sh", ".yml", ".yaml", ".cfg", ""}
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def tracked_files() -> list[Path]:
    """Files under version control; of an unpacked archive, every file outside hidden and made folders."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*")
                 if not any(part.startswith(".") or part in ("build", "out") for part in path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file()]


def text_files() -> list[Path]:
    return [path for path in tracked_files() if path.suffix in TEXT_SUFFIXES and path.stat().st_size < 2 << 20]


def tracked_folders() -> set[str]:
    """Folders that hold code, text or data, down to the rooms."""
    folders = set()
    for path in tracked_files():
        parents = path.relative_to(ROOT).parent.parts
        if parents and not parents[0].startswith("."):
            folders.add(parents[0] + "/")
            if parents[0] == "tripool" and len(parents) > 1:
                folders.add(f"tripool/{parents[1]}/")
    return folders


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def tree_in(readme: str) -> set[str]:
    """Folders of the tree in a README: in a fenced block, lines that begin with a folder's name and a slash."""
    return set(re.findall(r"^ {0,4}((?:[a-z]+/)+)(?= )", readme, re.MULTILINE))


def test_no_path_of_one_machine_is_in_a_tracked_file():
    machine_path = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+|opt/pypi|tmp/tripool)/")
    found = [f"{path.relative_to(ROOT)}: {match.group()}" for path in text_files()
             for match in machine_path.finditer(path.read_text(errors="replace")) if path != Path(__file__)]
    assert found == []


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_tree_in_the_readme_has_one_line_for_every_folder(name):
    assert tree_in((ROOT / name).read_text()) == tracked_folders()


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md", "CONTRIBUTING.md"])
def test_every_make_command_in_the_text_exists(name):
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", "\n".join(code_in((ROOT / name).read_text()))))
    assert named
    assert named - make_targets() == set()


def code_in(text: str) -> list[str]:
    """Fenced blocks and `inline code` of a Markdown text."""
    fence = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    return fence.findall(text) + re.findall(r"`([^`\n]+)`", fence.sub("", text))


def test_the_promised_targets_exist():
    promised = {"demo", "test", "test-all", "test-gpu", "check", "bench", "native", "sim-chaos"}
    assert promised - make_targets() == set()


def test_the_pages_for_users_have_chinese_twins():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in (page for page in pages if not page.name.endswith(".zh-CN.md")):
        twin = page.with_name(page.stem + ".zh-CN.md")
        assert twin.exists(), f"{page.relative_to(ROOT)} has no {twin.name}"
        assert len(CHINESE.findall(twin.read_text())) > 50, f"{twin.name} is not Chinese"


def test_links_between_pages_lead_somewhere():
    missing = []
    for page in (path for path in tracked_files() if path.suffix == ".md"):
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / target).exists():
                missing.append(f"{page.relative_to(ROOT)} -> {target}")
    assert missing == []


def test_pictures_of_pages_show_something():
    empty = [str(path.relative_to(ROOT)) for path in tracked_files() if path.suffix in (".svg", ".png")
             and path.stat().st_size < 200]
    assert empty == []


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert f"[{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f'__version__ = "{version}"' in (ROOT / "tripool" / "__init__.py").read_text()


def test_the_repository_stays_small_enough_to_clone():
    large = [f"{path.relative_to(ROOT)}: {path.stat().st_size >> 20} MiB"
             for path in tracked_files() if path.stat().st_size > 25_000_000]
    assert large == []
