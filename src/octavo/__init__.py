"""Octavo serves large language models.

Names are imported on first use, so that ``octavo --help`` loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.entrypoints.llm import LLM
    from octavo.errors import (
        BatchRefusedError,
        ConfigError,
        EngineDeadError,
        InvalidRequestError,
        ModelLoadError,
        OctavoError,
        QueueFullError,
    )
    from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from octavo.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BatchRefusedError",
    "CompletionOutput",
    "ConfigError",
    "EngineDeadError",
    "InvalidRequestError",
    "Logprob",
    "ModelLoadError",
    "OctavoError",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]

_HOME = {
    "LLM": "octavo.entrypoints.llm",
    "BatchRefusedError": "octavo.errors",
    "CompletionOutput": "octavo.outputs",
    "ConfigError": "octavo.errors",
    "EngineDeadError": "octavo.errors",
    "InvalidRequestError": "octavo.errors",
    "Logprob": "octavo.outputs",
    "ModelLoadError": "octavo.errors",
    "OctavoError": "octavo.errors",
    "QueueFullError": "octavo.errors",
    "RequestMetrics": "octavo.outputs",
    "RequestOutput": "octavo.outputs",
    "RequestOutputKind": "octavo.sampling_params",
    "SamplingParams": "octavo.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
