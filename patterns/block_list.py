"""Lists of repeated blocks: where they start, how often, what flows between them.

    h0 -> [block 0] -> h1 -> [block 1] -> h2 -> ...       each with its own weights

A run of repeated labels is only a candidate. It becomes a `BlockList` when its edges agree
too: inside one period every edge maps onto the same edge one period later, or comes from
the period before (a stream), from before the list and the same for all (an invariant), or
from before the list and different for each (weights, per-block inputs). A period has no
natural start; the cut with the fewest live tensors is taken.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx

from stepfx.patterns.program import Program, Span, is_static, is_tensor, value_of
from stepfx.patterns.repeats import Repeat, find_repeats, shorter_periods

SlotKind = Literal["stream", "invariant", "weight", "input"]

MATMULS = frozenset(
    {
        F.linear,
        F.scaled_dot_product_attention,
        torch._C._nn.linear,
        torch.addmm,
        torch.baddbmm,
        torch.bmm,
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.einsum,
        torch.matmul,
        torch.mm,
        operator.matmul,
        "matmul",
        "bmm",
    }
)
ADDS = frozenset({operator.add, operator.iadd, torch.add, "add", "add_"})


@dataclass(frozen=True)
class Slot:
    """One input of a block: what each block of the list reads there."""

    kind: SlotKind
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Stream:
    """A tensor carried from block to block.

    `offset` is the operation of a block that makes the outgoing value, `entry` the value
    before the first block, `outputs` the value after each block (None where a variant
    block does not make it).
    """

    offset: int
    entry: fx.Node
    outputs: tuple[fx.Node | None, ...]


@dataclass(frozen=True)
class BlockList:
    """Blocks in the order they run.

    The first `regular` blocks are the same operations on other tensors; blocks after them
    are variants (the last block of SD3 drops a stream, that of FLUX a dead `getitem`).
    `edge_slots` maps (offset, edge) of a regular block to its slot; `outputs` are the
    offsets whose results leave the block.
    """

    spans: tuple[Span, ...]
    regular: int
    streams: tuple[Stream, ...]
    slots: tuple[Slot, ...]
    outputs: tuple[int, ...]
    edge_slots: dict[tuple[int, int], int] = field(repr=False)

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def span(self) -> Span:
        """The positions from the first block's first operation to the last block's end."""
        return Span(self.spans[0].start, self.spans[-1].stop)

    @property
    def period(self) -> int:
        """Operations in a regular block."""
        return len(self.spans[0])

    def invariants(self) -> list[fx.Node]:
        """Return the tensors that every block reads unchanged."""
        return [slot.nodes[0] for slot in self.slots if slot.kind == "invariant"]


def find_block_lists(program: Program) -> list[BlockList]:
    """Return the block lists of a graph in the order they run."""
    runs = find_repeats(program.labels)
    accepted: list[BlockList] = []
    for found in runs:
        run = _outside(found, accepted)
        if run is None:
            continue
        after = (b.span.start for b in accepted if b.span.start >= run.stop)
        limit = min(after, default=len(program))
        for shorter in shorter_periods(run, runs):
            candidate = _outside(shorter, accepted)
            if candidate is None:
                continue
            blocks = match_block_list(program, candidate, limit)
            if blocks is not None:
                accepted.append(blocks)
                break
    return sorted(accepted, key=lambda blocks: blocks.span.start)


def _outside(run: Repeat, accepted: list[BlockList]) -> Repeat | None:
    """Return the longest part of `run` beside the accepted lists, if two periods fit.

    A run may start on the last operation of the list before it, which looks like its own.
    """
    start, parts = run.start, []
    for blocks in sorted(accepted, key=lambda b: b.span.start):
        if blocks.span.overlap(run.span):
            parts.append((start, blocks.span.start))
            start = blocks.span.stop
    parts.append((start, run.stop))
    first, last = max(parts, key=lambda part: part[1] - part[0])
    part = Repeat(first, last, run.period)
    return part if part.count >= 2 else None


def match_block_list(program: Program, run: Repeat, limit: int) -> BlockList | None:
    """Return the block list that `run` holds, or None where its edges disagree.

    The best cuts are tried; the one that gives most blocks, a variant at the end included,
    wins. Nothing at `limit` or behind it is taken.
    """
    nodes = program.nodes[run.start : run.start + run.period]
    if not any(node.target in MATMULS for node in nodes):
        return None
    best: BlockList | None = None
    for phase in _best_phases(program, run):
        bounds = list(range(run.start + phase, run.stop + 1, run.period))
        agreeing = _agreeing_blocks(program, bounds)
        blocks = _describe(program, bounds[: agreeing + 1]) if agreeing >= 2 else None
        if blocks is None:
            continue
        blocks = extend_with_variant(program, blocks, limit)
        if best is None or len(blocks) > len(best):
            best = blocks
    return best


def extend_with_variant(program: Program, blocks: BlockList, limit: int) -> BlockList:
    """Add the block after the regular ones if it is one of them cut short or changed.

    The operations behind the list are aligned with a regular block. They are a block when
    half of its matrix products align and the value of a stream does.
    """
    template, start = blocks.spans[0], blocks.span.stop
    window = Span(start, min(start + template_window(len(template)), limit))
    aligned = _align(program, template, window)
    matmuls = [
        offset
        for offset, node in enumerate(program.span_nodes(template))
        if node.target in MATMULS
    ]
    made = [aligned[s.offset] for s in blocks.streams if s.offset in aligned]
    if not made or 2 * sum(offset in aligned for offset in matmuls) < len(matmuls):
        return blocks
    span = Span(start, max(made) + 1)
    incoming = {stream.outputs[-1] for stream in blocks.streams}
    if incoming.isdisjoint(program.live_in(span)):
        return blocks
    streams = tuple(
        replace(
            stream,
            outputs=(
                *stream.outputs,
                program.nodes[aligned[stream.offset]] if stream.offset in aligned else None,
            ),
        )
        for stream in blocks.streams
    )
    return replace(blocks, spans=(*blocks.spans, span), streams=streams)


def template_window(period: int) -> int:
    """How far behind the list its variant block is looked for."""
    return period + period // 4 + 4


def _align(program: Program, template: Span, window: Span) -> dict[int, int]:
    """Map offsets of `template` to positions in `window` with the same label, in order."""
    labels = program.labels
    matcher = SequenceMatcher(
        None,
        labels[template.start : template.stop].tolist(),
        labels[window.start : window.stop].tolist(),
        autojunk=False,
    )
    return {
        match.a + i: window.start + match.b + i
        for match in matcher.get_matching_blocks()
        for i in range(match.size)
    }


def _best_phases(program: Program, run: Repeat, most: int = 4) -> list[int]:
    """Return where in the period to cut: most blocks, fewest live tensors, after an add."""
    start, stop, period = run.start, run.stop, run.period
    live = _live_within_period(program, run)
    phases: list[tuple[int, int, bool, int]] = []
    for phase in range(period):
        count = (stop - start - phase) // period
        if count < 2:
            break
        cuts = range(start + phase + period, start + phase + period * count, period)
        crossing = max(int(live[cut - start]) for cut in cuts)
        last = program.nodes[cuts[0] - 1]
        phases.append((crossing, -count, last.target not in ADDS, phase))
    fewest = min((crossing for crossing, _, _, _ in phases), default=0)
    if fewest == 0:
        return []  # nothing is carried: these are not blocks
    # One tensor more than the narrowest cut is worth a block: FLUX's single blocks are
    # narrowest inside, between the joint residual add and the split of text and image.
    narrow = sorted(key for key in phases if key[0] <= fewest + 1)
    wider = [key for key in narrow if key[0] == fewest + 1]
    return [phase for *_, phase in (*narrow[: most // 2], *wider[: most // 2])]


def _live_within_period(program: Program, run: Repeat) -> np.ndarray:
    """Count, at each cut of `run`, the tensors made in the period before and read after."""
    change = np.zeros(run.stop - run.start + 2, dtype=np.int64)
    positions = np.arange(run.start, run.stop)
    first = positions + 1
    last = np.minimum(program.last_use[run.start : run.stop], positions + run.period)
    last = np.minimum(last, run.stop)
    used = last >= first
    np.add.at(change, first[used] - run.start, 1)
    np.add.at(change, last[used] + 1 - run.start, -1)
    return np.cumsum(change)


def _edge_kind(program: Program, bounds: list[int], block: int, producer: fx.Node) -> object:
    """Describe a producer relative to its block, so that equal edges compare equal."""
    position = program.at(producer)
    if position >= bounds[block]:
        return "inside", position - bounds[block]
    if block > 0 and position >= bounds[block - 1]:
        return "stream", position - bounds[block - 1]
    if position >= bounds[0]:
        return "skip", block, position  # from an earlier block: equal to nothing
    return "outside"


def _agreeing_blocks(program: Program, bounds: list[int]) -> int:
    """Count the leading blocks whose edges are those of the second block."""
    period = bounds[1] - bounds[0]
    template = [
        [_edge_kind(program, bounds, 1, e) for e in program.edges[bounds[1] + offset]]
        for offset in range(period)
    ]
    for block in range(len(bounds) - 1):
        for offset, expected in enumerate(template):
            edges = program.edges[bounds[block] + offset]
            for producer, kind in zip(edges, expected, strict=True):
                found = _edge_kind(program, bounds, block, producer)
                enters = block == 0 and isinstance(kind, tuple) and kind[0] == "stream"
                if found != ("outside" if enters else kind):
                    return block
    return len(bounds) - 1


def _describe(program: Program, bounds: list[int]) -> BlockList | None:
    """Collect slots, streams and outputs of blocks whose edges are known to agree."""
    period, count = bounds[1] - bounds[0], len(bounds) - 1
    slots: dict[tuple[fx.Node, ...], Slot] = {}
    numbers: dict[tuple[fx.Node, ...], int] = {}
    edge_slots: dict[tuple[int, int], int] = {}
    entries: dict[int, fx.Node] = {}
    for offset in range(period):
        for edge, producer in enumerate(program.edges[bounds[1] + offset]):
            if program.at(producer) >= bounds[1]:
                continue
            nodes = tuple(program.edges[b + offset][edge] for b in bounds[:-1])
            position = program.at(producer)
            carried = position >= bounds[0]
            if carried:
                entries.setdefault(position - bounds[0], nodes[0])
            if nodes not in slots:
                numbers[nodes] = len(slots)
                slots[nodes] = Slot("stream" if carried else _slot_kind(nodes), nodes)
            edge_slots[offset, edge] = numbers[nodes]
    if not entries or not all(is_tensor(value_of(node)) for node in entries.values()):
        return None
    if not _chains(program, bounds, set(entries)):
        return None
    spans = tuple(Span(a, b) for a, b in itertools.pairwise(bounds))
    outputs = sorted(
        {program.at(node) - span.start for span in spans for node in program.live_out(span)}
    )
    streams = tuple(
        Stream(offset, entry, tuple(program.nodes[b + offset] for b in bounds[:-1]))
        for offset, entry in sorted(entries.items())
    )
    return BlockList(spans, count, streams, tuple(slots.values()), tuple(outputs), edge_slots)


def _chains(program: Program, bounds: list[int], offsets: set[int]) -> bool:
    """Tell whether what leaves a block is computed from what enters it.

    Else the cut goes through the middle of things that stand side by side (experts).
    """
    reached: set[int] = set()
    for offset in range(bounds[1] - bounds[0]):
        producers = (program.at(e) for e in program.edges[bounds[1] + offset])
        if any(bounds[0] <= p < bounds[1] or p - bounds[1] in reached for p in producers):
            reached.add(offset)
    return offsets <= reached


def _slot_kind(nodes: tuple[fx.Node, ...]) -> SlotKind:
    if all(node is nodes[0] for node in nodes):
        return "invariant"
    return "weight" if all(is_static(node) for node in nodes) else "input"
