"""The class `Llama` of llama-cpp-python, with the same methods and result dictionaries, on top of `quadriga.Model`.

Programs run after changing their import:

    from quadriga.llama_cpp import Llama

Differences: the model's own chat template is always used unless `chat_template` is given (`chat_format` is ignored), embeddings
have length 1, and requests of several threads are computed together. With `echo`, the text begins with the prompt, and
`logprobs` are those of the answer. Absent: `suffix`, mirostat and tail-free sampling, `sample`, `LlamaTokenizer`,
`LlamaDiskCache`, draft models other than `LlamaPromptLookupDecoding`, `local_dir`, and the low-level functions of llama.cpp.
"""

from __future__ import annotations

import fnmatch
import importlib
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from typing import Any, Literal, Union

import numpy as np
import numpy.typing as npt

from .._llama_answers import (
    Answered,
    Head,
    LogitsRows,
    chat_logprobs,
    chat_piece_logprobs,
    completion_logprobs,
    piece_logprobs,
    usage_of,
)
from .._llama_types import (
    LlamaCache,
    LlamaGrammar,
    LlamaRAMCache,
    LlamaState,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    Tokens,
)
from .._model import Model
from .._quadriga import hub_files
from ..errors import InvalidRequest
from .llama_speculative import LlamaPromptLookupDecoding

__all__ = [
    "Llama",
    "LlamaCache",
    "LlamaGrammar",
    "LlamaRAMCache",
    "LlamaState",
    "LogitsProcessorList",
    "StoppingCriteriaList",
]

#: Arguments of `Llama` that have no counterpart, or that are decided automatically.
_IGNORED = frozenset(
    """
    split_mode main_gpu tensor_split vocab_only use_mlock kv_overrides n_ubatch n_threads_batch rope_scaling_type pooling_type
    rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow yarn_orig_ctx logits_all
    embedding offload_kqv flash_attn op_offload swa_full no_perf last_n_tokens_size lora_base numa chat_format chat_handler
    tokenizer spm_infill verbose kv_unified rpc_servers
    """.split()
)

#: llama.cpp's numbers of types of the KV cache.
_CACHE_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 7: "q5_1", 8: "q8_0", 30: "bf16"}


