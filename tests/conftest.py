"""Tiny models and loops that the tests share."""

from __future__ import annotations

import os

os.environ["STEPFX_STRICT"] = "1"

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import hypothesis
import pytest
import torch
from torch import nn

import stepfx
from stepfx.testing import BlockCounter, fill_gates

torch.set_num_threads(1)

# The same examples in every run; HYPOTHESIS_PROFILE=search looks for new ones.
hypothesis.settings.register_profile("steady", derandomize=True)
hypothesis.settings.register_profile("search", derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@dataclass(frozen=True)
class Expected:
    """A tiny configuration of a diffusers model and what stepfx should see in it."""

    cls: str
    init: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    lengths: list[int]  # of all block lists, in execution order
    patterns: list[int]
    blocks: list[str]  # the gated lists: where the blocks are
    streams: list[int]


def randn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator)


MODELS = {
    "DiT": Expected(
        "DiTTransformer2DModel",
        dict(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=5,
            sample_size=8,
            num_embeds_ada_norm=10,
        ),
        lambda: dict(hidden_states=randn(2, 4, 8, 8), class_labels=torch.tensor([3, 7])),
        [5],
        [3],
        ["transformer_blocks"],
        [1],
    ),
    "PixArt": Expected(
        "PixArtTransformer2DModel",
        dict(
            sample_size=8,
            num_layers=4,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=2,
            in_channels=4,
            out_channels=8,
            cross_attention_dim=16,
            caption_channels=None,
            use_additional_conditions=False,
        ),
        lambda: dict(
            hidden_states=randn(2, 4, 8, 8),
            encoder_hidden_states=randn(2, 6, 16),
            added_cond_kwargs={"aspect_ratio": None, "resolution": None},
        ),
        [4],
        [3],
        ["transformer_blocks"],
        [1],
    ),
    "Flux": Expected(
        "FluxTransformer2DModel",
        dict(
            patch_size=1,
            in_channels=4,
            num_layers=4,
            num_single_layers=5,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
        ),
        lambda: dict(
            hidden_states=randn(1, 16, 4),
            encoder_hidden_states=randn(1, 6, 32),
            pooled_projections=randn(1, 32),
            img_ids=randn(16, 3),
            txt_ids=torch.zeros(6, 3),
        ),
        [4, 5],
        [1, 1],
        ["transformer_blocks", "single_transformer_blocks"],
        [2, 2],
    ),
    "SD3": Expected(
        "SD3Transformer2DModel",
        dict(
            sample_size=16,
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            pooled_projection_dim=64,
            pos_embed_max_size=24,
        ),
        lambda: dict(
            hidden_states=randn(2, 4, 8, 8),
            encoder_hidden_states=randn(2, 7, 32),
            pooled_projections=randn(2, 64),
        ),
        [4],
        [1],
        ["transformer_blocks"],
        [2],
    ),
    "Wan": Expected(
        "WanTransformer3DModel",
        dict(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=32,
            ffn_dim=32,
            num_layers=6,
            rope_max_seq_len=32,
        ),
        lambda: dict(hidden_states=randn(1, 4, 2, 8, 8), encoder_hidden_states=randn(1, 6, 16)),
        [6],
        [2],
        ["blocks"],
        [1],
    ),
    "CogVideoX": Expected(
        "CogVideoXTransformer3DModel",
        dict(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=8,
            num_layers=4,
            sample_width=8,
            sample_height=8,
            sample_frames=8,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=8,
        ),
        lambda: dict(hidden_states=randn(2, 1, 4, 8, 8), encoder_hidden_states=randn(2, 8, 8)),
        [4],
        [0],
        ["transformer_blocks"],
        [2],
    ),
    "LTX": Expected(
        "LTXVideoTransformer3DModel",
        dict(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            num_layers=4,
            caption_channels=16,
        ),
        lambda: dict(
            hidden_states=randn(2, 32, 4),
            encoder_hidden_states=randn(2, 6, 16),
            encoder_attention_mask=torch.ones(2, 6, dtype=torch.bool),
            num_frames=2,
            height=4,
            width=4,
        ),
        [4],
        [2],
        ["transformer_blocks"],
        [1],
    ),
    "QwenImage": Expected(
        "QwenImageTransformer2DModel",
        dict(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=4,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
        ),
        lambda: dict(
            hidden_states=randn(1, 16, 16),
            encoder_hidden_states=randn(1, 8, 16),
            encoder_hidden_states_mask=torch.ones(1, 8, dtype=torch.int64),
            img_shapes=[(1, 4, 4)],
        ),
        [4],
        [1],
        ["transformer_blocks"],
        [2],
    ),
    "HunyuanVideo": Expected(
        "HunyuanVideoTransformer3DModel",
        dict(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=4,
            num_single_layers=5,
            num_refiner_layers=4,
            patch_size=1,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(2, 4, 4),
        ),
        lambda: dict(
            hidden_states=randn(1, 4, 1, 8, 8),
            encoder_hidden_states=randn(1, 6, 16),
            pooled_projections=randn(1, 8),
            encoder_attention_mask=torch.ones(1, 6),
            guidance=torch.tensor([6016.0]),
        ),
        [4, 4, 5],
        [3, 0, 0],
        ["transformer_blocks", "single_transformer_blocks"],
        [1, 2, 2],
    ),
    "Sana": Expected(
        "SanaTransformer2DModel",
        dict(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            attention_head_dim=8,
            num_attention_heads=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=8,
            sample_size=8,
        ),
        lambda: dict(hidden_states=randn(2, 4, 8, 8), encoder_hidden_states=randn(2, 6, 8)),
        [4],
        [3],
        ["transformer_blocks"],
        [1],
    ),
}


