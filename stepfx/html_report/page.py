"""The page: what was found, what was changed, what was left alone and why, what ran."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

import torch

from stepfx.html_report.block_graph import block_graph
from stepfx.html_report.block_svg import block_svg
from stepfx.html_report.elements import details, element, section, table, text
from stepfx.html_report.model_map import model_map, parts_of
from stepfx.html_report.pass_list import graph_listing, pass_diffs, pass_table
from stepfx.html_report.run_plot import run_plot
from stepfx.passes.step_cache import GateSite
from stepfx.patterns.analysis import Analysis
from stepfx.pipeline import PipelineResult
from stepfx.printer import format_graph
from stepfx.report import PATTERN_TEXT, Report, gate_text, stream_labels


def page(report: Report) -> str:
    """Return the report as one HTML document."""
    style = resources.files("stepfx.html_report").joinpath("style.css").read_text("utf-8")
    head = element(
        "head",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        element("title", f"stepfx: {text(report.model)}"),
        element("style", style),
    )
    body = element("body", element("main", _header(report), *_sections(report)))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _header(report: Report) -> str:
    blocks = sum(blocks.length for blocks in report.block_lists)
    counts = (
        f"{report.graphs} graph{'s' if report.graphs != 1 else ''}, "
        f"{blocks} blocks in {len(report.block_lists)} "
        f"list{'s' if len(report.block_lists) != 1 else ''} · torch {torch.__version__}"
    )
    verdict = gate_text(report.gate) if report.gate else f"no gate: {report.reason}"
    kind = "good" if report.gate else "miss"
    return element(
        "header",
        element("p", "stepfx report", class_="kicker"),
        element("h1", text(report.model)),
        element("p", text(counts), class_="note"),
        element("p", text(verdict), class_=f"verdict {kind}"),
    )


def _sections(report: Report) -> Iterator[str]:
    analysed = [
        (number, result, result.notes["analysis"])
        for number, result in enumerate(report.results)
        if isinstance(result, PipelineResult) and "analysis" in result.notes
    ]
    yield section("The model", *(_map(report, n, r, a) for n, r, a in analysed))
    if report.block_lists:
        yield section("Block lists", _list_table(report), _inputs(report))
    left = list(_left_alone(report))
    if left:
        yield section("Left alone", element("ul", *(element("li", item) for item in left)))
    if report.runs:
        yield section(
            "Runs",
            *(
                run_plot(f"{request.name}, {name}", branch)
                for request in report.runs
                for name, branch in request.branches.items()
            ),
            note="Each column is a denoising step; the line is the score that the gate "
            "compares with the threshold, on a scale from 0 to the largest.",
        )
    graphs = [drawn for _, _, a in analysed for drawn in _block_graphs(a)]
    if graphs:
        yield section(
            "One block of each list",
            *graphs,
            note="Point at an operation for its line in the model and its weights.",
        )
    yield section("Passes", *(_passes(report, n, r) for n, r in _results(report)))


def _results(report: Report) -> list[tuple[int, PipelineResult]]:
    found = enumerate(report.results)
    return [(n, result) for n, result in found if isinstance(result, PipelineResult)]


def _map(report: Report, number: int, result: PipelineResult, analysis: Analysis) -> str:
    site: GateSite | None = result.notes.get("gate")
    sites = result.notes.get("gates", [site]) if site else []
    patterns = [PATTERN_TEXT[pattern] for pattern in analysis.patterns]
    drawn = model_map(parts_of(analysis, sites), patterns)
    title = element("h3", f"Graph {number}") if report.graphs > 1 else ""
    return title + drawn


def _list_table(report: Report) -> str:
    rows = [
        (
            str(number),
            str(blocks.length),
            text(PATTERN_TEXT[blocks.pattern]),
            "<br>".join(element("code", text(stream)) for stream in blocks.streams),
            str(blocks.nodes),
            str(blocks.kinds),
            str(blocks.invariants),
            str(blocks.inputs),
            "yes" if blocks.gated else "no",
        )
        for number, blocks in enumerate(report.block_lists)
    ]
    columns = (
        "list",
        "blocks",
        "pattern",
        "streams",
        "operations a block",
        "kinds",
        "shared inputs",
        "inputs of its own",
        "gated",
    )
    return table(columns, rows, (0, 1, 4, 5, 6, 7))


def _inputs(report: Report) -> str:
    lines = (
        ("timestep", (report.timestep,) if report.timestep else ()),
        ("latent", report.latents),
        ("conditioning", report.conditioning),
    )
    rows = [
        (
            meaning,
            ", ".join(element("code", text(name)) for name in names) or "none found",
        )
        for meaning, names in lines
    ]
    return table(("the caller's input", "name and type"), rows) if report.gate else ""


def _left_alone(report: Report) -> Iterator[str]:
    for number, result in enumerate(report.results):
        where = f"graph {number}: " if report.graphs > 1 else ""
        if isinstance(result, str):
            yield text(where + result)
            continue
        for record in result.records:
            for miss in record.misses:
                yield text(where) + element("code", text(record.name)) + text(f": {miss}")
    if report.gate:
        for number, blocks in enumerate(report.block_lists):
            if not blocks.gated:
                yield text(
                    f"list {number}, {blocks.length} blocks: not a part of the main stack"
                )


def _block_graphs(analysis: Analysis) -> Iterator[str]:
    for number, blocks in enumerate(analysis.lists):
        drawn = block_svg(block_graph(blocks, stream_labels(analysis, blocks)))
        summary = f"list {number}: {blocks.period} operations, {len(blocks)} blocks"
        yield details(text(summary), element("div", drawn, class_="graph"), is_open=number == 0)


def _passes(report: Report, number: int, result: PipelineResult) -> str:
    title = element("h3", f"Graph {number}") if report.graphs > 1 else ""
    has_stages = any(node.op == "call_module" for node in result.module.graph.nodes)
    outer = (
        details("the outer graph", graph_listing(format_graph(result.module.graph)))
        if has_stages
        else ""
    )
    return title + pass_table(result.records) + pass_diffs(result.dump.texts) + outer
