"""The class `Llama` of llama-cpp-python, with the same methods and result dictionaries, on top of `quadriga.Model`.

Programs run after changing their import:

    from quadriga.llama_cpp import Llama

Differences: the model's own chat template is always used unless `chat_template` is given (`chat_format` is ignored), embeddings
have length 1, requests of several threads are computed together, and mirostat and tail-free sampling do not exist.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, Union

import numpy as np
import numpy.typing as npt

from ._answers import Completion, Stream
from ._model import Model
from ._quadriga import Piece
from .errors import InvalidRequest

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

Tokens = Sequence[int]
StoppingCriteria = Callable[[npt.NDArray[np.intc], npt.NDArray[np.single]], bool]
LogitsProcessor = Callable[[npt.NDArray[np.intc], npt.NDArray[np.single]], npt.NDArray[np.single]]


class LogitsProcessorList(list[LogitsProcessor]):
    """Logits processors, which are called one after another."""

    def __call__(self, input_ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class StoppingCriteriaList(list[StoppingCriteria]):
    """Stopping criteria: an answer ends when one of them returns true."""

    def __call__(self, input_ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]) -> bool:
        return any(criterion(input_ids, logits) for criterion in self)


@dataclass
class LlamaGrammar:
    """A grammar that answers satisfy: GBNF, or a JSON schema."""

    grammar: str | None = None
    schema: Any = None

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """A grammar in GBNF."""
        return cls(grammar=grammar)

    @classmethod
    def from_file(cls, file: str | PathLike[str], verbose: bool = True) -> LlamaGrammar:
        """A grammar in GBNF from a file."""
        with open(file, encoding="utf-8") as opened:
            return cls(grammar=opened.read())

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> LlamaGrammar:
        """JSON of a schema."""
        return cls(schema=json.loads(json_schema))


class LlamaRAMCache:
    """Prefixes of earlier prompts are always kept; this class only exists for programs that make one."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        self.capacity_bytes = capacity_bytes


LlamaCache = LlamaRAMCache


