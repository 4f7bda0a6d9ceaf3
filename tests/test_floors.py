"""The floors of the house, kept by reading every file: who may import whom, and what each floor may touch.

    floor 4   cli
    floor 3   api   planner
    floor 2   serve   sim   quant
    floor 1   control   engine   pool
    floor 0   core

A rule is a function from a parsed file to complaints; each rule has a test that it finds what it looks for.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tripool"

FLOORS = {
    "core": 0,
    "control": 1, "engine": 1, "pool": 1,
    "serve": 2, "sim": 2, "quant": 2,
    "api": 3, "planner": 3,
    "cli": 4,
}
DATA_FOLDERS = {"models"}                 # hold files, no code
PURE_ROOMS = ("core", "control")          # standard library only, and nothing of the world
TORCH_ROOMS = ("engine", "quant")
ENVIRONMENT_ROOMS = ("cli",)

# Modules of the standard library through which time, other threads, the network or chance would come in.
WORLDLY = {
    "asyncio", "concurrent", "ctypes", "datetime", "fcntl", "http", "mmap", "multiprocessing", "os", "queue", "sched",
    "secrets", "select", "selectors", "shutil", "signal", "socket", "socketserver", "ssl", "subprocess", "tempfile",
    "threading", "time", "urllib", "uuid", "_thread",
}
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str | None:
    """The room a file belongs to; None for the package's own __init__."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports; `from a.b import c` gives `a.b.c`, module or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{node.module or ''}.{alias.name}"


def wrong_floor(tree: ast.AST, room: str) -> list[str]:
    """Imports that go up, or into another room on the same floor."""
    complaints = []
    for line, name in imported_modules(tree):
        parts = name.split(".")
        if parts[0] != "tripool" or len(parts) < 2 or parts[1] not in FLOORS or parts[1] == room:
            continue
        if FLOORS[parts[1]] > FLOORS[room]:
            complaints.append(f"line {line}: {room} is below {parts[1]}")
        elif FLOORS[parts[1]] == FLOORS[room]:
            complaints.append(f"line {line}: {room} and {parts[1]} are on one floor")
    return complaints


def worldly_imports(tree: ast.AST) -> list[str]:
    """What a machine must not touch: anything but the standard library, and the parts of it that reach the world."""
    complaints = []
    for line, name in imported_modules(tree):
        top = name.split(".")[0]
        if top in ("tripool", "__future__"):
            continue
        if top not in sys.stdlib_module_names:
            complaints.append(f"line {line}: {top} is not the standard library")
        elif top in WORLDLY:
            complaints.append(f"line {line}: {top} reaches outside")
    return complaints


def global_chance(tree: ast.AST) -> list[str]:
    """Randomness other than from a generator made with a seed: of `random`, only `Random(seed)` is allowed."""
    complaints = []
    for line, name in imported_modules(tree):
        if name.startswith("random.") and name != "random.Random":
            complaints.append(f"line {line}: {name} is the global generator")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            if node.attr != "Random":
                complaints.append(f"line {node.lineno}: random.{node.attr} is the global generator")
        if isinstance(node, ast.Call) and _dotted(node.func) in ("Random", "random.Random") and not node.args:
            complaints.append(f"line {node.lineno}: a generator without a seed")
    return complaints


def unordered(tree: ast.AST) -> list[str]:
    """Ways in which one order of the same things could differ from another: the built-in hash and iterated sets."""
    complaints = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _dotted(node.func) == "hash":
            complaints.append(f"line {node.lineno}: the built-in hash of text differs between processes")
        iterated = [node.iter] if isinstance(node, (ast.For, ast.comprehension)) else []
        if isinstance(node, ast.Call) and _dotted(node.func) in ("list", "tuple", "iter", "enumerate", "next"):
            iterated += node.args[:1]
        for each in iterated:
            if isinstance(each, (ast.Set, ast.SetComp)) or (
                    isinstance(each, ast.Call) and _dotted(each.func) in ("set", "frozenset")):
                complaints.append(f"line {each.lineno}: a set has no order")
    return complaints


def torch_imports(tree: ast.AST) -> list[str]:
    return [f"line {line}: imports {name.split('.')[0]}" for line, name in imported_modules(tree)
            if name.split(".")[0] in ("torch", "torchvision", "transformers")]