class Tiny:
    """A tiny model with its inputs, a denoising loop and an independent block counter."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name, self.expected = name, MODELS[name]
        torch.manual_seed(seed)
        self.model = getattr(diffusers, self.expected.cls)(**self.expected.init).eval()
        self.model.requires_grad_(False)
        fill_gates(self.model, seed=seed)
        lists = [getattr(self.model, attribute) for attribute in self.expected.blocks]
        self.blocks = sum(len(blocks) for blocks in lists)
        self.counter = BlockCounter(block for blocks in lists for block in blocks)
        self.inputs = self.expected.inputs()

    def times(self, steps: int, start: float = 900.0, width: float = 2.0) -> torch.Tensor:
        return start - width * torch.arange(steps)

    def call(
        self, model: Any, x: torch.Tensor, t: torch.Tensor, **changed: Any
    ) -> torch.Tensor:
        inputs = {**self.inputs, **changed, "hidden_states": x}
        if self.name in ("Flux", "QwenImage"):  # these two take sigmas
            t = t / 1000
        with torch.no_grad():
            result = model(timestep=t.expand(x.shape[0]), return_dict=False, **inputs)[0]
        channels = x.shape[1] if self.name in ("DiT", "PixArt") else None
        return result if channels is None else result[:, :channels]

    def denoise(
        self, model: Any, times: torch.Tensor, rate: float = 0.02, **changed: Any
    ) -> tuple[torch.Tensor, list[int]]:
        """Run a loop; return the last latent and how many blocks ran at each step."""
        x, ran = self.inputs["hidden_states"], []
        for t in times:
            with self.counter.counting() as count:
                velocity = self.call(model, x, t, **changed)
            # In one layout: HunyuanVideo's output has other strides where a size is 1.
            x = torch.empty(x.shape, dtype=x.dtype).copy_(x + rate * velocity)
            ran.append(count[0])
        return x, ran


@pytest.fixture
def tiny() -> Callable[..., Tiny]:
    """Return a maker of tiny models."""
    return Tiny


@pytest.fixture(params=list(MODELS))
def any_tiny(request: pytest.FixtureRequest) -> Tiny:
    """Return each tiny model in turn."""
    return Tiny(request.param)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def mixing_threshold(tiny: Tiny, times: torch.Tensor, **options: Any) -> float:
    """Return a threshold between the scores of a run that computes every step."""
    backend = stepfx.Backend(inner="eager", threshold=1e-30, **options)
    torch._dynamo.reset()
    tiny.denoise(torch.compile(tiny.model, backend=backend), times)
    branch = next(iter(stepfx.stats(tiny.model)[-1].branches.values()))
    scores = sorted(score for score in branch.scores if score is not None)
    stepfx.reset(tiny.model)
    torch._dynamo.reset()
    return 1.3 * scores[len(scores) // 2]


@pytest.fixture
def mixing() -> Callable[..., float]:
    """Return a function that finds a threshold at which some steps are reused."""
    return mixing_threshold


class Block(nn.Module):
    """A hand-written block with odd names: nothing that a name list would know."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.n, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, 4 * width), None
        self.b = nn.Linear(4 * width, width)
        self.m = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        scale, shift, gate = self.m(c).unsqueeze(1).chunk(3, -1)
        y = self.n(x) * (1 + scale) + shift
        y = torch.nn.functional.scaled_dot_product_attention(y, y, y) + y
        return x + gate * self.b(torch.nn.functional.gelu(self.a(y)))


class HandMade(nn.Module):
    """A transformer that no library knows, with `count` blocks."""

    def __init__(self, count: int = 5, width: int = 16, seed: int = 0) -> None:
        super().__init__()
        self.inn = nn.Linear(4, width)
        self.t1, self.t2 = nn.Linear(32, width), nn.Linear(width, width)
        self.stuff = nn.ModuleDict({f"k{i}": Block(width) for i in range(count)})
        self.out = nn.Linear(width, 4)
        self.requires_grad_(False)
        fill_gates(self, 0.3, seed)

    def embed(self, t: torch.Tensor) -> torch.Tensor:
        half = torch.exp(-9.0 * torch.arange(16) / 16)
        angle = t.float()[:, None] * half[None]
        wave = torch.cat([angle.cos(), angle.sin()], dim=-1)
        return self.t2(torch.nn.functional.silu(self.t1(wave)))

    def forward(self, z: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        c = self.embed(t) + w
        x = self.inn(z)
        for block in self.stuff.values():
            x = block(x, c)
        return self.out(x)


@pytest.fixture
def hand_made() -> type[HandMade]:
    """Return the class of a model that no library knows."""
    return HandMade
