"""Periods of more than one block, changed blocks, regions: on stacks that can be read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stepfx.patterns.analysis import Analysis, analyse
from stepfx.patterns.block_list import BlockList
from stepfx.patterns.operations import activates_tokens, is_matmul, mixes_tokens
from stepfx.patterns.region import Miss, Region
from stepfx.testing import capture

Step = Callable[[Tensor, Tensor], Tensor]


def space(x: Tensor, w: Tensor) -> Tensor:
    """Mix tokens, then run an MLP: the smallest block."""
    x = x + F.scaled_dot_product_attention(x @ w, x, x)
    return x + F.gelu(x @ w) @ w.T


def tall(x: Tensor, w: Tensor) -> Tensor:
    """Do the same by other operations."""
    x = x + torch.softmax(x @ x.transpose(1, 2), dim=-1) @ (x @ w)
    return x + F.silu(x @ w).square() @ w.T


def adapter(x: Tensor, w: Tensor) -> Tensor:
    """Mix tokens and run no MLP."""
    return x + F.scaled_dot_product_attention(x @ w, x @ w.T, x)


def turned(step: Step) -> Step:
    """Run `step` over the batch instead of the tokens."""
    return lambda x, w: step(x.transpose(0, 1), w).transpose(0, 1)


def stack(*steps: Step, rest: tuple[Step, ...] = ()) -> Analysis:
    """Analyse the steps run in order, each with weights of its own."""
    every = (*steps, *rest)

    def run(x: Tensor, weights: list[Tensor]) -> Tensor:
        h = x.sin()
        for step, w in zip(every, weights, strict=True):
            h = step(h, w)
        return h.cos()

    inputs = torch.randn(2, 5, 6), [torch.randn(6, 6) for _ in every]
    return analyse(capture(run, inputs).graph)


def lengths(found: Analysis) -> list[int]:
    return [len(blocks) for blocks in found.lists]


def kinds(blocks: BlockList) -> list[int]:
    """Return which kind each block is of, the most frequent being 0."""
    of = {i: number for number, kind in enumerate(blocks.kinds) for i in kind.members}
    return [of[i] for i in range(len(blocks))]


def test_two_kinds_by_turns_are_one_list() -> None:
    found = stack(*[space, tall] * 3)
    assert lengths(found) == [6]
    assert kinds(found.lists[0]) == [0, 1, 0, 1, 0, 1]


def test_a_long_cycle_is_one_list() -> None:
    found = stack(*[space, space, space, tall] * 2)
    assert lengths(found) == [8]
    assert kinds(found.lists[0]) == [0, 0, 0, 1, 0, 0, 0, 1]


def test_space_and_time_are_two_lists_under_one_gate() -> None:
    found = stack(*[space, turned(tall)] * 3)
    assert lengths(found) == [3, 3]
    assert isinstance(found.region, Region)
    order = [(block.number, block.index) for block in found.region.blocks()]
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_an_adapter_between_blocks_is_a_list_of_its_own() -> None:
    found = stack(*[space, space, adapter] * 3)
    assert lengths(found) == [6, 3]
    assert isinstance(found.region, Region)
    assert [len(blocks) for blocks in found.region.lists] == [6]


def test_a_list_goes_on_in_blocks_of_another_kind() -> None:
    found = stack(*[space] * 4, *[tall] * 3)
    assert lengths(found) == [7]
    assert kinds(found.lists[0]) == [0, 0, 0, 0, 1, 1, 1]


def test_a_block_cut_short_at_the_end() -> None:
    def short(x: Tensor, w: Tensor) -> Tensor:
        return x + F.scaled_dot_product_attention(x @ w, x, x)

    found = stack(*[space] * 4, short)
    assert lengths(found) == [5]
    assert kinds(found.lists[0]) == [0, 0, 0, 0, 1]


def test_a_block_begun_otherwise() -> None:
    def other(x: Tensor, w: Tensor) -> Tensor:
        x = x + F.scaled_dot_product_attention(x @ w, x, x).tanh()
        return x + F.gelu(x @ w) @ w.T

    found = stack(other, *[space] * 4)
    # The cut may lie in the middle of the blocks: the end is then the changed one.
    assert lengths(found) == [5]
    assert sorted(kinds(found.lists[0])) == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 3), (1, 4)])
def test_glue_parts_a_list_and_does_not_end_it(before: int, after: int) -> None:
    def glue(x: Tensor, w: Tensor) -> Tensor:
        return x * w.sum().tanh()

    found = stack(*[space] * before, glue, *[space] * after)
    assert lengths(found) == [before + after]
    assert isinstance(found.region, Region)


def test_blocks_that_share_weights() -> None:
    w = torch.randn(6, 6)

    def run(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(5):
            x = space(x, w)
        return x.cos()

    found = analyse(capture(run, (torch.randn(2, 5, 6), w)).graph)
    assert lengths(found) == [5]
    (stream,) = found.lists[0].streams
    assert str(stream.entry) == "l_x_"
    assert [str(node) for node in found.lists[0].invariants()] == ["l_w_"]


def test_lists_are_chosen_by_number() -> None:
    def run(x: Tensor, weights: list[Tensor]) -> Tensor:
        y = x.sin()
        for w in weights[:3]:
            y = space(y, w)
        h = torch.cat([x, y], dim=1)
        for w in weights:
            h = tall(h, w)
        return h[:, :5]

    inputs = torch.randn(2, 5, 6), [torch.randn(6, 6) for _ in range(4)]
    graph = capture(run, inputs).graph
    for chosen in ([0], [1]):
        region = analyse(graph, chosen).region
        assert isinstance(region, Region)
        assert [len(blocks) for blocks in region.lists] == [[3], [4]][chosen[0]]
    missing = analyse(graph, [2]).region
    assert isinstance(missing, Miss)
    assert "gate_lists names block list 2" in missing.reason


def test_what_operations_do() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w).relu()
        y = y @ y.transpose(1, 2) @ x
        return F.silu(y.mean(1)) + F.scaled_dot_product_attention(x, x, x).mean(1)

    graph = capture(run, (torch.randn(2, 5, 6), torch.randn(6, 6))).graph
    nodes = [n for n in graph.nodes if n.op.startswith("call_")]

    def named(test: Callable[[torch.fx.Node], bool]) -> list[str]:
        return [getattr(n.target, "__name__", str(n.target)) for n in nodes if test(n)]

    attention = "scaled_dot_product_attention"
    assert named(is_matmul) == ["linear", "matmul", "matmul", attention]
    assert attention in named(mixes_tokens)
    assert named(activates_tokens) == ["relu"]  # the other acts on a vector
