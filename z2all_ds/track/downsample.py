"""A curve of any length in a bounded number of points, filled one value at a time.

A point is the mean of equally many values (`Buckets`). The lowest and highest value of each point are kept, so that a
spike of one step stays visible.
"""

from typing import NamedTuple

import numpy as np

from z2all_ds.track.tables import LEAST, MOST, Buckets, mean_of

MOST_POINTS = 2000
"""More than the pixels a curve has on paper or on a screen."""
BATCH = 1024
"""Values put into the buckets at once: numpy is slow for single ones."""


class Points(NamedTuple):
    """Points of a curve in the order they were added; all four lists are equally long."""

    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


class DownsampledCurve:
    """Takes finite values in the order of their x."""

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._buckets = Buckets(most_points)
        self._waiting: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        self._waiting.append((x, y))
        if len(self._waiting) == BATCH:
            self._fill()

    @property
    def records_per_point(self) -> int:
        self._fill()
        return self._buckets.width

    def points(self) -> Points:
        """Returns the points so far; the last one may have fewer values than the others."""
        self._fill()
        x, y = self._buckets.table("x"), self._buckets.table("y")
        return Points(mean_of(x).tolist(), mean_of(y).tolist(), y[LEAST].tolist(), y[MOST].tolist())

    def _fill(self) -> None:
        if self._waiting:
            x, y = np.array(self._waiting, dtype=np.float64).T
            self._buckets.add({"x": x, "y": y}, len(x))
            self._waiting.clear()
