"""Models that tests share: the default one, and a small one with random weights."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import quadriga

# A shell without job control starts programs in the background deaf to Ctrl-C, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model() -> Iterator[quadriga.Model]:
    """SmolLM2 135M, which is downloaded once into the cache folder."""
    with quadriga.Model(n_ctx=1024, n_parallel=8) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, made by the command."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    command = [sys.executable, "-m", "quadriga", "synth", "-o", str(path), "--context", "2048"]
    subprocess.run(command, check=True, capture_output=True)
    return path


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> Iterator[quadriga.Model]:
    with quadriga.Model(tiny_path, n_ctx=1024, n_parallel=8) as loaded:
        yield loaded
