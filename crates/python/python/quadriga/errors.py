"""The exceptions of this package. All of them are an `Error`."""

from __future__ import annotations

__all__ = [
    "Closed",
    "ContextFull",
    "DeviceError",
    "Error",
    "GraphError",
    "HubError",
    "InvalidRequest",
    "ModelError",
    "ModelNotFound",
    "OutOfMemory",
    "QueueFull",
    "StateError",
]


class Error(Exception):
    """Something failed. The message names it and says what to do about it."""


class InvalidRequest(Error, ValueError):
    """An argument, an option or a message has a wrong value."""


class ContextFull(InvalidRequest):
    """The prompt is longer than the context."""


class QueueFull(Error):
    """Too many requests are waiting."""


class OutOfMemory(Error, MemoryError):
    """A device, or the budget for it, has too little memory."""


class ModelError(Error, ValueError):
    """The model's file is damaged, incomplete or not supported."""


class ModelNotFound(ModelError, FileNotFoundError):
    """There is no such file."""


class HubError(Error, OSError):
    """A model could not be downloaded."""


class DeviceError(Error, RuntimeError):
    """A device cannot be used, or was lost."""


class GraphError(Error, ValueError):
    """A graph is wrong, or was given the wrong data."""


class StateError(Error, ValueError):
    """A saved KV cache or state is damaged, or does not belong here."""


class Closed(Error, RuntimeError):
    """The model or session was closed, or the process was forked since it was made."""
