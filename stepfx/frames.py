"""Which part of a model a graph is, where Dynamo breaks the model into several.

Dynamo splits a function at what it cannot trace: a graph up to the break, then one for the
rest, in a function of its own that resumes behind it. Where it cannot even do that it skips
the frame: the function runs as Python and the modules it calls become graphs of their own.

All that this needs of Dynamo is private and stands here (checked on torch 2.11 to 2.13).
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import fx

RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>\w+?)_at_\d+$")


@dataclass(frozen=True)
class Part:
    """The place of one graph in its model.

    Attributes:
        code: file and function that the graph comes from; equal for all parts of a function.
        is_resumed: whether it begins behind a graph break.
        broken_at: the line that ends it and why, or None where the function returns.
        called_from: the line of a skipped frame that calls what the graph is of, or None.
        model: the module that was compiled, or None for a function.
    """

    code: tuple[str, str] | None
    is_resumed: bool
    broken_at: str | None
    called_from: str | None
    model: torch.nn.Module | None

    @property
    def is_whole(self) -> bool:
        """Whether the graph is all of what was compiled."""
        return not (self.is_resumed or self.broken_at or self.called_from)

    @property
    def is_end(self) -> bool:
        """Whether the graph is the last of the model's own function."""
        return self.is_resumed and not (self.broken_at or self.called_from)

    def __str__(self) -> str:
        """Return where the model is broken, for a warning."""
        if self.called_from:
            return (
                f"Dynamo could not trace the function around {self.called_from} and runs it "
                "as Python; TORCH_LOGS=graph_breaks shows the line that it stops at"
            )
        if self.broken_at:
            return f"a graph break at {self.broken_at}"
        return "a graph break before it"


def part_of(gm: fx.GraphModule) -> Part:
    """Say which part of its model `gm` is; to be asked while Dynamo calls the backend."""
    ending = getattr(gm, "compile_subgraph_reason", None)
    frames = ending.user_stack if ending is not None else []
    compiled = _compiled_code()
    code, is_resumed, broken_at = None, False, None
    if compiled is not None:
        code, is_resumed = _name(compiled), RESUMED.match(compiled.co_name) is not None
    if ending is not None and ending.graph_break:
        why = str(ending.reason).strip().splitlines()[0]
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown line"
        broken_at = f"{place} ({why})"
    stack = _stack()
    calls = [frame for frame in stack if frame.f_code is _CALL]
    model = calls[-1].f_locals.get("self") if calls else None
    own = [f for f in stack if not f.f_code.co_filename.startswith(_TORCH)]
    nested = len(calls) > 1
    if model is not None:
        # A decorator around the model's forward may run as Python; what forward itself calls
        # as Python is nested.
        forward = _name(inspect.unwrap(type(model).forward).__code__)
        nested = nested or (code != forward and any(_name(f.f_code) == forward for f in own))
    called_from = f"{own[0].f_code.co_filename}:{own[0].f_lineno}" if nested else None
    return Part(code, is_resumed, broken_at, called_from, model)


_CALL = torch.nn.Module._call_impl.__code__
_DYNAMO = str(Path("torch", "_dynamo", "convert_frame"))
_TORCH = str(Path(torch.__file__).parent)


def _compiled_code() -> CodeType | None:
    """Return the code that Dynamo is compiling; the stack of a break has other names."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and _DYNAMO in frame.f_code.co_filename:
            code = frame.f_locals.get("code")
            return code if isinstance(code, CodeType) else None
        frame = frame.f_back
    return None


def _stack() -> list[FrameType]:
    """Return the frames from Dynamo out to where the compiled object was called."""
    frames: list[FrameType] = []
    # Up to here it is the backend; Dynamo called it.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frames.append(frame)
        frame = frame.f_back
    return frames


def _name(code: CodeType) -> tuple[str, str]:
    """Return file and function of a piece of code, whether it is resumed or not."""
    found = RESUMED.match(code.co_name)
    return code.co_filename, found["name"] if found else code.co_name
