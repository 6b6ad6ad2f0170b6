"""What a diffusers pipeline says of its calls: the names of its cache contexts.

    with pipe.transformer.cache_context("uncond"):
        noise_uncond = pipe.transformer(...)

The name sets a call apart from calls of other names; what else it takes to belong to a
branch stays as it is, so a name that is used twice in a step merges nothing.

diffusers tells only its own hooks of the name. While models are watched, its method is
wrapped (checked on diffusers 0.42.1).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

_label: ContextVar[str | None] = ContextVar("stepfx_label", default=None)
_watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_unwrapped: list[Callable[..., Any]] = []


def current_label() -> str | None:
    """Return the name of the innermost open cache context of a watched model."""
    return _label.get()


def watch(model: torch.nn.Module) -> None:
    """Take note of the cache contexts of `model` from now on."""
    _watched.add(model)
    mixin = _mixin()
    if mixin is None or _unwrapped:
        return
    original = mixin.cache_context
    _unwrapped.append(original)

    @functools.wraps(original)
    @contextlib.contextmanager
    def cache_context(self: Any, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        if self not in _watched:
            with original(self, name, *args, **kwargs):
                yield
            return
        token = _label.set(name)
        try:
            with original(self, name, *args, **kwargs):
                yield
        finally:
            _label.reset(token)

    mixin.cache_context = cache_context


def unwatch(model: torch.nn.Module) -> None:
    """Stop watching `model`; with the last one diffusers has its own method back."""
    _watched.discard(model)
    if not _watched and _unwrapped:
        _mixin().cache_context = _unwrapped.pop()


def _mixin() -> Any:
    try:
        from diffusers.models.cache_utils import CacheMixin
    except ImportError:
        return None
    return CacheMixin if hasattr(CacheMixin, "cache_context") else None
