"""Requests, branches and instances: each equals its solo run, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stepfx


def eager(**options: Any) -> stepfx.Backend:
    return stepfx.Backend(inner="eager", **options)


def solo(tiny: Any, times: torch.Tensor, threshold: float, **changed: Any) -> Any:
    """Run once on a freshly compiled model with no state."""
    torch._dynamo.reset()
    stepfx.reset(tiny.model)
    compiled = torch.compile(tiny.model, backend=eager(threshold=threshold))
    result = tiny.denoise(compiled, times, **changed)
    torch._dynamo.reset()
    stepfx.reset(tiny.model)
    assert len(set(result[1])) == 2, "a cache test needs computed and reused steps"
    return result


class Walk:
    """One trajectory, a step at a time, so that several can be interleaved."""

    def __init__(self, tiny: Any, compiled: Any, times: torch.Tensor, **changed: Any) -> None:
        self.tiny, self.compiled, self.changed = tiny, compiled, changed
        self.x, self.times, self.ran = tiny.inputs["hidden_states"], list(times), []

    def step(self) -> None:
        t = self.times[len(self.ran)]
        with self.tiny.counter.counting() as count:
            velocity = self.tiny.call(self.compiled, self.x, t, **self.changed)
        self.x = self.x + 0.02 * velocity
        self.ran.append(count[0])

    def result(self) -> tuple[torch.Tensor, list[int]]:
        return self.x, self.ran


def assert_same(found: Any, expected: Any) -> None:
    assert found[1] == expected[1]
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("name", ["Wan", "Flux", "DiT"])
def test_two_requests_in_a_row(tiny: Any, mixing: Any, name: str) -> None:
    one = tiny(name)
    times = one.times(9)
    threshold = mixing(one, times)
    expected = solo(one, times, threshold)
    compiled = torch.compile(one.model, backend=eager(threshold=threshold))
    for _ in range(3):
        assert_same(one.denoise(compiled, times), expected)
    assert [len(r.branches) for r in stepfx.stats(one.model)] == [1, 1, 1]


@pytest.mark.parametrize(
    "scale",
    [
        lambda n: torch.linspace(999, 20, n),  # floats, down
        lambda n: torch.linspace(999, 20, n).long(),  # integers
        lambda n: torch.linspace(0.01, 0.99, n),  # flow time, up
        lambda n: torch.linspace(1.0, 0.02, n),  # sigmas
    ],
)
def test_any_time_scale_and_direction(tiny: Any, scale: Any) -> None:
    one, times = tiny("Wan"), scale(5)
    compiled = torch.compile(one.model, backend=eager(threshold=1e9))
    for _ in range(3):
        _, ran = one.denoise(compiled, times)
        assert ran == [6, 1, 1, 1, 1]
    assert len(stepfx.stats(one.model)) == 3


def test_a_request_that_was_cut_off(tiny: Any, mixing: Any) -> None:
    one = tiny("Wan")
    times = one.times(9)
    threshold = mixing(one, times)
    expected = solo(one, times, threshold)
    compiled = torch.compile(one.model, backend=eager(threshold=threshold))
    one.denoise(compiled, times)
    one.denoise(compiled, times[:4])
    assert_same(one.denoise(compiled, times), expected)


def test_a_step_that_fails_is_not_counted(tiny: Any, mixing: Any) -> None:
    one = tiny("Wan")
    times = one.times(9)
    threshold = mixing(one, times)
    expected = solo(one, times, threshold)
    compiled = torch.compile(one.model, backend=eager(threshold=threshold))
    one.denoise(compiled, times[:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepfx.gate.Gate.cond", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            one.call(compiled, one.inputs["hidden_states"], times[3])
    assert stepfx.stats(one.model)[-1].branches["branch 1"].computed <= 3
    assert_same(one.denoise(compiled, times), expected)


@pytest.mark.parametrize("order", ["cu", "uc"])
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", ["Wan", "Flux"])
def test_cond_and_uncond_alternate(
    tiny: Any, mixing: Any, name: str, fresh: bool, order: str
) -> None:
    """With `fresh` the embeddings are new objects at every step: told apart by value."""
    one = tiny(name)
    times = one.times(9)
    texts = {"c": one.inputs["encoder_hidden_states"]}
    texts["u"] = torch.zeros_like(texts["c"]) + 0.3
    threshold = mixing(one, times)
    expected = {
        k: solo(one, times, threshold, encoder_hidden_states=v) for k, v in texts.items()
    }

    class Fresh(Walk):
        def step(self) -> None:
            if fresh:
                text = self.changed["encoder_hidden_states"]
                self.changed = {"encoder_hidden_states": text.clone()}
            super().step()

    compiled = torch.compile(one.model, backend=eager(threshold=threshold))
    for _ in range(2):
        walks = {
            k: Fresh(one, compiled, times, encoder_hidden_states=v) for k, v in texts.items()
        }
        for _ in times:
            for k in order:
                walks[k].step()
        for k, walk in walks.items():
            assert_same(walk.result(), expected[k])
    requests = stepfx.stats(one.model)
    assert [len(r.branches) for r in requests] == [2, 2]


def test_guidance_that_starts_late_is_a_branch_of_its_own(tiny: Any) -> None:
    one, times = tiny("Wan"), tiny("Wan").times(8)
    other = torch.zeros_like(one.inputs["encoder_hidden_states"])
    compiled = torch.compile(one.model, backend=eager(threshold=1e9))
    cond = Walk(one, compiled, times)
    uncond = Walk(one, compiled, times[3:6], encoder_hidden_states=other)
    for i in range(8):
        cond.step()
        if 3 <= i < 6:
            uncond.step()
    assert cond.ran == [6] + [1] * 7
    assert uncond.ran == [6, 1, 1]
    (request,) = stepfx.stats(one.model)
    assert [b.schedule for b in request.branches.values()] == ["10000000", "100"]


def test_two_instances_of_one_class(tiny: Any, mixing: Any) -> None:
    a, b = tiny("Wan", seed=0), tiny("Wan", seed=1)
    times = a.times(9)
    threshold = max(mixing(a, times), mixing(b, times))
    expected = [solo(one, times, threshold) for one in (a, b)]
    backend = eager(threshold=threshold)
    walks = [Walk(one, torch.compile(one.model, backend=backend), times) for one in (a, b)]
    for _ in times:
        for walk in walks:
            walk.step()
    for walk, want in zip(walks, expected, strict=True):
        assert_same(walk.result(), want)


def test_two_experts_of_one_run(tiny: Any) -> None:
    """Wan 2.2 hands over from one transformer to another in mid-run."""
    a, b = tiny("Wan", seed=0), tiny("Wan", seed=1)
    backend = eager(threshold=1e9)
    times = a.times(10)
    compiled = [torch.compile(one.model, backend=backend) for one in (a, b)]
    for _ in range(2):
        assert a.denoise(compiled[0], times[:5])[1] == [6, 1, 1, 1, 1]
        assert b.denoise(compiled[1], times[5:])[1] == [6, 1, 1, 1, 1]


def test_shapes_do_not_mix(tiny: Any, mixing: Any) -> None:
    """Equal token counts at other heights and widths are other requests."""
    one = tiny("Wan")
    times = one.times(7)
    wide = torch.randn(1, 4, 2, 4, 16)
    square = one.inputs["hidden_states"]
    threshold = mixing(one, times)
    torch._dynamo.reset()
    compiled = torch.compile(one.model, backend=eager(threshold=threshold), dynamic=False)
    results = []
    for latent in (square, wide, square):
        one.inputs["hidden_states"] = latent
        results.append(one.denoise(compiled, times))
    assert_same(results[2], results[0])
    assert all(ran[0] == 6 for _, ran in results)


@pytest.mark.parametrize("dynamic", [None, True])
def test_dynamic_shapes(tiny: Any, dynamic: bool | None) -> None:
    one = tiny("Wan")
    compiled = torch.compile(one.model, backend=eager(threshold=1e9), dynamic=dynamic)
    for size in (8, 12, 8, 16):
        one.inputs["hidden_states"] = torch.randn(1, 4, 2, size, 8)
        x, ran = one.denoise(compiled, one.times(3))
        assert ran == [6, 1, 1]
        assert x.shape == (1, 4, 2, size, 8)


def test_threshold_travels_with_the_compiled_model(tiny: Any) -> None:
    a, b = tiny("Wan", seed=0), tiny("Wan", seed=1)
    never = torch.compile(a.model, backend=eager(threshold=1e-30))
    always = torch.compile(b.model, backend=eager(threshold=1e9))
    walks = [Walk(a, never, a.times(5)), Walk(b, always, b.times(5))]
    for _ in range(5):
        for walk in walks:
            walk.step()
    assert walks[0].ran == [6] * 5
    assert walks[1].ran == [6, 1, 1, 1, 1]


def test_an_explicit_request(tiny: Any) -> None:
    one = tiny("Wan")
    times = one.times(6)
    compiled = torch.compile(one.model, backend=eager(threshold=1e9))
    with stepfx.request(steps=6, name="first"):
        assert one.denoise(compiled, times)[1] == [6, 1, 1, 1, 1, 6]  # the last is computed
    with stepfx.request(steps=6, name="second"):
        assert one.denoise(compiled, times)[1] == [6, 1, 1, 1, 1, 6]
    first, second = stepfx.stats(one.model)
    assert (first.name, second.name) == ("first", "second")
    assert all(b.bytes_kept == 0 for b in first.branches.values())


def test_named_branches_with_one_conditioning(tiny: Any, mixing: Any) -> None:
    """Two tiles share text and timestep; names keep them apart."""
    one = tiny("Wan")
    times = one.times(9)
    threshold = mixing(one, times)
    latents = {"left": one.inputs["hidden_states"], "right": torch.randn(1, 4, 2, 8, 8)}
    expected = {}
    for name, latent in latents.items():
        one.inputs["hidden_states"] = latent
        expected[name] = solo(one, times, threshold)
    compiled = torch.compile(one.model, backend=eager(threshold=threshold))
    walks = {}
    for name, latent in latents.items():
        walks[name] = Walk(one, compiled, times)
        walks[name].x = latent
    with stepfx.request(name="tiled"):
        for _ in times:
            for name, walk in walks.items():
                with stepfx.request(branch=name):
                    walk.step()
    for name, walk in walks.items():
        assert_same(walk.result(), expected[name])
    (request,) = stepfx.stats(one.model)
    assert list(request.branches) == ["left", "right"]


def test_tiles_without_names_are_computed_in_full(tiny: Any) -> None:
    one, times = tiny("Wan"), tiny("Wan").times(6)
    compiled = torch.compile(one.model, backend=eager(threshold=1e9))
    walks = [Walk(one, compiled, times) for _ in range(2)]
    walks[1].x = torch.randn(1, 4, 2, 8, 8)
    with pytest.warns(stepfx.StepfxWarning, match="the same timestep came twice"):
        for _ in times:
            for walk in walks:
                walk.step()
    assert [walk.ran for walk in walks] == [[6] * 6] * 2
    for walk in walks:
        plain = Walk(one, one.model, times)
        plain.x = one.inputs["hidden_states"] if walk is walks[0] else None
        if plain.x is not None:
            for _ in times:
                plain.step()
            assert torch.equal(plain.x, walk.x)


def test_without_a_timestep_every_step_is_computed(hand_made: Any) -> None:
    class Timeless(hand_made):  # type: ignore[misc]
        def forward(self, z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            x = self.inn(z)
            for block in self.stuff.values():
                x = block(x, w)
            return self.out(x)

    model = Timeless(5)
    z, w = torch.randn(2, 6, 4), torch.randn(2, 16)
    compiled = torch.compile(model, backend=eager(threshold=1e9))
    with torch.no_grad():
        expected = model(z, w)
        with pytest.warns(stepfx.StepfxWarning, match="no timestep input"):
            for _ in range(3):
                assert torch.equal(compiled(z, w), expected)
        with stepfx.request():
            for _ in range(4):
                compiled(z, w)
    (request,) = stepfx.stats(model)
    assert [b.schedule for b in request.branches.values()] == ["1000"]


def test_reset_forgets(tiny: Any) -> None:
    one, times = tiny("Wan"), tiny("Wan").times(6)
    compiled = torch.compile(one.model, backend=eager(threshold=1e9))
    one.denoise(compiled, times[:3])
    stepfx.reset(one.model)
    assert stepfx.stats(one.model) == []
    assert one.denoise(compiled, times[3:])[1] == [6, 1, 1]


@pytest.mark.parametrize("batch", ["worst", "mean"])
def test_the_worst_sample_decides(tiny: Any, batch: str) -> None:
    one = tiny("Wan")
    text = one.inputs["encoder_hidden_states"].expand(2, -1, -1).contiguous()
    calm = torch.randn(1, 4, 2, 8, 8)
    wild = [calm + 0.01 * i + 2.0 * (i % 2) * torch.randn_like(calm) for i in range(4)]
    backend = eager(threshold=0.1, batch=batch)
    compiled = torch.compile(one.model, backend=backend)
    for t, w in zip(one.times(4), wild, strict=True):
        one.call(compiled, torch.cat([calm, w]), t, encoder_hidden_states=text)
    both = next(iter(stepfx.stats(one.model)[-1].branches.values()))
    torch._dynamo.reset()
    stepfx.reset(one.model)
    compiled = torch.compile(one.model, backend=backend)
    for t, w in zip(one.times(4), wild, strict=True):
        one.call(compiled, w, t)
    alone = next(iter(stepfx.stats(one.model)[-1].branches.values()))
    if batch == "worst":
        assert both.scores[1] == pytest.approx(alone.scores[1], rel=1e-4)
    else:
        assert both.scores[1] < 0.9 * alone.scores[1]


def test_no_grad_and_inference_mode(tiny: Any) -> None:
    one, times = tiny("Wan"), tiny("Wan").times(3)
    compiled = torch.compile(one.model, backend=eager(threshold=1e9))
    for _ in range(2):
        assert one.denoise(compiled, times)[1] == [6, 1, 1]
        with torch.inference_mode():
            assert one.denoise(compiled, times)[1] == [6, 1, 1]


def test_bfloat16(tiny: Any) -> None:
    one, times = tiny("Wan"), tiny("Wan").times(6)
    one.model.bfloat16()
    for key in ("hidden_states", "encoder_hidden_states"):
        one.inputs[key] = one.inputs[key].bfloat16()
    expected, _ = one.denoise(one.model, times)
    compiled = torch.compile(one.model, backend=eager(threshold=0.3))
    found, ran = one.denoise(compiled, times)
    assert found.dtype == torch.bfloat16
    assert 1 in ran
    assert 6 in ran
    assert (found - expected).norm() / expected.norm() < 0.05
