"""The HTML report: its parts, and the page in a real browser."""

from __future__ import annotations

import html.parser
import itertools
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stepfx
from stepfx.api import BranchStats
from stepfx.html_report.block_graph import block_graph
from stepfx.html_report.block_svg import block_svg, by_layers
from stepfx.html_report.elements import element, table
from stepfx.html_report.layers import layered
from stepfx.html_report.model_map import parts_of
from stepfx.html_report.run_plot import format_bytes, run_plot

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
VOID = {"meta", "br", "rect", "path", "line", "polygon"}


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    z, w = (torch.randn(*s, generator=generator) for s in ((2, 6, 4), (2, 16)))
    return z, torch.full((2,), 9.0), w


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> tuple[stepfx.Report, Path]:
    """The report of a tiny FLUX that ran with computed and reused steps."""
    import diffusers

    from stepfx.testing import fill_gates

    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()
    model.requires_grad_(False)
    fill_gates(model)
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    given = {
        "hidden_states": randn(1, 16, 4),
        "encoder_hidden_states": randn(1, 6, 32),
        "pooled_projections": randn(1, 32),
        "img_ids": randn(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }
    torch._dynamo.reset()
    backend = stepfx.Backend(inner="eager", threshold=0.65, max_continuous_cached_steps=2)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for t in range(900, 100, -100):
            compiled(**given, timestep=torch.tensor([t / 1000]))
    torch._dynamo.reset()
    report = stepfx.explain(model, **given, timestep=torch.tensor([0.5]))
    return report, report.to_html(tmp_path_factory.mktemp("html") / "deep" / "report.html")


class Balance(html.parser.HTMLParser):
    """Fails on a tag that is closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen[tag] += 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_and_alone(flux: tuple[stepfx.Report, Path]) -> None:
    text = flux[1].read_text()
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert not {"script", "link", "img", "iframe"} & set(parser.seen)
    assert parser.seen["svg"] >= 3  # two blocks and a run
    outside = re.findall(r"(?:https?:)?//[\w.]+", text)
    assert set(outside) <= {"http://www.w3.org"}  # the name of SVG
    assert "url(" not in text
    assert "@import" not in text


def test_the_page_says_what_the_report_says(flux: tuple[stepfx.Report, Path]) -> None:
    report, path = flux
    text = path.read_text()
    assert report.gate is not None
    assert "blocks 1 to 6 of 7 are skipped" in text
    assert text.count('class="chip skipped" title="block') == 6
    assert text.count('class="chip always" title="block') == 1
    assert "1: (h, e) -&gt; (e, h)" in text
    (run,) = report.runs[0].branches.values()
    assert 0 < run.reused < len(run.schedule) - 1
    assert text.count('class="reused" title="step') == run.reused
    assert text.count('class="computed" title="step') == run.computed
    for name in ("outline_blocks", "step_cache"):
        assert f"<code>{name}</code> <span class=added>" in text


def test_to_dict_is_plain(flux: tuple[stepfx.Report, Path]) -> None:
    found = json.loads(json.dumps(flux[0].to_dict()))
    assert found["results"] == []
    assert found["model"] == "FluxTransformer2DModel"
    (branch,) = found["runs"][0]["branches"].values()
    assert set(branch["schedule"]) == {"0", "1"}


def test_a_model_without_a_gate(hand_made: Any, tmp_path: Path) -> None:
    report = stepfx.explain(hand_made(2), *inputs())
    text = report.to_html(tmp_path / "report.html").read_text()
    assert "no gate: the main stack has 2 blocks; a gate needs at least 3" in text
    assert "<h2>Left alone</h2>" in text
    assert 'class="chip ungated" title="block 0 of 2' in text


def test_a_model_in_several_graphs(hand_made: Any, tmp_path: Path) -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = hand_made(4)

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            args = (args[0] * 2, *args[1:])
            torch._dynamo.graph_break()
            return self.inner(*args)

    report = stepfx.explain(Broken(), *inputs())
    text = report.to_html(tmp_path / "report.html").read_text()
    assert report.graphs == 2
    assert "Graph 1" in text
    assert "graph break" in text


def test_the_dump_holds_a_page(hand_made: Any, tmp_path: Path) -> None:
    torch._dynamo.reset()
    backend = stepfx.Backend(inner="eager", dump=tmp_path)
    with torch.no_grad():
        torch.compile(hand_made(4), backend=backend)(*inputs())
    assert "the outer graph" in (tmp_path / "graph_0" / "report.html").read_text()
    assert "gate: blocks 1 to 3 of 4" in (tmp_path / "graph_0" / "report.txt").read_text()


def test_parts_cover_every_operation(flux: tuple[stepfx.Report, Path]) -> None:
    result = flux[0].results[0]
    assert not isinstance(result, str)
    analysis = result.notes["analysis"]
    parts = parts_of(analysis, [result.notes["gate"]])
    chips = [chip for part in parts for chip in part.chips]
    between = sum(int(p.title.split(", ")[1].split()[0]) for p in parts if not p.chips)
    assert between + sum(chip.nodes for chip in chips) == len(analysis.program)
    assert [chip.state for chip in chips] == ["always", *["skipped"] * 6]


def test_a_block_as_a_graph(flux: tuple[stepfx.Report, Path]) -> None:
    result = flux[0].results[0]
    assert not isinstance(result, str)
    graph = block_graph(result.notes["analysis"].lists[0], ["h", "e"])
    kinds = Counter(kind for _, kind in graph.nodes(data="kind"))
    assert kinds["attention"] == 1
    # FLUX's double block: modulation, q, k, v, out and MLP of both streams.
    assert kinds["product"] == 2 * (1 + 3 + 1 + 2)
    assert nx.is_directed_acyclic_graph(graph)
    entering = {d["label"] for _, d in graph.nodes(data=True) if d["kind"] == "input"}
    leaving = {d["label"] for _, d in graph.nodes(data=True) if d["kind"] == "output"}
    assert {"h", "e"} <= entering
    assert leaving == {"h", "e"}


def test_graphviz_is_not_needed(
    flux: tuple[stepfx.Report, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = flux[0].results[0]
    assert not isinstance(result, str)
    graph = block_graph(result.notes["analysis"].lists[0], ["h", "e"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    drawn = block_svg(graph)
    assert drawn == by_layers(graph)
    assert drawn.count("<rect") == len(graph)


EDGES = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(EDGES)
def test_layout_is_clean(edges: list[tuple[int, int]]) -> None:
    graph = nx.DiGraph([(min(e), max(e)) for e in edges if e[0] != e[1]])
    widths = {node: 20.0 + 10 * (node % 5) for node in graph}
    layout = layered(graph, widths, 30, (10, 20))
    for a, b in graph.edges:
        assert layout.centres[a][1] < layout.centres[b][1]
        heights = [y for _, y in layout.routes[a, b]]
        assert heights == sorted(heights)
    for a, b in itertools.combinations(graph, 2):
        (x0, y0), (x1, y1) = layout.centres[a], layout.centres[b]
        if y0 == y1:
            assert abs(x0 - x1) >= (widths[a] + widths[b]) / 2 - 1e-6
    for node, (x, y) in layout.centres.items():
        assert widths[node] / 2 - 1e-6 <= x <= layout.width - widths[node] / 2 + 1e-6
        assert 0 <= y <= layout.height


def test_a_run_with_gaps_in_its_scores() -> None:
    run = BranchStats("1101", (None, 0.5, float("nan"), 0.25), 3, 1, 2048, (0, 0, 4, 0))
    drawn = run_plot("request <1>", run)
    assert "request &lt;1&gt;" in drawn
    assert "3 of 4 steps computed, 1 reused · 2.0 KiB kept" in drawn
    assert 'd="M1.5 0.0000M3.5 0.5000"' in drawn
    unscored = BranchStats("1", (None,), 1, 0, 0, (0,))
    assert "no score was measured" in run_plot("x", unscored)
    assert format_bytes(5 * 2**30) == "5.0 GiB"


def test_everything_is_escaped() -> None:
    assert element("p", title='a"b<c') == '<p title="a&quot;b&lt;c"></p>'
    assert "<th>a&lt;b</th>" in table(["a<b"], [])


WRAPPER = """<iframe src="{name}" style="width:{width}px;height:800px;border:0"></iframe>
<script>
window.onload = () => {{
  const page = document.querySelector("iframe").contentDocument;
  const dark = getComputedStyle(page.body).backgroundColor;
  document.title = [page.documentElement.scrollWidth, page.title, dark].join("|");
}};
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(
    flux: tuple[stepfx.Report, Path], tmp_path: Path, width: int, scheme: str
) -> None:
    dom = browse(tmp_path, lambda p: shutil.copy(flux[1], p), width, scheme)
    found = re.search(r"<title>(\d+)\|(.*?)\|rgb\((\d+)", dom)
    assert found is not None
    assert int(found[1]) <= width  # nothing makes the page scroll sideways
    assert found[2] == "stepfx: FluxTransformer2DModel"
    assert (int(found[3]) < 128) == (scheme == "dark")


def browse(folder: Path, write: Callable[[Path], Any], width: int, scheme: str) -> str:
    """Return the document that shows the page in a frame of `width` pixels."""
    write(folder / "report.html")
    (folder / "frame.html").write_text(WRAPPER.format(name="report.html", width=width))
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            f"--user-data-dir={folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
            "--virtual-time-budget=5000",
            "--dump-dom",
            str(folder / "frame.html"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
