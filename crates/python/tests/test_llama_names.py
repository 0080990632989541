"""Names of llama-cpp-python that programs import and use: attributes, submodules, chat formats, copies in other processes."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quadriga
from quadriga import llama_cpp
from quadriga.llama_cpp import Llama, LogitsProcessorList, MinTokensLogitsProcessor, llama_chat_format
from quadriga.llama_cpp.llama_chat_format import ChatFormatterResponse

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def llm(tiny_path: Path) -> Iterator[Llama]:
    llama = Llama(tiny_path, n_ctx=256, n_batch=64, n_threads=2, verbose=False)
    yield llama
    llama.close()


def test_a_path_where_nothing_is_is_a_value_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing listens there: a question to the hub would be another error.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for path in ("models/llama-7b", str(tmp_path / "x.gguf")):
        with pytest.raises(ValueError, match="Model path does not exist: .*(llama-7b|x.gguf)"):
            Llama(path)


def test_attributes_and_methods(llm: Llama) -> None:
    assert (llm.n_batch, llm.n_threads, llm.last_n_tokens_size, llm.verbose) == (64, 2, 64, False)
    assert llm.chat_format is None and llm.chat_handler is None and llm.draft_model is None and llm.lora_path is None
    llm.eval([1, 2, 3])
    assert list(llm.eval_tokens) == llm._input_ids.tolist() == [1, 2, 3]  # pyright: ignore[reportPrivateUsage]
    assert llm._scores.tolist() == llm.scores.tolist() == list(llm.eval_logits)  # pyright: ignore[reportPrivateUsage]
    logprobs = Llama.logits_to_logprobs(llm.scores)
    np.testing.assert_allclose(np.exp(logprobs).sum(axis=-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(logprobs.argmax(axis=-1), llm.scores.argmax(axis=-1))
    assert Llama.logits_to_logprobs([0.0, -np.inf]).tolist() == [0.0, -np.inf]
    assert Llama.longest_token_prefix([1, 2, 3], [1, 2, 4]) == 2 and Llama.longest_token_prefix([1], [1, 2]) == 1
    assert llm.pooling_type() == llama_cpp.LLAMA_POOLING_TYPE_LAST
    tokenizer = llm.tokenizer()
    assert tokenizer.decode(tokenizer.encode("ab", add_bos=False)) == "ab"
    cache = llama_cpp.LlamaRAMCache(capacity_bytes=1 << 20)
    llm.set_cache(cache)
    assert llm.cache is cache and isinstance(cache, llama_cpp.BaseLlamaCache) and cache.cache_size == 0


def test_a_copy_in_another_process_has_the_same_arguments(tiny_path: Path) -> None:
    llama = Llama(str(tiny_path), n_ctx=128, last_n_tokens_size=7, chat_format="chatml", seed=5, verbose=False)
    copy: Llama = pickle.loads(pickle.dumps(llama))
    assert copy.model_path == llama.model_path and copy.n_ctx() == 128 and copy.last_n_tokens_size == 7
    assert copy.chat_format == "chatml" and copy.verbose is False
    ask: dict[str, Any] = {"max_tokens": 6, "temperature": 2.0, "top_k": 0}
    assert copy("ab", **ask)["choices"] == llama("ab", **ask)["choices"]
    copy.close()
    llama.close()


def test_submodules_have_the_names_that_programs_import() -> None:
    for module, names in {
        "llama": "Llama LlamaState LogitsProcessor LogitsProcessorList StoppingCriteriaList LlamaGrammar",
        "llama_cache": "BaseLlamaCache LlamaCache LlamaRAMCache",
        "llama_chat_format": "ChatFormatter ChatFormatterResponse Jinja2ChatFormatter LlamaChatCompletionHandler format_chatml",
        "llama_grammar": "LlamaGrammar JSON_GBNF",
        "llama_speculative": "LlamaPromptLookupDecoding",
        "llama_tokenizer": "LlamaTokenizer",
        "llama_types": "CreateCompletionResponse CreateChatCompletionResponse ChatCompletionTool ChatCompletionMessage JsonType",
    }.items():
        imported = importlib.import_module(f"quadriga.llama_cpp.{module}")
        assert all(hasattr(imported, name) for name in names.split()), module
    everything: dict[str, Any] = {}
    exec("from quadriga.llama_cpp import *", everything)
    assert {"Llama", "ChatCompletion", "MinTokensLogitsProcessor", "__version__", "LogitsProcessor"} <= everything.keys()
    assert llama_cpp.__version__ == quadriga.__version__
    assert llama_cpp.LLAMA_ATTENTION_TYPE_UNSPECIFIED == -1 and llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL == 1


def test_names_that_are_not_here_say_why() -> None:
    for module, name, why in (
        ("quadriga.llama_cpp", "LlamaDiskCache", "cache_file"),
        ("quadriga.llama_cpp.llama_cache", "LlamaDiskCache", "cache_file"),
        ("quadriga.llama_cpp.llama_chat_format", "Llava15ChatHandler", "images"),
        ("quadriga.llama_cpp.llama_grammar", "json_schema_to_gbnf", "from_json_schema"),
        ("quadriga.llama_cpp.llama_tokenizer", "LlamaHFTokenizer", "own"),
    ):
        with pytest.raises(ImportError, match=f"{name}.*{why}"):
            exec(f"from {module} import {name}")
    with pytest.raises(AttributeError, match="llama_backend_init.*low-level"):
        _ = llama_cpp.llama_backend_init
    assert not hasattr(llama_cpp, "nonsense")


def test_an_answer_has_the_least_number_of_tokens(llm: Llama) -> None:
    ends = llm.model.facts["end_tokens"]
    # This bias makes the end the most probable token.
    ask: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "logit_bias": {ends[0]: 100}}
    assert llm("ab", **ask)["usage"]["completion_tokens"] == 0
    processor = LogitsProcessorList([MinTokensLogitsProcessor(5, ends[0])])
    assert llm("ab", logits_processor=processor, **ask)["usage"]["completion_tokens"] == 5


def test_a_named_format_is_used_where_the_model_has_none(tiny_path: Path) -> None:
    def prompt_of(messages: Any, **arguments: Any) -> str:
        llama = Llama(tiny_path, n_ctx=512, verbose=False, **arguments)
        answer = llama.create_chat_completion(messages, max_tokens=2, temperature=0)
        assert answer["object"] == "chat.completion" and answer["choices"][0]["message"]["role"] == "assistant"
        prompt = llama.detokenize(llama.input_ids.tolist()[: answer["usage"]["prompt_tokens"]], special=True).decode()
        llama.close()
        return prompt

    talk = [{"role": "system", "content": "S"}, *USER, {"role": "assistant", "content": "A"}, {"role": "user", "content": "B"}]
    for name, expected in {
        "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n",
        "llama-2": "[INST] <<SYS>>\nS\n<</SYS>>\n\nHi [/INST] A </s><s>[INST] B [/INST]",
        "gemma": "<start_of_turn>user\nS\n\nHi<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
        "<start_of_turn>user\nB<end_of_turn>\n<start_of_turn>model\n",
        "zephyr": "<|system|>\nS</s>\n<|user|>\nHi</s>\n<|assistant|>\nA</s>\n<|user|>\nB</s>\n<|assistant|>\n",
        "mistral-instruct": "[INST] S\n\nHi [/INST]A</s>[INST] B [/INST]",
    }.items():
        assert prompt_of(talk, chat_format=name).endswith(expected), name
    assert prompt_of(USER, chat_format="vicuna").endswith("USER: Hi ASSISTANT:")
    assert llama_chat_format.format_llama3(USER).prompt.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    for name, why in (("chatmll", "does not exist"), ("saiga", "chat_template")):
        with pytest.raises(ValueError, match=f"{name}.*{why}.*chatml"):
            prompt_of(USER, chat_format=name)
    # The template of the model, which is given here, goes first.
    assert prompt_of(USER, chat_format="saiga", chat_template="T{{ messages[0].content }}").endswith("THi")


def test_formats_of_the_program_answer(llm: Llama) -> None:
    @llama_chat_format.register_chat_format("shouted")
    def shouted(messages: Any, **arguments: Any) -> ChatFormatterResponse:
        return ChatFormatterResponse(prompt=messages[0]["content"].upper() + ":", stop=["w"])

    try:
        llm.chat_format = "shouted"
        ask: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
        answer = llm.create_chat_completion(USER, **ask)
        text = answer["choices"][0]["message"]["content"]
        assert text == llm("HI:", stop=["w"], **ask)["choices"][0]["text"]
        chunks = list(llm.create_chat_completion(USER, stream=True, logprobs=True, top_logprobs=2, **ask))
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"} and chunks[0]["object"] == "chat.completion.chunk"
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
        assert chunks[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]
        parameters = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
        tool: Any = {"type": "function", "function": {"name": "count", "parameters": parameters}}
        choice: Any = {"type": "function", "function": {"name": "count"}}
        ask = {"tools": [tool], "tool_choice": choice, "max_tokens": 120, "temperature": 1.0, "seed": 1}
        llm.chat_format = "chatml"
        called = llm.create_chat_completion(USER, **ask)["choices"][0]
        [call] = called["message"]["tool_calls"]
        assert called["finish_reason"] == "tool_calls" and json.loads(call["function"]["arguments"])["n"] in (1, 2)
        deltas = [chunk["choices"][0]["delta"] for chunk in llm.create_chat_completion(USER, stream=True, **ask)]
        parts = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
        assert parts[0]["name"] == "count"
        assert "".join(part["arguments"] for part in parts) == call["function"]["arguments"]
        with pytest.raises(ValueError, match="already"):
            llama_chat_format.register_chat_format("shouted")(shouted)
    finally:
        llama_chat_format.LlamaChatCompletionHandlerRegistry().unregister_chat_handler("shouted")


def test_a_chat_handler_answers_itself(tiny_path: Path) -> None:
    def handler(*, llama: Llama, messages: Any, **arguments: Any) -> Any:
        return {"answered": len(messages), "temperature": arguments["temperature"], "model": llama.model_path}

    llama = Llama(str(tiny_path), n_ctx=64, chat_handler=handler)
    assert llama.create_chat_completion(USER, temperature=0.5) == {"answered": 1, "temperature": 0.5, "model": str(tiny_path)}
    llama.close()
    wrong: Any = "handler"
    with pytest.raises(TypeError, match="chat_handler"):
        Llama(str(tiny_path), chat_handler=wrong)


def test_a_template_of_jinja2_is_a_chat_handler(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content | tojson }}\n{% endfor %}"
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    with pytest.raises(ImportError, match="jinja2.*chat_template"):
        llama_chat_format.Jinja2ChatFormatter(template, "</s>", "<s>")
    monkeypatch.undo()
    pytest.importorskip("jinja2")
    formatter = llama_chat_format.Jinja2ChatFormatter(template, eos_token="</s>", bos_token="<s>", stop_token_ids=[3])
    made = formatter(messages=USER)
    assert made.prompt == '<s>user: "Hi"\n' and made.stop == ["</s>"] and made.added_special
    assert made.stopping_criteria is not None
    assert made.stopping_criteria(np.array([1, 3], dtype=np.intc), np.zeros(0, dtype=np.single))
    llama = Llama(tiny_path, n_ctx=128, chat_handler=formatter.to_chat_handler())
    assert llama.create_chat_completion(USER, max_tokens=2)["choices"][0]["message"]["role"] == "assistant"
    llama.close()


def test_a_grammar_of_json_is_there(llm: Llama) -> None:
    grammar = llama_cpp.LlamaGrammar.from_string(importlib.import_module("quadriga.llama_cpp.llama_grammar").JSON_GBNF)
    answer = llm("ab", grammar=grammar, max_tokens=200, temperature=0)["choices"][0]
    assert answer["text"].startswith("{")
    if answer["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["text"]), dict)
