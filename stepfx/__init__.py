"""stepfx: step caching for diffusion transformers as a Dynamo backend.

torch.compile(model, backend="stepfx")
"""

from stepfx.api import BranchStats, RequestStats, compile, explain, reset, stats
from stepfx.backend import Backend, configure
from stepfx.config import Config, ConfigError, StepfxWarning
from stepfx.enable import disable, enable
from stepfx.report import BlockListReport, Report
from stepfx.requests import request

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BlockListReport",
    "BranchStats",
    "Config",
    "ConfigError",
    "Report",
    "RequestStats",
    "StepfxWarning",
    "compile",
    "configure",
    "disable",
    "enable",
    "explain",
    "request",
    "reset",
    "stats",
]
