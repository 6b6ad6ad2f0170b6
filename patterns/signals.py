"""Tensors inside a model that tell how much a denoising step changed.

The modulated input is the operand of the first matrix product of the first block that reads
the image stream:

    h0 -> norm -> * (1 + scale) + shift -> linear(., weight)
                                         ^
The timestep embedding is what the projected sinusoid becomes behind its second matrix
product (its first, where there is one only), as long as nothing but the timestep went in.
"""

from __future__ import annotations

from torch import fx

from stepfx.patterns.operations import is_matmul
from stepfx.patterns.program import Program, is_static, is_tensor, value_of
from stepfx.patterns.region import Region
from stepfx.patterns.storages import computed_from, written_by


def modulated_input(program: Program, region: Region) -> fx.Node | None:
    """Return the operand of the first matrix product on an image stream of the first block."""
    first = region.blocks()[0]
    blocks, origins = region.lists[first.number], region.origins[first.number]
    reached = {
        stream.inputs[first.index]
        for stream, origin in zip(blocks.streams, origins, strict=True)
        if origin in region.image
    }
    for node in program.span_nodes(first.span):
        operands = node.all_input_nodes
        if is_matmul(node) and operands and operands[0] in reached:
            return operands[0]
        if not reached.isdisjoint(operands):
            reached.add(node)
    return None


def timestep_embedding(program: Program, timestep: fx.Node) -> fx.Node | None:
    """Return the embedding of the timestep, computed from nothing else of the caller's."""
    given = [n for n in program.placeholders if is_tensor(value_of(n)) and not is_static(n)]
    others = computed_from(program, [node for node in given if node is not timestep])
    own = computed_from(program, [timestep]) - others
    first: fx.Node | None = None
    behind: set[fx.Node] = set()
    for node in program.nodes:
        operands = node.all_input_nodes
        if node not in own or not is_matmul(node) or operands[0] not in own:
            continue
        if first is None:
            first, behind = node, computed_from(program, [node])
        elif operands[0] in behind:
            return node
    return first


def cone(program: Program, target: fx.Node, available: set[fx.Node]) -> list[fx.Node] | None:
    """Return the operations that make `target` from `available` nodes, in program order.

    None if one of their results is written to in place: then order alone does not say what
    it held.
    """
    found: set[fx.Node] = set()
    queue = [target]
    while queue:
        node = queue.pop()
        if node in found or node in available:
            continue
        if node not in program.position or any(map(_writes, (node, *node.users))):
            return None
        found.add(node)
        queue += [n for n in node.all_input_nodes if n.op != "get_attr"]
    return sorted(found, key=program.at)


def _writes(node: fx.Node) -> bool:
    return written_by(node) is not None
