"""Configurations as users of other projects hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest

import stepfx
from stepfx.config import Config, ConfigError
from stepfx.spellings import ALIASES


def options(*given: Any, **named: Any) -> dict[str, Any]:
    """Return what differs from the defaults."""
    config, default = Config.build(None, *given, **named), Config()
    return {
        name: getattr(config, name)
        for name in Config.__dataclass_fields__
        if getattr(config, name) != getattr(default, name)
    }


def test_paraattention() -> None:
    found = options(
        residual_diff_threshold=0.06,
        alter_residual_diff_threshold=0.1,
        downsample_factor=2,
        warmup_steps=4,
        enable_alter_cache=True,
        enable_taylorseer=True,
    )
    assert found == {
        "threshold": 0.06,
        "alternate_threshold": 0.1,
        "downsample_factor": 2,
        "max_warmup_steps": 4,
    }


def test_vllm_omni_tea_cache() -> None:
    found = options(cache_backend="tea_cache", cache_config='{"rel_l1_thresh": 0.3}')
    assert found == {"cache": "teacache", "threshold": 0.3, "coefficients_sign": "abs"}
    assert options(cache_backend="tea_cache")["threshold"] == 0.2


def test_vllm_omni_cache_dit() -> None:
    text = json.dumps(
        {
            "Fn_compute_blocks": 2,
            "Bn_compute_blocks": 1,
            "max_warmup_steps": 6,
            "residual_diff_threshold": 0.12,
            "max_continuous_cached_steps": 4,
            "enable_taylorseer": True,
            "taylorseer_order": 2,
            "scm_steps_mask_policy": "fast",
            "scm_steps_policy": "static",
        }
    )
    assert options(cache_backend="cache_dit", cache_config=text) == {
        "cache": "dbcache",
        "fn_compute_blocks": 2,
        "bn_compute_blocks": 1,
        "max_warmup_steps": 6,
        "threshold": 0.12,
        "max_continuous_cached_steps": 4,
        "taylor_order": 2,
        "steps_mask": "fast",
        "steps_mask_policy": "static",
    }
    left_open = options(cache_backend="cache_dit", cache_config="{}")
    assert left_open["threshold"] == 0.24
    assert left_open["max_continuous_cached_steps"] == 3
    assert options(cache_backend="none")["cache"] is None


def test_diffusers_objects() -> None:
    assert options(diffusers.FirstBlockCacheConfig(threshold=0.2)) == {"threshold": 0.2}
    found = options(
        diffusers.MagCacheConfig(
            threshold=0.12,
            max_skip_steps=5,
            retention_ratio=0.3,
            num_inference_steps=9,
            mag_ratios=[1.0] * 9,
        )
    )
    assert found["cache"] == "magcache"
    assert found["threshold"] == 0.12
    assert found["max_continuous_cached_steps"] == 5
    assert found["retention_ratio"] == 0.3
    assert found["num_inference_steps"] == len(found["magnitudes"].ratios) == 9
    backend = stepfx.Backend(diffusers.FirstBlockCacheConfig(threshold=0.2), inner="eager")
    assert backend.config.threshold == 0.2


def test_diffusers_taylor_seer_schedule() -> None:
    given = diffusers.TaylorSeerCacheConfig(max_order=2)
    config = Config.build(None, given)
    assert config.cache == "mask"
    assert config.taylor_order == 2
    mask = config.mask(28)
    assert mask is not None
    assert mask[:28] == "1110100001000010000100001000"
    given = diffusers.TaylorSeerCacheConfig(
        cache_interval=3, disable_cache_before_step=2, disable_cache_after_step=9
    )
    mask = Config.build(None, given).mask(12)
    assert mask is not None
    assert mask[:12] == "110100100111"


def test_cache_dit_objects() -> None:
    cache_dit = pytest.importorskip("cache_dit")
    found = options(
        cache_dit.DBCacheConfig(
            Fn_compute_blocks=4,
            max_warmup_steps=4,
            residual_diff_threshold=0.12,
            max_continuous_cached_steps=3,
            steps_computation_mask=[1, 1, 0, 1, 0],
            steps_computation_policy="static",
        ),
        cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=2),
    )
    assert found == {
        "cache": "dbcache",
        "fn_compute_blocks": 4,
        "bn_compute_blocks": 0,
        "max_warmup_steps": 4,
        "warmup_interval": 1,
        "threshold": 0.12,
        "max_continuous_cached_steps": 3,
        "steps_mask": "11010",
        "steps_mask_policy": "static",
        "taylor_order": 2,
    }
    assert options(cache_dit.DBPruneConfig())["cache"] == "dbprune"


@pytest.mark.parametrize("nested", [False, True])
def test_cache_dit_yaml(tmp_path: Path, nested: bool) -> None:
    pytest.importorskip("yaml")
    body = "cache_type: DBCache\nFn_compute_blocks: 2\nresidual_diff_threshold: 0.1\n"
    if nested:
        body = "cache_config:\n" + "".join(f"  {line}\n" for line in body.splitlines())
    path = tmp_path / "cache.yaml"
    path.write_text(body)
    assert options(path) == {"cache": "dbcache", "fn_compute_blocks": 2, "threshold": 0.1}


def test_options_win_over_objects() -> None:
    given = diffusers.FirstBlockCacheConfig(threshold=0.2)
    assert options(given, threshold=0.3) == {"threshold": 0.3}
    assert options(cache_config={"threshold": 0.2}, threshold=0.3) == {"threshold": 0.3}


def test_every_spelling_means_an_option() -> None:
    assert set(ALIASES.values()) <= set(Config.__dataclass_fields__)


@pytest.mark.parametrize(
    ("given", "named", "texts"),
    [
        ((object(),), {}, ["must be a dictionary", "FirstBlockCacheConfig"]),
        ((), {"cache_config": "{"}, ["'cache_config'", "neither JSON nor YAML"]),
        ((), {"cache_config": "nothing.yaml"}, ["'cache_config'", "'nothing.yaml'"]),
        ((), {"cache_config": '{"rel_l1_tresh": 1}'}, ["did you mean 'rel_l1_thresh'?"]),
        (({"enable_dmd": True},), {}, ["'enable_dmd'", "taylor_order"]),
    ],
)
def test_bad_configurations(
    given: tuple[Any, ...], named: dict[str, Any], texts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.build(None, *given, **named)
    for text in texts:
        assert text in str(caught.value)


def test_what_has_no_counterpart_is_said() -> None:
    with pytest.warns(stepfx.StepfxWarning, match="'important_condition_threshold' is 0.5"):
        Config.build(important_condition_threshold=0.5)
