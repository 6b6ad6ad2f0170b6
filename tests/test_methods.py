"""Every method on models, by counting blocks that ran; methods changed from call to call."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import stepfx
from stepfx import lowering

REQUEST = {
    "fbcache": {"cache": "fbcache"},
    "dbcache": {"cache": "dbcache", "fn_compute_blocks": 2, "max_warmup_steps": 2},
    "with last blocks": {
        "cache": "dbcache",
        "fn_compute_blocks": 1,
        "bn_compute_blocks": 2,
        "max_warmup_steps": 1,
    },
    "teacache": {"cache": "teacache"},
    "teacache timestep": {"cache": "teacache", "signal": "timestep"},
    "magcache": {
        "cache": "magcache",
        "magnitudes": [1.0, 1.1, 0.9, 1.05, 1.0],
        "threshold": 0.3,
    },
    "mask": {"cache": "mask", "steps_mask": "110100100"},
    "dynamic mask": {"cache": "mask", "steps_mask": "slow", "steps_mask_policy": "dynamic"},
    "dbprune": {"cache": "dbprune", "fn_compute_blocks": 1, "max_warmup_steps": 2},
    "downsampled": {"cache": "fbcache", "downsample_factor": 4},
}
# The modulated input is computed a second time, with the counter in front of the first block.
EXTRA = {"teacache": 1}


def compiled(tiny: Any, **options: Any) -> Any:
    return stepfx.compile(tiny.model, inner="eager", **options)


def last_branch(tiny: Any) -> Any:
    (branch,) = stepfx.stats(tiny.model)[-1].branches.values()
    return branch


@pytest.mark.parametrize("method", REQUEST)
def test_every_method_reuses_and_computes(tiny: Any, method: str) -> None:
    """At a loose threshold a method reuses; at 0 it equals the model, bit for bit."""
    one = tiny("Wan")
    options, times = {"threshold": 1e9, **REQUEST[method]}, one.times(9)
    model = compiled(one)
    expected, _ = one.denoise(one.model, times)
    with stepfx.request(steps=9, **options):
        x, ran = one.denoise(model, times)
    assert len(set(ran)) > 1
    assert x.isfinite().all()
    assert not torch.equal(x, expected)
    full = 6 + EXTRA.get(method, 0)
    assert last_branch(one).schedule == "".join("1" if n == full else "0" for n in ran)
    with stepfx.request(steps=9, **{**options, "threshold": 0}):
        x, ran = one.denoise(model, times)
    assert ran == [full] * 9
    assert torch.equal(x, expected)


@pytest.mark.parametrize("name", ["Flux", "CogVideoX", "QwenImage", "DiT", "LTX", "Sana"])
def test_methods_on_other_models(tiny: Any, name: str) -> None:
    """Both signals of TeaCache are found, and every method skips blocks."""
    one = tiny(name)
    model, times = compiled(one, threshold=1e9), one.times(4)
    for method, options in REQUEST.items():
        if method in ("dynamic mask", "downsampled"):
            continue
        with stepfx.request(**{"threshold": 1e9, **options}):
            x, ran = one.denoise(model, times)
        always = options.get("fn_compute_blocks", method == "fbcache")
        always += options.get("bn_compute_blocks", 0)
        assert min(ran) == always + EXTRA.get(method, 0), method
        assert max(ran) == one.blocks + EXTRA.get(method, 0), method
        assert x.isfinite().all()


def test_changing_the_method_compiles_nothing(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, count = tiny("Wan"), [0]
    model, times = compiled(one, compile_unit="block"), one.times(6)
    one.denoise(model, times)
    compile_graph = lowering.compile_graph

    def counting(*args: Any) -> Any:
        count[0] += 1
        return compile_graph(*args)

    monkeypatch.setattr(lowering, "compile_graph", counting)
    with torch.compiler.set_stance("fail_on_recompile"):
        for options in REQUEST.values():
            for order in (0, 1, 2):
                with stepfx.request(steps=6, **{"taylor_order": order, **options}):
                    one.denoise(model, times)
    assert count[0] == 0


def test_options_change_in_the_middle_of_a_request(tiny: Any) -> None:
    """Another placement of the gate starts from a computed step; a threshold does not."""
    one = tiny("Wan")
    model, x = compiled(one, threshold=1e9), one.inputs["hidden_states"]
    ran = []
    with stepfx.request(name="run"):
        for i, t in enumerate(one.times(8)):
            inner: dict[str, Any] = {}
            if i in (3, 4):
                inner = {"fn_compute_blocks": 2}
            elif i == 6:
                inner = {"threshold": 0}
            with stepfx.request(**inner), one.counter.counting() as count:
                x = x + 0.02 * one.call(model, x, t)
            ran.append(count[0])
    assert ran == [6, 1, 1, 6, 2, 6, 6, 1]


def test_methods_match_the_backends_own(tiny: Any) -> None:
    """A method asked for by a request equals the method that a model was compiled with."""
    for method in ("teacache timestep", "dbprune"):
        loose = {"threshold": 0.2, **REQUEST[method]}
        results = []
        for first, then in ((loose, {}), ({}, loose)):
            one = tiny("Wan")
            torch._dynamo.reset()
            model = compiled(one, **first)
            with stepfx.request(steps=9, **then):
                results.append(one.denoise(model, one.times(9)))
        assert results[0][1] == results[1][1]
        assert torch.equal(results[0][0], results[1][0])


def test_fn_and_bn_leave_one_block(tiny: Any) -> None:
    one = tiny("Wan")
    model = compiled(one, threshold=1e9, fn_compute_blocks=3, bn_compute_blocks=2)
    assert one.denoise(model, one.times(4))[1] == [6, 5, 5, 5]


@pytest.mark.parametrize(("fn", "bn"), [(6, 0), (3, 3), (7, 2)])
def test_fn_and_bn_leave_no_block(tiny: Any, fn: int, bn: int) -> None:
    one = tiny("Wan")
    model = compiled(one, fn_compute_blocks=fn, bn_compute_blocks=bn)
    text = f"must add up to less than the 6 blocks of the model, not {fn} \\+ {bn}"
    with pytest.raises(Exception, match=text):
        one.denoise(model, one.times(1))
    torch._dynamo.reset()
    model = compiled(one)
    one.denoise(model, one.times(2))
    options = {"fn_compute_blocks": fn, "bn_compute_blocks": bn}
    with stepfx.request(**options), pytest.raises(stepfx.ConfigError, match="leave none"):
        one.denoise(model, one.times(2))
    _, ran = one.denoise(model, one.times(2))
    assert ran[0] == 6


def test_lists_joined_and_apart(tiny: Any) -> None:
    """FLUX has 4 double and 5 single blocks."""
    one = tiny("Flux")
    model, times = compiled(one, threshold=1e9), one.times(4)
    assert one.denoise(model, times)[1] == [9, 1, 1, 1]
    with stepfx.request(lists="apart"):
        assert one.denoise(model, times)[1] == [9, 2, 2, 2]
    with stepfx.request(lists=[{}, {"fn_compute_blocks": 3}]):
        assert one.denoise(model, times)[1] == [9, 4, 4, 4]
    with stepfx.request(lists=[{"threshold": 0}, {"fn_compute_blocks": 2}]):
        x, ran = one.denoise(model, times)
    assert ran == [9, 6, 6, 6]
    with stepfx.request(lists=[{"threshold": 0}, {"threshold": 0}]):
        x, _ = one.denoise(model, times)
    assert torch.equal(x, one.denoise(one.model, times)[0])


def test_two_transformers_with_options_of_their_own(tiny: Any) -> None:
    a, b = tiny("Wan", seed=0), tiny("Wan", seed=1)
    models = [compiled(a, threshold=1e9), compiled(b, cache="mask", steps_mask="11010")]
    times = a.times(10)
    assert a.denoise(models[0], times[:5])[1] == [6, 1, 1, 1, 1]
    assert b.denoise(models[1], times[5:])[1] == [6, 6, 0, 6, 0]


def test_forced_refresh(tiny: Any) -> None:
    one = tiny("Wan")
    model = compiled(one, threshold=1e9)
    with stepfx.request(force_refresh_step=3, max_warmup_steps=2):
        assert one.denoise(model, one.times(8))[1] == [6, 6, 1, 6, 6, 1, 1, 1]
    with stepfx.request(force_refresh_step=3, force_refresh_policy="repeat"):
        assert one.denoise(model, one.times(8))[1] == [6, 1, 1, 6, 1, 1, 6, 1]


def test_pruning_decides_for_each_block(tiny: Any) -> None:
    """cache-dit's DBPrune: a block whose input hardly changed is skipped alone."""
    one = tiny("Wan")
    model, times = compiled(one), one.times(12, width=12.0)
    prune = {"cache": "dbprune", "fn_compute_blocks": 1, "max_warmup_steps": 1}
    with stepfx.request(**prune, threshold=1e9):
        assert one.denoise(model, times)[1] == [6] + [1] * 11
    with stepfx.request(**prune, threshold=1e-30):
        one.denoise(model, times)
    typical = sorted(s for s in last_branch(one).scores if s is not None)[5]
    with stepfx.request(**prune, threshold=typical):
        _, ran = one.denoise(model, times)
    assert len(set(ran)) > 2, "some blocks of a step are skipped and others run"


