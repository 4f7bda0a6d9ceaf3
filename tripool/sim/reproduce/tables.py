"""The published tables and the split: which of their cells is an input, which fitted something, which is held out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from tripool.core.deployment import read_table
from tripool.core.errors import ConfigError

FOLDER = Path(__file__).parent
TABLES, SPLIT = FOLDER / "paper_tables.json", FOLDER / "split.toml"
ROLES = ("input", "calibration", "derived", "exact", "held out", "compared", "quoted", "not covered", "unscored")
KEYS = ("id", "role", "cells", "because", "gains", "bar_points", "gpu_rows")


@dataclass(frozen=True, slots=True)
class PaperCell:
    """One published number, or word."""

    table: str
    row: int
    column: str
    value: Any
    label: str                             # of the row
    role: str
    is_gain: bool                          # percent: 1 plus the hundredth of it is a ratio of times
    gpu: bool
    bar_points: float | None = None        # by how many points the time that is left may be off, percent

    @property
    def id(self) -> str:
        return f"{self.table}/{self.row}/{self.column}"


@dataclass(frozen=True, slots=True)
class PaperTable:
    """A published table with the roles of its cells."""

    id: str
    title: str
    source: str
    verified: bool
    because: str                           # why some of its cells are not covered, or what they fitted
    columns: tuple[str, ...]
    cells: tuple[PaperCell, ...]           # row after row; words and empty places are there too, and have no role


def read_paper_tables() -> list[PaperTable]:
    """All tables in the order of the file.

    Raises:
        ConfigError: the split and the tables do not fit each other; it names the table.
    """
    split = _read_split()
    tables = json.loads(TABLES.read_text())["tables"]
    ids = [each["id"] for each in tables]
    if sorted(ids) != sorted(split):
        missing = sorted(set(ids) ^ set(split))
        raise ConfigError(f"{SPLIT.name} and {TABLES.name} do not have the same tables: {', '.join(missing)}")
    return [_table(each, split[each["id"]]) for each in tables]


def all_cells(tables: list[PaperTable]) -> Iterator[PaperCell]:
    for table in tables:
        yield from table.cells


@cache
def published(role: str) -> dict[str, Any]:
    """Values of all cells of a role by their ids. What predicts may ask for inputs, what fits for calibration cells."""
    return {cell.id: cell.value for cell in all_cells(read_paper_tables()) if cell.role == role}


def _read_split() -> dict[str, dict[str, Any]]:
    split: dict[str, dict[str, Any]] = {}
    for entry in read_table(SPLIT)["table"]:
        for key in entry:
            if key not in KEYS:
                raise ConfigError(f"{SPLIT.name}: {entry['id']} has the unknown key {key!r}; known are "
                                  f"{', '.join(KEYS)}")
        for role in (entry["role"], *entry.get("cells", {}).values()):
            if role not in ROLES:
                raise ConfigError(f"{SPLIT.name}: {entry['id']} has the role {role!r}; known are {', '.join(ROLES)}")
        split[entry["id"]] = entry
    return split


def _table(table: dict[str, Any], entry: dict[str, Any]) -> PaperTable:
    columns = tuple(table["columns"])
    cells = []
    for row, values in enumerate(table["rows"]):
        roles = {column: _role(entry, row, column) for column in columns}
        label = _label(columns, values, roles)
        for column, value in zip(columns, values, strict=True):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            role = roles[column] if number else ""
            is_gain = any(fnmatchcase(f"{row}/{column}", pattern) for pattern in entry.get("gains", ()))
            cells.append(PaperCell(entry["id"], row, column, value, label, role, is_gain,
                                   row in entry.get("gpu_rows", ()), entry.get("bar_points") if is_gain else None))
    return PaperTable(entry["id"], table["title"], table["source"], table["verified"],
                      entry.get("because", ""), columns, tuple(cells))


def _role(entry: dict[str, Any], row: int, column: str) -> str:
    role = str(entry["role"])
    for pattern, other in entry.get("cells", {}).items():
        if fnmatchcase(f"{row}/{column}", pattern):
            role = other
    return role


def _label(columns: tuple[str, ...], values: list[Any], roles: dict[str, str]) -> str:
    """What tells a row from others: its words, and, if some of its numbers are no inputs, those that are."""
    words = [value for value in values if isinstance(value, str)]
    inputs = [column for column in columns if roles[column] == "input"]
    if len(inputs) < len(columns):
        words += [f"{column} {value}" for column, value in zip(columns, values, strict=True)
                  if column in inputs and isinstance(value, (int, float))]
    return ", ".join(words) if words else f"{columns[0]} {values[0]}"
