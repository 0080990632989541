"""Answers: whole ones, and ones that are being generated."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ._quadriga import Piece, StreamCore
from .errors import Closed

__all__ = ["Completion", "Stream", "ToolCall", "Usage"]


@dataclass(frozen=True)
class Usage:
    """The tokens of a request, and the time that they took."""

    #: Tokens of the prompt.
    prompt_tokens: int
    #: Of those, the ones that were found in the KV cache.
    cached_tokens: int
    #: Generated tokens, one that ended the answer included.
    completion_tokens: int
    #: Of those, the ones of reasoning.
    reasoning_tokens: int
    #: Seconds from the request to the first token.
    first_token_seconds: float
    #: Seconds from the first token to the last one.
    decode_seconds: float

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_tokens + self.completion_tokens


@dataclass
class ToolCall:
    """A call of a tool."""

    #: An identifier, to which the tool's result refers.
    id: str
    #: The name of the function.
    name: str
    #: The arguments, as JSON text.
    arguments: str

    def parsed(self) -> Any:
        """The arguments as an object."""
        return json.loads(self.arguments)

    def message(self) -> dict[str, Any]:
        """The call in an assistant's message, as OpenAI has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class Completion:
    """A whole answer."""

    #: The text, without the reasoning; with `echo` it begins with the prompt.
    text: str
    #: The model's reasoning before the answer; empty if there is none.
    reasoning: str
    #: Calls of tools.
    tool_calls: list[ToolCall]
    #: The generated tokens.
    tokens: list[int]
    #: Why it ended: `stop`, `length` or `tool_calls`.
    finish_reason: str
    #: The stop string that ended it.
    stop: str | None
    #: Counted tokens, and times.
    usage: Usage
    #: The log-probability of each token, if it was asked for.
    logprobs: npt.NDArray[np.float64] | None = None
    #: The most probable tokens in place of each token, with their log-probabilities.
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    #: Log-probabilities of the prompt's tokens but the first, each with the most probable tokens.
    prompt_logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None
    #: Makes `parsed` of the answer: the parser, and the text without an echoed prompt.
    parser: tuple[Callable[[str], Any], str] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def parsed(self) -> Any:
        """The text as an object of the class that `response_format` was; None without one, and for an answer that was cut off
        by `max_tokens` or calls tools. If the class refuses the text, reading this raises its exception; the answer is kept."""
        if self.parser is None:
            return None
        parse, text = self.parser
        return parse(text)

    def __str__(self) -> str:
        return self.text

    def json(self) -> Any:
        """The text as JSON."""
        return json.loads(self.text)

    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation, as OpenAI has it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.message() for call in self.tool_calls]
        return message


class Stream(Iterator[Piece], AsyncIterator[Piece]):
    """An answer while it is generated: pieces of text, with `for` or with `async for`.

    Closing it, or dropping it, ends the generation. When it has ended, `completion` has the whole answer.
    """

    def __init__(
        self, core: StreamCore, parse: Callable[[str], Any] | None = None, owner: object = None, echoed: str = ""
    ) -> None:
        self._core = core
        #: The prompt with which the text of the whole answer begins.
        self._echoed = echoed
        #: The model, which lives as long as its answers.
        self._owner = owner
        self._parse = parse
        self._pieces: list[Piece] = []

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        piece = next(self._core)
        self._pieces.append(piece)
        return piece

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Piece:
        core = self._core
        while True:
            piece = core.poll()
            if piece is not None:
                self._pieces.append(piece)
                return piece
            if core.ended:
                raise StopAsyncIteration
            loop = asyncio.get_running_loop()
            ready: asyncio.Future[None] = loop.create_future()

            def wake(loop: asyncio.AbstractEventLoop = loop, ready: asyncio.Future[None] = ready) -> None:
                loop.call_soon_threadsafe(_set, ready)

            if core.wake(wake):
                try:
                    await ready
                except asyncio.CancelledError:
                    self.close()
                    raise

    @property
    def prompt_tokens(self) -> list[int]:
        """The tokens of the prompt."""
        return self._core.prompt_tokens

    def close(self) -> None:
        """Ends the generation."""
        self._core.close()
        self._owner = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def collect(self) -> Completion:
        """Waits for the rest, and returns the whole answer."""
        for _ in self:
            pass
        return self.completion

    async def collect_async(self) -> Completion:
        """Waits for the rest in an event loop, and returns the whole answer."""
        async for _ in self:
            pass
        return self.completion

    def stopped(self) -> Completion:
        """Ends the generation; what was read so far is the answer."""
        self.close()
        prompt, answer = len(self.prompt_tokens), len(self._pieces)
        return self._completion(("stop", None, prompt, 0, answer, 0, 0.0, 0.0))

    @property
    def completion(self) -> Completion:
        """The whole answer, once it has ended."""
        outcome = self._core.outcome
        if outcome is None:
            raise Closed("the answer is not complete: read the stream to its end")
        return self._completion(outcome)

    def _completion(self, outcome: tuple[str, str | None, int, int, int, int, float, float]) -> Completion:
        reason, stop, prompt, cached, answer, reasoning, first, decode = outcome
        pieces = self._pieces
        text = "".join([piece.text for piece in pieces])
        has_logprobs = any(piece.logprob is not None for piece in pieces)
        logprobs = [np.nan if piece.logprob is None else piece.logprob for piece in pieces]
        return Completion(
            text=self._echoed + text,
            reasoning="".join([piece.reasoning for piece in pieces]),
            tool_calls=_tool_calls(pieces),
            tokens=[piece.token for piece in pieces],
            finish_reason=reason,
            stop=stop,
            usage=Usage(prompt, cached, answer, reasoning, first, decode),
            logprobs=np.array(logprobs, dtype=np.float64) if has_logprobs else None,
            top_logprobs=[piece.top_logprobs for piece in pieces] if has_logprobs else [],
            prompt_logprobs=self._core.prompt_logprobs,
            parser=(self._parse, text) if self._parse and reason == "stop" else None,
        )


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _tool_calls(pieces: list[Piece]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for piece in pieces:
        for index, name, arguments in piece.tool_calls:
            while len(calls) <= index:
                calls.append(ToolCall(f"call_{uuid.uuid4().hex[:24]}", "", ""))
            call = calls[index]
            call.name = name or call.name
            call.arguments += arguments
    return calls
