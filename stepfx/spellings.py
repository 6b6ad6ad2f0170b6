"""Configuration as users of other projects write it, in stepfx's names.

    vllm-omni       cache_backend="tea_cache", cache_config='{"rel_l1_thresh": 0.2}'
    cache-dit       DBCacheConfig(...), TaylorSeerCalibratorConfig(...), a dictionary, YAML
    diffusers       FirstBlockCacheConfig(...), MagCacheConfig(...), TaylorSeerCacheConfig(...)
    ParaAttention   residual_diff_threshold=0.08, alter_residual_diff_threshold=...

Every field of theirs is an option here, or changes nothing, or is a `ConfigError` that says
why. (`stepfx.config_objects` takes the objects apart.)
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepfx.config_objects import CACHE_ALIASES, OBJECTS, Options, fields_of
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
    "params_modifiers": "lists",
    # vllm-omni
    "cache_backend": "cache",
    "rel_l1_thresh": "threshold",
    "scm_steps_mask_policy": "steps_mask",
    "scm_steps_policy": "steps_mask_policy",
    # diffusers
    "mag_ratios": "magnitudes",
    "max_skip_steps": "max_continuous_cached_steps",
}

# What vllm-omni gives to options that its user leaves open.
VLLM_OMNI: dict[str | None, Options] = {
    "dbcache": {
        "threshold": 0.24,
        "fn_compute_blocks": 1,
        "max_warmup_steps": 4,
        "max_continuous_cached_steps": 3,
    },
    "teacache": {"threshold": 0.2, "coefficients_sign": "abs"},
}

# The fields of vllm-omni's configuration, which holds those of all its methods at once, and
# of them the ones that a method reads.
_VLLM_OMNI_FIELDS: dict[str | None, set[str]] = {
    "teacache": {"rel_l1_thresh", "coefficients"},
    "dbcache": {
        "Fn_compute_blocks",
        "Bn_compute_blocks",
        "max_warmup_steps",
        "max_cached_steps",
        "residual_diff_threshold",
        "max_continuous_cached_steps",
        "enable_taylorseer",
        "taylorseer_order",
        "scm_steps_mask_policy",
        "scm_steps_policy",
    },
    None: set(),
}

# Fields whose every value asks for what stepfx does anyway.
HARMLESS = {
    # Branches are told apart by their inputs.
    "enable_separate_cfg",
    "cfg_compute_first",
    "enable_alter_cache",
    # Every stream is forecast, in the dtype of the model.
    "enable_encoder_calibrator",
    "enable_encoder_taylorseer",
    "enable_encoder_dmd",
    "enable_encoder_foca",
    "taylor_factors_dtype",
    # Blocks are skipped whole.
    "use_lite_mode",
    # Read only with `slg_layers` and `enable_dmd`, which are refused.
    "slg_start",
    "slg_end",
    "dmd_history",
    "dmd_rank",
    "dmd_ridge",
    "dmd_svd_precision",
}

# Fields that stepfx has only one value of, that value, and why.
ONE_VALUE: dict[str, tuple[Any, str]] = {
    "cfg_diff_compute_separate": (True, "each branch has a score of its own"),
    "important_condition_threshold": (0.0, "the score counts every token"),
    "taylorseer_cache_type": ("residual", "residuals are forecast, not hidden states"),
    "calibrator_cache_type": ("residual", "residuals are forecast, not hidden states"),
    "calibrator_kwargs": ({}, "a forecast has no setting but taylor_order"),
    "enable_dmd": (False, "forecasts are those of taylor_order 0, 1 or 2"),
    "enable_foca": (False, "forecasts are those of taylor_order 0, 1 or 2"),
    "slg_layers": (None, "skip-layer guidance is not a cache"),
    "skip_predict_identifiers": (None, "blocks are cached, not modules by name"),
    "cache_identifiers": (None, "blocks are cached, not modules by name"),
    "calibrate": (False, "a curve is recorded beforehand and given as 'magnitudes'"),
}

# What ParaAttention's `taylorseer_kwargs` may say beside the order.
_TAYLOR_KWARGS = {"warmup_steps": 1, "skip_interval_steps": 1, "compute_step_map": None}


def translate(given: tuple[Any, ...], options: Mapping[str, Any]) -> Options:
    """Return options in stepfx's names for `given` objects and `options` in any spelling.

    Args:
        given: configuration objects of other projects, dictionaries, YAML or JSON files.
        options: keyword options; they win over what the objects say.

    Raises:
        ConfigError: an object is not known, a file cannot be read, two names say one thing,
            or a field asks for what stepfx does not do.
    """
    merged: Options = {}
    named = dict(options)
    backend = named.get("cache_backend", ...)
    for name in ("cache", "cache_config"):
        value = named.get(name)
        if value is not None and (name == "cache_config" or not isinstance(value, str)):
            merged.update(_plain(named.pop(name), name, backend))
    for one in given:
        merged.update(_plain(one, "configuration", backend))
    own = _rename(named)
    if backend is not ...:
        merged = {**VLLM_OMNI.get(_method(backend), {}), **merged}
    return {**merged, **own}


def _method(name: Any) -> Any:
    return CACHE_ALIASES.get(name, name) if isinstance(name, str) else name


def _plain(value: Any, name: str, backend: Any = ...) -> Options:
    """Return the options that one configuration object, dictionary or file stands for."""
    fields = fields_of(value)
    if fields is not None:
        return _rename(fields)
    if isinstance(value, Mapping):
        return _from_mapping(value, backend)
    if isinstance(value, str | os.PathLike):
        return _from_mapping(_read(os.fspath(value)), backend)
    raise ConfigError(
        f"option {name!r} must be a dictionary, a JSON text, a YAML or JSON file, or one of "
        f"{', '.join(OBJECTS)}, not {value!r}"
    )


def _from_mapping(value: Mapping[str, Any], backend: Any) -> Options:
    if backend is not ...:
        return _rename(_read_by(_method(backend), value))
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


def _read_by(method: Any, value: Mapping[str, Any]) -> Options:
    """Leave out fields of vllm-omni's configuration that belong to another method."""
    if method not in _VLLM_OMNI_FIELDS:
        return dict(value)
    others = set().union(*_VLLM_OMNI_FIELDS.values()) - _VLLM_OMNI_FIELDS[method]
    return {name: item for name, item in value.items() if name not in others}


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
    for name, value in options.items():
        if name in HARMLESS or name in _TOGETHER:
            continue
        if name in ONE_VALUE:
            _check_one_value(name, value)
            continue
        target = ALIASES.get(name, name)
        if target in renamed:
            raise ConfigError(f"option {name!r} says again what {target!r} said")
        renamed[target] = _plain_value(target, value)
    for name, add in _TOGETHER.items():
        if options.get(name) is not None:
            add(options, renamed)
    spelled = {"scm_steps_policy", "steps_computation_policy"} & set(options)
    has_mask = renamed.get("steps_mask") is not None
    if spelled and not has_mask and renamed["steps_mask_policy"] in (None, "dynamic"):
        del renamed["steps_mask_policy"]  # their default, which says nothing without a mask
    return renamed


