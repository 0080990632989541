"""The small classes of llama-cpp-python that programs hand to its `Llama`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "BaseLlamaCache",
    "LlamaCache",
    "LlamaGrammar",
    "LlamaRAMCache",
    "LlamaState",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MinTokensLogitsProcessor",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "Tokens",
    "scores_of",
]

Tokens = Sequence[int]
StoppingCriteria = Callable[[npt.NDArray[np.intc], npt.NDArray[np.single]], bool]
LogitsProcessor = Callable[[npt.NDArray[np.intc], npt.NDArray[np.single]], npt.NDArray[np.single]]


class LogitsProcessorList(list[LogitsProcessor]):
    """Logits processors, which are called one after another."""

    def __call__(self, input_ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class MinTokensLogitsProcessor:
    """A logits processor that bans the end of an answer before it has so many tokens."""

    def __init__(self, min_tokens: int, token_eos: int) -> None:
        self.min_tokens = min_tokens
        self.token_eos = token_eos
        self.prompt_tokens: int | None = None

    def __call__(self, input_ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        if self.prompt_tokens is None:
            self.prompt_tokens = len(input_ids)
        if len(input_ids) < self.prompt_tokens + self.min_tokens:
            scores[self.token_eos] = -np.inf
        return scores


class StoppingCriteriaList(list[StoppingCriteria]):
    """Stopping criteria: an answer ends when one of them returns true."""

    def __call__(self, input_ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]) -> bool:
        return any(criterion(input_ids, logits) for criterion in self)


@dataclass
class LlamaGrammar:
    """A grammar that answers satisfy: GBNF, or a JSON schema."""

    grammar: str | None = None
    schema: Any = None

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """A grammar in GBNF."""
        return cls(grammar=grammar)

    @classmethod
    def from_file(cls, file: str | PathLike[str], verbose: bool = True) -> LlamaGrammar:
        """A grammar in GBNF from a file."""
        with open(file, encoding="utf-8") as opened:
            return cls(grammar=opened.read())

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> LlamaGrammar:
        """JSON of a schema."""
        return cls(schema=json.loads(json_schema))


class BaseLlamaCache:
    """Prefixes of earlier prompts are always kept; this class only exists for programs that make one."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        self.capacity_bytes = capacity_bytes

    @property
    def cache_size(self) -> int:
        """Bytes in this cache: none, the engine has them."""
        return 0


class LlamaRAMCache(BaseLlamaCache):
    """The cache that programs give to `Llama.set_cache`."""


LlamaCache = LlamaRAMCache


@dataclass
class LlamaState:
    """The state of a `Llama`: its tokens, and their KV cache."""

    input_ids: npt.NDArray[np.intc]
    n_tokens: int
    llama_state: bytes = field(repr=False)
    llama_state_size: int
    seed: int | None
    #: The logits that are known, by the position of their token.
    rows: dict[int, npt.NDArray[np.single]] = field(default_factory=dict[int, npt.NDArray[np.single]], repr=False)
    n_vocab: int = 0

    @property
    def scores(self) -> npt.NDArray[np.single]:
        """The logits after each token; zeros where they are not known."""
        return scores_of(self.rows, self.n_tokens, self.n_vocab)


def scores_of(rows: dict[int, npt.NDArray[np.single]], count: int, width: int) -> npt.NDArray[np.single]:
    """Rows by position as a matrix; zeros, which take no memory before they are touched, for those that are not there."""
    scores = np.zeros((count, width), dtype=np.single)
    for position, row in rows.items():
        scores[position] = row
    return scores
