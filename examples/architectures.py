"""Check stepfx on a suite of architectures and write the table of docs/architectures.md.

    python examples/architectures.py suite.pt --output docs/architectures.md

The suite is a torch file: a dictionary from a name to a record with `cls` (the dotted name of
a class), `init` and `inputs` (keyword arguments of the class and of one call).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import multiprocessing
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch.utils import _pytree as pytree

from stepfx.coverage import Coverage, check, markdown
from stepfx.testing import fill_gates

HEAD = """# Architectures

Made by `examples/architectures.py` on torch {torch}, diffusers {diffusers}: random weights (no
gate is zero), tiny sizes, {count} configurations, `inner="eager"`. Blocks are found in the
graph alone. Cosmos resizes its padding mask with torchvision, which need not be installed:
PyTorch's nearest interpolation then takes its place.

| column | meaning |
|---|---|
| graphs | graphs that Dynamo makes; *flags*: with the Dynamo flags that `stepfx.compile` sets |
| block lists | lengths, in the order they run |
| pattern | ForwardPatterns; 0/1 where the graph does not tell them apart |
| gated | which lists the gate may skip blocks of, or why there is no gate |
| off is off | threshold 0 and computed steps give the model's own output bit for bit |
| steps | two equal calls, then two with other inputs: 1 computed, 0 reused |
| linears | linear layers in a computed and in a reused step, counted by PyTorch's profiler |

{exact} of {known} configurations have exactly the block lists that the suite says run; {gated}
are gated.

"""


class _Transforms:
    """The one function that Cosmos needs of torchvision, which the project does without."""

    class InterpolationMode:
        NEAREST = "nearest"

    class functional:  # noqa: N801 - torchvision's name
        @staticmethod
        def resize(image: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
            return torch.nn.functional.interpolate(image, size=size, mode=interpolation)


def build(name: str, record: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the model of a record with random weights, and the arguments of one call."""
    module, cls = record["cls"].rsplit(".", 1)
    home = importlib.import_module(module)
    if cls == "CosmosTransformer3DModel" and not hasattr(home, "transforms"):
        home.transforms = _Transforms  # type: ignore[attr-defined]
    model = getattr(home, cls)(**record["init"]).eval()
    model.requires_grad_(False)
    fill_gates(model)
    inputs = record["inputs"]
    if "grouped" in name:  # torch's grouped matrix product is for bfloat16
        model = model.to(torch.bfloat16)
        inputs = pytree.tree_map(_to_bfloat16, inputs)
    return model, inputs


def _to_bfloat16(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if is_float else value


def _expected(record: dict[str, Any]) -> list[int]:
    """Return the lengths of the lists that run, as the suite has them; 0: in no graph."""
    return [blocks["blocks"] for blocks in record["lists"]]


def _is_exact(result: Coverage, record: dict[str, Any]) -> bool:
    """Tell whether the lists in the graph are those that run; lists in turns may be swapped."""
    found = sorted(blocks.length for blocks in result.report.block_lists)
    expected = sorted(n for n in _expected(record) if n)
    if result.report.needs_flags:  # the suite was recorded without the flags
        return all(found.count(n) >= expected.count(n) for n in expected)
    return found == expected


def check_one(suite: Path, name: str) -> Coverage | str:
    """Check one record; return what was found, or why the model could not be run."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    record = torch.load(suite, weights_only=False)[name]  # our own file: classes and inputs
    try:
        model, inputs = build(name, record)
        found = check(model, (), inputs, name)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return f"- {name}: {type(error).__name__}: {first}"
    return replace(found, report=replace(found.report, results=()))  # graphs stay here


def main() -> None:
    """Check every record and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    suite = torch.load(args.suite, weights_only=False)
    names = [name for name in suite if not args.only or name in args.only]
    results: list[Coverage] = []
    failed: list[str] = []
    # New processes, one after the other: Dynamo keeps what it has compiled.
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.jobs, maxtasksperchild=10) as pool:
        for found in pool.imap(functools.partial(check_one, args.suite), names):
            if isinstance(found, str):
                failed.append(found)
                print(found, flush=True)
                continue
            results.append(found)
            print(markdown([found]).splitlines()[-1], flush=True)
    exact = [r for r in results if _is_exact(r, suite[r.name])]
    text = HEAD.format(
        torch=torch.__version__,
        diffusers=diffusers.__version__,
        count=len(results),
        exact=len(exact),
        known=len(results),
        gated=sum(r.report.gate is not None for r in results),
    )
    text += markdown(results)
    others = [f"- {r.name}: {_expected(suite[r.name])}" for r in results if r not in exact]
    if others:
        text += "\nThe suite says that other lists run in:\n\n" + "\n".join(others) + "\n"
    if failed:
        text += "\nNot run (the model itself needs more than is installed):\n\n"
        text += "\n".join(failed) + "\n"
    text = re.sub(r"/\S*site-packages/", "", text)
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
