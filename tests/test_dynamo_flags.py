"""stepfx.compile: Dynamo's flags are tried, taken back where they harm, and left to nobody."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

import stepfx
from stepfx.dynamo_flags import FLAGS, FlaggedCall, Mode
from stepfx.testing import BlockCounter, fill_gates

WIDTH, BLOCKS = 8, 6


class Block(nn.Module):
    """Attention to the tokens of a prompt, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor, text: Tensor, c: Tensor) -> Tensor:
        q, both = self.query(self.norm(h) + c), torch.cat([h, text], 1)
        q, k, v = (x[:, None] for x in (q, self.key(both), both))
        h = h + scaled_dot_product_attention(q, k, v)[:, 0]
        return h + self.down(silu(self.up(self.norm(h))))


class Masked(nn.Module):
    """Cuts the prompt to the tokens that the mask holds: a size that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def time(self, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(torch.arange(WIDTH // 2) * -1.0)
        return self.embed(torch.cat([angles.sin(), angles.cos()], -1))[:, None]

    def forward(self, z: Tensor, t: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        c, h = self.time(t), z
        for block in self.blocks:
            h = self.cut(block, h, text, mask, c)
        return self.head(h)

    def cut(self, block: nn.Module, h: Tensor, text: Tensor, mask: Tensor, c: Tensor) -> Any:
        return block(h, text[:, torch.nonzero(mask[0]).flatten()], c)


class CutOnce(Masked):
    """The prologue makes the size; all blocks read a tensor of it."""

    def forward(self, z: Tensor, t: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        c, h = self.time(t), z
        for block in self.blocks:
            text = text[:, : int(mask[0].sum().item())]
            h = block(h, text, c)
        return self.head(h)


class Untraceable(Masked):
    """Dynamo breaks at the number; with the flags it fails behind it."""

    def forward(self, z: Tensor, t: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        c, h = self.time(t), z
        kept = torch.nonzero(mask[0]).flatten().tolist()
        if kept[0] == 0 and len(kept) > 1:
            text = text[:, kept]
        for block in self.blocks:
            h = block(h, text, c)
        return self.head(h)


class BreaksLater(Masked):
    """Without the flags all blocks are behind the break, with them it is between blocks."""

    def forward(self, z: Tensor, t: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        c, h = self.time(t), z
        count = int(mask[0].sum().item())
        for block in list(self.blocks)[:3]:
            h = block(h, text, c)
        for _ in range(count):
            c = c * 0.9
        for block in list(self.blocks)[3:]:
            h = block(h, text, c)
        return self.head(h)


def made(kind: type[Masked]) -> Masked:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kind().eval().requires_grad_(False)
    fill_gates(model, 0.2)
    return model


def inputs(step: int, jump: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    z, text = torch.randn(1, 9, WIDTH, generator=generator), torch.randn(1, 5, WIDTH)
    text = torch.randn(1, 5, WIDTH, generator=generator)
    mask = torch.tensor([[True, True, True, False, False]])
    return jump * z, torch.full((1,), 9.0 - 0.001 * step), text, mask


def walk(model: Masked, compiled: Any, jumps: list[float]) -> list[int]:
    """Run a denoising loop; return how many blocks each step ran, and check their outputs."""
    counter = BlockCounter(model.blocks)
    ran = []
    for step, jump in enumerate(jumps):
        expected = model(*inputs(step, jump))
        with counter.counting() as count:
            found = compiled(*inputs(step, jump))
        ran.append(count[0])
        assert torch.isfinite(found).all()
        if count[0] == BLOCKS:
            assert torch.equal(found, expected)
    counter.close()
    return ran


def compiled_of(model: Masked, **options: Any) -> Any:
    return stepfx.compile(model, inner="eager", threshold=0.02, taylor_order=0, **options)


def state(compiled: Any) -> Mode:
    assert isinstance(compiled.forward, FlaggedCall)
    return compiled.forward.mode


@pytest.mark.parametrize("kind", [Masked, CutOnce])
@torch.no_grad()
def test_sizes_that_depend_on_data_are_gated(kind: type[Masked]) -> None:
    model = made(kind)
    compiled = compiled_of(model)
    assert walk(model, compiled, [1.0, 1.0, -3.0, -3.0]) == [6, 1, 6, 1]
    assert state(compiled) is Mode.FLAGS


@torch.no_grad()
def test_the_plain_backend_leaves_the_flags_alone() -> None:
    model = made(CutOnce)
    backend = stepfx.Backend(inner="eager", threshold=0.02, taylor_order=0)
    with pytest.warns(stepfx.StepfxWarning, match="without a step cache"):
        assert walk(model, torch.compile(model, backend=backend), [1.0] * 3) == [6, 6, 6]


@torch.no_grad()
def test_flags_are_taken_back_where_dynamo_fails() -> None:
    model = made(Untraceable)
    with torch._dynamo.config.patch(FLAGS), pytest.raises(Exception, match="data-dependent"):
        torch.compile(model, backend="eager")(*inputs(0))
    torch._dynamo.reset()
    compiled = compiled_of(model)
    assert walk(model, compiled, [1.0, 1.0, -3.0, -3.0]) == [6, 1, 6, 1]
    assert state(compiled) is Mode.PLAIN


@torch.no_grad()
def test_flags_are_taken_back_where_only_a_break_leaves_a_gate() -> None:
    model = made(BreaksLater)
    compiled = compiled_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", stepfx.StepfxWarning)
        ran = walk(model, compiled, [1.0, 1.0, 1.0, 1.0, -3.0])
    # One call with the flags, one that looks at the graphs without them, then the gate.
    assert ran == [6, 6, 6, 1, 6]
    assert state(compiled) is Mode.PLAIN


@torch.no_grad()
def test_flags_are_taken_back_where_the_compiled_code_fails() -> None:
    """Inductor may write code that cannot run (2.13: "name 'Mod' is not defined")."""
    model = made(CutOnce)
    compiled = compiled_of(model)
    flagged = compiled.forward

    def fails(*_: Any) -> Any:
        raise NameError("name 'Mod' is not defined")

    flagged._call = fails
    with pytest.warns(stepfx.StepfxWarning, match="without a step cache"):
        assert walk(model, compiled, [1.0, 1.0]) == [6, 6]
    assert state(compiled) is Mode.PLAIN


@torch.no_grad()
def test_errors_of_the_model_are_its_own() -> None:
    model = made(CutOnce)
    compiled = compiled_of(model)
    with pytest.raises(Exception, match=r"size|shape|dimension"):
        compiled(torch.randn(1, 9, WIDTH + 1), *inputs(0)[1:])


@torch.no_grad()
def test_flags_hold_for_no_one_else() -> None:
    seen: list[Any] = []

    class Asks(Masked):
        @torch._dynamo.disable
        def ask(self) -> None:
            def look() -> None:
                seen.append([getattr(torch._dynamo.config, name) for name in FLAGS])

            other = threading.Thread(target=look)
            other.start()
            other.join()

        def forward(self, z: Tensor, t: Tensor, text: Tensor, mask: Tensor) -> Tensor:
            self.ask()
            return super().forward(z, t, text, mask)

    before = [getattr(torch._dynamo.config, name) for name in FLAGS]
    assert before == [False, False]
    compiled_of(made(Asks))(*inputs(0))
    assert seen
    assert all(found == before for found in seen)
    assert [getattr(torch._dynamo.config, name) for name in FLAGS] == before


@pytest.mark.parametrize("kind", [Masked, CutOnce])
@torch.no_grad()
def test_sizes_that_depend_on_data_through_inductor(kind: type[Masked]) -> None:
    model = made(kind)
    compiled = stepfx.compile(model, threshold=0.02, taylor_order=0)
    counter = BlockCounter(model.blocks)
    ran = []
    for step, jump in enumerate([1.0, 1.0, -3.0, -3.0]):
        with counter.counting() as count:
            found = compiled(*inputs(step, jump))
        ran.append(count[0])
        if count[0] == BLOCKS:
            torch.testing.assert_close(found, model(*inputs(step, jump)), rtol=1e-4, atol=1e-5)
    counter.close()
    assert ran == [6, 1, 6, 1]


@pytest.mark.parametrize(
    ("kind", "needs_flags"), [(Masked, True), (CutOnce, True), (Untraceable, False)]
)
def test_explain_tries_the_flags(kind: type[Masked], needs_flags: bool) -> None:
    report = stepfx.explain(made(kind), *inputs(0))
    assert report.gate is not None
    assert report.gate.blocks == BLOCKS
    assert report.needs_flags is needs_flags
    assert ("sets Dynamo flags" in str(report)) is needs_flags
