"""The laws of the design on every tiny model, through `inner="eager"`."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import stepfx
from stepfx.session import SESSIONS
from stepfx.testing import fill_gates

STEPS = 10


def eager(**options: Any) -> stepfx.Backend:
    return stepfx.Backend(inner="eager", **options)


def branches(model: torch.nn.Module) -> list[stepfx.BranchStats]:
    return [b for r in stepfx.stats(model) for b in r.branches.values()]


@pytest.mark.parametrize("options", [{"threshold": 0.0}, {"cache": None}])
def test_off_is_off(any_tiny: Any, options: dict[str, Any]) -> None:
    tiny, times = any_tiny, any_tiny.times(3)
    expected, ran = tiny.denoise(tiny.model, times)
    compiled = torch.compile(tiny.model, backend=eager(**options), fullgraph=True)
    found, ran_compiled = tiny.denoise(compiled, times)
    assert torch.equal(found, expected)
    assert ran_compiled == ran == [tiny.blocks] * 3
    assert all(b.bytes_kept == 0 and b.reused == 0 for b in branches(tiny.model))


def test_blocks_that_run_are_those_that_stats_tell(any_tiny: Any, mixing: Any) -> None:
    tiny, times = any_tiny, any_tiny.times(STEPS)
    threshold = mixing(tiny, times)
    expected, _ = tiny.denoise(tiny.model, times)
    compiled = torch.compile(tiny.model, backend=eager(threshold=threshold), fullgraph=True)
    found, ran = tiny.denoise(compiled, times)
    (branch,) = branches(tiny.model)
    assert 0 < branch.reused < STEPS - 1
    assert branch.computed + branch.reused == STEPS
    assert ran == [tiny.blocks if digit == "1" else 1 for digit in branch.schedule]
    assert branch.schedule[0] == "1"
    assert branch.scores[0] is None
    for digit, score in zip(branch.schedule, branch.scores, strict=True):
        assert score is None or (digit == "0") == (score <= threshold)
    assert (found - expected).norm() / expected.norm() < 0.05
    assert not torch.equal(found, expected)


def test_a_compiled_model_is_one_graph(any_tiny: Any) -> None:
    tiny = any_tiny
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(tiny.model, backend=eager(threshold=1e9), fullgraph=True)
    _, ran = tiny.denoise(compiled, tiny.times(4))
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert ran == [tiny.blocks, 1, 1, 1]


def test_explain_sees_what_runs(any_tiny: Any) -> None:
    tiny = any_tiny
    x, t = tiny.inputs["hidden_states"], torch.tensor(500.0)
    tiny.counter.close()
    report = stepfx.explain(lambda: tiny.call(tiny.model, x, t))
    assert report.graphs == 1
    assert report.reason is None
    assert report.gate is not None
    assert (report.gate.first, report.gate.last) == (1, tiny.blocks)
    assert [b.length for b in report.block_lists] == tiny.expected.lengths
    assert [b.pattern for b in report.block_lists] == tiny.expected.patterns
    assert sum(b.length for b in report.block_lists if b.gated) == tiny.blocks
    text = str(report)
    assert "gate: blocks 1 to" in text
    assert report.to_dict()["graphs"] == 1


@pytest.mark.parametrize("name", ["Flux", "CogVideoX"])
def test_every_stream_is_restored(tiny: Any, name: str) -> None:
    # Text and image move; on a reused step with unchanged inputs both come back exactly.
    one = tiny(name)
    x, t = one.inputs["hidden_states"], torch.tensor(700.0)
    compiled = torch.compile(one.model, backend=eager(threshold=1e9, taylor_order=0))
    first = one.call(compiled, x, t)
    with one.counter.counting() as count:
        second = one.call(compiled, x, t - 1e-3)
    assert count[0] == 1
    torch.testing.assert_close(second, first, rtol=1e-3, atol=1e-4)


def test_nothing_is_aliased(tiny: Any) -> None:
    one = tiny("Wan")
    x = one.inputs["hidden_states"].clone()
    compiled = torch.compile(one.model, backend=eager(threshold=1e9))
    times = one.times(4)
    kept_input = x.clone()
    outputs = [one.call(compiled, x, t) for t in times]
    copies = [o.clone() for o in outputs]
    assert torch.equal(x, kept_input)
    for output in outputs:
        output.fill_(float("nan"))  # the caller may do what it likes with what it got
    again = [one.call(compiled, x, t) for t in times]
    for a, b in zip(again, copies, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_poisonous_is_kept(tiny: Any, bad: float) -> None:
    one, times = tiny("Wan"), tiny("Wan").times(6)
    x = one.inputs["hidden_states"]
    poisoned = x.clone()
    poisoned[0, 0, 0, 0, 0] = bad
    compiled = torch.compile(one.model, backend=eager(threshold=1e9))
    ran = []
    for i, t in enumerate(times):
        with one.counter.counting() as count:
            out = one.call(compiled, poisoned if i == 2 else x, t)
        ran.append(count[0])
        assert bool(torch.isfinite(out).all()) == (i != 2)
    # Step 2 is bad, so it and the one behind it are computed; then reuse goes on.
    assert ran == [6, 1, 6, 6, 1, 1]


def test_a_residual_that_overflows_is_not_kept(hand_made: Any) -> None:
    model = hand_made(5)
    with torch.no_grad():
        model.stuff["k3"].b.bias.fill_(float("inf"))
        model.stuff["k4"].m.weight.zero_()  # and comes back finite? it does not: inf stays
    z, w = torch.randn(2, 6, 4), torch.randn(2, 16)
    compiled = torch.compile(model, backend=eager(threshold=1e9))
    with torch.no_grad():
        for t in (900.0, 800.0, 700.0):
            compiled(z, torch.full((2,), t), w)
    (branch,) = branches(model)
    assert branch.schedule == "111"


def test_output_follows_the_weights(tiny: Any) -> None:
    one, times = tiny("Wan"), tiny("Wan").times(6)
    x = one.inputs["hidden_states"]
    compiled = torch.compile(one.model, backend=eager(threshold=1e9))
    with torch.no_grad():
        for t in times[:3]:
            one.call(compiled, x, t)
        one.model.blocks[3].ffn.net[2].weight.mul_(3)
        with one.counter.counting() as count:
            found = one.call(compiled, x, times[3])
        assert count[0] == one.blocks
        assert torch.equal(found, one.call(one.model, x, times[3]))
        one.call(compiled, x, times[4])
        one.model.load_state_dict({k: v + 0.01 for k, v in one.model.state_dict().items()})
        assert torch.equal(one.call(compiled, x, times[5]), one.call(one.model, x, times[5]))


def test_replaced_weights_are_another_model(tiny: Any) -> None:
    one, times = tiny("Wan"), tiny("Wan").times(4)
    x = one.inputs["hidden_states"]
    compiled = torch.compile(one.model, backend=eager(threshold=1e9))
    for t in times[:2]:
        one.call(compiled, x, t)
    linear = one.model.blocks[2].ffn.net[2]
    linear.weight = torch.nn.Parameter(torch.randn_like(linear.weight), requires_grad=False)
    assert torch.equal(one.call(compiled, x, times[2]), one.call(one.model, x, times[2]))


def test_state_goes_with_the_model(tiny: Any) -> None:
    gc.collect()
    before = len(SESSIONS._sessions)
    one = tiny("Wan")
    compiled = torch.compile(one.model, backend=eager(threshold=1e9))
    one.denoise(compiled, one.times(3))
    assert len(SESSIONS._sessions) == before + 1
    one.counter.close()
    del one, compiled
    torch._dynamo.reset()
    gc.collect()
    assert len(SESSIONS._sessions) == before


def test_random_weights_are_needed(tiny: Any) -> None:
    # The gates of a fresh model are zero: every block is then the identity. This guards the
    # tests above against testing nothing.
    one = tiny("DiT")
    fill_gates(one.model)
    x, t = one.inputs["hidden_states"], torch.tensor(500.0)
    whole = one.call(one.model, x, t)
    saved = one.model.transformer_blocks
    one.model.transformer_blocks = torch.nn.ModuleList(list(saved)[:1])
    assert (one.call(one.model, x, t) - whole).norm() / whole.norm() > 0.05
