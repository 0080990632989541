"""The class `Llama` of llama-cpp-python, with the same methods and result dictionaries, on top of `quadriga.Model`.

Programs run after changing their import:

    from quadriga.llama_cpp import Llama

Differences: the model's own chat template is always used unless `chat_template` is given (`chat_format` is ignored), embeddings
have length 1, and requests of several threads are computed together. With `echo`, the text begins with the prompt, and
`logprobs` are those of the answer. Objects of JSON schemas without `additionalProperties` have the listed properties only, as
there; keywords that llama.cpp's converter ignores are obeyed or refused. Absent: `suffix`, mirostat and tail-free sampling, `sample`, `LlamaTokenizer`,
`LlamaDiskCache`, draft models other than `LlamaPromptLookupDecoding`, `local_dir`, and the low-level functions of llama.cpp.
Arguments that would change answers and are not supported are refused, unless they have that package's default: `rope_freq_base`,
`rope_freq_scale`, `rope_scaling_type`, `yarn_…`, `kv_overrides`, `pooling_type`, `vocab_only`, `lora_base`, `chat_handler`,
`tokenizer`. Others, such as `flash_attn` or `use_mlock`, are ignored.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from os import PathLike, fsdecode, fspath
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .._llama_answers import Answered, LogitsRows
from .._llama_completions import LlamaCompletions
from .._llama_options import cache_type, check_further, constraint, processors, the_file
from .._llama_types import (
    LlamaCache,
    LlamaGrammar,
    LlamaRAMCache,
    LlamaState,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    Tokens,
    scores_of,
)
from .._model import Model
from .._quadriga import hub_files
from ..errors import InvalidRequest
from . import _constants
from ._constants import *  # noqa: F403
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
__all__ += _constants.__all__


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
        lora_path: str | None = None,
        lora_scale: float = 1.0,
        type_k: int | None = None,
        type_v: int | None = None,
        chat_template: str | None = None,
        n_parallel: int = 4,
        draft_model: LlamaPromptLookupDecoding | None = None,
        cache_dir: str | PathLike[str] | None = None,
        hub_file: str | None = None,
        **further: Any,
    ) -> None:
        if not isinstance(model_path, (str, bytes, PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"model_path is {model_path!r}; it must be the path of a file")
        if draft_model is not None and not isinstance(draft_model, LlamaPromptLookupDecoding):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError("draft_model must be a LlamaPromptLookupDecoding; models that draft are the argument draft of quadriga.Model")
        check_further(further)
        self.model_path: str = fsdecode(model_path)
        self.verbose: bool = bool(further.get("verbose", True))
        self.model = Model(
            model_path,
            n_ctx=n_ctx,
            n_gpu_layers="all" if n_gpu_layers < 0 else n_gpu_layers,
            n_batch=n_batch,
            n_threads=n_threads,
            n_parallel=n_parallel,
            cache_type=cache_type(type_k),
            cache_type_v=cache_type(type_v),
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
        return cls(model_path=repo_id, hub_file=filename, cache_dir=cache_dir, **kwargs)

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
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteria | None = None,
        grammar: LlamaGrammar | None = None,
    ) -> Generator[int, Tokens | None, None]:
        """The tokens that follow tokens, one after another, until the caller ends the loop. Without `reset`, these come after
        the tokens so far, which `input_ids` has. Tokens that are given to `send` come after the one that was returned last."""
        prompt: Tokens | None = tokens if reset else [*self._tokens, *tokens]
        while prompt is not None:
            rows = None if stopping_criteria is None else LogitsRows()
            answer = self.model.generate(
                prompt,
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
                logits_processors=processors(rows, logits_processor),
                **constraint(grammar, None),
            )
            prompt = None
            answered = Answered(self._remember, answer, stopping_criteria, rows)
            for piece in answered.pieces():
                sent = yield piece.token
                if sent is not None and len(sent) > 0:
                    prompt = [*answered.tokens, *sent]
                    answered.close()
                    break

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
    def eval_logits(self) -> list[list[float]]:
        """The same as lists."""
        return self.scores.tolist()

    def reset(self) -> None:
        """Begins anew."""
        self._tokens, self._rows = [], {}

    def set_seed(self, seed: int) -> None:
        """The random seed, from which those of requests without their own follow."""
        with self._seed_lock:
            self._seed = seed

    def set_cache(self, cache: LlamaRAMCache | None) -> None:
        """Has no effect: prefixes of earlier prompts are always kept."""

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
        pairs = enumerate(zip(self._tokens, tokens))
        same = next((place for place, (old, new) in pairs if old != new), min(len(self._tokens), len(tokens)))
        self._rows = {place: row for place, row in self._rows.items() if place < same}
        self._tokens = tokens
