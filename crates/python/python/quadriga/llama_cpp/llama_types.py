"""The result dictionaries of `Llama`, and what its methods take, as types: those of OpenAI by llama-cpp-python's names."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Union

__all__ = [
    "ChatCompletion",
    "ChatCompletionChoice",
    "ChatCompletionChunk",
    "ChatCompletionChunkChoice",
    "ChatCompletionChunkDelta",
    "ChatCompletionChunkDeltaEmpty",
    "ChatCompletionFunction",
    "ChatCompletionFunctionCall",
    "ChatCompletionFunctionCallOption",
    "ChatCompletionFunctionParameters",
    "ChatCompletionFunctions",
    "ChatCompletionLogprobToken",
    "ChatCompletionLogprobs",
    "ChatCompletionMessage",
    "ChatCompletionMessageToolCall",
    "ChatCompletionMessageToolCallChunk",
    "ChatCompletionMessageToolCallChunkFunction",
    "ChatCompletionMessageToolCallFunction",
    "ChatCompletionMessageToolCalls",
    "ChatCompletionNamedToolChoice",
    "ChatCompletionNamedToolChoiceFunction",
    "ChatCompletionRequestAssistantMessage",
    "ChatCompletionRequestAssistantMessageFunctionCall",
    "ChatCompletionRequestFunctionCall",
    "ChatCompletionRequestFunctionCallOption",
    "ChatCompletionRequestFunctionMessage",
    "ChatCompletionRequestMessage",
    "ChatCompletionRequestMessageContentPart",
    "ChatCompletionRequestMessageContentPartImage",
    "ChatCompletionRequestMessageContentPartImageImageUrl",
    "ChatCompletionRequestMessageContentPartText",
    "ChatCompletionRequestResponseFormat",
    "ChatCompletionRequestSystemMessage",
    "ChatCompletionRequestToolMessage",
    "ChatCompletionRequestUserMessage",
    "ChatCompletionResponseChoice",
    "ChatCompletionResponseFunction",
    "ChatCompletionResponseFunctionCall",
    "ChatCompletionResponseMessage",
    "ChatCompletionStreamResponse",
    "ChatCompletionStreamResponseChoice",
    "ChatCompletionStreamResponseDelta",
    "ChatCompletionStreamResponseDeltaEmpty",
    "ChatCompletionStreamResponseDeltaFunctionCall",
    "ChatCompletionTool",
    "ChatCompletionToolChoiceOption",
    "ChatCompletionToolFunction",
    "ChatCompletionTopLogprobToken",
    "Completion",
    "CompletionChoice",
    "CompletionChunk",
    "CompletionLogprobs",
    "CompletionUsage",
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "CreateCompletionStreamResponse",
    "CreateEmbeddingResponse",
    "Embedding",
    "EmbeddingData",
    "EmbeddingUsage",
    "JsonType",
]

#: What JSON can express.
JsonType = Union[None, int, str, bool, list[Any], dict[str, Any]]


class EmbeddingUsage(TypedDict):
    """The tokens of embedded texts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """An embedding."""

    index: int
    object: str
    embedding: list[float] | list[list[float]]


