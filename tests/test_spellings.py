"""Configurations as users of other projects hold them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import stepfx
from stepfx.config import Config, ConfigError
from stepfx.config_objects import OTHER_METHODS
from stepfx.spellings import ALIASES, ONE_VALUE


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("important_condition_threshold", 0.5),
        ("cfg_diff_compute_separate", False),
        ("taylorseer_cache_type", "hidden_states"),
        ("calibrator_kwargs", {"n": 1}),
        ("enable_foca", True),
        ("slg_layers", [3]),
    ],
)
def test_fields_that_stepfx_has_one_value_of(name: str, value: Any) -> None:
    neutral, why = ONE_VALUE[name]
    assert options({name: neutral}) == options({name: None}) == {}
    with pytest.raises(ConfigError) as caught:
        Config.build(**{name: value})
    for text in (name, repr(value), repr(neutral), why):
        assert text in str(caught.value)


def test_every_field_of_paraattention() -> None:
    """The defaults of its options change nothing; `taylorseer_kwargs` give the order."""
    defaults = {
        "downsample_factor": 1,
        "enable_alter_cache": False,
        "num_inference_steps": -1,
        "warmup_steps": 0,
        "slg_layers": None,
        "slg_start": 0.0,
        "slg_end": 0.1,
    }
    assert options(defaults) == {"max_warmup_steps": 0}
    kwargs = {"enable_taylorseer": True, "taylorseer_kwargs": {"n_derivatives": 2}}
    assert options(kwargs) == options(enable_taylorseer=True, taylorseer_kwargs={})
    assert options(kwargs) == {"taylor_order": 2}
    with pytest.raises(ConfigError, match="'taylorseer_kwargs' has 'skip_interval_steps' as 3"):
        Config.build(taylorseer_kwargs={"skip_interval_steps": 3})


VLLM_OMNI = {
    "rel_l1_thresh": 0.3,
    "coefficients": [0, 0, 0, 1, 0],
    "Fn_compute_blocks": 2,
    "Bn_compute_blocks": 1,
    "max_warmup_steps": 5,
    "max_cached_steps": -1,
    "residual_diff_threshold": 0.2,
    "max_continuous_cached_steps": 2,
    "enable_taylorseer": False,
    "taylorseer_order": 1,
    "scm_steps_mask_policy": None,
    "scm_steps_policy": "dynamic",
    "num_inference_steps": None,
}


def test_every_field_of_vllm_omni() -> None:
    """Its configuration holds the fields of all methods; each method reads its own."""
    text = json.dumps(VLLM_OMNI)
    assert options(cache_backend="tea_cache", cache_config=text) == {
        "cache": "teacache",
        "threshold": 0.3,
        "coefficients": (0, 0, 0, 1, 0),
        "coefficients_sign": "abs",
    }
    assert options(cache_backend="cache_dit", cache_config=text) == {
        "cache": "dbcache",
        "threshold": 0.2,
        "fn_compute_blocks": 2,
        "bn_compute_blocks": 1,
        "max_warmup_steps": 5,
        "max_continuous_cached_steps": 2,
        "taylor_order": 0,
    }
    assert options(cache_backend="none", cache_config=text) == {"cache": None}
    with pytest.raises(ConfigError, match="'cache' must be one of"):
        Config.build(cache_backend="sea_cache")


def test_every_field_of_cache_dit() -> None:
    """No field of its configurations is unknown, and their defaults are taken as they are."""
    cache_dit = pytest.importorskip("cache_dit")
    for kind in (cache_dit.DBCacheConfig, cache_dit.DBPruneConfig):
        assert options(dataclasses.asdict(kind())) == options(kind())
    found = options(
        cache_dit.DBPruneConfig(
            enable_dynamic_prune_threshold=True,
            max_dynamic_prune_threshold=0.3,
            dynamic_prune_threshold_relax_ratio=1.5,
            non_prune_block_ids=[5, 2],
            force_reduce_calibrator_vram=True,
            residual_diff_threshold=torch.tensor(0.25),
            force_refresh_step_hint=10,
            enable_separate_cfg=True,
        )
    )
    assert found["cache"] == "dbprune"
    assert found["enable_dynamic_prune_threshold"] is True
    assert found["max_dynamic_prune_threshold"] == 0.3
    assert found["dynamic_prune_threshold_relax_ratio"] == 1.5
    assert found["non_prune_block_ids"] == (2, 5)
    assert found["downsample_factor"] == 4
    assert found["threshold"] == 0.25
    assert found["force_refresh_step"] == 5, "calls of two branches are half as many steps"
    odd = cache_dit.DBCacheConfig(force_refresh_step_hint=5, enable_separate_cfg=True)
    with pytest.raises(ConfigError, match="'force_refresh_step_hint' is 5 calls"):
        Config.build(None, odd)


def test_modifiers_of_cache_dit_are_options_of_lists() -> None:
    cache_dit = pytest.importorskip("cache_dit")
    first = cache_dit.ParamsModifier(
        cache_config=cache_dit.DBCacheConfig().reset(residual_diff_threshold=0.2)
    )
    second = cache_dit.ParamsModifier(
        cache_config=cache_dit.DBCacheConfig().reset(Fn_compute_blocks=2),
        calibrator_config=cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=2),
    )
    config = Config.build(cache="dbcache", params_modifiers=[first, second])
    assert config.for_list(0).threshold == 0.2
    assert config.for_list(1).fn_compute_blocks == 2
    assert config.for_list(1).taylor_order == 2
    assert config.for_list(1).threshold is None
    with pytest.raises(ConfigError, match="several transformers"):
        Config.build(params_modifiers=[[first], [second]])


def test_hidden_states_of_cache_dit_are_the_signal_input() -> None:
    found = options({"l1_hidden_states_diff_threshold": 0.1, "residual_diff_threshold": 0.2})
    assert found == {"signal": "input", "threshold": 0.1}


@pytest.mark.parametrize("name", sorted(OTHER_METHODS))
def test_other_methods_of_diffusers_are_refused(name: str) -> None:
    given = type(name, (), {})()
    with pytest.raises(ConfigError, match=f"{name} cannot be used: {OTHER_METHODS[name]}"):
        Config.build(None, given)


def test_every_field_of_diffusers() -> None:
    plain = diffusers.TaylorSeerCacheConfig()
    assert options(plain) == options(diffusers.TaylorSeerCacheConfig(use_lite_mode=True))
    with pytest.raises(ConfigError, match=r"'cache_identifiers'.*blocks are cached"):
        Config.build(None, diffusers.TaylorSeerCacheConfig(cache_identifiers=["attn"]))
    with pytest.raises(ConfigError, match="'taylor_order' must be 0, 1 or 2, not 3"):
        Config.build(None, diffusers.TaylorSeerCacheConfig(max_order=3))
    with pytest.raises(ConfigError, match="MagCacheConfig has none, it asks to record"):
        Config.build(None, diffusers.MagCacheConfig(calibrate=True))
