"""The files that commands write: whether they can be written is seen before the work that fills them, and a file is
whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tripool.core.errors import ConfigError


def check_writable(path: Path, flag: str) -> None:
    """See that a file can be written, before the work that fills it.

    Raises:
        ConfigError: its folder is not there, or cannot be written in.
    """
    if path.is_dir():
        raise ConfigError(f"{flag} is {path}, which is a folder; give a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} is {path}, but there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} is {path}, which cannot be written; give another")


def check_files(files: dict[str, Path | None]) -> None:
    """The same of several by their flags, each of which is to have a file of its own.

    Raises:
        ConfigError: one cannot be written, or two are one file.
    """
    taken: dict[Path, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        check_writable(path, flag)
        other = taken.setdefault(path.resolve(), flag)
        if other != flag and (path.is_file() or not path.exists()):         # /dev/stdout may well be named twice
            raise ConfigError(f"{other} and {flag} are both {path}; give each a file of its own")


def make_folder(path: Path, flag: str) -> None:
    """Make a folder for files, before the work that fills them.

    Raises:
        ConfigError: it cannot be made, or cannot be written in.
    """
    with writing(path, flag):
        path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{flag} is {path}, which cannot be written in; give another")


@contextmanager
def writing(path: Path, flag: str) -> Iterator[None]:
    """What the system says of a file that cannot be written, with the flag that named it.

    Raises:
        ConfigError: it says so.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} is {path}, which cannot be written: {error.strerror}") from error


def write_whole(path: Path, data: str | bytes, flag: str) -> None:
    """Write a file. One that is there stays until the new one is whole; what is no file (/dev/stdout) just gets it.

    Raises:
        ConfigError: it cannot be written.
    """
    data = data.encode() if isinstance(data, str) else data
    with writing(path, flag):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_bytes(data)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
