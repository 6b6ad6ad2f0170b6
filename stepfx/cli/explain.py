"""`stepfx explain`: block lists, where the gate sits, or why there is none."""

from __future__ import annotations

import argparse
from pathlib import Path

import stepfx
from stepfx.cli.command import Command, CommandError, Exit, Output, add_options, options_of
from stepfx.cli.factory import ModelCall, load
from stepfx.progress import waiting
from stepfx.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the factory, the HTML file and the options of stepfx."""
    parser.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="a function that returns (model, kwargs), (model, args) or (model, args, kwargs); "
        "MODULE is a module's name or a .py file",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page")
    add_options(parser)


def trace(call: ModelCall) -> Report:
    """Trace one call of a model; a model that cannot be traced is a `CommandError`."""
    name = type(call.model).__name__
    try:
        with waiting(f"tracing {name}"):
            return stepfx.explain(call.model, *call.args, **call.kwargs)
    except stepfx.ConfigError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines() or [""]
        raise CommandError(
            f"{name} cannot be traced: {type(error).__name__}: {first[0]}",
            "check that the model runs without torch.compile on the inputs of the factory",
        ) from error


def run(args: argparse.Namespace, output: Output) -> int:
    """Explain the model; exit with 3 if no gate can be placed."""
    stepfx.configure(**options_of(args.option))
    report = trace(load(args.factory))
    shown: list[object] = [report]
    record = report.to_dict()
    if args.html:
        record["html"] = str(report.to_html(args.html))
        shown.append(f"page: {args.html}")
    output.result(record, *shown)
    return Exit.DONE if report.gate else Exit.NO


COMMAND = Command(
    "explain",
    "show the block lists of a model and where the gate sits, or why there is none",
    add_arguments,
    run,
)
