"""The outer graphs of one compiled model: one for each placement of its gates.

A request may ask for another method than the model was compiled with. Another threshold is
another `Plan` for the same graph; another number of first blocks, or another signal, is
another outer graph that calls the same artifacts. It takes milliseconds to build, once, and
nothing is compiled.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from stepfx.config import Config
from stepfx.errors import ConfigError
from stepfx.gate import Plan
from stepfx.lowering import Artifacts, lower
from stepfx.passes.base import PassContext
from stepfx.passes.step_cache import GateSite, StepCache, Ungated
from stepfx.pipeline import placement
from stepfx.policy import Policy
from stepfx.requests import Scope

log = logging.getLogger(__name__)

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Arrangement:
    """An outer graph, called with a gate and the model's inputs, and the rules of its gates."""

    forward: Forward
    plan: Plan


def plan_of(config: Config, place: StepCache, sites: tuple[GateSite, ...]) -> Plan:
    """Return the rules of the gates at `sites`."""
    own: dict[int, Policy] = {}
    for site in sites:
        own.setdefault(site.list_number, Policy(config.for_list(site.list_number)))
    return Plan(
        place,
        tuple(own[site.list_number] for site in sites),
        tuple(site.last - site.first for site in sites),
        tuple(site.signals for site in sites),
        place.history,
        place.stride,
        sites[0].has_time,
    )


class Arrangements:
    """The placements of gates in one graph, the first made when the model is compiled."""

    def __init__(
        self,
        gated: fx.GraphModule,
        notes: Mapping[str, Any],
        config: Config,
        artifacts: Artifacts,
    ) -> None:
        self._config, self._artifacts, self._notes = config, artifacts, dict(notes)
        self._lock = threading.Lock()
        lower(gated, artifacts)
        artifacts.is_complete = True
        place = placement(config)
        self._placed: dict[StepCache, tuple[Forward, tuple[GateSite, ...]]] = {
            place: (gated.forward, notes["gates"])
        }
        self._base = Arrangement(gated.forward, plan_of(config, place, notes["gates"]))
        self._of_scope: weakref.WeakKeyDictionary[Scope, Arrangement]
        self._of_scope = weakref.WeakKeyDictionary()

    def of(self, scope: Scope | None) -> Arrangement:
        """Return what runs a call inside `scope`.

        Raises:
            ConfigError: the options of the scope contradict those of the backend, or no gate
                can be placed as they ask.
        """
        if scope is None or not scope.options:
            return self._base
        found = self._of_scope.get(scope)
        if found is None:
            config = self._config.with_run_time("request", scope.options)
            place = placement(config)
            forward, sites = self._place(place)
            found = self._of_scope[scope] = Arrangement(forward, plan_of(config, place, sites))
        return found

    def _place(self, place: StepCache) -> tuple[Forward, tuple[GateSite, ...]]:
        with self._lock:
            known = self._placed.get(place)
            if known is not None:
                return known
            ungated: Ungated = self._notes["ungated"]
            module, outline = ungated.copy()
            misses: list[str] = []
            notes = {**self._notes, "outline": outline}
            if not place(module, PassContext(self._artifacts.fake_mode, misses.append, notes)):
                raise ConfigError(f"request: {misses[0]}")
            module.recompile()
            lower(module, self._artifacts)
            log.info("%d gates placed by %s", len(notes["gates"]), place)
            self._placed[place] = module.forward, notes["gates"]
            return self._placed[place]


def too_few_blocks(config: Config, notes: Mapping[str, Any]) -> str | None:
    """Say that the blocks which a user wants to run always leave none to skip."""
    given = (config.fn_compute_blocks, config.bn_compute_blocks)
    outline = notes.get("outline")
    if outline is None or "gate" in notes or not any(given):
        return None
    count = len(outline.blocks)
    place = replace(placement(config), lists=())
    if place.fn + place.bn < count:
        return None
    return (
        f"options 'fn_compute_blocks' and 'bn_compute_blocks' must add up to less than the "
        f"{count} blocks of the model, not {place.fn} + {place.bn}"
    )
