"""The demo: its model is really trained, its command writes what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import stepfx
from stepfx.cli.main import main
from stepfx.demo.digits import (
    WEIGHTS,
    accuracy,
    initial_noise,
    load_digits_model,
    load_judge,
    sample,
)


def test_weights_fit_in_the_package() -> None:
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) <= 12 * 2**20


def test_the_model_is_trained_and_its_blocks_do_something() -> None:
    model, (judge, held_out) = load_digits_model(), load_judge()
    assert held_out > 0.98
    assert len(model.transformer_blocks) >= 8
    noise, labels = initial_noise(100, seed=5)
    images = sample(model, noise, labels, steps=12)
    assert accuracy(judge, images, labels) >= 0.95
    for block in model.transformer_blocks:
        assert block.norm1.linear.weight.abs().max() > 0.01


def test_caching_on_the_trained_model() -> None:
    model = load_digits_model()
    noise, labels = initial_noise(20, seed=6)
    expected = sample(model, noise, labels, steps=25)
    errors = {}
    for order in (0, 1):
        torch._dynamo.reset()
        stepfx.reset(model)
        compiled = stepfx.compile(
            model, inner="eager", threshold=0.15, max_warmup_steps=3, taylor_order=order
        )
        found = sample(compiled, noise, labels, steps=25)
        (branch,) = stepfx.stats(model)[-1].branches.values()
        assert 5 < branch.computed < 15
        errors[order] = float((found - expected).square().mean())
    assert errors[1] < errors[0]  # a forecast beats plain reuse
    assert 10 * torch.log10(torch.tensor(4 / errors[1])) > 34


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "picture.png"
    options = ["--steps", "8", "--samples", "10", "--runs", "1", "--threshold", "0.4"]
    code = main(["demo", *options, "--report", str(report), "--picture", str(picture)])
    assert code == 0
    record = json.loads(report.read_text())
    assert {
        "steps",
        "computed_steps",
        "inductor_s",
        "stepfx_s",
        "speedup",
        "psnr_db",
        "accuracy_uncached",
        "accuracy_cached",
    } <= set(record)
    assert record["steps"] == 8
    assert record["computed_steps"] == record["schedule"].count("1") < 8
    assert picture.stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert "PSNR against uncached" in shown
    assert record["schedule"] in shown


def test_weights_that_cannot_be_had(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["demo", "--model", str(tmp_path / "nothing")]) == 1
    assert "cannot be loaded" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--steps", "--samples", "--runs"])
def test_bad_numbers(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", option, "0"]) == 2
    assert f"{option} must be at least 1" in capsys.readouterr().err


def test_a_bad_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--threshold", "-1"]) == 2
    assert "option 'threshold'" in capsys.readouterr().err
