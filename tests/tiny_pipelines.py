"""Tiny random pipelines of diffusers around the tiny models: what users call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from conftest import Tiny, randn
from diffusers.pipelines.stable_audio import StableAudioProjectionModel

from stepfx.testing import BlockCounter, fill_gates

Inputs = dict[str, Any]


@dataclass
class TinyPipeline:
    """A pipeline, what it is called with, and an independent block counter."""

    pipe: Any
    models: list[Any]
    counter: BlockCounter
    blocks: int
    inputs: Callable[[float], Inputs]

    def __call__(self, prompt: float = 0.0, steps: int = 8, **changed: Any) -> Any:
        """Sample; return the latent and how many blocks ran."""
        inputs = {**self.inputs(prompt), "num_inference_steps": steps, **changed}
        with self.counter.counting() as count:
            seed = torch.Generator().manual_seed(3)
            result = self.pipe(**inputs, generator=seed, output_type="latent")
        return torch.as_tensor(result[0]), count[0]


def pair(*shape: int, prompt: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embeddings with a prompt and without."""
    return randn(*shape) + prompt, torch.full(shape, -0.3)


def embeddings(*shape: int, prompt: float) -> Inputs:
    text, empty = pair(*shape, prompt=prompt)
    return dict(prompt_embeds=text, negative_prompt_embeds=empty)


def masked(*shape: int, prompt: float) -> Inputs:
    mask = torch.ones(shape[:2])
    return dict(
        **embeddings(*shape, prompt=prompt),
        prompt_attention_mask=mask,
        negative_prompt_attention_mask=mask,
    )


def flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)


def flux(one: Tiny) -> tuple[Any, Any]:
    pipe = diffusers.FluxPipeline(flow(), None, None, None, None, None, one.model)
    return pipe, lambda prompt: dict(
        prompt_embeds=pair(1, 6, 32, prompt=prompt)[0],
        pooled_prompt_embeds=randn(1, 32),
        height=64,
        width=64,
    )


def sd3(one: Tiny) -> tuple[Any, Any]:
    empty = [None] * 7
    pipe = diffusers.StableDiffusion3Pipeline(one.model, flow(), *empty)
    return pipe, lambda prompt: dict(
        **embeddings(1, 7, 32, prompt=prompt),
        pooled_prompt_embeds=randn(1, 64),
        negative_pooled_prompt_embeds=torch.zeros(1, 64),
        height=64,
        width=64,
    )


def wan(one: Tiny, second: Tiny | None = None) -> tuple[Any, Any]:
    pipe = diffusers.WanPipeline(
        *[None] * 3,
        flow(),
        one.model,
        None if second is None else second.model,
        boundary_ratio=None if second is None else 0.8,
    )
    return pipe, lambda prompt: dict(
        **embeddings(1, 6, 16, prompt=prompt),
        height=64,
        width=64,
        num_frames=5,
        max_sequence_length=6,
    )


def qwen(one: Tiny) -> tuple[Any, Any]:
    pipe = diffusers.QwenImagePipeline(flow(), None, None, None, one.model)
    return pipe, lambda prompt: dict(
        **embeddings(1, 8, 16, prompt=prompt),
        prompt_embeds_mask=torch.ones(1, 8, dtype=torch.int64),
        negative_prompt_embeds_mask=torch.ones(1, 8, dtype=torch.int64),
        height=64,
        width=64,
    )


def ltx(one: Tiny) -> tuple[Any, Any]:
    pipe = diffusers.LTXPipeline(flow(), None, None, None, one.model)
    return pipe, lambda prompt: dict(
        **masked(1, 6, 16, prompt=prompt), height=64, width=64, num_frames=9
    )


def cogvideox(one: Tiny) -> tuple[Any, Any]:
    scheduler = diffusers.CogVideoXDDIMScheduler()
    pipe = diffusers.CogVideoXPipeline(None, None, None, one.model, scheduler)
    return pipe, lambda prompt: dict(
        **embeddings(1, 8, 8, prompt=prompt), height=64, width=64, num_frames=1
    )


def hunyuan_video(one: Tiny) -> tuple[Any, Any]:
    pipe = diffusers.HunyuanVideoPipeline(None, None, one.model, None, flow(), None, None)
    return pipe, lambda prompt: dict(
        prompt_embeds=pair(1, 6, 16, prompt=prompt)[0],
        pooled_prompt_embeds=randn(1, 8),
        prompt_attention_mask=torch.ones(1, 6),
        height=64,
        width=64,
        num_frames=1,
    )