def _check_one_value(name: str, value: Any) -> None:
    neutral, why = ONE_VALUE[name]
    if value is not None and value != neutral:
        raise ConfigError(
            f"option {name!r} is {value!r}, but stepfx has only {neutral!r}: {why}"
        )


def _plain_value(target: str, value: Any) -> Any:
    if target == "lists":
        return _of_lists(value)
    if target == "cache" and hasattr(value, "value"):
        return value.value  # cache-dit's enumeration
    if target == "num_inference_steps" and value == -1:
        return None  # ParaAttention's default
    if target == "threshold" and hasattr(value, "item"):
        return value.item()  # cache-dit takes a tensor
    return value


def _of_lists(value: Any) -> Any:
    """Take options or ParamsModifiers of cache-dit, one for each block list."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value if fields_of(value) is None else [_plain(value, "lists")]
    if len(value) == 1 and isinstance(value[0], list | tuple):
        value = value[0]
    if any(isinstance(item, list | tuple) for item in value):
        raise ConfigError(
            "option 'params_modifiers' holds lists for several transformers; compile each "
            "transformer with options of its own"
        )
    # What is neither is left to the check of the option.
    return [_plain(item, "lists") if fields_of(item) is not None else item for item in value]


def _switch(name: str) -> Callable[[Mapping[str, Any], Options], None]:
    """Return what a switch of forecasts does: off is order 0."""

    def add(options: Mapping[str, Any], renamed: Options) -> None:
        renamed["taylor_order"] = renamed.get("taylor_order", 1) if options[name] else 0

    return add


def _taylor_kwargs(options: Mapping[str, Any], renamed: Options) -> None:
    """Take ParaAttention's settings of a forecast, whose order is 2 if it is left open."""
    given = dict(options["taylorseer_kwargs"])
    order = given.pop("n_derivatives", 2)
    for name, value in given.items():
        if name not in _TAYLOR_KWARGS or value != _TAYLOR_KWARGS[name]:
            raise ConfigError(
                f"option 'taylorseer_kwargs' has {name!r} as {value!r}; stepfx takes only "
                "'n_derivatives', and decides when to compute by steps_mask and warm-up"
            )
    if options.get("enable_taylorseer", True):
        renamed["taylor_order"] = order


def _extra(options: Mapping[str, Any], renamed: Options) -> None:
    renamed.update(_plain(options["extra_cache_config"], "extra_cache_config"))


def _hidden_states(options: Mapping[str, Any], renamed: Options) -> None:
    """Watch the stream behind the first blocks, at a threshold that replaces the other."""
    renamed["signal"] = "input"
    renamed["threshold"] = options["l1_hidden_states_diff_threshold"]


def _fewer_channels(options: Mapping[str, Any], renamed: Options) -> None:
    """DBPrune keeps every fourth channel of what it watches when it forecasts."""
    if options["force_reduce_calibrator_vram"] and renamed.get("taylor_order", 1):
        renamed["downsample_factor"] = max(4, renamed.get("downsample_factor", 1))


def _refresh_hint(options: Mapping[str, Any], renamed: Options) -> None:
    """cache-dit counts calls of the transformer: two a step where branches are apart."""
    hint = options["force_refresh_step_hint"]
    if options.get("enable_separate_cfg") and isinstance(hint, int):
        if hint % 2:
            raise ConfigError(
                f"option 'force_refresh_step_hint' is {hint} calls, which ends between the "
                "two branches of a step; with 'enable_separate_cfg' it must be even"
            )
        hint //= 2
    renamed["force_refresh_step"] = hint


# Fields whose meaning depends on others, in the order they are read.
_TOGETHER: dict[str, Callable[[Mapping[str, Any], Options], None]] = {
    "enable_taylorseer": _switch("enable_taylorseer"),
    "enable_calibrator": _switch("enable_calibrator"),
    "taylorseer_kwargs": _taylor_kwargs,
    "extra_cache_config": _extra,
    "l1_hidden_states_diff_threshold": _hidden_states,
    "force_reduce_calibrator_vram": _fewer_channels,
    "force_refresh_step_hint": _refresh_hint,
}
