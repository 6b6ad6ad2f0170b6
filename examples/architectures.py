"""Check stepfx on a suite of architectures and write the table of docs/architectures.md.

    python examples/architectures.py suite.pt --output docs/architectures.md

The suite is a torch file: a dictionary from a name to a record with `cls` (the dotted name of
a class), `init` and `inputs` (keyword arguments of the class and of one call).
"""

from __future__ import annotations

import argparse
import importlib
import logging
import warnings
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch.utils import _pytree as pytree

from stepfx.coverage import Coverage, check, markdown
from stepfx.testing import fill_gates

HEAD = """# Architectures

Made by `examples/architectures.py` on torch {torch}, diffusers {diffusers}: random weights (no
gate is
zero), tiny sizes, {count} configurations. *block lists* are the lengths in execution order,
*pattern* the ForwardPatterns, *gated* which lists the gate may skip blocks of, or why there is
none; *off is off* says whether threshold 0 gave the model's own output bit for bit through
`inner="eager"`, *steps* the schedule of three equal calls (1 computed, 0 reused).

"""


def build(name: str, record: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the model of a record with random weights, and the arguments of one call."""
    module, cls = record["cls"].rsplit(".", 1)
    model = getattr(importlib.import_module(module), cls)(**record["init"]).eval()
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


def main() -> None:
    """Check every record and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    suite = torch.load(args.suite, weights_only=False)  # our own file: classes and inputs
    results: list[Coverage] = []
    failed: list[str] = []
    for name, record in suite.items():
        if args.only and name not in args.only:
            continue
        try:
            model, inputs = build(name, record)
            results.append(check(model, (), inputs, name))
        except Exception as error:
            failed.append(f"- {name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            print(failed[-1], flush=True)
            continue
        print(markdown(results[-1:]).splitlines()[-1], flush=True)
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__}
    text = HEAD.format(**versions, count=len(results)) + markdown(results)
    if failed:
        text += "\nNot run (the model itself needs more than is installed):\n\n"
        text += "\n".join(failed) + "\n"
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
