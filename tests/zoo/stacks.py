"""Ways to write a stack of blocks that diffusers does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.parts import WIDTH, Attention, Block, Denoiser, Mlp, Modulation, modulate, norm


class InModuleDict(Denoiser):
    """Blocks under odd names in a ModuleDict."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.things = nn.ModuleDict({f"thing_{i}": Block() for i in range(count)})

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for thing in self.things.values():
            x = thing(x, c)
        return x


class InSequential(Denoiser):
    """Blocks in a Sequential that hands a second argument on."""

    class Pipe(nn.Sequential):
        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            for module in self:
                x = module(x, c)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.pipe = self.Pipe(*(Block() for _ in range(6)))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        return self.pipe(x, c)


class BareLists(Denoiser):
    """No class for a block: lists of lists of layers, walked by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(
            nn.ModuleList([Modulation(4), norm(), Attention(), norm(), Mlp()]) for _ in range(5)
        )

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for modulation, norm1, attention, norm2, mlp in self.rows:
            scale1, gate1, scale2, gate2 = modulation(c)
            x = x + gate1 * attention(norm1(x) * (1 + scale1))
            x = x + gate2 * mlp(norm2(x) * (1 + scale2))
        return x


class KeywordOnly(Denoiser):
    """Blocks that take keywords alone, in an order that changes from call to call."""

    class Keyed(Block):
        def forward(self, *, vector: Tensor, tokens: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(tokens, vector)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Keyed() for _ in range(4))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(tokens=x, vector=c) if i % 2 else block(vector=c, tokens=x)
        return x


class JointBlock(nn.Module):
    """Two streams that attend to each other; returns them in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation_x, self.modulation_y = Modulation(4), Modulation(4)
        self.norm, self.attention = norm(), Attention()
        self.mlp, self.text_up, self.text_down = (
            Mlp(),
            nn.Linear(WIDTH, 48),
            nn.Linear(48, WIDTH),
        )

    def forward(self, x: Tensor, y: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        scale1, gate1, scale2, gate2 = self.modulation_x(c)
        scale3, gate3, scale4, gate4 = self.modulation_y(c)
        joint = torch.cat([self.norm(y) * (1 + scale3), self.norm(x) * (1 + scale1)], dim=1)
        from_y, from_x = self.attention(joint).split([y.shape[1], x.shape[1]], dim=1)
        x, y = x + gate1 * from_x, y + gate3 * from_y
        x = x + gate2 * self.mlp(self.norm(x) * (1 + scale2))
        y = y + gate4 * self.text_down(F.silu(self.text_up(self.norm(y) * (1 + scale4))))
        return y, x


class SwappedTuple(Denoiser):
    """Each block gives back (text, image) for (image, text)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(JointBlock() for _ in range(5))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            context, x = block(x, context, c)
        return x


class InPlace(Denoiser):
    """Residual adds in place."""

    class Adding(Block):
        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)
            x += gate1 * self.attention(modulate(self.norm1(x), shift1, scale1))
            x.add_(gate2 * self.mlp(modulate(self.norm2(x), shift2, scale2)))
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Adding() for _ in range(5))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, c)
        return x


class ThroughViews(Denoiser):
    """One tensor for the whole stack, written to through views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention() for _ in range(5))
        self.mlps = nn.ModuleList(Mlp() for _ in range(5))
        self.scales = nn.ModuleList(Modulation(2) for _ in range(5))
        self.norm1 = norm()

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        image = x[:, 4:]
        for attention, mlp, scales in zip(self.attentions, self.mlps, self.scales, strict=True):
            scale, gate = scales(c)
            x += attention(self.norm1(x) * (1 + scale))
            image += gate * mlp(self.norm1(image))
            x[:, :4] *= 0.9
        return x


