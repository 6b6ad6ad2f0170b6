"""The order of the passes, and the runner that lints, times and dumps them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from stepfx.config import Config, ConfigError
from stepfx.dump import Dump, PassRecord, count_delta
from stepfx.passes.base import Pass, PassContext
from stepfx.passes.canonicalize import Canonicalize
from stepfx.passes.graph_edit import copy_module
from stepfx.passes.match_layouts import MatchLayouts
from stepfx.passes.outline_blocks import OutlineBlocks
from stepfx.passes.step_cache import StepCache
from stepfx.patterns.program import value_of
from stepfx.printer import count_operations, format_module

log = logging.getLogger(__name__)


def default_pipeline(config: Config) -> tuple[Pass, ...]:
    """Return the passes that `config` asks for, in the order they run."""
    passes: tuple[Pass, ...] = (
        # First, so that patterns meet one spelling.
        Canonicalize(),
        # Finds the blocks and makes the outer graph; all later passes see stages.
        OutlineBlocks(config.gate_lists),
        # Artifacts are compiled for strides; before the gate, which reads the streams.
        *([MatchLayouts()] if config.inner != "eager" else []),
        # Last: what it puts between the stages is not part of the model.
        placement(config),
    )
    return _selected(passes, config)


def _selected(passes: tuple[Pass, ...], config: Config) -> tuple[Pass, ...]:
    """Leave out what `config` disables and what comes behind the pass it stops after."""
    names = [p.name for p in passes]
    for option, given in (("disable", config.disable), ("stop_after", (config.stop_after,))):
        for name in given:
            if name is not None and name not in names:
                raise ConfigError(
                    f"option {option!r} names no pass: {name!r} (passes: {', '.join(names)})"
                )
    if config.stop_after is not None:
        passes = passes[: names.index(config.stop_after) + 1]
    return tuple(p for p in passes if p.name not in config.disable)


def placement(config: Config) -> StepCache:
    """Return where `config` wants gates, and what they watch."""
    preset = config.preset()
    lists: tuple[tuple[int, int], ...] = ()
    history = config.taylor_order + 1
    exempt: tuple[tuple[int, ...], ...] = (config.non_prune_block_ids,)
    if config.lists != "joined":
        own = [config.for_list(i) for i in range(config.lists_with_options + 1)]
        presets = [one.preset() for one in own]
        lists = tuple((p.fn_compute_blocks, p.bn_compute_blocks) for p in presets)
        history = max(one.taylor_order + 1 for one in own)
        exempt = tuple(one.non_prune_block_ids for one in own)
    return StepCache(
        preset.fn_compute_blocks,
        preset.bn_compute_blocks,
        history,
        preset.signal,
        config.downsample_factor,
        preset.per_block,
        lists,
        exempt,
    )


@dataclass
class PipelineResult:
    """The rewritten module, what the passes found and what each did."""

    module: fx.GraphModule
    notes: dict[str, Any]
    records: list[PassRecord] = field(default_factory=list)
    dump: Dump = field(default_factory=Dump)

    @property
    def misses(self) -> list[str]:
        """Why passes left the graph alone, in the order they ran."""
        return [miss for record in self.records for miss in record.misses]


def run_pipeline(
    gm: fx.GraphModule, passes: Sequence[Pass], fake_mode: Any, dump: Dump
) -> PipelineResult:
    """Run `passes` on a copy of `gm`; a failing pass is named in the error's notes."""
    module = copy_graph_module(gm)
    result = PipelineResult(module, {}, dump=dump)
    dump.graph(0, "dynamo", module)
    counts = count_operations(module)
    for number, one in enumerate(passes, start=1):
        misses: list[str] = []
        before = len(module.graph.nodes)
        start = time.perf_counter()
        with _named_in_errors(one, module, result):
            rewrites = one(module, PassContext(fake_mode, misses.append, result.notes))
            if rewrites:
                module.graph.lint()
                module.recompile()
        elapsed = (time.perf_counter() - start) * 1000
        counts_after = count_operations(module) if rewrites else counts
        record = PassRecord(
            one.name,
            rewrites,
            elapsed,
            before,
            len(module.graph.nodes),
            count_delta(counts, counts_after),
            tuple(misses),
        )
        counts = counts_after
        log.debug("%s", record)
        for miss in misses:
            log.debug("%s missed: %s", one.name, miss)
        result.records.append(record)
        if rewrites:
            dump.graph(number, one.name, module)
    dump.finish(module, result.records)
    return result


@contextlib.contextmanager
def _named_in_errors(
    one: Pass, module: fx.GraphModule, result: PipelineResult
) -> Iterator[None]:
    """Add to an error which pass failed, what ran before it, and where to look."""
    try:
        yield
    except Exception as error:
        done = ", ".join(record.name for record in result.records) or "none"
        error.add_note(f"in stepfx pass {one.name!r}; passes done before it: {done}")
        if result.dump.folder is None:
            error.add_note("STEPFX_DUMP=folder writes the graph after each pass")
        else:
            result.dump.write(f"failed_{one.name}.txt", format_module(module))
            error.add_note(f"the graphs up to this pass are in {result.dump.folder}")
        raise


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
