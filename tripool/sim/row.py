"""A request in a slot of the simulated engine: what it holds, and how many tokens it will emit."""

from __future__ import annotations

from dataclasses import dataclass

from tripool.core.plan import Join
from tripool.core.request import TokenBytes
from tripool.sim.requests import END_TOKEN, TOKEN, answer_token

END = TOKEN.pack(END_TOKEN)


@dataclass(slots=True, eq=False)
class Row:
    """A request in a slot. Once it is live, with a token to emit in every step, others count how far it has come."""

    join: Join
    rank: int
    place: int                         # rank * slots of a rank + slot
    num_tokens: int                    # known ones, until it is live
    computed: int                      # likewise
    room: int                          # likewise; positions that its blocks have
    number: int                        # tokens emitted before it joined
    total: int                         # tokens it will have emitted when it ends
    ends: str                          # how: "stop", or "length" at its limit
    live: bool = False
    told: int = 0                      # of a live one: number up to which a gateway was told

    @property
    def num_to_compute(self) -> int:
        return self.num_tokens - self.computed

    def tokens(self, first: int, last: int) -> TokenBytes:
        """Emitted ones, from number `first` to before `last`."""
        count = last - first
        answer = answer_token(self.join.request_id)
        if last == self.total and self.ends == "stop" and count:
            return answer * (count - 1) + END
        return answer * count
