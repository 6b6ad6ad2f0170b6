"""Diffusion transformers of papers, written small: what stepfx meets outside diffusers.

Each is written from its paper's description, with the sizes shrunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from zoo.parts import (
    CHANNELS,
    TEXT,
    WIDTH,
    Attention,
    Block,
    Denoiser,
    Mlp,
    Modulation,
    TimeEmbedding,
    modulate,
    norm,
)


class Imaged(nn.Module):
    """Around a stack of tokens: patches of an image [batch, 4, 8, 8] in, the image out."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.text = TimeEmbedding(), nn.Linear(TEXT, WIDTH)
        self.patch = nn.Conv2d(4, WIDTH, 2, stride=2)
        self.position = nn.Parameter(torch.zeros(1, 16, WIDTH))
        self.final, self.norm = Modulation(2), norm()
        self.leave = nn.Linear(WIDTH, 4 * 4)

    def forward(self, z: Tensor, t: Tensor, text: Tensor) -> Tensor:
        context = self.text(text)
        c = self.time(t) + context.mean(1)
        x = self.patch(z).flatten(2).transpose(1, 2) + self.position
        x = self.stack(x, c, context)
        patches = self.leave(modulate(self.norm(x), *self.final(c)))
        grid = patches.unflatten(1, (4, 4)).unflatten(-1, (2, 2, 4))
        return torch.einsum("nhwpqc->nchpwq", grid).reshape(z.shape)

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        raise NotImplementedError


class DiT(Imaged):
    """The first DiT, as SiT has it: fused qkv, adaLN-Zero (arXiv 2212.09748, 2401.08740)."""

    class Fused(Block):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            del self.attention

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)
            y = modulate(self.norm1(x), shift1, scale1)
            qkv = self.qkv(y).reshape(*y.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
            weights = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
            y = self.out((weights @ v).transpose(1, 2).reshape(y.shape))
            x = x + gate1 * y
            return x + gate2 * self.mlp(modulate(self.norm2(x), shift2, scale2))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Fused() for _ in range(6))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, c)
        return x


class UViT(Imaged):
    """Time and text are tokens; long skips, a convolution at the end (arXiv 2209.12152)."""

    class Plain(nn.Module):
        def __init__(self, takes_skip: bool) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attention, self.mlp = Attention(), Mlp()
            self.join = nn.Linear(2 * WIDTH, WIDTH) if takes_skip else None

        def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
            if self.join is not None:
                x = self.join(torch.cat([x, skip], dim=-1))
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    def __init__(self) -> None:
        super().__init__()
        self.ins = nn.ModuleList(self.Plain(False) for _ in range(4))
        self.mid = self.Plain(False)
        self.outs = nn.ModuleList(self.Plain(True) for _ in range(4))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        x, skips = torch.cat([c[:, None], context, x], dim=1), []
        for block in self.ins:
            x = block(x)
            skips.append(x)
        x = self.mid(x)
        for block in self.outs:
            x = block(x, skips.pop())
        return x[:, 1 + context.shape[1] :]


class MaskedDiT(Imaged):
    """Encoder with long skips, one interpolating block, decoder (MDTv2, arXiv 2303.14389)."""

    class Biased(Block):
        """A block whose attention has a learned bias, and may take a skip."""

        def __init__(self, takes_skip: bool = False) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(2, 16, 16))
            self.join = nn.Linear(2 * WIDTH, WIDTH) if takes_skip else None

        def forward(self, x: Tensor, c: Tensor, skip: Tensor | None = None) -> Tensor:
            if self.join is not None:
                x = self.join(torch.cat([x, skip], dim=-1))
            shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)
            y, a = modulate(self.norm1(x), shift1, scale1), self.attention
            mixed = F.scaled_dot_product_attention(
                a.split(a.q(y)), a.split(a.k(y)), a.split(a.v(y)), attn_mask=self.bias
            )
            x = x + gate1 * a.out(mixed.transpose(1, 2).flatten(2))
            return x + gate2 * self.mlp(modulate(self.norm2(x), shift2, scale2))

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(self.Biased() for _ in range(3))
        self.second = nn.ModuleList(self.Biased(True) for _ in range(3))
        self.side = self.Biased()
        self.decoder = nn.ModuleList(self.Biased() for _ in range(2))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, WIDTH))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        given, skips = x, []
        for block in self.first:
            x = block(x, c)
            skips.append(x)
        for block in self.second:
            x = block(x, c, skips.pop())
        x = 0.5 * x + 0.5 * self.side(x + self.mask_token, c)
        for block in self.decoder:
            x = block(x + 0.1 * given, c)
        return x


