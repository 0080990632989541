"""The tokenizer of a `Llama` as an object, as llama-cpp-python has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._llama_types import Tokens
from ._absent import absent

if TYPE_CHECKING:
    from .llama import Llama

__all__ = ["BaseLlamaTokenizer", "LlamaTokenizer"]

__getattr__ = absent(__name__, {"LlamaHFTokenizer": "tokenizers of transformers are not supported: the model's own is used"})


class BaseLlamaTokenizer:
    """What a tokenizer has."""

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """The tokens of a text in UTF-8."""
        raise NotImplementedError

    def detokenize(self, tokens: Tokens, prev_tokens: Tokens | None = None, special: bool = False) -> bytes:
        """The bytes of tokens."""
        raise NotImplementedError


class LlamaTokenizer(BaseLlamaTokenizer):
    """The tokenizer of a model."""

    def __init__(self, llama: Llama) -> None:
        self._llama = llama

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        return self._llama.tokenize(text, add_bos, special)

    def detokenize(self, tokens: Tokens, prev_tokens: Tokens | None = None, special: bool = False) -> bytes:
        return self._llama.detokenize(tokens, prev_tokens, special)

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """The tokens of a text."""
        return self.tokenize(text.encode("utf-8", "ignore"), add_bos, special)

    def decode(self, tokens: Tokens) -> str:
        """The text of tokens, without bytes that are no UTF-8."""
        return self.detokenize(tokens).decode("utf-8", "ignore")

    @classmethod
    def from_ggml_file(cls, path: str, **arguments: Any) -> LlamaTokenizer:
        """The tokenizer of a file, whose model is loaded for it."""
        from .llama import Llama

        return cls(Llama(model_path=path, **arguments))
