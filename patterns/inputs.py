"""What the caller's inputs mean: the timestep, the latent, the conditioning.

The timestep is the input that reaches a sinusoid whose result is projected by a linear:

    t -> t * freqs -> sin, cos -> cat -> linear(., weight)

Rotary tables have sinusoids too, but multiply queries with them and project nothing.
The latent is the input that an output mirrors: equal shape but for one dimension (images
with learned variance or inpainting channels differ in channels). All other inputs of the
caller are conditioning; they tell CFG branches apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from stepfx.patterns.operations import LAYOUT, MATMULS, name_of
from stepfx.patterns.program import (
    Program,
    is_operation,
    is_static,
    is_tensor,
    iter_ancestors,
    traced_shape,
    value_of,
)

SINES = frozenset({torch.sin, "sin"})
COSINES = frozenset({torch.cos, "cos"})
NUMBERS_TO_TENSORS = frozenset({"tensor", "as_tensor", "full"})
# What may stand between the sinusoid and its projection besides changes of layout.
PASSES_THROUGH = LAYOUT | {
    "bfloat16",
    "cat",
    "concat",
    "float",
    "half",
    "repeat",
    "stack",
    "to",
    "type_as",
}


@dataclass(frozen=True)
class Inputs:
    """The placeholders of a graph by meaning, each in placeholder order.

    `timestep` may be an operation: where the caller gives a Python number, the tensor made
    of it. `clocks` are those of the conditioning that reach projected sinusoids too: a second
    timestep (flow maps step from one time to another), guidance, picture sizes.
    """

    timestep: fx.Node | None
    latents: tuple[fx.Node, ...]
    conditioning: tuple[fx.Node, ...]
    clocks: tuple[fx.Node, ...]
    weights: tuple[fx.Node, ...]
    sizes: tuple[fx.Node, ...]  # SymInts of dynamic shapes and other non-tensors


def find_inputs(program: Program) -> Inputs:
    """Sort the placeholders of `program` by what they mean to a denoising step."""
    tensors = [n for n in program.placeholders if is_tensor(value_of(n))]
    weights = [n for n in tensors if is_static(n)]
    given = [n for n in tensors if n not in set(weights)]
    times = find_times(program)
    timestep = times[0] if times else None
    latents = find_latents(program, [n for n in given if n not in times])
    conditioning = [n for n in given if n is not timestep and n not in set(latents)]
    return Inputs(
        timestep,
        tuple(latents),
        tuple(conditioning),
        tuple(n for n in conditioning if n in times),
        tuple(weights),
        tuple(n for n in program.placeholders if n not in set(tensors)),
    )


def find_times(program: Program) -> list[fx.Node]:
    """Return what reaches projected sinusoids, the timestep first.

    They are inputs of the caller; where there is none, the one tensor that a Python number
    became.
    """
    times: dict[fx.Node, None] = {}
    made: fx.Node | None = None
    for node in program.nodes:
        if node.target not in SINES and node.target not in COSINES:
            continue
        operand = node.args[0] if node.args else None
        if not isinstance(operand, fx.Node) or not _has_twin(node, operand):
            continue
        if not _is_projected(node):
            continue
        sources = list(iter_ancestors(operand, _is_elementwise))
        inputs = [n for n in sources if n.op == "placeholder" and _is_given_tensor(n)]
        if inputs:
            times.setdefault(inputs[0])
        elif made is None:
            # Without such a tensor the phase of the sinusoid: proportional to the number.
            numbers = (n for n in sources if name_of(n) in NUMBERS_TO_TENSORS)
            made = next(numbers, operand)
    return list(times) or ([made] if made is not None else [])


def find_latents(program: Program, given: list[fx.Node]) -> list[fx.Node]:
    """Return, for each output, the input that it mirrors."""
    candidates = [n for n in given if value_of(n).is_floating_point()]
    latents: list[fx.Node] = []
    for output in program.output.all_input_nodes:
        shape = traced_shape(output)
        ranked = sorted(
            (difference, i, node)
            for i, node in enumerate(candidates)
            if (difference := _difference(shape, traced_shape(node))) is not None
            and node not in latents
        )
        if ranked:
            latents.append(ranked[0][2])
    return sorted(latents, key=program.placeholders.index)


def _difference(
    a: tuple[int, ...] | None, b: tuple[int, ...] | None
) -> tuple[int, bool] | None:
    """Count the sizes that differ, then ask whether it is another one than the channels.

    None if the ranks differ or more than one size does. Channels are the second size of
    images and videos, the last of sequences.
    """
    if a is None or b is None or len(a) != len(b) or len(a) < 2:
        return None
    places = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if len(places) > 1:
        return None
    channels = 1 if len(a) > 3 else len(a) - 1
    return len(places), bool(places) and places[0] != channels


def _has_twin(node: fx.Node, operand: fx.Node) -> bool:
    other = COSINES if node.target in SINES else SINES
    return any(user.target in other for user in operand.users)


def _is_projected(node: fx.Node) -> bool:
    """Tell whether `node` reaches the first operand of a matrix product with a weight."""
    queue, seen = [node], {node}
    while queue:
        current = queue.pop()
        for user in current.users:
            if user.target in MATMULS:
                operands = user.all_input_nodes
                if operands[0] is current and any(is_static(n) for n in operands[1:]):
                    return True
            elif name_of(user) in PASSES_THROUGH and user not in seen:
                seen.add(user)
                queue.append(user)
    return False


def _is_elementwise(node: fx.Node) -> bool:
    return is_operation(node) and node.target not in MATMULS


def _is_given_tensor(node: fx.Node) -> bool:
    return is_tensor(value_of(node)) and not is_static(node)
