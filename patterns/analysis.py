"""All that the patterns know of one graph, found once and handed to the passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from stepfx.patterns.block_list import BlockList
from stepfx.patterns.find_blocks import find_block_lists
from stepfx.patterns.forward_pattern import forward_pattern
from stepfx.patterns.inputs import Inputs, find_inputs
from stepfx.patterns.outside import why_outside
from stepfx.patterns.program import Program
from stepfx.patterns.region import Miss, Region, find_region
from stepfx.patterns.storages import writes_outside


@dataclass(frozen=True)
class Analysis:
    """Block lists in execution order, their ForwardPatterns, the inputs, the region."""

    program: Program
    lists: tuple[BlockList, ...]
    patterns: tuple[int | None, ...]
    inputs: Inputs
    region: Region | Miss
    gate_lists: tuple[int, ...] | None = None

    def why_outside(self, blocks: BlockList) -> str | None:
        """Return why one of the lists is not under the gate; None if it is, or without one."""
        if not isinstance(self.region, Region):
            return None
        return why_outside(self.program, self.inputs, self.region, blocks, self.gate_lists)


def analyse(graph: fx.Graph, gate_lists: Sequence[int] | None = None) -> Analysis:
    """Ask every pattern about a Dynamo graph; nothing is changed.

    `gate_lists` are the block lists under the gate, by number; None lets the graph decide.
    """
    program = Program(graph)
    lists = find_block_lists(program)
    inputs = find_inputs(program)
    region = find_region(program, lists, inputs, gate_lists)
    if isinstance(region, Region):
        writer = writes_outside(program, region.span)
        if writer is not None:
            region = Miss(f"a block writes to a tensor made outside the blocks ({writer.name})")
    return Analysis(
        program,
        tuple(lists),
        tuple(forward_pattern(program, blocks, inputs) for blocks in lists),
        inputs,
        region,
        None if gate_lists is None else tuple(gate_lists),
    )
