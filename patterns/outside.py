"""Why a list of blocks is not under the gate."""

from __future__ import annotations

from collections.abc import Sequence

from stepfx.patterns.block_list import BlockList
from stepfx.patterns.inputs import Inputs
from stepfx.patterns.program import Program, Span
from stepfx.patterns.region import Region, goes_on, is_whole_block
from stepfx.patterns.storages import computed_from


def why_outside(
    program: Program,
    inputs: Inputs,
    region: Region,
    blocks: BlockList,
    gate_lists: Sequence[int] | None = None,
) -> str | None:
    """Return in words why `blocks` are not in `region`, or None if they are."""
    if blocks in region.lists:
        return None
    if gate_lists is not None:
        return "option 'gate_lists' leaves it out"
    reached = computed_from(program, inputs.latents)
    main = [s.entry for each in region.lists for s in each.streams]
    entries = [s.entry for s in blocks.streams]
    if any(e in reached for e in main) and not any(e in reached for e in entries):
        return "it does not read the latent"
    if region.span.overlap(blocks.span) and not is_whole_block(program, blocks):
        return "it runs between the main blocks and lacks attention or an MLP"
    if region.span.overlap(blocks.span):
        return "it overlaps with the main blocks"
    is_before = blocks.span.stop <= region.span.start
    first, second = (blocks, region.lists[0]) if is_before else (region.lists[-1], blocks)
    between = len(Span(first.span.stop, second.span.start))
    where = "in front of" if is_before else "behind"
    if not goes_on(program, first, second) and 2 * between >= min(first.period, second.period):
        return (
            f"it is {where} the main blocks, with {between} operations between: half a block "
            "or more"
        )
    return f"it is {where} the main blocks, and no stream leads from one to the other"
