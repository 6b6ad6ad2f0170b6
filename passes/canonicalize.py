"""One spelling for what patterns must not stumble over.

    q = chunk(x, 2); y = f(); a = q[0]     ->  q = chunk(x, 2); a = q[0]; y = f()
    h = iadd(h, f(h))                      ->  h = add(h, f(h))
    h.mul_(g); y = f(h)                    ->  k = h.mul(g); y = f(k)

Items of a tuple are taken where the tuple is made, so that no tuple crosses a block
boundary. An in-place add becomes an add, and whoever reads the overwritten tensor later reads
the sum, so that a block does not write to the stream that enters it: the residual of a block
is the difference of two tensors, not of one with itself. Where a view of another shape or
place is read later, the write stays.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from stepfx.passes.base import PassContext
from stepfx.patterns.program import is_tensor, value_of
from stepfx.patterns.storages import Storages

OUT_OF_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    "add_": "add",
    "sub_": "sub",
    "mul_": "mul",
}


@dataclass(frozen=True)
class Canonicalize:
    """Hoist tuple items; replace in-place arithmetic on unshared tensors."""

    name: ClassVar[str] = "canonicalize"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        """Rewrite `gm.graph`; return how many nodes moved or were replaced."""
        return _hoist_items(gm.graph) + _replace_in_place(gm.graph)


def _hoist_items(graph: fx.Graph) -> int:
    moved = 0
    for node in list(graph.nodes):
        if not isinstance(value_of(node), tuple | list):
            continue
        last = node
        for user in sorted(node.users):
            if user.target is not operator.getitem:
                continue
            if last.next is not user:
                last.append(user)
                moved += 1
            last = user
    return moved


def _replace_in_place(graph: fx.Graph) -> int:
    replaced = 0
    order = {node: i for i, node in enumerate(graph.nodes)}
    storages = Storages(graph)
    for node in list(graph.nodes):
        target = OUT_OF_PLACE.get(node.target)
        if target is None or not _is_safe(node, order, storages):
            continue
        with graph.inserting_before(node):
            new = graph.create_node(node.op, target, node.args, node.kwargs)
        new.meta = dict(node.meta)
        order[new] = order[node]
        for other in storages.of(node):
            if order[other] < order[node] and _is_same_view(other, node):
                _read_instead(other, new, {u for u in other.users if order[u] > order[node]})
        storages.replace(node, new)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        replaced += 1
    return replaced


def _is_safe(node: fx.Node, order: dict[fx.Node, int], storages: Storages) -> bool:
    written, result = node.args[0], value_of(node)
    if not isinstance(written, fx.Node) or not is_tensor(result):
        return False
    # A caller's tensor must see the write; a promoted result would change the dtype.
    sharing = storages.of(written)
    if any(other.op in ("placeholder", "get_attr") for other in sharing):
        return False
    operand = node.args[1] if len(node.args) > 1 else None
    if isinstance(operand, fx.Node):
        value = value_of(operand)
        if not is_tensor(value) or value.dtype != result.dtype:
            return False
    # Views of the written tensor that are read later must see the write too. Its own result
    # and its other names are the exception: whoever reads those reads the new tensor.
    here = order[node]
    made_from = _views_of(node, set(sharing))
    return not any(
        order[user] > here
        for other in sharing
        if other not in made_from and not _is_same_view(other, node)
        for user in other.users
        if user is not node
    )


def _read_instead(old: fx.Node, new: fx.Node, readers: set[fx.Node]) -> None:
    for reader in readers:
        reader.replace_input_with(old, new)


def _is_same_view(a: fx.Node, b: fx.Node) -> bool:
    """Tell whether two nodes that share memory are the same elements of it in one order."""
    forms = [
        # As text: to compare sizes of dynamic shapes would add a guard.
        (v.dtype, str(v.shape), str(v.stride()), str(v.storage_offset()))
        for v in (value_of(a), value_of(b))
    ]
    return forms[0] == forms[1]


def _views_of(node: fx.Node, sharing: set[fx.Node]) -> set[fx.Node]:
    """Return `node` and what is taken of it, within the nodes that share its memory."""
    seen, queue = {node}, [node]
    while queue:
        for user in queue.pop().users:
            if user in sharing and user not in seen:
                seen.add(user)
                queue.append(user)
    return seen