class CreateEmbeddingResponse(TypedDict):
    """The result of `create_embedding`."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion, in lists with an entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """The text of a completion, or of a chunk."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionUsage(TypedDict):
    """The tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _CreateCompletionResponse(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]


class CreateCompletionResponse(_CreateCompletionResponse, total=False):
    """The result of `create_completion`, or a chunk of it, which has no usage."""

    usage: CompletionUsage


class ChatCompletionResponseFunctionCall(TypedDict):
    """A call of a function."""

    name: str
    arguments: str


class ChatCompletionMessageToolCallFunction(TypedDict):
    """The function that a tool call names."""

    name: str
    arguments: str


class ChatCompletionMessageToolCall(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: ChatCompletionMessageToolCallFunction


ChatCompletionMessageToolCalls = list[ChatCompletionMessageToolCall]


class _ChatCompletionResponseMessage(TypedDict):
    content: str | None
    role: Literal["assistant", "function"]


class ChatCompletionResponseMessage(_ChatCompletionResponseMessage, total=False):
    """The message of an answer."""

    tool_calls: ChatCompletionMessageToolCalls
    function_call: ChatCompletionResponseFunctionCall


class _ChatCompletionFunction(TypedDict):
    name: str
    parameters: dict[str, JsonType]


class ChatCompletionFunction(_ChatCompletionFunction, total=False):
    """A function that a model may call."""

    description: str


class ChatCompletionTopLogprobToken(TypedDict):
    """A token that was possible, with its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatCompletionLogprobToken(ChatCompletionTopLogprobToken):
    """A token of an answer with its log-probability."""

    top_logprobs: list[ChatCompletionTopLogprobToken]


class ChatCompletionLogprobs(TypedDict):
    """Log-probabilities of an answer."""

    content: list[ChatCompletionLogprobToken] | None
    refusal: list[ChatCompletionLogprobToken] | None


class ChatCompletionResponseChoice(TypedDict):
    """An answer."""

    index: int
    message: ChatCompletionResponseMessage
    logprobs: ChatCompletionLogprobs | None
    finish_reason: str | None


