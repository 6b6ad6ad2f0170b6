"""Lists of repeated blocks: where they start, how often, what flows between them.

    h0 -> [block 0] -> h1 -> [block 1] -> h2 -> ...       each with its own weights

Found in four steps, each in a module of its own:

    repeats.py    runs of the program that look alike, one period later
    regular.py    a run whose edges agree too, cut where the fewest tensors live
    segments.py   a period that holds more than one block (space and time, long cycles)
    variants.py   a changed block at an end; lists that go on in another kind of block

All blocks of a list carry the same streams. Blocks that are the same operations on other
tensors are of one kind.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from stepfx.patterns.program import Program, Span, is_static, shape_of

SlotKind = Literal["stream", "invariant", "weight", "input"]


@dataclass(frozen=True)
class Slot:
    """One input of a kind of block: what each of its blocks reads there."""

    kind: SlotKind
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class BlockKind:
    """Spans of a program that are the same operations on other tensors.

    `members` are indices into the spans that were compared. `edge_slots` maps (offset, edge)
    of an operation to the slot it reads; `outputs` are the offsets whose results are read
    behind the span, by any member.
    """

    members: tuple[int, ...]
    slots: tuple[Slot, ...]
    outputs: tuple[int, ...]
    edge_slots: dict[tuple[int, int], int] = field(repr=False)


@dataclass(frozen=True)
class Stream:
    """A tensor carried from block to block.

    `inputs[k]` is its value where block k begins, `outputs[k]` where it ends: the next
    block's input, but for glue between them. None where a changed block has no such value.
    """

    inputs: tuple[fx.Node | None, ...]
    outputs: tuple[fx.Node | None, ...]

    @property
    def entry(self) -> fx.Node:
        """The value before the first block."""
        assert self.inputs[0] is not None
        return self.inputs[0]


@dataclass(frozen=True)
class BlockList:
    """Blocks in the order they run; there may be glue between them."""

    program: Program = field(repr=False, compare=False)
    spans: tuple[Span, ...]
    streams: tuple[Stream, ...]

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def span(self) -> Span:
        """The positions from the first block's first operation to the last block's end."""
        return Span(self.spans[0].start, self.spans[-1].stop)

    @functools.cached_property
    def kinds(self) -> tuple[BlockKind, ...]:
        """The kinds of blocks, the most frequent first."""
        return group_kinds(self.program, self.spans, self._stream_values())

    @property
    def period(self) -> int:
        """Operations in a block of the most frequent kind."""
        return len(self.spans[self.kinds[0].members[0]])

    def invariants(self) -> list[fx.Node]:
        """Return the tensors that every block of the main kind reads unchanged."""
        return [slot.nodes[0] for slot in self.kinds[0].slots if slot.kind == "invariant"]

    def _stream_values(self) -> set[fx.Node]:
        return {
            node
            for stream in self.streams
            for node in (*stream.inputs, *stream.outputs)
            if node is not None
        }


def group_kinds(
    program: Program,
    spans: Sequence[Span],
    streams: Collection[fx.Node] = (),
    kept: Collection[fx.Node] = (),
) -> tuple[BlockKind, ...]:
    """Sort spans by what they compute: labels, numbers, shapes and inner edges.

    `streams` are the values to be named streams among the inputs, `kept` operations whose
    results are outputs though nothing behind their span reads them.
    """
    groups: dict[Any, list[int]] = {}
    for i, span in enumerate(spans):
        groups.setdefault(_structure(program, span), []).append(i)
    kinds = [_kind(program, spans, members, streams, kept) for members in groups.values()]
    return tuple(sorted(kinds, key=lambda kind: -len(kind.members)))


def _structure(program: Program, span: Span) -> Any:
    """Return what two spans must share to be called with one piece of code."""
    inner = tuple(
        tuple(
            position - span.start if (position := program.at(e)) in span else -1
            for e in program.edges[i]
        )
        for i in range(span.start, span.stop)
    )
    # Under dynamic shapes equal traced sizes may be unequal symbols.
    shapes = str([shape_of(node) for node in program.span_nodes(span)])
    constants = repr(program.constants[span.start : span.stop])
    labels = program.labels[span.start : span.stop].tobytes()
    return labels, constants, _renumbered(shapes), inner


def _renumbered(shapes: str) -> str:
    """Number the sizes that depend on data anew, in the order in which they occur.

    Each block that counts the tokens of a mask makes a size of its own: u3, u7, u11.
    """
    found: dict[str, str] = {}
    return re.sub(r"\bu\d+\b", lambda m: found.setdefault(m[0], f"u_{len(found)}"), shapes)


def _kind(
    program: Program,
    spans: Sequence[Span],
    members: list[int],
    streams: Collection[fx.Node],
    kept: Collection[fx.Node],
) -> BlockKind:
    mine = [spans[i] for i in members]
    slots: dict[tuple[fx.Node, ...], int] = {}
    edge_slots: dict[tuple[int, int], int] = {}
    for offset in range(len(mine[0])):
        for edge, producer in enumerate(program.edges[mine[0].start + offset]):
            if program.at(producer) in mine[0]:
                continue
            nodes = tuple(program.edges[span.start + offset][edge] for span in mine)
            edge_slots[offset, edge] = slots.setdefault(nodes, len(slots))
    outputs = sorted(
        {
            program.at(node) - span.start
            for span in mine
            for node in (*program.live_out(span), *(n for n in kept if program.at(n) in span))
        }
    )
    kinds = tuple(Slot(_slot_kind(nodes, streams), nodes) for nodes in slots)
    return BlockKind(tuple(members), kinds, tuple(outputs), edge_slots)


def _slot_kind(nodes: tuple[fx.Node, ...], streams: Collection[fx.Node]) -> SlotKind:
    if all(is_static(node) for node in nodes):
        return "weight" if len(set(nodes)) > 1 or len(nodes) == 1 else "invariant"
    # In the first block a stream may come from where an invariant does.
    if all(node in streams for node in nodes[-1:]):
        return "stream"
    return "invariant" if len(set(nodes)) == 1 else "input"
