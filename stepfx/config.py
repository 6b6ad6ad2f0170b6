"""What a user may choose, checked where it is said.

`Config` is frozen; `Config.build` takes the names of the public contract and the spellings
that users know from cache-dit, vllm-omni, diffusers and ParaAttention. This is the only
file that reads the environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from stepfx.checks import CHECKS, ListOptions, unknown_option
from stepfx.coefficients import IDENTITY, MagnitudeCurve
from stepfx.errors import ConfigError, StepfxWarning
from stepfx.masks import MASK_NAMES, step_mask
from stepfx.methods import PRESETS, Preset
from stepfx.spellings import ALIASES, translate

__all__ = ["Config", "ConfigError", "Preset", "StepfxWarning", "is_strict"]

# Fixed when a model is compiled; all other options may change from call to call.
COMPILE_TIME = (
    "gate_lists",
    "inner",
    "compile_unit",
    "mode",
    "inductor",
    "dump",
    "disable",
    "stop_after",
)

# What only a gate around each block reads.
PRUNING = (
    "enable_dynamic_prune_threshold",
    "max_dynamic_prune_threshold",
    "dynamic_prune_threshold_relax_ratio",
    "non_prune_block_ids",
)

# What gates around single block lists share.
SAME_FOR_LISTS = ("cache", "signal", "downsample_factor", "lists", "num_inference_steps")


@dataclass(frozen=True)
class Config:
    """The options of one backend.

    Attributes:
        cache: cache method, or None to run every block at every step.
        threshold: largest score at which a step is reused; None for the method's own, 0 to
            compute every step.
        alternate_threshold: the threshold of every branch of a request but the first (the
            pass without the prompt); None for the same.
        strict: whether a score equal to the threshold is computed; None: the method's own.
        fn_compute_blocks: leading blocks that always run. 0 where no block is watched.
        bn_compute_blocks: trailing blocks that always run.
        max_warmup_steps: leading denoising steps that are computed; None: the method's own.
        warmup_interval: during warm-up only every n-th step must be computed.
        max_cached_steps: most reused steps of a request and branch; None for no limit.
        max_continuous_cached_steps: most reused steps in a row; None for the method's own.
        continuous_counter: "consecutive" counts reused steps in a row, as cache-dit 1.5.3;
            "cache-dit" as it did up to August 2026 (a computed step does not clear the
            counter, a reused one behind a gap does not raise it).
        max_accumulated_threshold: once the scores of a branch add up to this, every step is
            computed; None for no limit.
        force_refresh_step: before this step all that is kept is forgotten and warm-up starts
            again (chunks of a long video).
        force_refresh_policy: "once", or "repeat" every so many steps.
        num_inference_steps: the steps of every request; `stepfx.request(steps=...)` wins.
        compute_last_step: whether the last step is computed, if the count of steps is known.
        taylor_order: 0 adds the last residual, 1 or 2 a forecast of it.
        signal: what is watched; None: the method's own. "modulated" and "timestep" are
            teacache's; "input" has fbcache and dbcache watch the image stream behind the first
            blocks in place of what these added to it.
        coefficients: TeaCache's polynomial, highest power first, or the name of a published
            one; None: the change as it is.
        coefficients_sign: what becomes of a negative value of the polynomial.
        magnitudes: MagCache's curve.
        retention_ratio: the share of leading steps that MagCache computes.
        steps_mask: text of 1 (computed) and 0, or the name of a mask; steps behind its end
            count as 0.
        steps_mask_policy: "static" reuses at every 0, "dynamic" asks the score there.
        enable_dynamic_prune_threshold: with dbprune, the scores of a step's first five blocks
            raise the threshold of the blocks behind them.
        max_dynamic_prune_threshold: a raised threshold of this or more is not used; None for
            twice the threshold.
        dynamic_prune_threshold_relax_ratio: the raised threshold over the mean of the scores.
        non_prune_block_ids: blocks that dbprune never skips, counted within a list where
            lists are apart; a number behind the last block means none.
        downsample_factor: the score reads every n-th channel.
        lists: "joined" puts one gate around all block lists, "apart" one around each; a list
            of dictionaries does so with options for each.
        gate_lists: the block lists under the gate, by the numbers that `stepfx.explain` shows;
            None: the main stack.
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
    alternate_threshold: float | None = None
    strict: bool | None = None
    fn_compute_blocks: int | None = None
    bn_compute_blocks: int | None = None
    max_warmup_steps: int | None = None
    warmup_interval: int | None = None
    max_cached_steps: int | None = None
    max_continuous_cached_steps: int | None = None
    continuous_counter: Literal["consecutive", "cache-dit"] = "consecutive"
    max_accumulated_threshold: float | None = None
    force_refresh_step: int | None = None
    force_refresh_policy: Literal["once", "repeat"] = "once"
    num_inference_steps: int | None = None
    compute_last_step: bool = True
    taylor_order: int = 1
    signal: Literal["modulated", "timestep", "input"] | None = None
    coefficients: tuple[float, ...] | None = None
    coefficients_sign: Literal["raw", "abs", "clamp"] = "raw"
    magnitudes: MagnitudeCurve | None = None
    retention_ratio: float | None = None
    steps_mask: str | None = None
    steps_mask_policy: Literal["dynamic", "static"] | None = None
    enable_dynamic_prune_threshold: bool = False
    max_dynamic_prune_threshold: float | None = None
    dynamic_prune_threshold_relax_ratio: float = 1.25
    non_prune_block_ids: tuple[int, ...] = ()
    downsample_factor: int = 1
    lists: Literal["joined", "apart"] | tuple[ListOptions, ...] = "joined"
    gate_lists: tuple[int, ...] | None = None
    batch: Literal["worst", "mean"] = "worst"
    inner: Literal["inductor", "aot_eager", "eager"] = "inductor"
    compile_unit: Literal["block", "region"] = "block"
    mode: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)
    dump: Path | None = None
    disable: tuple[str, ...] = ()
    stop_after: str | None = None

    @classmethod
    def build(cls, base: Config | None = None, /, *given: Any, **options: Any) -> Config:
        """Return a checked configuration; raise `ConfigError` naming what is wrong.

        Options are laid over `base`, or over the defaults and the environment
        (`STEPFX_OPTIONS`, a JSON object; `STEPFX_DUMP`, a folder). `given` are configuration
        objects, dictionaries or files of other projects (`stepfx.spellings`).
        """
        options = translate(given, options)
        if base is None:
            base = cls()
            options = {**translate((), _from_environment()), **options}
        known: dict[str, Any] = {}
        for name, value in options.items():
            if name not in CHECKS:
                raise unknown_option(name, ALIASES)
            known[name] = CHECKS[name](name, value)
        config = replace(base, **known)
        config._check(known)
        return config

    def with_run_time(self, where: str, options: Mapping[str, Any]) -> Config:
        """Return a configuration for some calls of a compiled model.

        Raises:
            ConfigError: as `build`, or an option is fixed when the model is compiled.
        """
        check_run_time(where, options)
        return Config.build(self, **options)

    def for_list(self, number: int) -> Config:
        """Return the options of one block list: this configuration, or its own laid over it."""
        if isinstance(self.lists, str) or number >= len(self.lists):
            return self
        own = dict(self.lists[number])
        check_run_time(f"option 'lists'[{number}]", own, SAME_FOR_LISTS)
        return Config.build(replace(self, lists="apart"), **own)

    @property
    def lists_with_options(self) -> int:
        """How many block lists have options of their own."""
        return 0 if isinstance(self.lists, str) else len(self.lists)

    def preset(self) -> Preset:
        """Return the method's values with the user's own laid over them."""
        if self.cache is None:
            return Preset(threshold=0.0)
        preset = PRESETS[self.cache]
        if self.cache == "mask" and self.steps_mask_policy == "dynamic":
            preset = replace(preset, signal="residual", score="change", fn_compute_blocks=1)
        chosen = {f.name: getattr(self, f.name, None) for f in fields(Preset)}
        return replace(preset, **{k: v for k, v in chosen.items() if v is not None})

    def polynomial(self) -> tuple[float, ...]:
        """Return the coefficients of an accumulated score, highest power first."""
        return self.coefficients or IDENTITY

    def mask(self, steps: int | None) -> str | None:
        """Return the step mask for a run of `steps`, or None if there is none.

        A named mask of an unknown number of steps is empty.
        """
        if self.steps_mask in MASK_NAMES:
            return "" if steps is None else step_mask(self.steps_mask, steps)
        return self.steps_mask

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raise for options that contradict each other; `given` are those of this call."""
        if self.mode and self.inner != "inductor":
            raise ConfigError(
                f"option 'mode' is {self.mode!r}, but modes are Inductor's and option "
                f"'inner' is {self.inner!r}"
            )
        preset = self.preset()
        if preset.score == "change" and not preset.fn_compute_blocks and not preset.per_block:
            raise ConfigError(
                "option 'fn_compute_blocks' must be an integer of at least 1 with "
                f"cache={self.cache!r}, which watches what these blocks do, not 0"
            )
        if self.cache == "mask" and self.steps_mask is None:
            raise ConfigError(
                "cache='mask' needs option 'steps_mask': a text of 1 and 0, or one of "
                f"{', '.join(map(repr, MASK_NAMES))}"
            )
        if self.cache == "magcache" and self.magnitudes is None:
            raise ConfigError(
                "cache='magcache' needs option 'magnitudes': the ratios of a recorded run, or "
                "'flux'"
            )
        if not isinstance(self.lists, str):
            for number in range(len(self.lists)):
                self.for_list(number)
        self._check_reach(given, preset)
        self._check_history(given)

    def _check_reach(self, given: Mapping[str, Any], preset: Preset) -> None:
        """Raise if an option was given that the method does not read."""
        readers = {
            "coefficients": (preset.score == "accumulated", "cache='teacache'"),
            "magnitudes": (preset.score == "magnitude", "cache='magcache'"),
            "steps_mask_policy": (self.steps_mask is not None, "option 'steps_mask'"),
            "signal": self._signal_reader(preset),
            **{name: (preset.per_block, "cache='dbprune'") for name in PRUNING},
        }
        for name, (is_read, needed) in readers.items():
            if given.get(name) not in (None, False, ()) and not is_read:
                raise ConfigError(
                    f"option {name!r} is {given[name]!r}, but needs {needed}; option 'cache' "
                    f"is {self.cache!r}"
                )

    def _signal_reader(self, preset: Preset) -> tuple[bool, str]:
        """Return whether the method can watch the signal asked for, and which one can."""
        if self.signal == "input":
            return preset.score == "change", "cache='fbcache' or 'dbcache'"
        return preset.score == "accumulated", "cache='teacache'"

    def _check_history(self, given: Mapping[str, Any]) -> None:
        """Raise if a forecast was asked for that can never be made."""
        order = given.get("taylor_order")
        if not order:
            return
        if self.cache is None:
            raise ConfigError(
                f"option 'taylor_order' is {order}, but with cache=None no step leaves a "
                "residual to forecast from"
            )
        mask = self.steps_mask
        static = self.preset().steps_mask_policy == "static"
        if mask and mask not in MASK_NAMES and static and mask.count("1") <= order:
            raise ConfigError(
                f"option 'taylor_order' is {order}, which needs {order + 1} computed steps; "
                f"option 'steps_mask' {mask!r} computes {mask.count('1')}"
            )


def check_run_time(
    where: str, options: Mapping[str, Any], fixed: Iterable[str] = COMPILE_TIME
) -> None:
    """Raise `ConfigError` for an option that is unknown, bad, or one of the `fixed`."""
    for name, value in translate((), options).items():
        try:
            if name not in CHECKS:
                raise unknown_option(name, ALIASES)
            CHECKS[name](name, value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if name in COMPILE_TIME:
            raise ConfigError(
                f"{where}: option {name!r} is fixed when the model is compiled; give it to the "
                "backend"
            )
        if name in fixed:
            raise ConfigError(f"{where}: option {name!r} is the same for every block list")


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