class PixArt(Imaged):
    """One table of modulation for all blocks, an offset in each (arXiv 2310.00426)."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offsets = nn.Parameter(torch.zeros(6, WIDTH))
            self.norm1, self.norm2 = norm(), norm()
            self.attention, self.cross, self.mlp = Attention(), Attention(), Mlp()

        def forward(self, x: Tensor, context: Tensor, table: Tensor) -> Tensor:
            parts = (self.offsets[None] + table).chunk(6, dim=1)
            shift1, scale1, gate1, shift2, scale2, gate2 = parts
            x = x + gate1 * self.attention(modulate(self.norm1(x), shift1, scale1))
            x = x + self.cross(x, context)
            return x + gate2 * self.mlp(modulate(self.norm2(x), shift2, scale2))

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(WIDTH, 6 * WIDTH)
        self.blocks = nn.ModuleList(self.Single() for _ in range(6))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        table = self.table(F.silu(c)).unflatten(-1, (6, -1))
        for block in self.blocks:
            x = block(x, context, table)
        return x


class RegisteredMMDiT(Imaged):
    """MM-DiT (arXiv 2403.03206) with registers before the image and a last block for it."""

    class Joint(nn.Module):
        def __init__(self, is_last: bool) -> None:
            super().__init__()
            self.is_last = is_last
            self.modulation_x = Modulation(6)
            self.modulation_y = Modulation(2 if is_last else 6)
            self.norm = norm()
            self.qkv_x, self.qkv_y = (nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
            self.norm_q, self.norm_k = nn.RMSNorm(WIDTH // 2), nn.RMSNorm(WIDTH // 2)
            self.out_x, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp()
            if not is_last:
                self.out_y, self.mlp_y = nn.Linear(WIDTH, WIDTH), Mlp()

        def attend(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            fused = torch.cat([self.qkv_y(y), self.qkv_x(x)], dim=1)
            q, k, v = fused.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v)
            mixed = mixed.transpose(1, 2).flatten(2)
            return mixed[:, y.shape[1] :], mixed[:, : y.shape[1]]

        def forward(self, x: Tensor, y: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation_x(c)
            of_y = self.modulation_y(c)
            from_x, from_y = self.attend(
                modulate(self.norm(x), shift1, scale1), modulate(self.norm(y), *of_y[:2])
            )
            x = x + gate1 * self.out_x(from_x)
            x = x + gate2 * self.mlp(modulate(self.norm(x), shift2, scale2))
            if self.is_last:
                return x, y
            y = y + of_y[2] * self.out_y(from_y)
            return x, y + of_y[5] * self.mlp_y(modulate(self.norm(y), *of_y[3:5]))

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.zeros(1, 3, WIDTH))
        self.blocks = nn.ModuleList(self.Joint(i == count - 1) for i in range(count))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        x = torch.cat([self.registers.expand(x.shape[0], -1, -1), x], dim=1)
        for block in self.blocks:
            x, context = block(x, context, c)
        return x[:, 3:]


class Hourglass(nn.Module):
    """HDiT (arXiv 2401.11605): levels of half the resolution, learned blends on the way up."""

    class Level(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.scale = nn.Linear(WIDTH, 2 * width)
            self.attention, self.gate = Attention(width), nn.Linear(width, 2 * width)
            self.mlp = nn.Linear(2 * width, width)
            self.width = width

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            first, second = self.scale(c)[:, None, None].chunk(2, dim=-1)
            shape = (self.width,)
            y = F.rms_norm(x, shape) * (1 + first)
            x = x + self.attention(y.flatten(1, 2)).view(x.shape)
            a, b = self.gate(F.rms_norm(x, shape) * (1 + second)).chunk(2, dim=-1)
            return x + self.mlp(torch.cat([a * F.gelu(b), a], dim=-1))

    def __init__(self) -> None:
        super().__init__()
        self.time, self.text = TimeEmbedding(), nn.Linear(TEXT, WIDTH)
        self.enter, self.leave = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        widths, depths = (WIDTH, 48, 64), (3, 3, 5)
        self.down = nn.ModuleList(
            nn.ModuleList(self.Level(w) for _ in range(d))
            for w, d in zip(widths[:2], depths[:2], strict=True)
        )
        self.mid = nn.ModuleList(self.Level(widths[2]) for _ in range(depths[2]))
        self.up = nn.ModuleList(
            nn.ModuleList(self.Level(w) for _ in range(d))
            for w, d in zip(widths[:2], depths[:2], strict=True)
        )
        self.merges = nn.ModuleList(nn.Linear(4 * a, b) for a, b in ((WIDTH, 48), (48, 64)))
        self.splits = nn.ModuleList(nn.Linear(b, 4 * a) for a, b in ((WIDTH, 48), (48, 64)))
        self.blends = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(2))

    def forward(self, z: Tensor, t: Tensor, text: Tensor) -> Tensor:
        c = self.time(t) + self.text(text).mean(1)
        x, skips = self.enter(z.permute(0, 2, 3, 1)), []
        for blocks, merge in zip(self.down, self.merges, strict=True):
            for block in blocks:
                x = block(x, c)
            skips.append(x)
            b, h, w, d = x.shape
            x = merge(x.view(b, h // 2, 2, w // 2, 2, d).permute(0, 1, 3, 2, 4, 5).flatten(3))
        for block in self.mid:
            x = block(x, c)
        levels = list(zip(self.up, self.splits, self.blends, skips, strict=True))
        for blocks, split, blend, skip in reversed(levels):
            b, h, w, _ = x.shape
            wide = split(x).view(b, h, w, 2, 2, -1).permute(0, 1, 3, 2, 4, 5)
            x = torch.lerp(skip, wide.reshape(skip.shape), blend)
            for block in blocks:
                x = block(x, c)
        return self.leave(x).permute(0, 3, 1, 2)


class Recurrent(Denoiser):
    """Gated linear recurrence in place of attention, in both directions by turns.

    After DiM (arXiv 2405.14224) and DiG (arXiv 2405.18428); the scan is a sum in log space.
    """

    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.modulation, self.norm = Modulation(3), norm()
            self.enter = nn.Linear(WIDTH, 4 * WIDTH)
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
            self.leave = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            shift, scale, gate = self.modulation(c)
            y = self.enter(modulate(self.norm(x), shift, scale))
            value, decay, key, out = y.chunk(4, dim=-1)
            value = self.conv(value.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
            log_decay = F.logsigmoid(decay).cumsum(1)
            state = (F.silu(value) * key * torch.exp(-log_decay)).cumsum(1)
            return x + gate * self.leave(state * torch.exp(log_decay) * F.silu(out))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Scan() for _ in range(6))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, c).flip(1)
        return x


class Convolutional(nn.Module):
    """Depthwise convolutions and channel attention in place of attention (arXiv 2505.11196)."""

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.modulation, self.norm = Modulation(6), nn.GroupNorm(1, WIDTH, affine=False)
            self.point = nn.Conv2d(WIDTH, WIDTH, 1)
            self.depth = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
            self.channels, self.out = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)
            self.up, self.down = nn.Conv2d(WIDTH, 64, 1), nn.Conv2d(64, WIDTH, 1)

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            parts = [part.transpose(1, 2)[..., None] for part in self.modulation(c)]
            y = modulate(self.norm(x), *parts[:2])
            y = F.gelu(self.depth(self.point(y)))
            y = y * torch.sigmoid(self.channels(F.adaptive_avg_pool2d(y, 1)))
            x = x + parts[2] * self.out(y)
            y = modulate(self.norm(x), *parts[3:5])
            return x + parts[5] * self.down(F.gelu(self.up(y)))

    def __init__(self) -> None:
        super().__init__()
        self.time, self.text = TimeEmbedding(), nn.Linear(TEXT, WIDTH)
        self.enter, self.leave = nn.Conv2d(4, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 1)
        self.blocks = nn.ModuleList(self.Conv() for _ in range(5))

    def forward(self, z: Tensor, t: Tensor, text: Tensor) -> Tensor:
        c = self.time(t) + self.text(text).mean(1)
        x = self.enter(z)
        for block in self.blocks:
            x = block(x, c)
        return self.leave(x)


class DiffiT(Imaged):
    """Queries, keys and values of tokens and of time together (arXiv 2312.02139)."""

    class TimeDependent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of_x, self.of_t = (nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
            self.bias = nn.Parameter(torch.zeros(1, 2, 16, 16))
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.out, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp()

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            both = self.of_x(self.norm1(x)) + self.of_t(c)[:, None]
            q, k, v = (p.unflatten(-1, (2, -1)).transpose(1, 2) for p in both.chunk(3, -1))
            weights = torch.einsum("bhid,bhjd->bhij", q, k) / 4 + self.bias
            mixed = torch.einsum("bhij,bhjd->bhid", weights.softmax(-1), v)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.mlp(self.norm2(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.TimeDependent() for _ in range(5))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, c)
        return x


class Parallel(Denoiser):
    """Attention and MLP side by side between two fused linears (arXiv 2302.05442)."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.modulation, self.norm = Modulation(3), norm()
            self.norm_q, self.norm_k = nn.RMSNorm(16), nn.RMSNorm(16)
            self.enter, self.mlp = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

        def forward(self, x: Tensor, c: Tensor, rotary: Tensor) -> Tensor:
            shift, scale, gate = self.modulation(c)
            y = self.enter(modulate(self.norm(x), shift, scale))
            qkv, hidden = y.split([3 * WIDTH, 2 * WIDTH], dim=-1)
            q, k, v = qkv.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            q, k = self.rotate(self.norm_q(q), rotary), self.rotate(self.norm_k(k), rotary)
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return x + gate * self.mlp(torch.cat([mixed, F.gelu(hidden)], dim=-1))

        @staticmethod
        def rotate(x: Tensor, rotary: Tensor) -> Tensor:
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * rotary).flatten(-2)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Fused() for _ in range(6))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]), 0.5 ** torch.arange(8))
        rotary = torch.polar(torch.ones_like(angles), angles)
        for block in self.blocks:
            x = block(x, c, rotary)
        return x


