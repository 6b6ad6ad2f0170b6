"""One check for each option: a value as it is said in, as `Config` holds it out."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepfx.coefficients import COEFFICIENTS, MAGNITUDES, MagnitudeCurve, magnitude_curve
from stepfx.config_objects import CACHE_ALIASES
from stepfx.errors import ConfigError
from stepfx.masks import MASK_NAMES
from stepfx.methods import PRESETS

INNERS = ("inductor", "aot_eager", "eager")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

ListOptions = tuple[tuple[str, Any], ...]  # options of one block list, by name


def unknown_option(name: str, aliases: Iterable[str]) -> ConfigError:
    """Return the error for an option that nobody knows."""
    near = difflib.get_close_matches(name, sorted({*CHECKS, *aliases}), n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigError(
        f"unknown option {name!r}{hint} (known options: {', '.join(sorted(CHECKS))})"
    )


def _number(name: str, value: Any, most: float = math.inf) -> float | None:
    if value is None:
        return None
    wanted = "a number of at least 0" + (f" and at most {most:g}" if most < math.inf else "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"option {name!r} must be {wanted}, not {value!r}")
    if math.isnan(value) or not 0 <= value <= most:
        raise ConfigError(f"option {name!r} must be {wanted}, not {value!r}")
    return float(value)


def _count(name: str, value: Any, least: int = 0, none_is: str = "no limit") -> int | None:
    if value is None or (value == -1 and name.startswith("max_")):
        return None  # -1 is cache-dit's spelling of "no limit"
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"option {name!r} must be an integer of at least {least}, or None for "
            f"{none_is}, not {value!r}"
        )
    return value


def _factor(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"option {name!r} must be an integer of at least 1, not {value!r}")
    return value


def _ratio(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"option {name!r} must be a number above 0, not {value!r}")
    return float(value)


def _block_ids(name: str, value: Any) -> tuple[int, ...]:
    """Return numbers of blocks in order, each once."""
    ids = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else None
    if ids is None or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ConfigError(
            f"option {name!r} must be a list of block numbers from 0 on, not {value!r}"
        )
    return tuple(sorted(set(ids)))


def _choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if any(value is a or (isinstance(value, str) and value == a) for a in allowed):
        return value
    near = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(repr(a) for a in allowed)
    raise ConfigError(f"option {name!r} must be one of {listed}, not {value!r}{hint}")


def _cache(name: str, value: Any) -> str | None:
    value = CACHE_ALIASES.get(value, value) if isinstance(value, str) else value
    chosen: str | None = _choice(name, value, (*PRESETS, None))
    return chosen


def _order(name: str, value: Any) -> int:
    if isinstance(value, bool) or value not in (0, 1, 2):
        raise ConfigError(f"option {name!r} must be 0, 1 or 2, not {value!r}")
    return int(value)


def _mask(name: str, value: Any) -> str | None:
    if value is None or value in MASK_NAMES:
        return None if value is None else str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = "".join(str(digit) for digit in value)
    if not isinstance(value, str) or not value or set(value) - {"0", "1"}:
        names = ", ".join(map(repr, MASK_NAMES))
        raise ConfigError(
            f"option {name!r} must be a text of 1 (computed) and 0 (reused), or one of "
            f"{names}, not {value!r}"
        )
    return value


def _coefficients(name: str, value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    if isinstance(value, str | os.PathLike):
        if value in COEFFICIENTS:
            return COEFFICIENTS[str(value)]
        value = _coefficient_file(name, value)
    wanted = f"option {name!r} must be 5 numbers, highest power first"
    if not isinstance(value, Iterable):
        raise ConfigError(f"{wanted}, not {value!r}")
    values = list(value)
    if len(values) != 5:
        raise ConfigError(f"{wanted}, not {len(values)}: {values!r}")
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int | float):
            raise ConfigError(f"{wanted}, not {values!r}")
        if not math.isfinite(item):
            raise ConfigError(f"{wanted}, not {values!r}")
    return tuple(float(item) for item in values)


def _coefficient_file(name: str, value: str | os.PathLike[str]) -> Any:
    try:
        return json.loads(Path(value).read_text())
    except (OSError, ValueError):
        near = difflib.get_close_matches(str(value), COEFFICIENTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"option {name!r} must be 5 numbers, a JSON file of them, or one of "
            f"{', '.join(COEFFICIENTS)}, not {str(value)!r}{hint}"
        ) from None


def _magnitudes(name: str, value: Any) -> MagnitudeCurve | None:
    if value is None:
        return None
    if isinstance(value, str):
        return MAGNITUDES[_choice(name, value, tuple(MAGNITUDES))]
    try:
        return magnitude_curve(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"option {name!r} must be a list of ratios above 0 or a dictionary with 'ratios' "
            f"and 'levels' ({error}), not {value!r}"
        ) from None


def _lists(name: str, value: Any) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return _choice(name, value, ("joined", "apart"))
    found = []
    for options in value:
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"option {name!r} must be 'joined', 'apart' or a list of dictionaries, one for "
                f"each block list, not {value!r}"
            )
        found.append(tuple(options.items()))
    return tuple(found)


def _numbers(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    wanted = f"option {name!r} must be a list of block list numbers from 0, or None"
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"{wanted}, not {value!r}")
    numbers = list(value)
    bad = [n for n in numbers if isinstance(n, bool) or not isinstance(n, int) or n < 0]
    if bad or not numbers:
        raise ConfigError(f"{wanted}, not {numbers!r}")
    return tuple(sorted(set(numbers)))


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"option {name!r} must be a dictionary of Inductor settings, not {value!r}"
        )
    return dict(value)


def _folder(name: str, value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"option {name!r} must be a folder, not {value!r}")
    return Path(value)


def _names(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = value.split(",")
    return tuple(str(item).strip() for item in value if str(item).strip())


def _name(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"option {name!r} must be the name of a pass, or None, not {value!r}")
    return value


def _one_of(*allowed: Any) -> Any:
    return lambda name, value: _choice(name, value, allowed)


def _own_count(least: int) -> Any:
    return lambda name, value: _count(name, value, least, "the method's own")


CHECKS: dict[str, Any] = {
    "cache": _cache,
    "threshold": _number,
    "alternate_threshold": _number,
    "strict": _one_of(True, False, None),
    "fn_compute_blocks": _own_count(0),
    "bn_compute_blocks": _own_count(0),
    "max_warmup_steps": _own_count(0),
    "warmup_interval": _own_count(1),
    "max_cached_steps": _count,
    "max_continuous_cached_steps": _count,
    "continuous_counter": _one_of("consecutive", "cache-dit"),
    "max_accumulated_threshold": _number,
    "force_refresh_step": lambda n, v: _count(n, v, 1, "no refresh"),
    "force_refresh_policy": _one_of("once", "repeat"),
    "num_inference_steps": lambda n, v: _count(n, v, 1, "not known"),
    "compute_last_step": _one_of(True, False),
    "taylor_order": _order,
    "signal": _one_of("modulated", "timestep", "input", None),
    "coefficients": _coefficients,
    "coefficients_sign": _one_of("raw", "abs", "clamp"),
    "magnitudes": _magnitudes,
    "retention_ratio": lambda n, v: _number(n, v, 1.0),
    "steps_mask": _mask,
    "steps_mask_policy": _one_of("dynamic", "static", None),
    "enable_dynamic_prune_threshold": _one_of(True, False),
    "max_dynamic_prune_threshold": _number,
    "dynamic_prune_threshold_relax_ratio": _ratio,
    "non_prune_block_ids": _block_ids,
    "downsample_factor": _factor,
    "lists": _lists,
    "gate_lists": _numbers,
    "batch": _one_of("worst", "mean"),
    "inner": _one_of(*INNERS),
    "compile_unit": _one_of("block", "region"),
    "mode": _one_of(*MODES, None),
    "inductor": _mapping,
    "dump": _folder,
    "disable": _names,
    "stop_after": _name,
}
