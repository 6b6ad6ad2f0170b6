"""Tandem repeats in a sequence of labels.

    a b c d b c d b c d b e     ->  Repeat(start=1, stop=11, period=3)

A run with period p is a maximal stretch in which every label equals the one p later. All
periods are tried, each with one vectorised comparison: 6,400 labels take about 0.1 s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stepfx.patterns.program import IntArray, Span


@dataclass(frozen=True)
class Repeat:
    """Labels in [start, stop) repeat with `period`; the last repeat may be partial."""

    start: int
    stop: int
    period: int

    @property
    def span(self) -> Span:
        """The positions that the run covers."""
        return Span(self.start, self.stop)

    @property
    def count(self) -> int:
        """How many whole periods fit."""
        return (self.stop - self.start) // self.period


def find_repeats(labels: IntArray, min_period: int = 1) -> list[Repeat]:
    """Return every maximal run that holds at least two whole periods, longest first."""
    found: list[Repeat] = []
    for period in range(min_period, len(labels) // 2 + 1):
        equal = np.empty(len(labels) - period + 2, dtype=np.int8)
        equal[0] = equal[-1] = 0
        np.equal(labels[:-period], labels[period:], out=equal[1:-1], casting="unsafe")
        steps = np.diff(equal)
        starts, stops = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
        long_enough = (stops - starts) >= period
        found += [
            Repeat(int(a), int(b) + period, period)
            for a, b in zip(starts[long_enough], stops[long_enough], strict=True)
        ]
    found.sort(key=lambda run: (run.start - run.stop, run.period))
    return found


def shorter_periods(run: Repeat, runs: list[Repeat], share: float = 0.9) -> list[Repeat]:
    """Return the runs that cover nearly all of `run`, shortest period first.

    A list of n blocks is also a list of n / 2 pairs; the shortest period is the block.
    """
    covering = [
        other
        for other in runs
        if other.period <= run.period and other.span.overlap(run.span) >= share * len(run.span)
    ]
    return sorted(covering, key=lambda other: (other.period, other.start - other.stop))
