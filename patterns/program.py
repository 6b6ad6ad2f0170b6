"""A Dynamo graph as a linear program: positions, edges, labels, lifetimes.

Enters: the `torch.fx.Graph` that Dynamo hands a backend (torch functions and tensor
methods; parameters are placeholders; program order is kept). Leaves: a read-only view
in which "the same operation" is an integer, so that repeated blocks can be found by
comparing numbers. Nothing here reads a name of a module, attribute or variable.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols

IntArray = npt.NDArray[np.int64]

# Arguments that select what an operation does rather than how much of it.
_STRUCTURAL = (
    bool,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(None),
    type(...),
)


@dataclass(frozen=True)
class Span:
    """The operations at positions `start` (included) to `stop` (excluded)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, position: object) -> bool:
        return isinstance(position, int) and self.start <= position < self.stop

    def overlap(self, other: Span) -> int:
        """Count the positions that both spans hold."""
        return max(0, min(self.stop, other.stop) - max(self.start, other.start))


def value_of(node: fx.Node) -> Any:
    """Return the fake value that Dynamo recorded for `node`, or None."""
    return node.meta.get("example_value")


def is_operation(node: fx.Node) -> bool:
    """Tell whether `node` computes: not an input, a constant or the output."""
    return node.op in ("call_function", "call_method", "call_module")


def shape_of(node: fx.Node) -> tuple[str, ...] | None:
    """Return the shape of a tensor node as text, so that symbols add no guard."""
    value = value_of(node)
    return tuple(str(size) for size in value.shape) if is_tensor(value) else None


def size_hint(size: Any) -> int:
    """Return a size as a number; a symbol gives the value it was traced with, no guard."""
    # Private: `SymInt.node.hint` (torch 2.11 to 2.13); `int(size)` would add a guard.
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(size) if hint is None and isinstance(size, int) else int(hint or 0)


def traced_shape(node: fx.Node) -> tuple[int, ...] | None:
    """Return the sizes that a tensor node had when it was traced."""
    value = value_of(node)
    return tuple(map(size_hint, value.shape)) if is_tensor(value) else None


def depends_on_data(nodes: Iterable[fx.Node]) -> bool:
    """Tell whether a size or number is known only when the graph runs (`nonzero`)."""
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    values = map(value_of, nodes)
    return any(isinstance(v, kinds) and bool(free_unbacked_symbols(v)) for v in values)


def is_tensor(value: object) -> bool:
    """Tell whether a recorded value is one tensor."""
    return isinstance(value, torch.Tensor)


def is_static(node: fx.Node) -> bool:
    """Tell whether a placeholder is a parameter, buffer or attribute of a module, or a global.

    Such a tensor belongs to the model; every other placeholder comes from the caller.
    """
    # Private: `grapharg.source` (checked on torch 2.13.0). The public marks
    # (`_dynamo_static_input_type` in `tensor_dict`) miss tensors that are plain attributes
    # of a module, such as the rotary tables of Qwen-Image.
    if node.op != "placeholder":
        return False
    if is_registered(node):
        return True
    source = getattr(node.meta.get("grapharg"), "source", None)
    guard_source = getattr(source, "guard_source", None)
    if callable(guard_source):  # a method up to torch 2.11, a property later
        guard_source = guard_source()
    # Private: GuardSource says whether a value was reached through an nn.Module or is a
    # global of the model's code.
    is_module = getattr(guard_source, "is_unspecialized_nn_module", None)
    if is_module is not None and is_module():
        return True
    return getattr(guard_source, "name", "").startswith("GLOBAL")


def is_registered(node: fx.Node) -> bool:
    """Tell whether a placeholder is a parameter or buffer: the same object at every call.

    Other static inputs may be made anew for each call, as the tensors are by which Dynamo
    passes a module's float attributes under dynamic shapes.
    """
    if isinstance(value_of(node), torch.nn.Parameter):
        return True
    # Private: the mark that Dynamo puts on registered tensors (torch 2.11 to 2.13).
    return "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})


