"""`stepfx demo`: sample a trained model without and with the cache."""

from __future__ import annotations

import argparse

from stepfx.cli.command import Command, Exit, Output
from stepfx.demo import main as demo


def run(args: argparse.Namespace, output: Output) -> int:
    """Run the demo; under `--json` print what `--report` writes."""
    record = demo.run(args, output.console)
    if output.is_json:
        output.result(record)
    return Exit.DONE


COMMAND = Command(
    "demo",
    "sample a trained model without and with the cache, and compare",
    demo.add_arguments,
    run,
)
