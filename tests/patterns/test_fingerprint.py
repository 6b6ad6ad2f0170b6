"""One fingerprint an architecture, whatever its size and names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from zoo import ZOO

import stepfx
from stepfx.patterns.analysis import analyse
from stepfx.patterns.find_blocks import find_block_lists
from stepfx.patterns.fingerprint import fingerprint, graph_of_kind
from stepfx.patterns.program import Program
from stepfx.testing import capture


def fingerprint_of(model: Callable[..., Any], *inputs: Any) -> str:
    return fingerprint(find_block_lists(Program(capture(model, inputs).graph)))


def print_of_tiny(tiny: Any) -> str:
    tiny.counter.close()
    x, t = tiny.inputs["hidden_states"], torch.tensor(500.0)
    return fingerprint_of(lambda: tiny.call(tiny.model, x, t))


@pytest.mark.parametrize(
    ("name", "larger"),
    [
        ("DiT", {"num_layers": 7, "attention_head_dim": 16, "num_attention_heads": 3}),
        ("SD3", {"num_layers": 6, "num_attention_heads": 2, "caption_projection_dim": 16}),
        ("Flux", {"num_layers": 6, "num_single_layers": 3, "num_attention_heads": 3}),
        ("Wan", {"num_layers": 3, "ffn_dim": 64, "num_attention_heads": 4}),
    ],
)
def test_sizes_of_one_architecture(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, name: str, larger: dict[str, int]
) -> None:
    small = tiny(name)
    known = print_of_tiny(small)
    for key, value in larger.items():
        monkeypatch.setitem(small.expected.init, key, value)
    assert print_of_tiny(tiny(name)) == known


def test_architectures_differ(tiny: Any) -> None:
    names = ["DiT", "PixArt", "Flux", "SD3", "Wan", "CogVideoX", "LTX", "QwenImage", "Sana"]
    found = {name: print_of_tiny(tiny(name)) for name in names}
    assert len(set(found.values())) == len(names), found


def test_of_the_zoo() -> None:
    names = ["U-ViT", "PixArt", "MM-DiT", "HDiT", "recurrence", "DiffiT", "parallel", "RIN"]
    prints = [fingerprint_of(ZOO[n].build(), *ZOO[n].inputs()) for n in names]
    assert len(set(prints)) == len(names)


class Stack(nn.Module):
    """A stack with the sizes given; `late` moves the norm of its blocks behind the linear."""

    def __init__(
        self, depth: int, width: int, name: str = "layers", late: bool = False
    ) -> None:
        super().__init__()
        self.late, self.norm = late, nn.LayerNorm(width)
        self.name = name
        setattr(self, name, nn.ModuleList(nn.Linear(width, width) for _ in range(depth)))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in getattr(self, self.name):
            y = self.norm(layer(x).relu()) if self.late else layer(self.norm(x)).relu()
            x = x + 0.5 * y
        return x


@given(
    depth=st.integers(2, 9),
    width=st.integers(2, 40),
    batch=st.integers(1, 4),
    tokens=st.integers(2, 9),
    name=st.sampled_from(["layers", "h", "transformer_blocks"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=20, deadline=None)
def test_sizes_and_names_leave_no_trace(
    depth: int, width: int, batch: int, tokens: int, name: str, dtype: torch.dtype
) -> None:
    known = fingerprint_of(Stack(3, 8), torch.randn(2, 4, 8))
    model = Stack(depth, width, name).to(dtype)
    x = torch.randn(batch, tokens, width, dtype=dtype)
    assert fingerprint_of(model, x) == known


def test_order_of_operations_and_of_arguments_is_seen() -> None:
    def stack(body: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def run(x: Tensor, w: Tensor) -> Tensor:
            for i in range(4):
                x = x + body(x, w[i])
            return x

        return run

    bodies: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, w: (x @ w).sin().cos(),
        lambda x, w: (x @ w).cos().sin(),
        lambda x, w: (w @ x).sin().cos(),
        lambda x, w: (x @ w - x).sin().cos(),
        lambda x, w: (x - x @ w).sin().cos(),
        lambda x, w: (x @ w).softmax(-1).chunk(2, -1)[0].repeat(1, 1, 2),
        lambda x, w: (x @ w).softmax(-1).chunk(2, -1)[1].repeat(1, 1, 2),
    ]
    inputs = torch.randn(2, 6, 6), torch.randn(4, 6, 6)
    prints = [fingerprint_of(stack(body), *inputs) for body in bodies]
    assert len(set(prints)) == len(bodies)
    late = fingerprint_of(Stack(3, 8, late=True), torch.randn(2, 4, 8))
    assert late != fingerprint_of(Stack(3, 8), torch.randn(2, 4, 8))


def test_the_graph_of_a_block() -> None:
    (blocks,) = find_block_lists(Program(capture(Stack(3, 8), (torch.randn(2, 4, 8),)).graph))
    graph = graph_of_kind(blocks, blocks.kinds[0])
    labels = {n: label for n, label in graph.nodes("label") if isinstance(n, int)}
    inputs = sorted(label for n, label in labels.items() if n < 0)
    assert inputs == ["stream", *["weight"] * 4]
    operations = [label.split("(")[0] for n, label in labels.items() if n >= 0]
    assert operations == ["layer_norm", "linear", "relu", "mul", "add"]
    assert graph.nodes[(3, 4)]["label"] == "[1]"  # the add reads the product second


def test_in_the_report(hand_made: Any) -> None:
    def inputs(tokens: int, width: int) -> tuple[Tensor, ...]:
        return torch.randn(2, tokens, 4), torch.ones(2), torch.randn(2, width)

    small = stepfx.explain(hand_made(4), *inputs(6, 16))
    large = stepfx.explain(hand_made(7, width=24), *inputs(10, 24))
    assert small.fingerprint is not None
    assert small.fingerprint == large.fingerprint == small.to_dict()["fingerprint"]
    assert f"architecture: {small.fingerprint}" in str(small)
    assert stepfx.explain(lambda x: x.sin(), torch.ones(2)).fingerprint is None
    analysis = analyse(capture(hand_made(4), inputs(6, 16)).graph)
    assert fingerprint(analysis.lists) == small.fingerprint