def test_blocks_that_are_never_pruned(tiny: Any) -> None:
    one = tiny("Wan")
    model = compiled(one, cache="dbprune", threshold=1e9, fn_compute_blocks=1)
    times = one.times(4)
    options = {"max_warmup_steps": 1, "non_prune_block_ids": [0, 3, 4, 99]}
    with stepfx.request(**options):
        assert one.denoise(model, times)[1] == [6, 3, 3, 3]
    with stepfx.request(max_warmup_steps=1):
        assert one.denoise(model, times)[1] == [6, 1, 1, 1]
    flux = tiny("Flux")
    model = compiled(
        flux, cache="dbprune", threshold=1e9, max_warmup_steps=1, fn_compute_blocks=1
    )
    own = [{"fn_compute_blocks": 1, "non_prune_block_ids": [1]}, {"fn_compute_blocks": 2}]
    with stepfx.request(lists=own):
        assert flux.denoise(model, times)[1] == [9, 4, 4, 4]


def test_limits_of_pruning_count_steps(tiny: Any) -> None:
    """As in cache-dit: a step in which any block was skipped counts, for every block."""
    one = tiny("Wan")
    model = compiled(one, cache="dbprune", threshold=1e9, fn_compute_blocks=1)
    with stepfx.request(max_warmup_steps=1, max_continuous_cached_steps=2):
        assert one.denoise(model, one.times(7))[1] == [6, 1, 1, 6, 1, 1, 6]
    with stepfx.request(max_warmup_steps=1, max_cached_steps=2):
        assert one.denoise(model, one.times(5))[1] == [6, 1, 1, 6, 6]


