"""Compute what TeaCache watches before the first block runs.

    h, temb = prologue(x, t, w...)         h, temb = prologue(x, t, w...)
    h = block_0(h, temb, w0...)       ->   m = signal(h, temb, w0...)
                                           h = block_0(h, temb, w0...)

The tensor lies inside the first block (its modulated input) or inside the prologue (the
timestep embedding). The stage repeats the few operations that lead to it, so that a step
that is reused need not run the block.
"""

from __future__ import annotations

import operator

from torch import fx

from stepfx.passes.graph_edit import copy_meta, extract_cone
from stepfx.passes.outline_blocks import Outline
from stepfx.patterns.analysis import Analysis
from stepfx.patterns.region import Miss, Region
from stepfx.patterns.signals import cone, modulated_input, timestep_embedding


def insert_signal_stage(
    gm: fx.GraphModule, outline: Outline, analysis: Analysis, signal: str
) -> fx.Node | Miss:
    """Return the outer node that holds the watched tensor, or why there is none.

    `signal` is "modulated" or "timestep".
    """
    region, timestep = analysis.region, analysis.inputs.timestep
    assert isinstance(region, Region)
    watched = None
    if signal == "modulated":
        watched = modulated_input(analysis.program, region)
    elif timestep is not None:
        watched = timestep_embedding(analysis.program, timestep)
    if watched is None:
        return Miss(f"the signal {signal!r} was not found in the graph")
    available = _made_before(gm, outline)
    if watched in available:
        return outline.values[watched]
    nodes = cone(analysis.program, watched, available)
    if nodes is None:
        return Miss(f"the signal {signal!r} is made of tensors that are written to in place")
    return _insert(gm, outline, analysis, nodes, watched)


def _made_before(gm: fx.GraphModule, outline: Outline) -> set[fx.Node]:
    """Return the nodes of the program whose values are known before the first block."""
    earlier = set()
    for node in gm.graph.nodes:
        if node is outline.blocks[0]:
            break
        earlier.add(node)
    return {ours for ours, outer in outline.values.items() if outer in earlier}


def _insert(
    gm: fx.GraphModule,
    outline: Outline,
    analysis: Analysis,
    nodes: list[fx.Node],
    watched: fx.Node,
) -> fx.Node:
    inside = set(nodes)
    read = {n: None for node in nodes for n in node.all_input_nodes if n not in inside}
    inputs = [node for node in read if node.op != "get_attr"]
    sizes = analysis.program.sizes_in([*inputs, *nodes])
    inputs += [node for node in sizes if node not in inputs]
    module = extract_cone(gm, nodes, inputs, watched, "Signal")
    module.meta["of_gate"] = True
    gm.add_submodule("signal", module)
    with gm.graph.inserting_before(outline.blocks[0]):
        call = gm.graph.call_module("signal", tuple(outline.values[n] for n in inputs))
        item = gm.graph.call_function(operator.getitem, (call, 0))
    copy_meta(watched, item)
    # Layouts may have been changed since the program was traced.
    for placeholder, node in zip(
        module.graph.find_nodes(op="placeholder"), inputs, strict=True
    ):
        copy_meta(outline.values[node], placeholder)
    return item