class Llama:
    """A model with the interface of llama-cpp-python."""

    def __init__(
        self,
        model_path: str,
        *,
        n_gpu_layers: int = 0,
        use_mmap: bool = True,
        seed: int = 0xFFFFFFFF,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_threads: int | None = None,
        lora_path: str | None = None,
        lora_scale: float = 1.0,
        type_k: int | None = None,
        type_v: int | None = None,
        chat_template: str | None = None,
        n_parallel: int = 4,
        draft_model: LlamaPromptLookupDecoding | None = None,
        cache_dir: str | PathLike[str] | None = None,
        hub_file: str | None = None,
        **ignored: Any,
    ) -> None:
        if not isinstance(model_path, (str, bytes, PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"model_path is {model_path!r}; it must be the path of a file")
        if draft_model is not None and not isinstance(draft_model, LlamaPromptLookupDecoding):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError("draft_model must be a LlamaPromptLookupDecoding; models that draft are the argument draft of quadriga.Model")
        unknown = ignored.keys() - _IGNORED
        if unknown:
            raise TypeError(f"Llama() has no argument {', '.join(sorted(unknown))}")
        self.model_path = model_path
        self.verbose: bool = bool(ignored.get("verbose", True))
        self.model = Model(
            model_path,
            n_ctx=n_ctx,
            n_gpu_layers="all" if n_gpu_layers < 0 else n_gpu_layers,
            n_batch=n_batch,
            n_threads=n_threads,
            n_parallel=n_parallel,
            cache_type=_cache_type(type_k),
            cache_type_v=_cache_type(type_v),
            lora=[(lora_path, lora_scale)] if lora_path else (),
            chat_template=chat_template,
            use_mmap=use_mmap,
            lookup=0 if draft_model is None else draft_model.num_pred_tokens,
            cache_dir=cache_dir,
            hub_file=hub_file,
        )
        if hub_file is not None:
            self.model_path = self.model.path
        self._seed: int | None = None if seed == 0xFFFFFFFF else seed
        self._tokens: list[int] = []
        self._rows: list[npt.NDArray[np.single]] = []

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        additional_files: Sequence[str] | None = None,
        local_dir: str | PathLike[str] | None = None,
        local_dir_use_symlinks: bool | Literal["auto"] = "auto",
        cache_dir: str | PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Llama:
        """A model of Hugging Face's hub, which is kept in the cache.

        Args:
            filename: The file, or a pattern such as `*Q4_K_M.gguf` that one file matches; without it the best that fits in
                memory.
            additional_files: The other parts of a model in several files; they are found without.
            cache_dir: The cache folder.
        """
        if local_dir is not None:
            raise InvalidRequest("local_dir is not supported: files are kept in the cache, whose folder is cache_dir")
        if filename is not None and any(letter in filename for letter in "*?["):
            filename = _the_file(repo_id, hub_files(repo_id, None if cache_dir is None else fspath(cache_dir)), filename)
        return cls(model_path=repo_id, hub_file=filename, cache_dir=cache_dir, **kwargs)

    # Text.

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
        _refuse_mirostat(mirostat_mode)
        rows = None if stopping_criteria is None else LogitsRows()
        answer = self.model.generate(
            prompt,
            stream=True,
            max_tokens=_limit(max_tokens),
            temperature=max(temperature, 0.0),
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            typical_p=typical_p,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            repeat_penalty=repeat_penalty,
            seed=self._seed if seed is None else seed,
            stop=stop or None,
            logprobs=logprobs,
            logits_processors=_processors(rows, logits_processor),
            **_constraint(grammar, logit_bias),
        )
        head = Head("cmpl", model or self.model_path)
        answered = Answered(self._remember, answer, stopping_criteria, rows)
        if stream:
            return self._completion_chunks(head, answered, logprobs is not None)
        completion = answered.finish()
        before = self._prompt_text(prompt) if echo else ""
        found = None if logprobs is None else completion_logprobs(self.model, completion, len(before))
        choice = {
            "text": before + completion.text,
            "index": 0,
            "logprobs": found,
            "finish_reason": completion.finish_reason,
        }
        return {**head.fields("text_completion"), "choices": [choice], "usage": usage_of(completion)}

    __call__ = create_completion

    def _completion_chunks(
        self, head: Head, answered: Answered, with_logprobs: bool
    ) -> Iterator[dict[str, Any]]:
        def chunk(text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
            choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": reason}
            return {**head.fields("text_completion"), "choices": [choice]}

        offset = 0
        for piece in answered.pieces():
            logprobs = piece_logprobs(self.model, piece, offset) if with_logprobs else None
            if piece.text or with_logprobs:
                yield chunk(piece.text, logprobs, None)
            offset += len(piece.text)
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
        _refuse_mirostat(mirostat_mode)
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
            max_tokens=_limit(max_tokens),
            temperature=max(temperature, 0.0),
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            typical_p=typical_p,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            repeat_penalty=repeat_penalty,
            seed=self._seed if seed is None else seed,
            stop=stop or None,
            logprobs=(top_logprobs or 0) if logprobs else None,
            response_format=response_format,
            logits_processors=list(logits_processor or ()),
            # A function that is named is called once.
            parallel_tool_calls=tool_choice is None or isinstance(tool_choice, str),
            **_constraint(grammar, logit_bias),
        )
        head = Head("chatcmpl", model or self.model_path)
        answered = Answered(self._remember, answer)
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
            "logprobs": chat_logprobs(self.model, completion) if logprobs else None,
            "finish_reason": completion.finish_reason,
        }
        return {**head.fields("chat.completion"), "choices": [choice], "usage": usage_of(completion)}

    def _chat_chunks(
        self, head: Head, answered: Answered, with_logprobs: bool, legacy: bool
    ) -> Iterator[dict[str, Any]]:
        def chunk(delta: dict[str, Any], reason: str | None, logprobs: Any = None) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return {**head.fields("chat.completion.chunk"), "choices": [choice]}

        yield chunk({"role": "assistant"}, None)
        for piece in answered.pieces():
            logprobs = chat_piece_logprobs(self.model, piece) if with_logprobs else None
            if piece.text or with_logprobs:
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

    def generate(
        self,
        tokens: Tokens,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.8,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteria | None = None,
        grammar: LlamaGrammar | None = None,
    ) -> Iterator[int]:
        """The tokens that follow tokens, one after another, until the caller ends the loop."""
        rows = None if stopping_criteria is None else LogitsRows()
        answer = self.model.generate(
            tokens,
            stream=True,
            temperature=max(temp, 0.0),
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            typical_p=typical_p,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            seed=self._seed,
            logits_processors=_processors(rows, logits_processor),
            **_constraint(grammar, None),
        )
        for piece in Answered(self._remember, answer, stopping_criteria, rows).pieces():
            yield piece.token

    # Embeddings.

    def create_embedding(self, input: str | Sequence[str], model: str | None = None) -> dict[str, Any]:
        """Embeddings as OpenAI's object."""
        texts = [input] if isinstance(input, str) else list(input)
        vectors, count = self.model.embed_counted(texts, truncate=True)
        rows = [{"object": "embedding", "embedding": row.tolist(), "index": index} for index, row in enumerate(vectors)]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": rows, "model": model or self.model_path, "usage": usage}

    def embed(
        self, input: str | Sequence[str], normalize: bool = False, truncate: bool = True, return_count: bool = False
    ) -> Any:
        """The embedding of a text as a list, or those of several; of length 1 in any case."""
        vectors, count = self.model.embed_counted(input, truncate=truncate)
        embedded = vectors.tolist()
        return (embedded, count) if return_count else embedded

    # Tokens.

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """The tokens of a text."""
        return self.model.tokenize(text.decode("utf-8", "replace"), add_bos=add_bos, special=special)

    def detokenize(self, tokens: Tokens, prev_tokens: Tokens | None = None, special: bool = False) -> bytes:
        """The bytes of tokens."""
        return self.model.detokenize_bytes(tokens, special=special)

    def token_bos(self) -> int:
        """The beginning-of-text token, or -1."""
        return -1 if self.model.bos_token is None else self.model.bos_token

    def token_eos(self) -> int:
        """The end-of-text token, or -1."""
        return -1 if self.model.eos_token is None else self.model.eos_token

    def token_nl(self) -> int:
        """The first token of a line feed."""
        return (self.model.tokenize("\n") or [-1])[-1]

    def n_ctx(self) -> int:
        """Context size."""
        return self.model.n_ctx

    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return self.model.n_vocab

    def n_embd(self) -> int:
        """Elements of an embedding."""
        return self.model.n_embd

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the file, as texts."""
        return {key: str(value) for key, value in self.model.metadata.items()}

    # State.

    @property
    def n_tokens(self) -> int:
        """Tokens of the latest prompt and its answer."""
        return len(self._tokens)

    @property
    def input_ids(self) -> npt.NDArray[np.intc]:
        """The tokens of the latest prompt and its answer."""
        return np.array(self._tokens, dtype=np.intc)

    def eval(self, tokens: Tokens) -> None:
        """Adds tokens to those so far; `scores` has the logits after each."""
        start = len(self._tokens)
        self._tokens.extend(int(token) for token in tokens)
        self._rows.extend(self.model.logits(self._tokens)[start:])

    @property
    def scores(self) -> npt.NDArray[np.single]:
        """The logits after each token given to `eval`."""
        if not self._rows:
            return np.zeros((0, self.n_vocab()), dtype=np.single)
        return np.stack(self._rows)

    @property
    def eval_logits(self) -> list[list[float]]:
        """The same as lists."""
        return self.scores.tolist()

    def reset(self) -> None:
        """Begins anew."""
        self._tokens, self._rows = [], []

    def set_seed(self, seed: int) -> None:
        """The random seed of requests without their own."""
        self._seed = seed

    def set_cache(self, cache: LlamaRAMCache | None) -> None:
        """Has no effect: prefixes of earlier prompts are always kept."""

    def save_state(self) -> LlamaState:
        """The tokens of the latest prompt and its answer, with their KV cache."""
        saved = self.model.save_state(self._tokens)
        return LlamaState(self.input_ids, self.n_tokens, saved, len(saved), self._seed)

    def load_state(self, state: LlamaState) -> None:
        """Loads a state: prompts that begin with its tokens find them in the KV cache."""
        self.model.load_state(state.llama_state)
        self._tokens, self._rows = [int(token) for token in state.input_ids], []
        self._seed = state.seed

    def close(self) -> None:
        """Frees the memory."""
        self.model.close()

    def _remember(self, tokens: list[int]) -> None:
        """Keeps the tokens of a prompt and its answer."""
        self._tokens, self._rows = tokens, []

    def _prompt_text(self, prompt: str | Tokens) -> str:
        return prompt if isinstance(prompt, str) else self.model.detokenize(prompt)


def _limit(max_tokens: int | None) -> int | None:
    return None if max_tokens is None or max_tokens <= 0 else max_tokens


def _processors(rows: LogitsRows | None, given: LogitsProcessorList | None) -> list[Any]:
    """Logits processors: first the one that keeps logits for stopping criteria."""
    return [*([] if rows is None else [rows]), *(given or ())]


def _refuse_mirostat(mode: int) -> None:
    if mode:
        raise InvalidRequest("mirostat is not supported; use top_p and min_p")


def _constraint(grammar: LlamaGrammar | None, logit_bias: Mapping[Any, float] | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if logit_bias:
        options["logit_bias"] = {str(token): bias for token, bias in logit_bias.items()}
    if grammar is not None and grammar.schema is not None:
        options["guided_json"] = grammar.schema
    elif grammar is not None and grammar.grammar:
        options["grammar"] = grammar.grammar
    return options


def _cache_type(number: Union[int, None]) -> str:
    if number is None:
        return "f16"
    if number not in _CACHE_TYPES:
        raise InvalidRequest(f"the KV cache cannot have type {number}; known are {_CACHE_TYPES}")
    return _CACHE_TYPES[number]


def _the_file(repository: str, files: Sequence[str], pattern: str) -> str:
    """The one file, or the first part of the one model in parts, that a pattern matches."""
    matching = sorted(file for file in files if fnmatch.fnmatch(file, pattern))
    models = sorted({re.sub(r"-\d{5}(-of-\d{5}\.gguf)$", r"-00001\1", file) for file in matching})
    if not models:
        known = "\n".join(sorted(files))
        raise InvalidRequest(f"no file of {repository} matches {pattern}; there are:\n{known}")
    if len(models) > 1:
        found = "\n".join(models)
        raise InvalidRequest(f"several files of {repository} match {pattern}; name one of them:\n{found}")
    return models[0]
