"""ForwardPattern: the calling convention of a block, in cache-dit's numbering.

    0  (h, e) -> (h, e)        1  (h, e) -> (e, h)
    2  (h, e) -> h             3  h -> h

A graph shows how many streams are carried and whether text enters each block unchanged.
The order of a Python tuple leaves no trace in it; that is read from the block's own code
where Dynamo recorded which class a node came from, and serves the report alone.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

from stepfx.patterns.block_list import BlockList
from stepfx.patterns.inputs import Inputs
from stepfx.patterns.operations import MATMULS
from stepfx.patterns.program import Program, value_of
from stepfx.patterns.storages import computed_from


def forward_pattern(program: Program, blocks: BlockList, inputs: Inputs) -> int | None:
    """Return the pattern's number; None for two streams whose order cannot be read."""
    block = _block_class(program, blocks)
    if len(blocks.streams) == 1:
        positional = block is None or _second_is_required(block)
        return 2 if _reads_text(program, blocks, inputs) and positional else 3
    return None if block is None else _returned_order(block)


def _reads_text(program: Program, blocks: BlockList, inputs: Inputs) -> bool:
    """Tell whether a sequence that ignores the latent is projected in every block."""
    from_latent = computed_from(program, inputs.latents)
    invariants = set(blocks.invariants()) - from_latent
    return any(
        node.target in MATMULS
        and node.all_input_nodes[0] in invariants
        and value_of(node.all_input_nodes[0]).dim() >= 3
        for node in program.span_nodes(blocks.spans[0])
    )


def _block_class(program: Program, blocks: BlockList) -> type | None:
    """Return the innermost class that all operations of a block share.

    Private: `nn_module_stack` (torch 2.11 to 2.13), a report's nicety and no more.
    """
    common: list[tuple[str, type]] | None = None
    for node in program.span_nodes(blocks.spans[1]):
        stack = list(node.meta.get("nn_module_stack", {}).values())
        if not stack:
            continue
        if common is None:
            common = stack
        common = [a for a, b in zip(common, stack, strict=False) if a == b]
    if not common or not isinstance(common[-1][1], type):
        return None
    return common[-1][1]


def _second_is_required(block: type) -> bool:
    """Tell whether the second argument of `forward` has no default: the (h, e) form."""
    forward = getattr(block, "forward", None)
    if forward is None:
        return False
    parameters = list(inspect.signature(forward).parameters.values())
    return len(parameters) > 2 and parameters[2].default is inspect.Parameter.empty


def _returned_order(block: type) -> int | None:
    """Return 0 or 1 for `return a, b` or `return b, a` of the first two arguments."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(vars(block)["forward"])))
    except (KeyError, OSError, SyntaxError, TypeError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        return None
    arguments = [argument.arg for argument in function.args.args[1:3]]
    for statement in ast.walk(function):
        if not isinstance(statement, ast.Return):
            continue
        if not isinstance(statement.value, ast.Tuple):
            continue
        names = [e.id for e in statement.value.elts if isinstance(e, ast.Name)][:2]
        if sorted(names) == sorted(arguments) and len(names) == 2:
            return 0 if names == arguments else 1
    return None


def stream_names(blocks: BlockList, image: tuple[int, ...]) -> list[str]:
    """Name the streams of a list for people: h for image streams, e for the others."""
    counts = {"h": 0, "e": 0}
    totals = {"h": len(image), "e": len(blocks.streams) - len(image)}
    names = []
    for i in range(len(blocks.streams)):
        kind = "h" if i in image else "e"
        names.append(kind if totals[kind] == 1 else f"{kind}{counts[kind]}")
        counts[kind] += 1
    return names
