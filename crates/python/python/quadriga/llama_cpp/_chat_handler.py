"""Answers the prompt of a chat formatter: a completion, whose dictionaries become those of a chat."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .._llama_types import LlamaGrammar
from ..errors import InvalidRequest

if TYPE_CHECKING:
    from .llama import Llama
    from ._formats import ChatFormatterResponse

__all__ = ["answer"]

#: Arguments of `create_chat_completion` that `create_completion` has, too, with the same meaning.
_SHARED = (
    """
    temperature top_p top_k min_p typical_p stream seed max_tokens presence_penalty frequency_penalty repeat_penalty tfs_z
    mirostat_mode mirostat_tau mirostat_eta model logits_processor grammar logit_bias
    """.split()
)


def answer(llama: Llama, response: ChatFormatterResponse, arguments: Mapping[str, Any]) -> Any:
    """Answers a prompt with the arguments of `create_chat_completion`. A tool that must be called is called with arguments that
    satisfy its schema; others are only known to the formatter."""
    options = {name: arguments[name] for name in _SHARED if name in arguments}
    wanted: dict[str, Any] = dict(arguments.get("response_format") or {})
    if wanted.get("type") in ("json_object", "json_schema"):
        named: dict[str, Any] = wanted.get("json_schema") or wanted
        options["grammar"] = LlamaGrammar(schema=named.get("schema") or {"type": "object"})
    tool = _tool_to_call(arguments)
    if tool is not None:
        options["grammar"] = LlamaGrammar(schema=tool.get("parameters") or {"type": "object"})
    if arguments.get("logprobs"):
        options["logprobs"] = arguments.get("top_logprobs") or 0
    tokens = llama.tokenize(response.prompt.encode(), add_bos=not response.added_special, special=True)
    result = llama.create_completion(
        tokens,
        stop=[*_list(arguments.get("stop")), *_list(response.stop)],
        stopping_criteria=response.stopping_criteria,
        **options,
    )
    name = None if tool is None else tool["name"]
    legacy = bool(arguments.get("functions")) and arguments.get("tools") is None
    return _chunks(result, name, legacy) if options.get("stream") else _whole(result, name, legacy)


def _list(stop: Any) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or ())


def _tool_to_call(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The function that the request names, if it does."""
    choice = arguments.get("tool_choice") or arguments.get("function_call")
    if not isinstance(choice, Mapping):
        return None
    named: dict[str, Any] = dict(choice)  # pyright: ignore[reportUnknownArgumentType]
    name = named.get("function", named).get("name")
    functions: list[Any] = [tool["function"] for tool in arguments.get("tools") or ()]
    functions += arguments.get("functions") or ()
    found = next((function for function in functions if function["name"] == name), None)
    if found is None:
        raise InvalidRequest(f"the tool to call is {name!r}, which is none of the tools")
    return found


def _head(result: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {"id": f"chat{result['id']}", "object": kind, "created": result["created"], "model": result["model"]}


def _logprobs(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Log-probabilities of a completion in the form of chats."""
    if found is None:
        return None

    def entry(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "bytes": list(token.encode()), "logprob": logprob}

    rows = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"])
    content = [{**entry(token, logprob), "top_logprobs": [entry(*one) for one in top.items()]} for token, logprob, top in rows]
    return {"content": content, "refusal": None}


def _whole(result: Mapping[str, Any], name: str | None, legacy: bool) -> dict[str, Any]:
    [choice] = result["choices"]
    message: dict[str, Any] = {"role": "assistant", "content": choice["text"]}
    reason = choice["finish_reason"]
    if name is not None:
        function = {"name": name, "arguments": choice["text"]}
        message["content"] = None
        message["tool_calls"] = [{"id": _call_id(), "type": "function", "function": function}]
        if legacy:
            message["function_call"] = function
        reason = "tool_calls" if reason == "stop" else reason
    answered = {"index": 0, "message": message, "logprobs": _logprobs(choice["logprobs"]), "finish_reason": reason}
    return {**_head(result, "chat.completion"), "choices": [answered], "usage": result["usage"]}


def _chunks(chunks: Iterator[Mapping[str, Any]], name: str | None, legacy: bool) -> Iterator[dict[str, Any]]:
    first = True
    for chunk in chunks:
        [choice] = chunk["choices"]
        reason = choice["finish_reason"]

        def made(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None, of: Any = chunk) -> dict[str, Any]:
            answered = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return {**_head(of, "chat.completion.chunk"), "choices": [answered]}

        if first:
            yield made({"role": "assistant"})
        text, logprobs = choice["text"], _logprobs(choice["logprobs"])
        if name is not None and (first or text):
            function: dict[str, Any] = {"arguments": text}
            call: dict[str, Any] = {"index": 0, "function": function}
            if first:
                function["name"] = name
                call.update(id=_call_id(), type="function")
            delta: dict[str, Any] = {"tool_calls": [call]}
            if legacy:
                delta["function_call"] = function
            yield made(delta, logprobs=logprobs)
        elif text or logprobs:
            yield made({"content": text}, logprobs=logprobs)
        first = False
        if reason is not None:
            yield made({}, "tool_calls" if name is not None and reason == "stop" else reason)


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