def environment_reads(tree: ast.AST) -> list[str]:
    """Uses of the environment, a copy for a child process among them: what children see is decided in one place."""
    complaints = [f"line {line}: {name}" for line, name in imported_modules(tree)
                  if name in ("os.environ", "os.getenv", "os.environb")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _dotted(node) in ("os.environ", "os.getenv", "os.environb", "os.putenv"):
            complaints.append(f"line {node.lineno}: {_dotted(node)}")
    return complaints


def inner_imports(tree: ast.AST) -> list[str]:
    complaints = []
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for node in ast.walk(function):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    complaints.append(f"line {node.lineno}: an import inside a function")
    return complaints


def unsafe_reading(tree: ast.AST) -> list[str]:
    """Ways to turn bytes from outside into running code."""
    complaints = [f"line {line}: {name}" for line, name in imported_modules(tree)
                  if name.split(".")[0] in UNSAFE_MODULES]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        if name in ("eval", "exec", "compile", "torch.load", "builtins.eval", "builtins.exec"):
            complaints.append(f"line {node.lineno}: {name}")
        for keyword in node.keywords:
            denied = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ("allow_pickle", "trust_remote_code") and not denied:
                complaints.append(f"line {node.lineno}: {keyword.arg}")
    return complaints


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def complaints_about(rule, rooms) -> list[str]:
    return [f"tripool/{path.relative_to(PACKAGE)} {complaint}"
            for path in source_files() if rooms is None or room_of(path) in rooms for complaint in rule(parse(path))]


# ---------------------------------------------------------------------------------------------- the house as it is


def test_every_folder_is_a_room_of_the_house():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - set(FLOORS) - DATA_FOLDERS == set()


def test_imports_go_down_only():
    complaints = [f"tripool/{path.relative_to(PACKAGE)} {complaint}" for path in source_files()
                  if room_of(path) in FLOORS for complaint in wrong_floor(parse(path), room_of(path))]
    assert complaints == []


def test_core_and_control_touch_nothing_of_the_world():
    assert complaints_about(worldly_imports, PURE_ROOMS) == []


def test_core_and_control_draw_only_from_generators_they_were_given():
    assert complaints_about(global_chance, PURE_ROOMS) == []


def test_core_and_control_do_not_depend_on_an_order_that_is_not_there():
    assert complaints_about(unordered, PURE_ROOMS) == []


def test_only_the_engine_and_quant_import_torch():
    rooms = [room for room in FLOORS if room not in TORCH_ROOMS]
    assert complaints_about(torch_imports, [*rooms, None]) == []


def test_only_the_command_line_reads_the_environment():
    rooms = [room for room in FLOORS if room not in ENVIRONMENT_ROOMS]
    assert complaints_about(environment_reads, [*rooms, None]) == []


def test_imports_stand_at_the_top_of_the_file():
    assert complaints_about(inner_imports, None) == []


def test_nothing_from_outside_is_turned_into_code():
    assert complaints_about(unsafe_reading, None) == []


def test_no_file_is_called_utils():
    vague = ("utils", "util", "helpers", "helper", "misc", "common")
    assert [str(path.relative_to(PACKAGE)) for path in source_files() if path.stem in vague] == []


@pytest.mark.parametrize("module", ["tripool.core", "tripool.control", "tripool.pool", "tripool.sim", "tripool.api"])
def test_a_room_without_tensors_loads_without_torch(module):
    """Every file of the room is imported, as `import tripool.sim.host` must not load torch either."""
    script = (
        "import importlib, pkgutil, sys\n"
        f"room = importlib.import_module({module!r})\n"
        "for found in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "    if not found.name.endswith('__main__'): importlib.import_module(found.name)\n"
        "sys.exit('torch was loaded' if 'torch' in sys.modules else 0)\n"
    )
    assert _run(script) == ""


def test_the_command_line_shows_its_help_without_loading_torch():
    assert _run("import sys, tripool.cli.main\nsys.exit('torch was loaded' if 'torch' in sys.modules else 0)") == ""


def _run(script: str) -> str:
    """The complaint of a Python process, nothing if it had none."""
    done = subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True,
                          check=False)
    return "" if done.returncode == 0 else done.stderr or f"exit code {done.returncode}"


# ----------------------------------------------------------------------------------- the rules find what they look for


@pytest.mark.parametrize(("rule", "offence"), [
    (worldly_imports, "import time"),
    (worldly_imports, "from time import monotonic"),
    (worldly_imports, "import threading"),
    (worldly_imports, "import os.path"),
    (worldly_imports, "import numpy as np"),
    (global_chance, "import random\nx = random.random()"),
    (global_chance, "from random import choice"),
    (global_chance, "import random\ng = random.Random()"),
    (unordered, "x = hash('decode-0')"),
    (unordered, "for x in {1, 2}: pass"),
    (unordered, "x = [y for y in set(names)]"),
    (unordered, "x = list(set(names))"),
    (torch_imports, "import torch.nn.functional as F"),
    (torch_imports, "from torch import Tensor"),
    (environment_reads, "import os\nx = os.environ.get('HOME')"),
    (environment_reads, "from os import environ"),
    (environment_reads, "import os\nx = os.getenv('HOME')"),
    (inner_imports, "def f():\n    import json"),
    (inner_imports, "class A:\n    def f(self):\n        from json import loads"),
    (unsafe_reading, "import pickle"),
    (unsafe_reading, "from pickle import loads"),
    (unsafe_reading, "x = eval(text)"),
    (unsafe_reading, "import torch\nx = torch.load(path)"),
    (unsafe_reading, "x = np.load(path, allow_pickle=True)"),
    (unsafe_reading, "x = load(path, trust_remote_code=True)"),
])
def test_a_rule_finds_its_offence(rule, offence):
    assert rule(ast.parse(offence)) != []


@pytest.mark.parametrize(("rule", "fine"), [
    (worldly_imports, "from __future__ import annotations\nimport heapq\nfrom tripool.core.plan import Section"),
    (global_chance, "import random\ndef f(generator: random.Random): return generator.random()\ng = random.Random(7)"),
    (unordered, "for x in sorted({2, 1}): pass\ny = 3 in {1, 2}"),
    (environment_reads, "import os\nx = os.getpid()"),
    (inner_imports, "import json\ndef f(): return json.loads('1')"),
    (unsafe_reading, "import re\nx = re.compile('a')\ny = np.load(path, allow_pickle=False)"),
])
def test_a_rule_lets_pass_what_is_fine(rule, fine):
    assert rule(ast.parse(fine)) == []


def test_the_floors_rule_knows_up_sideways_and_down():
    assert wrong_floor(ast.parse("from tripool.serve.host import Host"), "control") != []
    assert wrong_floor(ast.parse("import tripool.pool.sdk"), "engine") != []
    assert wrong_floor(ast.parse("from tripool import engine"), "pool") != []
    assert wrong_floor(ast.parse("from tripool.core.plan import Section\nimport tripool.control.router"), "serve") == []
