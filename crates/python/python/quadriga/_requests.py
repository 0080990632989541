"""The fields of requests, from what callers give."""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

from .errors import InvalidRequest, ModelNotFound

__all__ = [
    "Adapters",
    "AnyPath",
    "Messages",
    "adapter_list",
    "chat_options",
    "checked_count",
    "checked_flag",
    "checked_text",
    "checked_tokens",
    "closed_schema",
    "existing_path",
    "message_list",
    "names_list",
    "path_text",
    "refuse_stream",
    "request_json",
    "request_options",
    "response_format_and_parser",
    "tool_list",
]

#: A path of a file.
AnyPath = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]

#: LoRA adapters: files, or files with their scales.
Adapters = Union[AnyPath, tuple[AnyPath, float], Sequence[Union[AnyPath, tuple[AnyPath, float]]]]

#: A text, or messages in OpenAI's format.
Messages = Union[str, Sequence[Mapping[str, Any]]]

#: Options of requests beside those that methods name: the server's fields of the same names.
_MORE_OPTIONS = frozenset(
    """
    typical_p top_n_sigma xtc_probability xtc_threshold repeat_penalty repeat_last_n presence_penalty frequency_penalty
    dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers logit_bias ignore_eos samplers
    json_schema grammar guided_json guided_regex guided_choice guided_grammar structured_outputs priority cache_prompt
    stop_token_ids min_tokens bad_words allowed_token_ids include_stop_str_in_output skip_special_tokens repetition_penalty
    truncate_prompt_tokens truncation_side cache_salt parallel_tool_calls reasoning_effort reasoning_budget_tokens
    chat_template_kwargs continue_final_message echo
    """.split()
)

#: Options that `chat` names.
_CHAT_OPTIONS = frozenset(
    "tools tool_choice max_tokens temperature top_p top_k min_p seed stop logprobs top_logprobs response_format".split()
)


def path_text(path: AnyPath | None) -> str | None:
    return None if path is None else os.fsdecode(path)


def names_list(option: str, names: str | Sequence[str]) -> list[str]:
    """Names; a single one need not be in a list."""
    return [checked_text(option, name) for name in ([names] if isinstance(names, str) else names)]


def checked_text(option: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{option} is {value!r}; it must be a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{option} is {value!r}, which is not Unicode") from error
    return value


def checked_flag(option: str, value: Any) -> bool:
    if value not in (0, 1):
        raise TypeError(f"{option} is {value!r}; it must be True or False")
    return bool(value)


def existing_path(what: str, path: AnyPath) -> str:
    """The path of a file that must be there."""
    found = os.fsdecode(path)
    if not os.path.exists(found):
        raise ModelNotFound(f"{found}: there is no such file for {what}")
    return found


def adapter_list(lora: Adapters) -> list[tuple[str, float]]:
    """LoRA adapters with their scales; a single one need not be in a list."""
    if isinstance(lora, (str, bytes, os.PathLike)):
        entries: Sequence[Any] = [lora]
    elif isinstance(lora, tuple) and len(lora) == 2 and isinstance(lora[1], (int, float)):
        entries = [lora]
    else:
        entries = list(lora)
    adapters: list[tuple[str, float]] = []
    for entry in entries:
        path, scale = entry if isinstance(entry, tuple) else (entry, 1.0)  # pyright: ignore[reportUnknownVariableType]
        found = existing_path("lora", path)  # pyright: ignore[reportUnknownArgumentType]
        try:
            number = float(scale)  # pyright: ignore[reportUnknownArgumentType]
        except (TypeError, ValueError) as error:
            raise TypeError(f"lora: the scale of {found} is {scale!r}; it must be a number") from error
        if not math.isfinite(number):
            raise InvalidRequest(f"lora: the scale of {found} is {number}; it must be finite")
        adapters.append((found, number))
    return adapters


def checked_count(name: str, value: int, least: int, most: int | None = None) -> int:
    count = operator.index(value)
    if count < least:
        raise InvalidRequest(f"{name} is {count}; it must be at least {least}")
    if count >= 1 << 63:
        raise InvalidRequest(f"{name} is {count}; it must be less than 2⁶³")
    if most is not None and count > most:
        raise InvalidRequest(f"{name} is {count}; it must be at most {most}")
    return count


def checked_tokens(tokens: Sequence[int]) -> list[int]:
    if isinstance(tokens, (str, bytes, bytearray)):
        raise TypeError(f"tokens are a list of numbers, not {type(tokens).__name__}; texts are str")
    numbers = [operator.index(token) for token in tokens]
    wrong = next((number for number in numbers if not 0 <= number < 1 << 32), None)
    if wrong is not None:
        raise InvalidRequest(f"token {wrong} does not exist")
    return numbers


def request_json(body: dict[str, Any]) -> str:
    try:
        return _ENCODER.encode(body)
    except ValueError as error:
        raise InvalidRequest(f"an option is not a finite number: {error}") from error


def _plain(value: Any) -> Any:
    """numpy's numbers and arrays as Python's, for JSON."""
    plain = getattr(value, "tolist", None)
    if plain is None:
        raise TypeError(f"{type(value).__name__} {value!r} cannot be an option of a request")
    return plain()


_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, default=_plain)


