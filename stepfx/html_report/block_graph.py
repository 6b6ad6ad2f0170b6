"""One block as a graph for people: its operations, what enters and what leaves.

Weights are named in the operation that reads them; items of a tuple are edges, no boxes of
their own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import networkx as nx
from torch import fx

from stepfx.patterns.block_list import BlockList
from stepfx.patterns.operations import ATTENTION, LAYOUT, is_matmul, name_of
from stepfx.patterns.program import value_of
from stepfx.printer import format_value, input_name, source_line

SHORT = {"scaled_dot_product_attention": "attention"}


def block_graph(blocks: BlockList, stream_names: Sequence[str]) -> nx.DiGraph:
    """Return the most frequent kind of block of a list, whose streams have the given names.

    Nodes are numbers in program order with the attributes `label`, `detail`, `kind` (input,
    output, product, attention, layout, other) and `hint`; edges may have a `label`.
    """
    kind = blocks.kinds[0]
    first = kind.members[0]
    operations = blocks.program.span_nodes(blocks.spans[first])
    named = list(zip(stream_names, blocks.streams, strict=True))
    streams = {stream.inputs[first]: name for name, stream in named}
    left = {stream.outputs[first]: name for name, stream in named}
    graph = nx.DiGraph()
    names: dict[fx.Node, int] = {}
    weights: set[fx.Node] = set()
    for slot in kind.slots:
        node = slot.nodes[0]
        if slot.kind == "weight":
            weights.add(node)
            continue
        role = f"stream {streams[node]}" if node in streams else slot.kind
        label = input_name(node) if node.op == "placeholder" else role
        names[node] = len(names)
        graph.add_node(
            names[node],
            label=streams.get(node, label if len(label) <= 24 else role),
            detail=format_value(value_of(node)),
            kind="input",
            hint=f"{role}: {input_name(node)}",
        )
    for node in operations:
        owner = node.args[0] if node.target is operator.getitem else None
        if isinstance(owner, fx.Node) and isinstance(value_of(owner), tuple | list):
            continue
        names[node] = len(names)
        graph.add_node(names[node], **_operation(node, weights))
        for source, item in map(_without_item, node.all_input_nodes):
            if source in names:
                graph.add_edge(names[source], names[node], label=item)
    outputs = {
        operations[offset]: left.get(operations[offset], "out") for offset in kind.outputs
    }
    _add_outputs(graph, names, outputs)
    # What a block reads of inputs that are unpacked elsewhere would hang in the air.
    alone = [n for n in graph if not graph.in_degree(n) and not graph.out_degree(n)]
    graph.remove_nodes_from(alone)
    return graph


def _operation(node: fx.Node, weights: set[fx.Node]) -> dict[str, str]:
    name = name_of(node)
    mine = [n for n in node.all_input_nodes if n in weights]
    of_weights = "".join(f"\n{input_name(n)}: {format_value(value_of(n))}" for n in mine)
    label = SHORT.get(name, name)
    if is_matmul(node) and mine:
        sizes = format_value(value_of(mine[0])).partition("[")[2].rstrip("]")
        label += f" {sizes.replace(', ', ' x ')}"
    return {
        "label": label,
        "detail": format_value(value_of(node)) if _is_short(node) else "",
        "kind": _kind(node, name),
        "hint": f"{name} at {source_line(node) or 'unknown line'}{of_weights}",
    }


def _is_short(node: fx.Node) -> bool:
    return not isinstance(value_of(node), tuple | list)


def _kind(node: fx.Node, name: str) -> str:
    if name in ATTENTION:
        return "attention"
    if is_matmul(node):
        return "product"
    return "layout" if name in LAYOUT else "other"


def _without_item(node: fx.Node) -> tuple[fx.Node, str]:
    """Return the operation that makes a value, and which item of its result it is."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        owner = node.args[0]
        if isinstance(value_of(owner), tuple | list):
            return owner, str(node.args[1])
    return node, ""


def _add_outputs(
    graph: nx.DiGraph, names: dict[fx.Node, int], outputs: Mapping[fx.Node, str]
) -> None:
    for node, label in outputs.items():
        source, item = _without_item(node)
        if source not in names:
            continue
        number = len(graph)
        while number in graph:
            number += 1
        graph.add_node(
            number,
            label=label,
            detail=format_value(value_of(node)),
            kind="output",
            hint="read behind the block",
        )
        graph.add_edge(names[source], number, label=item)
