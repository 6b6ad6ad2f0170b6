"""stepfx under real clients: tiny random pipelines of diffusers, called as users call them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import tiny_pipelines
import torch
from diffusers.models.cache_utils import CacheMixin

import stepfx


def branches(model: Any) -> list[stepfx.BranchStats]:
    return list(stepfx.stats(model)[-1].branches.values())


def mixing(one: tiny_pipelines.TinyPipeline, **changed: Any) -> dict[str, float]:
    """Return for each model a threshold between the scores of a run that computes all."""
    stepfx.enable(one.pipe, inner="eager", threshold=1e-30)
    one(**changed)
    thresholds = []
    for model in one.models:
        scores = [s for b in branches(model) for s in b.scores if s is not None]
        thresholds.append(1.1 * sorted(scores)[len(scores) // 2])
    stepfx.disable(one.pipe)
    torch._dynamo.reset()
    names = {id(v): k for k, v in one.pipe.components.items()}
    return {names[id(m)]: t for m, t in zip(one.models, thresholds, strict=True)}


def enable(
    one: tiny_pipelines.TinyPipeline, thresholds: dict[str, float], **options: Any
) -> None:
    own = {name: {"threshold": value} for name, value in thresholds.items()}
    stepfx.enable(one.pipe, inner="eager", components=own, **options)


@pytest.mark.parametrize("name", tiny_pipelines.NAMES)
def test_requests_of_a_pipeline_stay_apart(name: str) -> None:
    one = tiny_pipelines.make(name)
    plain, all_blocks = one()
    thresholds = mixing(one)

    def alone(prompt: float) -> Any:
        torch._dynamo.reset()
        enable(one, thresholds)
        result = one(prompt)
        stepfx.disable(one.pipe)
        return result

    expected = [alone(0.0), alone(0.5), alone(0.0)]
    torch._dynamo.reset()
    enable(one, thresholds)
    for prompt, (latent, ran) in zip((0.0, 0.5, 0.0), expected, strict=True):
        found, count = one(prompt)
        assert count == ran
        assert torch.equal(found, latent)
    assert expected[0][1] < all_blocks
    for model in one.models:
        requests = stepfx.stats(model)
        assert len(requests) == 3
        for request in requests:
            for branch in request.branches.values():
                assert branch.schedule[0] == "1"
                assert branch.bytes_kept == 0
    # Of the last step of all, every block is run: the scheduler says how many there are.
    assert {b.schedule[-1] for b in branches(one.models[-1])} == {"1"}
    assert any("0" in b.schedule for m in one.models for b in branches(m))
    assert not torch.equal(expected[0][0], plain)


@pytest.mark.parametrize("name", tiny_pipelines.NAMES)
def test_off_is_off_and_leaves_no_trace(name: str) -> None:
    one = tiny_pipelines.make(name)
    plain, blocks = one()
    cls = type(one.pipe)
    keys = [set(vars(model)) for model in one.models]
    stepfx.enable(one.pipe, inner="eager", threshold=0)
    found, ran = one()
    assert ran == blocks
    assert torch.equal(found, plain)
    assert isinstance(one.pipe, cls)
    assert type(one.pipe).__name__ == cls.__name__
    stepfx.disable(one.pipe)
    assert type(one.pipe) is cls
    added = [set(vars(m)) - k for m, k in zip(one.models, keys, strict=True)]
    assert all(extra <= {"_diffusers_hook"} for extra in added)  # diffusers' own
    assert torch.equal(one()[0], plain)


@pytest.mark.parametrize("name", ["Flux", "Wan", "Sana"])
def test_a_compiled_transformer_without_enable(name: str) -> None:
    """`pipe.transformer = torch.compile(...)`: requests are told apart by the timestep."""
    one = tiny_pipelines.make(name)
    (threshold,) = mixing(one).values()
    (model,) = one.models
    one.pipe.transformer = torch.compile(
        model, backend=stepfx.Backend(inner="eager", threshold=threshold)
    )
    first, ran = one()
    one(0.5)
    again, count = one()
    assert count == ran
    assert torch.equal(first, again)
    requests = stepfx.stats(model)
    assert len(requests) == 3
    schedules = [b.schedule for r in requests for b in r.branches.values()]
    assert all(s[0] == "1" and "0" in s for s in schedules)


def test_two_experts_have_their_own_steps() -> None:
    one = tiny_pipelines.make("Wan2.2")
    stepfx.enable(one.pipe, inner="eager", threshold=1e9)
    one(steps=9)
    first, second = (branches(model) for model in one.models)
    lengths = [len(found[0].schedule) for found in (first, second)]
    assert sum(lengths) == 9
    # The first hands over in mid-run: its last step is not the last of the run.
    assert {b.schedule for b in first} == {"1" + "0" * (lengths[0] - 1)}
    assert {b.schedule for b in second} == {"1" + "0" * (lengths[1] - 2) + "1"}


def test_options_of_one_component() -> None:
    one = tiny_pipelines.make("Wan2.2")
    stepfx.enable(
        one.pipe,
        inner="eager",
        threshold=1e9,
        components={"transformer": {}, "transformer_2": {"threshold": 0}},
    )
    one()
    first, second = (branches(model)[0].schedule for model in one.models)
    assert "0" in first
    assert "0" not in second


def test_branches_have_the_names_of_the_cache_contexts() -> None:
    one = tiny_pipelines.make("Wan")
    method = CacheMixin.cache_context
    stepfx.enable(one.pipe, inner="eager", threshold=1e9)
    one()
    assert list(stepfx.stats(one.models[0])[-1].branches) == ["cond", "uncond"]
    stepfx.disable(one.pipe)
    assert CacheMixin.cache_context is method


@pytest.mark.parametrize("order", ["stops", "starts"])
def test_guidance_for_a_part_of_the_run(order: str) -> None:
    one = tiny_pipelines.make("Wan")
    thresholds = mixing(one)

    def switch(pipe: Any, step: int, t: Any, kept: dict[str, Any]) -> dict[str, Any]:
        late = step >= 3
        pipe._guidance_scale = 5.0 if late == (order == "starts") else 1.0
        return kept

    _, blocks = one(callback_on_step_end=switch)
    enable(one, thresholds)
    found = [one(callback_on_step_end=switch) for _ in range(2)]
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] < blocks
    cond, uncond = branches(one.models[0])
    assert len(cond.schedule) == 8
    assert len(uncond.schedule) < 8
    assert cond.schedule[0] == uncond.schedule[0] == "1"


def test_a_callback_that_interrupts() -> None:
    one = tiny_pipelines.make("Flux")
    thresholds = mixing(one)

    def stop(pipe: Any, step: int, t: Any, kept: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step >= 2
        return kept

    enable(one, thresholds)
    expected, ran = one()
    one(0.5, callback_on_step_end=stop)
    assert len(branches(one.models[0])[0].schedule) == 3
    found, count = one()
    assert count == ran
    assert torch.equal(found, expected)


def test_an_exception_in_the_middle_of_a_call() -> None:
    one = tiny_pipelines.make("Wan")
    thresholds = mixing(one)

    def fail(pipe: Any, step: int, t: Any, kept: dict[str, Any]) -> dict[str, Any]:
        if step == 2:
            raise KeyboardInterrupt
        return kept

    enable(one, thresholds)
    expected, ran = one()
    with pytest.raises(KeyboardInterrupt):
        one(0.5, callback_on_step_end=fail)
    assert all(b.bytes_kept == 0 for b in branches(one.models[0]))
    found, count = one()
    assert count == ran
    assert torch.equal(found, expected)


def test_numbers_of_steps_change_from_call_to_call() -> None:
    one = tiny_pipelines.make("Flux")
    stepfx.enable(one.pipe, inner="eager", threshold=1e9)
    for steps in (1, 2, 3, 7, 4):
        one(steps=steps)
        (branch,) = branches(one.models[0])
        assert branch.schedule == ("1" + "0" * (steps - 2) + "1" if steps > 1 else "1")


def test_steps_that_the_caller_gives_stay() -> None:
    one = tiny_pipelines.make("Flux")
    stepfx.enable(one.pipe, inner="eager", threshold=1e9)
    with stepfx.request(steps=5, name="mine"):
        one(steps=8)
    (request,) = stepfx.stats(one.models[0])
    assert request.name == "mine"
    assert branches(one.models[0])[0].schedule == "10001111"


def test_model_cpu_offload() -> None:
    pytest.importorskip("accelerate")
    one = tiny_pipelines.make("Wan")
    thresholds = mixing(one)
    enable(one, thresholds)
    expected, ran = one()
    stepfx.disable(one.pipe)
    torch._dynamo.reset()
    one.pipe.enable_model_cpu_offload(device="cpu")
    enable(one, thresholds)
    for _ in range(2):
        found, count = one()
        assert count == ran
        assert torch.equal(found, expected)


def test_copies_and_pickles_of_an_enabled_model_are_plain() -> None:
    one = tiny_pipelines.make("Flux")
    stepfx.enable(one.pipe, inner="eager", threshold=1e9)
    one()
    (model,) = one.models
    one.counter.close()  # its hooks are functions of this process
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert other._compiled_call_impl is None
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


def test_enabled_twice_has_the_new_options() -> None:
    one = tiny_pipelines.make("Flux")
    cls = type(one.pipe)
    stepfx.enable(one.pipe, inner="eager", threshold=1e9)
    one()
    stepfx.enable(one.pipe, inner="eager", threshold=0)
    one()
    assert "0" not in branches(one.models[0])[0].schedule
    stepfx.disable(one.pipe)
    assert type(one.pipe) is cls
    stepfx.disable(one.pipe)  # nothing happens


def test_eager_inductor_stepfx_and_back(tiny: Any) -> None:
    one = tiny("Wan")
    x, t = one.inputs["hidden_states"], torch.tensor([500.0])
    eager = one.call(one.model, x, t)
    inductor = one.call(torch.compile(one.model), x, t)
    for _ in range(2):
        stepfx.enable(one.model, threshold=1e9)
        assert torch.allclose(one.call(one.model, x, t), eager, atol=1e-5)
        assert stepfx.stats(one.model)[-1].branches["branch 1"].schedule == "1"
        stepfx.disable(one.model)
        assert torch.equal(one.call(one.model, x, t), eager)
        assert torch.equal(one.call(torch.compile(one.model), x, t), inductor)


class TestBadInput:
    def test_not_a_pipeline(self) -> None:
        with pytest.raises(stepfx.ConfigError, match=r"expected a diffusers pipeline.*int"):
            stepfx.enable(3)

    def test_an_unknown_component(self) -> None:
        one = tiny_pipelines.make("Flux")
        with pytest.raises(stepfx.ConfigError, match="did you mean 'transformer'"):
            stepfx.enable(one.pipe, components=["transfomer"])

    def test_a_bad_option_changes_nothing(self) -> None:
        one = tiny_pipelines.make("Flux")
        cls = type(one.pipe)
        with pytest.raises(stepfx.ConfigError, match="threshold"):
            stepfx.enable(one.pipe, threshold=-1)
        assert type(one.pipe) is cls
        assert one.models[0]._compiled_call_impl is None

    def test_components_of_a_module(self, tiny: Any) -> None:
        with pytest.raises(stepfx.ConfigError, match="this is a module"):
            stepfx.enable(tiny("Flux").model, components=["transformer"])

    def test_no_transformer(self) -> None:
        import diffusers

        pipe = diffusers.DDPMPipeline(
            diffusers.UNet2DModel(
                sample_size=8,
                block_out_channels=(8,),
                down_block_types=("DownBlock2D",),
                up_block_types=("UpBlock2D",),
                norm_num_groups=4,
            ),
            diffusers.DDPMScheduler(),
        )
        with pytest.raises(
            stepfx.ConfigError, match="has no transformer; its modules are 'unet'"
        ):
            stepfx.enable(pipe)
