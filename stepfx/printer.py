"""Canonical text of a graph.

One line an operation, numbered in program order; names that fx made up are not shown, so
that equal graphs print alike:

    %0: f32[1, 16, 4] = input                              # hidden_states, model.py:17
    %2: f32[1, 16, 32] = linear(%0, %1, None)              # model.py:17
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from torch import fx

from stepfx.passes.graph_edit import called_module
from stepfx.patterns.program import value_of

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def format_graph(graph: fx.Graph, sources: bool = True) -> str:
    """Return the text of a graph; `sources` adds the line of the model to each operation."""
    names = {node: f"%{i}" for i, node in enumerate(graph.nodes) if node.op != "output"}
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_argument(node.args[0], names)}")
            continue
        kind = format_value(value_of(node))
        left = f"{names[node]}: {kind}" if kind else names[node]
        text = f"{left} = {_operation(node, names)}"
        comment = _comment(node) if sources else ""
        lines.append(f"{text:<72}  # {comment}" if comment else text)
    return "\n".join(lines) + "\n"


def format_module(gm: fx.GraphModule, title: str = "graph", sources: bool = True) -> str:
    """Return the text of a graph module and of each distinct module that it calls."""
    parts = []
    for name, module in graph_modules(gm, title).items():
        body = format_graph(module.graph, sources).splitlines()
        parts.append(f"{name}:\n" + "".join(f"    {line}\n" for line in body))
    return "\n".join(parts)


def graph_modules(gm: fx.GraphModule, title: str = "graph") -> dict[str, fx.GraphModule]:
    """Return `gm` and each distinct graph module that it calls, by name, outer ones first."""
    found: dict[str, fx.GraphModule] = {}
    queue: list[tuple[str, fx.GraphModule]] = [(title, gm)]
    while queue:
        name, module = queue.pop(0)
        if any(module is known for known in found.values()):
            continue
        found[name] = module
        for node in module.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                called = called_module(module, str(node.target))
                if called is not None:
                    queue.append((str(node.target), called))
    return found


def format_value(value: Any) -> str:
    """Return the type of a recorded value: `f32[1, 16]` for a tensor."""
    if isinstance(value, torch.Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(format_value(item) for item in value)})"
    return ""


def source_line(node: fx.Node) -> str:
    """Return `file.py:line` of the model's code that made `node`, innermost frame."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    path, line = frames[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line}"


def operation_name(node: fx.Node) -> str:
    """Return the short name of what a node does."""
    if node.op in ("call_method", "call_module", "get_attr", "placeholder"):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def input_name(node: fx.Node) -> str:
    """Return what the model calls an input: `blocks.0.norm.weight`, `hidden_states`.

    Dynamo spells the path to a value as an identifier. In a block that several places share
    it is the path of the first.
    """
    name = re.sub(r"(?i)^L_(self_+(dict_+)?(modules_+)?|kwargs_+)?", "", str(node.target))
    name = name.strip("_")
    return re.sub(r"_+(modules|parameters|buffers)_+", ".", name)


def count_operations(gm: fx.GraphModule) -> Counter[str]:
    """Count by name the operations of a graph module and of each that it calls."""
    counts: Counter[str] = Counter()
    for module in graph_modules(gm).values():
        counts.update(operation_name(n) for n in module.graph.nodes if n.op.startswith("call_"))
    return counts


def _comment(node: fx.Node) -> str:
    name = input_name(node) if node.op == "placeholder" and value_of(node) is not None else ""
    return ", ".join(filter(None, (name, source_line(node))))


def _operation(node: fx.Node, names: dict[fx.Node, str]) -> str:
    name = operation_name(node)
    if node.op == "placeholder":
        return "input" if value_of(node) is not None else f"input {name}"
    if node.op == "get_attr":
        return f"self.{name}"
    arguments = [_argument(a, names) for a in node.args]
    arguments += [f"{k}={_argument(v, names)}" for k, v in node.kwargs.items()]
    if node.op == "call_method":
        return f"{arguments[0]}.{name}({', '.join(arguments[1:])})"
    prefix = "call " if node.op == "call_module" else ""
    return f"{prefix}{name}({', '.join(arguments)})"


def _argument(argument: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(argument, fx.Node):
        return names[argument]
    if isinstance(argument, list):
        return f"[{', '.join(_argument(a, names) for a in argument)}]"
    if isinstance(argument, tuple):
        inner = ", ".join(_argument(a, names) for a in argument)
        return f"({inner},)" if len(argument) == 1 else f"({inner})"
    if isinstance(argument, dict):
        items = (f"{k}: {_argument(v, names)}" for k, v in argument.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        shown = ["" if p is None else _argument(p, names) for p in parts]
        return ":".join(shown if argument.step is not None else shown[:2])
    if argument is ...:
        return "..."
    return str(argument).removeprefix("torch.")
