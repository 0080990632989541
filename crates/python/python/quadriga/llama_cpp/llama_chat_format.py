"""Chat formats of a program's own, as llama-cpp-python names them.

A chat formatter makes a prompt of messages; `register_chat_format` gives it a name for `Llama(chat_format=…)`. A chat handler
answers a conversation itself, and is the argument `chat_handler`, or has a name by `register_chat_completion_handler`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from .._llama_types import StoppingCriteria, StoppingCriteriaList
from ..errors import InvalidRequest
from ._absent import absent
from ._chat_handler import answer
from ._formats import (
    FORMATS,
    ChatFormatter,
    ChatFormatterResponse,
    format_alpaca,
    format_chatml,
    format_gemma,
    format_llama2,
    format_llama3,
    format_mistral_instruct,
    format_openchat,
    format_qwen,
    format_vicuna,
    format_zephyr,
)

if TYPE_CHECKING:
    from .llama import Llama

__all__ = [
    "ChatFormatter",
    "ChatFormatterResponse",
    "Jinja2ChatFormatter",
    "LlamaChatCompletionHandler",
    "LlamaChatCompletionHandlerNotFoundException",
    "LlamaChatCompletionHandlerRegistry",
    "chat_formatter_to_chat_completion_handler",
    "format_alpaca",
    "format_chatml",
    "format_gemma",
    "format_llama2",
    "format_llama3",
    "format_mistral_instruct",
    "format_openchat",
    "format_qwen",
    "format_vicuna",
    "format_zephyr",
    "get_chat_completion_handler",
    "register_chat_completion_handler",
    "register_chat_format",
]

#: The name of the model's own chat template as a format.
MODEL_FORMAT = "chat_template.default"

#: Formats of llama-cpp-python that only models with a chat template of their own can have here.
_OTHER_FORMATS = frozenset(
    """
    oasst_llama baichuan-2 baichuan openbuddy redpajama-incite snoozy phind intel open-orca mistrallite pygmalion chatglm3 saiga
    functionary functionary-v1 functionary-v2 chatml-function-calling
    """.split()
)

_IMAGES = "models that see images are not supported"
_TRANSFORMERS = "give the template as the argument chat_template of Llama"

__getattr__ = absent(
    __name__,
    {
        **dict.fromkeys(
            """
            Llava15ChatHandler Llava16ChatHandler MTMDChatHandler Gemma4ChatHandler ObsidianChatHandler MoondreamChatHandler
            NanoLlavaChatHandler Llama3VisionAlphaChatHandler MiniCPMv26ChatHandler Qwen25VLChatHandler
            """.split(),
            _IMAGES,
        ),
        **dict.fromkeys(
            """
            hf_autotokenizer_to_chat_formatter hf_autotokenizer_to_chat_completion_handler
            hf_tokenizer_config_to_chat_formatter hf_tokenizer_config_to_chat_completion_handler
            """.split(),
            _TRANSFORMERS,
        ),
    },
)


class LlamaChatCompletionHandler(Protocol):
    """Answers a conversation: returns a chat completion, or with `stream` an iterator over its chunks. It is given all arguments
    of `Llama.create_chat_completion` by name."""

    def __call__(self, *, llama: Llama, messages: Sequence[Any], **arguments: Any) -> Any: ...


class LlamaChatCompletionHandlerNotFoundException(InvalidRequest):
    """No chat format has this name."""


class Jinja2ChatFormatter:
    """A chat formatter with a Jinja template. It needs the package jinja2; the argument `chat_template` of `Llama` does not."""

    def __init__(
        self,
        template: str,
        eos_token: str,
        bos_token: str,
        add_generation_prompt: bool = True,
        stop_token_ids: Sequence[int] | None = None,
    ) -> None:
        self.template = template
        self.eos_token = eos_token
        self.bos_token = bos_token
        self.add_generation_prompt = add_generation_prompt
        self.stop_token_ids = None if stop_token_ids is None else frozenset(stop_token_ids)
        try:
            sandbox: Any = importlib.import_module("jinja2.sandbox")
        except ImportError as error:
            raise ImportError("Jinja2ChatFormatter needs the package jinja2; Llama(chat_template=…) does not") from error
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        self._compiled: Any = environment.from_string(template)

    def __call__(self, *, messages: Sequence[Any], **arguments: Any) -> ChatFormatterResponse:
        prompt: str = self._compiled.render(
            **arguments,
            messages=messages,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            add_generation_prompt=self.add_generation_prompt,
            raise_exception=_raise,
            strftime_now=lambda form: datetime.now().strftime(form),  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        )
        return ChatFormatterResponse(prompt, [self.eos_token] if self.eos_token else None, self._criteria(), True)

    def _criteria(self) -> StoppingCriteria | None:
        ends = self.stop_token_ids
        if ends is None:
            return None

        def ended(tokens: npt.NDArray[np.intc], logits: npt.NDArray[np.single]) -> bool:
            return int(tokens[-1]) in ends

        return StoppingCriteriaList([ended])

    def to_chat_handler(self) -> LlamaChatCompletionHandler:
        """The chat handler that uses this formatter."""
        return chat_formatter_to_chat_completion_handler(self)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=bool(options.get("ensure_ascii", False)), indent=indent)


def _raise(message: str) -> None:
    raise InvalidRequest(message)


def chat_formatter_to_chat_completion_handler(chat_formatter: ChatFormatter) -> LlamaChatCompletionHandler:
    """A chat handler that answers the prompts of a chat formatter."""

    def handler(*, llama: Llama, messages: Sequence[Any], **arguments: Any) -> Any:
        names = ("functions", "function_call", "tools", "tool_choice")
        response = chat_formatter(messages=messages, **{name: arguments.get(name) for name in names})
        return answer(llama, response, arguments)

    return handler


class LlamaChatCompletionHandlerRegistry:
    """The chat handlers that have names. There is one registry, however often it is made."""

    _chat_handlers: dict[str, LlamaChatCompletionHandler] = {}

    def register_chat_completion_handler(
        self, name: str, chat_handler: LlamaChatCompletionHandler, overwrite: bool = False
    ) -> None:
        """Gives a chat handler a name."""
        if not overwrite and name in self._chat_handlers:
            raise InvalidRequest(f"there is a chat format {name!r} already; overwrite=True replaces it")
        self._chat_handlers[name] = chat_handler

    def unregister_chat_handler(self, name: str) -> None:
        """Forgets a name."""
        if self._chat_handlers.pop(name, None) is None:
            raise InvalidRequest(f"there is no chat format {name!r}")

    def get_chat_completion_handler_by_name(self, name: str) -> LlamaChatCompletionHandler:
        """The chat handler of a name."""
        found = self._chat_handlers.get(name)
        if found is None:
            known = ", ".join(sorted(self._chat_handlers))
            reason = "is not supported here: give chat_template" if name in _OTHER_FORMATS else "does not exist"
            raise LlamaChatCompletionHandlerNotFoundException(f"the chat format {name!r} {reason}; there are {known}")
        return found


def get_chat_completion_handler(name: str) -> LlamaChatCompletionHandler:
    """The chat handler of a name."""
    return LlamaChatCompletionHandlerRegistry().get_chat_completion_handler_by_name(name)


_Handler = TypeVar("_Handler", bound=LlamaChatCompletionHandler)
_Formatter = TypeVar("_Formatter", bound=ChatFormatter)


def register_chat_completion_handler(name: str) -> Callable[[_Handler], _Handler]:
    """Gives a chat handler a name: a decorator."""

    def decorate(handler: _Handler) -> _Handler:
        LlamaChatCompletionHandlerRegistry().register_chat_completion_handler(name, handler)
        return handler

    return decorate


def register_chat_format(name: str) -> Callable[[_Formatter], _Formatter]:
    """Gives a chat formatter a name: a decorator."""

    def decorate(formatter: _Formatter) -> _Formatter:
        handler = chat_formatter_to_chat_completion_handler(formatter)
        LlamaChatCompletionHandlerRegistry().register_chat_completion_handler(name, handler)
        return formatter

    return decorate


_OWN_HANDLERS = {
    name: chat_formatter_to_chat_completion_handler(formatter) for name, formatter in FORMATS.items()
}
LlamaChatCompletionHandlerRegistry._chat_handlers.update(_OWN_HANDLERS)  # pyright: ignore[reportPrivateUsage]


def handler_of(name: str | None, has_template: bool) -> LlamaChatCompletionHandler | None:
    """The chat handler for a format; None if the model answers by its own chat template, or has none and no format is named."""
    if name is None or (name == MODEL_FORMAT and has_template):
        return None
    registered = LlamaChatCompletionHandlerRegistry._chat_handlers.get(name)  # pyright: ignore[reportPrivateUsage]
    is_own = registered is not None and registered is _OWN_HANDLERS.get(name)
    if has_template and (is_own or (registered is None and name in _OTHER_FORMATS)):
        return None
    return get_chat_completion_handler(name)
