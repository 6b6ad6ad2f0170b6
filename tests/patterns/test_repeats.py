"""Tandem repeats of labels."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfx.patterns.repeats import Repeat, find_repeats, shorter_periods


def labels(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], dtype=np.int64)


def test_a_list_between_prologue_and_epilogue() -> None:
    assert find_repeats(labels("xyABCDABCDABCDz")) == [Repeat(2, 14, 4)]


def test_partial_last_period_belongs_to_the_run() -> None:
    run = find_repeats(labels("xABCDEABCDEABCz"))[0]
    assert run == Repeat(1, 14, 5)
    assert run.count == 2


def test_nothing_repeats() -> None:
    assert find_repeats(labels("abcdefghijkl")) == []
    assert find_repeats(labels("")) == []


def test_pairs_of_blocks_are_blocks() -> None:
    runs = find_repeats(labels("ABCDE" * 6))
    assert shorter_periods(runs[0], runs)[0].period == 5


@given(
    block=st.lists(st.integers(0, 50), min_size=4, max_size=30),
    count=st.integers(2, 9),
    before=st.lists(st.integers(100, 150), max_size=20),
    after=st.lists(st.integers(200, 250), max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_every_repeat_is_found(
    block: list[int], count: int, before: list[int], after: list[int]
) -> None:
    sequence = np.array(before + block * count + after, dtype=np.int64)
    start, stop = len(before), len(before) + count * len(block)
    runs = find_repeats(sequence)
    best = next(run for run in runs if run.start <= start and run.stop >= stop)
    shortest = shorter_periods(best, runs)[0]
    assert shortest.period <= len(block)
    assert shortest.span.overlap(best.span) >= 0.9 * len(best.span)


@given(st.lists(st.integers(0, 3), max_size=120))
@settings(max_examples=200, deadline=None)
def test_every_run_is_true_and_maximal(sequence: list[int]) -> None:
    array = np.array(sequence, dtype=np.int64)
    for run in find_repeats(array):
        inside = array[run.start : run.stop]
        assert (inside[: -run.period] == inside[run.period :]).all()
        assert run.count >= 2
        if run.start:
            assert array[run.start - 1] != array[run.start - 1 + run.period]
        if run.stop < len(array):
            assert array[run.stop] != array[run.stop - run.period]


def test_a_long_program_is_searched_in_reasonable_time() -> None:
    sequence = np.concatenate(
        [np.arange(100), np.tile(np.arange(200, 330), 19), np.tile(np.arange(400, 470), 38)]
    )
    start = time.perf_counter()
    assert find_repeats(sequence)[0].period in (70, 130)
    assert time.perf_counter() - start < 60  # seconds; only an explosion fails this
