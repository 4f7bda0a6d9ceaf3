"""What fails in a simulation, and when: written as `KIND:NAME@START+DURATION`, seconds from the first request on.

    instance:decode-1@60+30      the process is killed, and begins anew 30 s later
    die:decode-0/3@60            rank 3 of the instance is lost, for good
    cache:cache-2@10+5           a cache server is gone with all it held
    plane:RDMA@100+20            nothing moves over the plane, as the hardware names it

A lost die takes its experts along. Copies elsewhere serve; an expert without one is loaded into the place of a copy
that can be spared, and until then the instance computes nothing; where no place is left it waits for the die. Without
the plane over which its ranks exchange, an instance's step stands still, and fails at its deadline.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from tripool.core.errors import ConfigError

Kind = Literal["instance", "die", "cache", "plane"]
FORM = re.compile(r"(?P<kind>\w+):(?P<name>[^@/]+)(?:/(?P<rank>\d+))?@(?P<begin>[0-9.]+)(?:\+(?P<lasts>[0-9.]+))?")


@dataclass(frozen=True, slots=True)
class Failure:
    """Something is gone from `begin_s` on; until `end_s`, if it ever comes back."""

    kind: Kind
    name: str
    begin_s: float
    end_s: float | None = None
    rank: int = 0

    def __str__(self) -> str:
        rank = f"/{self.rank}" if self.kind == "die" else ""
        lasts = f"+{self.end_s - self.begin_s:g}" if self.end_s is not None else ""
        return f"{self.kind}:{self.name}{rank}@{self.begin_s:g}{lasts}"


def parse_failure(text: str) -> Failure:
    """Read one.

    Raises:
        ConfigError: it is not of the form.
    """
    found = FORM.fullmatch(text.strip())
    if found is None or found["kind"] not in ("instance", "die", "cache", "plane"):
        raise ConfigError(f"the failure {text!r} is not understood; write instance:NAME@SECONDS, die:INSTANCE/RANK@, "
                          "cache:NAME@ or plane:NAME@, with +SECONDS behind it if it comes back")
    kind: Kind = found["kind"]                            # type: ignore[assignment]
    if (found["rank"] is not None) != (kind == "die"):
        raise ConfigError(f"the failure {text!r}: a die is named INSTANCE/RANK, and nothing else is")
    try:
        begin_s = float(found["begin"])
        end_s = begin_s + float(found["lasts"]) if found["lasts"] is not None else None
    except ValueError as error:
        raise ConfigError(f"the failure {text!r} has no proper time: {error}") from error
    if end_s is not None and not end_s > begin_s:
        raise ConfigError(f"the failure {text!r} lasts no time; write more than 0 behind +, or nothing if it does not "
                          "come back")
    return Failure(kind, found["name"], begin_s, end_s, int(found["rank"] or 0))


def check_failures(failures: Collection[Failure], instances: Mapping[str, int], servers: Collection[str],
                   planes: Collection[str]) -> None:
    """See that all of it is there to fail; `instances` have so many ranks.

    Raises:
        ConfigError: a name is unknown.
    """
    for each in failures:
        known = {"instance": instances, "die": instances, "cache": servers, "plane": planes}[each.kind]
        if each.name not in known:
            raise ConfigError(f"the failure {each}: there is no {each.kind} {each.name!r}; there are "
                              f"{', '.join(known) or 'none'}")
        if each.kind == "die" and not 0 < each.rank < instances[each.name]:
            raise ConfigError(f"the failure {each}: {each.name} has {instances[each.name]} rank(s); rank 0 is the "
                              "instance's own process, whose end is that of the instance, the others can be lost alone")
