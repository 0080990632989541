"""The arguments of `quadriga.llama_cpp` as those of `quadriga.Model`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ._llama_answers import LogitsRows
from ._llama_types import LlamaGrammar, LogitsProcessorList
from ._requests import closed_schema
from .errors import InvalidRequest

__all__ = ["cache_type", "check_further", "closed_format", "constraint", "limit", "processors", "refuse_mirostat", "the_file"]

#: Arguments of `Llama` that have no counterpart, or that are decided automatically.
_IGNORED = frozenset(
    """
    split_mode main_gpu tensor_split use_mlock n_ubatch n_threads_batch logits_all embedding offload_kqv flash_attn op_offload
    swa_full no_perf last_n_tokens_size numa chat_format spm_infill verbose kv_unified rpc_servers
    """.split()
)

#: Arguments that are not supported and would change answers, with the values that change nothing: llama-cpp-python's own.
_UNSUPPORTED: dict[str, Any] = {
    "vocab_only": False,
    "kv_overrides": None,
    "pooling_type": -1,
    "rope_scaling_type": -1,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_orig_ctx": 0,
    "lora_base": None,
    "chat_handler": None,
    "tokenizer": None,
}

#: llama.cpp's numbers of types of the KV cache.
_CACHE_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 7: "q5_1", 8: "q8_0", 30: "bf16"}


def check_further(arguments: Mapping[str, Any]) -> None:
    """Refuses arguments of `Llama` that do not exist, and those that would change answers and are not supported."""
    unknown = arguments.keys() - _IGNORED - _UNSUPPORTED.keys()
    if unknown:
        raise TypeError(f"Llama() has no argument {', '.join(sorted(unknown))}")
    for name in arguments.keys() & _UNSUPPORTED.keys():
        value, neutral = arguments[name], _UNSUPPORTED[name]
        if value is not None and value != neutral and value != {}:
            hint = "the model's own value is used; leave the argument away" if neutral is not None else "leave it away"
            raise InvalidRequest(f"{name} is {value!r}, which is not supported; {hint}")


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
        options["guided_json"] = closed_schema(grammar.schema)
    elif grammar is not None and grammar.grammar:
        options["grammar"] = grammar.grammar
    return options


def closed_format(wanted: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A response format whose schema is closed, as llama.cpp's converter reads schemas."""
    if wanted is None:
        return None
    found = dict(wanted)
    if isinstance(found.get("schema"), Mapping):
        found["schema"] = closed_schema(found["schema"])
    named = found.get("json_schema")
    if isinstance(named, Mapping) and "schema" in named:
        found["json_schema"] = {**named, "schema": closed_schema(named["schema"])}  # pyright: ignore[reportUnknownArgumentType]
    return found


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