def message_list(messages: Messages) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping):
        raise TypeError("messages is a single message; put it into a list")
    found: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = type(message).__name__
            raise InvalidRequest(f'message {number} is a {kind}; a message is {{"role": "user", "content": "…"}}')
        found.append(dict(message))
    return found


def tool_list(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Functions that a model may call, checked."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)):
        raise TypeError(f"tools is a {type(tools).__name__}; it must be a list of functions")
    found: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            form = '{"type": "function", "function": {"name": "…", "parameters": {…}}}'
            raise InvalidRequest(f"tool {number} is a {type(tool).__name__}; a tool is {form}")
        found.append(dict(tool))
    return found


def refuse_stream(method: str, options: dict[str, Any]) -> None:
    """Removes `stream=False` from the options of a method that returns whole answers, and refuses `stream=True`."""
    if options.pop("stream", False):
        raise TypeError(f"{method}_async returns whole answers; to stream, use `async for` on {method}(…, stream=True)")


def request_options(named: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that several methods have."""
    _refuse_unknown(more, _MORE_OPTIONS)
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    body = {name: named[name] for name in names if named[name] is not None}
    stop = named["stop"]
    if stop is not None:
        body["stop"] = stop if isinstance(stop, str) else list(stop)
    bias = more.get("logit_bias")
    if isinstance(bias, Mapping):
        # JSON has no infinity; for the server, false bans a token.
        banned = {token: False if value == -math.inf else value for token, value in bias.items()}  # pyright: ignore[reportUnknownVariableType]
        more = {**more, "logit_bias": banned}
    return {**body, **more}


def chat_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `chat`, of which those that change the prompt matter."""
    _refuse_unknown(options, _MORE_OPTIONS | _CHAT_OPTIONS)
    return options


def _refuse_unknown(options: dict[str, Any], known: frozenset[str]) -> None:
    unknown = options.keys() - known
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}; known are: {', '.join(sorted(known))}")


def response_format_and_parser(wanted: Any) -> tuple[Any, Callable[[str], Any] | None]:
    """The field `response_format`, and what makes an object of the answer."""
    if wanted is None:
        return None, None
    schema = getattr(wanted, "model_json_schema", None)
    if schema is not None:
        named = {"name": getattr(wanted, "__name__", "answer"), "schema": closed_schema(schema())}
        return {"type": "json_schema", "json_schema": named}, wanted.model_validate_json
    known = ("text", "json_object", "json_schema", "regex", "grammar")
    get = getattr(wanted, "get", None)
    if get is not None and get("type") not in known:
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}, None
    return wanted, None


#: Keywords whose value is a schema for each name, a list of schemas, or a schema.
_NAMED_SCHEMAS = frozenset(("$defs", "definitions", "properties", "patternProperties", "dependentSchemas"))
_SCHEMA_LISTS = frozenset(("anyOf", "oneOf", "prefixItems", "items"))
_SCHEMAS = frozenset(("items", "additionalProperties"))


def closed_schema(schema: Any) -> Any:
    """A schema whose objects have the properties that it names, and no others: small models would go on inventing some.

    Where schemas are combined by `allOf`, nothing is closed: each would refuse the properties of the others.
    """
    return schema if _combines(schema) else _closed(schema)


def _combines(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        both = schema.get("allOf")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if isinstance(both, list) and len(both) > 1:  # pyright: ignore[reportUnknownArgumentType]
            return True
        return any(_combines(value) for value in schema.values())  # pyright: ignore[reportUnknownVariableType]
    return isinstance(schema, list) and any(_combines(entry) for entry in schema)  # pyright: ignore[reportUnknownVariableType]


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():  # pyright: ignore[reportUnknownVariableType]
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            value = {name: _closed(entry) for name, entry in value.items()}  # pyright: ignore[reportUnknownVariableType]
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            value = [_closed(entry) for entry in value]  # pyright: ignore[reportUnknownVariableType]
        elif key in _SCHEMAS:
            value = _closed(value)
        closed[str(key)] = value  # pyright: ignore[reportUnknownArgumentType]
    kind = closed.get("type", "object")
    is_object = kind == "object" or (isinstance(kind, list) and "object" in kind)
    if is_object and "properties" in closed and not closed.keys() & {"allOf", "anyOf", "oneOf", "$ref"}:
        closed.setdefault("additionalProperties", False)
    return closed
