"""The Dynamo backend: a graph and its inputs in, a callable out."""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from stepfx.arrangements import Arrangements, too_few_blocks
from stepfx.config import Config, is_strict
from stepfx.dump import Dump
from stepfx.errors import ConfigError, StepfxWarning
from stepfx.frames import Part, part_of
from stepfx.logs import register
from stepfx.lowering import Artifacts, compile_graph, compile_parts
from stepfx.main_part import Parts, weights_of_blocks
from stepfx.passes.step_cache import GateSite
from stepfx.patterns.analysis import Analysis
from stepfx.patterns.inputs import find_times
from stepfx.patterns.program import (
    Program,
    depends_on_data,
    is_registered,
    is_static,
    is_tensor,
    traced_shape,
    value_of,
)
from stepfx.patterns.region import Region
from stepfx.pipeline import PipelineResult, default_pipeline, recorded_fake_mode, run_pipeline
from stepfx.printer import format_graph
from stepfx.report import report_of
from stepfx.runtime import GatedGraph, InputRoles, ObservedGraph

log = logging.getLogger(__name__)
register()


@dataclass(eq=False)
class _Broken:
    """What became of the graphs of a model that Dynamo breaks."""

    reasons: list[str] = field(default_factory=list)
    gated_weights: int = 0
    depends_on_data: bool = False

    @property
    def is_first(self) -> bool:
        """Whether one graph was left alone so far."""
        return len(self.reasons) == 1

    @property
    def is_gated(self) -> bool:
        """Whether a graph has a gate."""
        return self.gated_weights > 0


