"""A loaded model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from ._answers import Completion, Stream
from ._facts import ModelFacts
from ._lifetime import open_models
from ._logits import LogitsProcessor
from ._quadriga import ModelCore
from ._requests import (
    Adapters,
    AnyPath,
    Messages,
    adapter_list,
    chat_options,
    checked_count,
    checked_flag,
    checked_text,
    checked_tokens,
    existing_path,
    message_list,
    names_list,
    path_text,
    refuse_stream,
    request_json,
    request_options,
    response_format_and_parser,
    tool_list,
)
from .errors import InvalidRequest

__all__ = ["Model"]

#: Texts that are embedded by one call of the native part.
_EMBEDDED_TEXTS = 64

#: The largest `n_parallel`: beyond it, the KV cache has no room for contexts.
_MOST_PARALLEL = 1 << 16

#: Prompts of at most so many characters or tokens, with these options, begin at once: the event loop's thread submits them.
_SHORT_PROMPT = 1024
_QUICK_OPTIONS = frozenset("max_tokens temperature top_p top_k min_p seed stop logprobs logits_processors ignore_eos".split())


class Model(ModelFacts):
    """A language or embedding model from a GGUF file, loaded and ready to answer.

    Requests of all threads share one engine, which computes them together. A model can be closed, or used in a `with`
    statement; otherwise its memory is freed with the object.
    """

    def __init__(
        self,
        path: AnyPath | None = None,
        *,
        n_ctx: int = 0,
        n_gpu_layers: int | Literal["auto", "all"] = "auto",
        n_parallel: int = 8,
        kv_tokens: int | None = None,
        n_batch: int = 512,
        n_threads: int | None = None,
        devices: str | Sequence[str] = (),
        vram_budget: int | None = None,
        tensor_overrides: str | Sequence[str] = (),
        cache_type: str = "f16",
        cache_type_v: str | None = None,
        cache_ram: int = 0,
        cache_file: AnyPath | None = None,
        lookup: int = 0,
        draft: AnyPath | None = None,
        lora: Adapters = (),
        chat_template: str | None = None,
        use_mmap: bool = True,
        offline: bool = False,
        cache_dir: AnyPath | None = None,
        hub_file: str | None = None,
    ) -> None:
        """Loads a model.

        Args:
            path: A GGUF file, or a model of Hugging Face's hub as ORG/REPO or ORG/REPO:QUANT, which is downloaded once into
                the cache; without QUANT, or with one that the repository lacks (a warning), the best that fits in memory.
                Without a path a small model, SmolLM2 135M.
            n_ctx: Context size of a request in tokens; 0 for what the model was trained with, or less where memory is short.
            n_gpu_layers: Layers on the GPU: a number, "all", or "auto" for what saves the most time and fits.
            n_parallel: Most requests that are computed at once; at most 65536.
            kv_tokens: KV cache in tokens, all requests together.
            n_batch: Most tokens that are computed at once.
            n_threads: CPU threads.
            devices: Devices by name, such as "cuda:0" or "cpu"; by default the first GPU and the CPU.
            vram_budget: Bytes that may be used on each GPU.
            tensor_overrides: Tensors that are placed by name, such as "exps=CPU".
            cache_type: Type of the KV cache: f32, f16, bf16, q8_0, q5_1 or q4_0.
            cache_type_v: Type of the values, if it is another one.
            cache_ram: Bytes of host memory for prefixes of earlier requests whose place was needed.
            cache_file: A file for prefixes that outlasts the process.
            lookup: Prompt look-up: the most tokens that are guessed ahead in text that repeats.
            draft: A smaller model with the same vocabulary that guesses tokens ahead.
            lora: LoRA adapters, each a file or a file and its scale.
            chat_template: A Jinja template in place of the model's own.
            use_mmap: Map the file; otherwise it is read.
            offline: Use models in the cache only.
            cache_dir: The cache folder.
            hub_file: With ORG/REPO as path, the file of that repository, in place of QUANT.
        """
        options = {
            "n_ctx": checked_count("n_ctx", n_ctx, 0),
            "n_batch": checked_count("n_batch", n_batch, 1),
            "n_parallel": checked_count("n_parallel", n_parallel, 1, _MOST_PARALLEL),
            "kv_tokens": None if kv_tokens is None else checked_count("kv_tokens", kv_tokens, 1),
            "n_gpu_layers": str(n_gpu_layers),
            "devices": names_list("devices", devices),
            "n_threads": None if n_threads is None else checked_count("n_threads", n_threads, 1),
            "cache_type_k": checked_text("cache_type", cache_type),
            "cache_type_v": checked_text("cache_type_v", cache_type if cache_type_v is None else cache_type_v),
            "vram_budget": None if vram_budget is None else checked_count("vram_budget", vram_budget, 0),
            "tensor_overrides": names_list("tensor_overrides", tensor_overrides),
            "cache_ram": checked_count("cache_ram", cache_ram, 0),
            "lookup": checked_count("lookup", lookup, 0),
            "chat_template": None if chat_template is None else checked_text("chat_template", chat_template),
            "use_mmap": checked_flag("use_mmap", use_mmap),
            "offline": checked_flag("offline", offline),
            "hub_file": None if hub_file is None else checked_text("hub_file", hub_file),
        }
        # A path need not be Unicode, which JSON is.
        paths = {
            "path": path_text(path),
            "cache_file": path_text(cache_file),
            "draft": None if draft is None else existing_path("draft", draft),
            "lora": adapter_list(lora),
            "cache_dir": path_text(cache_dir),
        }
        super().__init__(ModelCore(json.dumps(options), paths))
        open_models[self] = self._core.begin_close

    def close(self) -> None:
        """Ends all requests and frees the memory. It waits for logits processors that are running; Ctrl-C ends the wait, and
        the rest is done in the background."""
        self._core.close()
        open_models.pop(self, None)

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<quadriga.Model {self.name} ({self.architecture}, context {self.n_ctx}) on {', '.join(self.devices)}>"

    # Requests.

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[False] = ...,
        max_tokens: int | None = ...,
        temperature: float | None = ...,
        top_p: float | None = ...,
        top_k: int | None = ...,
        min_p: float | None = ...,
        seed: int | None = ...,
        stop: str | Sequence[str] | None = ...,
        logprobs: int | None = ...,
        response_format: Any = ...,
        logits_processors: Sequence[LogitsProcessor] = ...,
        **more: Any,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[True],
        max_tokens: int | None = ...,
        temperature: float | None = ...,
        top_p: float | None = ...,
        top_k: int | None = ...,
        min_p: float | None = ...,
        seed: int | None = ...,
        stop: str | Sequence[str] | None = ...,
        logprobs: int | None = ...,
        response_format: Any = ...,
        logits_processors: Sequence[LogitsProcessor] = ...,
        **more: Any,
    ) -> Stream: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: bool = False,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        logprobs: int | None = None,
        response_format: Any = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        **more: Any,
    ) -> Completion | Stream:
        """Continues a text, or tokens, as they are: without the chat template.

        Args:
            prompt: The text; control tokens that are spelled out become those tokens.
            stream: Return a `Stream` of pieces at once, instead of the whole answer at its end.
            max_tokens: Most tokens of the answer; by default as many as the context has room for.
            temperature: Sampling temperature; 0 for the most probable token.
            top_p: Keep the most probable tokens that have this probability together.
            top_k: Keep the K most probable tokens; 0 for all.
            min_p: Keep tokens that are at least this probable, compared with the most probable one.
            seed: Random seed; by default a random one.
            stop: Stop strings: the answer ends before the first of them.
            logprobs: Report log-probabilities, and the N most probable tokens beside each.
            response_format: What the answer must be: OpenAI's object, a JSON schema, or a class of pydantic.
            logits_processors: Functions of tokens and logits that are called before each token is sampled.
            **more: Further sampling options by their names in llama.cpp's server, such as `repeat_penalty` or `grammar`; with
                `echo`, the text of the whole answer (not the pieces of a stream) begins with the prompt, and with `logprobs`
                it has `prompt_logprobs`.
        """
        body = request_options(locals(), more)
        body["prompt"] = prompt if isinstance(prompt, str) else checked_tokens(prompt)
        echoed = ""
        if more.get("echo"):
            echoed = prompt if isinstance(prompt, str) else self.detokenize(prompt)
        body["max_tokens"] = -1 if max_tokens is None else max_tokens
        body["logprobs"] = logprobs
        return self._answer("/v1/completions", body, response_format, logits_processors, stream, echoed)

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        stream: Literal[False] = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        tool_choice: str | Mapping[str, Any] | None = ...,
        max_tokens: int | None = ...,
        temperature: float | None = ...,
        top_p: float | None = ...,
        top_k: int | None = ...,
        min_p: float | None = ...,
        seed: int | None = ...,
        stop: str | Sequence[str] | None = ...,
        logprobs: int | None = ...,
        response_format: Any = ...,
        logits_processors: Sequence[LogitsProcessor] = ...,
        **more: Any,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        stream: Literal[True],
        tools: Sequence[Mapping[str, Any]] | None = ...,
        tool_choice: str | Mapping[str, Any] | None = ...,
        max_tokens: int | None = ...,
        temperature: float | None = ...,
        top_p: float | None = ...,
        top_k: int | None = ...,
        min_p: float | None = ...,
        seed: int | None = ...,
        stop: str | Sequence[str] | None = ...,
        logprobs: int | None = ...,
        response_format: Any = ...,
        logits_processors: Sequence[LogitsProcessor] = ...,
        **more: Any,
    ) -> Stream: ...

    def chat(
        self,
        messages: Messages,
        *,
        stream: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        logprobs: int | None = None,
        response_format: Any = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        **more: Any,
    ) -> Completion | Stream:
        """Answers a conversation, rendered with the model's chat template.

        Args:
            messages: Messages in OpenAI's format, `{"role": …, "content": …}`, or a text as the user's only message.
            tools: Functions that the model may call, in OpenAI's format.
            tool_choice: "auto", "none", "required", or the function to call.

        The other arguments are those of `generate`.
        """
        if "echo" in more:
            raise TypeError("chat has no option echo; the prompt is chat_tokens(messages)")
        body = request_options(locals(), more)
        body["messages"] = message_list(messages)
        body["tools"] = tool_list(tools)
        body["tool_choice"] = tool_choice
        body["max_tokens"] = -1 if max_tokens is None else max_tokens
        if logprobs is not None:
            body["logprobs"], body["top_logprobs"] = True, logprobs
        return self._answer("/v1/chat/completions", body, response_format, logits_processors, stream)

    async def generate_async(self, prompt: str | Sequence[int], **options: Any) -> Completion:
        """As `generate`, in an event loop. To stream, use `async for` on `generate(…, stream=True)`."""
        refuse_stream("generate", options)
        # Tokenizing a long text, or compiling a grammar, would keep the event loop.
        if len(prompt) <= _SHORT_PROMPT and options.keys() <= _QUICK_OPTIONS:
            return await self.generate(prompt, stream=True, **options).collect_async()
        stream = await asyncio.to_thread(self.generate, prompt, stream=True, **options)
        return await stream.collect_async()

    async def chat_async(self, messages: Messages, **options: Any) -> Completion:
        """As `chat`, in an event loop. To stream, use `async for` on `chat(…, stream=True)`."""
        refuse_stream("chat", options)
        stream = await asyncio.to_thread(self.chat, messages, stream=True, **options)
        return await stream.collect_async()

    def _answer(
        self,
        path: str,
        body: dict[str, Any],
        response_format: Any,
        processors: Sequence[LogitsProcessor],
        streams: bool,
        echoed: str = "",
    ) -> Completion | Stream:
        body["response_format"], parse = response_format_and_parser(response_format)
        core = self._core.submit(path, request_json(body), list(processors) or None)
        stream = Stream(core, parse, self, echoed)
        return stream if streams else stream.collect()

    # Texts, tokens, vectors.

    def tokenize(self, text: str, *, add_bos: bool = False, special: bool = False) -> list[int]:
        """The tokens of a text.

        Args:
            add_bos: Begin with the beginning-of-text token, if the vocabulary uses one.
            special: Control tokens that are spelled out become those tokens.
        """
        return self._core.tokenize(text, add_bos, special)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens. Bytes that are not UTF-8 become U+FFFD; control tokens have text only with `special`."""
        return self.detokenize_bytes(tokens, special=special).decode("utf-8", "replace")

    def detokenize_bytes(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        """The bytes of tokens, which may begin and end within a character."""
        return self._core.detokenize(checked_tokens(tokens), special)

    def chat_tokens(self, messages: Messages, **options: Any) -> list[int]:
        """The tokens of a conversation, as `chat` gives them to the model."""
        body = {"messages": message_list(messages), **chat_options(options)}
        return self._core.prompt_tokens("/v1/chat/completions", request_json(body))

    @overload
    def embed(self, texts: str, *, truncate: bool = ...) -> npt.NDArray[np.float32]: ...

    @overload
    def embed(self, texts: Sequence[str], *, truncate: bool = ...) -> npt.NDArray[np.float32]: ...

    def embed(self, texts: str | Sequence[str], *, truncate: bool = False) -> npt.NDArray[np.float32]:
        """The embedding of a text, a vector of length 1, or those of several texts as the rows of a matrix.

        Args:
            truncate: Cut texts that are longer than the context, instead of raising `ContextFull`.
        """
        vectors, _ = self.embed_counted(texts, truncate=truncate)
        return vectors

    def embed_counted(
        self, texts: str | Sequence[str], *, truncate: bool = False
    ) -> tuple[npt.NDArray[np.float32], int]:
        """As `embed`, with the number of tokens of all texts."""
        if isinstance(texts, str):
            vectors, count = self.embed_counted([texts], truncate=truncate)
            return vectors[0], count
        if len(texts) == 0:
            return np.zeros((0, self.n_embd), dtype=np.float32), 0
        parts: list[npt.NDArray[np.float32]] = []
        count = 0
        # Between the parts Python looks at signals.
        for start in range(0, len(texts), _EMBEDDED_TEXTS):
            floats, counted = self._core.embed(list(texts[start : start + _EMBEDDED_TEXTS]), truncate)
            parts.append(np.asarray(floats))
            count += counted
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)), count

    def rank(self, query: str, documents: Sequence[str]) -> npt.NDArray[np.float32]:
        """How well documents answer a query, for models with a classification head (rerankers): the larger the better."""
        return np.array(self._core.rank(query, list(documents)), dtype=np.float32)

    def logits(self, prompt: str | Sequence[int], *, last: bool = False, start: int = 0) -> npt.NDArray[np.float32]:
        """The logits after each token of a prompt, one row for each, or the single row after the last one.

        They are computed apart from other requests, with a KV cache of their own.

        Args:
            last: The single row after the last token.
            start: Only the rows from this token on. Tokens before it that the previous call had, too, are not computed again.
        """
        tokens = self.tokenize(prompt, add_bos=True, special=True) if isinstance(prompt, str) else prompt
        tokens = checked_tokens(tokens)
        end = max(len(tokens) - 1, 0)
        if not 0 <= start <= end:
            raise InvalidRequest(f"start is {start}, but the prompt has {len(tokens)} tokens: it must be from 0 to {end}")
        rows: npt.NDArray[np.float32] = np.asarray(self._core.logits(tokens, end if last else start))
        return rows[0] if last else rows

    # The KV cache.

    def save_state(self, tokens: str | Sequence[int]) -> bytes:
        """The KV cache of these tokens, as bytes: of as many as were computed by earlier requests and are still there, in whole
        pages of 64 tokens. Nothing is computed for it: before the first request with these tokens, the state is empty.

        Another process with the same model and KV-cache type can load it.
        """
        if isinstance(tokens, str):
            tokens = self.tokenize(tokens, add_bos=True, special=True)
        return self._core.save_state(checked_tokens(tokens))

    def load_state(self, state: bytes) -> int:
        """Loads a saved KV cache. Requests that begin with its tokens find them there.

        Returns:
            The number of tokens.
        """
        return self._core.load_state(state)

    def clear_cache(self) -> None:
        """Forgets the KV cache of earlier requests."""
        self._core.clear_cache()
