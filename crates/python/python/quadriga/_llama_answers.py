"""Answers in the dictionaries of llama-cpp-python."""

from __future__ import annotations

import codecs
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
    "Offsets",
    "chat_logprobs",
    "chat_piece_logprobs",
    "completion_logprobs",
    "piece_logprobs",
    "usage_of",
]


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


class Offsets:
    """Where the tokens of an answer begin in its text, in characters: those that are parts of one begin at the same place."""

    def __init__(self, model: Model, offset: int = 0) -> None:
        self._model, self._offset = model, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token: int) -> int:
        before = self._offset
        self._offset += len(self._decoder.decode(self._model.detokenize_bytes([token])))
        return before


class Answered:
    """An answer whose tokens `note` is told at its end, with stopping criteria."""

    def __init__(
        self,
        note: Callable[[list[int]], None],
        stream: Stream,
        criteria: StoppingCriteria | None = None,
        rows: LogitsRows | None = None,
    ) -> None:
        self._note, self._stream, self._criteria, self._rows = note, stream, criteria, rows
        self._tokens = stream.prompt_tokens
        self._stopped: Completion | None = None

    def pieces(self) -> Iterator[Piece]:
        texts: list[Piece] = []
        try:
            for piece in self._stream:
                self._tokens.append(piece.token)
                texts.append(piece)
                yield piece
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

    def close(self) -> None:
        """Ends the generation."""
        self._stream.close()

    def finish(self) -> Completion:
        for _ in self.pieces():
            pass
        return self._stopped or self._stream.completion


def usage_of(completion: Completion) -> dict[str, int]:
    usage = completion.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def completion_logprobs(model: Model, completion: Completion, offset: int) -> dict[str, Any] | None:
    """The log-probabilities of a whole completion, which begins at a character of the text, in the form of OpenAI's
    completions."""
    if completion.logprobs is None:
        return None
    offsets = Offsets(model, offset)
    return _lists(model, completion.tokens, list(completion.logprobs), completion.top_logprobs, offsets)


def piece_logprobs(model: Model, piece: Piece, offsets: Offsets) -> dict[str, Any]:
    """Those of one piece."""
    return _lists(model, [piece.token], [piece.logprob], [piece.top_logprobs], offsets)


def chat_logprobs(model: Model, completion: Completion) -> dict[str, Any]:
    """The log-probabilities of an answer, in the form of OpenAI's chat completions."""
    logprobs = [] if completion.logprobs is None else list(completion.logprobs)
    return _content(model, completion.tokens, logprobs, completion.top_logprobs)


def chat_piece_logprobs(model: Model, piece: Piece) -> dict[str, Any]:
    """Those of one piece."""
    return _content(model, [piece.token], [piece.logprob or 0.0], [piece.top_logprobs])


def _content(
    model: Model, tokens: Tokens, logprobs: Sequence[float], top_logprobs: Sequence[list[tuple[int, float]]]
) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = model.detokenize_bytes([token], special=True)
        return {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": float(logprob)}

    rows = zip(tokens, logprobs, top_logprobs)
    content = [{**entry(token, logprob), "top_logprobs": [entry(*one) for one in top]} for token, logprob, top in rows]
    return {"content": content, "refusal": None}


def _lists(
    model: Model,
    tokens: Tokens,
    logprobs: Sequence[float | None],
    top: Sequence[list[tuple[int, float]]],
    offsets: Offsets,
) -> dict[str, Any]:
    return {
        "tokens": [_token_text(model, token) for token in tokens],
        "text_offset": [offsets.next(token) for token in tokens],
        "token_logprobs": [None if logprob is None else float(logprob) for logprob in logprobs],
        "top_logprobs": [{_token_text(model, token): logprob for token, logprob in row} for row in top],
    }


def _token_text(model: Model, token: int) -> str:
    return model.detokenize([token], special=True)