class ViewsInBlocks(Denoiser):
    """Blocks that fill a new tensor through views, and rotate halves in place."""

    class Filling(Block):
        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            y = super().forward(x, c)
            out = torch.empty_like(y)
            out[..., ::2] = y[..., 1::2]
            out[..., 1::2] = -y[..., ::2]
            out.view(out.shape[0], -1)[:, :8] += 0.1
            return x + out

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Filling() for _ in range(4))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, c)
        return x


class CrossBlock(Block):
    """A block that reads the text too."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = Attention()

    def forward(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + self.cross(self.norm1(x), context), c)


class MiddleDiffers(Denoiser):
    """One block in the middle reads the text."""

    def __init__(self, before: int = 3, after: int = 3) -> None:
        super().__init__()
        self.before = nn.ModuleList(Block() for _ in range(before))
        self.middle = CrossBlock()
        self.after = nn.ModuleList(Block() for _ in range(after))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for block in self.before:
            x = block(x, c)
        x = self.middle(x, c, context)
        for block in self.after:
            x = block(x, c)
        return x


class SkipBlock(Block):
    """A block that takes what an earlier one left."""

    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, c: Tensor, skip: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.join(torch.cat([x, skip], dim=-1)), c)


class UShaped(Denoiser):
    """The second half takes the outputs of the first, last first."""

    def __init__(self, half: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(half))
        self.middle = Block()
        self.up = nn.ModuleList(SkipBlock() for _ in range(half))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x, c)
            skips.append(x)
        x = self.middle(x, c)
        for block in self.up:
            x = block(x, c, skips.pop())
        return x


class ZippedSkips(Denoiser):
    """Adds the skips of one list to the blocks of another, walked with zip."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(4))
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(4))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        skips = []
        for block in self.encoder:
            x = block(x, c)
            skips.append(x)
        for block, skip in zip(self.decoder, reversed(skips), strict=True):
            x = block(x, c, context) + skip
        return x


class FewerTokens(Denoiser):
    """Neighbouring tokens become one in mid-stack, and two again behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.ModuleList(Block() for _ in range(3))
        self.coarse = nn.ModuleList(Block() for _ in range(5))
        self.merge, self.split = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for block in self.fine:
            x = block(x, c)
        short = self.merge(x.unflatten(1, (-1, 2)).flatten(2))
        for block in self.coarse:
            short = block(short, c)
        return x + self.split(short).unflatten(-1, (2, -1)).flatten(1, 2)


class MoreTokens(Denoiser):
    """The text joins the image in mid-stack."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = nn.ModuleList(Block() for _ in range(4))
        self.joint = nn.ModuleList(Block() for _ in range(4))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        count = x.shape[1]
        for block in self.alone:
            x = block(x, c)
        x = torch.cat([x, context], dim=1)
        for block in self.joint:
            x = block(x, c)
        return x[:, :count]


class HyperConnections(Denoiser):
    """Four copies of the stream folded into the batch, mixed around every block.

    Hyper-connections: arXiv 2409.19606.
    """

    def __init__(self, count: int = 5, copies: int = 4) -> None:
        super().__init__()
        self.copies = copies
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        read, write, mix = (copies,), (copies,), (copies, copies)
        self.read = nn.ParameterList(nn.Parameter(torch.zeros(read)) for _ in range(count))
        self.write = nn.ParameterList(nn.Parameter(torch.zeros(write)) for _ in range(count))
        self.mix = nn.ParameterList(nn.Parameter(torch.zeros(mix)) for _ in range(count))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        h = x.repeat_interleave(self.copies, dim=0)
        for block, read, write, mix in zip(
            self.blocks, self.read, self.write, self.mix, strict=True
        ):
            streams = h.unflatten(0, (-1, self.copies))
            y = block(torch.einsum("bsnd,s->bnd", streams, read), c)
            mixed = streams + torch.einsum("bsnd,sr->brnd", streams, mix)
            h = (mixed + y[:, None] * write[:, None, None]).flatten(0, 1)
        return h.unflatten(0, (-1, self.copies)).mean(1)


