"""Values: frozen for the type checker, and cheap to make.

A frozen dataclass sets each field through a call of its own, which costs two to three times what a plain one does, and
a busy control plane makes tens of thousands of small values a second. So messages, plans and what they hold are frozen
for whoever writes code (`mypy` refuses an assignment), and plain when they run. They compare, hash, match and print
like frozen ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

__all__ = ["value"]

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:
    def value(*, frozen: bool, slots: bool) -> Callable[[type[T]], type[T]]:
        """`@value(frozen=True, slots=True)`: as `dataclass`, but nothing stops an assignment at run time."""
        return dataclass(slots=slots, unsafe_hash=frozen)
