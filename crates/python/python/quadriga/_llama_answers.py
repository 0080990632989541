"""Answers in the dictionaries of llama-cpp-python."""

from __future__ import annotations

import codecs
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._answers import Completion, Stream
from ._llama_types import StoppingCriteria, Tokens
from ._model import Model
from ._quadriga import Piece

__all__ = [
    "Answered",
    "Head",
    "LogitsRows",
    "MOST_LOGPROBS",
    "Offsets",
    "Scored",
    "TopRows",
    "chat_logprobs",
    "completion_logprobs",
    "log_softmax",
    "prompt_scores",
    "scored_lists",
    "usage_of",
]

#: The most probable tokens that the engine reports beside each; more are computed here.
MOST_LOGPROBS = 20


class Head:
    """The fields that all chunks of an answer share."""

    def __init__(self, prefix: str, model: str) -> None:
        self._fields = {"id": f"{prefix}-{uuid.uuid4()}", "created": int(time.time()), "model": model}

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self._fields["id"], "object": kind, **self._fields}


class LogitsRows:
    """A logits processor that keeps the logits of each token until its piece is read, for stopping criteria."""

    def __init__(self) -> None:
        self._rows: deque[npt.NDArray[np.single]] = deque()

    def __call__(self, tokens: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> None:
        self._rows.append(np.array(logits, dtype=np.single))

    def next(self) -> npt.NDArray[np.single]:
        return self._rows.popleft() if self._rows else np.zeros(0, dtype=np.single)


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability, and the most probable tokens in its place with theirs; None for the first token of a
    prompt, which nothing predicts."""

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]] | None

    def top_with_token(self) -> list[tuple[int, float]]:
        """The most probable tokens, and the token itself in any case, as OpenAI reports them."""
        found = list(self.top or ())
        if self.logprob is not None and all(token != self.token for token, _ in found):
            found.append((self.token, self.logprob))
        return found


def log_softmax(logits: npt.ArrayLike, axis: int = -1) -> npt.NDArray[np.single]:
    """The logarithms of the probabilities that logits stand for."""
    values = np.asarray(logits, dtype=np.single)
    greatest = np.max(values, axis=axis, keepdims=True)
    shifted = values - np.where(np.isfinite(greatest), greatest, np.single(0))
    with np.errstate(divide="ignore"):
        return shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))


def _top_of(logits: npt.NDArray[np.single], count: int) -> list[tuple[int, float]]:
    """The most probable tokens with their log-probabilities, the most probable first."""
    logprobs = log_softmax(logits)
    best = np.argsort(-logprobs, kind="stable")[:count]
    return [(int(token), float(logprobs[token])) for token in best]


class TopRows:
    """A logits processor that keeps the most probable tokens of each step: more of them than the engine reports."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._rows: deque[list[tuple[int, float]]] = deque()

    def __call__(self, tokens: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> None:
        self._rows.append(_top_of(logits, self._count))

    def next(self) -> list[tuple[int, float]]:
        return self._rows.popleft() if self._rows else []


class Offsets:
    """Where tokens begin in a text, in characters: those that are parts of one begin at the same place."""

    def __init__(self, model: Model, offset: int = 0, special: bool = False) -> None:
        self._model, self._offset, self._special = model, offset, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token: int) -> int:
        before = self._offset
        self._offset += len(self._decoder.decode(self._model.detokenize_bytes([token], special=self._special)))
        return before


class Answered:
    """An answer whose tokens `note` is told at its end, with stopping criteria.

    Tokens of `ends`, which end an answer, are no part of it: neither counted, nor scored, nor noted.
    """

    def __init__(
        self,
        note: Callable[[list[int]], None],
        stream: Stream,
        criteria: StoppingCriteria | None = None,
        rows: LogitsRows | None = None,
        tops: TopRows | None = None,
        ends: Collection[int] = (),
    ) -> None:
        self._note, self._stream, self._criteria = note, stream, criteria
        self._rows, self._tops, self._ends = rows, tops, ends
        self._tokens = stream.prompt_tokens
        self._stopped: Completion | None = None
        #: The tokens of the answer so far.
        self.scored: list[Scored] = []

    def pieces(self) -> Iterator[tuple[Piece, Scored | None]]:
        """The pieces, with the token of each; the piece of an end token has none, but may have text that was held back."""
        try:
            for piece in self._stream:
                if piece.token in self._ends:
                    yield piece, None
                    continue
                top = piece.top_logprobs if self._tops is None else self._tops.next()
                scored = Scored(piece.token, piece.logprob, top)
                self._tokens.append(piece.token)
                self.scored.append(scored)
                yield piece, scored
                if self._criteria is not None:
                    tokens = np.array(self._tokens, dtype=np.intc)
                    logits = np.zeros(0, dtype=np.single) if self._rows is None else self._rows.next()
                    if self._criteria(tokens, logits):
                        self._stopped = self._stream.stopped()
                        return
        finally:
            self._note(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """The tokens of the prompt and of the answer so far."""
        return self._tokens

    @property
    def prompt_tokens(self) -> list[int]:
        """The tokens of the prompt."""
        return self._stream.prompt_tokens

    def close(self) -> None:
        """Ends the generation."""
        self._stream.close()

    def finish(self) -> Completion:
        for _ in self.pieces():
            pass
        return self._stopped or self._stream.completion


def usage_of(completion: Completion, answered: Answered) -> dict[str, int]:
    prompt, answer = completion.usage.prompt_tokens, len(answered.scored)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def prompt_scores(model: Model, completion: Completion, tokens: Tokens, count: int) -> list[Scored]:
    """The tokens of a prompt, but not one that the tokenizer puts before a text, with their log-probabilities."""
    known = completion.prompt_logprobs or []
    if count > MOST_LOGPROBS and len(tokens) > 1:
        rows = model.logits(tokens)
        known = [(float(log_softmax(row)[token]), _top_of(row, count)) for row, token in zip(rows, tokens[1:])]
    start = 1 if tokens and tokens[0] == model.bos_token else 0
    first = [Scored(token, None, None) for token in tokens[start : start + 1]]
    return first + [Scored(token, *score) for token, score in zip(tokens[start + 1 :], known[start:])]


def completion_logprobs(model: Model, prompt: Sequence[Scored], before: str, answer: Sequence[Scored]) -> dict[str, Any]:
    """The log-probabilities of a completion behind the prompt's text, in the form of OpenAI's completions; those of the prompt
    are there if it is echoed."""
    echoed = scored_lists(model, prompt, Offsets(model, special=True))
    echoed["text_offset"] = [min(offset, len(before)) for offset in echoed["text_offset"]]
    found = scored_lists(model, answer, Offsets(model, len(before)))
    return {name: echoed[name] + values for name, values in found.items()}


def chat_logprobs(model: Model, answer: Sequence[Scored]) -> dict[str, Any]:
    """The log-probabilities of tokens, in the form of OpenAI's chat completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = model.detokenize_bytes([token], special=True)
        return {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": float(logprob)}

    content = [
        {**entry(one.token, one.logprob or 0.0), "top_logprobs": [entry(*top) for top in one.top_with_token()]}
        for one in answer
    ]
    return {"content": content, "refusal": None}


def scored_lists(model: Model, scored: Sequence[Scored], offsets: Offsets) -> dict[str, list[Any]]:
    """Tokens in the form of OpenAI's completions. Each row of the most probable tokens has the token by its text in `tokens`;
    other control tokens, which are not part of a text, have their names there."""

    def row(one: Scored) -> dict[str, float] | None:
        if one.top is None:
            return None
        pairs = one.top_with_token()
        return {model.detokenize([token], special=token != one.token): float(logprob) for token, logprob in pairs}

    return {
        "tokens": [model.detokenize([one.token]) for one in scored],
        "text_offset": [offsets.next(one.token) for one in scored],
        "token_logprobs": [None if one.logprob is None else float(one.logprob) for one in scored],
        "top_logprobs": [row(one) for one in scored],
    }