class Backend:
    """A configured backend: `torch.compile(model, backend=stepfx.Backend(threshold=0.1))`.

    Args:
        *configurations: configuration objects of cache-dit or diffusers, dictionaries, JSON
            texts, YAML or JSON files.
        **options: see `stepfx.Config`; they win over the objects. Also the spellings of
            cache-dit, vllm-omni, diffusers and ParaAttention.

    Raises:
        ConfigError: an option is unknown, has a bad value or contradicts another.
    """

    __name__ = "stepfx"  # what torch.compile shows

    def __init__(self, *configurations: Any, **options: Any) -> None:
        self.config = Config.build(None, *configurations, **options)
        self._warned: set[str] = set()
        self._broken: weakref.WeakKeyDictionary[torch.nn.Module, _Broken]
        self._broken = weakref.WeakKeyDictionary()
        self._parts = Parts()

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile one graph of Dynamo. `mode` and `options` are those of torch.compile."""
        config = self.config
        if options or mode:
            config = Config.build(config, **{"mode": mode, **(options or {})})
        if config.cache is None:
            Dump(config.dump).left_alone(gm, "option 'cache' is None")
            return compile_graph(gm, example_inputs, config)
        reason = why_not_gated(example_inputs)
        part = part_of(gm)
        if reason is not None:
            Dump(config.dump).left_alone(gm, reason)
        else:
            try:
                compiled = self._compile_gated(gm, config, part)
            except (ConfigError, torch._dynamo.exc.RestartAnalysis):
                raise  # Dynamo restarts when a compiler has learned of a Python number
            except Exception as error:
                # A model that Inductor compiles must compile: a failure of ours is said and
                # run around. Tests set STEPFX_STRICT.
                if is_strict():
                    raise
                log.exception("stepfx failed; the graph goes to %s alone", config.inner)
                compiled = f"stepfx failed on it ({type(error).__name__}: {error})"
            if callable(compiled):
                return compiled
            reason = compiled
        compiled = compile_graph(gm, example_inputs, config)
        text = f"the model runs without a step cache: {reason}"
        by_data = depends_on_data(gm.graph.nodes)
        if part.model is None or (part.is_whole and not by_data):
            self._warn(gm, text)
            return compiled
        # The blocks may be in a graph that follows, so it is too early for a warning; and
        # that graph needs to know the inputs of this one.
        log.info("a part of %s: %s", type(part.model).__name__, text)
        broken = self._broken.setdefault(part.model, _Broken())
        broken.reasons.append(reason)
        broken.depends_on_data |= by_data
        on_repeat = functools.partial(self._judge, gm, broken) if broken.is_first else None
        code = None if part.called_from else part.code
        is_first = not part.is_resumed
        return ObservedGraph(compiled, code, *_observed(gm), is_first, on_repeat)

    def copy(self) -> Backend:
        """Return a backend of the same options that shares no graph with this one."""
        backend = Backend()
        backend.config = self.config
        return backend

    def gated_of_broken(self, model: torch.nn.Module) -> int | None:
        """Count the weights under the gates of a model that breaks and depends on data.

        Sizes in its graphs depend on the inputs' values: such graphs come of Dynamo's flags,
        and without them the breaks are in other places. None for other models.
        """
        broken = self._broken.get(model)
        return broken.gated_weights if broken is not None and broken.depends_on_data else None

    def _judge(self, gm: fx.GraphModule, broken: _Broken) -> None:
        """Warn of a broken model whose first call has found nothing to gate."""
        if not broken.is_gated:
            reason = min(broken.reasons, key=lambda r: "no repeated blocks" in r)
            self._warn(gm, f"the model runs without a step cache: {reason}")

    def _compile_gated(
        self, gm: fx.GraphModule, config: Config, part: Part
    ) -> Callable[..., Any] | str:
        """Return the gated graph, or why there is none."""
        result = rewrite(gm, config)
        reason = self._parts.why_not(part, result.notes.get("analysis"))
        site: GateSite | None = result.notes.get("gate")
        if reason is not None:
            return reason
        artifacts = Artifacts(config, recorded_fake_mode(gm))
        if site is None:
            problem = too_few_blocks(config, result.notes)
            if problem is not None:
                raise ConfigError(problem)
            left_out = _left_out(result)
            if left_out is None:
                return result.misses[0]
            # Whoever leaves out a pass wants to see what the others do.
            self._warn(gm, f"the model runs without a step cache: {left_out}")
            return compile_parts(result.module, artifacts)
        if not part.is_whole and part.model is not None:
            broken = self._broken.setdefault(part.model, _Broken())
            broken.gated_weights += weights_of_blocks(result.notes["analysis"])
            broken.depends_on_data |= depends_on_data(gm.graph.nodes)
        arrangements = Arrangements(result.module, result.notes, config, artifacts)
        log.info("%d artifacts, gate %s", len(artifacts), site)
        return GatedGraph(
            arrangements,
            _roles(result.notes["analysis"]),
            fingerprint(gm, config),
            None if part.is_whole else part.code,
            not part.is_resumed,
        )

    def _warn(self, gm: fx.GraphModule, text: str) -> None:
        """Warn once a model: graphs of one model start in one file of its code."""
        key = _model_file(gm)
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"stepfx: {text}", StepfxWarning, stacklevel=2)
        else:
            log.info("%s", text)


def rewrite(gm: fx.GraphModule, config: Config, keep: bool = False) -> PipelineResult:
    """Run the pass pipeline on a copy of `gm`; `keep` keeps the texts of all passes."""
    passes = default_pipeline(config)
    dump = Dump(config.dump, keep)
    result = run_pipeline(gm, passes, recorded_fake_mode(gm), dump)
    if dump.folder is not None:
        report = report_of([result])
        dump.write("report.txt", str(report))
        report.to_html(dump.folder / "report.html")
    return result


def _left_out(result: PipelineResult) -> str | None:
    """Say which pass that a gate needs was left out by the user, if any."""
    ran = {record.name for record in result.records}
    for name in ("outline_blocks", "step_cache"):
        if name not in ran:
            return f"pass {name!r} is left out by option 'disable' or 'stop_after'"
    return None


def fingerprint(gm: fx.GraphModule, config: Config) -> str:
    """Return a hash that is equal for graphs that compute the same with the same options."""
    text = f"{format_graph(gm.graph, sources=False)}\n{config}"
    return hashlib.sha256(text.encode()).hexdigest()


def why_not_gated(example_inputs: Sequence[Any]) -> str | None:
    """Return what about the call itself forbids a gate, or None."""
    if torch.is_grad_enabled() and any(
        is_tensor(value) and value.requires_grad for value in example_inputs
    ):
        return "grad mode is on; call it under torch.no_grad() or torch.inference_mode()"
    return None


def _observed(gm: fx.GraphModule) -> tuple[int | None, tuple[int, ...]]:
    """Return the positions of the timestep and of all other tensors of the caller."""
    program = Program(gm.graph)
    position = {n: i for i, n in enumerate(program.placeholders)}
    times = find_times(program)
    time = position.get(times[0]) if times else None
    given = [i for n, i in position.items() if is_tensor(value_of(n)) and not is_static(n)]
    return time, tuple(i for i in given if i != time)


def _roles(analysis: Analysis) -> InputRoles:
    position = {n: i for i, n in enumerate(analysis.program.placeholders)}
    inputs, region = analysis.inputs, analysis.region
    assert isinstance(region, Region)
    registered = {n for n in inputs.weights if is_registered(n)}
    of_blocks = {
        node: None
        for blocks in region.lists
        for kind in blocks.kinds
        for slot in kind.slots
        for node in slot.nodes
        if node in registered
    }
    outputs = analysis.program.output.all_input_nodes
    given = [n for n in position if is_tensor(value_of(n)) and n not in set(inputs.weights)]
    # What belongs to the module but is no weight (a rotary table, a float) is compared like
    # conditioning: by object, else by value.
    attributes = [n for n in inputs.weights if n not in registered]
    steady = [n for n in inputs.conditioning if n not in inputs.clocks]
    weights = tuple(position[n] for n in inputs.weights if n in registered)
    return InputRoles(
        identity=tuple(position[n] for n in of_blocks) or weights,
        weights=weights,
        conditioning=tuple(position[n] for n in (*steady, *attributes)),
        clocks=tuple(position[n] for n in inputs.clocks),
        given=tuple(position[n] for n in given),
        outputs=tuple(shape for n in outputs if len(shape := traced_shape(n) or ()) > 1),
    )


def _model_file(gm: fx.GraphModule) -> str:
    for node in gm.graph.nodes:
        found = re.search(r'File "([^"]+)"', node.meta.get("stack_trace") or "")
        if found:
            return found.group(1)
    return ""


@functools.cache
def default_backend() -> Backend:
    """Return the backend that `backend="stepfx"` stands for in this process."""
    return Backend()


def configure(**options: Any) -> None:
    """Set the options of `backend="stepfx"` for this process.

    Raises:
        ConfigError: an option is unknown, has a bad value or contradicts another.
    """
    default_backend().config = Config.build(**options)


def stepfx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo: what `torch.compile(model, backend="stepfx")` calls."""
    return default_backend()(gm, example_inputs, mode=mode, options=options)
