"""Models that Dynamo breaks: gated where all blocks are in one graph, left alone elsewhere."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import stepfx
from stepfx import calls
from stepfx.testing import BlockCounter


class BreakBefore(nn.Module):
    """Embeds, breaks, then runs the blocks of another model and what is behind them."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, z: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        c = self.inner.embed(t) + w
        x = self.inner.inn(z)
        torch._dynamo.graph_break()
        for block in self.inner.stuff.values():
            x = block(x, c)
        return self.inner.out(x)


class BreakBehind(BreakBefore):
    """Breaks behind the last block."""

    def forward(self, z: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        c = self.inner.embed(t) + w
        x = self.inner.inn(z)
        for block in self.inner.stuff.values():
            x = block(x, c)
        torch._dynamo.graph_break()
        return self.inner.out(x)


class BreakInLoop(BreakBefore):
    """Breaks in the loop over the blocks: Dynamo skips the frame, blocks come one by one."""

    def forward(self, z: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        c = self.inner.embed(t) + w
        x = self.inner.inn(z)
        for block in self.inner.stuff.values():
            x = block(x, c)
            torch._dynamo.graph_break()
        return self.inner.out(x)


class Walk:
    """Calls a compiled model step by step and counts blocks."""

    def __init__(self, model: BreakBefore, compiled: Any) -> None:
        self.model, self.compiled = model, compiled
        self.counter = BlockCounter(model.inner.stuff.values())

    def step(self, z: torch.Tensor, t: float, w: torch.Tensor) -> tuple[int, torch.Tensor]:
        with torch.no_grad(), self.counter.counting() as count:
            out = self.compiled(z, torch.full((2,), t), w)
        return count[0], out


def latent(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(seed))


W1, W2 = torch.full((1,), 0.5), torch.full((1,), -0.5)


@pytest.fixture(params=[BreakBefore, BreakBehind])
def walk(request: pytest.FixtureRequest, hand_made: Any) -> Walk:
    torch._dynamo.reset()
    model = request.param(hand_made(6)).eval()
    return Walk(model, torch.compile(model, backend=gated(1e9)))


def gated(threshold: float, **options: Any) -> stepfx.Backend:
    return stepfx.Backend(inner="eager", threshold=threshold, taylor_order=0, **options)


def test_blocks_behind_or_before_a_break_are_gated(walk: Walk) -> None:
    z = latent()
    ran = [walk.step(z, t, W1)[0] for t in (9.0, 8.0, 7.0)]
    assert ran == [6, 1, 1]
    # Time turns back: a new request.
    assert walk.step(z, 9.0, W1)[0] == 6
    assert walk.step(z, 8.0, W1)[0] == 1


def test_branches_and_moving_latents(walk: Walk) -> None:
    ran = []
    for i, t in enumerate((9.0, 8.0, 7.0)):
        ran += [walk.step(latent(i), t, w)[0] for w in (W1, W2)]
    assert ran == [6, 6, 1, 1, 1, 1]
    (found,) = stepfx.stats(walk.model)
    assert [b.schedule for b in found.branches.values()] == ["100", "100"]


def test_threshold_zero_is_the_model(walk: Walk) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(walk.model, backend=gated(0.0))
    with torch.no_grad():
        for t in (9.0, 8.0):
            given = latent(), torch.full((2,), t), W1
            assert torch.equal(compiled(*given), walk.model(*given))


def test_a_call_without_its_first_part_is_computed(walk: Walk) -> None:
    """The part behind a break may run without a note: the one before it may be Python."""
    if not isinstance(walk.model, BreakBefore) or type(walk.model) is BreakBehind:
        return
    z = latent()
    assert [walk.step(z, t, W1)[0] for t in (9.0, 8.0)] == [6, 1]
    forget = calls.enter
    try:
        calls.enter = lambda *_: calls.Call()  # type: ignore[assignment]
        with pytest.warns(stepfx.StepfxWarning, match="no timestep input"):
            assert walk.step(z, 7.0, W1)[0] == 6
    finally:
        calls.enter = forget


def test_what_a_call_noted_is_let_go(walk: Walk) -> None:
    z = latent()
    walk.step(z, 9.0, W1)
    walk.step(z, 8.0, W1)
    call = calls.latest()
    if call is not None:
        gc.collect()
        assert call.time is None
        assert not call.given


def test_blocks_outside_the_graph_run_as_they_are_with_one_warning(hand_made: Any) -> None:
    torch._dynamo.reset()
    model = BreakInLoop(hand_made(6)).eval()
    walk = Walk(model, torch.compile(model, backend=gated(1e9)))
    z = latent()
    with pytest.warns(stepfx.StepfxWarning, match=r"test_broken_models\.py:\d+") as caught:
        found = [walk.step(z, t, W1) for t in (9.0, 8.0, 7.0)]
    assert len(caught) == 1
    assert [count for count, _ in found] == [6, 6, 6]
    for t, (_, out) in zip((9.0, 8.0, 7.0), found, strict=True):
        with torch.no_grad():
            assert torch.equal(out, model(z, torch.full((2,), t), W1))
