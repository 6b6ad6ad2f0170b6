"""The gate in the outer graph."""

from __future__ import annotations

from typing import Any

import torch

from stepfx.passes.base import PassContext
from stepfx.passes.canonicalize import Canonicalize
from stepfx.passes.outline_blocks import OutlineBlocks
from stepfx.passes.step_cache import GateSite, StepCache
from stepfx.pipeline import recorded_fake_mode
from stepfx.printer import format_module
from stepfx.testing import capture


def gated(model: Any, step_cache: StepCache, *inputs: torch.Tensor) -> tuple[Any, Any, list]:
    gm = capture(model, inputs)
    misses: list[str] = []
    ctx = PassContext(recorded_fake_mode(gm), misses.append)
    for one in (Canonicalize(), OutlineBlocks(), step_cache):
        one(gm, ctx)
        gm.graph.lint()
        gm.recompile()
    return gm, ctx.notes.get("gate"), misses


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 6, 4), torch.ones(2), torch.randn(2, 16)


def test_the_outer_graph(hand_made: Any) -> None:
    gm, site, _ = gated(hand_made(3), StepCache(), *inputs())
    text = format_module(gm, "outer", sources=False)
    outer = text.split("\n\n")[0].splitlines()
    body = [line.split("] = ")[-1].strip() for line in outer if "= input" not in line]
    shown = [line.split(" = ", 1)[-1].split("(")[0].strip() for line in body[1:]]
    assert shown == [
        "call prologue",
        "getitem",
        "getitem",
        "call list_0_block",
        "getitem",
        "self.score",
        "self.compute_blocks",
        "self.keep",
        "self.reuse_residual",
        "%0.decide",
        "%0.cond",
        "getitem",
        "call epilogue",
        "getitem",
        "return",
    ]
    assert site == GateSite(1, 3, 3, 1, 1, 1, 2, True, True)


def test_the_gates_own_graphs(hand_made: Any) -> None:
    gm, _, _ = gated(hand_made(3), StepCache(history=2), *inputs())
    text = format_module(gm, "outer", sources=False)
    for expected in (
        """\
score:
    %0: f32[2, 6, 16] = input
    %1: f32[2, 6, 16] = input
    %2: f32[2, 6, 16] = input
    %3: bool[] = input
    %4: f32[2] = input
    %5 = sub(%1, %0)
    %6 = sub(%5, %2)
    %7 = %6.abs()
    %8 = %7.flatten(1)
    %9 = %8.mean(1, dtype=float32)
    %10 = %2.abs()
    %11 = %10.flatten(1)
    %12 = %11.mean(1, dtype=float32)
    %13 = %4.reshape(-1)
    %14 = %13.max()
    %15 = %14.to(float32)
    %16 = %15.reshape(1)
    %17 = %3.to(float32)
    %18 = %17.reshape(1)
    %19 = cat([%16, %18, %9, %12])
    return (%19,)
""",
        """\
reuse_residual:
    %0: f32[2, 6, 16] = input
    %1: f32[2, 6, 16] = input
    %2: f32[2, 6, 16] = input
    %3: f32[2] = input
    %4 = getitem(%3, 0)
    %5 = %1.to(float32)
    %6 = mul(%4, %5)
    %7 = getitem(%3, 1)
    %8 = %2.to(float32)
    %9 = mul(%7, %8)
    %10 = add(%6, %9)
    %11 = %0.to(float32)
    %12 = add(%11, %10)
    %13 = %12.to(float32)
    return (%13,)
""",
    ):
        assert expected in text


def test_fn_and_bn_move_the_gate(hand_made: Any) -> None:
    gm, site, _ = gated(hand_made(6), StepCache(fn=2, bn=1), *inputs())
    assert (site.first, site.last, site.blocks) == (2, 5, 6)
    outside = [n for n in gm.graph.nodes if n.op == "call_module" and "block" in n.target]
    inside = [n for n in gm.compute_blocks.graph.nodes if n.op == "call_module"]
    assert (len(outside), len(inside)) == (3, 3)


def test_one_skippable_block_is_enough(hand_made: Any) -> None:
    _, site, misses = gated(hand_made(4), StepCache(fn=3), *inputs())
    assert (site.first, site.last) == (3, 4)
    assert not misses


def test_no_block_left_to_skip_is_a_miss(hand_made: Any) -> None:
    _, site, misses = gated(hand_made(4), StepCache(fn=3, bn=1), *inputs())
    assert site is None
    assert "leave none of the 4 blocks" in misses[0]
