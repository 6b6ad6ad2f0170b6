"""What the models of the zoo are made of: time embedding, attention, MLP, modulation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32  # of a token inside a model
CHANNELS = 8  # of a token of the latent
TEXT = 24  # of a token of the conditioning


class TimeEmbedding(nn.Module):
    """A sinusoid and two linears: [batch] -> [batch, width]."""

    def __init__(self, width: int = WIDTH, waves: int = 16) -> None:
        super().__init__()
        self.waves = waves
        self.first, self.second = nn.Linear(2 * waves, width), nn.Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        steps = torch.arange(self.waves, device=t.device) / self.waves
        angles = t.float()[:, None] * torch.exp(-9.0 * steps)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.second(F.silu(self.first(waves)))


class Attention(nn.Module):
    """Self-attention, or cross-attention where a context is given."""

    def __init__(self, width: int = WIDTH, heads: int = 2, context: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k, self.v = (nn.Linear(context or width, width) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        source = x if context is None else context
        q, k, v = self.split(self.q(x)), self.split(self.k(source)), self.split(self.v(source))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Mlp(nn.Module):
    """The part that runs once in every block: what the tests count."""

    def __init__(self, width: int = WIDTH, factor: int = 2) -> None:
        super().__init__()
        self.up = nn.Linear(width, factor * width)
        self.down = nn.Linear(factor * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Modulation(nn.Module):
    """`count` vectors of a conditioning vector, to scale, shift and gate tokens with."""

    def __init__(self, count: int, width: int = WIDTH) -> None:
        super().__init__()
        self.count, self.linear = count, nn.Linear(width, count * width)

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        return self.linear(F.silu(c)).unsqueeze(1).chunk(self.count, dim=-1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def norm(width: int = WIDTH) -> nn.LayerNorm:
    return nn.LayerNorm(width, elementwise_affine=False)


class Block(nn.Module):
    """The plain adaLN-Zero block of a DiT."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.modulation = Modulation(6, width)
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention, self.mlp = Attention(width), Mlp(width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)
        x = x + gate1 * self.attention(modulate(self.norm1(x), shift1, scale1))
        return x + gate2 * self.mlp(modulate(self.norm2(x), shift2, scale2))


class Denoiser(nn.Module):
    """A model around a stack: tokens in, time and pooled text to one vector, tokens out.

    Takes a latent [batch, tokens, CHANNELS], timesteps [batch] and text
    [batch, tokens, TEXT]; returns the shape of the latent.
    """

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.time = TimeEmbedding(width)
        self.text = nn.Linear(TEXT, width)
        self.enter = nn.Linear(CHANNELS, width)
        self.final = Modulation(2, width)
        self.norm, self.leave = norm(width), nn.Linear(width, CHANNELS)

    def forward(self, z: Tensor, t: Tensor, text: Tensor) -> Tensor:
        context = self.text(text)
        c = self.time(t) + context.mean(1)
        x = self.stack(self.enter(z), c, context)
        return self.leave(modulate(self.norm(x), *self.final(c)))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        """Run the blocks on tokens `x` under the vector `c` and the text tokens."""
        raise NotImplementedError
