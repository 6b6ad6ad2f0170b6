"""Step caching for a diffusers pipeline, and without a trace of it again.

    stepfx.enable(pipe, threshold=0.1)
    image = pipe("a cat", num_inference_steps=28).images[0]
    stepfx.disable(pipe)

Each transformer is compiled in place, as by `torch.nn.Module.compile`: its class, methods,
hooks and state stay. A call of the pipeline is one request, whose number of steps is read
from the scheduler. Nothing is written to the pipeline but its class: a subclass of the same
name whose `__call__` opens the request.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from stepfx.backend import Backend
from stepfx.dynamo_flags import FlaggedCall
from stepfx.errors import ConfigError
from stepfx.labels import unwatch, watch
from stepfx.requests import Scope, current_scope, request
from stepfx.session import SESSIONS

Components = Iterable[str] | Mapping[str, Mapping[str, Any]]

# Where diffusers keeps its denoising transformers, and what pipelines call them.
_FAMILY = "diffusers.models.transformers."
_NAMES = ("transformer", "prior", "denoiser", "dit")


def enable(
    pipe: Any,
    *configurations: Any,
    components: Components | None = None,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **config: Any,
) -> Any:
    """Compile every transformer of a diffusers pipeline in place; return `pipe`.

    Args:
        pipe: a pipeline, or a single module.
        *configurations: configuration objects, as `stepfx.Backend` takes them.
        components: names of the components to compile, or a dictionary of names and the
            options that each has for its own (`{"transformer_2": {"threshold": 0.1}}`); None
            for every transformer.
        mode: an Inductor mode.
        fullgraph: as `torch.compile` takes it.
        dynamic: as `torch.compile` takes it.
        **config: options of `stepfx.Config`.

    Enabled again, a pipeline has the new options alone. Transformers that two pipelines share
    are compiled once, with the options given last.

    Raises:
        ConfigError: an option is unknown or bad, a component is not there or is no module, or
            the pipeline has no transformer.
    """
    own = {"mode": mode} if mode else {}
    chosen = _components(pipe, components)
    # All options are checked before anything is changed.
    backends = {
        name: Backend(*configurations, **{**own, **config, **options})
        for name, (_, options) in chosen.items()
    }
    disable(pipe)
    models = []
    for name, (model, _) in chosen.items():
        _compile_in_place(model, backends[name], fullgraph, dynamic)
        models.append(model)
    if not isinstance(pipe, torch.nn.Module):
        _open_requests(pipe, models)
    return pipe


def disable(pipe: Any) -> Any:
    """Undo `enable`; forget what is kept; return `pipe`. Without `enable` nothing happens."""
    models = [pipe] if isinstance(pipe, torch.nn.Module) else []
    pipeline = _PIPELINES.pop(_Key(pipe), None)
    if pipeline is not None:
        pipe.__class__ = pipeline.cls
        models = [model for ref in pipeline.models if (model := ref()) is not None]
    for model in models:
        if model in _MODELS:
            before = _MODELS.pop(model)
            del model._compiled_call_impl
            if before is not None:
                model._compiled_call_impl = before
            unwatch(model)
        for session in SESSIONS.holding(model.parameters()):
            with session.lock:
                session.reset()
    return pipe


class _Key:
    """A pipeline by identity: not every pipeline can be hashed."""

    def __init__(self, pipe: Any) -> None:
        self.id = id(pipe)

    def __hash__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.id == self.id


@dataclass(frozen=True)
class _Pipeline:
    """What a pipeline was before, and what was compiled of it."""

    cls: type
    models: list[weakref.ref[torch.nn.Module]]


_PIPELINES: dict[_Key, _Pipeline] = {}
# Each compiled module with what stood in its place before.
_MODELS: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class _Run:
    """One call of a pipeline."""

    pipe: Any
    scope: Scope
    called: set[int] = field(default_factory=set)
    timesteps: Any = None

    def before(self, model: torch.nn.Module) -> None:
        """Learn how many steps `model` has before it, when it is called first.

        A scheduler that was set again begins another run of denoising: a chunk of a long
        video, a second pass.
        """
        scheduler = getattr(self.pipe, "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is not self.timesteps:
            if self.called:
                self.scope.renew()
            self.timesteps = timesteps
            self.called.clear()
        if id(model) not in self.called:
            is_first = not self.called
            self.called.add(id(model))
            self.scope.steps = _steps_left(scheduler, is_first)


_run: ContextVar[_Run | None] = ContextVar("stepfx_run", default=None)


def _steps_left(scheduler: Any, is_first: bool) -> int | None:
    """Return how many times the model will be called, or None if that is not known.

    Some schedulers do not count their steps: those are known at the first of a run only.
    """
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None:
        return None
    done = getattr(scheduler, "step_index", None)
    if done is None:
        if not is_first and not hasattr(scheduler, "step_index"):
            return None
        done = getattr(scheduler, "begin_index", None) or 0
    return left if (left := len(timesteps) - done) > 0 else None


@contextlib.contextmanager
def _running(pipe: Any) -> Iterator[None]:
    """Make what happens inside one request, unless the caller has opened one."""
    given = current_scope()
    with contextlib.nullcontext() if given is not None else request():
        scope = current_scope()
        assert scope is not None
        # Steps that the caller has given stay.
        run = _Run(pipe, scope) if given is None or scope.steps is None else None
        token = _run.set(run)
        try:
            yield
        finally:
            _run.reset(token)


def _open_requests(pipe: Any, models: list[torch.nn.Module]) -> None:
    cls = type(pipe)

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _running(self):
            return cls.__call__(self, *args, **kwargs)

    names = {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__}
    # Pipelines save and load each other by the name of their class.
    pipe.__class__ = type(cls.__name__, (cls,), {**names, "__qualname__": cls.__qualname__})
    key = _Key(pipe)
    _PIPELINES[key] = _Pipeline(cls, [weakref.ref(model) for model in models])
    weakref.finalize(pipe, _PIPELINES.pop, key, None)


class _Call:
    """What is called in place of a module that is compiled in place."""

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any]) -> None:
        self._model, self._forward = weakref.ref(model), forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run, model = _run.get(), self._model()
        if run is not None and model is not None:
            run.before(model)
        return self._forward(*args, **kwargs)


def _compile_in_place(
    model: torch.nn.Module, backend: Backend, fullgraph: bool, dynamic: bool | None
) -> None:
    def compiled_with(other: Any) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(
            model._call_impl, backend=other, fullgraph=fullgraph, dynamic=dynamic
        )
        return compiled

    _MODELS.setdefault(model, model._compiled_call_impl)
    # What `torch.nn.Module.compile` sets; neither deepcopy nor pickle takes it along.
    model._compiled_call_impl = _Call(model, FlaggedCall(model, backend, compiled_with))
    watch(model)


def _components(
    pipe: Any, wanted: Components | None
) -> dict[str, tuple[torch.nn.Module, Mapping[str, Any]]]:
    """Return the modules to compile, by name, with the options that each has for its own."""
    if isinstance(pipe, torch.nn.Module):
        if wanted is not None:
            raise ConfigError("option 'components' names parts of a pipeline; this is a module")
        return {type(pipe).__name__: (pipe, {})}
    found = getattr(pipe, "components", None)
    if not isinstance(found, Mapping):
        raise ConfigError(
            "enable: expected a diffusers pipeline or a torch.nn.Module, not a "
            f"{type(pipe).__name__}"
        )
    modules = {k: v for k, v in found.items() if isinstance(v, torch.nn.Module)}
    listed = ", ".join(map(repr, modules)) or "none"
    if wanted is None:
        chosen: dict[str, tuple[torch.nn.Module, Mapping[str, Any]]]
        chosen = {k: (v, {}) for k, v in modules.items() if _is_transformer(k, v)}
        if not chosen:
            raise ConfigError(
                f"enable: {type(pipe).__name__} has no transformer; its modules are {listed}; "
                "name those to compile with option 'components'"
            )
        return chosen
    if isinstance(wanted, str):
        wanted = [wanted]
    for name in wanted:
        if name not in modules:
            near = difflib.get_close_matches(str(name), modules, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"option 'components' names {name!r}, but the modules of "
                f"{type(pipe).__name__} are {listed}{hint}"
            )
    options = wanted if isinstance(wanted, Mapping) else {}
    return {name: (modules[name], options.get(name, {})) for name in wanted}


def _is_transformer(name: str, module: torch.nn.Module) -> bool:
    return name.startswith(_NAMES) or type(module).__module__.startswith(_FAMILY)
