"""The terminal: where commands write. Answers go to standard output, words about them to standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def loading(words: str) -> Iterator[Callable[[str, float], None]]:
    """A progress bar that is gone afterwards; it is told what happens and which part of it is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(words, total=1.0)
        yield lambda description, fraction: progress.update(task, description=description, completed=fraction)
