"""The class `Llama` of llama-cpp-python, with the same methods and result dictionaries, on top of `quadriga.Model`.

Programs run after changing their import:

    from quadriga.llama_cpp import Llama

The submodules `llama`, `llama_cache`, `llama_chat_format`, `llama_grammar`, `llama_speculative`, `llama_tokenizer` and
`llama_types` have the names that programs import from them; `__version__` is that of quadriga.

Differences: a model that has a chat template answers with it, unless `chat_template` is given, `chat_handler` is, or
`chat_format` names a format that the program has registered; a model without one and without `chat_format` gets the contents
of the messages as they are. Embeddings have length 1, and requests of several threads are computed together. Objects of JSON
schemas without `additionalProperties` have the listed properties only, as there; keywords that llama.cpp's converter ignores
are obeyed or refused.

Absent: `suffix`, mirostat, `LlamaDiskCache`, `LlamaHFTokenizer`, chat handlers for images and those of `functionary`, formatters
of transformers, draft models other than `LlamaPromptLookupDecoding`, `local_dir`, `json_schema_to_gbnf`, `model_params`,
`context_params`, and the low-level functions of llama.cpp. Of the types of the KV cache, `GGML_TYPE_Q4_1`, `GGML_TYPE_Q5_0` and
`GGML_TYPE_IQ4_NL` are. Arguments that would change answers and are not supported are refused, unless they have that package's
default: `rope_freq_base`, `rope_freq_scale`, `rope_scaling_type`, `yarn_…`, `kv_overrides`, `pooling_type`, `attention_type`,
`vocab_only`, `lora_base`, `tokenizer`. `tfs_z` and `penalize_nl`, which are ignored there, too, and arguments that do not exist
are warnings. Others, such as `flash_attn` or `use_mlock`, are ignored.
"""

from __future__ import annotations

from .._quadriga import VERSION as __version__
from . import _constants, llama_types
from ._absent import absent
from ._constants import *  # noqa: F403
from .llama import (
    Llama,
    LlamaGrammar,
    LlamaState,
    LogitsProcessor,
    LogitsProcessorList,
    MinTokensLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from .llama_cache import DISK_CACHE, BaseLlamaCache, LlamaCache, LlamaRAMCache
from .llama_tokenizer import BaseLlamaTokenizer, LlamaTokenizer
from .llama_types import *  # noqa: F403

__all__ = [
    "BaseLlamaCache",
    "BaseLlamaTokenizer",
    "Llama",
    "LlamaCache",
    "LlamaGrammar",
    "LlamaRAMCache",
    "LlamaState",
    "LlamaTokenizer",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MinTokensLogitsProcessor",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "__version__",
]
__all__ += _constants.__all__
__all__ += llama_types.__all__

__getattr__ = absent(
    __name__,
    {"LlamaDiskCache": DISK_CACHE},
    ("llama_", "ggml_", "LLAMA_", "GGML_", "mtmd_"),
    "the low-level functions of llama.cpp are not here; those of quadriga are quadriga.Model and quadriga.graph",
)
