"""Which tensors share memory, and which operations write to it.

Dynamo's graph is not functionalised: `x += y`, `x[i] = y` and `x.mul_(y)` stay writes.
Views and in-place results share the storage of their fake values, so the recorded values
tell what a write may change.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from stepfx.patterns.program import Program, Span, is_operation, is_tensor, value_of

IN_PLACE_OPERATORS = frozenset(
    {
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.itruediv,
        operator.ipow,
        operator.iand,
        operator.ior,
        operator.setitem,
    }
)


def computed_from(program: Program, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """Return `sources` and every node that depends on one of them, through writes too.

    `y[index] = x` has no users: who reads y, or a view of it, afterwards depends on x.
    """
    storages = Storages(program.graph)
    seen = set(sources)
    for node in program.nodes:
        if seen.isdisjoint(node.all_input_nodes):
            continue
        seen.add(node)
        written = written_by(node)
        if written is not None:
            seen.update(storages.of(written))
    return seen


class Storages:
    """The tensors of a graph in groups that may share memory."""

    def __init__(self, graph: fx.Graph) -> None:
        self._groups: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            key = _key(node)
            if key is not None:
                self._groups.setdefault(key, []).append(node)

    def of(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that share memory with `node`, itself included."""
        key = _key(node)
        return [node] if key is None else self._groups.get(key, [node])

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let `new` stand where `old` stood: whoever shared memory with it still may."""
        for group in self._groups.values():
            if old in group:
                group[group.index(old)] = new


def _key(node: fx.Node) -> int | None:
    value = value_of(node)
    if not is_tensor(value) or value.layout is not torch.strided:
        return None
    # Private: a tensor inside torch.vmap has no storage of its own (torch 2.11 to 2.13).
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return None
    # Private: `_cdata`, the address of the storage object (torch 2.11 to 2.13); the public
    # `data_ptr` is refused by fake tensors.
    return int(value.untyped_storage()._cdata)


def written_by(node: fx.Node) -> fx.Node | None:
    """Return the tensor that an operation writes to, or None."""
    if not is_operation(node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    target = node.target
    if node.op == "call_method":
        name = str(target)
        in_place = name.endswith("_") and not name.endswith("__")
        return node.args[0] if in_place or name == "__setitem__" else None
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return out
    if target in IN_PLACE_OPERATORS or node.kwargs.get("inplace") is True:
        return node.args[0]
    name = getattr(target, "__name__", "")
    in_place = name.endswith("_") and not name.startswith("_") and len(name) > 1
    return node.args[0] if in_place else None


def writes_outside(program: Program, span: Span) -> fx.Node | None:
    """Return the first operation in `span` that writes to a tensor made before it."""
    storages = Storages(program.graph)
    for node in program.span_nodes(span):
        written = written_by(node)
        if written is None or not is_tensor(value_of(written)):
            continue
        if any(program.at(other) < span.start for other in storages.of(written)):
            return node
    return None
