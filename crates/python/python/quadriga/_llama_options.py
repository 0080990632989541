"""The arguments of `quadriga.llama_cpp` as those of `quadriga.Model`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ._llama_answers import LogitsRows
from ._llama_types import LlamaGrammar, LogitsProcessorList
from .errors import InvalidRequest

__all__ = ["IGNORED", "cache_type", "constraint", "limit", "processors", "refuse_mirostat", "the_file"]

#: Arguments of `Llama` that have no counterpart, or that are decided automatically.
IGNORED = frozenset(
    """
    split_mode main_gpu tensor_split vocab_only use_mlock kv_overrides n_ubatch n_threads_batch rope_scaling_type pooling_type
    rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow yarn_orig_ctx logits_all
    embedding offload_kqv flash_attn op_offload swa_full no_perf last_n_tokens_size lora_base numa chat_format chat_handler
    tokenizer spm_infill verbose kv_unified rpc_servers
    """.split()
)

#: llama.cpp's numbers of types of the KV cache.
_CACHE_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 7: "q5_1", 8: "q8_0", 30: "bf16"}


def limit(max_tokens: int | None) -> int | None:
    return None if max_tokens is None or max_tokens <= 0 else max_tokens


def processors(rows: LogitsRows | None, given: LogitsProcessorList | None) -> list[Any]:
    """Logits processors: first the one that keeps logits for stopping criteria."""
    return [*([] if rows is None else [rows]), *(given or ())]


def refuse_mirostat(mode: int) -> None:
    if mode:
        raise InvalidRequest("mirostat is not supported; use top_p and min_p")


def constraint(grammar: LlamaGrammar | None, logit_bias: Mapping[Any, float] | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if logit_bias:
        options["logit_bias"] = {str(token): bias for token, bias in logit_bias.items()}
    if grammar is not None and grammar.schema is not None:
        options["guided_json"] = grammar.schema
    elif grammar is not None and grammar.grammar:
        options["grammar"] = grammar.grammar
    return options


def cache_type(number: int | None) -> str:
    if number is None:
        return "f16"
    if number not in _CACHE_TYPES:
        raise InvalidRequest(f"the KV cache cannot have type {number}; known are {_CACHE_TYPES}")
    return _CACHE_TYPES[number]


def the_file(repository: str, files: Sequence[str], pattern: str) -> str:
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
