"""Dynamo settings that help a model trace: tried, and taken back where they harm.

With `capture_scalar_outputs` and `capture_dynamic_output_shape_ops` Dynamo traces through
`.item()`, `nonzero` and boolean masks. That brings HunyuanVideo 1.5, Framepack or Mochi into
one or two graphs, which else come to a backend block by block; other models cannot be traced
with them at all. So each model is compiled with them first, and without them from then on if
Dynamo fails, or if no gate was found with them but would be without.

The settings hold for the calls of the one model, in the thread that calls it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from stepfx.backend import Backend
from stepfx.errors import ConfigError
from stepfx.survey import Survey

log = logging.getLogger(__name__)

# Names of torch._dynamo.config, checked on torch 2.11 to 2.13. `patch` is a context of the
# calling thread on 2.13.
FLAGS = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
FAILURES = (torch._dynamo.exc.TorchDynamoException, GuardOnDataDependentSymNode)


def with_flags() -> contextlib.AbstractContextManager[None]:
    """Return a context in which this thread traces with the flags."""
    patched: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(FLAGS)
    return patched


class Mode(Enum):
    """How a model is traced."""

    FLAGS = "with the flags"
    SURVEY = "without them, to see whether that finds a gate"
    PLAIN = "without the flags"


class FlaggedCall:
    """Calls a compiled module with the Dynamo flags that help it.

    Args:
        model: the module.
        backend: what compiles it.
        compiled: compiles `model` with a given backend; asked for each way of tracing once.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        backend: Backend,
        compiled: Callable[[Any], Callable[..., Any]],
    ) -> None:
        self.model, self.backend, self.compiled = model, backend, compiled
        self.mode = Mode.FLAGS
        self._call = compiled(backend)
        self._is_judged = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        if self.mode is Mode.PLAIN or torch.compiler.is_compiling():
            return self._call(*args, **kwargs)
        if self.mode is Mode.SURVEY:
            return self._survey(*args, **kwargs)
        try:
            with with_flags():
                result = self._call(*args, **kwargs)
        except Exception as error:
            # Code that Inductor wrote may fail, too; after a good call only Dynamo's errors
            # are about tracing.
            if self._is_judged and not isinstance(error, FAILURES):
                raise
            if isinstance(error, ConfigError):
                raise
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.info("%s is traced without flags: %s", type(self.model).__name__, first)
            self._take_back()
            return self._call(*args, **kwargs)
        if not self._is_judged:
            self._is_judged = True
            # Only where nothing was found: Dynamo skips for good what it cannot trace without
            # the flags, so a look is not free.
            if self.backend.gated_of_broken(self.model) == 0:
                self.mode = Mode.SURVEY
        return result

    def _survey(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call as it is, looking at the graphs without the flags."""
        survey = Survey(self.backend.config)
        result = self.compiled(survey)(*args, **kwargs)
        if survey.finds_gate:
            self._take_back()
        else:
            self.mode = Mode.FLAGS
        return result

    def _take_back(self) -> None:
        self.mode = Mode.PLAIN
        # Another backend object has its own graphs in Dynamo's cache.
        self._call = self.compiled(self.backend.copy())
