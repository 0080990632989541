"""Runs language models and tensor graphs on several processors at once.

>>> import quadriga
>>> model = quadriga.Model("model.gguf")                       # doctest: +SKIP
>>> print(model.chat("Why is the sky blue?", max_tokens=100))  # doctest: +SKIP

A model is a GGUF file or `ORG/REPO:QUANT` of Hugging Face's hub; without a name it is a small one.
"""

from __future__ import annotations

from . import errors, graph
from ._answers import Completion, Stream, ToolCall, Usage
from ._logits import LogitsProcessor
from ._model import Model
from ._quadriga import VERSION as __version__
from ._quadriga import Piece
from .errors import (
    Closed,
    ContextFull,
    DeviceError,
    Error,
    GraphError,
    HubError,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    OutOfMemory,
    QueueFull,
    StateError,
)

__all__ = [
    "Closed",
    "Completion",
    "ContextFull",
    "DeviceError",
    "Error",
    "GraphError",
    "HubError",
    "InvalidRequest",
    "LogitsProcessor",
    "Model",
    "ModelError",
    "ModelNotFound",
    "OutOfMemory",
    "Piece",
    "QueueFull",
    "StateError",
    "Stream",
    "ToolCall",
    "Usage",
    "__version__",
    "errors",
    "graph",
]
