"""Blocks that are alike: a run of repeated labels, cut where the fewest tensors live.

A run is only a candidate. It becomes a list when its edges agree too: inside one period
every edge maps onto the same edge one period later, or comes from the period before (a
stream), from before the list and the same for all (an invariant), or from before the list
and different for each (weights, per-block inputs). A period has no natural start; the cut
with the fewest live tensors is taken.
"""

from __future__ import annotations

import itertools

import numpy as np
from torch import fx

from stepfx.patterns.block_list import BlockList, Stream
from stepfx.patterns.operations import ADDS, is_matmul
from stepfx.patterns.program import IntArray, Program, Span, is_tensor, value_of
from stepfx.patterns.repeats import Repeat
from stepfx.patterns.variants import extend_behind


def match_block_list(program: Program, run: Repeat, limit: int) -> BlockList | None:
    """Return the block list that `run` holds, or None where its edges disagree.

    The best cuts are tried; the one that gives most blocks, a changed block at the end
    included, wins. Nothing at `limit` or behind it is taken.
    """
    nodes = program.nodes[run.start : run.start + run.period]
    if not any(map(is_matmul, nodes)):
        return None
    best: tuple[int, BlockList] | None = None
    for phase in _best_phases(program, run):
        bounds = list(range(run.start + phase, run.stop + 1, run.period))
        agreeing = _agreeing_blocks(program, bounds)
        blocks = _describe(program, bounds[: agreeing + 1]) if agreeing >= 2 else None
        if blocks is None:
            continue
        length = len(extend_behind(program, blocks, limit))
        if best is None or length > best[0]:
            best = length, blocks
    return best[1] if best else None


def live_within_period(program: Program, run: Repeat) -> IntArray:
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


def _best_phases(program: Program, run: Repeat, most: int = 4) -> list[int]:
    """Return where in the period to cut: most blocks, fewest live tensors, after an add.

    An end of the run is a likelier cut than its middle: a run reaches past an end of the
    list where the operations there look like the block's own, hardly past both.
    """
    start, stop, period = run.start, run.stop, run.period
    live = live_within_period(program, run)
    phases: list[tuple[int, int, bool, bool, int]] = []
    for phase in range(period):
        count = (stop - start - phase) // period
        if count < 2:
            break
        cuts = range(start + phase + period, start + phase + period * count, period)
        crossing = max(int(live[cut - start]) for cut in cuts)
        last = program.nodes[cuts[0] - 1]
        inner = phase > 0 and start + phase + period * count < stop
        phases.append((crossing, -count, last.target not in ADDS, inner, phase))
    fewest = min((crossing for crossing, *_ in phases), default=0)
    if fewest == 0:
        return []  # nothing is carried: these are not blocks
    # One tensor more than the narrowest cut is worth a block: FLUX's single blocks are
    # narrowest inside, between the joint residual add and the split of text and image.
    narrow = sorted(key for key in phases if key[0] <= fewest + 1)
    wider = [key for key in narrow if key[0] == fewest + 1]
    ends = [key for key in narrow if not key[3]]
    chosen = (*narrow[: most // 2], *wider[: most // 2], *ends[: most // 2])
    return list(dict.fromkeys(phase for *_, phase in chosen))


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
    """Collect the streams of blocks whose edges are known to agree."""
    entries: dict[int, fx.Node] = {}
    for offset in range(bounds[1] - bounds[0]):
        for edge, producer in enumerate(program.edges[bounds[1] + offset]):
            position = program.at(producer)
            if bounds[0] <= position < bounds[1]:
                first = program.edges[bounds[0] + offset][edge]
                entries.setdefault(position - bounds[0], first)
    if not entries or not all(is_tensor(value_of(node)) for node in entries.values()):
        return None
    if not _chains(program, bounds, set(entries)):
        return None
    spans = tuple(Span(a, b) for a, b in itertools.pairwise(bounds))
    streams = []
    for offset, entry in sorted(entries.items()):
        outputs = tuple(program.nodes[b + offset] for b in bounds[:-1])
        streams.append(Stream((entry, *outputs[:-1]), outputs))
    return BlockList(program, spans, tuple(streams))


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