class CreateChatCompletionResponse(TypedDict):
    """The result of `create_chat_completion`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: CompletionUsage


class ChatCompletionMessageToolCallChunkFunction(TypedDict):
    """A part of a call; the first one has the name."""

    name: str | None
    arguments: str


class _ChatCompletionMessageToolCallChunk(TypedDict):
    index: int
    type: Literal["function"]
    function: ChatCompletionMessageToolCallChunkFunction


class ChatCompletionMessageToolCallChunk(_ChatCompletionMessageToolCallChunk, total=False):
    """A part of a call of a tool."""

    id: str


class ChatCompletionStreamResponseDeltaEmpty(TypedDict):
    """The delta of the last chunk."""


class ChatCompletionStreamResponseDeltaFunctionCall(TypedDict):
    """A part of a call of a function."""

    name: str
    arguments: str


class ChatCompletionStreamResponseDelta(TypedDict, total=False):
    """What a chunk adds to the message."""

    content: str | None
    function_call: ChatCompletionStreamResponseDeltaFunctionCall | None
    tool_calls: list[ChatCompletionMessageToolCallChunk] | None
    role: Literal["system", "user", "assistant", "tool"] | None


class _ChatCompletionStreamResponseChoice(TypedDict):
    index: int
    delta: ChatCompletionStreamResponseDelta | ChatCompletionStreamResponseDeltaEmpty
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"] | None


class ChatCompletionStreamResponseChoice(_ChatCompletionStreamResponseChoice, total=False):
    """A chunk of an answer."""

    logprobs: ChatCompletionLogprobs | None


class CreateChatCompletionStreamResponse(TypedDict):
    """A chunk of a streamed `create_chat_completion`."""

    id: str
    model: str
    object: Literal["chat.completion.chunk"]
    created: int
    choices: list[ChatCompletionStreamResponseChoice]


class _ChatCompletionFunctions(TypedDict):
    name: str
    parameters: dict[str, JsonType]


class ChatCompletionFunctions(_ChatCompletionFunctions, total=False):
    """A function that a model may call."""

    description: str


class ChatCompletionFunctionCallOption(TypedDict):
    """The function to call."""

    name: str


class _ChatCompletionRequestResponseFormat(TypedDict):
    type: Literal["text", "json_object"]


class ChatCompletionRequestResponseFormat(_ChatCompletionRequestResponseFormat, total=False):
    """What an answer must be."""

    schema: JsonType


class ChatCompletionRequestMessageContentPartText(TypedDict):
    """A text in a message."""

    type: Literal["text"]
    text: str


class _ChatCompletionRequestMessageContentPartImageImageUrl(TypedDict):
    url: str


class ChatCompletionRequestMessageContentPartImageImageUrl(_ChatCompletionRequestMessageContentPartImageImageUrl, total=False):
    """The address of an image."""

    detail: Literal["auto", "low", "high"]


class ChatCompletionRequestMessageContentPartImage(TypedDict):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: str | ChatCompletionRequestMessageContentPartImageImageUrl


ChatCompletionRequestMessageContentPart = Union[
    ChatCompletionRequestMessageContentPartText,
    ChatCompletionRequestMessageContentPartImage,
]


class ChatCompletionRequestSystemMessage(TypedDict):
    """A message of the system."""

    role: Literal["system"]
    content: str | None


class ChatCompletionRequestUserMessage(TypedDict):
    """A message of the user."""

    role: Literal["user"]
    content: str | list[ChatCompletionRequestMessageContentPart] | None


class ChatCompletionRequestAssistantMessageFunctionCall(TypedDict):
    """A call of a function in an earlier answer."""

    name: str
    arguments: str


class _ChatCompletionRequestAssistantMessage(TypedDict):
    role: Literal["assistant"]


class ChatCompletionRequestAssistantMessage(_ChatCompletionRequestAssistantMessage, total=False):
    """An earlier answer."""

    content: str
    tool_calls: ChatCompletionMessageToolCalls
    function_call: ChatCompletionRequestAssistantMessageFunctionCall


class ChatCompletionRequestToolMessage(TypedDict):
    """The result of a tool."""

    role: Literal["tool"]
    content: str | None
    tool_call_id: str


class ChatCompletionRequestFunctionMessage(TypedDict):
    """The result of a function."""

    role: Literal["function"]
    content: str | None
    name: str


ChatCompletionRequestMessage = Union[
    ChatCompletionRequestSystemMessage,
    ChatCompletionRequestUserMessage,
    ChatCompletionRequestAssistantMessage,
    ChatCompletionRequestToolMessage,
    ChatCompletionRequestFunctionMessage,
]


class ChatCompletionRequestFunctionCallOption(TypedDict):
    """The function to call."""

    name: str


ChatCompletionRequestFunctionCall = Union[Literal["none", "auto"], ChatCompletionRequestFunctionCallOption]


ChatCompletionFunctionParameters = dict[str, JsonType]


class _ChatCompletionToolFunction(TypedDict):
    name: str
    parameters: ChatCompletionFunctionParameters


class ChatCompletionToolFunction(_ChatCompletionToolFunction, total=False):
    """The function of a tool."""

    description: str


class ChatCompletionTool(TypedDict):
    """A tool that a model may use."""

    type: Literal["function"]
    function: ChatCompletionToolFunction


class ChatCompletionNamedToolChoiceFunction(TypedDict):
    """The name of a function."""

    name: str


class ChatCompletionNamedToolChoice(TypedDict):
    """The tool to use."""

    type: Literal["function"]
    function: ChatCompletionNamedToolChoiceFunction


ChatCompletionToolChoiceOption = Union[Literal["none", "auto", "required"], ChatCompletionNamedToolChoice]


# Shorter names of the same types.
EmbeddingData = Embedding
CompletionChunk = CreateCompletionResponse
Completion = CreateCompletionResponse
CreateCompletionStreamResponse = CreateCompletionResponse
ChatCompletionMessage = ChatCompletionResponseMessage
ChatCompletionChoice = ChatCompletionResponseChoice
ChatCompletion = CreateChatCompletionResponse
ChatCompletionChunkDeltaEmpty = ChatCompletionStreamResponseDeltaEmpty
ChatCompletionChunkChoice = ChatCompletionStreamResponseChoice
ChatCompletionChunkDelta = ChatCompletionStreamResponseDelta
ChatCompletionChunk = CreateChatCompletionStreamResponse
ChatCompletionStreamResponse = CreateChatCompletionStreamResponse
ChatCompletionResponseFunction = ChatCompletionFunction
ChatCompletionFunctionCall = ChatCompletionResponseFunctionCall
