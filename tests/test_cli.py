"""The command line: results, JSON, errors that say what to do, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import stepfx
from stepfx import backend, doctor, progress
from stepfx.cli.command import CommandError, options_of
from stepfx.cli.factory import load
from stepfx.cli.main import COMMANDS, main

SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
    def forward(self, x):
        y = self.norm(x)
        y = nn.functional.scaled_dot_product_attention(y, y, y)
        return x + self.down(nn.functional.gelu(self.up(y)))

class Model(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def build():
    return Model(4), (torch.randn(1, 4, 8),)

def build_with_names():
    return Model(4), {"x": torch.randn(1, 4, 8)}

def short():
    return Model(2), (torch.randn(1, 4, 8),)

def wrong_input():
    return Model(4), (torch.randn(1, 4, 9),)

def fails():
    return 1 / 0

def returns_a_number():
    return 3

a_number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "cli_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    torch._dynamo.reset()
    config = backend.default_backend().config
    yield
    backend.default_backend().config = config
    sys.modules.pop("cli_model", None)


@pytest.mark.parametrize("spec", ["cli_model:build", "cli_model.py:build_with_names"])
def test_explain(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", spec]) == 0
    assert "gate: blocks 1 to 3 of 4" in " ".join(capsys.readouterr().out.split())


def test_explain_as_json_and_html(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["explain", "cli_model:build", "--json", "--html", "r.html"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [b["length"] for b in record["block_lists"]] == [4]
    assert record["gate"]["first"] == 1
    assert record["html"] == "r.html"
    assert "<h1>Model</h1>" in (tmp_path / "r.html").read_text()


def test_no_gate_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "cli_model:short"]) == 3
    assert "no gate: the main stack has 2 blocks" in capsys.readouterr().out


def test_options_reach_the_passes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "cli_model:build", "--json", "-o", "fn_compute_blocks=2"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["gate"]["first"] == 2


def test_dump(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["dump", "cli_model:build", "--out", "d", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["folders"] == ["d/graph_0"]
    assert all((tmp_path / file).exists() for file in record["files"])
    names = {Path(file).name for file in record["files"]}
    assert {"00_dynamo.txt", "02_outline_blocks.diff", "report.html"} <= names
    assert main(["dump", "cli_model:build", "--out", "d"]) == 0
    assert "outline_blocks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "code", "words"),
    [
        ("cli_model", 2, "is not MODULE:FACTORY"),
        ("no_such_module:build", 2, "no module 'no_such_module' was found"),
        ("nowhere.py:build", 2, "there is no file nowhere.py"),
        ("cli_model:bild", 2, "cli_model has no .bild."),
        ("cli_model:a_number", 2, "is a int, not a function"),
        ("cli_model:returns_a_number", 2, "returned int"),
        ("cli_model:fails", 1, r"raised ZeroDivisionError.*\n.*return 1 / 0"),
        ("cli_model:wrong_input", 1, "Model cannot be traced"),
    ],
)
def test_errors(spec: str, code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", spec]) == code
    assert re.search(words, capsys.readouterr().err)
    assert main(["explain", spec, "--json"]) == code
    assert re.search(words, json.loads(capsys.readouterr().out)["error"])


def test_a_module_that_needs_another(tmp_path: Path) -> None:
    (tmp_path / "needs.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(CommandError, match="needs the module 'not_installed_anywhere'"):
        load("needs:build")


def test_a_bad_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "cli_model:build", "-o", "treshold=1"]) == 2
    assert "did you mean 'threshold'" in capsys.readouterr().err


def test_option_values() -> None:
    given = ["threshold=0.1", "cache=fbcache", "bn_compute_blocks=2", "mode=null", "cache=None"]
    assert options_of(given[:4]) == {
        "threshold": 0.1,
        "cache": "fbcache",
        "bn_compute_blocks": 2,
        "mode": None,
    }
    assert options_of(given[4:]) == {"cache": None}
    with pytest.raises(CommandError, match="is not NAME=VALUE"):
        options_of(["threshold"])


def test_every_command_has_help_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([command.name, "--help"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert "--json" in shown
        assert "exit codes" in shown


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepfx", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"stepfx {stepfx.__version__}"


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--quick", "--json"])
    record = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in record["checks"]}
    assert found["torch"]["found"] == torch.__version__
    assert found["stepfx"]["status"] == "ok"
    assert code == (0 if record["ok"] else 3)
    assert main(["doctor", "--quick"]) == code
    assert "torchao with torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.10.1", "problem"),
        ("2.11.0", "ok"),
        ("2.13.0+cpu", "ok"),
        ("2.14.0a0+git1", "warning"),
    ],
)
def test_doctor_knows_which_torch(version: str, status: str) -> None:
    assert doctor.check_torch(version).status == status


def test_doctor_reads_what_torchao_says() -> None:
    assert doctor.judge_torchao(0, "").status == "ok"
    said = "Failed to load a/_C.so: Could not load\nFailed to load b/_C.so: Could not load\n"
    check = doctor.judge_torchao(0, said)
    assert (check.status, check.found) == ("warning", "2 compiled parts not loaded")
    check = doctor.judge_torchao(1, "Traceback\nImportError: no such symbol\n")
    assert (check.status, check.found) == ("problem", "ImportError: no such symbol")


def test_doctor_finds_bad_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFX_OPTIONS", "[1")
    check = doctor.check_options()
    assert check.status == "problem"
    assert "not a JSON object" in check.hint


def test_doctor_multiplies_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "runs on" in doctor.check_fp8().found
    product = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: product(*a, **k) * 2)
    assert doctor.check_fp8().status == "problem"


def test_no_bar_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with progress.counting("compiling part", 2):
        progress.step("a")
        time.sleep(0.05)
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with (tmp_path / "tty").open("w") as file:
        console = Console(file=file, force_terminal=True, width=90)
        bar = progress.Bar("compiling part", 5, console)
        for name in ("prologue", "list_0_block", "epilogue"):
            bar.step(name)
        time.sleep(0.3)
        bar.close()
    assert "compiling part 3 of 5: epilogue" in (tmp_path / "tty").read_text()


def test_compilation_counts_its_parts(hand_made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, int | None]] = []
    monkeypatch.setattr(
        progress.Bar, "step", lambda self, what: steps.append((what, self._total))
    )
    for unit in ("block", "region"):
        torch._dynamo.reset()
        steps.clear()
        compiled = torch.compile(
            hand_made(4), backend=stepfx.Backend(inner="eager", compile_unit=unit)
        )
        with torch.no_grad():
            compiled(torch.randn(2, 6, 4), torch.full((2,), 9.0), torch.randn(2, 16))
        names = [name for name, _ in steps]
        assert {"prologue", "list_0_block", "epilogue"} <= set(names)
        assert {total for _, total in steps} == {len(names)}
