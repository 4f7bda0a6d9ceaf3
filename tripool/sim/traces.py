"""Public request traces: Mooncake JSONL, and the CSV files of Azure and BurstGPT.

    Mooncake    {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [one per 512 prompt tokens]}
    Azure       TIMESTAMP,ContextTokens,GeneratedTokens                                  2023-11-16 18:15:46.6805900
    BurstGPT    Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type     seconds

Which one a file is, its first line says. A trace is read whole and checked before anything is started; what is wrong is
told with its line and field. The CSV files say nothing of prefixes: prompts share none.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from tripool.core.errors import ConfigError
from tripool.sim.requests import FIRST_ANSWER_TOKEN, Workload, WorkRequest, split_prompt

MOONCAKE_BLOCK_TOKENS = 512


class MooncakeLine(msgspec.Struct):
    """A line of a Mooncake trace; further fields are passed over."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class Columns:
    """A kind of CSV trace: names of its columns, and how a time is read, in seconds."""

    name: str
    time: str
    prompt: str
    output: str
    seconds: Callable[[str], float]


def _azure_seconds(text: str) -> float:
    whole, _, fraction = text.partition(".")
    moment = datetime.fromisoformat(whole + "+00:00")
    return moment.timestamp() + float("0." + (fraction or "0"))


CSV_KINDS = (Columns("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _azure_seconds),
             Columns("BurstGPT", "Timestamp", "Request tokens", "Response tokens", float))


def read_workload(path: Path, *, limit: int | None = None) -> Workload:
    """Read a trace, all of it or the first `limit` requests.

    Raises:
        ConfigError: unreadable, of no known kind, or wrong in some line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            if not first:
                raise ConfigError(f"{path} is empty")
            file.seek(0)
            lines = enumerate(file, start=1)
            if first.lstrip().startswith("{"):
                rows = _mooncake(lines, path)
            else:
                rows = _csv(lines, path)
            requests = tuple(_checked(rows, path, limit))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}") from error
    except csv.Error as error:
        raise ConfigError(f"{path} is no proper CSV file: {error}") from error
    if not requests:
        raise ConfigError(f"{path} holds no request")
    return Workload(path.name, requests)


@dataclass(frozen=True, slots=True)
class _Row:
    """A line as read: where, and what its fields are called."""

    line: int
    fields: tuple[str, str, str]
    at_s: float
    num_prompt: int
    num_output: int
    names: list[int] | None


def _checked(rows: Iterator[_Row], path: Path, limit: int | None) -> Iterator[WorkRequest]:
    """What is true of every trace."""
    first_s = last_s = None
    for number, row in enumerate(rows):
        if number == limit:
            return
        where = f"{path}, line {row.line}"
        if not 0 <= row.at_s < float("inf"):
            raise ConfigError(f"{where}: {row.fields[0]} is {row.at_s}; it must be a time that is not negative")
        if last_s is not None and row.at_s < last_s:
            raise ConfigError(f"{where}: {row.fields[0]} runs backwards, by {last_s - row.at_s:g} s; sort the file by "
                              "it")
        for name, value in zip(row.fields[1:], (row.num_prompt, row.num_output), strict=True):
            if value < 1:
                hint = "; of BurstGPT, take the file without failed requests" if "tokens" in name else ""
                raise ConfigError(f"{where}: {name} is {value}; a request has at least 1 token each way{hint}")
        names = [number] if row.names is None else row.names
        part_tokens = row.num_prompt if row.names is None else MOONCAKE_BLOCK_TOKENS
        wanted = -(-row.num_prompt // part_tokens)
        if len(names) != wanted:
            raise ConfigError(f"{where}: hash_ids has {len(names)} blocks, but input_length {row.num_prompt} makes "
                              f"{wanted} of {MOONCAKE_BLOCK_TOKENS} tokens")
        if not 0 <= min(names) <= max(names) < FIRST_ANSWER_TOKEN:
            raise ConfigError(f"{where}: hash_ids go from {min(names)} to {max(names)}; they must lie between 0 and "
                              f"{FIRST_ANSWER_TOKEN - 1}")
        first_s = row.at_s if first_s is None else first_s
        last_s = row.at_s
        yield WorkRequest(row.at_s - first_s, split_prompt(names, row.num_prompt, part_tokens), row.num_output)


def _mooncake(lines: Iterable[tuple[int, str]], path: Path) -> Iterator[_Row]:
    decoder = msgspec.json.Decoder(MooncakeLine)
    fields = ("timestamp", "input_length", "output_length")
    for number, line in lines:
        if not line.strip():
            continue
        try:
            each = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ConfigError(f"{path}, line {number}: {error}; a line of a Mooncake trace has timestamp, "
                              "input_length, output_length and hash_ids") from error
        yield _Row(number, fields, each.timestamp / 1e3, each.input_length, each.output_length, each.hash_ids)


def _csv(lines: Iterable[tuple[int, str]], path: Path) -> Iterator[_Row]:
    reader = csv.DictReader(line for _, line in lines)
    header = reader.fieldnames or ()
    kind = next((each for each in CSV_KINDS if each.time in header), None)
    if kind is None:
        known = "; ".join(f"{each.name}: {each.time}, {each.prompt}, {each.output}" for each in CSV_KINDS)
        raise ConfigError(f"{path}, line 1: the columns {', '.join(header) or '(none)'} are of no known trace ({known};"
                          " or Mooncake's lines of JSON)")
    fields = (kind.time, kind.prompt, kind.output)
    missing = [name for name in fields if name not in header]
    if missing:
        raise ConfigError(f"{path}, line 1: the column {missing[0]!r} is missing, which a trace of {kind.name} has")
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        at_s = _field(row, kind.time, kind.seconds, where)
        yield _Row(reader.line_num, fields, at_s, _field(row, kind.prompt, int, where),
                   _field(row, kind.output, int, where), None)


def _field(row: dict[str, Any], name: str, kind: Callable[[str], Any], where: str) -> Any:
    text = row.get(name)
    if text is None or not text.strip():
        raise ConfigError(f"{where}: {name} is empty")
    try:
        return kind(text.strip())
    except ValueError as error:
        raise ConfigError(f"{where}: {name} is {text!r}, which is no {'time' if kind not in (int,) else 'count'}") \
            from error
