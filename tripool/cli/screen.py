"""The terminal: where commands write. Answers go to standard output, words about them to standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def loading(words: str) -> Iterator[Callable[[str, float], None]]:
    """A progress bar that is gone afterwards; it is told what happens and which part of it is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    # Two looks a second: it shares the cores with what it waits for.
    with Progress(*columns, console=err, transient=True, refresh_per_second=2) as progress:
        task = progress.add_task(words, total=1.0)
        yield lambda description, fraction: progress.update(task, description=description, completed=fraction)


def show_seconds(seconds: float) -> str:
    """A duration with three digits."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def as_json(figures: dict[str, Any]) -> str:
    """All figures of a command, as it writes and prints them."""
    return msgspec.json.format(msgspec.json.encode(figures), indent=1).decode() + "\n"
