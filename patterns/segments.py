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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
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

Values = list[fx.Node]


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
    pieces: list[list[Span]] = [
        list(_repeated(piece, start, stop, period)) for piece in division.pieces
    ]
    entering = [_entering(program, spans, period) for spans in pieces]
    everywhere = [span for spans in pieces for span in spans]
    sources = [
        {
            position
            for node in values[-1]
            for position in _sources(
                program, node, Span(spans[-1].start - period, spans[-1].start), everywhere
            )
        }
        for spans, values in zip(pieces, entering, strict=True)
    ]
    flows = _flows(sources, pieces)
    # All blocks of a list carry the same streams. What works on one of two for a while is a
    # part of a block: RIN's latents read tokens, compute and write back.
    for flow in flows:
        widths = {len(entering[i][-1]) for i in flow}
        if len(widths) > 1 or 0 in widths or not _is_chain(sources, pieces, flow):
            return [blocks]
        if not all(_joins(program, entering[i][-1], pieces[i][-1]) for i in flow):
            return [blocks]
    # Blocks on one stream are one list, whatever they do; space and time differ in shape,
    # and stacks side by side in the streams.
    groups: dict[Any, dict[Span, Values]] = {}
    for number, flow in enumerate(flows):
        for i in flow:
            key = number, *(shape_of(node) for node in entering[i][-1])
            groups.setdefault(key, {}).update(zip(pieces[i], entering[i], strict=True))
    lists = [_list_of(program, group) for group in groups.values()]
    for piece in division.leftover:
        spans = list(_repeated(piece, start, stop, period))
        inside = program.span_nodes(spans[0])
        if any(map(mixes_tokens, inside)) and sum(map(is_matmul, inside)) > 1:
            values = _entering(program, spans, period)
            lists.append(_list_of(program, dict(zip(spans, values, strict=True))))
    return [found for found in lists if found.streams]


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


def _entering(program: Program, spans: list[Span], period: int) -> list[Values]:
    """Return, for each repeat of a piece, the carried values that it reads.

    Carried is what the last repeat reads of the period before it, the others by the same
    edges: the first reads there what was made before the list.
    """
    last = spans[-1]
    edges: dict[fx.Node, tuple[int, int]] = {}
    for offset in range(len(last)):
        for edge, producer in enumerate(program.edges[last.start + offset]):
            if 0 < last.start - program.at(producer) <= period and producer.op != "placeholder":
                edges.setdefault(producer, (offset, edge))
    read = [edges[node] for node in sorted(edges, key=program.at)]
    return [[program.edges[s.start + offset][edge] for offset, edge in read] for s in spans]


def _flows(sources: list[set[int]], pieces: list[list[Span]]) -> list[list[int]]:
    """Sort the pieces of a period by the streams they share: mostly into one group."""
    links = nx.Graph()
    links.add_nodes_from(range(len(pieces)))
    for i, positions in enumerate(sources):
        for j, spans in enumerate(pieces):
            if any(position in span for position in positions for span in spans):
                links.add_edge(i, j)
    return [sorted(group) for group in nx.connected_components(links)]


def _is_chain(sources: list[set[int]], pieces: list[list[Span]], flow: list[int]) -> bool:
    """Tell whether each piece of a flow reads what the piece right before it made.

    Else they are parts of one block: two streams that meet only where it begins.
    """
    spans = sorted((s for i in flow for s in pieces[i]), key=lambda s: s.start)
    for i in flow:
        before = spans.index(pieces[i][-1]) - 1
        if before >= 0 and not any(position in spans[before] for position in sources[i]):
            return False
    return True


def _joins(program: Program, streams: Values, span: Span) -> bool:
    """Tell whether all streams meet in `span`, each on its way through a matrix product.

    A stream that passes by, or streams worked on side by side, are a part of a block.
    """
    reached = [_reached(program, node, span) for node in streams]
    return bool(set.intersection(*reached)) and all(any(map(is_matmul, r)) for r in reached)


def _reached(program: Program, node: fx.Node, span: Span) -> set[fx.Node]:
    """Return the operations in `span` that depend on `node`."""
    queue, seen = [node], set[fx.Node]()
    while queue:
        fresh = {u for u in queue.pop().users if program.at(u) in span} - seen
        seen |= fresh
        queue += fresh
    return seen


def _sources(program: Program, node: fx.Node, recent: Span, spans: list[Span]) -> Iterator[int]:
    """Yield the positions in `spans` from which glue makes `node`, or that of `node`."""
    queue, seen = [node], {node}
    while queue:
        current = queue.pop()
        position = program.at(current)
        if position not in recent:
            continue
        if any(position in span for span in spans):
            yield position
            continue
        fresh = [n for n in current.all_input_nodes if n not in seen]
        seen.update(fresh)
        queue += fresh


def _list_of(program: Program, entering: dict[Span, Values]) -> BlockList:
    """Return the list of the spans with the values that enter them."""
    spans = sorted(entering, key=lambda span: span.start)
    inputs = [entering[span] for span in spans]
    following: list[Sequence[fx.Node | None]] = [*inputs[1:], [None] * len(inputs[0])]
    outputs = [
        _leaving(program, span, values, after)
        for span, values, after in zip(spans, inputs, following, strict=True)
    ]
    streams = tuple(
        Stream(tuple(values[i] for values in inputs), tuple(values[i] for values in outputs))
        for i in range(len(inputs[0]))
    )
    return BlockList(program, tuple(spans), streams)


def _leaving(
    program: Program, span: Span, inputs: Sequence[fx.Node], following: Sequence[fx.Node | None]
) -> list[fx.Node | None]:
    """Return, for each value that enters, the one that leaves in its place.

    It is what the next block reads there; behind the last block, what has the same form.
    """
    left = program.live_out(span)
    outputs: list[fx.Node | None] = []
    for node, after in zip(inputs, following, strict=True):
        same = [
            n
            for n in left
            if shape_of(n) == shape_of(node) and value_of(n).dtype == value_of(node).dtype
        ]
        chosen = same[-1] if same else (left[-1] if left else None)
        if after in left:
            chosen = after
        if chosen is not None:
            left.remove(chosen)
        outputs.append(chosen)
    return outputs