class Experts(Denoiser):
    """Every second MLP is a mixture of experts, all run and weighted (arXiv 2407.11633)."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 4)
            self.ups = nn.Parameter(torch.zeros(4, WIDTH, WIDTH))
            self.downs = nn.Parameter(torch.zeros(4, WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            weights = self.router(x).softmax(-1)
            best, which = weights.topk(2, dim=-1)
            weights = torch.zeros_like(weights).scatter(-1, which, best)
            hidden = F.silu(torch.einsum("bnd,edf->benf", x, self.ups))
            each = torch.einsum("benf,efd->bend", hidden, self.downs)
            return torch.einsum("bend,bne->bnd", each, weights)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        for block in list(self.blocks)[1::2]:
            block.mlp = self.Mixture()

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, c)
        return x


class Interface(Denoiser):
    """RIN (arXiv 2212.11972): latents read the tokens, compute, and write back to them."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6))
            self.read, self.write = Attention(), Attention()
            self.compute = nn.ModuleList(Attention() for _ in range(2))
            self.mlps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.mlp = Mlp()

        def forward(self, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            z = z + self.read(self.norms[0](z), x)
            for attention, mlp in zip(self.compute, self.mlps, strict=True):
                z = z + attention(self.norms[1](z))
                z = z + F.gelu(mlp(self.norms[2](z)))
            x = x + self.write(self.norms[3](x), z)
            return z, x + self.mlp(self.norms[4](x))

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.zeros(1, 5, WIDTH))
        self.blocks = nn.ModuleList(self.Step() for _ in range(4))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        z = torch.cat([self.latents.expand(x.shape[0], -1, -1), c[:, None]], dim=1)
        for block in self.blocks:
            z, x = block(z, x)
        return x