class Program:
    """The operations of a graph in program order, with integer labels and edges."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes: list[fx.Node] = [n for n in graph.nodes if is_operation(n)]
        self.position: dict[fx.Node, int] = {n: i for i, n in enumerate(self.nodes)}
        self.placeholders: list[fx.Node] = [n for n in graph.nodes if n.op == "placeholder"]
        self.output: fx.Node = next(n for n in reversed(graph.nodes) if n.op == "output")
        # edges[i]: the producers that operation i reads, in argument order, with repeats.
        self.edges: list[tuple[fx.Node, ...]] = []
        self.constants: list[tuple[Any, ...]] = []
        self.labels: IntArray = self._label()
        self.last_use: IntArray = np.array(
            [self._last_use(node) for node in self.nodes], dtype=np.int64
        )

    def __len__(self) -> int:
        return len(self.nodes)

    def at(self, node: fx.Node) -> int:
        """Return the position of `node`: -1 for inputs, `len(self)` for the output."""
        if node.op == "output":
            return len(self.nodes)
        return self.position.get(node, -1)

    def span_nodes(self, span: Span) -> list[fx.Node]:
        """Return the operations in `span`."""
        return self.nodes[span.start : span.stop]

    def live_out(self, span: Span) -> list[fx.Node]:
        """Return the operations in `span` whose results are read after it."""
        return [
            self.nodes[i] for i in range(span.start, span.stop) if self.last_use[i] >= span.stop
        ]

    def live_in(self, span: Span) -> list[fx.Node]:
        """Return what `span` reads from outside, in order of first use."""
        found: dict[fx.Node, None] = {}
        for i in range(span.start, span.stop):
            for producer in self.edges[i]:
                if self.at(producer) not in span:
                    found.setdefault(producer)
        return list(found)

    def sizes_in(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the inputs that are sizes and occur in the shapes of `nodes`.

        Under dynamic shapes a tensor may have the size (s0 // 2) ** 2; whoever compiles a
        part of the program alone must be given s0.
        """
        sizes = {
            _symbol(n): n for n in self.placeholders if isinstance(value_of(n), torch.SymInt)
        }
        if not sizes:
            return []
        used = {s for n in nodes if is_tensor(value_of(n)) for s in free_symbols(value_of(n))}
        return [node for symbol, node in sizes.items() if symbol in used]

    def _last_use(self, node: fx.Node) -> int:
        return max((self.at(user) for user in node.users), default=-1)

    def _label(self) -> IntArray:
        codes: dict[Any, int] = {}
        labels = np.empty(len(self.nodes), dtype=np.int64)
        for i, node in enumerate(self.nodes):
            edges: list[fx.Node] = []
            constants: list[Any] = []
            skeleton = (
                _skeleton(node.args, edges, constants),
                _skeleton(node.kwargs, edges, constants),
            )
            key = (
                node.op,
                _callee(node.target),
                skeleton,
                self._index(node),
                _value_kind(value_of(node)),
            )
            labels[i] = codes.setdefault(key, len(codes))
            self.edges.append(tuple(edges))
            self.constants.append(tuple(constants))
        return labels

    @staticmethod
    def _index(node: fx.Node) -> int | None:
        """Return which item of a tuple `node` takes: structure, unlike other numbers."""
        if node.target is not operator.getitem or len(node.args) != 2:
            return None
        owner, index = node.args
        if isinstance(index, int) and isinstance(owner, fx.Node):
            return None if is_tensor(value_of(owner)) else index
        return None


def _callee(target: Any) -> Any:
    """Return what is equal for two calls of the same thing.

    Dynamo wraps NumPy's functions in a new object at each call (2.11 to 2.13), whose repr
    names the function.
    """
    plain = isinstance(target, str) or hasattr(target, "__self__") or inspect.isroutine(target)
    return target if plain else (type(target), repr(target))


def _symbol(node: fx.Node) -> Any:
    return value_of(node).node.expr


def _value_kind(value: Any) -> Any:
    if is_tensor(value):
        # As traced: under dynamic shapes one size may be written in two ways.
        return tuple(map(size_hint, value.shape)), value.dtype
    if isinstance(value, tuple | list):
        return tuple(_value_kind(item) for item in value)
    return type(value).__name__


def _skeleton(argument: Any, edges: list[fx.Node], constants: list[Any]) -> Any:
    """Return the shape of an argument tree; numbers are collected, not compared.

    Blocks that differ only in numbers (Chroma slices one table at per-block offsets) are
    found as repeats; whether the numbers agree is asked later, of `constants`.
    """
    if isinstance(argument, fx.Node):
        if argument.op == "get_attr":
            constants.append(argument.target)
            return "@"
        edges.append(argument)
        return "%"
    if isinstance(argument, tuple | list):
        return (
            type(argument).__name__,
            *(_skeleton(item, edges, constants) for item in argument),
        )
    if isinstance(argument, dict):
        return tuple((key, _skeleton(item, edges, constants)) for key, item in argument.items())
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return ("slice", *(_skeleton(part, edges, constants) for part in parts))
    if isinstance(argument, _STRUCTURAL):
        return (type(argument).__name__, str(argument))
    constants.append(argument)
    return type(argument).__name__


def iter_ancestors(node: fx.Node, passable: Any) -> Iterator[fx.Node]:
    """Yield `node` and what it is computed from, through nodes that `passable` accepts."""
    seen, queue = {node}, [node]
    while queue:
        current = queue.pop()
        yield current
        if current is not node and not passable(current):
            continue
        for producer in current.all_input_nodes:
            if producer not in seen:
                seen.add(producer)
                queue.append(producer)
