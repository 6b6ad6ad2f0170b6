"""Hand the stages of an outer graph to the inner compiler, each distinct one once.

Blocks that are the same operations share one graph module, so one artifact serves them all;
the outer graph then calls artifacts in a straight line, with no Dynamo guard between them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from stepfx.config import Config
from stepfx.passes.graph_edit import called_module, inline
from stepfx.patterns.program import value_of
from stepfx.printer import graph_modules
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
    # Private: the object that torch.compile itself makes for backend="inductor" (2.11 to
    # 2.13); it turns a mode and settings into one Inductor configuration and checks them.
    inductor = torch._TorchCompileInductorWrapper(
        config.mode or "default", dict(config.inductor), None
    )
    artifact: Artifact = inductor(gm, list(inputs))
    return artifact


def lower(outer: fx.GraphModule, config: Config, fake_mode: Any) -> int:
    """Replace every graph module below `outer` by its artifact; return how many there are."""
    with counting("compiling part", _count_parts(outer, config)):
        return _lower(outer, config, fake_mode)


def _count_parts(outer: fx.GraphModule, config: Config) -> int:
    """Return how many artifacts there will be."""
    parts = [m for m in graph_modules(outer).values() if m is not outer]
    if config.compile_unit == "region":
        direct = map(outer.get_submodule, _called_modules(outer))
        parts = [m for m in direct if isinstance(m, fx.GraphModule)]
    else:
        parts = [m for m in parts if not _calls_modules(m)]
    return len({m for m in parts if not m.meta.get("run_as_is")})


def _lower(outer: fx.GraphModule, config: Config, fake_mode: Any) -> int:
    artifacts: dict[fx.GraphModule, Artifact] = {}
    for name in _called_modules(outer):
        module = outer.get_submodule(name)
        assert isinstance(module, fx.GraphModule)
        if _calls_modules(module):
            if config.compile_unit == "region":
                _replace(outer, name, _artifact(inline(module), config, fake_mode, artifacts))
                continue
            for inner_name in _called_modules(module):
                block = module.get_submodule(inner_name)
                artifact = _artifact(block, config, fake_mode, artifacts)
                _replace(module, inner_name, artifact)
            _replace(outer, name, module.forward)
        elif module.meta.get("run_as_is"):
            _replace(outer, name, module.forward)
        else:
            _replace(outer, name, _artifact(module, config, fake_mode, artifacts))
    return len(artifacts)


def compile_parts(gm: fx.GraphModule, config: Config, fake_mode: Any) -> Artifact:
    """Compile a graph without a gate: its stages, or the whole if it has none."""
    if _calls_modules(gm):
        lower(gm, config, fake_mode)
        forward: Artifact = gm.forward
        return forward
    return _artifact(gm, config, fake_mode, {})


def _artifact(
    gm: Any, config: Config, fake_mode: Any, artifacts: dict[fx.GraphModule, Artifact]
) -> Artifact:
    known = artifacts.get(gm)
    if known is None:
        log.info("compiling %s with %s", type(gm).__name__, config.inner)
        step(type(gm).__name__)
        with _own_tracing_context(fake_mode):
            known = compile_graph(gm, _example_inputs(gm, fake_mode), config)
        artifacts[gm] = known
    return known


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
