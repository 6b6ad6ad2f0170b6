"""The outer graph: stages in a straight line, equal blocks in one module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stepfx.passes.canonicalize import Canonicalize
from stepfx.passes.outline_blocks import OutlineBlocks
from stepfx.printer import format_module
from stepfx.testing import assert_text, capture, run_pass


class Stack(nn.Module):
    """Three blocks of four operations."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
        self.layers = nn.ModuleList(layers).requires_grad_(False)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        c, h = t.cos().exp(), x.sin()
        for layer in self.layers:
            h = h + (layer(h * c).relu() - c)
        return h.tanh()


INPUTS = (torch.ones(2, 3, 4), torch.ones(2, 1, 1))


def test_before_and_after() -> None:
    gm = capture(Stack(), INPUTS)
    assert_text(
        gm,
        """
        %0: f32[2, 1, 1] = input
        %1: f32[2, 3, 4] = input
        %2: f32[4, 4] = input
        %3: f32[4, 4] = input
        %4: f32[4, 4] = input
        %5: f32[2, 1, 1] = %0.cos()
        %6: f32[2, 1, 1] = %5.exp()
        %7: f32[2, 3, 4] = %1.sin()
        %8: f32[2, 3, 4] = mul(%7, %6)
        %9: f32[2, 3, 4] = linear(%8, %2, None)
        %10: f32[2, 3, 4] = %9.relu()
        %11: f32[2, 3, 4] = sub(%10, %6)
        %12: f32[2, 3, 4] = add(%7, %11)
        %13: f32[2, 3, 4] = mul(%12, %6)
        %14: f32[2, 3, 4] = linear(%13, %3, None)
        %15: f32[2, 3, 4] = %14.relu()
        %16: f32[2, 3, 4] = sub(%15, %6)
        %17: f32[2, 3, 4] = add(%12, %16)
        %18: f32[2, 3, 4] = mul(%17, %6)
        %19: f32[2, 3, 4] = linear(%18, %4, None)
        %20: f32[2, 3, 4] = %19.relu()
        %21: f32[2, 3, 4] = sub(%20, %6)
        %22: f32[2, 3, 4] = add(%17, %21)
        %23: f32[2, 3, 4] = %22.tanh()
        return (%23,)
        """,
    )
    assert run_pass(OutlineBlocks(), gm) == (5, [])
    assert format_module(gm, "outer", sources=False) == (
        """\
outer:
    %0: f32[2, 1, 1] = input
    %1: f32[2, 3, 4] = input
    %2: f32[4, 4] = input
    %3: f32[4, 4] = input
    %4: f32[4, 4] = input
    %5 = call prologue(%0, %1)
    %6: f32[2, 1, 1] = getitem(%5, 0)
    %7: f32[2, 3, 4] = getitem(%5, 1)
    %8 = call list_0_block(%7, %6, %2)
    %9: f32[2, 3, 4] = getitem(%8, 0)
    %10 = call list_0_block(%9, %6, %3)
    %11: f32[2, 3, 4] = getitem(%10, 0)
    %12 = call list_0_block(%11, %6, %4)
    %13: f32[2, 3, 4] = getitem(%12, 0)
    %14 = call epilogue(%13)
    %15: f32[2, 3, 4] = getitem(%14, 0)
    return (%15,)

prologue:
    %0: f32[2, 1, 1] = input
    %1: f32[2, 3, 4] = input
    %2: f32[2, 1, 1] = %0.cos()
    %3: f32[2, 1, 1] = %2.exp()
    %4: f32[2, 3, 4] = %1.sin()
    return (%3, %4)

list_0_block:
    %0: f32[2, 3, 4] = input
    %1: f32[2, 1, 1] = input
    %2: f32[4, 4] = input
    %3: f32[2, 3, 4] = mul(%0, %1)
    %4: f32[2, 3, 4] = linear(%3, %2, None)
    %5: f32[2, 3, 4] = %4.relu()
    %6: f32[2, 3, 4] = sub(%5, %1)
    %7: f32[2, 3, 4] = add(%0, %6)
    return (%7,)

epilogue:
    %0: f32[2, 3, 4] = input
    %1: f32[2, 3, 4] = %0.tanh()
    return (%1,)
"""
    )


def outline(model: Any, *inputs: torch.Tensor) -> tuple[Any, list[str], list[Any]]:
    """Return the outlined module, its misses, and the inputs of the graph in its order."""
    gm = capture(model, inputs)
    given = [n.meta["grapharg"].example for n in gm.graph.find_nodes(op="placeholder")]
    run_pass(Canonicalize(), gm)
    _, misses = run_pass(OutlineBlocks(), gm)
    return gm, misses, given


class Scaled(Stack):
    """Blocks that differ in a number: found as a list, compiled apart."""

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        c, h = t.cos().exp(), x.sin()
        for i, layer in enumerate(self.layers):
            h = h + (layer(h * c).relu() - c) * (1.0 + 0.5 * (i // 2))
        return h.tanh()


class Writing(Stack):
    """Blocks with a write that has no users, and an in-place residual add."""

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        c, h = t.cos().exp(), x.sin()
        for layer in self.layers:
            y = torch.empty_like(h)
            y[..., ::2] = layer(h * c)[..., ::2]
            y[..., 1::2] = h[..., 1::2]
            h += y.relu()
        return h.tanh()


class Skipping(Stack):
    """Blocks that read an earlier value too: the first block reads one value twice."""

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        c, h = t.cos().exp(), x.sin()
        earlier = [h, x.cos(), t + x]
        for layer, skip in zip(self.layers, earlier, strict=True):
            h = h + (layer(h * c).relu() - skip)
        return h.tanh()


@pytest.mark.parametrize(
    ("model", "modules"), [(Stack(), 3), (Scaled(), 4), (Writing(), 3), (Skipping(), 3)]
)
def test_values_are_kept(model: nn.Module, modules: int) -> None:
    inputs = (torch.randn(2, 3, 4), torch.randn(2, 1, 1))
    expected = model(*inputs)
    gm, misses, given = outline(model, *inputs)
    assert not misses
    assert len({n.target for n in gm.graph.nodes if n.op == "call_module"}) == modules
    by_value = {id(x): x for x in given}
    assert len(by_value) == len(given)
    assert torch.equal(gm(*given)[0], expected)


class WritesOutside(Stack):
    """Blocks that write to a tensor made before them."""

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        c, h = t.cos().exp(), x.sin()
        log = torch.zeros(2, 3, 4)
        for layer in self.layers:
            h = h + (layer(h * c).relu() - c)
            log[...] = h
        return h.tanh() + log


def test_a_write_out_of_the_blocks_is_refused() -> None:
    _, misses, _ = outline(WritesOutside(), *INPUTS)
    assert len(misses) == 1
    assert "writes to a tensor made outside" in misses[0]
