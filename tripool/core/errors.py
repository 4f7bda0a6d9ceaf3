"""What can go wrong, as a tree.

    TripoolError
    ├── ConfigError        a setting, flag or file is wrong; the message names the field and the remedy
    ├── CheckpointError    a model folder is unusable; carries every problem found, not only the first
    ├── RequestError       a client's request is wrong or cannot be taken; carries the HTTP status
    ├── WireError          a frame from a peer is malformed, too long or not allowed
    ├── PoolError          the cache pool refused or is gone; callers turn it into a miss
    ├── ExchangeError      an exchange between ranks did not come about, so the step is void on all of them
    │   ├── LostRanksError     ranks did not do their part before the deadline
    │   └── AbortedError       somebody gave the step up
    └── StaleBlockError    a block's generation or checksum did not match after a copy

Anything else that is raised is our own mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class TripoolError(Exception):
    """The root of all errors that Tripool raises on purpose."""


class ConfigError(TripoolError):
    """A setting is wrong. The message names the field and what to do."""


class CheckpointError(TripoolError):
    """A model folder cannot be used. `problems` lists everything found wrong, one line each."""

    def __init__(self, folder: str, problems: Sequence[str]) -> None:
        self.folder = folder
        self.problems = tuple(problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"{folder} cannot be used ({len(self.problems)} problem(s)):{lines}")


class RequestError(TripoolError):
    """A client's request is refused: `status` is the HTTP code, `param` the field, `code` the cause for machines."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None,
                 retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class WireError(TripoolError):
    """A frame from a peer is malformed, longer than allowed, or of a type that this link does not take."""


class PoolError(TripoolError):
    """The cache pool refused, or is slow or gone. To a request this is a miss, never an error."""


class StaleBlockError(TripoolError):
    """A copied block is not the one that was granted: its generation or checksum differs."""


class ExchangeError(TripoolError):
    """An exchange between ranks did not come about; the step is void on every rank."""


class LostRanksError(ExchangeError):
    """Ranks did not do their part before the deadline."""

    def __init__(self, ranks: Iterable[int], phase: str, waited_s: float) -> None:
        self.ranks = tuple(ranks)
        self.phase = phase
        names = ", ".join(map(str, self.ranks))
        super().__init__(f"rank(s) {names} did not take part in {phase} within {waited_s:.3g} s")


class AbortedError(ExchangeError):
    """The step was given up by someone else."""
