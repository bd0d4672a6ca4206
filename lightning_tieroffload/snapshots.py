"""Floor 0. Copies of containers that other threads change meanwhile.

[Note: snapshots] ``list(x)`` is one step for every other thread: nothing in it runs Python once it has begun to read.
``tuple(x)`` and ``list(x.items())`` are not: they make objects while they read, making an object may start the
collector, and what that calls may let another thread in. The container has changed then, which is a RuntimeError, once
in some thousand runs. A comprehension over the container itself fails more often still.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

__all__ = ["snapshot", "snapshot_items"]

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


def snapshot(shared: Iterable[T]) -> list[T]:
    """What is in a deque, a set, a mapping's keys or its values at one moment. Any thread."""
    return list(shared)


def snapshot_items(shared: dict[K, V]) -> list[tuple[K, V]]:
    """Keys and values of one moment. Any thread."""
    return list(shared.copy().items())
