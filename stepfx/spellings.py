"""Configuration as users of other projects write it, in stepfx's names.

    vllm-omni       cache_backend="tea_cache", cache_config='{"rel_l1_thresh": 0.2}'
    cache-dit       DBCacheConfig(...), TaylorSeerCalibratorConfig(...), a dictionary, YAML
    diffusers       FirstBlockCacheConfig(...), MagCacheConfig(...), TaylorSeerCacheConfig(...)
    ParaAttention   residual_diff_threshold=0.08, alter_residual_diff_threshold=...

Objects are known by the name of their class, so that no project needs to be installed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

from stepfx.errors import ConfigError, StepfxWarning

ALIASES = {
    # ParaAttention, cache-dit
    "residual_diff_threshold": "threshold",
    "alter_residual_diff_threshold": "alternate_threshold",
    "warmup_steps": "max_warmup_steps",
    "cache_type": "cache",
    "Fn_compute_blocks": "fn_compute_blocks",
    "Bn_compute_blocks": "bn_compute_blocks",
    "max_accumulated_residual_diff_threshold": "max_accumulated_threshold",
    "steps_computation_mask": "steps_mask",
    "steps_computation_policy": "steps_mask_policy",
    "force_refresh_step_hint": "force_refresh_step",
    "force_refresh_step_policy": "force_refresh_policy",
    "taylorseer_order": "taylor_order",
    # vllm-omni
    "cache_backend": "cache",
    "rel_l1_thresh": "threshold",
    "scm_steps_mask_policy": "steps_mask",
    "scm_steps_policy": "steps_mask_policy",
    # diffusers
    "mag_ratios": "magnitudes",
    "max_skip_steps": "max_continuous_cached_steps",
}

CACHE_ALIASES = {
    "none": None,
    "NONE": None,
    "first_block_cache": "fbcache",
    "fb_cache": "fbcache",
    "cache_dit": "dbcache",
    "DBCache": "dbcache",
    "DBPrune": "dbprune",
    "tea_cache": "teacache",
    "mag_cache": "magcache",
}

# What vllm-omni gives to options that its user leaves open.
VLLM_OMNI: dict[str | None, dict[str, Any]] = {
    "dbcache": {
        "threshold": 0.24,
        "fn_compute_blocks": 1,
        "max_warmup_steps": 4,
        "max_continuous_cached_steps": 3,
    },
    "teacache": {"threshold": 0.2, "coefficients_sign": "abs"},
}

# Fields without a counterpart: the value that asks for nothing, and why it is not needed.
WITHOUT_COUNTERPART: dict[str, tuple[Any, str]] = {
    "enable_separate_cfg": (None, "branches are told apart by their inputs"),
    "cfg_compute_first": (False, "branches are told apart by their inputs"),
    "cfg_diff_compute_separate": (True, "each branch has a score of its own"),
    "enable_alter_cache": (None, "branches are told apart by their inputs"),
    "important_condition_threshold": (0.0, "the score counts every token"),
    "l1_hidden_states_diff_threshold": (None, "the score is that of the residual"),
    "enable_dynamic_prune_threshold": (False, "the threshold is the same for every block"),
    "max_dynamic_prune_threshold": (None, "the threshold is the same for every block"),
    "dynamic_prune_threshold_relax_ratio": (1.25, "the threshold is the same for all"),
    "non_prune_block_ids": ([], "only the first and last blocks are exempt"),
    "force_reduce_calibrator_vram": (False, "residuals are kept whole"),
    "enable_encoder_calibrator": (None, "every stream is forecast"),
    "enable_encoder_taylorseer": (None, "every stream is forecast"),
    "taylorseer_cache_type": ("residual", "the residual is forecast"),
    "calibrator_cache_type": ("residual", "the residual is forecast"),
}
# Their other value says what stepfx does anyway.
_HARMLESS = {
    "enable_separate_cfg",
    "enable_alter_cache",
    "enable_encoder_calibrator",
    "enable_encoder_taylorseer",
}

Options = dict[str, Any]


def translate(given: tuple[Any, ...], options: Mapping[str, Any]) -> Options:
    """Return options in stepfx's names for `given` objects and `options` in any spelling.

    Args:
        given: configuration objects of other projects, dictionaries, YAML or JSON files.
        options: keyword options; they win over what the objects say.

    Raises:
        ConfigError: an object is not known, a file cannot be read, two names say one thing.
    """
    merged: Options = {}
    named = dict(options)
    for name in ("cache", "cache_config"):
        value = named.get(name)
        if value is not None and (name == "cache_config" or not isinstance(value, str)):
            merged.update(_plain(named.pop(name), name))
    for one in given:
        merged.update(_plain(one, "configuration"))
    own = _rename(named)
    if "cache_backend" in named:
        cache = CACHE_ALIASES.get(own["cache"], own["cache"])
        merged = {**VLLM_OMNI.get(cache, {}), **merged}
    return {**merged, **own}


def _plain(value: Any, name: str) -> Options:
    """Return the options that one configuration object, dictionary or file stands for."""
    kind = type(value).__name__
    if kind in _OBJECTS:
        return _OBJECTS[kind](value)
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if isinstance(value, str | os.PathLike):
        return _from_mapping(_read(os.fspath(value)))
    known = ", ".join(_OBJECTS)
    raise ConfigError(
        f"option {name!r} must be a dictionary, a JSON text, a YAML or JSON file, or one of "
        f"{known}, not {value!r}"
    )


def _from_mapping(value: Mapping[str, Any]) -> Options:
    sections = {"cache_config", "parallelism_config", "attention_backend", "quantize_config"}
    found = sections & set(value)
    if not found:
        return _rename(value)
    # cache-dit's files have sections; the others are not about caching.
    other = sorted(found - {"cache_config"})
    if other:
        warnings.warn(
            f"stepfx: of the configuration only 'cache_config' is used, not {other}",
            StepfxWarning,
            stacklevel=2,
        )
    # cache-dit takes a section without a type for DBCache.
    return {"cache": "dbcache", **_rename(value.get("cache_config") or {})}


def _read(text: str) -> Mapping[str, Any]:
    """Return the mapping in a JSON text or in a YAML or JSON file."""
    if not text.lstrip().startswith("{"):
        try:
            with open(text, encoding="utf-8") as file:
                content = file.read()
        except OSError as error:
            raise ConfigError(
                f"option 'cache_config' must be a JSON object or a file that can be read: "
                f"{text!r}: {error.strerror}"
            ) from None
    else:
        content = text
    try:
        value = json.loads(content)
    except json.JSONDecodeError as error:
        value = _yaml(content, text, error)
    if not isinstance(value, Mapping):
        raise ConfigError(f"option 'cache_config' must hold a mapping, not {value!r}")
    return value


def _yaml(content: str, source: str, error: Exception) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"option 'cache_config': {source!r} is not JSON ({error}), and reading YAML needs "
            "PyYAML"
        ) from None
    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as problem:
        raise ConfigError(
            f"option 'cache_config': {source!r} is neither JSON nor YAML: {problem}"
        ) from None


def _rename(options: Mapping[str, Any]) -> Options:
    """Return `options` in stepfx's names; what says nothing is left out."""
    renamed: Options = {}
    switches = ("enable_taylorseer", "enable_calibrator")
    for name, value in options.items():
        if name in WITHOUT_COUNTERPART:
            _note_without_counterpart(name, value)
            continue
        if name in ("enable_dmd", "enable_foca"):
            if value:
                raise ConfigError(
                    f"option {name!r}: stepfx forecasts with taylor_order 0, 1 or 2 only"
                )
            continue
        if name in switches:
            continue
        target = ALIASES.get(name, name)
        if target in renamed:
            raise ConfigError(f"option {name!r} says again what {target!r} said")
        renamed[target] = value
    for name in switches:
        if name in options:
            order = renamed.get("taylor_order", 1) if options[name] else 0
            renamed["taylor_order"] = order
    return renamed


