"""Measure a computed and a reused step against Inductor alone, side by side in one run.

    OMP_NUM_THREADS=1 python examples/step_times.py --blocks 12 --width 384 --tokens 256
    OMP_NUM_THREADS=1 python examples/step_times.py --blocks 40 --width 128 --tokens 64 --cold

Prints medians over alternating runs: Inductor's step, stepfx's computed and reused step, and
the artifacts of a reused step called alone (prologue, first block, score, reuse, epilogue)
on the inputs they had, which is the limit for a reused step. "Dynamo's entry" is what any
backend pays before it is called (guards, gathering the weights): the same model behind a
backend that returns a kept result. `--cold` measures the first compile of both instead, each
in a process and cache folder of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DiTTransformer2DModel

import stepfx
from stepfx import lowering
from stepfx.testing import fill_gates


def build(blocks: int, width: int, tokens: int) -> Callable[[Any, float], torch.Tensor]:
    """Return a caller of a random DiT; `caller.model` is the model."""
    side = 2 * round(tokens**0.5)
    model = DiTTransformer2DModel(
        num_attention_heads=width // 64,
        attention_head_dim=64,
        in_channels=4,
        out_channels=4,
        num_layers=blocks,
        sample_size=side,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    model.eval().requires_grad_(False)
    fill_gates(model, 0.05)
    latent, label = torch.randn(1, 4, side, side), torch.tensor([3])

    @torch.no_grad()
    def call(compiled: Any, t: float) -> torch.Tensor:
        return compiled(latent, torch.tensor([t]), class_labels=label).sample

    call.model = model
    return call


class Recorder:
    """Stands between the outer graph and an artifact and remembers the last calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.on = False

    def wrap(self, replace: Callable[..., None]) -> Callable[..., None]:
        """Return a `replace(module, name, artifact)` whose artifacts record their calls."""

        def replace_recorded(module: Any, name: str, artifact: Callable[..., Any]) -> None:
            def recorded(*inputs: Any) -> Any:
                if self.on:
                    self.calls.append((artifact, inputs))
                return artifact(*inputs)

            replace(module, name, recorded)

        return replace_recorded


def kept_result(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Compile to nothing: every call after the first returns the first one's result."""
    kept: list[Any] = []

    def run(*args: Any) -> Any:
        if not kept:
            kept.append(graph.forward(*args))
        return kept[0]

    return run


def steps(args: argparse.Namespace) -> None:
    """Print the median times of steps."""
    call, recorder = build(args.blocks, args.width, args.tokens), Recorder()
    plain = torch.compile(call.model)
    computed = torch.compile(call.model, backend=stepfx.Backend(threshold=1e-30))
    reused = torch.compile(call.model, backend=stepfx.Backend(threshold=1e9))
    entry = torch.compile(call.model, backend=kept_result)
    for compiled in (plain, computed, entry):
        call(compiled, 990.0)
    lowering._replace = recorder.wrap(lowering._replace)
    for t in (990.0, 989.0):
        call(reused, t)
    recorder.on = True
    call(reused, 988.0)
    recorder.on = False

    @torch.no_grad()
    def parts() -> None:
        for artifact, inputs in recorder.calls:
            artifact(*inputs)

    times: dict[str, list[float]] = {}
    for i in range(args.runs + 5):
        t = 900.0 - i
        for name, run in (
            # Each short run behind a whole step, which leaves the caches cold for both.
            ("Inductor", lambda t=t: call(plain, t)),
            ("reused", lambda t=t: call(reused, t)),
            ("computed", lambda t=t: call(computed, t)),
            ("parts alone", parts),
            ("Inductor again", lambda t=t: call(plain, t)),
            ("Dynamo's entry", lambda t=t: call(entry, t)),
        ):
            start = time.perf_counter()
            run()
            if i >= 5:
                times.setdefault(name, []).append((time.perf_counter() - start) * 1000)
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, value in median.items():
        spread = statistics.quantiles(times[name], n=4)
        print(f"{name:<14} {value:8.2f} ms   quartiles {spread[0]:.2f} to {spread[2]:.2f}")
    print(f"computed / Inductor    {median['computed'] / median['Inductor']:.3f}")
    print(f"reused / parts alone   {median['reused'] / median['parts alone']:.3f}")
    alone = median["parts alone"] + median["Dynamo's entry"]
    print(f"  with Dynamo's entry  {median['reused'] / alone:.3f}")
    print(f"reused / Inductor      {median['reused'] / median['Inductor']:.3f}")


def cold(args: argparse.Namespace) -> None:
    """Print the seconds of the first call, compilation included."""
    if args.contender is None:
        command = [sys.executable, *sys.argv]
        for name in ("inductor", "stepfx", "inductor", "stepfx"):
            with tempfile.TemporaryDirectory() as folder:
                env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
                subprocess.run([*command, "--contender", name], env=env, check=True)
        return
    # The start-up of compiler and headers is not the model's: spend it on one block of another
    # width, none of whose kernels serves the model.
    small = build(1, 64, 16)
    small(torch.compile(small.model), 900.0)
    torch._dynamo.reset()
    call = build(args.blocks, args.width, args.tokens)
    start = time.perf_counter()
    call(torch.compile(call.model, backend=args.contender), 900.0)
    print(f"{args.contender:<12} first call {time.perf_counter() - start:.1f} s")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    (cold if args.cold else steps)(args)


if __name__ == "__main__":
    main()
