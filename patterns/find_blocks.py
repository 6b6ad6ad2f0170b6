"""Find the block lists of a program: the longest run of repeated labels first."""

from __future__ import annotations

from stepfx.patterns.block_list import BlockList
from stepfx.patterns.program import Program, Span
from stepfx.patterns.regular import match_block_list
from stepfx.patterns.repeats import Repeat, find_repeats, shorter_periods
from stepfx.patterns.segments import divide
from stepfx.patterns.variants import (
    extend_across_glue,
    extend_before,
    extend_behind,
    merge_lists,
)

MIN_PERIOD = 4  # operations; what repeats in fewer is a layer, not a block


def find_block_lists(program: Program) -> list[BlockList]:
    """Return the block lists of a graph in the order they run."""
    runs = find_repeats(program.labels)
    taken: list[Span] = []
    lists: list[BlockList] = []
    for found in runs:
        if found.period < MIN_PERIOD:
            continue
        run = _outside(found, taken)
        if run is None:
            continue
        limit = min((s.start for s in taken if s.start >= run.stop), default=len(program))
        for shorter in shorter_periods(run, runs):
            candidate = _outside(shorter, taken)
            if candidate is None:
                continue
            if shorter.period < MIN_PERIOD:
                break
            blocks = match_block_list(program, candidate, limit)
            if blocks is None:
                continue
            parts = divide(program, blocks)
            if len(parts) == 1 and len(parts[0]) == len(blocks):
                parts = [extend_behind(program, blocks, limit, may_end_early=True)]
            lists += parts
            taken.append(_hull(parts))
            break
    for i, blocks in enumerate(lists):
        lists[i] = _with_neighbours(program, blocks, taken)
        taken.append(lists[i].span)
    return merge_lists(program, lists)


def _hull(lists: list[BlockList]) -> Span:
    return Span(min(b.span.start for b in lists), max(b.span.stop for b in lists))


def _with_neighbours(program: Program, blocks: BlockList, taken: list[Span]) -> BlockList:
    floor = max((s.stop for s in taken if s.stop <= blocks.span.start), default=0)
    limit = min((s.start for s in taken if s.start >= blocks.span.stop), default=len(program))
    blocks = extend_before(program, blocks, floor)
    return extend_across_glue(program, blocks, floor, limit)


def _outside(run: Repeat, taken: list[Span]) -> Repeat | None:
    """Return the longest part of `run` beside the spans taken, if two periods fit.

    A run may start on the last operation of the list before it, which looks like its own.
    """
    start, parts = run.start, []
    for span in sorted(taken, key=lambda s: s.start):
        if span.overlap(run.span):
            parts.append((start, span.start))
            start = span.stop
    parts.append((start, run.stop))
    first, last = max(parts, key=lambda part: part[1] - part[0])
    part = Repeat(first, last, run.period)
    return part if part.count >= 2 else None
