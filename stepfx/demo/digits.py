"""The bundled model: a class-conditional DiT trained on handwritten digits.

`examples/train_digits.py` trained it; the weights lie beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from stepfx.demo.judge import Judge

WEIGHTS = Path(__file__).parent / "weights"

Step = Callable[[int], None]


def load_digits_model() -> Any:
    """Return the bundled `DiTTransformer2DModel`, float32, in eval mode."""
    from diffusers import DiTTransformer2DModel

    path = WEIGHTS / "digits.safetensors"
    model = DiTTransformer2DModel(**json.loads(_metadata(path)["config"]))
    model.load_state_dict({k: v.float() for k, v in load_file(path).items()})
    return model.eval().requires_grad_(False)


def load_judge() -> tuple[Judge, float]:
    """Return the classifier and its accuracy on 2,000 digits held out of its training."""
    path = WEIGHTS / "judge.safetensors"
    judge = Judge().eval()
    state = load_file(path)
    judge.load_state_dict(
        {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
    )
    return judge, float(_metadata(path)["held_out_accuracy"])


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
    return found


def initial_noise(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise [samples, 1, 16, 16] and labels [samples], classes in turn."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(samples, 1, 16, 16, generator=generator)
    return noise, torch.arange(samples) % 10


@torch.no_grad()
def sample(
    model: Callable[..., Any],
    noise: torch.Tensor,
    labels: torch.Tensor,
    steps: int,
    on_step: Step = lambda _: None,
) -> torch.Tensor:
    """Integrate the flow from `noise` [B, 1, 16, 16] with Euler steps; return images."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(steps)
    x = noise
    for i, t in enumerate(scheduler.timesteps):
        velocity = model(x, t.expand(len(x)), class_labels=labels).sample
        x = scheduler.step(velocity, t, x).prev_sample
        on_step(i)
    return x


@torch.no_grad()
def accuracy(judge: Judge, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of `images` that the judge names as `labels`."""
    named = judge(images.clamp(-1, 1)).argmax(1)
    return (named == labels).float().mean().item()