@dataclass
class LlamaState:
    """The state of a `Llama`: its tokens, and their KV cache."""

    input_ids: npt.NDArray[np.intc]
    n_tokens: int
    llama_state: bytes = field(repr=False)
    llama_state_size: int
    seed: int | None


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
        **ignored: Any,
    ) -> None:
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
        )
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
        """A model of Hugging Face's hub; `filename` may be a pattern such as `*Q4_K_M.gguf`, of which the type counts."""
        quant = _quant(filename)
        return cls(model_path=f"{repo_id}:{quant}" if quant else repo_id, **kwargs)

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
            logits_processors=list(logits_processor or ()),
            **_constraint(grammar, logit_bias),
        )
        head = _Head("cmpl", model or self.model_path)
        answered = _Answered(self, answer, stopping_criteria)
        if stream:
            return self._completion_chunks(head, answered, logprobs is not None)
        completion = answered.finish()
        text = (self._prompt_text(prompt) if echo else "") + completion.text
        found = self._logprobs(completion, logprobs)
        choice = {"text": text, "index": 0, "logprobs": found, "finish_reason": completion.finish_reason}
        return {**head.fields("text_completion"), "choices": [choice], "usage": _usage(completion)}

    __call__ = create_completion

    def _completion_chunks(
        self, head: _Head, answered: _Answered, with_logprobs: bool
    ) -> Iterator[dict[str, Any]]:
        def chunk(text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
            choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": reason}
            return {**head.fields("text_completion"), "choices": [choice]}

        offset = 0
        for piece in answered.pieces():
            logprobs = self._piece_logprobs([piece], offset) if with_logprobs else None
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
        head = _Head("chatcmpl", model or self.model_path)
        answered = _Answered(self, answer, None)
        if stream:
            return self._chat_chunks(head, answered)
        completion = answered.finish()
        message: dict[str, Any] = {"role": "assistant", "content": completion.text}
        if completion.tool_calls:
            message["content"] = completion.text or None
            message["tool_calls"] = [call.message() for call in completion.tool_calls]
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": self._chat_logprobs(completion) if logprobs else None,
            "finish_reason": completion.finish_reason,
        }
        return {**head.fields("chat.completion"), "choices": [choice], "usage": _usage(completion)}

    def _chat_chunks(self, head: _Head, answered: _Answered) -> Iterator[dict[str, Any]]:
        def chunk(delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            return {**head.fields("chat.completion.chunk"), "choices": [choice]}

        yield chunk({"role": "assistant"}, None)
        for piece in answered.pieces():
            if piece.text:
                yield chunk({"content": piece.text}, None)
            for index, name, arguments in piece.tool_calls:
                function: dict[str, Any] = {"arguments": arguments}
                call: dict[str, Any] = {"index": index, "function": function}
                if name is not None:
                    function["name"] = name
                    call.update(id=f"call_{uuid.uuid4().hex[:24]}", type="function")
                yield chunk({"tool_calls": [call]}, None)
        yield chunk({}, answered.finish().finish_reason)

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
            logits_processors=list(logits_processor or ()),
            **_constraint(grammar, None),
        )
        for piece in _Answered(self, answer, stopping_criteria).pieces():
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

    def note(self, tokens: list[int]) -> None:
        """Remembers the tokens of a prompt and its answer."""
        self._tokens, self._rows = tokens, []

    # Log-probabilities.

    def _prompt_text(self, prompt: str | Tokens) -> str:
        return prompt if isinstance(prompt, str) else self.model.detokenize(prompt)

    def _token_text(self, token: int) -> str:
        return self.model.detokenize([token], special=True)

    def _logprobs(self, completion: Completion, wanted: int | None) -> dict[str, Any] | None:
        if wanted is None or completion.logprobs is None:
            return None
        return self._lists(completion.tokens, list(completion.logprobs), completion.top_logprobs, 0)

    def _piece_logprobs(self, pieces: Sequence[Piece], offset: int) -> dict[str, Any]:
        logprobs = [piece.logprob for piece in pieces]
        return self._lists([piece.token for piece in pieces], logprobs, [piece.top_logprobs for piece in pieces], offset)

    def _lists(
        self, tokens: Tokens, logprobs: Sequence[float | None], top: Sequence[list[tuple[int, float]]], offset: int
    ) -> dict[str, Any]:
        texts = [self._token_text(token) for token in tokens]
        offsets: list[int] = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "text_offset": offsets,
            "token_logprobs": [None if logprob is None else float(logprob) for logprob in logprobs],
            "top_logprobs": [{self._token_text(token): logprob for token, logprob in row} for row in top],
        }

    def _chat_logprobs(self, completion: Completion) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._token_text(token)
            return {"token": text, "bytes": list(text.encode()), "logprob": float(logprob)}

        logprobs = [] if completion.logprobs is None else list(completion.logprobs)
        rows = zip(completion.tokens, logprobs, completion.top_logprobs)
        content = [
            {**entry(token, logprob), "top_logprobs": [entry(*one) for one in top]} for token, logprob, top in rows
        ]
        return {"content": content, "refusal": None}


class _Head:
    """The fields that all chunks of an answer share."""

    def __init__(self, prefix: str, model: str) -> None:
        self._fields = {"id": f"{prefix}-{uuid.uuid4()}", "created": int(time.time()), "model": model}

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self._fields["id"], "object": kind, **self._fields}


class _Answered:
    """An answer whose tokens the `Llama` remembers, with stopping criteria."""

    def __init__(self, llama: Llama, stream: Stream, criteria: StoppingCriteria | None) -> None:
        self._llama, self._stream, self._criteria = llama, stream, criteria
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
                    if self._criteria(tokens, np.zeros(0, dtype=np.single)):
                        self._stopped = self._stream.stopped()
                        return
        finally:
            self._llama.note(self._tokens)

    def finish(self) -> Completion:
        for _ in self.pieces():
            pass
        return self._stopped or self._stream.completion


def _usage(completion: Completion) -> dict[str, int]:
    usage = completion.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def _limit(max_tokens: int | None) -> int | None:
    return None if max_tokens is None or max_tokens <= 0 else max_tokens


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


def _quant(filename: str | None) -> str | None:
    """The type that a file's name or a pattern of names has."""
    found = re.findall(r"(?i)(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4|NVFP4|BF16|F16|F32)", filename or "")
    return found[-1].upper() if found else None
