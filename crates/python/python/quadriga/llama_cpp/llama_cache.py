"""Caches of prompts, as llama-cpp-python names them."""

from __future__ import annotations

from .._llama_types import BaseLlamaCache, LlamaCache, LlamaRAMCache
from ._absent import absent

__all__ = ["BaseLlamaCache", "LlamaCache", "LlamaRAMCache"]

#: Why there is no cache on disk.
DISK_CACHE = "prefixes are kept in memory; a file for them is the argument cache_file of quadriga.Model"

__getattr__ = absent(__name__, {"LlamaDiskCache": DISK_CACHE})
