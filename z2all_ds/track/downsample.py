"""A curve of any length in a bounded number of points, taken one record at a time.

Points are means of equally many records. When there are too many of them, neighbours are joined and each point stands
for twice as many records from then on: a million steps cost as little memory as two thousand. The lowest and highest
value behind each point are kept, so that a spike of one step stays visible.
"""

import math
from typing import NamedTuple

MOST_POINTS = 2000
"""More than the pixels a curve has on paper or on a screen."""


class Points(NamedTuple):
    """Of a curve, in the order they came in; all four lists are equally long."""

    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


class DownsampledCurve:
    """Takes points in the order of their x."""

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        assert most_points >= 2 and most_points % 2 == 0, "neighbours are joined in pairs"
        self._most_points = most_points
        self.records_per_point = 1
        self._x: list[float] = []
        self._y: list[float] = []
        self._low: list[float] = []
        self._high: list[float] = []
        self._lowest: float = math.inf
        self._highest: float = -math.inf
        self._begin_point()

    def add(self, x: float, y: float) -> None:
        self._count += 1
        self._x_sum += x
        self._y_sum += y
        if y < self._lowest:
            self._lowest = y
        if y > self._highest:
            self._highest = y
        if self._count == self.records_per_point:
            self._end_point()

    def points(self) -> Points:
        """So far; the last one may stand for fewer records than the others."""
        found = Points([*self._x], [*self._y], [*self._low], [*self._high])
        if self._count:
            found.x.append(self._x_sum / self._count)
            found.y.append(self._y_sum / self._count)
            found.low.append(self._lowest)
            found.high.append(self._highest)
        return found

    def _begin_point(self) -> None:
        self._count, self._x_sum, self._y_sum = 0, 0.0, 0.0
        self._lowest, self._highest = math.inf, -math.inf

    def _end_point(self) -> None:
        self._x.append(self._x_sum / self._count)
        self._y.append(self._y_sum / self._count)
        self._low.append(self._lowest)
        self._high.append(self._highest)
        self._begin_point()
        if len(self._x) == self._most_points:
            self._x, self._y = _means(self._x), _means(self._y)
            self._low = [min(pair) for pair in zip(self._low[::2], self._low[1::2], strict=True)]
            self._high = [max(pair) for pair in zip(self._high[::2], self._high[1::2], strict=True)]
            self.records_per_point *= 2


def _means(values: list[float]) -> list[float]:
    return [(one + other) / 2 for one, other in zip(values[::2], values[1::2], strict=True)]
