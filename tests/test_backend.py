"""The backend as torch.compile sees it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import stepfx


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 6, 4), torch.full((2,), 500.0), torch.randn(2, 16)


@torch.no_grad()
def run(model: Any, steps: int = 3) -> str:
    """Run a few steps with unchanged latents; return the schedule that stats tell."""
    z, _, w = inputs()
    for i in range(steps):
        model(z, torch.full((2,), 900.0 - i), w)
    module = getattr(model, "_orig_mod", model)
    found = [b for r in stepfx.stats(module) for b in r.branches.values()]
    return found[-1].schedule if found else "no gate"


def test_the_backend_needs_no_import() -> None:
    assert "stepfx" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("stepfx") is stepfx.backend.stepfx


@pytest.mark.parametrize(
    "options",
    [
        {"inner": "eager", "threshold": 1e9},
        {"inner": "eager", "residual_diff_threshold": 1e9},
        {"inner": "aot_eager", "threshold": 1e9},
        {"inner": "eager", "threshold": 1e9, "compile_unit": "region"},
        {"inner": "aot_eager", "threshold": 1e9, "compile_unit": "region"},
    ],
)
def test_options_reach_the_backend(hand_made: Any, options: dict[str, Any]) -> None:
    model = torch.compile(hand_made(4), backend="stepfx", options=options, fullgraph=True)
    assert run(model) == "100"


def test_process_default(hand_made: Any) -> None:
    stepfx.configure(inner="eager", threshold=1e9)
    try:
        assert run(torch.compile(hand_made(4), backend="stepfx", fullgraph=True)) == "100"
        stepfx.configure(inner="eager", threshold=0.0)
        torch._dynamo.reset()
        assert run(torch.compile(hand_made(4), backend="stepfx", fullgraph=True)) == "111"
    finally:
        stepfx.configure()


def test_environment_default(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFX_OPTIONS", '{"inner": "eager", "threshold": 1e9}')
    backend = stepfx.Backend()
    assert run(torch.compile(hand_made(4), backend=backend)) == "100"


def test_fn_and_bn(hand_made: Any) -> None:
    model = hand_made(6)
    counter = stepfx.testing.BlockCounter(model.stuff.values())
    backend = stepfx.Backend(
        inner="eager", threshold=1e9, fn_compute_blocks=2, bn_compute_blocks=1
    )
    compiled = torch.compile(model, backend=backend)
    with counter.counting() as count:
        assert run(compiled, 4) == "1000"
    assert count[0] == 6 + 3 * 3


def test_compile_function(hand_made: Any) -> None:
    model = hand_made(4)
    assert run(stepfx.compile(model, inner="eager", threshold=1e9, fullgraph=True)) == "100"
    assert type(model).__name__ == "HandMade"


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_blocks_run_as_they_are(hand_made: Any, count: int) -> None:
    model = hand_made(count)
    compiled = torch.compile(model, backend=stepfx.Backend(inner="eager", threshold=1e9))
    with pytest.warns(stepfx.StepfxWarning, match="runs without a step cache") as caught:
        assert run(compiled) == "no gate"
    assert len(caught) == 1
    z, t, w = inputs()
    with torch.no_grad():
        assert torch.equal(compiled(z, t, w), model(z, t, w))
    report = stepfx.explain(model, z, t, w)
    assert report.gate is None
    assert report.reason is not None
    assert report.reason in str(caught[0].message)
    assert f"no gate: {report.reason}" in str(report)


def test_grad_mode_runs_as_it_is(hand_made: Any) -> None:
    model = hand_made(4).requires_grad_(True)
    compiled = torch.compile(model, backend=stepfx.Backend(inner="eager", threshold=1e9))
    with pytest.warns(stepfx.StepfxWarning, match="grad mode is on"):
        out = compiled(*inputs())
    out.sum().backward()
    assert model.out.weight.grad is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(compiled) == "100"  # without grad it is gated


class Broken(nn.Module):
    """A model whose graph breaks between its blocks."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, z: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        c = self.inner.embed(t) + w
        x = self.inner.inn(z)
        blocks = list(self.inner.stuff.values())
        for block in blocks[:3]:
            x = block(x, c)
        torch._dynamo.graph_break()
        for block in blocks[3:]:
            x = block(x, c)
        return self.inner.out(x)


def test_a_graph_break_between_blocks(hand_made: Any) -> None:
    model = Broken(hand_made(6))
    compiled = torch.compile(model, backend=stepfx.Backend(inner="eager", threshold=1e9))
    z, t, w = inputs()
    with (
        pytest.warns(
            stepfx.StepfxWarning, match="a graph break at .*test_backend.py"
        ) as caught,
        torch.no_grad(),
    ):
        found = [compiled(z, t - i, w) for i in range(4)]
    assert len(caught) == 1
    for i, out in enumerate(found):
        assert torch.equal(out, model(z, t - i, w))
    assert "graph break" in (stepfx.explain(model, z, t, w).reason or "")


def test_blocks_compiled_one_by_one(tiny: Any) -> None:
    """Regional compilation: one graph serves many blocks, and none of them is gated."""
    one = tiny("Flux")
    expected, _ = one.denoise(one.model, one.times(4))
    one.model.compile_repeated_blocks(backend=stepfx.Backend(inner="eager", threshold=1e9))
    with pytest.warns(stepfx.StepfxWarning, match="runs without a step cache"):
        found, ran = one.denoise(one.model, one.times(4))
    assert torch.equal(found, expected)
    assert ran == [9] * 4


def test_a_function_that_is_no_transformer() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend=stepfx.Backend(inner="eager"))
    x = torch.randn(3)
    with pytest.warns(stepfx.StepfxWarning, match="no repeated blocks"):
        assert torch.equal(compiled(x), x.sin() + 1)


def test_a_failing_pass_is_run_around(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a planted bug")

    monkeypatch.setattr("stepfx.backend.lower", fail)
    monkeypatch.delenv("STEPFX_STRICT")
    model = hand_made(4)
    compiled = torch.compile(model, backend=stepfx.Backend(inner="eager", threshold=1e9))
    with pytest.warns(stepfx.StepfxWarning, match="RuntimeError: a planted bug"):
        assert run(compiled) == "no gate"


def test_dynamos_graph_is_left_alone(hand_made: Any) -> None:
    texts = []
    backend = stepfx.Backend(inner="eager", threshold=1e9)

    def spy(gm: Any, given: Any) -> Any:
        texts.append(str(gm.graph))
        compiled = backend(gm, given)
        texts.append(str(gm.graph))
        return compiled

    run(torch.compile(hand_made(4), backend=spy))
    assert texts[0] == texts[1]


def test_explain_of_a_compiled_model(hand_made: Any) -> None:
    compiled = torch.compile(hand_made(4), backend=stepfx.Backend(inner="eager"))
    report = stepfx.explain(compiled, *inputs())
    assert [b.length for b in report.block_lists] == [4]
    assert report.timestep == "t f32[2]"
    assert report.latents == ("z f32[2, 6, 4]",)
    assert report.conditioning == ("w f32[2, 16]",)
    assert stepfx.stats(compiled) == []
