"""A transformer that no library knows, cached in three lines.

python examples/minimal.py
"""

from __future__ import annotations

import torch
from torch import nn

import stepfx


class Block(nn.Module):
    """Attention and a feed-forward layer, modulated by the timestep."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulate = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states [B, T, D]."""
        scale, shift, gate = self.modulate(c).unsqueeze(1).chunk(3, dim=-1)
        y = nn.functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        y = y + nn.functional.scaled_dot_product_attention(y, y, y)
        return x + gate * self.down(nn.functional.gelu(self.up(y)))


class Model(nn.Module):
    """Twelve blocks between an embedding and a projection."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed, self.project = nn.Linear(4, width), nn.Linear(width, 4)
        self.time = nn.Linear(64, width)
        nn.init.normal_(self.time.weight, std=0.01)  # time moves a trained model gently, too
        self.blocks = nn.ModuleList(Block(width) for _ in range(12))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Predict the velocity [B, T, 4] at timesteps t [B]."""
        angle = t[:, None] * torch.exp(-9 * torch.arange(32) / 32)
        c = self.time(torch.cat([angle.sin(), angle.cos()], dim=-1))
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, c)
        return self.project(h)


torch.manual_seed(0)
model = Model().eval()
x = torch.randn(1, 64, 4)
print(stepfx.explain(model, x, torch.ones(1)))

compiled = torch.compile(model, backend="stepfx", options={"threshold": 0.5})
with torch.no_grad():
    for t in torch.linspace(1000, 20, 28):
        x = x - compiled(x, t.expand(1)) / 28
print(stepfx.stats(model)[-1].branches)
