"""Dumps: what is written, where a planted bug shows, PyTorch's own channels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

import stepfx
from stepfx.passes.canonicalize import Canonicalize
from stepfx.pipeline import default_pipeline
from stepfx.printer import input_name


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    z, w = (torch.randn(*s, generator=generator) for s in ((2, 6, 4), (2, 16)))
    return z, torch.full((2,), 9.0), w


@torch.no_grad()
def run(model: torch.nn.Module, **options: Any) -> torch.Tensor:
    torch._dynamo.reset()
    return torch.compile(model, backend=stepfx.Backend(inner="eager", **options))(*inputs())


def test_files(hand_made: Any, tmp_path: Path) -> None:
    run(hand_made(4), dump=tmp_path)
    folder = tmp_path / "graph_0"
    assert {path.name for path in folder.iterdir()} >= {
        "00_dynamo.txt",
        "02_outline_blocks.txt",
        "02_outline_blocks.diff",
        "03_step_cache.txt",
        "03_step_cache.diff",
        "outer.txt",
        "summary.txt",
        "summary.json",
    }
    assert not (folder / "01_canonicalize.txt").exists()  # it changed nothing
    dynamo = (folder / "00_dynamo.txt").read_text()
    assert "%0: f32[2] = input" in dynamo
    assert "# stuff.k0.m.weight, conftest.py:" in dynamo
    assert "call list_0_block" in (folder / "outer.txt").read_text()
    run(hand_made(5), dump=tmp_path)
    assert (tmp_path / "graph_1").is_dir()


def test_summary(hand_made: Any, tmp_path: Path) -> None:
    run(hand_made(4), dump=tmp_path)
    summary = (tmp_path / "graph_0" / "summary.txt").read_text()
    assert "list_0_block +4" in summary
    records = json.loads((tmp_path / "graph_0" / "summary.json").read_text())
    assert [r["name"] for r in records] == ["canonicalize", "outline_blocks", "step_cache"]
    assert records[1]["rewrites"] == 6
    # Four blocks became one: of two linears a block those of three blocks are gone.
    assert records[1]["operations"]["linear"] == -9
    with pytest.warns(stepfx.StepfxWarning):
        run(hand_made(2), dump=tmp_path)
    summary = (tmp_path / "graph_1" / "summary.txt").read_text()
    assert "missed: the main stack has 2 blocks" in summary


def test_a_graph_on_which_no_pass_runs(hand_made: Any, tmp_path: Path) -> None:
    run(hand_made(4), dump=tmp_path, cache=None)
    folder = tmp_path / "graph_0"
    assert (folder / "00_dynamo.txt").exists()
    assert (folder / "summary.txt").read_text() == "left alone: option 'cache' is None\n"


def test_stop_after_runs_what_the_passes_left(hand_made: Any, tmp_path: Path) -> None:
    model = hand_made(4)
    expected = model(*inputs())
    for name, row in (("canonicalize", 0), ("outline_blocks", 2)):
        with pytest.warns(stepfx.StepfxWarning, match="left out by option"):
            found = run(model, stop_after=name, dump=tmp_path / name)
        assert torch.equal(found, expected)
        files = sorted(p.name for p in (tmp_path / name / "graph_0").glob("*_*.txt"))
        assert [int(file[:2]) for file in files] == sorted({0, row})


def test_stop_after_and_disable_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STEPFX_STOP_AFTER", "outline_blocks")
    assert stepfx.Config.build().stop_after == "outline_blocks"
    monkeypatch.setenv("STEPFX_DISABLE", "canonicalize, step_cache")
    assert stepfx.Config.build().disable == ("canonicalize", "step_cache")


@pytest.mark.parametrize("option", ["disable", "stop_after"])
def test_an_unknown_pass(option: str) -> None:
    config = stepfx.Config.build(**{option: "outline"})
    with pytest.raises(
        stepfx.ConfigError, match=rf"'{option}' names no pass: 'outline' .*outline_blocks"
    ):
        default_pipeline(config)


@dataclass(frozen=True)
class SwapsOperands(Canonicalize):
    """A pass with a bug: it loses the bias of one linear in a block."""

    name: ClassVar[str] = "canonicalize"

    def __call__(self, gm: fx.GraphModule, ctx: Any) -> int:
        node = [n for n in gm.graph.nodes if n.target is torch.nn.functional.linear][3]
        node.args = (node.args[0], node.args[1], None)
        return 1


def test_a_planted_bug_is_seen_in_the_diff(
    hand_made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hand_made(4)
    monkeypatch.setattr("stepfx.pipeline.Canonicalize", SwapsOperands)
    with pytest.warns(stepfx.StepfxWarning):
        found = run(model, stop_after="canonicalize", dump=tmp_path)
    assert not torch.equal(found, model(*inputs()))
    diff = (tmp_path / "graph_0" / "01_canonicalize.diff").read_text().splitlines()
    removed = [line for line in diff if line.startswith("-  ")]
    added = [line for line in diff if line.startswith("+  ")]
    assert len(removed) == len(added) == 1
    assert "= linear(" in removed[0]
    assert ", None)" in added[0]


@dataclass(frozen=True)
class Breaks(Canonicalize):
    name: ClassVar[str] = "canonicalize"

    def __call__(self, gm: fx.GraphModule, ctx: Any) -> int:
        raise ZeroDivisionError("broken on purpose")


def test_a_failing_pass_is_named(
    hand_made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepfx.pipeline.Canonicalize", Breaks)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        run(hand_made(4), dump=tmp_path)
    notes = "\n".join(caught.value.inner_exception.__notes__)
    assert "in stepfx pass 'canonicalize'; passes done before it: none" in notes
    assert str(tmp_path / "graph_0") in notes
    assert (tmp_path / "graph_0" / "failed_canonicalize.txt").exists()


SCRIPT = """
import {first}, {second}
import torch
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    def forward(self, x):
        return x + self.b(torch.nn.functional.gelu(self.a(x)))
model = torch.nn.Sequential(*[Block() for _ in range(4)])
with torch.no_grad():
    torch.compile(model, backend=stepfx.Backend(inner="eager"))(torch.randn(1, 4, 8))
"""


@pytest.mark.parametrize("order", [("torch", "stepfx"), ("stepfx", "torch")])
def test_log_and_structured_trace(order: tuple[str, str], tmp_path: Path) -> None:
    script = SCRIPT.format(first=order[0], second=order[1])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "TORCH_LOGS": "+stepfx", "TORCH_TRACE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "outline_blocks" in done.stderr
    assert "compiling list_0_block with eager" in done.stderr
    (log,) = tmp_path.glob("*.log")
    names = []
    for line in log.read_text().splitlines():
        start = line.find('{"artifact"')
        if start >= 0:
            names.append(json.loads(line[start:])["artifact"]["name"])
    wanted = ["00_dynamo", "02_outline_blocks", "03_step_cache.diff", "outer", "summary"]
    assert {f"stepfx_{name}" for name in wanted} <= set(names)


def test_set_logs_knows_the_name() -> None:
    import torch._logging._internal as internal

    assert internal.log_registry.is_log("stepfx")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("L_self_modules_proj_out_parameters_weight_", "proj_out.weight"),
        (
            "L_self_dict_modules_norm_out_modules_linear_parameters_bias_",
            "norm_out.linear.bias",
        ),
        ("L_kwargs_hidden_states_", "hidden_states"),
        ("l_self_modules_a_buffers_table_", "a.table"),
        ("getitem_2", "getitem_2"),
    ],
)
def test_names_of_inputs(target: str, name: str) -> None:
    node = fx.Graph().create_node("placeholder", target)
    assert input_name(node) == name
