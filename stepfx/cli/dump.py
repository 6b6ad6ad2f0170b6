"""`stepfx dump`: the text of a model's graphs after each pass, with differences."""

from __future__ import annotations

import argparse
from pathlib import Path

import stepfx
from stepfx.cli.command import Command, Exit, Output, add_options, options_of
from stepfx.cli.explain import trace
from stepfx.cli.factory import load
from stepfx.dump import format_summary
from stepfx.pipeline import PipelineResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the factory, the folder and the options of stepfx."""
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="see stepfx explain --help")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("stepfx-dump"),
        metavar="FOLDER",
        help="where each graph gets a folder of its own (stepfx-dump)",
    )
    add_options(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Write the dumps of all graphs and print what each pass did."""
    stepfx.configure(**{**options_of(args.option), "dump": args.out})
    report = trace(load(args.factory))
    results = [r for r in report.results if isinstance(r, PipelineResult)]
    folders = [r.dump.folder for r in results if r.dump.folder is not None]
    record = {
        "folders": [str(folder) for folder in folders],
        "files": [str(file) for folder in folders for file in sorted(folder.iterdir())],
        "reason": report.reason,
    }
    shown = [
        line
        for folder, result in zip(folders, results, strict=True)
        for line in (f"{folder}", format_summary(result.records))
    ]
    output.result(record, *shown)
    return Exit.DONE


COMMAND = Command(
    "dump",
    "write a model's graphs after each pass, with differences and a page",
    add_arguments,
    run,
)
