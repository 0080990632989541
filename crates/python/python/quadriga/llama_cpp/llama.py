"""The class `Llama`."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from os import PathLike, fsdecode, fspath
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .._llama_answers import Answered, LogitsRows, log_softmax
from .._llama_completions import LlamaCompletions
from .._llama_options import (
    cache_type,
    check_further,
    check_sampling,
    constraint,
    existing_model,
    processors,
    sampling,
    the_file,
)
from .._llama_types import (
    BaseLlamaCache,
    LlamaGrammar,
    LlamaState,
    LogitsProcessor,
    LogitsProcessorList,
    MinTokensLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    Tokens,
    scores_of,
)
from .._model import Model
from .._quadriga import hub_files
from ..errors import InvalidRequest
from ._constants import LLAMA_DEFAULT_SEED, LLAMA_POOLING_TYPE_LAST, LLAMA_POOLING_TYPE_MEAN
from .llama_chat_format import MODEL_FORMAT, handler_of
from .llama_speculative import LlamaPromptLookupDecoding
from .llama_tokenizer import LlamaTokenizer

__all__ = [
    "Llama",
    "LlamaGrammar",
    "LlamaState",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MinTokensLogitsProcessor",
    "StoppingCriteria",
    "StoppingCriteriaList",
]


class Llama(LlamaCompletions):
    """A model with the interface of llama-cpp-python."""

    def __init__(
        self,
        model_path: str | PathLike[str],
        *,
        n_gpu_layers: int = 0,
        use_mmap: bool = True,
        seed: int = 0xFFFFFFFF,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_threads: int | None = None,
        last_n_tokens_size: int = 64,
        lora_path: str | None = None,
        lora_scale: float = 1.0,
        type_k: int | None = None,
        type_v: int | None = None,
        chat_format: str | None = None,
        chat_handler: Callable[..., Any] | None = None,
        chat_template: str | None = None,
        n_parallel: int = 4,
        draft_model: LlamaPromptLookupDecoding | None = None,
        **further: Any,
    ) -> None:
        """Loads a model. A path where nothing is raises `ModelNotFound`, a `ValueError`."""
        given = {name: value for name, value in locals().items() if name not in ("self", "further", "__class__")}
        # Only `from_pretrained` gives the name of a repository, with its file and the cache folder.
        hub: dict[str, Any] | None = further.pop("_hub", None)
        if not isinstance(model_path, (str, bytes, PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"model_path is {model_path!r}; it must be the path of a file")
        if draft_model is not None and not isinstance(draft_model, LlamaPromptLookupDecoding):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError("draft_model must be a LlamaPromptLookupDecoding; models that draft are the argument draft of quadriga.Model")
        if chat_handler is not None and not callable(chat_handler):
            raise TypeError(f"chat_handler is {chat_handler!r}; it must be a function, as in llama_chat_format")
        check_further(further)
        self.model_path: str = fsdecode(model_path)
        if hub is None:
            existing_model(self.model_path)
        self.model = Model(
            model_path,
            n_ctx=n_ctx,
            n_gpu_layers="all" if n_gpu_layers < 0 else n_gpu_layers,
            n_batch=n_batch,
            n_threads=n_threads or None,
            n_parallel=n_parallel,
            cache_type=cache_type(type_k),
            cache_type_v=cache_type(type_v),
            lora=[(lora_path, lora_scale)] if lora_path else (),
            chat_template=chat_template,
            use_mmap=use_mmap,
            lookup=0 if draft_model is None else draft_model.num_pred_tokens,
            **(hub or {}),
        )
        if hub is not None:
            self.model_path = self.model.path
        self._arguments: dict[str, Any] = {**given, **further, "model_path": self.model_path}
        facts = self.model.facts
        self._has_template: bool = facts["has_chat_template"]
        self._ends: frozenset[int] = frozenset(facts["end_tokens"])
        self.verbose: bool = bool(further.get("verbose", True))
        self.n_batch: int = min(n_batch, self.model.n_ctx)
        self.n_threads: int = n_threads or os.cpu_count() or 1
        self.n_threads_batch: int = further.get("n_threads_batch") or self.n_threads
        self.last_n_tokens_size: int = last_n_tokens_size
        self.lora_path, self.lora_scale, self.lora_base = lora_path, lora_scale, None
        self.tensor_split: Any = further.get("tensor_split")
        self.kv_overrides: None = None
        self.numa: Any = further.get("numa", False)
        self.spm_infill: bool = bool(further.get("spm_infill", False))
        self.chat_format: str | None = chat_format or (MODEL_FORMAT if self._has_template else None)
        self.chat_handler: Callable[..., Any] | None = chat_handler
        self.draft_model: LlamaPromptLookupDecoding | None = draft_model
        self.cache: BaseLlamaCache | None = None
        self._seed: int | None = None if seed in (LLAMA_DEFAULT_SEED, -1) else seed
        self._seed_lock = threading.Lock()
        self._tokens: list[int] = []
        #: The logits that are known, by the position of their token.
        self._rows: dict[int, npt.NDArray[np.single]] = {}

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
            filename = the_file(repo_id, hub_files(repo_id, None if cache_dir is None else fspath(cache_dir)), filename)
        return cls(model_path=repo_id, _hub={"hub_file": filename, "cache_dir": cache_dir}, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """The arguments: a copy in another process loads the file again."""
        return {**self._arguments, "seed": LLAMA_DEFAULT_SEED if self._seed is None else self._seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def _handler(self) -> Callable[..., Any] | None:
        return self.chat_handler or handler_of(self.chat_format, self._has_template)

    # Tokens one at a time.

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
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteria | None = None,
        grammar: LlamaGrammar | None = None,
    ) -> Generator[int, Tokens | None, None]:
        """The tokens that follow tokens, one after another, until the caller ends the loop. Without `reset`, these come after
        the tokens so far, which `input_ids` has. Tokens that are given to `send` come after the one that was returned last."""
        check_sampling(tfs_z, mirostat_mode, penalize_nl)
        prompt: Tokens | None = tokens if reset else [*self._tokens, *tokens]
        while prompt is not None:
            rows = None if stopping_criteria is None else LogitsRows()
            answer = self.model.generate(
                prompt,
                stream=True,
                **sampling(temp, top_p, top_k, min_p, typical_p, self.last_n_tokens_size),
                repeat_penalty=repeat_penalty,
                frequency_penalty=frequency_penalty,
                presence_penalty=presence_penalty,
                seed=self._seed,
                logits_processors=processors(rows, given=logits_processor),
                **constraint(grammar, None),
            )
            prompt = None
            answered = Answered(self._remember, answer, stopping_criteria, rows)
            for piece, _ in answered.pieces():
                sent = yield piece.token
                if sent is not None and len(sent) > 0:
                    prompt = [*answered.tokens, *sent]
                    answered.close()
                    break

    def sample(
        self,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.8,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_eta: float = 0.1,
        mirostat_tau: float = 5.0,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        idx: int | None = None,
    ) -> int:
        """A token that may follow those so far, which stay as they are; with `idx` one that may follow the token there."""
        check_sampling(tfs_z, mirostat_mode, penalize_nl)
        tokens = self._tokens if idx is None else self._tokens[: idx + 1]
        answer = self.model.generate(
            tokens,
            stream=True,
            max_tokens=1,
            **sampling(temp, top_p, top_k, min_p, typical_p, self.last_n_tokens_size),
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            seed=self._next_seed(None),
            logits_processors=processors(given=logits_processor),
            **constraint(grammar, None),
        )
        return answer.collect().tokens[0]

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
        """The tokens of a text in UTF-8; bytes that are not become U+FFFD."""
        if not isinstance(text, (bytes, bytearray, memoryview)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"text is {text!r}; tokenize needs bytes, as llama-cpp-python's does: text.encode()")
        return self.model.tokenize(bytes(text).decode("utf-8", "replace"), add_bos=add_bos, special=special)

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

    def tokenizer(self) -> LlamaTokenizer:
        """The tokenizer of the model."""
        return LlamaTokenizer(self)

    def pooling_type(self) -> int:
        """The pooling of embeddings, a `LLAMA_POOLING_TYPE_…`."""
        found: int = self.model.metadata.get(f"{self.model.architecture}.pooling_type", 0)
        return found or (LLAMA_POOLING_TYPE_MEAN if self.model.is_encoder else LLAMA_POOLING_TYPE_LAST)

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
        """Adds tokens to those so far; `scores` has the logits after each. An error leaves both as they were."""
        added = [*self._tokens, *(int(token) for token in tokens)]
        if len(added) > len(self._tokens):
            known = len(self._tokens)
            self._rows.update(enumerate(self.model.logits(added, start=known), known))
            self._tokens = added

    @property
    def scores(self) -> npt.NDArray[np.single]:
        """The logits after each of the tokens so far: those given to `eval`, and zeros for others."""
        return scores_of(self._rows, self.n_tokens, self.n_vocab())

    @property
    def eval_logits(self) -> deque[list[float]]:
        """The same as lists."""
        return deque(self.scores.tolist(), maxlen=self.n_ctx())

    @property
    def eval_tokens(self) -> deque[int]:
        """The tokens of the latest prompt and its answer."""
        return deque(self._tokens, maxlen=self.n_ctx())

    @property
    def _input_ids(self) -> npt.NDArray[np.intc]:
        """`input_ids`, by the name that programs use for those so far."""
        return self.input_ids

    @property
    def _scores(self) -> npt.NDArray[np.single]:
        """`scores`, by the name that programs use for those so far."""
        return self.scores

    @staticmethod
    def logits_to_logprobs(logits: npt.ArrayLike, axis: int = -1) -> npt.NDArray[np.single]:
        """The logarithms of the probabilities that logits stand for."""
        return log_softmax(logits, axis)

    @staticmethod
    def longest_token_prefix(a: Tokens, b: Tokens) -> int:
        """The number of tokens with which both begin."""
        pairs = enumerate(zip(a, b))
        return next((place for place, (one, other) in pairs if one != other), min(len(a), len(b)))

    def reset(self) -> None:
        """Begins anew."""
        self._tokens, self._rows = [], {}

    def set_seed(self, seed: int) -> None:
        """The random seed, from which those of requests without their own follow."""
        with self._seed_lock:
            self._seed = seed

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Keeps the cache as `cache`, and has no other effect: prefixes of earlier prompts are always kept."""
        self.cache = cache

    def save_state(self) -> LlamaState:
        """The tokens of the latest prompt and its answer, with the logits that are known, and their KV cache as far as it was
        computed, in whole pages of 64 tokens."""
        saved = self.model.save_state(self._tokens)
        known = dict(self._rows)
        return LlamaState(self.input_ids, self.n_tokens, saved, len(saved), self._seed, known, self.n_vocab())

    def load_state(self, state: LlamaState) -> None:
        """Loads a state: prompts that begin with its tokens find them in the KV cache."""
        self.model.load_state(state.llama_state)
        self._tokens, self._rows = [int(token) for token in state.input_ids], dict(state.rows)
        self._seed = state.seed

    def close(self) -> None:
        """Frees the memory."""
        self.model.close()

    def _remember(self, tokens: list[int]) -> None:
        """Keeps the tokens of a prompt and its answer, and the logits of those that were there before."""
        same = self.longest_token_prefix(self._tokens, tokens)
        self._rows = {place: row for place, row in self._rows.items() if place < same}
        self._tokens = tokens
