"""The stack of blocks that a gate may skip.

    prologue | block 0 ... block n-1 | epilogue
              ^ region               ^

The region is the block list that does most of the matrix products on a tensor computed
from the latent, with the lists beside it that carry on its streams (FLUX's double and
single blocks) or take turns with it (Latte's space and time). Helper lists (token refiners,
face adapters) are no blocks of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from stepfx.patterns.block_list import BlockList
from stepfx.patterns.inputs import Inputs
from stepfx.patterns.operations import activates_tokens, is_matmul, mixes_tokens
from stepfx.patterns.program import Program, Span, shape_of, value_of
from stepfx.patterns.storages import computed_from

MIN_BLOCKS = 3


@dataclass(frozen=True)
class Miss:
    """Why a pattern is not there, in words for a user."""

    reason: str


@dataclass(frozen=True)
class Block:
    """One block of a region: `index` within list `number` of the region."""

    number: int
    index: int
    span: Span


@dataclass(frozen=True)
class Region:
    """Block lists that run one after the other or in turn, under one gate.

    `origins[n][i]` says which tensor stream i of list n continues: streams of the same
    origin are one tensor on its way through the region. `image` are the origins that carry
    the latent.
    """

    program: Program = field(repr=False, compare=False)
    lists: tuple[BlockList, ...]
    origins: tuple[tuple[int, ...], ...]
    image: frozenset[int]

    @property
    def span(self) -> Span:
        """From the first block to the last, glue between them included."""
        blocks = self.blocks()
        return Span(blocks[0].span.start, blocks[-1].span.stop)

    def blocks(self) -> list[Block]:
        """Return all blocks in the order they run."""
        found = [
            Block(number, index, span)
            for number, blocks in enumerate(self.lists)
            for index, span in enumerate(blocks.spans)
        ]
        return sorted(found, key=lambda block: block.span.start)

    def values_at(self, cut: int) -> dict[int, fx.Node]:
        """Return the latest value of each origin at a cut of the program.

        Where glue changed a stream before its next block, it is what that block reads.
        """
        values: dict[int, tuple[int, fx.Node]] = {}
        for blocks, origins in zip(self.lists, self.origins, strict=True):
            for stream, origin in zip(blocks.streams, origins, strict=True):
                for node in (*stream.inputs, *stream.outputs):
                    made = cut if node is None else self.program.at(node)
                    if made < cut and made >= values.get(origin, (-1, None))[0]:
                        assert node is not None
                        values[origin] = made, node
        return {origin: node for origin, (_, node) in values.items()}

    def watched_behind(self, block: Block) -> dict[int, tuple[fx.Node, fx.Node]]:
        """Return, for each image stream, its first value and the one behind `block`.

        A stream that changed shape on the way is watched through this block alone.
        """
        blocks, origins = self.lists[block.number], self.origins[block.number]
        watched = {}
        for stream, origin in zip(blocks.streams, origins, strict=True):
            if origin not in self.image and self.image & {*origins}:
                continue
            value = stream.outputs[block.index]
            for before in (self._first(origin), stream.inputs[block.index]):
                if value is not None and before is not None and _same_form(before, value):
                    watched[origin] = before, value
                    break
        return watched

    def _first(self, origin: int) -> fx.Node:
        for blocks, origins in zip(self.lists, self.origins, strict=True):
            if origin in origins:
                return blocks.streams[origins.index(origin)].entry
        raise KeyError(origin)

    def origin_of(self) -> dict[fx.Node, int]:
        """Map each value of a stream to its origin."""
        return {
            node: origin
            for blocks, origins in zip(self.lists, self.origins, strict=True)
            for stream, origin in zip(blocks.streams, origins, strict=True)
            for node in (*stream.inputs, *stream.outputs)
            if node is not None
        }


def find_region(
    program: Program,
    lists: list[BlockList],
    inputs: Inputs,
    chosen: Sequence[int] | None = None,
) -> Region | Miss:
    """Return the region that a gate may skip, or why there is none.

    `chosen` are numbers of lists that a user wants under the gate; None lets the graph
    decide.
    """
    if not lists:
        return Miss("no repeated blocks were found in the graph")
    reached = computed_from(program, inputs.latents)
    if not any(s.entry in reached for blocks in lists for s in blocks.streams):
        reached = set()  # a latent that no block sees is none
    if chosen is not None:
        unknown = [number for number in chosen if not 0 <= number < len(lists)]
        if unknown:
            return Miss(
                f"gate_lists names block list {unknown[0]}, but the lists are numbered 0 to "
                f"{len(lists) - 1}"
            )
        members = tuple(lists[number] for number in sorted(set(chosen)))
    else:
        members = _automatic(program, lists, reached)
    count = sum(len(blocks) for blocks in members)
    if count < MIN_BLOCKS:
        return Miss(f"the main stack has {count} blocks; a gate needs at least {MIN_BLOCKS}")
    origins = _origins(program, members)
    region = Region(program, members, origins, frozenset())
    image = _image(program, region, reached)
    return Region(program, members, origins, image)


def _same_form(a: fx.Node, b: fx.Node) -> bool:
    return shape_of(a) == shape_of(b) and value_of(a).dtype == value_of(b).dtype


def is_whole_block(program: Program, blocks: BlockList) -> bool:
    """Tell whether blocks mix tokens and run an MLP: more than an adapter between blocks."""
    nodes = program.span_nodes(blocks.spans[0])
    return any(map(mixes_tokens, nodes)) and any(map(activates_tokens, nodes))


def _automatic(
    program: Program, lists: list[BlockList], reached: set[fx.Node]
) -> tuple[BlockList, ...]:
    """Return the main list with those that carry on its streams or take turns with it."""
    # Without a latent (a model behind a graph break is given hidden states) work decides.
    main = [b for b in lists if not reached or any(s.entry in reached for s in b.streams)]
    if not main:
        return ()
    anchor = max(main, key=lambda blocks: _work(program, blocks))
    members = [anchor]
    for blocks in main:
        between = blocks is not anchor and anchor.span.overlap(blocks.span)
        if between and is_whole_block(program, blocks):
            members.append(blocks)
    outside = [b for b in main if not anchor.span.overlap(b.span)]
    for blocks in reversed([b for b in outside if b.span.stop <= anchor.span.start]):
        if not goes_on(program, blocks, members[0]):
            break
        members.insert(0, blocks)
    for blocks in [b for b in outside if b.span.start >= anchor.span.stop]:
        if not goes_on(program, members[-1], blocks):
            break
        members.append(blocks)
    return tuple(sorted(members, key=lambda blocks: blocks.span.start))


def _work(program: Program, blocks: BlockList) -> int:
    return sum(map(is_matmul, program.span_nodes(blocks.span)))


def goes_on(program: Program, before: BlockList, after: BlockList) -> bool:
    """Tell whether `after` takes up streams of `before`, less than half a block behind it."""
    gap = Span(before.span.stop, after.span.start)
    if gap.start > gap.stop or len(gap) >= min(before.period, after.period) // 2:
        return False
    left = {stream.outputs[-1] for stream in before.streams}
    return any(_derives(program, stream.entry, left, gap) for stream in after.streams)


def _derives(program: Program, node: fx.Node, sources: set[fx.Node | None], gap: Span) -> bool:
    """Tell whether operations in `gap` make `node` of one of `sources`, or it is one."""
    queue, seen = [node], {node}
    while queue:
        current = queue.pop()
        if current in sources:
            return True
        if program.at(current) in gap:
            fresh = [n for n in current.all_input_nodes if n not in seen]
            seen.update(fresh)
            queue += fresh
    return False


def _origins(program: Program, lists: tuple[BlockList, ...]) -> tuple[tuple[int, ...], ...]:
    """Number the tensors that streams continue.

    A stream that glue makes anew (a concatenation of text and image) has a new number.
    """
    known: dict[fx.Node, int] = {}
    numbers, count = [], 0
    for blocks in lists:
        mine = []
        for stream in blocks.streams:
            origin = known.get(stream.entry)
            if origin is None or origin in mine:
                origin, count = count, count + 1
            mine.append(origin)
            values = (*stream.inputs, *stream.outputs)
            known.update((node, origin) for node in values if node is not None)
        numbers.append(tuple(mine))
    return tuple(numbers)


def _image(program: Program, region: Region, reached: set[fx.Node]) -> frozenset[int]:
    """Return the origins of streams that come from the latent and leave the region."""
    of = region.origin_of()
    entering = {
        origin
        for blocks, origins in zip(region.lists, region.origins, strict=True)
        for stream, origin in zip(blocks.streams, origins, strict=True)
        if not reached or stream.entry in reached
    }
    leaving = {of[node] for node in program.live_out(region.span) if node in of}
    # CogVideoX embeds text and latent in one tensor and splits it: both streams come from
    # the latent, but only one reaches the output.
    first = set(region.origins[0])
    for wanted in (entering & leaving & first, entering & first, first):
        if wanted:
            return frozenset(wanted | (entering & leaving))
    return frozenset()
