"""The same decisions and outputs as diffusers' cache hooks, in one process, in float32.

Both run eagerly on the same weights and inputs. Which blocks ran is counted around each
block's own forward, by neither of the two.

Not comparable, and why: `TaylorSeerCacheConfig` forecasts the output of every attention
module and lets the rest of each block run, so only its schedule is compared, on models whose
attention its patterns find (of Wan's `attn1` and `attn2` they find nothing). Not copied:
diffusers compares in the model's dtype, stepfx in float32; in float32 they agree.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import CacheMixin
from diffusers.hooks import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    TaylorSeerCacheConfig,
    apply_first_block_cache,
    apply_mag_cache,
    apply_taylorseer_cache,
)
from torch import nn

import stepfx
from stepfx import testing

NAMES = [
    "Flux",
    "Wan",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("CogVideoX", "DiT", "QwenImage")),
]


def trajectory(
    tiny: Any, model: Any, steps: int, ran: Callable[[], int]
) -> tuple[list[int], list[torch.Tensor]]:
    """Denoise; return how many blocks ran at each step, and every velocity."""
    x, counts, velocities = tiny.inputs["hidden_states"], [], []
    for t in torch.linspace(950, 50, steps):
        before = ran()
        velocity = tiny.call(model, x, t)
        counts.append(ran() - before)
        velocities.append(velocity)
        x = x + velocity / steps
    return counts, velocities


@contextlib.contextmanager
def counted(modules: list[nn.Module]) -> Iterator[Callable[[], int]]:
    """Count runs of each module's own forward; hooks that skip it do not count."""
    count = 0

    def wrap(forward: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return forward(*args, **kwargs)

        return counting

    for module in modules:
        module.forward = wrap(module.forward)
    yield lambda: count


def blocks_of(tiny: Any) -> list[nn.Module]:
    lists = [getattr(tiny.model, name) for name in tiny.expected.blocks]
    return [block for blocks in lists for block in blocks]


def original(
    tiny: Any,
    steps: int,
    apply: Callable[[nn.Module, Any], None],
    config: Any,
    modules: list[nn.Module] | None = None,
) -> tuple[list[int], list[torch.Tensor]]:
    """Run a model under a hook of diffusers; count its blocks, or other `modules`."""
    with counted(modules or blocks_of(tiny)) as ran:
        apply(tiny.model, config)
        # The mixin's method for models that lack the mixin (DiT), too.
        with CacheMixin.cache_context(tiny.model, "cond"):
            return trajectory(tiny, tiny.model, steps, ran)


def compiled(tiny: Any) -> Any:
    """Compile a model with the rules of the peers: means, no last-step rule, no forecast."""
    return stepfx.compile(
        tiny.model, inner="eager", batch="mean", taylor_order=0, compute_last_step=False
    )


def ours(
    tiny: Any, model: Any, steps: int, **options: Any
) -> tuple[list[int], list[torch.Tensor]]:
    """Run a compiled model with the options of one request: nothing is compiled again."""
    with stepfx.request(**options):
        return trajectory(tiny, model, steps, lambda: testing._counts[0])


def assert_equal(found: Any, expected: Any, blocks: int, kept: int) -> None:
    """Assert one schedule, both computed and reused steps, and outputs within 1e-4."""
    assert found[0] == expected[0]
    assert set(found[0]) == {blocks, kept}, "a cache test needs computed and reused steps"
    for a, b in zip(found[1], expected[1], strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def thresholds(tiny: Any, model: Any, steps: int) -> list[float]:
    """Return five thresholds that lie among the scores of a run."""
    ours(tiny, model, steps, threshold=1e-30)
    (branch,) = stepfx.stats(tiny.model)[-1].branches.values()
    scores = sorted(score for score in branch.scores if score is not None)
    middle = scores[len(scores) // 2]
    return [factor * middle for factor in (0.9, 1.4, 2.3, 3.6, 5.2)]


@pytest.mark.parametrize("name", NAMES)
def test_first_block_cache(tiny: Any, name: str) -> None:
    one = tiny(name)
    model = compiled(one)
    for steps in (28, 50):
        for threshold in thresholds(one, model, steps):
            found = ours(one, model, steps, threshold=threshold)
            other, config = tiny(name), FirstBlockCacheConfig(threshold=threshold)
            expected = original(other, steps, apply_first_block_cache, config)
            assert_equal(found, expected, one.blocks, 1)


@pytest.mark.parametrize("name", NAMES)
def test_mag_cache(tiny: Any, name: str) -> None:
    one = tiny(name)
    model = compiled(one)
    for steps, threshold in itertools.product((28, 50), (0.04, 0.06, 0.12, 0.2, 0.4)):
        generator = torch.Generator().manual_seed(steps)
        ratios = (1 + 0.05 * torch.randn(steps, generator=generator)).tolist()
        config = MagCacheConfig(
            threshold=threshold,
            max_skip_steps=4,
            num_inference_steps=steps,
            mag_ratios=ratios,
        )
        found = ours(one, model, steps, cache_config=config)
        expected = original(tiny(name), steps, apply_mag_cache, config)
        assert_equal(found, expected, one.blocks, 0)


@pytest.mark.parametrize("interval", [2, 3, 5])
@pytest.mark.parametrize("name", ["Flux", "QwenImage"])
def test_schedule_of_taylor_seer(tiny: Any, name: str, interval: int) -> None:
    one, other = tiny(name), tiny(name)
    config = TaylorSeerCacheConfig(cache_interval=interval)
    backend = stepfx.Backend(config, inner="eager")
    _, ran = one.denoise(torch.compile(one.model, backend=backend), one.times(28))
    attention = [block.attn for block in blocks_of(other)]
    expected, _ = original(other, 28, apply_taylorseer_cache, config, attention)
    assert [count > 0 for count in ran] == [count > 0 for count in expected]
    assert {count > 0 for count in ran} == {True, False}
