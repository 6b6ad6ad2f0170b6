"""How stepfx speaks through PyTorch's own channels.

    TORCH_LOGS="+stepfx"       the log of what is found, rewritten and compiled
    TORCH_TRACE=folder         the graphs after each pass, for tlparse, beside those of Dynamo
                               and Inductor

The only place that uses `torch._logging`.
"""

from __future__ import annotations

from collections.abc import Callable

# Private: PyTorch has no public way to name a log or to add to its structured trace (torch
# 2.11 to 2.13). vLLM's compiler writes its graphs in the same way.
from torch._logging import _internal as torch_logs

ARTIFACT = "stepfx_"


def register() -> None:
    """Make `stepfx` a log that TORCH_LOGS and `torch._logging.set_logs` know by name.

    Where TORCH_LOGS names it, PyTorch registered it when it was imported.
    """
    if not torch_logs.log_registry.is_log("stepfx"):
        torch_logs.register_log("stepfx", "stepfx")


def is_tracing() -> bool:
    """Tell whether a structured trace is written (TORCH_TRACE)."""
    # The handler stays in place until the first record shows that it has no folder.
    return any(
        getattr(handler, "root_dir", True) is not None
        for handler in torch_logs.trace_log.handlers
    )


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add a text ("string") or JSON object ("json") to the structured trace."""
    torch_logs.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": ARTIFACT + name, "encoding": encoding},
        payload_fn=payload,
    )
