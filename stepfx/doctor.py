"""What this machine and its packages can do for stepfx, and what is known to clash.

Each check runs what it reports on: fp8 is a product on the device, Inductor compiles a
function, torchao is imported in a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch._inductor.config

import stepfx
from stepfx.config import Config, ConfigError, stepfx_variables

Status = Literal["ok", "note", "warning", "problem"]

TORCH = ("2.11", "2.14")  # supported from, and the first that is not
PACKAGES = {
    "diffusers": "pip install 'stepfx[diffusers]'",
    "torchao": "pip install 'stepfx[fp8]'",
    "cache-dit": "",
    "triton": "",
    "networkx": "",
    "pydot": "",
}
FP8_CAPABILITY = (8, 9)  # Ada; below it no tensor core multiplies fp8


@dataclass(frozen=True)
class Check:
    """One line of the report: what was looked at, how it is, and what to do about it."""

    name: str
    status: Status
    found: str
    hint: str = ""


def check_all(compile_one: bool = True) -> Iterator[Check]:
    """Yield all checks; `compile_one` lets Inductor compile a small function."""
    yield check_python()
    yield check_torch(torch.__version__)
    yield check_backend()
    yield from map(check_package, PACKAGES)
    yield check_torchao()
    yield from check_devices()
    yield check_fp8()
    yield check_compiler()
    yield check_dynamo()
    if compile_one:
        yield check_inductor()
    yield check_inductor_cache()
    yield check_options()
    yield check_graphviz()


def check_python() -> Check:
    """Say which Python and system this is."""
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    return Check("Python", "ok", found)


def check_torch(version: str) -> Check:
    """Tell whether stepfx was written for this version of torch."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    low, high = (tuple(map(int, bound.split("."))) for bound in TORCH)
    if low <= numbers < high:
        return Check("torch", "ok", version)
    hint = f"stepfx is written for torch >= {TORCH[0]}, < {TORCH[1]}"
    return Check("torch", "problem" if numbers < low else "warning", version, hint)


def check_backend() -> Check:
    """Tell whether `backend="stepfx"` leads here."""
    place = str(Path(stepfx.__file__).parent)
    if "stepfx" not in torch._dynamo.list_backends():
        hint = (
            "torch.compile does not know the backend: pip install stepfx (or pip install -e .)"
        )
        return Check("stepfx", "problem", f"{stepfx.__version__} in {place}", hint)
    known = importlib.util.find_spec("stepfx")
    origin = str(Path(known.origin).parent) if known and known.origin else place
    if origin != place:
        return Check("stepfx", "warning", place, f"another copy is in {origin}")
    return Check("stepfx", "ok", f"{stepfx.__version__} in {place}")


def check_package(name: str) -> Check:
    """Say which version of an optional package is installed."""
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "note", "not installed", PACKAGES.get(name, ""))


def check_torchao() -> Check:
    """Tell whether torchao's compiled parts match torch; nothing else shows it."""
    if importlib.util.find_spec("torchao") is None:
        return Check("torchao with torch", "note", "not installed")
    done = subprocess.run(
        [sys.executable, "-c", "import torchao"], capture_output=True, text=True, check=False
    )
    return judge_torchao(done.returncode, done.stderr)


def judge_torchao(code: int, said: str) -> Check:
    """Read what an import of torchao printed and how it ended."""
    lines = [line.strip() for line in said.strip().splitlines() if line.strip()]
    if code:
        hint = "install the torchao release that names this torch version"
        return Check(
            "torchao with torch", "problem", lines[-1] if lines else "import fails", hint
        )
    failed = [x for x in lines if "Failed to load" in x or "Skipping import of cpp" in x]
    if failed:
        hint = (
            "its compiled kernels do not match this Python or torch; stepfx uses only its "
            "Python parts, which work"
        )
        count = f"{len(failed)} compiled part{'s' if len(failed) > 1 else ''} not loaded"
        return Check("torchao with torch", "warning", count, hint)
    return Check("torchao with torch", "ok", "imports, compiled parts included")