class SpaceTime(nn.Module):
    """A video [batch, 4, frames, 4, 4]: attention over space, then over time, in each block."""

    class Factorised(Block):
        def __init__(self) -> None:
            super().__init__()
            self.over_time = Attention()

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            b, frames, tokens, _ = x.shape
            shift1, scale1, gate1, shift2, scale2, gate2 = (
                m[:, None] for m in self.modulation(c)
            )
            y = modulate(self.norm1(x), shift1, scale1).flatten(0, 1)
            x = x + gate1 * self.attention(y).unflatten(0, (b, frames))
            y = self.norm1(x).transpose(1, 2).flatten(0, 1)
            x = x + self.over_time(y).unflatten(0, (b, tokens)).transpose(1, 2)
            return x + gate2 * self.mlp(modulate(self.norm2(x), shift2, scale2))

    def __init__(self) -> None:
        super().__init__()
        self.time, self.text = TimeEmbedding(), nn.Linear(TEXT, WIDTH)
        self.enter, self.leave = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(self.Factorised() for _ in range(4))

    def forward(self, z: Tensor, t: Tensor, text: Tensor) -> Tensor:
        c = self.time(t) + self.text(text).mean(1)
        x = self.enter(z.permute(0, 2, 3, 4, 1).flatten(2, 3))
        for block in self.blocks:
            x = block(x, c)
        return self.leave(x).unflatten(2, z.shape[3:]).permute(0, 4, 1, 2, 3)


