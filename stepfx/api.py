"""The functions of the public contract that take a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from stepfx.backend import Backend, default_backend
from stepfx.config import Config
from stepfx.dynamo_flags import FlaggedCall, with_flags
from stepfx.report import Report, report_of
from stepfx.requests import Branch, Request
from stepfx.session import SESSIONS
from stepfx.survey import Survey

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BranchStats:
    """What happened in one CFG branch of a request.

    Attributes:
        schedule: one digit a denoising step, 1 computed and 0 reused.
        scores: the relative change at each step; None where none was measured.
        computed: steps that ran every block.
        reused: steps that skipped blocks.
        bytes_kept: bytes of tensors kept for this branch now.
        skipped_blocks: how many blocks were skipped at each step.
    """

    schedule: str
    scores: tuple[float | None, ...]
    computed: int
    reused: int
    bytes_kept: int
    skipped_blocks: tuple[int, ...]


@dataclass(frozen=True)
class RequestStats:
    """What happened in one request; `branches` in the order they first appeared."""

    name: str
    branches: dict[str, BranchStats]


def compile(
    model: torch.nn.Module,
    *,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **config: Any,
) -> Any:
    """Compile `model` with a backend configured by `config` (see `stepfx.Config`).

    Like `torch.compile(model, backend=stepfx.Backend(**config))`, and tries the Dynamo
    settings that bring more of a model into one graph (see `stepfx.dynamo_flags`).

    Raises:
        ConfigError: an option is unknown, has a bad value or contradicts another.
    """
    backend = Backend(**({"mode": mode} if mode else {}), **config)
    compiled: Any = torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
    if isinstance(model, torch.nn.Module) and not hasattr(model, "_initialize_hook"):

        def compiled_with(other: Any) -> Callable[..., Any]:
            again: Any = torch.compile(
                model, backend=other, fullgraph=fullgraph, dynamic=dynamic
            )
            forward: Callable[..., Any] = again.forward
            return forward

        # Hooks of the model, its attributes and its state stay with torch's own wrapper.
        compiled.forward = FlaggedCall(model, backend, compiled_with)
    return compiled


class _TraceDoneError(Exception):
    """Ends a trace once the whole model was seen."""


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Trace one call of `model` and report its block lists and where the gate would sit.

    Nothing is compiled, and a model whose first graph can be gated is not run. Of others
    each graph is run as it is, to reach the graphs behind it: once with the Dynamo settings
    that `stepfx.compile` tries, once without them. The passes are those of
    `backend="stepfx"` in this process (`stepfx.configure`, the environment).
    """
    options = default_backend().config
    config = replace(options, cache=options.cache or Config.cache)
    target = getattr(model, "_orig_mod", model)
    # With the flags first and, where they find no gate, without, as stepfx.compile does. Not
    # both at once: Dynamo remembers the frames that it could not trace.
    survey = _look_with_flags(target, config, args, kwargs)
    if survey is None or not survey.finds_gate:
        plain = _look(target, config, args, kwargs)
        survey = survey if survey is not None and not plain.finds_gate else plain
    runs = stats(target) if isinstance(target, torch.nn.Module) else ()
    report = report_of(survey.results, runs, type(target).__name__)
    return replace(report, needs_flags=survey.finds_gate and survey.depends_on_data)


def _look(
    target: Callable[..., Any], config: Config, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Survey:
    """Trace one call, up to a first graph with a gate."""
    survey = Survey(config, keep=True)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        forward = survey(gm, inputs)
        if len(survey.results) == 1 and survey.finds_gate:
            raise _TraceDoneError
        return forward

    try:
        with torch.no_grad():
            torch.compile(target, backend=backend)(*args, **kwargs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, _TraceDoneError):
            raise
    return survey


def _look_with_flags(
    target: Callable[..., Any], config: Config, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Survey | None:
    """Trace as `stepfx.compile` does; return None if Dynamo cannot."""
    try:
        with with_flags():
            return _look(target, config, args, kwargs)
    except Exception as error:  # the model's own errors come again without the flags
        log.info("not traced with flags: %s", error)
        return None


def stats(model: torch.nn.Module) -> list[RequestStats]:
    """Return what happened in the requests of `model`, oldest first."""
    sessions = SESSIONS.holding(model.parameters())
    return [_request_stats(r) for session in sessions for r in session.requests]


def reset(model: torch.nn.Module) -> None:
    """Forget everything kept for `model`, its statistics included."""
    for session in SESSIONS.holding(model.parameters()):
        with session.lock:
            session.reset()


def _request_stats(request: Request) -> RequestStats:
    branches = {branch.name: _branch_stats(branch) for branch in request.branches}
    return RequestStats(request.name, branches)


def _branch_stats(branch: Branch) -> BranchStats:
    states = [state.kept for state in branch.gates if state.kept is not None]
    kept = [tensor for state in states for tensor in state.tensors()]
    return BranchStats(
        "".join("1" if computed else "0" for computed in branch.schedule),
        tuple(branch.scores),
        branch.schedule.count(True),
        branch.reused,
        sum(tensor.numel() * tensor.element_size() for tensor in kept),
        tuple(branch.skipped),
    )