class TensorLists(Denoiser):
    """Blocks take and give a list of tensors: one for each part of the tokens."""

    class Parted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm, self.mlp = Attention(), norm(), Mlp()
            self.scale = Modulation(1)

        def forward(self, parts: Sequence[Tensor], c: Tensor) -> list[Tensor]:
            (gate,) = self.scale(c)
            sizes = [part.shape[1] for part in parts]
            x = torch.cat(list(parts), dim=1)
            x = x + gate * self.attention(self.norm(x))
            x = x + gate * self.mlp(self.norm(x))
            return list(x.split(sizes, dim=1))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Parted() for _ in range(4))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        parts = [x[:, :6], x[:, 6:], context]
        for block in self.blocks:
            parts = block(parts, c)
        return torch.cat(parts[:2], dim=1)


class SharedWeights(Denoiser):
    """One block, run again and again."""

    def __init__(self, times: int = 6) -> None:
        super().__init__()
        self.times, self.block = times, Block()

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.block(x, c)
        return x


class TwoStacks(Denoiser):
    """A stack over the text, one over the image, and no stream between them but the text."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm, self.mlp = Attention(), norm(), Mlp()

        def forward(self, y: Tensor) -> Tensor:
            y = y + self.attention(self.norm(y))
            return y + self.mlp(self.norm(y))

    def __init__(self) -> None:
        super().__init__()
        self.readers = nn.ModuleList(self.Plain() for _ in range(3))
        self.blocks = nn.ModuleList(CrossBlock() for _ in range(5))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for reader in self.readers:
            context = reader(context)
        for block in self.blocks:
            x = block(x, c, context)
        return x


class SideBySide(Denoiser):
    """Two stacks on the same latent, run in turn; their results are added."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(Block() for _ in range(4))
        self.right = nn.ModuleList(CrossBlock() for _ in range(4))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        a = b = x
        for left, right in zip(self.left, self.right, strict=True):
            a = left(a, c)
            b = right(b, c, context)
        return a + b


class Convolutions(nn.Module):
    """Residual blocks of convolutions with scale and shift: no transformer at all."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.GroupNorm(4, WIDTH), nn.GroupNorm(4, WIDTH)
            self.first = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
            self.second = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
            self.film = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: Tensor, c: Tensor) -> Tensor:
            scale, shift = self.film(F.silu(c))[:, :, None, None].chunk(2, dim=1)
            y = self.first(F.silu(self.norm1(x)))
            y = modulate(self.norm2(y), shift, scale)
            return x + self.second(F.silu(y))

    def __init__(self) -> None:
        super().__init__()
        self.head = Denoiser()
        self.enter = nn.Conv2d(4, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(self.Residual() for _ in range(6))
        self.leave = nn.Conv2d(WIDTH, 4, 3, padding=1)

    def forward(self, z: Tensor, t: Tensor, text: Tensor) -> Tensor:
        c = self.head.time(t) + self.head.text(text).mean(1)
        x = self.enter(z)
        for block in self.blocks:
            x = block(x, c)
        return self.leave(F.silu(x))


class DeadOutputs(Denoiser):
    """Blocks return what only some callers read: attention maps, a norm of the tokens."""

    class Telling(Block):
        def forward(self, x: Tensor, c: Tensor) -> Any:
            y = super().forward(x, c)
            return {"tokens": y, "change": y - x, "size": y.square().mean(-1)}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Telling() for _ in range(5))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, c)["tokens"]
        return x


class PerBlockInputs(Denoiser):
    """A layer of text for each block, a depth-scaled residual and a table sliced by depth."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CrossBlock() for _ in range(count))
        self.layers = nn.Linear(WIDTH, count * WIDTH)
        self.table = nn.Parameter(torch.zeros(count, WIDTH))

    def stack(self, x: Tensor, c: Tensor, context: Tensor) -> Tensor:
        layers = self.layers(context).chunk(len(self.blocks), dim=-1)
        for i, block in enumerate(self.blocks):
            x = x + (0.5 + 0.1 * i) * block(x, c + self.table[i], layers[i])
        return x
