"""Names of llama-cpp-python that are not here: importing one says why, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["absent"]


def absent(module: str, reasons: Mapping[str, str], prefixes: tuple[str, ...] = (), reason: str = "") -> Callable[[str], Any]:
    """A module's `__getattr__` for names with reasons, and for all that begin with some prefixes.

    A name with a reason is an `ImportError`, whose message `from … import …` shows. Names with a prefix may be submodules that
    are not imported yet, which Python finds out by an `AttributeError`.
    """

    def find(name: str) -> Any:
        if name in reasons:
            raise ImportError(f"{module} has no {name}: {reasons[name]}", name=module)
        hint = f": {reason}" if name.startswith(prefixes) else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")

    return find
