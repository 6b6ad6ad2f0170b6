"""Block lists, streams and inputs of real architectures, and of one that nobody knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stepfx.patterns.analysis import Analysis, analyse
from stepfx.patterns.region import Miss, Region
from stepfx.testing import capture


def analyse_call(function: Any, *inputs: Any) -> Analysis:
    return analyse(capture(function, inputs).graph)


def test_lists_patterns_and_streams(any_tiny: Any) -> None:
    tiny = any_tiny
    x, t = tiny.inputs["hidden_states"], torch.tensor(500.0)
    tiny.counter.close()
    found = analyse_call(lambda: tiny.call(tiny.model, x, t))
    assert [len(blocks) for blocks in found.lists] == tiny.expected.lengths
    assert list(found.patterns) == tiny.expected.patterns
    assert [len(blocks.streams) for blocks in found.lists] == tiny.expected.streams
    assert isinstance(found.region, Region)
    assert sum(len(blocks) for blocks in found.region.lists) == tiny.blocks


def test_inputs_are_told_apart(any_tiny: Any) -> None:
    tiny = any_tiny
    x, t = tiny.inputs["hidden_states"], torch.full((len(tiny.inputs["hidden_states"]),), 500.0)
    tiny.counter.close()

    def call(latent: torch.Tensor, time: torch.Tensor, rest: dict[str, Any]) -> Any:
        return tiny.model(timestep=time, return_dict=False, **rest, hidden_states=latent)[0]

    rest = {k: v for k, v in tiny.inputs.items() if k != "hidden_states"}
    inputs = analyse_call(call, x, t, rest).inputs
    assert "time" in str(inputs.timestep)
    assert [str(node) for node in inputs.latents] == ["l_latent_"]
    tensors = [k for k, v in rest.items() if isinstance(v, torch.Tensor)]
    names = " ".join(str(node) for node in inputs.conditioning)
    assert len(inputs.conditioning) <= len(tensors)
    assert all(k in names for k in tensors if "ids" not in k and "mask" not in k)


def test_names_do_not_matter(hand_made: Any) -> None:
    found = analyse_call(hand_made(5), torch.randn(2, 6, 4), torch.ones(2), torch.randn(2, 16))
    assert [len(blocks) for blocks in found.lists] == [5]
    assert found.patterns == (3,)
    assert str(found.inputs.timestep) == "l_t_"
    assert [str(node) for node in found.inputs.conditioning] == ["l_w_"]
    kinds = [slot.kind for slot in found.lists[0].kinds[0].slots]
    assert kinds.count("stream") == 1
    assert kinds.count("invariant") == 1
    assert kinds.count("weight") == 8


@pytest.mark.parametrize(("count", "reason"), [(1, "no repeated blocks"), (2, "2 blocks")])
def test_too_few_blocks(hand_made: Any, count: int, reason: str) -> None:
    found = analyse_call(
        hand_made(count), torch.randn(2, 6, 4), torch.ones(2), torch.randn(2, 16)
    )
    assert isinstance(found.region, Miss)
    assert reason in found.region.reason


def test_layers_that_carry_nothing_are_no_blocks() -> None:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)).requires_grad_(False)

    def experts(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.relu(layer(x)).tanh().sigmoid().exp() for layer in layers]
        return torch.cat(parts, dim=-1)

    assert analyse_call(experts, torch.randn(2, 8)).lists == ()


class TwoStreams(nn.Module):
    """Blocks that return (e, h) or (h, e), with a cross product between them."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        cls = SwappedPair if swapped else Pair
        self.rows = nn.ModuleList(cls() for _ in range(4)).requires_grad_(False)

    def forward(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            result = row(h, e)
            h, e = (result[1], result[0]) if isinstance(row, SwappedPair) else result
        return h


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        both = torch.cat([a, b], dim=1).mean(1, keepdim=True)
        a = a + self.x(torch.relu(a + both))
        b = b + self.y(torch.relu(b + both))
        return a, b


class SwappedPair(Pair):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        both = torch.cat([a, b], dim=1).mean(1, keepdim=True)
        a = a + self.x(torch.relu(a + both))
        b = b + self.y(torch.relu(b + both))
        return b, a


@pytest.mark.parametrize("swapped", [False, True])
def test_order_of_a_returned_pair(swapped: bool) -> None:
    found = analyse_call(TwoStreams(swapped), torch.randn(2, 6, 8), torch.randn(2, 3, 8))
    assert [len(blocks) for blocks in found.lists] == [4]
    assert found.patterns == (1 if swapped else 0,)
    assert isinstance(found.region, Region)
    origins = zip(found.lists[0].streams, found.region.origins[0], strict=True)
    entries = [str(stream.entry) for stream, o in origins if o in found.region.image]
    assert entries == ["l_h_"]
