"""Configuration objects of other projects as dictionaries, in their own names.

Objects are known by the name of their class, so that no project needs to be installed.
`stepfx.spellings` gives the fields stepfx's names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from stepfx.errors import ConfigError

Options = dict[str, Any]

# cache-dit's and vllm-omni's names of methods, and those of their types.
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

_LONGEST = 1000  # steps: more than any sampler takes


def fields_of(value: Any) -> Options | None:
    """Return the options that an object stands for, or None if its class is not known.

    Raises:
        ConfigError: it asks for a method that stepfx does not have.
    """
    kind = type(value).__name__
    if kind in OTHER_METHODS:
        raise ConfigError(f"{kind} cannot be used: {OTHER_METHODS[kind]}")
    return OBJECTS[kind](value) if kind in OBJECTS else None


def _given(value: Any) -> Options:
    """Return the fields of a dataclass; None says nothing."""
    found = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {name: item for name, item in found.items() if item is not None}


def _db_config(value: Any) -> Options:
    """Take a DBCacheConfig or DBPruneConfig; one that was reset holds only what was said."""
    options = _given(value)
    kind = options.pop("cache_type", None)
    if kind is not None:
        name = str(getattr(kind, "value", kind))
        options["cache"] = CACHE_ALIASES.get(name, name)
    return options


def _calibrator(value: Any) -> Options:
    options = _given(value)
    kind = options.pop("calibrator_type", "taylorseer")
    if kind != "taylorseer" and options.get("enable_calibrator"):
        raise ConfigError(
            f"calibrator {kind!r}: stepfx forecasts with taylor_order 0, 1 or 2 only"
        )
    return options


def _modifier(value: Any) -> Options:
    """Take a ParamsModifier: what it says of one block list; the method is the base's."""
    options: Options = {}
    for item in value._context_kwargs.values():
        options.update(fields_of(item) or {})
    options.pop("cache", None)
    return options


def _first_block(value: Any) -> Options:
    return {"cache": "fbcache", "threshold": value.threshold}


def _mag(value: Any) -> Options:
    if value.mag_ratios is None:
        raise ConfigError(
            "option 'magnitudes' must be ratios; MagCacheConfig has none"
            + (", it asks to record them" if value.calibrate else "")
        )
    return {
        "cache": "magcache",
        "threshold": value.threshold,
        "max_skip_steps": value.max_skip_steps,
        "retention_ratio": value.retention_ratio,
        "mag_ratios": [float(ratio) for ratio in value.mag_ratios],
        # The object has spread its ratios over this many steps.
        "num_inference_steps": value.num_inference_steps,
        "calibrate": value.calibrate,
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
    return {
        "cache": "mask",
        "steps_mask": mask,
        "taylor_order": value.max_order,
        "skip_predict_identifiers": value.skip_predict_identifiers,
        "cache_identifiers": value.cache_identifiers,
    }


OBJECTS: dict[str, Callable[[Any], Options]] = {
    "FirstBlockCacheConfig": _first_block,
    "MagCacheConfig": _mag,
    "TaylorSeerCacheConfig": _taylor_seer,
    "DBCacheConfig": _db_config,
    "BasicCacheConfig": _db_config,
    "DBPruneConfig": _db_config,
    "ExtraCacheConfig": _given,
    "ParamsModifier": _modifier,
    "TaylorSeerCalibratorConfig": _calibrator,
    "CalibratorConfig": _calibrator,
    "DMDCalibratorConfig": _calibrator,
    "FoCaCalibratorConfig": _calibrator,
}

# Configurations of diffusers for which stepfx has no method, and why.
OTHER_METHODS = {
    "PyramidAttentionBroadcastConfig": (
        "it keeps the output of attention modules, stepfx that of block stacks"
    ),
    "FasterCacheConfig": "it keeps the output of attention modules and of the second branch",
    "SeaCacheConfig": "its score is a spectrum; cache='teacache' watches the same tensor",
    "TextKVCacheConfig": "it keeps keys and values of the text and skips no block",
    "LayerSkipConfig": "it is a guidance, not a cache",
    "SmoothedEnergyGuidanceConfig": "it is a guidance, not a cache",
}
