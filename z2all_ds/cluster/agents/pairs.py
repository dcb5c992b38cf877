"""Every pair of nodes once each way, as many side by side as there are free nodes, none of them in two at a time."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def rounds(items: Sequence[T]) -> list[list[tuple[T, T]]]:
    """A tournament: in each round every item meets one other at most, and after all rounds each pair has met once.

    The first item stays, the others turn around it; with an odd number one of them rests.
    """
    circle: list[T | None] = [*items, *([None] if len(items) % 2 else [])]
    result = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        result.append([(one, other) for one, other in met if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return result
