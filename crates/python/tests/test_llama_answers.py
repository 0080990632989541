"""Answers of `Llama` in the details that programs for llama-cpp-python count on: tokens that are counted, log-probabilities,
sampling options at their limits, and warnings for options that have no effect."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quadriga
from quadriga import llama_cpp
from quadriga.llama_cpp import Llama, LlamaGrammar


@pytest.fixture(scope="module")
def llm() -> Iterator[Llama]:
    with quadriga.Model(n_ctx=64) as model:
        path = model.path
    llama = Llama(model_path=path, n_ctx=512, verbose=False)
    yield llama
    llama.close()


@pytest.fixture(scope="module")
def small(tiny_path: Path) -> Iterator[Llama]:
    llama = Llama(tiny_path, n_ctx=256, verbose=False)
    yield llama
    llama.close()


def test_an_end_token_is_no_part_of_an_answer(llm: Llama) -> None:
    ask: dict[str, Any] = {"grammar": LlamaGrammar.from_string('root ::= "red"'), "temperature": 0, "max_tokens": 16}
    expected = len(llm.tokenize(b"red", add_bos=False))
    whole = llm("A colour:", logprobs=1, **ask)
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "stop" and "".join(choice["logprobs"]["tokens"]) == choice["text"] == "red"
    assert whole["usage"]["completion_tokens"] == expected == len(choice["logprobs"]["token_logprobs"])
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + expected == llm.n_tokens
    chunks = list(llm("A colour:", logprobs=1, stream=True, **ask))
    assert len(chunks) == expected + 1 and chunks[-1]["choices"][0]["finish_reason"] == "stop"

    messages = [{"role": "user", "content": "A colour?"}]
    chat = llm.create_chat_completion(messages, logprobs=True, top_logprobs=1, **ask)
    assert chat["choices"][0]["message"]["content"] == "red" and chat["usage"]["completion_tokens"] == expected
    assert "".join(entry["token"] for entry in chat["choices"][0]["logprobs"]["content"]) == "red"
    chat_chunks = list(llm.create_chat_completion(messages, logprobs=True, top_logprobs=1, stream=True, **ask))
    # One for the role, one for each token, one for the end.
    assert len(chat_chunks) == expected + 2


def test_text_before_an_end_that_could_have_been_a_stop_string_is_there(llm: Llama) -> None:
    ask: dict[str, Any] = {"grammar": LlamaGrammar.from_string('root ::= "red"'), "temperature": 0, "max_tokens": 16}
    chunks = list(llm("A colour:", stop=["red apples"], stream=True, logprobs=1, **ask))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "red"


def test_the_sampled_token_is_among_the_top(small: Llama) -> None:
    ask: dict[str, Any] = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3, "max_tokens": 12}
    for count in (0, 1, 3):
        found = small.create_completion([1, 2, 3], logprobs=count, **ask)["choices"][0]["logprobs"]
        beside = 0
        for token, logprob, row in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"]):
            assert row[token] == logprob
            beside += len(row) == count + 1
        assert beside > 0
        messages = [{"role": "user", "content": "ab"}]
        chat = small.create_chat_completion(messages, logprobs=True, top_logprobs=count, **ask)["choices"][0]
        for entry in chat["logprobs"]["content"]:
            assert (entry["token"], entry["logprob"]) in [(top["token"], top["logprob"]) for top in entry["top_logprobs"]]


def test_more_log_probabilities_than_the_engine_reports(llm: Llama) -> None:
    ask: dict[str, Any] = {"temperature": 0, "max_tokens": 3}
    few = llm("One, two,", logprobs=20, echo=True, **ask)["choices"][0]["logprobs"]["top_logprobs"]
    many = llm("One, two,", logprobs=50, echo=True, **ask)["choices"][0]["logprobs"]["top_logprobs"]
    assert few[0] is many[0] is None and len(few) == len(many)
    for less, more in zip(few[1:], many[1:]):
        assert len(less) in (20, 21) and len(more) in (50, 51) and list(more)[:10] == list(less)[:10]
        np.testing.assert_allclose(list(more.values())[:10], list(less.values())[:10], atol=0.02)
    messages = [{"role": "user", "content": "Hi"}]
    chunks = list(llm.create_chat_completion(messages, logprobs=True, top_logprobs=30, stream=True, **ask))
    entries = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert len(entries) == 3 and all(len(entry["top_logprobs"]) == 30 for entry in entries)


def test_probabilities_beyond_their_range_keep_all_tokens_or_one(small: Llama) -> None:
    def tokens(**options: Any) -> list[int]:
        given: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 3.0, **options}
        small.create_completion([1, 2, 3], max_tokens=8, seed=11, **given)
        return small.input_ids.tolist()

    assert tokens(top_p=1.5) == tokens()
    # One token is left: the most typical one, whatever the seed.
    assert tokens(typical_p=0.0) == tokens(typical_p=1e-6) != tokens()
    # A negative temperature samples by the probabilities themselves.
    assert tokens(temperature=-1.0, top_k=1, min_p=1.0) == tokens(temperature=1.0) != tokens(temperature=0.0)
    first = next(small.generate([1, 2, 3], temp=0.0))
    drawn: set[int] = set()
    for seed in range(12):
        small.set_seed(seed)
        drawn.add(next(small.generate([1, 2, 3], temp=-1.0)))
    assert drawn != {first}


def test_penalties_count_the_latest_tokens(tiny_path: Path) -> None:
    prompt = [7, *[5, 6] * 10]
    found: dict[int, set[int]] = {}
    for size in (1, 64):
        llama = Llama(tiny_path, n_ctx=128, last_n_tokens_size=size)
        assert llama.last_n_tokens_size == size
        llama.create_completion(prompt, max_tokens=12, temperature=0, repeat_penalty=1e6)
        found[size] = set(llama.input_ids.tolist()[len(prompt) :])
        llama.close()
    # With a long window no token of prompt or answer comes again.
    assert len(found[64]) == 12 and not found[64] & set(prompt)
    assert len(found[1]) < 12 or found[1] & set(prompt)


def test_options_without_effect_are_a_warning(small: Llama) -> None:
    messages = [{"role": "user", "content": "ab"}]
    with pytest.warns(UserWarning, match="tfs_z"):
        small("a", max_tokens=1, tfs_z=0.5)
    with pytest.warns(UserWarning, match="tfs_z"):
        small.create_chat_completion(messages, max_tokens=1, tfs_z=0.5)
    with pytest.warns(UserWarning, match="penalize_nl"):
        next(small.generate([1], penalize_nl=False))
    with pytest.raises(quadriga.InvalidRequest, match="mirostat"):
        next(small.generate([1], mirostat_mode=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small("a", max_tokens=1)
        next(small.generate([1], 40, 0.95, 0.05, 1.0, 0.8, 1.0, True, 0.0, 0.0, 1.0, 0, 5.0, 0.1, True))


def test_types_that_the_kv_cache_lacks_are_named(tiny_path: Path) -> None:
    for name in ("GGML_TYPE_Q4_1", "GGML_TYPE_Q5_0", "GGML_TYPE_IQ4_NL"):
        with pytest.raises(quadriga.InvalidRequest, match=f"{name}.*does not have.*GGML_TYPE_Q8_0"):
            Llama(tiny_path, n_ctx=64, type_k=getattr(llama_cpp, name))
    Llama(tiny_path, n_ctx=64, n_threads=0).close()


def test_sample_leaves_the_tokens_as_they_are(small: Llama) -> None:
    small.reset()
    small.eval([1, 2, 3])
    assert small.sample(temp=0.0) == int(small.scores[-1].argmax())
    assert small.sample(temp=0.0, idx=1) == int(small.scores[1].argmax())
    assert small.input_ids.tolist() == [1, 2, 3]