def test_the_stream_behind_the_first_blocks_is_watched(tiny: Any) -> None:
    """The score is that of the stream, computed here by hooks of the eager model."""
    one = tiny("Wan")
    model, times = compiled(one, signal="input", threshold=1e-30, batch="mean"), one.times(5)
    seen: list[torch.Tensor] = []
    one.denoise(model, times)
    block = one.model.blocks[0]
    handle = block.register_forward_hook(lambda _, args, out: seen.append(out))
    one.denoise(one.model, times)
    handle.remove()
    expected = [
        ((b - a).abs().mean() / a.abs().mean()).item() for a, b in itertools.pairwise(seen)
    ]
    assert last_branch(one).scores[1:] == pytest.approx(expected, rel=1e-4)
    with stepfx.request(threshold=1e9):
        assert one.denoise(model, times)[1] == [6, 1, 1, 1, 1]


def test_history_is_bounded_and_follows_the_order(tiny: Any) -> None:
    one = tiny("Wan")
    model = compiled(one, threshold=1e-30)
    sizes = []
    for order in (0, 1, 2):
        with stepfx.request(taylor_order=order):
            one.denoise(model, one.times(6))
            sizes.append(last_branch(one).bytes_kept)
    stream = 1 * 32 * 24 * 4
    assert [size - 1 for size in sizes] == [2 * stream, 3 * stream, 4 * stream]


@pytest.mark.parametrize("order", [1, 2])
def test_forecast_follows_polynomials_of_its_order(hand_made: Any, order: int) -> None:
    """A residual that is a polynomial of time is forecast exactly from order + 1 steps."""

    class Polynomial(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = hand_made(3)

        def forward(self, z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return self.model(z, t, torch.zeros(2, 16))

    torch.manual_seed(0)
    model = Polynomial()
    z, times = torch.randn(2, 6, 4), 500 - 0.01 * torch.arange(8)
    errors = []
    for taylor_order in (order - 1, order):
        torch._dynamo.reset()
        stepfx.reset(model)
        mask = "1" * (order + 1) + "0" * 5
        options = {"cache": "mask", "steps_mask": mask, "taylor_order": taylor_order}
        compiled = stepfx.compile(model, inner="eager", **options)
        with torch.no_grad():
            got = [compiled(z, t.expand(2)) for t in times]
            want = [model(z, t.expand(2)) for t in times]
        errors.append((got[-1] - want[-1]).norm() / want[-1].norm())
    assert errors[1] < errors[0] / 3


@pytest.mark.slow
def test_methods_through_inductor(tiny: Any) -> None:
    one = tiny("Wan")
    times = one.times(6)
    model = stepfx.compile(one.model, cache="teacache", threshold=1e9)
    reference = compiled(one)
    for options in REQUEST.values():
        loose = {"threshold": 1e9, **options}
        with stepfx.request(steps=6, **loose):
            found, ran = one.denoise(model, times)
        with stepfx.request(steps=6, **loose):
            expected, wanted = one.denoise(reference, times)
        assert ran == wanted
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
