"""One spelling for what patterns must not stumble over.

    q = chunk(x, 2); y = f(); a = q[0]     ->  q = chunk(x, 2); a = q[0]; y = f()
    h = iadd(h, f(h))                      ->  h = add(h, f(h))
    h.mul_(g); y = f(h)                    ->  k = h.mul(g); y = f(k)
    n = sym_size(x, 1); assert_scalar(n >= 0)  ->

Items of a tuple are taken where the tuple is made, so that no tuple crosses a block
boundary. An in-place add becomes an add, and whoever reads the overwritten tensor later reads
the sum, so that a block does not write to the stream that enters it: the residual of a block
is the difference of two tensors, not of one with itself. Where a view of another shape or
place is read later, the write stays.

Where sizes depend on data Dynamo checks what it knows of them behind the operation that makes
them, other things in each block. An operation checks the sizes it is given, and the inner
compiler makes checks of its own; a check of a number that was read from a tensor stays.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from stepfx.passes.base import PassContext
from stepfx.patterns.program import is_tensor, value_of
from stepfx.patterns.storages import Storages

CHECK = torch.ops.aten._assert_scalar.default
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
    """Hoist tuple items; replace in-place arithmetic on unshared tensors; drop size checks."""

    name: ClassVar[str] = "canonicalize"

    def __call__(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        """Rewrite `gm.graph`; return how many nodes moved or were replaced."""
        graph = gm.graph
        return _hoist_items(graph) + _replace_in_place(graph) + _drop_size_checks(graph)


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


def _drop_size_checks(graph: fx.Graph) -> int:
    dropped = 0
    for node in reversed(graph.find_nodes(op="call_function", target=CHECK)):
        numbers = _numbers_behind(node)
        if any(number.target == "item" for number in numbers):
            continue
        graph.erase_node(node)
        dropped += 1
        for number in numbers:
            if not number.users:
                graph.erase_node(number)
    return dropped


def _numbers_behind(node: fx.Node) -> list[fx.Node]:
    """Return the numbers that `node` is made of, each after those that read it."""
    found: dict[fx.Node, None] = {}
    queue = [n for n in node.all_input_nodes if not is_tensor(value_of(n))]
    while queue:
        number = queue.pop()
        if number.op == "placeholder" or is_tensor(value_of(number)):
            continue
        found.pop(number, None)
        found[number] = None
        queue += number.all_input_nodes
    return list(found)


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
