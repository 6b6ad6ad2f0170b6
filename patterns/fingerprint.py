"""What architecture a model is, as a short hash of its blocks.

    DiT with 12 blocks of width 384   -+
    DiT with 28 blocks of width 1152  -+-> the same sixteen digits

Two models have one fingerprint when their blocks are the same operations wired the same way.
Names, widths, depth, batch, tokens, dtypes and all other numbers leave no trace in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import networkx as nx
import torch
from torch import fx

from stepfx.patterns.block_list import BlockKind, BlockList, Slot
from stepfx.patterns.operations import name_of
from stepfx.patterns.program import is_static, is_tensor, value_of

ROUNDS = 12  # an operation is told apart by its surroundings, half as many operations far
DIGITS = 16


def fingerprint(lists: Iterable[BlockList]) -> str:
    """Return the hash of all kinds of blocks in `lists`, each kind counted once."""
    graphs = [graph_of_kind(blocks, kind) for blocks in lists for kind in blocks.kinds]
    # Blocks that differ in numbers alone (Chroma has 57 such kinds) have one graph.
    distinct = {str((graph.nodes("label"), graph.edges("label"))): graph for graph in graphs}
    hashes = sorted({hash_of(graph) for graph in distinct.values()})
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:DIGITS]


def hash_of(graph: nx.Graph) -> str:
    """Return the Weisfeiler-Lehman hash of a labelled graph (JMLR 12, 2011; networkx)."""
    return str(
        nx.weisfeiler_lehman_graph_hash(
            graph, node_attr="label", edge_attr="label", iterations=ROUNDS, digest_size=DIGITS
        )
    )


def graph_of_kind(blocks: BlockList, kind: BlockKind) -> nx.Graph:
    """Return the operations and inputs of a kind of block as a labelled graph.

    Operations are numbered by their offset in the block, inputs from -1 down. Between an
    operation and what it reads stands a node, named by the pair, that tells by which
    arguments; its two edges tell which end is which.
    """
    program, span = blocks.program, blocks.spans[kind.members[0]]
    graph = nx.Graph()
    for number, slot in enumerate(kind.slots):
        graph.add_node(-1 - number, label=_input_label(slot))
    for offset, node in enumerate(program.span_nodes(span)):
        graph.add_node(offset, label=_label(node))
        read: dict[int, list[int]] = {}
        for edge, producer in enumerate(program.edges[span.start + offset]):
            slot_read = kind.edge_slots.get((offset, edge))
            inner = program.at(producer) - span.start
            read.setdefault(inner if slot_read is None else -1 - slot_read, []).append(edge)
        for source, edges in read.items():
            graph.add_node((source, offset), label=str(edges))
            graph.add_edge(source, (source, offset), label="from")
            graph.add_edge((source, offset), offset, label="to")
    return graph


def _input_label(slot: Slot) -> str:
    """Tell weights, streams and the rest apart; in one block alone the rest looks alike."""
    if is_static(slot.nodes[0]):
        return "weight"
    return "stream" if slot.kind == "stream" else "given"


def _label(node: fx.Node) -> str:
    return f"{name_of(node)}{_form(node.args)}{_form(node.kwargs)}{_index(node)}"


def _index(node: fx.Node) -> str:
    """Return which item of a tuple is taken: no size, unlike other numbers."""
    owner = node.args[0] if name_of(node) == "getitem" else None
    if isinstance(owner, fx.Node) and isinstance(value_of(owner), tuple | list):
        return str(node.args[1])
    return ""


def _form(argument: Any) -> str:
    """Return the shape of an argument tree, without its numbers and dtypes."""
    if isinstance(argument, fx.Node):
        # Under dynamic shapes a size is a node.
        return "%" if is_tensor(value_of(argument)) or value_of(argument) is None else "#"
    if isinstance(argument, tuple | list):
        return f"({','.join(map(_form, argument))})"
    if isinstance(argument, dict):
        return f"{{{','.join(f'{key}:{_form(item)}' for key, item in argument.items())}}}"
    if isinstance(argument, slice):
        return f"[{_form(argument.start)}:{_form(argument.stop)}:{_form(argument.step)}]"
    if isinstance(argument, torch.dtype | torch.device):
        return type(argument).__name__
    if isinstance(argument, int | float | torch.SymInt) and not isinstance(argument, bool):
        return "#"
    return str(argument)
