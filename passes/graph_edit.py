"""Cut a span of a program out into a graph module of its own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from stepfx.patterns.program import Program, Span


def copy_meta(source: fx.Node, target: fx.Node) -> None:
    """Give `target` what is known of the value and origin of `source`."""
    for key in ("example_value", "stack_trace", "nn_module_stack"):
        if key in source.meta:
            target.meta[key] = source.meta[key]


def copy_module(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Copy a module's graph; return it and where each node went. Submodules are shared."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        env[node].meta = dict(node.meta)
    copied = fx.GraphModule(gm, graph)
    copied.meta = dict(gm.meta)
    return copied, env


def extract(
    root: fx.GraphModule,
    program: Program,
    span: Span,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    name: str,
    edge_input: Callable[[int, int], int],
) -> fx.GraphModule:
    """Return the operations of `span`, in order, as a module from `inputs` to `outputs`.

    Every operation is kept, also those without users (`setitem`, autocast exits).
    `edge_input(offset, edge)` names the input that an edge from outside reads.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    placeholders = []
    for i, node in enumerate(inputs):
        # The block at hand may read one tensor where others of its kind read two.
        again = node in inputs[:i]
        placeholder = graph.placeholder(f"{node.name}_{i}" if again else node.name)
        copy_meta(node, placeholder)
        placeholders.append(placeholder)
    for offset, node in enumerate(program.span_nodes(span)):
        edge = -1

        def transform(argument: fx.Node, offset: int = offset) -> fx.Node:
            nonlocal edge
            if argument.op == "get_attr":
                return _constant(graph, env, argument)
            edge += 1
            if program.at(argument) not in span:
                return placeholders[edge_input(offset, edge)]
            return env[argument]

        copied = graph.node_copy(node, transform)
        copied.meta = dict(node.meta)
        env[node] = copied
    graph.output(tuple(env[node] for node in outputs))
    graph.lint()
    return fx.GraphModule(root, graph, class_name=name)


def extract_cone(
    root: fx.GraphModule,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    output: fx.Node,
    name: str,
) -> fx.GraphModule:
    """Return `nodes`, in order, as a module from `inputs` to the one value `output`."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        copy_meta(node, env[node])
    for node in nodes:
        env[node] = graph.node_copy(
            node, lambda n: _constant(graph, env, n) if n.op == "get_attr" else env[n]
        )
        env[node].meta = dict(node.meta)
    graph.output((env[output],))
    graph.lint()
    return fx.GraphModule(root, graph, class_name=name)


def _constant(graph: fx.Graph, env: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    if node not in env:
        env[node] = graph.get_attr(str(node.target))
        env[node].meta = dict(node.meta)
    return env[node]


def called_module(gm: fx.GraphModule, name: str) -> fx.GraphModule | None:
    """Return the graph module that `gm` holds under a dotted name; None for all else."""
    found: Any = gm
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, fx.GraphModule) else None


def inline(gm: fx.GraphModule) -> fx.GraphModule:
    """Return `gm` with every graph module that it calls written out in its place."""
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        called = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(called, fx.GraphModule):
            inner = {
                placeholder: env[argument]
                for placeholder, argument in zip(
                    called.graph.find_nodes(op="placeholder"), node.args, strict=True
                )
            }
            env[node] = graph.graph_copy(called.graph, inner)
        elif _is_item_of_call(node, env):
            env[node] = env[node.args[0]][node.args[1]]
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], lambda n: env[n]))
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
            env[node].meta = dict(node.meta)
    return fx.GraphModule(gm, graph, class_name=type(gm).__name__)


def _is_item_of_call(node: fx.Node, env: dict[fx.Node, Any]) -> bool:
    owner = node.args[0] if node.target is operator.getitem else None
    return isinstance(owner, fx.Node) and isinstance(env[owner], tuple)