def check_devices() -> Iterator[Check]:
    """Say which accelerators there are and what they can do."""
    if not torch.cuda.is_available():
        built = "built with CUDA" if torch.version.cuda else "built without CUDA"
        hint = "" if not torch.version.cuda else "torch sees no GPU: check the driver"
        yield Check("GPU", "note", f"none ({built})", hint)
        return
    for i in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(i)
        found = f"{of.name}, sm{of.major}{of.minor}, {of.total_memory / 2**30:.0f} GiB"
        if (of.major, of.minor) < FP8_CAPABILITY:
            yield Check(f"GPU {i}", "note", found, "fp8 pays from sm89 on; it runs without")
        else:
            yield Check(f"GPU {i}", "ok", found)


def check_fp8() -> Check:
    """Multiply two fp8 matrices on the device that would be used."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        a = torch.eye(16, device=device).to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        # Private: the only product of fp8 matrices that torch 2.11 to 2.13 has.
        out = torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return Check("fp8", "note", f"does not run on {device}: {str(error).splitlines()[0]}")
    if not torch.equal(out.float(), torch.eye(16, device=device)):
        return Check("fp8", "problem", f"a product on {device} is wrong", "do not use fp8=...")
    if device == "cpu":
        return Check("fp8", "note", "runs on cpu", "emulated there: no faster than the dtype")
    return Check("fp8", "ok", f"runs on {device}")


def check_compiler() -> Check:
    """Tell whether Inductor finds a C++ compiler."""
    for name in (*torch._inductor.config.cpp.cxx, "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return Check("C++ compiler", "ok", found)
    return Check("C++ compiler", "problem", "none", "Inductor needs one: apt-get install g++")


def check_dynamo() -> Check:
    """Tell whether torch.compile is switched off for the process."""
    if torch._dynamo.config.disable:
        hint = "unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE"
        return Check("Dynamo", "problem", "switched off: models run uncompiled", hint)
    return Check("Dynamo", "ok", "on")


def check_inductor() -> Check:
    """Compile a small function on the device that would be used and compare."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.arange(64.0, device=device)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * 2 + 1

    start = time.perf_counter()
    try:
        with torch.no_grad():
            found = torch.compile(function)(x)
    except Exception as error:
        # Anything at all can go wrong in compilers; each means that Inductor is not usable.
        first = str(error).strip().splitlines() or [type(error).__name__]
        return Check(
            "Inductor", "problem", f"fails on {device}: {first[0]}", "see torch.compile"
        )
    seconds = time.perf_counter() - start
    if not torch.allclose(found, function(x)):
        return Check("Inductor", "problem", f"computes something else on {device}")
    return Check("Inductor", "ok", f"compiles on {device} ({seconds:.1f} s)")


def check_inductor_cache() -> Check:
    """Say where Inductor keeps compiled code, and whether it can write there."""
    # Private: the public way to this folder is an environment variable (torch 2.11 to 2.13).
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir())
    if not os.access(folder, os.W_OK):
        return Check("Inductor's cache", "problem", str(folder), "it cannot be written to")
    free = shutil.disk_usage(folder).free / 2**30
    status: Status = "ok" if free >= 1 else "warning"
    hint = "" if free >= 1 else "less than 1 GiB is free"
    return Check("Inductor's cache", status, f"{folder}, {free:.0f} GiB free", hint)


def check_options() -> Check:
    """Say what the environment sets, and whether it can be read."""
    found = ", ".join(f"{k}={v}" for k, v in stepfx_variables().items()) or "none set"
    try:
        Config.build()
    except ConfigError as error:
        return Check("STEPFX_ variables", "problem", found, str(error))
    return Check("STEPFX_ variables", "ok", found)


def check_graphviz() -> Check:
    """Tell what draws the block graphs of the HTML report."""
    if shutil.which("dot") and importlib.util.find_spec("pydot"):
        return Check("graphviz", "ok", "draws the block graphs of the HTML report")
    return Check("graphviz", "note", "not used: the report lays block graphs out itself")
