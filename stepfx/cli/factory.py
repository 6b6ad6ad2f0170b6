"""MODULE:FACTORY on the command line: a function that makes a model and one call of it.

# my_model.py
def build():
model = MyTransformer().eval()
return model, {"hidden_states": torch.randn(1, 64, 16), "timestep": torch.tensor([500.0])}

stepfx explain my_model:build        stepfx explain path/to/my_model.py:build
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from stepfx.cli.command import CommandError, Exit

RETURNS = "(model, kwargs), (model, args) or (model, args, kwargs)"


@dataclass(frozen=True)
class ModelCall:
    """A model and the arguments of one call."""

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def load(spec: str) -> ModelCall:
    """Import and call a factory; what goes wrong is said with the factory's own line."""
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name:
        raise CommandError(
            f"{spec!r} is not MODULE:FACTORY",
            f"write my_model:build or path/to/my_model.py:build; the factory returns {RETURNS}",
            Exit.USAGE,
        )
    factory = _attribute(_module(place), place, name)
    try:
        made = factory()
    except Exception as error:
        raise CommandError(
            f"{spec} raised {type(error).__name__}: {error}{_where(error)}"
        ) from error
    return _checked(spec, made)


def _module(place: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _module_of_file(Path(place))
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    except CommandError:
        raise
    except ModuleNotFoundError as error:
        if error.name not in (place, place.split(".")[0]):
            raise CommandError(
                f"{place} needs the module {error.name!r}, which is not installed"
            ) from error
        raise CommandError(
            f"no module {place!r} was found in {os.getcwd()} or on Python's path",
            "give a file instead: path/to/file.py:FACTORY",
            Exit.USAGE,
        ) from error
    except Exception as error:
        raise CommandError(
            f"importing {place} raised {type(error).__name__}: {error}{_where(error)}"
        ) from error


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CommandError(f"there is no file {path}", code=Exit.USAGE)
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look a class's module up
    spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, place: str, name: str) -> Callable[[], Any]:
    factory = getattr(module, name, None)
    if factory is None:
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"did you mean {place}:{near[0]}?" if near else ""
        raise CommandError(f"{place} has no {name!r}", hint, Exit.USAGE)
    if not callable(factory) or isinstance(factory, torch.nn.Module):
        raise CommandError(
            f"{place}:{name} is a {type(factory).__name__}, not a function",
            f"write a function without arguments that returns {RETURNS}",
            Exit.USAGE,
        )
    found: Callable[[], Any] = factory
    return found


def _checked(spec: str, made: Any) -> ModelCall:
    match made:
        case torch.nn.Module(), dict():
            return ModelCall(made[0], (), made[1])
        case torch.nn.Module(), tuple() | list():
            return ModelCall(made[0], tuple(made[1]))
        case torch.nn.Module(), torch.Tensor():
            return ModelCall(made[0], (made[1],))
        case torch.nn.Module(), tuple() | list(), dict():
            return ModelCall(made[0], tuple(made[1]), made[2])
    names = [type(x).__name__ for x in (made if isinstance(made, tuple) else (made,))]
    kind = ", ".join(names)
    hint = f"it must return {RETURNS}: the model and the inputs of one call"
    raise CommandError(f"{spec} returned {kind}", hint, Exit.USAGE)


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    last = frames[-1]
    return f"\n  at {last.filename}:{last.lineno}: {last.line}"
