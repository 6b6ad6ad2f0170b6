"""Models that no library has: their block lists, and that the gate on them is sound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO, Animal

import stepfx
from stepfx.testing import BlockCounter

GATED = [name for name, animal in ZOO.items() if animal.gated]
OTHERS = [name for name in ZOO if name not in GATED]


def compiled(model: nn.Module, **options: Any) -> Any:
    backend = stepfx.Backend(inner="eager", **options)
    return torch.compile(model, backend=backend, fullgraph=True)


def steps(animal: Animal, scales: list[float]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the inputs of a denoising loop whose latent is scaled anew at each step."""
    z, t, text = animal.inputs()
    for i, scale in enumerate(scales):
        yield scale * z, t - 0.1 * i, text


@pytest.mark.parametrize("name", ZOO)
def test_block_lists(name: str) -> None:
    animal = ZOO[name]
    report = stepfx.explain(animal.build(), *animal.inputs())
    assert report.graphs == 1
    assert [blocks.length for blocks in report.block_lists] == animal.lists
    assert sum(blocks.length for blocks in report.block_lists if blocks.gated) == animal.gated
    assert (report.gate is not None) == (animal.gated > 0)
    assert animal.reason in (report.reason or "")


@pytest.mark.parametrize("name", GATED)
@torch.no_grad()
def test_off_is_off(name: str) -> None:
    animal = ZOO[name]
    model = animal.build()
    off = compiled(model, threshold=0.0)
    for inputs in steps(animal, [1.0, 1.0, -3.0]):
        assert torch.equal(off(*inputs), model(*inputs))


@pytest.mark.parametrize("name", GATED)
@torch.no_grad()
def test_blocks_are_skipped_while_the_latent_rests(name: str) -> None:
    animal = ZOO[name]
    model = animal.build()
    counter = BlockCounter(animal.blocks(model))
    with counter.counting() as full:
        model(*animal.inputs())
    assert full[0] >= animal.gated
    gated = compiled(model, threshold=0.1, taylor_order=0)  # a forecast would go on jumping
    for i, inputs in enumerate(steps(animal, [1.0, 1.0, -3.0, -3.0, 0.5, 0.5])):
        expected = model(*inputs)
        with counter.counting() as count:
            found = gated(*inputs)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        if i % 2 == 0:
            assert count[0] == full[0]
            assert torch.equal(found, expected)
        else:  # all but the first of the gated blocks are skipped
            assert count[0] == full[0] - animal.gated + 1
            assert torch.isfinite(found).all()
            assert (found - expected).norm() < 0.1 * expected.norm()
    (branch,) = stepfx.stats(model)[-1].branches.values()
    assert branch.schedule == "101010"


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_what_cannot_be_gated_runs_as_it_is(name: str) -> None:
    animal = ZOO[name]
    model = animal.build()
    gated = compiled(model, threshold=1e9)
    with pytest.warns(stepfx.StepfxWarning, match="runs without a step cache") as caught:
        found = [gated(*inputs) for inputs in steps(animal, [1.0, 1.0])]
    assert len(caught) == 1
    assert animal.reason in str(caught[0].message)
    for inputs, out in zip(steps(animal, [1.0, 1.0]), found, strict=True):
        assert torch.equal(out, model(*inputs))
    assert stepfx.stats(model) == []


@pytest.mark.parametrize("name", GATED)
@torch.no_grad()
def test_the_blocks_of_the_zoo_matter(name: str) -> None:
    """Guard the tests above: any gate looks right on blocks near the identity."""
    animal = ZOO[name]
    model = animal.build()
    inputs = animal.inputs()
    whole = model(*inputs)
    for module in animal.blocks(model)[1:]:
        for parameter in module.parameters():
            parameter.zero_()
    if len(animal.blocks(model)) > 1:
        assert (model(*inputs) - whole).norm() > 0.02 * whole.norm()


@torch.no_grad()
def test_gate_lists_puts_another_list_under_the_gate() -> None:
    animal = ZOO["two stacks"]
    model = animal.build()
    counter = BlockCounter(animal.blocks(model))
    gated = compiled(model, threshold=0.1, taylor_order=0, gate_lists=[0])
    ran = []
    z, t, first = animal.inputs()
    second = 2 * first
    for step, text in enumerate((first, first, second, second)):  # the list reads text only
        time = t - 0.1 * step
        with counter.counting() as count:
            found = gated(z, time, text)
        ran.append(count[0])
        torch.testing.assert_close(found, model(z, time, text), rtol=1e-4, atol=1e-5)
    assert ran == [8, 6, 8, 6]  # of the 3 + 5 blocks, two of the first list are skipped


def test_explain_says_why_lists_are_outside() -> None:
    animal = ZOO["two stacks"]
    report = stepfx.explain(animal.build(), *animal.inputs())
    assert [blocks.gated for blocks in report.block_lists] == [False, True]
    assert report.block_lists[1].outside is None
    assert report.block_lists[0].outside
    assert "list 0 is not under the gate: it " in str(report)
    stepfx.configure(gate_lists=[0])
    try:
        chosen = stepfx.explain(animal.build(), *animal.inputs())
    finally:
        stepfx.configure()
    assert [blocks.gated for blocks in chosen.block_lists] == [True, False]
    assert chosen.block_lists[1].outside == "option 'gate_lists' leaves it out"


def test_a_list_that_is_not_there() -> None:
    animal = ZOO["two stacks"]
    with pytest.warns(stepfx.StepfxWarning, match="gate_lists names block list 2"):
        compiled(animal.build(), gate_lists=[2])(*animal.inputs())
