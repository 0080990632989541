"""Completions as llama-cpp-python has them: methods with OpenAI's arguments, and their result dictionaries."""

from __future__ import annotations

import importlib
import random
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ._llama_answers import (
    Answered,
    Head,
    LogitsRows,
    MOST_LOGPROBS,
    Offsets,
    TopRows,
    chat_logprobs,
    completion_logprobs,
    prompt_scores,
    scored_lists,
    usage_of,
)
from ._llama_options import check_sampling, closed_format, constraint, limit, processors, sampling
from ._llama_types import LlamaGrammar, LogitsProcessorList, StoppingCriteria, Tokens
from ._model import Model
from .errors import InvalidRequest

__all__ = ["LlamaCompletions"]


class LlamaCompletions:
    """The part of `Llama` that answers prompts and conversations."""

    model: Model
    model_path: str
    #: The random seed, from which those of requests without their own follow.
    _seed: int | None
    _seed_lock: threading.Lock
    #: The tokens that penalties count.
    last_n_tokens_size: int
    #: The tokens that end an answer.
    _ends: frozenset[int]

    def _next_seed(self, given: int | None) -> int | None:
        """The seed of a completion: its own, or the next one, as in llama-cpp-python."""
        with self._seed_lock:
            if given is not None:
                self._seed = given
            elif self._seed is not None:
                self._seed = random.Random(self._seed).randrange(0xFFFFFFFF)
            return self._seed

    def create_completion(
        self,
        prompt: str | Tokens,
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | Sequence[str] | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: StoppingCriteria | None = None,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: Mapping[Any, float] | None = None,
    ) -> Any:
        """Continues a prompt. The result is OpenAI's completion object, or an iterator over its chunks."""
        if suffix:
            raise InvalidRequest("suffix is not supported")
        check_sampling(tfs_z, mirostat_mode)
        rows = None if stopping_criteria is None else LogitsRows()
        tops = None if logprobs is None or logprobs <= MOST_LOGPROBS else TopRows(logprobs)
        # As there, streams do not echo.
        echo = echo and not stream
        answer = self.model.generate(
            prompt,
            stream=True,
            max_tokens=limit(max_tokens),
            **sampling(temperature, top_p, top_k, min_p, typical_p, self.last_n_tokens_size),
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            repeat_penalty=repeat_penalty,
            seed=self._next_seed(seed),
            stop=stop or None,
            logprobs=None if logprobs is None else min(logprobs, MOST_LOGPROBS),
            logits_processors=processors(rows, tops, given=logits_processor),
            echo=echo,
            **constraint(grammar, logit_bias),
        )
        head = Head("cmpl", model or self.model_path)
        answered = Answered(self._remember, answer, stopping_criteria, rows, tops, self._ends)
        if stream:
            return self._completion_chunks(head, answered, None if logprobs is None else self._prompt_text(prompt))
        completion = answered.finish()
        found = None
        if logprobs is not None:
            before = prompt_scores(self.model, completion, answered.prompt_tokens, logprobs) if echo else []
            found = completion_logprobs(self.model, before, self._prompt_text(prompt), answered.scored)
        choice = {
            "text": completion.text,
            "index": 0,
            "logprobs": found,
            "finish_reason": completion.finish_reason,
        }
        return {**head.fields("text_completion"), "choices": [choice], "usage": usage_of(completion, answered)}

    __call__ = create_completion

    def _completion_chunks(self, head: Head, answered: Answered, before: str | None) -> Iterator[dict[str, Any]]:
        """The chunks of a completion, with log-probabilities if there is a text before it, behind which offsets begin."""

        def chunk(text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
            choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": reason}
            return {**head.fields("text_completion"), "choices": [choice]}

        offsets = Offsets(self.model, len(before or ""))
        for piece, scored in answered.pieces():
            logprobs = None if scored is None or before is None else scored_lists(self.model, [scored], offsets)
            if piece.text or logprobs:
                yield chunk(piece.text, logprobs, None)
        yield chunk("", None, answered.finish().finish_reason)

    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: Any = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: Mapping[Any, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
    ) -> Any:
        """Answers a conversation. The result is OpenAI's chat completion object, or an iterator over its chunks."""
        given = {name: value for name, value in locals().items() if name != "self"}
        handler = self._handler()
        if handler is not None:
            return handler(llama=self, **given)
        check_sampling(tfs_z, mirostat_mode)
        wanted = (top_logprobs or 0) if logprobs else None
        tops = None if wanted is None or wanted <= MOST_LOGPROBS else TopRows(wanted)
        is_legacy = tools is None
        if functions and tools is None:
            tools = [{"type": "function", "function": dict(function)} for function in functions]
            is_word = function_call is None or isinstance(function_call, str)
            tool_choice = function_call if is_word else {"type": "function", "function": function_call}
        answer = self.model.chat(
            messages,
            stream=True,
            tools=tools,
            tool_choice=tool_choice,
            max_tokens=limit(max_tokens),
            **sampling(temperature, top_p, top_k, min_p, typical_p, self.last_n_tokens_size),
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            repeat_penalty=repeat_penalty,
            seed=self._next_seed(seed),
            stop=stop or None,
            logprobs=None if wanted is None else min(wanted, MOST_LOGPROBS),
            response_format=closed_format(response_format),
            logits_processors=processors(tops, given=logits_processor),
            # A function that is named is called once.
            parallel_tool_calls=tool_choice is None or isinstance(tool_choice, str),
            **constraint(grammar, logit_bias),
        )
        head = Head("chatcmpl", model or self.model_path)
        answered = Answered(self._remember, answer, tops=tops, ends=self._ends)
        legacy = functions is not None and is_legacy
        if stream:
            return self._chat_chunks(head, answered, bool(logprobs), legacy)
        completion = answered.finish()
        message: dict[str, Any] = {"role": "assistant", "content": completion.text}
        if completion.tool_calls:
            message["content"] = completion.text or None
            message["tool_calls"] = [call.message() for call in completion.tool_calls]
            if legacy:
                message["function_call"] = message["tool_calls"][0]["function"]
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": chat_logprobs(self.model, answered.scored) if logprobs else None,
            "finish_reason": completion.finish_reason,
        }
        return {**head.fields("chat.completion"), "choices": [choice], "usage": usage_of(completion, answered)}

    def _chat_chunks(
        self, head: Head, answered: Answered, with_logprobs: bool, legacy: bool
    ) -> Iterator[dict[str, Any]]:
        def chunk(delta: dict[str, Any], reason: str | None, logprobs: Any = None) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return {**head.fields("chat.completion.chunk"), "choices": [choice]}

        yield chunk({"role": "assistant"}, None)
        for piece, scored in answered.pieces():
            logprobs = chat_logprobs(self.model, [scored]) if with_logprobs and scored is not None else None
            if piece.text or logprobs:
                yield chunk({"content": piece.text}, None, logprobs)
            for index, name, arguments in piece.tool_calls:
                function: dict[str, Any] = {"arguments": arguments}
                call: dict[str, Any] = {"index": index, "function": function}
                if name is not None:
                    function["name"] = name
                    call.update(id=f"call_{uuid.uuid4().hex[:24]}", type="function")
                delta: dict[str, Any] = {"tool_calls": [call]}
                if legacy and index == 0:
                    delta["function_call"] = function
                yield chunk(delta, None)
        yield chunk({}, answered.finish().finish_reason)

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """As `create_chat_completion`, with objects of the package openai in place of dictionaries."""
        try:
            chat: Any = importlib.import_module("openai.types.chat")
        except ImportError as error:
            raise ImportError("create_chat_completion_openai_v1 needs the package openai: pip install openai") from error
        answer: Any = self.create_chat_completion(*args, **kwargs)
        if kwargs.get("stream", False):
            return (chat.ChatCompletionChunk(**chunk) for chunk in answer)
        return chat.ChatCompletion(**answer)

    def _handler(self) -> Callable[..., Any] | None:
        """What answers conversations in place of the model's own chat template."""
        raise NotImplementedError

    def _remember(self, tokens: list[int]) -> None:
        """Is given the tokens of a prompt and its answer."""
        raise NotImplementedError

    def _prompt_text(self, prompt: str | Tokens) -> str:
        return prompt if isinstance(prompt, str) else self.model.detokenize(prompt)
