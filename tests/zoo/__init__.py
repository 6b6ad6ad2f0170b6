"""Small home-made models: ways to write a stack of blocks that diffusers does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from stepfx.testing import fill_gates
from zoo import stacks, transformers
from zoo.parts import CHANNELS, TEXT, Mlp

TOKENS, IMAGE, VIDEO = (2, 16, CHANNELS), (2, 4, 8, 8), (2, 4, 3, 4, 4)


@dataclass(frozen=True)
class Animal:
    """A model of the zoo and what stepfx should see in it.

    Attributes:
        make: builds the model.
        lists: lengths of all block lists in the order they run.
        gated: how many blocks are under the gate; 0 where there is none.
        reason: what the report says of why there is no gate.
        latent: the shape of the latent.
        blocks: which modules run once in each block.
    """

    make: Callable[[], nn.Module]
    lists: list[int]
    gated: int
    reason: str = ""
    latent: tuple[int, ...] = TOKENS
    blocks: Callable[[nn.Module], list[nn.Module]] = field(
        default=lambda model: [m for m in model.modules() if isinstance(m, Mlp)]
    )

    def build(self) -> nn.Module:
        """Return the model with random weights: closed gates would hide every block."""
        model = self.make().eval().requires_grad_(False)
        fill_gates(model, 0.15)
        return model

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return a latent, timesteps and text."""
        generator = torch.Generator().manual_seed(0)
        z = torch.randn(self.latent, generator=generator)
        text = torch.randn(2, 6, TEXT, generator=generator)
        return z, torch.full((2,), 900.0), text


def named(*names: str) -> Callable[[nn.Module], list[nn.Module]]:
    """Pick the submodules with one of `names` as the last part of theirs."""

    def pick(model: nn.Module) -> list[nn.Module]:
        found = {n: m for n, m in model.named_modules() if n.split(".")[-1] in names}
        return list(found.values())

    return pick


ZOO = {
    "module dict": Animal(stacks.InModuleDict, [5], 5),
    "custom sequential": Animal(stacks.InSequential, [6], 6),
    "bare nested lists": Animal(stacks.BareLists, [5], 5),
    "keyword-only calls": Animal(stacks.KeywordOnly, [4], 4),
    "swapped tuple": Animal(stacks.SwappedTuple, [5], 5),
    "in-place adds": Animal(stacks.InPlace, [5], 5),
    "writes through views": Animal(stacks.ThroughViews, [5], 0, "writes to a tensor made out"),
    "views in blocks": Animal(stacks.ViewsInBlocks, [4], 4),
    "middle differs": Animal(stacks.MiddleDiffers, [7], 7),
    "middle of three differs": Animal(partial(stacks.MiddleDiffers, 1, 1), [3], 3),
    "one block": Animal(partial(stacks.InModuleDict, 1), [], 0, "no repeated blocks"),
    "two blocks": Animal(partial(stacks.InModuleDict, 2), [2], 0, "2 blocks"),
    "U-shaped": Animal(stacks.UShaped, [7], 7),
    "zipped skips": Animal(stacks.ZippedSkips, [8], 8),
    "fewer tokens": Animal(stacks.FewerTokens, [3, 5], 8),
    "more tokens": Animal(stacks.MoreTokens, [4, 4], 8),
    "hyper-connections": Animal(stacks.HyperConnections, [5], 5),
    "lists of tensors": Animal(stacks.TensorLists, [4], 4),
    "shared weights": Animal(stacks.SharedWeights, [6], 6),
    "two stacks": Animal(stacks.TwoStacks, [3, 5], 5),
    # The cross-attention of one of the stacks stands between equal blocks: an adapter.
    "side by side": Animal(stacks.SideBySide, [4, 4, 4], 8),
    "convolutions": Animal(stacks.Convolutions, [6], 6, latent=IMAGE, blocks=named("second")),
    "dead outputs": Animal(stacks.DeadOutputs, [5], 5),
    "per-block inputs": Animal(stacks.PerBlockInputs, [5], 5),
    "DiT": Animal(transformers.DiT, [6], 6, latent=IMAGE),
    "U-ViT": Animal(transformers.UViT, [9], 9, latent=IMAGE),
    "MDT": Animal(transformers.MaskedDiT, [9], 9, latent=IMAGE),
    "PixArt": Animal(transformers.PixArt, [6], 6, latent=IMAGE),
    "MM-DiT": Animal(transformers.RegisteredMMDiT, [6], 6, latent=IMAGE, blocks=named("mlp")),
    "HDiT": Animal(
        transformers.Hourglass, [3, 3, 5, 3, 3], 17, latent=IMAGE, blocks=named("mlp")
    ),
    "recurrence": Animal(transformers.Recurrent, [6], 6, blocks=named("leave")),
    "convolutional DiT": Animal(
        transformers.Convolutional, [5], 5, latent=IMAGE, blocks=named("down")
    ),
    "DiffiT": Animal(transformers.DiffiT, [5], 5, latent=IMAGE),
    "parallel": Animal(transformers.Parallel, [6], 6, blocks=named("mlp")),
    "experts": Animal(transformers.Experts, [6], 6, blocks=named("mlp")),
    "RIN": Animal(transformers.Interface, [4], 4),
    "space and time": Animal(transformers.SpaceTime, [4], 4, latent=VIDEO),
    "features leave": Animal(transformers.Aligned, [6], 6),
    "LightningDiT": Animal(transformers.Normalised, [5], 5, blocks=named("mlp")),
    "flex attention": Animal(transformers.Windowed, [5], 5),
}
