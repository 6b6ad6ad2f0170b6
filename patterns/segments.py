"""A period that holds more than one block.

    s t s t s t            Latte: space and time take turns
    a a a b a a a b        SanaWM: softmax attention in every fourth block
    a a f a a f            WanAnimate: a face adapter behind every second block

The longest period explains the most, yet a block is what mixes tokens and then runs an MLP.
A period is divided at its narrow cuts, where no more tensors live than at its own ends, if
two blocks or more come out; what is left over between them is glue, or a list of its own
when it multiplies matrices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from stepfx.patterns.block_list import BlockList, Stream
from stepfx.patterns.operations import (
    LAYOUT,
    activates_tokens,
    is_matmul,
    mixes_tokens,
    name_of,
)
from stepfx.patterns.program import Program, Span, shape_of, value_of


@dataclass(frozen=True)
class _Division:
    """Pieces of one period, relative to its start, which may be a rotation of it."""

    pieces: tuple[tuple[int, int], ...]
    leftover: tuple[tuple[int, int], ...]


def divide(program: Program, blocks: BlockList) -> list[BlockList]:
    """Return the lists that the periods of regular `blocks` hold: mostly `blocks` itself."""
    start, stop, period = blocks.span.start, blocks.span.stop, len(blocks.spans[0])
    division = _best_division(program, blocks)
    if division is None:
        return [blocks]
    lists: list[BlockList] = []
    pieces: list[list[Span]] = [
        list(_repeated(piece, start, stop, period)) for piece in division.pieces
    ]
    # Blocks on one stream are one list, whatever they do; space and time differ in shape.
    groups: dict[Any, list[Span]] = {}
    for spans in pieces:
        entering = _entering(program, spans[-1], period, len(blocks.streams))
        key = tuple(shape_of(node) for node in entering if node is not None)
        groups.setdefault(key, []).extend(spans)
    for spans in groups.values():
        ordered = sorted(spans, key=lambda span: span.start)
        lists.append(_list_of(program, ordered, len(blocks.streams), period))
    for piece in division.leftover:
        spans = list(_repeated(piece, start, stop, period))
        inside = program.span_nodes(spans[0])
        if any(map(mixes_tokens, inside)) and sum(map(is_matmul, inside)) > 1:
            lists.append(_list_of(program, spans, len(blocks.streams), period))
    return lists


def _repeated(piece: tuple[int, int], start: int, stop: int, period: int) -> Iterable[Span]:
    """Yield a piece in every period, as far as it lies in [start, stop)."""
    for base in range(start - period, stop, period):
        if base + piece[0] >= start and base + piece[1] <= stop:
            yield Span(base + piece[0], base + piece[1])


def _best_division(program: Program, blocks: BlockList) -> _Division | None:
    """Return the division with most blocks, then most equal ones; None if one is all."""
    start, stop, second = blocks.span.start, blocks.span.stop, blocks.spans[1].start
    period, width = second - start, len(blocks.streams)
    cuts = [c for c in range(period) if _live(program, second + c, period) <= width]
    nodes = program.nodes[second - period : second + period]
    mixes = np.cumsum([0, *(mixes_tokens(n) for n in nodes)])
    activates = np.cumsum([0, *(activates_tokens(n) for n in nodes)])
    if mixes[period] < 2 or activates[period] < 2:
        return None

    def is_block(first: int, last: int) -> bool:
        within = (first % period, first % period + last - first)
        return all(counts[within[1]] > counts[within[0]] for counts in (mixes, activates))

    def is_layout(first: int, last: int) -> bool:
        within = nodes[first % period : first % period + last - first]
        return all(name_of(node) in LAYOUT for node in within)

    best: tuple[tuple[int, ...], _Division] | None = None
    for rotation in cuts:
        ends = [c - rotation if c > rotation else c + period - rotation for c in cuts]
        pieces, leftover, at = [], [], 0
        for end in sorted(ends):
            if is_block(rotation + at, rotation + end):
                pieces.append((rotation + at, rotation + end))
                at = end
            elif is_layout(rotation + at, rotation + end):
                at = end
        if at < period:
            leftover.append((rotation + at, rotation + period))
        labels = Counter(_labels(program, second, period, *piece) for piece in pieces)
        whole = sum(len(list(_repeated(p, start, stop, period))) for p in pieces)
        score = len(pieces), max(labels.values(), default=0), whole, -(period - at)
        if len(pieces) > 1 and (best is None or score > best[0]):
            best = score, _Division(tuple(pieces), tuple(leftover))
    return best[1] if best else None


def _labels(program: Program, second: int, period: int, first: int, last: int) -> bytes:
    # A rotated piece may reach into the next period: its labels are those one period before.
    start = second - period + first
    return program.labels[start : start + last - first].tobytes()


def _live(program: Program, cut: int, period: int) -> int:
    """Count what was made in the period before `cut` and is read behind it."""
    return int(np.count_nonzero(program.last_use[cut - period : cut] >= cut))


def _list_of(program: Program, spans: list[Span], width: int, period: int) -> BlockList:
    """Return a list of spans, with the `width` tensors that enter and leave each."""
    # What enters is plain to see in the last block of a kind; in the first, what was made
    # last may be a mask. The others read at the same places.
    last = {_labels_of(program, span): span for span in spans}
    entering = {key: _entering(program, span, period, width) for key, span in last.items()}
    inputs = []
    for span in spans:
        key = _labels_of(program, span)
        inputs.append([_counterpart(program, n, last[key], span) for n in entering[key]])
    outputs = [_leaving(program, s, values) for s, values in zip(spans, inputs, strict=True)]
    streams = tuple(
        Stream(tuple(values[i] for values in inputs), tuple(values[i] for values in outputs))
        for i in range(width)
    )
    return BlockList(program, tuple(spans), streams)


def _labels_of(program: Program, span: Span) -> bytes:
    return program.labels[span.start : span.stop].tobytes()


def _counterpart(
    program: Program, node: fx.Node | None, template: Span, span: Span
) -> fx.Node | None:
    """Return what `span` reads where its twin `template` reads `node`."""
    for offset in range(len(template)):
        edges = program.edges[template.start + offset]
        if node in edges:
            return program.edges[span.start + offset][edges.index(node)]
    return None


def _entering(program: Program, span: Span, period: int, width: int) -> list[fx.Node | None]:
    """Return the values that the operations of a span read and that were made last."""
    read = [n for n in program.live_in(span) if n.op != "placeholder"]
    recent = [n for n in read if span.start - program.at(n) <= period] or read
    chosen = sorted(recent, key=program.at)[-width:]
    return [*chosen, *[None] * (width - len(chosen))]


def _leaving(
    program: Program, span: Span, inputs: list[fx.Node | None]
) -> list[fx.Node | None]:
    """Return, for each value that enters, the one that leaves in its place."""
    left = program.live_out(span)
    outputs: list[fx.Node | None] = []
    for node in inputs:
        same = [
            n
            for n in left
            if node is not None
            and shape_of(n) == shape_of(node)
            and value_of(n).dtype == value_of(node).dtype
        ]
        chosen = same[-1] if same else (left[-1] if left else None)
        if chosen is not None:
            left.remove(chosen)
        outputs.append(chosen)
    return outputs
