"""Chat formats by llama-cpp-python's names, for models without a chat template: functions of messages that return the prompt and
what ends its answer. They write what the models were trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .._llama_types import StoppingCriteria

__all__ = [
    "FORMATS",
    "ChatFormatter",
    "ChatFormatterResponse",
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
]

Messages = Sequence[Mapping[str, Any]]


@dataclass
class ChatFormatterResponse:
    """A prompt, and what ends its answer."""

    #: The prompt.
    prompt: str
    #: Stop strings beside those of the request.
    stop: str | list[str] | None = None
    #: Stopping criteria.
    stopping_criteria: StoppingCriteria | None = None
    #: Whether the prompt begins with the beginning-of-text token if there must be one.
    added_special: bool = False


class ChatFormatter(Protocol):
    """Makes a prompt of messages."""

    def __call__(self, *, messages: Sequence[Any], **arguments: Any) -> ChatFormatterResponse: ...


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message, whose content may be a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)


def _system(messages: Messages, default: str = "") -> str:
    found = next((_content(message) for message in messages if message["role"] == "system"), "")
    return found or default


def _turns(messages: Messages) -> list[tuple[str, str]]:
    """The messages of user and assistant, each with its role."""
    return [(message["role"], _content(message)) for message in messages if message["role"] in ("user", "assistant")]


def _turns_with_system(messages: Messages, form: str = "{system}\n\n") -> list[tuple[str, str]]:
    """The same for models without system messages: it is part of the first message."""
    turns, system = _turns(messages), _system(messages)
    if turns and system:
        role, text = turns[0]
        turns[0] = role, form.format(system=system) + text
    return turns


def format_chatml(messages: Messages, **arguments: Any) -> ChatFormatterResponse:
    """ChatML."""
    text = "".join(f"<|im_start|>{message['role']}\n{_content(message)}<|im_end|>\n" for message in messages)
    return ChatFormatterResponse(text + "<|im_start|>assistant\n", "<|im_end|>")


def format_qwen(messages: Messages, **arguments: Any) -> ChatFormatterResponse:
    """ChatML with Qwen's system message where there is none."""
    system = {"role": "system", "content": _system(messages, "You are a helpful assistant.")}
    return format_chatml([system, *(message for message in messages if message["role"] != "system")])


def format_llama2(messages: Messages, **arguments: Any) -> ChatFormatterResponse:
    """Llama 2; the beginning-of-text token before the prompt is the tokenizer's."""
    text = ""
    for role, content in _turns_with_system(messages, "<<SYS>>\n{system}\n<</SYS>>\n\n"):
        if role == "assistant":
            text += f" {content} </s>"
        else:
            text += f"{'<s>' if text else ''}[INST] {content} [/INST]"
    return ChatFormatterResponse(text, "</s>")


def format_llama3(messages: Messages, **arguments: Any) -> ChatFormatterResponse:
    """Llama 3."""

    def header(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    text = "".join(f"{header(message['role'])}{_content(message)}<|eot_id|>" for message in messages)
    return ChatFormatterResponse(text + header("assistant"), "<|eot_id|>")


def format_alpaca(messages: Messages, **arguments: Any) -> ChatFormatterResponse:
    """Alpaca."""
    names = {"user": "### Instruction:", "assistant": "### Response:"}
    system = _system(messages)
    text = f"{system}\n\n" if system else ""
    text += "".join(f"{names[role]}\n{content}\n\n" for role, content in _turns(messages))
    return ChatFormatterResponse(text + "### Response:\n", "### Instruction:")


def format_vicuna(messages: Messages, **arguments: Any) -> ChatFormatterResponse:
    """Vicuna 1.1."""
    default = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
    )
    text = _system(messages, default) + " "
    for role, content in _turns(messages):
        text += f"USER: {content} " if role == "user" else f"ASSISTANT: {content}</s>"
    return ChatFormatterResponse(text + "ASSISTANT:", "</s>")


def format_zephyr(messages: Messages, **arguments: Any) -> ChatFormatterResponse:
    """Zephyr."""
    text = "".join(f"<|{message['role']}|>\n{_content(message)}</s>\n" for message in messages)
    return ChatFormatterResponse(text + "<|assistant|>\n", "</s>")


def format_mistral_instruct(messages: Messages, **arguments: Any) -> ChatFormatterResponse:
    """Mistral 7B Instruct; the beginning-of-text token before the prompt is the tokenizer's."""
    text = ""
    for role, content in _turns_with_system(messages):
        text += f"[INST] {content} [/INST]" if role == "user" else f"{content}</s>"
    return ChatFormatterResponse(text, "</s>")


def format_gemma(messages: Messages, **arguments: Any) -> ChatFormatterResponse:
    """Gemma."""
    names = {"user": "user", "assistant": "model"}
    turns = _turns_with_system(messages)
    text = "".join(f"<start_of_turn>{names[role]}\n{content}<end_of_turn>\n" for role, content in turns)
    return ChatFormatterResponse(text + "<start_of_turn>model\n", "<end_of_turn>")


def format_openchat(messages: Messages, **arguments: Any) -> ChatFormatterResponse:
    """OpenChat 3.5."""
    names = {"user": "GPT4 Correct User:", "assistant": "GPT4 Correct Assistant:"}
    system = _system(messages)
    text = f"{system}<|end_of_turn|>" if system else ""
    text += "".join(f"{names[role]} {content}<|end_of_turn|>" for role, content in _turns(messages))
    return ChatFormatterResponse(text + names["assistant"], "<|end_of_turn|>")


#: The formats by their names.
FORMATS: dict[str, ChatFormatter] = {
    "alpaca": format_alpaca,
    "chatml": format_chatml,
    "gemma": format_gemma,
    "llama-2": format_llama2,
    "llama-3": format_llama3,
    "mistral-instruct": format_mistral_instruct,
    "openchat": format_openchat,
    "qwen": format_qwen,
    "vicuna": format_vicuna,
    "zephyr": format_zephyr,
}
