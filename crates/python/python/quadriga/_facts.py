"""What a loaded model says of itself."""

from __future__ import annotations

import json
from typing import Any

from ._quadriga import ModelCore

__all__ = ["ModelFacts"]


class ModelFacts:
    """Names, sizes, memory and plan of a loaded model."""

    def __init__(self, core: ModelCore) -> None:
        self._core = core
        self._facts: dict[str, Any] = json.loads(core.facts())

    @property
    def name(self) -> str:
        """The file's name without its extension."""
        return self._facts["name"]

    @property
    def path(self) -> str:
        """The file."""
        return self._facts["path"]

    @property
    def architecture(self) -> str:
        """The architecture, such as `llama`."""
        return self._facts["architecture"]

    @property
    def is_encoder(self) -> bool:
        """Whether the model computes embeddings only."""
        return self._facts["encoder"]

    @property
    def n_ctx(self) -> int:
        """Context size of a request, in tokens."""
        return self._facts["n_ctx"]

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return self._facts["n_vocab"]

    @property
    def n_embd(self) -> int:
        """Elements of a hidden state, and of an embedding."""
        return self._facts["n_embd"]

    @property
    def devices(self) -> list[str]:
        """The devices that it runs on."""
        return self._facts["devices"]

    @property
    def bos_token(self) -> int | None:
        """The beginning-of-text token."""
        return self._facts["bos"]

    @property
    def eos_token(self) -> int | None:
        """The end-of-text token."""
        return self._facts["eos"]

    @property
    def facts(self) -> dict[str, Any]:
        """Sizes, special tokens, memory of each device, and what the engine is doing."""
        return json.loads(self._core.facts())

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the file, without long arrays such as the vocabulary."""
        return json.loads(self._core.metadata())

    def plan_html(self) -> str:
        """The plan of the largest step, what runs where and what takes how many bytes, as an interactive page."""
        return self._core.picture(False)

    def plan_svg(self) -> str:
        """The same as a drawing."""
        return self._core.picture(True)
