"""Bars for what takes longer than two seconds; nothing where nobody watches.

A bar appears on stderr if that is a terminal, and goes when the work is done. With
STEPFX_PROGRESS=0 there is none.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from stepfx.config import shows_progress

DELAY = 2.0  # seconds before a bar appears


class Bar:
    """A bar that waits before it shows itself.

    Args:
        text: what is done.
        total: how many steps there are; None for a spinner.
        console: where it is drawn; None for stderr.
    """

    def __init__(self, text: str, total: int | None, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        counted = (BarColumn(), MofNCompleteColumn()) if total else ()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), *counted)
        self._progress = Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True
        )
        self._text, self._total, self._done = text, total, 0
        self._task = self._progress.add_task(text, total=total)
        self._lock = threading.Lock()
        self._ended = self._is_shown = False
        self._timer = threading.Timer(DELAY, self._show)
        self._timer.daemon = True
        if console.is_terminal and shows_progress():
            self._timer.start()

    def _show(self) -> None:
        with self._lock:
            if not self._ended:
                self._progress.start()
                self._is_shown = True

    def step(self, what: str) -> None:
        """Say which step begins: `compiling part 3 of 5: list_0_block`."""
        text = f"{self._text} {self._done + 1} of {self._total}: {what}"
        self._progress.update(self._task, description=text, completed=self._done)
        self._done += 1

    def close(self) -> None:
        """Take the bar away."""
        with self._lock:
            self._ended = True
            self._timer.cancel()
            if self._is_shown:
                self._progress.stop()


_bar: ContextVar[Bar | None] = ContextVar("stepfx_bar", default=None)


@contextlib.contextmanager
def counting(text: str, total: int) -> Iterator[Bar]:
    """Show a bar of `total` steps while the block runs; `step` moves it."""
    bar = Bar(text, total)
    token = _bar.set(bar)
    try:
        yield bar
    finally:
        _bar.reset(token)
        bar.close()


def step(what: str) -> None:
    """Begin the next step of the bar of the block around, if there is one."""
    bar = _bar.get()
    if bar is not None:
        bar.step(what)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show a spinner while the block runs."""
    bar = Bar(text, None)
    try:
        yield
    finally:
        bar.close()
