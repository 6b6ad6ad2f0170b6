"""The order of the passes, and the runner that lints, times and dumps them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from stepfx.config import Config, ConfigError
from stepfx.dump import Dump
from stepfx.passes.base import Pass, PassContext
from stepfx.passes.canonicalize import Canonicalize
from stepfx.passes.graph_edit import copy_module
from stepfx.passes.match_layouts import MatchLayouts
from stepfx.passes.outline_blocks import OutlineBlocks
from stepfx.passes.step_cache import StepCache
from stepfx.patterns.program import value_of

log = logging.getLogger(__name__)


def default_pipeline(config: Config) -> tuple[Pass, ...]:
    """Return the passes that `config` asks for, in the order they run."""
    passes: tuple[Pass, ...] = (
        # First, so that patterns meet one spelling.
        Canonicalize(),
        # Finds the blocks and makes the outer graph; all later passes see stages.
        OutlineBlocks(),
        # Artifacts are compiled for strides; before the gate, which reads the streams.
        *([MatchLayouts()] if config.inner != "eager" else []),
        # Last: what it puts between the stages is not part of the model.
        placement(config),
    )
    names = {p.name for p in passes}
    for name in config.disable:
        if name not in names:
            raise ConfigError(
                f"option 'disable' names no pass: {name!r} (passes: {', '.join(sorted(names))})"
            )
    return tuple(p for p in passes if p.name not in config.disable)


def placement(config: Config) -> StepCache:
    """Return where `config` wants gates, and what they watch."""
    preset = config.preset()
    lists: tuple[tuple[int, int], ...] = ()
    history = config.taylor_order + 1
    if config.lists != "joined":
        own = [config.for_list(i) for i in range(config.lists_with_options + 1)]
        presets = [one.preset() for one in own]
        lists = tuple((p.fn_compute_blocks, p.bn_compute_blocks) for p in presets)
        history = max(one.taylor_order + 1 for one in own)
    return StepCache(
        preset.fn_compute_blocks,
        preset.bn_compute_blocks,
        history,
        preset.signal,
        config.downsample_factor,
        preset.per_block,
        lists,
    )


@dataclass(frozen=True)
class PassRecord:
    """What one pass did to one graph."""

    name: str
    rewrites: int
    milliseconds: float
    nodes_before: int
    nodes_after: int
    misses: tuple[str, ...] = ()


@dataclass
class PipelineResult:
    """The rewritten module, what the passes found and what each did."""

    module: fx.GraphModule
    notes: dict[str, Any]
    records: list[PassRecord] = field(default_factory=list)
    dump_folder: Path | None = None

    @property
    def misses(self) -> list[str]:
        """Why passes left the graph alone, in the order they ran."""
        return [miss for record in self.records for miss in record.misses]


def run_pipeline(
    gm: fx.GraphModule, passes: Sequence[Pass], fake_mode: Any, dump: Dump
) -> PipelineResult:
    """Run `passes` on a copy of `gm`; a failing pass is named in the error's notes."""
    module = copy_graph_module(gm)
    notes: dict[str, Any] = {}
    result = PipelineResult(module, notes, dump_folder=dump.folder)
    dump.graph(0, "dynamo", module)
    for number, one in enumerate(passes, start=1):
        misses: list[str] = []
        before = len(module.graph.nodes)
        start = time.perf_counter()
        try:
            rewrites = one(module, PassContext(fake_mode, misses.append, notes))
            if rewrites:
                module.graph.lint()
                module.recompile()
        except Exception as error:
            done = ", ".join(record.name for record in result.records) or "none"
            error.add_note(f"in stepfx pass {one.name!r}; passes done before it: {done}")
            if dump.folder is not None:
                error.add_note(f"graphs up to this pass are in {dump.folder}")
            raise
        elapsed = (time.perf_counter() - start) * 1000
        record = PassRecord(
            one.name, rewrites, elapsed, before, len(module.graph.nodes), tuple(misses)
        )
        log.debug("%s", record)
        result.records.append(record)
        if rewrites:
            dump.graph(number, one.name, module)
    dump.summary(result.records)
    return result


def recorded_fake_mode(gm: fx.GraphModule) -> Any:
    """Return the fake mode of the values that Dynamo recorded on the nodes.

    The example inputs are of another mode, made for the backend (2.13); both share one shape
    environment, so shape guards reach Dynamo from either.
    """
    # `detect_fake_mode` prefers the mode of the tracing context, which is the other one.
    values = (value_of(node) for node in gm.graph.nodes)
    return next(v.fake_mode for v in values if isinstance(v, FakeTensor))


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a module's graph: Dynamo reads the one it gave after the backend is done."""
    return copy_module(gm)[0]