class Aligned(Denoiser):
    """A hidden state leaves in mid-stack for a projector (REPA, arXiv 2410.06940)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.projector = nn.Linear(WIDTH, CHANNELS)

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        features = x
        for i, block in enumerate(self.blocks):
            x = block(x, c)
            if i == 2:
                features = x
        return x + 0.1 * F.normalize(features, dim=-1)


class Normalised(Denoiser):
    """LightningDiT's block (arXiv 2501.01423): RMSNorm, SwiGLU, normed queries, rotary."""

    class Light(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
            self.norm_q, self.norm_k = nn.RMSNorm(16), nn.RMSNorm(16)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.fused, self.mlp = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            self.modulation = Modulation(6)

        def forward(self, x: Tensor, c: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)
            y = self.qkv(modulate(self.norm1(x), shift1, scale1))
            q, k, v = y.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            q = self.turn(self.norm_q(q), cos, sin)
            k = self.turn(self.norm_k(k), cos, sin)
            mixed = F.scaled_dot_product_attention(q, k, v)
            x = x + gate1 * self.out(mixed.transpose(1, 2).flatten(2))
            a, b = self.fused(modulate(self.norm2(x), shift2, scale2)).chunk(2, dim=-1)
            return x + gate2 * self.mlp(F.silu(a) * b)

        @staticmethod
        def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            return x * cos + torch.cat([-b, a], dim=-1) * sin

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Light() for _ in range(5))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]), 0.5 ** torch.arange(8)).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, c, cos, sin)
        return x


class Windowed(Denoiser):
    """flex_attention with a bias of nearness: each block calls a sub-graph."""

    class Flexible(Block):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            del self.attention

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)
            y = modulate(self.norm1(x), shift1, scale1)
            q, k, v = self.qkv(y).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)

            def near(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return score - 0.1 * (i - j).abs()

            y = flex_attention(q, k, v, score_mod=near)
            x = x + gate1 * self.out(y.transpose(1, 2).flatten(2))
            return x + gate2 * self.mlp(modulate(self.norm2(x), shift2, scale2))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Flexible() for _ in range(5))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, c)
        return x