def pixart(one: Tiny) -> tuple[Any, Any]:
    scheduler = diffusers.DPMSolverMultistepScheduler()
    pipe = diffusers.PixArtAlphaPipeline(None, None, None, one.model, scheduler)
    return pipe, lambda prompt: dict(
        **masked(1, 6, 16, prompt=prompt),
        negative_prompt=None,
        height=64,
        width=64,
        use_resolution_binning=False,
    )


def sana(one: Tiny) -> tuple[Any, Any]:
    scheduler = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True
    )
    pipe = diffusers.SanaPipeline(None, None, None, one.model, scheduler)
    return pipe, lambda prompt: dict(
        **masked(1, 6, 8, prompt=prompt),
        negative_prompt=None,
        height=256,
        width=256,
        use_resolution_binning=False,
        complex_human_instruction=None,
    )


MAKERS = {
    "Flux": flux,
    "SD3": sd3,
    "Wan": wan,
    "QwenImage": qwen,
    "LTX": ltx,
    "CogVideoX": cogvideox,
    "HunyuanVideo": hunyuan_video,
    "PixArt": pixart,
    "Sana": sana,
}


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def stable_audio() -> TinyPipeline:
    torch.manual_seed(0)
    model = diffusers.StableAudioDiTModel(
        sample_size=4,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=2,
        num_key_value_attention_heads=2,
        out_channels=4,
        cross_attention_dim=8,
        time_proj_dim=8,
        global_states_input_dim=8,
        cross_attention_input_dim=4,
    ).eval()
    fill_gates(model.requires_grad_(False))
    vae = diffusers.AutoencoderOobleck(
        encoder_hidden_size=4,
        downsampling_ratios=[1, 2],
        channel_multiples=[1, 2],
        decoder_channels=4,
        decoder_input_channels=4,
        sampling_rate=4,
    )
    projection = StableAudioProjectionModel(4, 4, 0, 32)
    scheduler = diffusers.EDMDPMSolverMultistepScheduler(solver_order=2)
    pipe = diffusers.StableAudioPipeline(vae, None, projection, None, model, scheduler)

    def inputs(prompt: float) -> Inputs:
        mask = torch.ones(1, 6, dtype=torch.int64)
        return dict(
            **embeddings(1, 6, 4, prompt=prompt),
            attention_mask=mask,
            negative_attention_mask=mask,
            audio_end_in_s=2.0,
        )

    blocks = model.transformer_blocks
    return TinyPipeline(quiet(pipe), [model], BlockCounter(blocks), len(blocks), inputs)


def image_to_video() -> TinyPipeline:
    """Return Wan's image-to-video: 36 channels in, 16 out."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=36,
        out_channels=16,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=5,
        rope_max_seq_len=32,
    ).eval()
    fill_gates(model.requires_grad_(False))
    pipe = diffusers.WanImageToVideoPipeline(None, None, vae, flow(), transformer=model)
    image = randn(3, 64, 64).clamp(-1, 1)

    def inputs(prompt: float) -> Inputs:
        return dict(
            image=(image[None] + 1) / 2,
            **embeddings(1, 6, 16, prompt=prompt),
            height=64,
            width=64,
            num_frames=5,
            max_sequence_length=6,
        )

    blocks = model.blocks
    return TinyPipeline(quiet(pipe), [model], BlockCounter(blocks), len(blocks), inputs)


def make(name: str) -> TinyPipeline:
    """Return a tiny pipeline by name."""
    if name == "StableAudio":
        return stable_audio()
    if name == "WanImageToVideo":
        return image_to_video()
    if name == "Wan2.2":
        one, two = Tiny("Wan", seed=0), Tiny("Wan", seed=1)
        pipe, inputs = wan(one, two)
        blocks = [*one.model.blocks, *two.model.blocks]
        one.counter.close()
        two.counter.close()
        counter = BlockCounter(blocks)
        return TinyPipeline(quiet(pipe), [one.model, two.model], counter, one.blocks, inputs)
    one = Tiny(name)
    pipe, inputs = MAKERS[name](one)
    return TinyPipeline(quiet(pipe), [one.model], one.counter, one.blocks, inputs)


NAMES = [*MAKERS, "Wan2.2", "WanImageToVideo", "StableAudio"]