def _note_without_counterpart(name: str, value: Any) -> None:
    neutral, why = WITHOUT_COUNTERPART[name]
    if value in (neutral, None) or name in _HARMLESS:
        return
    warnings.warn(
        f"stepfx: option {name!r} is {value!r}, which stepfx does not do: {why}",
        StepfxWarning,
        stacklevel=2,
    )


def _fields(value: Any) -> Options:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def _db_config(value: Any) -> Options:
    """Take a DBCacheConfig or DBPruneConfig: what equals its default is left open."""
    options = _fields(value)
    kind = options.pop("cache_type")
    extra = options.pop("extra_cache_config", None)
    if extra is not None:
        options.update(_fields(extra))
    mask = options.pop("steps_computation_mask", None)
    if mask is not None:
        options["steps_computation_mask"] = mask
    else:
        options.pop("steps_computation_policy", None)
    if options.get("force_refresh_step_hint") is None:
        options.pop("force_refresh_step_policy", None)
    return {
        **_rename({k: v for k, v in options.items() if v is not None}),
        "cache": CACHE_ALIASES.get(str(getattr(kind, "value", kind)), str(kind)),
    }


def _calibrator(value: Any) -> Options:
    if not value.enable_calibrator:
        return {"taylor_order": 0}
    if value.calibrator_type != "taylorseer":
        raise ConfigError(
            f"calibrator {value.calibrator_type!r}: stepfx forecasts with taylor_order 0, 1 "
            "or 2 only"
        )
    return {"taylor_order": value.taylorseer_order}


def _first_block(value: Any) -> Options:
    return {"cache": "fbcache", "threshold": value.threshold}


def _mag(value: Any) -> Options:
    if value.mag_ratios is None:
        raise ConfigError("option 'magnitudes' must be ratios; MagCacheConfig has none")
    return {
        "cache": "magcache",
        "threshold": value.threshold,
        "max_continuous_cached_steps": value.max_skip_steps,
        "retention_ratio": value.retention_ratio,
        "magnitudes": [float(ratio) for ratio in value.mag_ratios],
        # The object has spread its ratios over this many steps.
        "num_inference_steps": value.num_inference_steps,
    }


def _taylor_seer(value: Any) -> Options:
    """Take TaylorSeerCacheConfig's schedule; it forecasts modules, stepfx the block stack."""
    before, interval = value.disable_cache_before_step, value.cache_interval
    after = value.disable_cache_after_step
    mask = "".join(
        "1"
        if step < before
        or (step - before - 1) % interval == 0
        or (after is not None and step >= after)
        else "0"
        for step in range(_LONGEST)
    )
    return {"cache": "mask", "steps_mask": mask, "taylor_order": value.max_order}


_LONGEST = 1000  # steps: more than any sampler takes

_OBJECTS: dict[str, Any] = {
    "FirstBlockCacheConfig": _first_block,
    "MagCacheConfig": _mag,
    "TaylorSeerCacheConfig": _taylor_seer,
    "DBCacheConfig": _db_config,
    "DBPruneConfig": _db_config,
    "TaylorSeerCalibratorConfig": _calibrator,
    "CalibratorConfig": _calibrator,
    "DMDCalibratorConfig": _calibrator,
    "FoCaCalibratorConfig": _calibrator,
}
