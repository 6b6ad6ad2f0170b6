"""The Dynamo backend: a graph and its inputs in, a callable out."""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from stepfx.arrangements import Arrangements, too_few_blocks
from stepfx.config import Config, is_strict
from stepfx.dump import Dump
from stepfx.errors import ConfigError, StepfxWarning
from stepfx.lowering import Artifacts, compile_graph
from stepfx.passes.step_cache import GateSite
from stepfx.patterns.analysis import Analysis
from stepfx.patterns.program import is_registered, is_tensor, value_of
from stepfx.patterns.region import Region
from stepfx.pipeline import PipelineResult, default_pipeline, recorded_fake_mode, run_pipeline
from stepfx.printer import format_graph
from stepfx.runtime import GatedGraph, InputRoles

log = logging.getLogger(__name__)


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
            return compile_graph(gm, example_inputs, config)
        reason = why_not_gated(gm, example_inputs)
        if reason is None:
            try:
                compiled = self._compile_gated(gm, config)
            except ConfigError:
                raise
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
        self._warn(gm, f"the model runs without a step cache: {reason}")
        return compile_graph(gm, example_inputs, config)

    def _compile_gated(self, gm: fx.GraphModule, config: Config) -> Callable[..., Any] | str:
        """Return the gated graph, or why there is none."""
        result = rewrite(gm, config)
        site: GateSite | None = result.notes.get("gate")
        if site is None:
            problem = too_few_blocks(config, result.notes)
            if problem is not None:
                raise ConfigError(problem)
            return result.misses[0] if result.misses else "a pass that it needs is disabled"
        artifacts = Artifacts(config, recorded_fake_mode(gm))
        arrangements = Arrangements(result.module, result.notes, config, artifacts)
        log.info("%d artifacts, gate %s", len(artifacts), site)
        roles = _roles(result.notes["analysis"])
        return GatedGraph(arrangements, roles, fingerprint(gm, config))

    def _warn(self, gm: fx.GraphModule, text: str) -> None:
        """Warn once a model: graphs of one model start in one file of its code."""
        key = _model_file(gm)
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"stepfx: {text}", StepfxWarning, stacklevel=2)
        else:
            log.info("%s", text)


def rewrite(gm: fx.GraphModule, config: Config) -> PipelineResult:
    """Run the pass pipeline on a copy of `gm`."""
    passes = default_pipeline(config)
    return run_pipeline(gm, passes, recorded_fake_mode(gm), Dump(config.dump))


def fingerprint(gm: fx.GraphModule, config: Config) -> str:
    """Return a hash that is equal for graphs that compute the same with the same options."""
    text = f"{format_graph(gm.graph, sources=False)}\n{config}"
    return hashlib.sha256(text.encode()).hexdigest()


def why_not_gated(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """Return what about the call itself forbids a gate, or None."""
    if torch.is_grad_enabled() and any(
        is_tensor(value) and value.requires_grad for value in example_inputs
    ):
        return "grad mode is on; call it under torch.no_grad() or torch.inference_mode()"
    # Private: Dynamo says on the module why the graph ends where it does (2.11 to 2.13).
    ending = getattr(gm, "compile_subgraph_reason", None)
    if ending is None:
        return None
    frames = ending.user_stack
    if any(frame.name.startswith("torch_dynamo_resume_in_") for frame in frames):
        return "it is a part of a model behind a graph break"
    if ending.graph_break:
        place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        what = str(ending.reason).strip().splitlines()[0]
        return f"a graph break{place} splits it ({what})"
    return None


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
