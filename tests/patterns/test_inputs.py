"""Which input is the timestep, the latent, the conditioning."""

from __future__ import annotations

from typing import Any

import torch

from stepfx.patterns.inputs import Inputs, find_inputs
from stepfx.patterns.program import Program
from stepfx.patterns.storages import computed_from
from stepfx.testing import capture

FREQUENCIES = torch.tensor([1.0, 0.1, 0.01, 0.001])
LINEAR = torch.nn.Linear(8, 8).requires_grad_(False)


def sinusoid(t: Any) -> torch.Tensor:
    phase = t * FREQUENCIES
    return torch.cat([phase.sin(), phase.cos()], dim=-1)


def inputs_of(function: Any, *given: Any) -> Inputs:
    return find_inputs(Program(capture(function, given).graph))


def names(nodes: Any) -> list[str]:
    return [str(node.target).strip("Ll_") for node in nodes]


def test_the_timestep_reaches_a_projected_sinusoid() -> None:
    def model(x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + LINEAR(sinusoid(t[:, None])) + y

    found = inputs_of(model, torch.randn(2, 8), torch.ones(2), torch.randn(8))
    assert found.timestep is not None
    assert names([found.timestep]) == ["t"]
    assert names(found.latents) == ["x"]
    assert names(found.conditioning) == ["y"]


def test_stacked_and_repeated_sinusoids_are_projected() -> None:
    def model(x: torch.Tensor, t: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        table = torch.stack([sinusoid(t[:, None]), sinusoid(g[:, None])]).repeat(2, 1, 1)
        return x + LINEAR(table)[0]

    found = inputs_of(model, torch.randn(2, 8), torch.ones(2), torch.full((2,), 3.5))
    assert found.timestep is not None
    assert names([found.timestep]) == ["t"]
    assert names(found.clocks) == ["g"]
    assert names(found.conditioning) == ["g"]


def test_a_rotary_table_is_no_timestep() -> None:
    def model(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        phase = p[:, None] * FREQUENCIES
        table = torch.cat([phase.cos(), phase.sin()], dim=-1)
        return LINEAR(x * table)

    assert inputs_of(model, torch.randn(2, 8), torch.arange(2.0)).timestep is None


def test_a_python_number_becomes_the_timestep_where_it_becomes_a_tensor() -> None:
    def model(x: torch.Tensor, t: int) -> torch.Tensor:
        return x + LINEAR(sinusoid(torch.tensor([t]).expand(2)[:, None]))

    found = inputs_of(model, torch.randn(2, 8), 7)
    assert found.timestep is not None
    assert found.timestep.op == "call_function"
    assert found.timestep.args[0] == [7]


def test_a_latent_with_more_channels_beats_one_with_fewer_frames() -> None:
    def model(pose: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x[:, :4] + pose.sum()

    found = inputs_of(model, torch.randn(1, 4, 2, 8, 8), torch.randn(1, 12, 3, 8, 8))
    assert names(found.latents) == ["x"]


def test_dependence_goes_through_writes() -> None:
    def model(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, other = torch.zeros(4, 8), torch.zeros(4, 8)
        row = tokens[0]
        tokens[index] = x
        return row + 1, other + 1

    program = Program(capture(model, (torch.randn(2, 8), torch.tensor([1, 2]))).graph)
    x = next(n for n in program.placeholders if "x" in str(n.target).strip("L_"))
    reached = computed_from(program, [x])
    first, second = program.output.args[0]
    assert first in reached
    assert second not in reached
