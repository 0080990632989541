"""Programs for llama-cpp-python, with another import."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from quadriga.llama_cpp import Llama, LlamaGrammar, LogitsProcessorList, StoppingCriteriaList


@pytest.fixture(scope="module")
def llm() -> Iterator[Llama]:
    import quadriga

    with quadriga.Model(n_ctx=64) as model:
        path = model.path
    llama = Llama(model_path=path, n_ctx=1024, verbose=False, chat_format="chatml", logits_all=True)
    yield llama
    llama.close()


def test_completion(llm: Llama) -> None:
    # The example of the package's README.
    output = llm("Q: Name the planets in the solar system? A: ", max_tokens=32, stop=["Q:", "\n"], echo=True)
    assert output["object"] == "text_completion" and output["id"].startswith("cmpl-")
    [choice] = output["choices"]
    assert choice["text"].startswith("Q: Name the planets in the solar system? A: ")
    assert choice["finish_reason"] in ("stop", "length") and choice["logprobs"] is None and choice["index"] == 0
    usage = output["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert output["model"] == llm.model_path


def test_completion_in_chunks(llm: Llama) -> None:
    whole = llm.create_completion("The capital of France is", max_tokens=8, temperature=0)
    chunks = list(llm.create_completion("The capital of France is", max_tokens=8, temperature=0, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_logprobs(llm: Llama) -> None:
    choice = llm("The capital of France is", max_tokens=4, temperature=0, logprobs=3)["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 4
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"][0] == len("The capital of France is")
    assert logprobs["text_offset"][1] == logprobs["text_offset"][0] + len(logprobs["tokens"][0])
    assert all(len(top) == 3 and max(top.values()) <= 0 for top in logprobs["top_logprobs"])


def test_chat(llm: Llama) -> None:
    messages = [
        {"role": "system", "content": "You are an assistant who perfectly describes images."},
        {"role": "user", "content": "Describe this image in detail please."},
    ]
    answer = llm.create_chat_completion(messages=messages, max_tokens=8)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant" and isinstance(message["content"], str)
    chunks = list(llm.create_chat_completion(messages=messages, max_tokens=8, temperature=0, stream=True))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    whole = llm.create_chat_completion(messages=messages, max_tokens=8, temperature=0)
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert streamed == whole["choices"][0]["message"]["content"]


def test_json_mode_and_grammars(llm: Llama) -> None:
    schema = {"type": "object", "properties": {"team": {"type": "string"}}, "required": ["team"]}
    answer = llm.create_chat_completion(
        messages=[{"role": "user", "content": "Who won the world series in 2020?"}],
        response_format={"type": "json_object", "schema": schema},
        temperature=0.7,
        max_tokens=100,
    )
    if answer["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["team"], str)
    grammar = LlamaGrammar.from_string('root ::= "red" | "green"')
    assert llm("A colour:", grammar=grammar, max_tokens=8)["choices"][0]["text"] in ("red", "green")
    grammar = LlamaGrammar.from_json_schema(json.dumps({"enum": ["north", "south"]}))
    assert llm("Where?", grammar=grammar, max_tokens=8)["choices"][0]["text"] in ('"north"', '"south"')


def test_function_calling(llm: Llama) -> None:
    parameters = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "UserDetail", "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "UserDetail"}}
    messages = [{"role": "user", "content": "Extract Jason is 25 years old"}]
    answer = llm.create_chat_completion(
        messages=messages, tools=[tool], tool_choice=choice, temperature=0, max_tokens=80
    )
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "UserDetail" and "name" in json.loads(call["function"]["arguments"])


def test_embeddings(llm: Llama) -> None:
    embeddings = llm.create_embedding(["Hello, world!", "Goodbye, world!"])
    assert [row["index"] for row in embeddings["data"]] == [0, 1]
    assert len(embeddings["data"][0]["embedding"]) == llm.n_embd()
    assert embeddings["usage"]["prompt_tokens"] > 0
    assert len(llm.embed("Hello, world!")) == llm.n_embd()


def test_tokens(llm: Llama) -> None:
    tokens = llm.tokenize(b"Hello, world!", add_bos=False)
    assert llm.detokenize(tokens) == b"Hello, world!"
    assert llm.n_ctx() == 1024 and llm.n_vocab() == 49152
    assert llm.token_eos() >= 0 and llm.metadata["general.architecture"] == "llama"


def test_processors_and_criteria(llm: Llama) -> None:
    def processor(ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        scores = scores.copy()
        scores[llm.token_eos()] = -np.inf
        return scores

    criteria = StoppingCriteriaList([lambda tokens, logits: len(tokens) >= 12])
    output = llm("One two three", max_tokens=50, logits_processor=LogitsProcessorList([processor]), stopping_criteria=criteria)
    assert output["usage"]["total_tokens"] == 12


def test_states(llm: Llama) -> None:
    prompt = "A long story about a small boat on a large lake. " * 12
    first = llm(prompt, max_tokens=6, temperature=0)
    state = llm.save_state()
    assert state.n_tokens == first["usage"]["total_tokens"] and state.llama_state_size == len(state.llama_state)
    llm.reset()
    assert llm.n_tokens == 0
    llm.model.clear_cache()
    llm.load_state(state)
    assert llm.n_tokens == state.n_tokens
    again = llm.model.generate(prompt, temperature=0, max_tokens=6)
    assert again.usage.cached_tokens >= 64
    assert again.text == first["choices"][0]["text"]


def test_eval_and_generate(llm: Llama) -> None:
    tokens = llm.tokenize(b"One, two, three,")
    llm.reset()
    llm.eval(tokens)
    assert llm.scores.shape == (len(tokens), llm.n_vocab())
    generated: list[int] = []
    for token in llm.generate(tokens, temp=0):
        generated.append(token)
        if len(generated) == 3:
            break
    assert generated[0] == int(llm.model.logits(tokens, last=True).argmax())


def test_unknown_arguments_are_a_warning(tiny_path: Path) -> None:
    with pytest.warns(UserWarning, match="n_cttx") as caught:
        Llama(model_path=str(tiny_path), n_ctx=64, n_cttx=5).close()
    assert caught[0].filename == __file__
