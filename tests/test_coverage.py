"""The coverage check: on a model that is gated, one that is not, and one that is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stepfx.cli.main import main
from stepfx.coverage import check, markdown


def given() -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 6, 4), torch.full((2,), 9.0), torch.zeros(1)


def test_a_gated_model_passes(hand_made: Any) -> None:
    found = check(hand_made(6), given())
    assert found.passed
    assert found.schedule == "1010"
    assert [blocks.length for blocks in found.report.block_lists] == [6]
    assert "| HandMade | 1 | 6 | 3 | yes | yes | 1010 |" in markdown([found])


@pytest.mark.filterwarnings("ignore::stepfx.StepfxWarning")
def test_a_model_without_blocks_passes_without_a_gate() -> None:
    found = check(nn.Linear(4, 4).requires_grad_(False), (torch.randn(2, 4),))
    assert found.passed
    assert found.schedule == ""
    assert "no repeated blocks" in markdown([found])


class Counting(nn.Module):
    """Its output depends on how often it was called: no two calls agree."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


@pytest.mark.filterwarnings("ignore::stepfx.StepfxWarning")
def test_a_wrong_result_is_told() -> None:
    found = check(Counting(), (torch.zeros(3),))
    assert not found.is_equal
    assert not found.passed


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "covered.py").write_text(
        "import torch\n"
        "from tests.conftest import HandMade\n"
        "def build():\n"
        "    inputs = torch.randn(2, 6, 4), torch.full((2,), 9.0), torch.zeros(1)\n"
        "    return HandMade(6), inputs\n"
    )
    assert main(["coverage", f"{tmp_path / 'covered.py'}:build"]) == 0
    assert "1010" in capsys.readouterr().out
