"""Options: names, values, aliases, contradictions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stepfx
from stepfx.config import Config, ConfigError


def test_defaults() -> None:
    config = Config.build()
    assert config.cache == "fbcache"
    assert config.preset().threshold == 0.08
    assert config.preset().fn_compute_blocks == 1
    assert config.taylor_order == 1
    assert config.batch == "worst"


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"treshold": 0.1}, ["unknown option 'treshold'", "did you mean 'threshold'?"]),
        ({"Fn_compute_block": 1}, ["did you mean 'Fn_compute_blocks'?"]),
        ({"threshold": -1}, ["'threshold'", "at least 0", "-1"]),
        ({"threshold": float("nan")}, ["'threshold'"]),
        ({"threshold": "0.1"}, ["'threshold'", "'0.1'"]),
        ({"threshold": True}, ["'threshold'"]),
        ({"cache": "fbcahe"}, ["'cache'", "'dbprune', None", "did you mean 'fbcache'?"]),
        ({"fn_compute_blocks": 0}, ["'fn_compute_blocks'", "at least 1"]),
        ({"bn_compute_blocks": -2}, ["'bn_compute_blocks'", "at least 0"]),
        ({"warmup_interval": 0}, ["'warmup_interval'", "at least 1"]),
        ({"max_cached_steps": -2}, ["'max_cached_steps'"]),
        ({"taylor_order": 3}, ["'taylor_order'", "0, 1 or 2"]),
        ({"batch": "best"}, ["'batch'", "'worst', 'mean'"]),
        ({"inner": "inducktor"}, ["'inner'", "did you mean 'inductor'?"]),
        ({"compile_unit": "model"}, ["'compile_unit'", "'block', 'region'"]),
        ({"mode": "max-autotune-no-cudagraph"}, ["'mode'", "max-autotune-no-cudagraphs"]),
        ({"gate_lists": 1}, ["'gate_lists'", "list of block list numbers", "not 1"]),
        ({"gate_lists": []}, ["'gate_lists'", "not []"]),
        ({"gate_lists": [0, -1]}, ["'gate_lists'", "[0, -1]"]),
        ({"inductor": [1]}, ["'inductor'", "dictionary"]),
        ({"dump": 3}, ["'dump'", "folder"]),
        ({"mode": "max-autotune", "inner": "eager"}, ["'mode'", "'inner' is 'eager'"]),
        (
            {"threshold": 0.1, "residual_diff_threshold": 0.2},
            ["'residual_diff_threshold' says again what 'threshold' said"],
        ),
    ],
)
def test_bad_options(options: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.build(**options)
    for text in texts:
        assert text in str(caught.value)


def test_spellings_of_other_projects() -> None:
    config = Config.build(
        residual_diff_threshold=0.12,
        Fn_compute_blocks=4,
        Bn_compute_blocks=2,
        max_warmup_steps=8,
        max_cached_steps=-1,
        max_continuous_cached_steps=3,
        taylorseer_order=2,
    )
    assert config.preset().threshold == 0.12
    assert config.preset().fn_compute_blocks == 4
    assert config.max_cached_steps is None
    assert config.max_continuous_cached_steps == 3
    assert config.taylor_order == 2


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPFX_OPTIONS", '{"threshold": 0.3, "taylor_order": 0}')
    assert Config.build().preset().threshold == 0.3
    assert Config.build(threshold=0.4).preset().threshold == 0.4
    monkeypatch.setenv("STEPFX_OPTIONS", "[1]")
    with pytest.raises(ConfigError, match="STEPFX_OPTIONS is not a JSON object"):
        Config.build()
    monkeypatch.setenv("STEPFX_OPTIONS", "{")
    with pytest.raises(ConfigError, match="STEPFX_OPTIONS is not a JSON object"):
        Config.build()


def test_errors_come_where_the_option_is_given(hand_made: Any) -> None:
    with pytest.raises(ConfigError, match="unknown option 'treshold'"):
        stepfx.Backend(treshold=0.1)
    with pytest.raises(ConfigError, match="unknown option 'treshold'"):
        stepfx.compile(hand_made(3), treshold=0.1)
    with pytest.raises(ConfigError, match="unknown option 'treshold'"):
        stepfx.configure(treshold=0.1)


def test_an_option_given_to_torch_compile_is_named(hand_made: Any) -> None:
    model = torch.compile(hand_made(3), backend="stepfx", options={"treshold": 0.1})
    with pytest.raises(Exception, match="unknown option 'treshold'"), torch.no_grad():
        model(torch.randn(2, 6, 4), torch.ones(2), torch.randn(2, 16))


def test_disabling_an_unknown_pass() -> None:
    from stepfx.pipeline import default_pipeline

    with pytest.raises(ConfigError, match="'disable' names no pass: 'outline'"):
        default_pipeline(Config.build(disable="outline"))
