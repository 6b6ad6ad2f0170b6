"""Through Inductor: a representative few."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stepfx

pytestmark = pytest.mark.slow


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_against_inductor_and_with_reuse(any_tiny: Any, mixing: Any) -> None:
    one = any_tiny
    times = one.times(8)
    threshold = mixing(one, times)
    x, t = one.inputs["hidden_states"], times[0]
    plain = one.call(torch.compile(one.model), x, t)
    off = torch.compile(one.model, backend=stepfx.Backend(threshold=0.0), fullgraph=True)
    assert relative(one.call(off, x, t), plain) < 1e-5
    stepfx.reset(one.model)
    torch._dynamo.reset()
    expected, _ = one.denoise(one.model, times)
    compiled = torch.compile(
        one.model, backend=stepfx.Backend(threshold=threshold), fullgraph=True
    )
    found, ran = one.denoise(compiled, times)
    (branch,) = stepfx.stats(one.model)[-1].branches.values()
    assert ran == [one.blocks if digit == "1" else 1 for digit in branch.schedule]
    assert set(ran) == {one.blocks, 1}
    assert relative(found, expected) < 0.05


def test_an_inductor_mode_and_a_region(tiny: Any) -> None:
    one = tiny("Wan")
    times = one.times(3)
    expected = one.call(one.model, one.inputs["hidden_states"], times[0])
    compiled = torch.compile(
        one.model,
        backend=stepfx.Backend(threshold=1e9, compile_unit="region"),
        mode="max-autotune-no-cudagraphs",
        fullgraph=True,
    )
    found = one.call(compiled, one.inputs["hidden_states"], times[0])
    assert relative(found, expected) < 1e-5
    with one.counter.counting() as count:
        one.call(compiled, one.inputs["hidden_states"], times[1])
    assert count[0] == 1


def test_equal_blocks_are_compiled_once(tiny: Any) -> None:
    one = tiny("Wan")
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(one.model, backend=stepfx.Backend(threshold=0.1))
    one.call(compiled, one.inputs["hidden_states"], one.times(1)[0])
    total = torch._dynamo.utils.counters["aot_autograd"]["total"]
    assert total == 3  # prologue, block, epilogue: the streams are small


def test_dynamic_shapes(tiny: Any) -> None:
    one = tiny("DiT")
    one.inputs["class_labels"] = torch.tensor([3, 7, 1])
    one.inputs["hidden_states"] = torch.randn(3, 4, 8, 8)
    compiled = torch.compile(
        one.model, backend=stepfx.Backend(threshold=1e9), dynamic=True, fullgraph=True
    )
    for batch in (3, 5, 3):
        one.inputs["class_labels"] = torch.arange(batch)
        one.inputs["hidden_states"] = torch.randn(batch, 4, 8, 8)
        x, t = one.inputs["hidden_states"], one.times(1)[0]
        assert relative(one.call(compiled, x, t), one.call(one.model, x, t)) < 1e-5
        with one.counter.counting() as count:
            one.call(compiled, x, t - 1)
        # Dynamo passes the float attributes of modules as inputs under dynamic=True; the
        # first block unpacks them, and is the first block all the same.
        assert count[0] == 1
