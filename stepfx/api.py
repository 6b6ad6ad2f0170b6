"""The functions of the public contract that take a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from stepfx.backend import (
    Backend,
    default_backend,
    rewrite,
    why_not_gated,
    why_not_this_part,
)
from stepfx.config import Config
from stepfx.frames import part_of
from stepfx.pipeline import PipelineResult
from stepfx.report import Report, report_of
from stepfx.requests import Branch, Request
from stepfx.session import SESSIONS


@dataclass(frozen=True)
class BranchStats:
    """What happened in one CFG branch of a request.

    Attributes:
        schedule: one digit a denoising step, 1 computed and 0 reused.
        scores: the relative change at each step; None where none was measured.
        computed: steps that ran every block.
        reused: steps that skipped blocks.
        bytes_kept: bytes of tensors kept for this branch now.
    """

    schedule: str
    scores: tuple[float | None, ...]
    computed: int
    reused: int
    bytes_kept: int


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

    Raises:
        ConfigError: an option is unknown, has a bad value or contradicts another.
    """
    backend = Backend(**({"mode": mode} if mode else {}), **config)
    return torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)


class _TraceDoneError(Exception):
    """Ends a trace once the whole model was seen."""


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Trace one call of `model` and report its block lists and where the gate would sit.

    Nothing is compiled, and a model whose first graph can be gated is not run. Of others
    each graph is run as it is, once, to reach the graphs behind it. The passes are those of
    `backend="stepfx"` in this process (`stepfx.configure`, the environment).
    """
    options = default_backend().config
    config = replace(options, cache=options.cache or Config.cache)
    results: list[PipelineResult | str] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        result = rewrite(gm, config, keep=True)
        reason = why_not_gated(inputs) or why_not_this_part(part_of(gm), result)
        results.append(result)
        if reason is not None:
            result.notes.pop("gate", None)
            results[-1] = _with_reason(result, reason)
        if len(results) == 1 and "gate" in result.notes:
            raise _TraceDoneError
        forward: Callable[..., Any] = gm.forward
        return forward

    target = getattr(model, "_orig_mod", model)
    try:
        with torch.no_grad():
            torch.compile(target, backend=backend)(*args, **kwargs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, _TraceDoneError):
            raise
    runs = stats(target) if isinstance(target, torch.nn.Module) else ()
    return report_of(results, runs, type(target).__name__)


def _with_reason(result: PipelineResult, reason: str) -> PipelineResult:
    first = result.records[0]
    result.records[0] = replace(first, misses=(reason, *first.misses))
    return result


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
    kept = branch.kept.tensors() if branch.kept is not None else []
    return BranchStats(
        "".join("1" if computed else "0" for computed in branch.schedule),
        tuple(branch.scores),
        branch.schedule.count(True),
        branch.reused,
        sum(tensor.numel() * tensor.element_size() for tensor in kept),
    )
