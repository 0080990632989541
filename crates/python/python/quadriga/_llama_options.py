"""The arguments of `quadriga.llama_cpp` as those of `quadriga.Model`."""

from __future__ import annotations

import fnmatch
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ._llama_types import LlamaGrammar, LogitsProcessorList
from ._requests import closed_schema
from .errors import InvalidRequest, ModelNotFound

__all__ = [
    "cache_type",
    "check_further",
    "check_sampling",
    "closed_format",
    "constraint",
    "existing_model",
    "limit",
    "processors",
    "sampling",
    "the_file",
]

#: Arguments of `Llama` that have no counterpart, or that are decided automatically.
_IGNORED = frozenset(
    """
    split_mode main_gpu tensor_split use_mlock n_ubatch n_threads_batch logits_all embedding offload_kqv flash_attn op_offload
    swa_full no_perf numa spm_infill verbose kv_unified rpc_servers
    """.split()
)

#: Arguments that are not supported and would change answers, with the values that change nothing: llama-cpp-python's own.
_UNSUPPORTED: dict[str, Any] = {
    "vocab_only": False,
    "kv_overrides": None,
    "pooling_type": -1,
    "attention_type": -1,
    "rope_scaling_type": -1,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_orig_ctx": 0,
    "lora_base": None,
    "tokenizer": None,
}

#: llama.cpp's numbers of types of the KV cache, and of those that this engine does not have.
_CACHE_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 7: "q5_1", 8: "q8_0", 30: "bf16"}
_OTHER_CACHE_TYPES = {3: "q4_1", 6: "q5_0", 20: "iq4_nl"}

#: The least `typical_p` of the engine, which keeps one token, as 0 does in llama.cpp.
_LEAST_TYPICAL_P = 1e-6


def check_further(arguments: Mapping[str, Any]) -> None:
    """Refuses arguments of `Llama` that would change answers and are not supported; warns of those that do not exist, which
    llama-cpp-python accepts."""
    unknown = arguments.keys() - _IGNORED - _UNSUPPORTED.keys()
    if unknown:
        warnings.warn(f"Llama() has no argument {', '.join(sorted(unknown))}: ignored", stacklevel=3)
    for name in arguments.keys() & _UNSUPPORTED.keys():
        value, neutral = arguments[name], _UNSUPPORTED[name]
        if value is not None and value != neutral and value != {}:
            hint = "the model's own value is used; leave the argument away" if neutral is not None else "leave it away"
            raise InvalidRequest(f"{name} is {value!r}, which is not supported; {hint}")


def limit(max_tokens: int | None) -> int | None:
    return None if max_tokens is None or max_tokens <= 0 else max_tokens


def existing_model(path: str) -> None:
    """Refuses a path where nothing is; names of the hub are for `from_pretrained`."""
    if not os.path.exists(path):
        raise ModelNotFound(f"Model path does not exist: {path}")


def processors(*kept: Any, given: LogitsProcessorList | None) -> list[Any]:
    """Logits processors: first those that keep logits, if there are some."""
    return [*(processor for processor in kept if processor is not None), *(given or ())]


def check_sampling(tfs_z: float, mirostat_mode: int, penalize_nl: bool = True) -> None:
    """Refuses mirostat, and warns of options that llama-cpp-python ignores, too."""
    if mirostat_mode:
        raise InvalidRequest("mirostat is not supported; use top_p and min_p")
    if tfs_z < 1.0:
        warnings.warn(f"tfs_z is {tfs_z}: ignored, there is no tail-free sampling; use min_p", stacklevel=3)
    if not penalize_nl:
        warnings.warn("penalize_nl is False: ignored, line feeds are penalized as other tokens", stacklevel=3)


def sampling(
    temperature: float, top_p: float, top_k: int, min_p: float, typical_p: float, last_n_tokens_size: int
) -> dict[str, Any]:
    """Sampling options as llama.cpp understands them: a probability beyond its range keeps all tokens, or one; a negative
    temperature samples from all tokens by their probabilities."""
    if temperature < 0:
        temperature, top_p, top_k, min_p, typical_p = 1.0, 1.0, 0, 0.0, 1.0
    return {
        "temperature": temperature,
        "top_p": min(max(top_p, 0.0), 1.0),
        "top_k": top_k,
        "min_p": min(max(min_p, 0.0), 1.0),
        "typical_p": min(max(typical_p, _LEAST_TYPICAL_P), 1.0),
        "repeat_last_n": last_n_tokens_size,
    }


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
        name = f"GGML_TYPE_{_OTHER_CACHE_TYPES[number].upper()}, " if number in _OTHER_CACHE_TYPES else ""
        known = ", ".join(f"GGML_TYPE_{known.upper()}" for known in _CACHE_TYPES.values())
        raise InvalidRequest(f"type_k or type_v is {number} ({name}which this KV cache does not have); it has {known}")
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
