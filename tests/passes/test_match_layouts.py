"""Layouts at shared blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepfx.passes.base import PassContext
from stepfx.passes.canonicalize import Canonicalize
from stepfx.passes.match_layouts import MatchLayouts, dense_order, relayout
from stepfx.passes.outline_blocks import OutlineBlocks
from stepfx.patterns.program import value_of
from stepfx.pipeline import recorded_fake_mode
from stepfx.testing import capture, run_pass


@pytest.mark.parametrize(
    ("value", "order"),
    [
        (torch.empty(2, 3, 4), (0, 1, 2)),
        (torch.empty(2, 4, 3).transpose(1, 2), (0, 2, 1)),
        (torch.empty(1, 3, 4).as_strided((1, 3, 4), (99, 4, 1)), (0, 1, 2)),
        (torch.empty(2, 5, 4)[:, :3], None),
        (torch.empty(2, 1).expand(2, 3), None),
    ],
)
def test_dense_order(value: torch.Tensor, order: tuple[int, ...] | None) -> None:
    assert dense_order(value) == order


def test_relayout_keeps_values() -> None:
    x = torch.randn(2, 3, 4)
    y = relayout(x, (0, 2, 1))
    assert torch.equal(x, y)
    assert y.stride() == (12, 1, 3)


class Patches(nn.Module):
    """A transposed patch embedding before blocks that work on contiguous tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(2, 8, 2, 2)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            h = torch.nn.functional.layer_norm(layer(h.relu()), (8,)) + h.mean(1, keepdim=True)
        image = h.mean(-1).view(x.shape[0], 1, 4, 4)
        return image.repeat_interleave(2, 2).repeat_interleave(2, 3)


def test_the_first_block_gets_the_layout_of_the_others() -> None:
    model, x = Patches(), torch.randn(2, 2, 8, 8)
    gm = capture(model, (x,))
    given = [n.meta["grapharg"].example for n in gm.graph.find_nodes(op="placeholder")]
    run_pass(Canonicalize(), gm)
    ctx = PassContext(recorded_fake_mode(gm), lambda _: None)
    assert OutlineBlocks()(gm, ctx) == 6
    gm.recompile()
    assert MatchLayouts()(gm, ctx) == 1
    gm.recompile()
    calls = [n for n in gm.graph.nodes if n.op == "call_module" and "block" in n.target]
    strides = {value_of(call.args[0]).stride() for call in calls}
    assert strides == {(128, 8, 1)}
    torch.testing.assert_close(gm(*given)[0], model(x))
