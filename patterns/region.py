"""The stack of blocks that a gate may skip.

    prologue | block 0 ... block n-1 | epilogue
              ^ region               ^

The region is the block list that does most of the matrix products on a tensor computed
from the latent, with the lists beside it that carry on the same streams (FLUX's double and
single blocks). Helper lists (token refiners) stay outside.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from stepfx.patterns.block_list import MATMULS, BlockList
from stepfx.patterns.inputs import Inputs
from stepfx.patterns.program import Program, Span

MIN_BLOCKS = 3


@dataclass(frozen=True)
class Miss:
    """Why a pattern is not there, in words for a user."""

    reason: str


@dataclass(frozen=True)
class Region:
    """Block lists that run one after the other, under one gate.

    `image[i]` are the streams of list i that carry the latent; `followed` maps every
    stream value inside the region to the stream of the first list that it continues.
    """

    lists: tuple[BlockList, ...]
    image: tuple[tuple[int, ...], ...]
    followed: dict[fx.Node, int]

    @property
    def span(self) -> Span:
        """From the first block to the last, glue between lists included."""
        return Span(self.lists[0].span.start, self.lists[-1].span.stop)

    def blocks(self) -> list[Span]:
        """Return the spans of all blocks in the order they run."""
        return [span for blocks in self.lists for span in blocks.spans]


def find_region(program: Program, lists: list[BlockList], inputs: Inputs) -> Region | Miss:
    """Return the region that a gate may skip, or why there is none."""
    if not lists:
        return Miss("no repeated blocks were found in the graph")
    if not inputs.latents:
        return Miss(
            "no output has the shape of an input, so the latent could not be identified"
        )
    reached = program.reachable_from(list(inputs.latents))
    main = [any(s.entry in reached for s in blocks.streams) for blocks in lists]
    if not any(main):
        return Miss("no block list carries a tensor that is computed from the latent")
    anchor = max(
        (i for i in range(len(lists)) if main[i]), key=lambda i: _work(program, lists[i])
    )
    first = last = anchor
    while first > 0 and main[first - 1] and _touch(lists[first - 1], lists[first]):
        first -= 1
    while last + 1 < len(lists) and main[last + 1] and _touch(lists[last], lists[last + 1]):
        last += 1
    chosen = tuple(lists[first : last + 1])
    count = sum(len(blocks) for blocks in chosen)
    if count < MIN_BLOCKS:
        return Miss(f"the main stack has {count} blocks; a gate needs at least {MIN_BLOCKS}")
    followed = _follow_streams(chosen)
    span = Span(chosen[0].span.start, chosen[-1].span.stop)
    leaving = {followed.get(node) for node in program.live_out(span)}
    entering = [i for i, s in enumerate(chosen[0].streams) if s.entry in reached]
    # CogVideoX embeds text and latent in one tensor and splits it: both streams come from
    # the latent, but only one reaches the output.
    wanted = [i for i in entering if i in leaving] or entering
    image = tuple(_image_streams(blocks, wanted, followed) for blocks in chosen)
    return Region(chosen, image, followed)


def _work(program: Program, blocks: BlockList) -> int:
    nodes = program.span_nodes(blocks.span)
    return sum(node.target in MATMULS for node in nodes)


def _touch(before: BlockList, after: BlockList) -> bool:
    """Tell whether only glue lies between two lists, less than half a block of it."""
    gap = after.span.start - before.span.stop
    return gap < min(before.period, after.period) // 2


def _follow_streams(lists: tuple[BlockList, ...]) -> dict[fx.Node, int]:
    """Map each value of a stream to the stream of the first list that it continues.

    A stream that glue makes anew (a concatenation of text and image) continues none.
    """
    followed: dict[fx.Node, int] = {}
    for number, blocks in enumerate(lists):
        for i, stream in enumerate(blocks.streams):
            origin = i if number == 0 else followed.get(stream.entry)
            if origin is not None:
                values = (stream.entry, *stream.outputs)
                followed.update((node, origin) for node in values if node is not None)
    return followed


def _image_streams(
    blocks: BlockList, wanted: list[int], followed: dict[fx.Node, int]
) -> tuple[int, ...]:
    """Return the streams of a list that continue a wanted one; all if none does."""
    mine = [i for i, s in enumerate(blocks.streams) if followed.get(s.entry) in wanted]
    return tuple(mine or range(len(blocks.streams)))
