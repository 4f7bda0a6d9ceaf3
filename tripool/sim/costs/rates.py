"""How long a die takes for an operator: the larger of computing and of moving what it needs from memory.

Two levels. *Speed of light*: peaks of the data sheet. *Efficiency*: the shares of those peaks that the operators
reached when they were measured alone, rows rounded up to whole tiles. The third level, a table of measured steps, has
no operators (`costs/table.py`). Numbers, not arrays: a step asks for some dozens of operators of its slowest rank.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Literal

from tripool.sim.hardware.description import Hardware

OperatorLevel = Literal["speed of light", "efficiency"]


class Rates:
    """Seconds of a die's operators. `share` is the part of its matrix cores that an operator has."""

    def __init__(self, hardware: Hardware, level: OperatorLevel) -> None:
        die, efficiency = hardware.die, hardware.efficiency
        real = level == "efficiency"
        self._peak_8bit = die.peak_8bit_tops * 1e12
        self._peak_16bit = die.peak_16bit_tflops * 1e12
        self._tile_rows = die.tile_rows if real else 1
        everywhere = ((1.0, 1.0),)
        self._curves = {"projection": _curve(efficiency.projection if real else everywhere),
                        "expert": _curve(efficiency.expert if real else everywhere)}
        memory = die.memory_gbps * 1e9
        self._weights_bytes_per_s = memory * (efficiency.weights if real else 1.0)
        self.attention_bytes_per_s = memory * (efficiency.attention_memory if real else 1.0)
        self._attention_share = efficiency.attention if real else 1.0
        self._vector_bytes_per_s = memory * (efficiency.vector if real else 1.0)

    def product(self, kind: str, rows: float, params: float, weight_bytes: float, *, share: float = 1.0,
                groups: float = 1.0) -> float:
        """`rows` by each of `groups` matrices of `params` elements: all rows together, evenly divided over groups.

        Weights are read at least once, however few rows there are; with no rows nothing happens.
        """
        if rows <= 0.0 or params <= 0.0:
            return 0.0
        each = rows / groups
        tiles = math.ceil(each / self._tile_rows - 1e-9) * self._tile_rows if self._tile_rows > 1 else each
        compute = 2.0 * params * tiles * groups / (self._peak_8bit * share * self._efficiency(kind, each))
        return max(compute, params * groups * weight_bytes / self._weights_bytes_per_s)

    def product_16bit(self, rows: float, params: float, bytes_each: float) -> float:
        """The same in BF16: gate and head. Few rows and many weights, so mostly the time to read them."""
        if rows <= 0.0:
            return 0.0
        return max(2.0 * params * rows / self._peak_16bit, params * bytes_each / self._weights_bytes_per_s)

    def attention_operations(self, in_16bit: float, in_8bit: float = 0.0) -> float:
        """Operations of the attention core as seconds of all matrix cores."""
        return (in_16bit / self._peak_16bit + in_8bit / self._peak_8bit) / self._attention_share

    def vector(self, moved_bytes: float) -> float:
        """Element by element: reads and writes."""
        return moved_bytes / self._vector_bytes_per_s

    def _efficiency(self, kind: str, rows: float) -> float:
        """Between measured numbers of rows in proportion to their logarithm; beyond them as at the last one."""
        log_rows, shares = self._curves[kind]
        at = math.log2(max(rows, 1.0))
        after = bisect_right(log_rows, at)
        if after == 0:
            return shares[0]
        if after == len(log_rows):
            return shares[-1]
        part = (at - log_rows[after - 1]) / (log_rows[after] - log_rows[after - 1])
        return shares[after - 1] + part * (shares[after] - shares[after - 1])


def _curve(points: tuple[tuple[float, ...], ...]) -> tuple[list[float], list[float]]:
    return [math.log2(point[0]) for point in points], [point[1] for point in points]
