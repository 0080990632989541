"""Parts of llama-cpp-python's interface that programs use less often."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import quadriga
from hub_server import hub
from quadriga._requests import closed_schema
from quadriga.llama_cpp import Llama, LlamaGrammar, StoppingCriteriaList
from quadriga.llama_cpp.llama_speculative import LlamaPromptLookupDecoding


@pytest.fixture(scope="module")
def llm() -> Iterator[Llama]:
    with quadriga.Model(n_ctx=64) as model:
        path = model.path
    llama = Llama(model_path=path, n_ctx=512, verbose=False)
    yield llama
    llama.close()


def test_the_named_file_of_a_repository_is_loaded(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, cache = tmp_path / "files", tmp_path / "cache"
    files.mkdir()
    # The same type of quantization twice: only the name tells them apart.
    for name in ("one-Q4_0.gguf", "two-Q4_0.gguf", "two-Q8_0.gguf"):
        (files / name).write_bytes(tiny_path.read_bytes())
    with hub(files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")

        def loaded(filename: str) -> str:
            llama = Llama.from_pretrained("tests/tiny", filename, cache_dir=cache, n_ctx=64)
            llama.close()
            assert Path(llama.model_path).is_relative_to(cache)
            return Path(llama.model_path).name

        assert loaded("two-Q4_0.gguf") == "two-Q4_0.gguf"
        assert loaded("one-Q4_0.gguf") == "one-Q4_0.gguf"
        assert loaded("*-Q8_0.gguf") == "two-Q8_0.gguf"
        with pytest.raises(ValueError, match="(?s)several.*one-Q4_0.gguf.*two-Q4_0.gguf"):
            loaded("*Q4_0.gguf")
        with pytest.raises(ValueError, match="(?s)no file.*one-Q4_0.gguf"):
            loaded("*Q5_K.gguf")
        with pytest.raises(ValueError, match="three-Q4_0.gguf.*two-Q8_0.gguf"):
            loaded("three-Q4_0.gguf")
        with pytest.raises(ValueError, match="local_dir"):
            Llama.from_pretrained("tests/tiny", "two-Q4_0.gguf", local_dir=tmp_path)
        server.shutdown()
    # What is in the cache needs no hub.
    llama = Llama.from_pretrained("tests/tiny", "one-Q4_0.gguf", cache_dir=cache, n_ctx=64)
    assert Path(llama.model_path).name == "one-Q4_0.gguf"
    llama.close()


def test_streamed_chats_have_logprobs(llm: Llama) -> None:
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 6}
    whole = llm.create_chat_completion(**ask, logprobs=True, top_logprobs=2)["choices"][0]
    chunks = list(llm.create_chat_completion(**ask, logprobs=True, top_logprobs=2, stream=True))
    entries = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in whole["logprobs"]["content"]]
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]


def test_criteria_see_the_logits(llm: Llama) -> None:
    seen: list[tuple[int, int]] = []

    def criterion(tokens: npt.NDArray[np.intc], logits: npt.NDArray[np.single]) -> bool:
        seen.append((int(tokens[-1]), int(logits.argmax())))
        return len(seen) == 4

    llm("One two three", max_tokens=50, temperature=0, stopping_criteria=StoppingCriteriaList([criterion]))
    assert len(seen) == 4 and all(token == best for token, best in seen)


def test_offsets_count_from_the_beginning_of_the_prompt(llm: Llama) -> None:
    prompt = "The capital of France is"
    ask: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "logprobs": 1}
    choice = llm(prompt, echo=True, **ask)["choices"][0]
    echoed = choice["logprobs"]
    for offset, token in zip(echoed["text_offset"], echoed["tokens"]):
        assert choice["text"][offset : offset + len(token)] == token
    # With the prompt come its log-probabilities; nothing predicts its first token.
    assert echoed["text_offset"][0] == 0 and echoed["token_logprobs"][0] is echoed["top_logprobs"][0] is None
    tokens = llm.tokenize(prompt.encode())
    expected = [Llama.logits_to_logprobs(row)[token] for row, token in zip(llm.model.logits(tokens), tokens[1:])]
    np.testing.assert_allclose(echoed["token_logprobs"][1 : len(tokens)], expected, atol=0.02)
    # Without it the answer's are the same, and begin behind the prompt.
    alone = llm(prompt, **ask)["choices"][0]["logprobs"]
    for name, values in alone.items():
        assert values == echoed[name][len(tokens) :] or name.endswith("logprobs"), name
    np.testing.assert_allclose(alone["token_logprobs"], echoed["token_logprobs"][len(tokens) :], atol=0.02)
    assert alone["text_offset"][0] == len(prompt)
    assert llm(tokens, **ask)["choices"][0]["logprobs"]["text_offset"] == alone["text_offset"]


def test_tokens_that_are_parts_of_a_character_have_its_bytes(llm: Llama) -> None:
    grammar = LlamaGrammar.from_string('root ::= "🦄🦄ab"')
    ask: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "grammar": grammar}
    answer = llm.create_chat_completion([{"role": "user", "content": "Hi"}], logprobs=True, **ask)["choices"][0]
    content = answer["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "🦄🦄ab".encode()
    assert any(entry["token"] == "\ufffd" for entry in content), content

    whole = llm("x", logprobs=1, **ask)["choices"][0]
    offsets = whole["logprobs"]["text_offset"]
    assert whole["text"] == "🦄🦄ab" and offsets == sorted(offsets)
    for offset, token in zip(offsets, whole["logprobs"]["tokens"]):
        assert "\ufffd" in token or whole["text"][offset - 1 :].startswith(token)
    # Behind the prompt; several tokens of one character begin where it begins.
    assert offsets.count(1) > 1 and offsets[-1] <= len(whole["text"])
    chunks = [chunk["choices"][0]["logprobs"] for chunk in llm("x", logprobs=1, stream=True, **ask)]
    assert [offset for chunk in chunks if chunk for offset in chunk["text_offset"]] == offsets


def test_a_seed_gives_a_sequence_of_answers(tiny_path: Path) -> None:
    def answers(seed: int, count: int) -> list[list[int]]:
        llama = Llama(tiny_path, n_ctx=128, seed=seed)
        found: list[list[int]] = []
        for _ in range(count):
            llama.create_completion([1, 2, 3], max_tokens=8, temperature=2.0, top_k=0, min_p=0.0, top_p=1.0)
            found.append(llama.input_ids.tolist())
        llama.close()
        return found

    first = answers(7, 3)
    assert first == answers(7, 3) and first != answers(8, 3)
    assert first[0] != first[1] != first[2] != first[0]
    with_own = Llama(tiny_path, n_ctx=128, seed=7)
    texts = [with_own("ab", max_tokens=8, temperature=2.0, top_k=0, min_p=0.0, seed=5)["choices"][0]["text"] for _ in range(2)]
    assert texts[0] == texts[1]
    with_own.close()


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("rope_freq_base", 10000.0, 0.0),
        ("rope_freq_scale", 0.5, 0.0),
        ("rope_scaling_type", 2, -1),
        ("yarn_ext_factor", 1.0, -1.0),
        ("yarn_attn_factor", 2.0, 1.0),
        ("yarn_beta_fast", 1.0, 32.0),
        ("yarn_beta_slow", 2.0, 1.0),
        ("yarn_orig_ctx", 4096, 0),
        ("kv_overrides", {"a": 1}, None),
        ("pooling_type", 1, -1),
        ("vocab_only", True, False),
        ("lora_base", "base.gguf", None),
        ("tokenizer", object(), None),
        ("attention_type", 1, -1),
    ],
)
def test_arguments_that_would_change_answers_are_refused(tiny_path: Path, name: str, value: Any, neutral: Any) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(quadriga.InvalidRequest, match=name):
        Llama(tiny_path, n_ctx=64, **given)
    given = {name: neutral}
    Llama(tiny_path, n_ctx=64, **given).close()


def test_scores_are_those_of_the_tokens(tiny_path: Path) -> None:
    llama = Llama(tiny_path, n_ctx=128)
    llama.eval([1, 2, 3])
    known = llama.scores.copy()
    state = llama.save_state()
    assert state.scores.tolist() == known.tolist()
    llama.create_completion([1, 2, 4, 5], max_tokens=2, temperature=0)
    assert llama.n_tokens >= 4 and llama.scores.shape == (llama.n_tokens, llama.n_vocab())
    assert llama.scores[:2].tolist() == known[:2].tolist() and not llama.scores[2:].any()
    count = llama.n_tokens
    llama.eval([6])
    assert llama.scores.shape[0] == count + 1 and llama.scores[-1].any() and not llama.scores[2:-1].any()
    llama.load_state(state)
    assert llama.input_ids.tolist() == [1, 2, 3] and llama.scores.tolist() == known.tolist()
    llama.reset()
    assert llama.scores.shape == (0, llama.n_vocab())
    llama.close()


def test_tokens_that_are_sent_come_next(tiny_path: Path) -> None:
    llama = Llama(tiny_path, n_ctx=128)
    generator = llama.generate([1, 2, 3], temp=0)
    first = next(generator)
    second = generator.send([7, 8])
    assert second == int(llama.model.logits([1, 2, 3, first, 7, 8], last=True).argmax())
    third = next(generator)
    generator.close()
    assert llama.input_ids.tolist() == [1, 2, 3, first, 7, 8, second, third]
    llama.close()


def test_a_path_object_is_a_path(tiny_path: Path) -> None:
    llama = Llama(model_path=tiny_path, n_ctx=64)
    assert llama.model_path == str(tiny_path)
    assert llama("a", max_tokens=1)["model"] == str(tiny_path)
    llama.close()


def test_functions_are_answered_with_function_call(llm: Llama) -> None:
    parameters = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    ask: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Extract Jason is 25 years old"}],
        "functions": [{"name": "UserDetail", "parameters": parameters}],
        "function_call": {"name": "UserDetail"},
        "temperature": 0,
        "max_tokens": 80,
    }
    message = llm.create_chat_completion(**ask)["choices"][0]["message"]
    assert message["function_call"]["name"] == "UserDetail" and "name" in message["function_call"]["arguments"]
    deltas = [chunk["choices"][0]["delta"] for chunk in llm.create_chat_completion(**ask, stream=True)]
    calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert calls[0]["name"] == "UserDetail"
    assert "".join(call["arguments"] for call in calls) == message["function_call"]["arguments"]


def test_an_eval_that_fails_changes_nothing(tiny_path: Path) -> None:
    llama = Llama(str(tiny_path), n_ctx=128)
    llama.eval([1, 2, 3])
    with pytest.raises(quadriga.ContextFull):
        llama.eval([4] * (llama.n_ctx() + 1))
    with pytest.raises(quadriga.Error):
        llama.eval([llama.n_vocab()])
    assert llama.input_ids.tolist() == [1, 2, 3] and llama.scores.shape == (3, llama.n_vocab())
    llama.eval([4, 5])
    llama.eval([])
    assert llama.input_ids.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(llama.scores, llama.model.logits([1, 2, 3, 4, 5]), atol=0.05)
    llama.close()


def test_generate_without_reset_goes_on_from_the_tokens_so_far(tiny_path: Path) -> None:
    llama = Llama(str(tiny_path), n_ctx=128)
    llama.eval([1, 2, 3])
    first = next(llama.generate([4, 5], temp=0, reset=False))
    assert llama.input_ids.tolist() == [1, 2, 3, 4, 5, first]
    second = next(llama.generate([], temp=0, reset=False))
    assert llama.input_ids.tolist() == [1, 2, 3, 4, 5, first, second]
    third = next(llama.generate([4, 5], temp=0))
    assert llama.input_ids.tolist() == [4, 5, third]
    llama.close()


def test_prompt_lookup_is_a_draft_model(tiny_path: Path) -> None:
    draft = LlamaPromptLookupDecoding(num_pred_tokens=4)
    prompt = [5, 6, 7, 8] * 8
    answers: list[Any] = []
    for model in (None, draft):
        llama = Llama(str(tiny_path), n_ctx=256, draft_model=model)
        answers.append(llama(prompt, max_tokens=8, temperature=0)["choices"][0]["text"])
        llama.close()
    assert answers[0] == answers[1]
    wrong: Any = object()
    with pytest.raises(TypeError, match="LlamaPromptLookupDecoding"):
        Llama(str(tiny_path), draft_model=wrong)
    absent: Any = None
    with pytest.raises(TypeError, match="model_path"):
        Llama(absent)


def test_answers_as_objects_of_openai(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    chat: Any = types.ModuleType("openai.types.chat")
    chat.ChatCompletion = chat.ChatCompletionChunk = types.SimpleNamespace
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    monkeypatch.setitem(sys.modules, "openai.types.chat", None)
    with pytest.raises(ImportError, match="pip install openai"):
        llm.create_chat_completion_openai_v1(**ask)
    for name in ("openai", "openai.types"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "openai.types.chat", chat)
    assert llm.create_chat_completion_openai_v1(**ask).object == "chat.completion"
    chunks = list(llm.create_chat_completion_openai_v1(**ask, stream=True))
    assert chunks[0].object == "chat.completion.chunk"


def test_objects_have_the_properties_that_a_schema_lists(llm: Llama) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
    formats = ({"type": "json_object", "schema": schema}, {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "Describe Peru as JSON."}], "temperature": 0, "max_tokens": 60}
    for wanted in formats:
        answer = llm.create_chat_completion(**ask, response_format=wanted)["choices"][0]
        assert answer["finish_reason"] == "stop" and list(json.loads(answer["message"]["content"])) == ["n"]
    grammar = LlamaGrammar.from_json_schema(json.dumps(schema))
    assert list(json.loads(llm("A country: ", grammar=grammar, temperature=0, max_tokens=60)["choices"][0]["text"])) == ["n"]
    assert "additionalProperties" not in schema


def test_schemas_are_closed_where_that_refuses_nothing() -> None:
    point = {"properties": {"x": {"type": "number"}, "properties": {"type": "object", "properties": {"type": {}}}}}
    closed = closed_schema({"$defs": {"point": point}, "items": {"$ref": "#/$defs/point"}, "default": {"properties": {}}})
    assert closed["$defs"]["point"]["additionalProperties"] is False
    assert closed["$defs"]["point"]["properties"].keys() == {"x", "properties"}
    assert closed["$defs"]["point"]["properties"]["properties"]["additionalProperties"] is False
    assert closed["items"] == {"$ref": "#/$defs/point"} and closed["default"] == {"properties": {}}
    for unchanged in ({"allOf": [point, point]}, {"type": "object"}, {**point, "additionalProperties": True}, {**point, "anyOf": [{}]}):
        assert closed_schema(unchanged).get("additionalProperties", True) is True


def test_constants_are_those_of_llama_cpp(tiny_path: Path) -> None:
    from quadriga import llama_cpp

    llama = Llama(
        model_path=tiny_path,
        n_ctx=64,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F16,
        split_mode=llama_cpp.LLAMA_SPLIT_MODE_LAYER,
        pooling_type=llama_cpp.LLAMA_POOLING_TYPE_UNSPECIFIED,
        rope_scaling_type=llama_cpp.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
    )
    assert (llama_cpp.GGML_TYPE_Q4_0, llama_cpp.GGML_TYPE_Q8_0) == (2, 8)
    with pytest.raises(TypeError, match="needs bytes"):
        llama.tokenize("a text")  # pyright: ignore[reportArgumentType]
    assert llama.tokenize(b"a") == llama.tokenize(bytearray(b"a"))  # pyright: ignore[reportArgumentType]
    llama.close()
