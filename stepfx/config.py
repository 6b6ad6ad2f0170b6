"""What a user may choose, checked where it is said.

`Config` is frozen; `Config.build` takes the names of the public contract and the spellings
that users know from cache-dit, vllm-omni, diffusers and ParaAttention. This is the only
file that reads the environment.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal


class ConfigError(ValueError):
    """An option is unknown, has a bad value, or contradicts another."""


class StepfxWarning(UserWarning):
    """stepfx does less than was asked for; the text says what and why."""


@dataclass(frozen=True)
class Preset:
    """The values that a cache method gives to options left open."""

    threshold: float
    fn_compute_blocks: int = 1
    bn_compute_blocks: int = 0
    max_warmup_steps: int = 0
    warmup_interval: int = 1


# One line a method. A method is a choice of signal, score, policy and reuse; what is not
# named here is the gate's default (residual of the first blocks, relative L1).
PRESETS: dict[str, Preset] = {
    "fbcache": Preset(threshold=0.08),
}

ALIASES = {
    "residual_diff_threshold": "threshold",
    "Fn_compute_blocks": "fn_compute_blocks",
    "Bn_compute_blocks": "bn_compute_blocks",
    "taylorseer_order": "taylor_order",
}
CACHE_ALIASES = {"none": None, "first_block_cache": "fbcache", "fb_cache": "fbcache"}

INNERS = ("inductor", "aot_eager", "eager")
MODES = (
    "default",
    "reduce-overhead",
    "max-autotune",
    "max-autotune-no-cudagraphs",
)


@dataclass(frozen=True)
class Config:
    """The options of one backend.

    Attributes:
        cache: cache method, or None to run every block at every step.
        threshold: largest relative change of the watched signal at which a step is reused;
            None for the method's own, 0 to compute every step.
        fn_compute_blocks: leading blocks that always run; their residual is watched.
        bn_compute_blocks: trailing blocks that always run.
        max_warmup_steps: leading denoising steps that are computed; None: the method's own.
        warmup_interval: during warm-up only every n-th step must be computed.
        max_cached_steps: most reused steps of a request and branch; None for no limit.
        max_continuous_cached_steps: most reused steps in a row; None for no limit.
        taylor_order: 0 adds the last residual, 1 or 2 a forecast of it.
        batch: "worst" lets the sample that changed most decide, "mean" the average.
        inner: the compiler of the parts.
        compile_unit: "block" compiles each distinct block once, "region" all skipped blocks
            as one.
        mode: an Inductor mode.
        inductor: Inductor settings by name.
        dump: folder for the text of every graph after every pass.
        disable: passes to leave out.
        stop_after: the last pass to run; what it leaves is compiled without the passes behind.
    """

    cache: str | None = "fbcache"
    threshold: float | None = None
    fn_compute_blocks: int | None = None
    bn_compute_blocks: int | None = None
    max_warmup_steps: int | None = None
    warmup_interval: int | None = None
    max_cached_steps: int | None = None
    max_continuous_cached_steps: int | None = None
    taylor_order: int = 1
    batch: Literal["worst", "mean"] = "worst"
    inner: Literal["inductor", "aot_eager", "eager"] = "inductor"
    compile_unit: Literal["block", "region"] = "block"
    mode: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)
    dump: Path | None = None
    disable: tuple[str, ...] = ()
    stop_after: str | None = None

    @classmethod
    def build(cls, base: Config | None = None, /, **options: Any) -> Config:
        """Return a checked configuration; raise `ConfigError` naming what is wrong.

        Options are laid over `base`, or over the defaults and the environment
        (`STEPFX_OPTIONS`, a JSON object; `STEPFX_DUMP`, a folder).
        """
        if base is None:
            base = cls()
            options = {**_from_environment(), **options}
        known: dict[str, Any] = {}
        for name, value in options.items():
            target = ALIASES.get(name, name)
            if target in known:
                raise ConfigError(f"option {name!r} says again what {target!r} said")
            known[target] = _checked(target, value)
        config = replace(base, **known)
        if config.mode and config.inner != "inductor":
            raise ConfigError(
                f"option 'mode' is {config.mode!r}, but modes are Inductor's and option "
                f"'inner' is {config.inner!r}"
            )
        return config

    def preset(self) -> Preset:
        """Return the method's values with the user's own laid over them."""
        if self.cache is None:
            return Preset(threshold=0.0)
        preset = PRESETS[self.cache]
        chosen = {f.name: getattr(self, f.name) for f in fields(Preset)}
        return replace(preset, **{k: v for k, v in chosen.items() if v is not None})


def _from_environment() -> dict[str, Any]:
    options: dict[str, Any] = {}
    text = os.environ.get("STEPFX_OPTIONS")
    if text:
        try:
            options = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"STEPFX_OPTIONS is not a JSON object: {error}") from None
        if not isinstance(options, dict):
            raise ConfigError(f"STEPFX_OPTIONS is not a JSON object: {text!r}")
    if os.environ.get("STEPFX_DUMP"):
        options.setdefault("dump", os.environ["STEPFX_DUMP"])
    if os.environ.get("STEPFX_DISABLE"):
        options.setdefault("disable", os.environ["STEPFX_DISABLE"].split(","))
    if os.environ.get("STEPFX_STOP_AFTER"):
        options.setdefault("stop_after", os.environ["STEPFX_STOP_AFTER"])
    return options


def is_strict() -> bool:
    """Tell whether a failure inside stepfx is raised instead of run around (tests do)."""
    return os.environ.get("STEPFX_STRICT", "") not in ("", "0")


def shows_progress() -> bool:
    """Tell whether bars may be drawn (STEPFX_PROGRESS=0 forbids it)."""
    return os.environ.get("STEPFX_PROGRESS", "1") not in ("", "0")


def stepfx_variables() -> dict[str, str]:
    """Return the variables of the environment that speak to stepfx."""
    found = {k: v for k, v in os.environ.items() if k.startswith("STEPFX_")}
    return dict(sorted(found.items()))


def _checked(name: str, value: Any) -> Any:
    """Return `value` as option `name` holds it, or raise."""
    check = _CHECKS.get(name)
    if check is None:
        known = sorted({*_CHECKS, *ALIASES})
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"unknown option {name!r}{hint} (known options: {', '.join(sorted(_CHECKS))})"
        )
    return check(name, value)


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"option {name!r} must be a number of at least 0, not {value!r}")
    if math.isnan(value) or value < 0:
        raise ConfigError(f"option {name!r} must be a number of at least 0, not {value!r}")
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


def _choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if value in allowed:
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


_CHECKS: dict[str, Any] = {
    "cache": _cache,
    "threshold": _number,
    "fn_compute_blocks": lambda n, v: _count(n, v, 1, "the method's own"),
    "bn_compute_blocks": lambda n, v: _count(n, v, 0, "the method's own"),
    "max_warmup_steps": lambda n, v: _count(n, v, 0, "the method's own"),
    "warmup_interval": lambda n, v: _count(n, v, 1, "the method's own"),
    "max_cached_steps": _count,
    "max_continuous_cached_steps": _count,
    "taylor_order": _order,
    "batch": lambda n, v: _choice(n, v, ("worst", "mean")),
    "inner": lambda n, v: _choice(n, v, INNERS),
    "compile_unit": lambda n, v: _choice(n, v, ("block", "region")),
    "mode": lambda n, v: _choice(n, v, (*MODES, None)),
    "inductor": _mapping,
    "dump": _folder,
    "disable": _names,
    "stop_after": _name,
}
