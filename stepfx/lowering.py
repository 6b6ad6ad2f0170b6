"""Hand the stages of an outer graph to the inner compiler, each distinct one once.

Blocks that are the same operations share one graph module, so one artifact serves them all;
the outer graph then calls artifacts in a straight line, with no Dynamo guard between them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import fx

from stepfx.config import Config
from stepfx.passes.graph_edit import called_module, inline
from stepfx.patterns.program import depends_on_data, is_tensor, value_of
from stepfx.printer import format_graph, graph_modules
from stepfx.progress import counting, step

log = logging.getLogger(__name__)

Artifact = Callable[..., Any]


def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any], config: Config) -> Artifact:
    """Compile one graph with the inner compiler of `config`."""
    if config.inner == "eager":
        forward: Artifact = gm.forward
        return forward
    if config.inner == "aot_eager":
        compiled: Artifact = torch._dynamo.lookup_backend("aot_eager")(gm, list(inputs))
        return compiled
    artifact: Artifact = _inductor(config)(gm, list(inputs))
    return artifact


def _inductor(config: Config) -> Any:
    # Private: the object that torch.compile itself makes for backend="inductor" (2.11 to
    # 2.13); it turns a mode and settings into one Inductor configuration and checks them.
    return torch._TorchCompileInductorWrapper(
        config.mode or "default", dict(config.inductor), None
    )


def compile_at_call(gm: fx.GraphModule, config: Config) -> Artifact:
    """Compile a stage when it is called, for the sizes that it is called with.

    Its inputs have sizes that depend on data. Inductor cannot make a graph of its own of one
    whose inputs have the sizes u0 + u1 (2.13: "expected [u0, u1] to have been codegen-ed").
    """

    def stage(*args: Any) -> Any:
        return gm(*args)

    # Dynamo skips the code that torch.fx generates, unless other code calls it, and counts
    # recompilations by code: each stage is given its own.
    code = stage.__code__.replace(co_name=type(gm).__name__)
    own = FunctionType(code, stage.__globals__, closure=stage.__closure__)
    artifact: Artifact = torch.compile(
        own, backend=_inductor(config), dynamic=True, fullgraph=True
    )
    return artifact


@dataclass
class Artifacts:
    """What was compiled for one graph of Dynamo; every placement of its gates shares it.

    `stages` are found by module, the small graphs of gates by what they say.
    """

    config: Config
    fake_mode: Any
    stages: dict[fx.GraphModule, Artifact] = field(default_factory=dict)
    small: dict[Any, Artifact] = field(default_factory=dict)
    is_complete: bool = False

    def __len__(self) -> int:
        return len(self.stages) + len(self.small)

    def of_stage(self, gm: Any) -> Artifact:
        """Return the artifact of a stage of the model, compiled at its first use."""
        if gm not in self.stages:
            self.stages[gm] = self._compile(gm)
        return self.stages[gm]

    def of_gate(self, gm: fx.GraphModule) -> Artifact:
        """Return what runs a small graph of a gate.

        Once the model is compiled, what is new runs as it is: a request that asks for
        another method does not wait for a compiler.
        """
        forward: Artifact = gm.forward
        if gm.meta.get("run_as_is"):
            return forward
        values = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
        strides = [str(v.stride()) if is_tensor(v) else "" for v in values]
        key = format_graph(gm.graph, sources=False), tuple(strides)
        if key not in self.small:
            if self.is_complete:
                return forward
            self.small[key] = self._compile(gm)
        return self.small[key]

    def _compile(self, gm: fx.GraphModule) -> Artifact:
        log.info("compiling %s with %s", type(gm).__name__, self.config.inner)
        step(type(gm).__name__)
        inputs = gm.graph.find_nodes(op="placeholder")
        if self.config.inner == "inductor" and depends_on_data(inputs):
            return compile_at_call(gm, self.config)
        with _own_tracing_context(self.fake_mode):
            return compile_graph(gm, _example_inputs(gm, self.fake_mode), self.config)


def lower(outer: fx.GraphModule, artifacts: Artifacts) -> None:
    """Replace every graph module below `outer` by its artifact."""
    # A graph that a request asks for calls what is there already: nothing to wait for.
    count = 0 if artifacts.is_complete else _count_parts(outer, artifacts.config)
    with counting("compiling part", count):
        _lower(outer, artifacts)


def _count_parts(outer: fx.GraphModule, config: Config) -> int:
    """Return how many artifacts there will be."""
    parts = [m for m in graph_modules(outer).values() if m is not outer]
    if config.compile_unit == "region":
        direct = map(outer.get_submodule, _called_modules(outer))
        parts = [m for m in direct if isinstance(m, fx.GraphModule)]
    else:
        parts = [m for m in parts if not _calls_modules(m)]
    return len({m for m in parts if not m.meta.get("run_as_is")})


def _lower(outer: fx.GraphModule, artifacts: Artifacts) -> None:
    for name in _called_modules(outer):
        module = outer.get_submodule(name)
        assert isinstance(module, fx.GraphModule)
        if _calls_modules(module):
            if artifacts.config.compile_unit == "region":
                _replace(outer, name, artifacts.of_stage(inline(module)))
                continue
            for inner_name in _called_modules(module):
                block = module.get_submodule(inner_name)
                _replace(module, inner_name, artifacts.of_stage(block))
            _replace(outer, name, module.forward)
        elif module.meta.get("of_gate"):
            _replace(outer, name, artifacts.of_gate(module))
        else:
            _replace(outer, name, artifacts.of_stage(module))


def compile_parts(gm: fx.GraphModule, artifacts: Artifacts) -> Artifact:
    """Compile a graph without a gate: its stages, or the whole if it has none."""
    if _calls_modules(gm):
        lower(gm, artifacts)
        forward: Artifact = gm.forward
        return forward
    return artifacts.of_stage(gm)


def _own_tracing_context(fake_mode: Any) -> Any:
    # Private: AOTAutograd writes what it learns of a graph into the tracing context (checked
    # on 2.13). Dynamo's own describes the whole model, so each stage is given a fresh one;
    # shape guards still reach Dynamo through the shared fake mode.
    return torch._guards.tracing(torch._guards.TracingContext(fake_mode))


def _example_inputs(gm: fx.GraphModule, fake_mode: Any) -> list[Any]:
    """Return the fake inputs of a stage; no two are one object.

    AOTAutograd would take two equal inputs for aliases and specialise on it.
    """
    seen: set[int] = set()
    values = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = value_of(node)
        if isinstance(value, torch.Tensor) and id(value) in seen:
            with fake_mode:
                value = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
        seen.add(id(value))
        values.append(value)
    return values


def _called_modules(gm: fx.GraphModule) -> list[str]:
    names = {
        str(node.target): None
        for node in gm.graph.nodes
        if node.op in ("call_module", "get_attr")
        and called_module(gm, str(node.target)) is not None
    }
    return list(names)


def _calls_modules(gm: fx.GraphModule) -> bool:
    return any(node.op == "call_module" for node in gm.graph.nodes)


def _replace(gm: fx.GraphModule, name: str, artifact: Artifact) -> None:
    """Put a plain callable where the generated code of `gm` looks up a module."""
    delattr(gm, name)
    object.__setattr__(gm, name, artifact)
