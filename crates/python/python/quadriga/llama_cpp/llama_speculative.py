"""Speculative decoding, as llama-cpp-python names it."""

from __future__ import annotations

__all__ = ["LlamaPromptLookupDecoding"]


class LlamaPromptLookupDecoding:
    """Guesses tokens ahead in text that repeats: the argument `draft_model` of `Llama`.

    The length of the patterns that are looked for is chosen by the engine; `max_ngram_size` is accepted and not used.
    """

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        self.max_ngram_size = max_ngram_size
        self.num_pred_tokens = num_pred_tokens
