"""Text of the default model: generated whole and streamed, from several threads, with options."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import quadriga

GRAVITY = "Gravity is a fundamental concept in physics that describes the curvature of spacetime"


def test_chat_answers_as_the_command_does(model: quadriga.Model) -> None:
    answer = model.chat("What is gravity?", temperature=0, max_tokens=40)
    assert answer.text.startswith(GRAVITY)
    assert str(answer) == answer.text
    assert answer.finish_reason == "length"
    assert answer.usage.completion_tokens == len(answer.tokens) == 40


def test_a_stream_has_the_same_text_piece_by_piece(model: quadriga.Model) -> None:
    whole = model.generate("The capital of France is", temperature=0, max_tokens=12)
    stream = model.generate("The capital of France is", temperature=0, max_tokens=12, stream=True)
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.token for piece in pieces] == whole.tokens
    assert stream.completion.text == whole.text
    assert "Paris" in whole.text


def test_threads_share_one_engine_and_get_their_own_answers(model: quadriga.Model) -> None:
    prompts = [f"The number after {number} is" for number in range(8)]
    alone = [model.generate(prompt, temperature=0, max_tokens=6).tokens for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: model.generate(prompt, temperature=0, max_tokens=6).tokens, prompts))
    assert together == alone


def ran_meanwhile(work: Callable[[], object]) -> bool:
    """Whether another thread runs Python during a call. It could only take the GIL after an hour: it must be given it."""
    begin, ran = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (begin.wait(), ran.set()))
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        begin.set()
        work()
        found = ran.is_set()
    finally:
        sys.setswitchinterval(interval)
    other.join()
    return found


def test_other_threads_run_python_while_a_model_computes(model: quadriga.Model) -> None:
    # On a busy machine the other thread may get no processor in time, so there are several attempts.
    def is_free(work: Callable[[], object]) -> bool:
        return any(ran_meanwhile(work) for _ in range(20))

    text = "Once upon a time, " * 40
    assert is_free(lambda: model.logits(text, last=True))
    assert is_free(lambda: model.embed(text))
    assert is_free(lambda: model.generate(text, max_tokens=4))
    # The test sees a call that keeps the GIL.
    assert not all(ran_meanwhile(lambda: ctypes.PyDLL(None).usleep(50_000)) for _ in range(5))


def test_seeds_stops_and_biases_are_respected(model: quadriga.Model) -> None:
    def sampled(seed: int) -> str:
        return model.generate("Once upon a time", seed=seed, temperature=1.0, max_tokens=12).text

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(6)}) > 1
    stopped = model.generate("One, two, three, four,", temperature=0, max_tokens=20, stop=[" six", "seven"])
    assert stopped.stop == " six" and "six" not in stopped.text
    first = model.generate("The sky is", temperature=0, max_tokens=1).tokens[0]
    banned = model.generate("The sky is", temperature=0, max_tokens=1, logit_bias={str(first): -1000})
    assert banned.tokens[0] != first


def test_logprobs_agree_with_logits(model: quadriga.Model) -> None:
    answer = model.generate("The capital of Italy is", temperature=0, max_tokens=3, logprobs=2)
    assert answer.logprobs is not None and answer.logprobs.shape == (3,)
    tokens = model.tokenize("The capital of Italy is", add_bos=True)
    logits = model.logits(tokens, last=True).astype(np.float64)
    wanted = logits - (logits.max() + np.log(np.exp(logits - logits.max()).sum()))
    best = int(wanted.argmax())
    assert answer.tokens[0] == best == answer.top_logprobs[0][0][0]
    assert answer.logprobs[0] == pytest.approx(wanted[best], abs=0.02)


def test_logits_have_a_row_for_each_token(model: quadriga.Model) -> None:
    tokens = model.tokenize("One two three four", add_bos=True)
    rows = model.logits(tokens)
    assert rows.shape == (len(tokens), model.n_vocab) and rows.dtype == np.float32
    np.testing.assert_allclose(rows[-1], model.logits(tokens, last=True), atol=0.05)
    np.testing.assert_allclose(rows[2:], model.logits(tokens, start=2), atol=0.05)
    for start in (-1, len(tokens)):
        with pytest.raises(quadriga.InvalidRequest, match="start"):
            model.logits(tokens, start=start)
    # The array is the memory that the engine filled: it can be written, and outlives the call.
    rows[0] = 0
    assert not rows[0].any()


def test_logits_processors_see_and_change_logits(model: quadriga.Model) -> None:
    wanted = model.tokenize(" London")[0]
    seen: list[int] = []

    def force(tokens: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> None:
        seen.append(len(tokens))
        keep = logits[wanted]
        logits[:] = -np.inf
        logits[wanted] = keep

    def unchanged(tokens: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return logits + 1

    answer = model.generate("I live in", max_tokens=3, logits_processors=[force, unchanged])
    assert answer.tokens == [wanted] * 3
    prompt = len(model.tokenize("I live in", add_bos=True))
    assert seen == [prompt, prompt + 1, prompt + 2]


def test_an_exception_of_a_logits_processor_is_raised(model: quadriga.Model) -> None:
    def fail(tokens: object, logits: object) -> None:
        raise KeyError("my own")

    with pytest.raises(KeyError, match="my own"):
        model.generate("Hello", max_tokens=3, logits_processors=[fail])
    assert model.generate("Hello", max_tokens=2).usage.completion_tokens == 2


def test_tokens_and_text(model: quadriga.Model) -> None:
    text = "Grüße, 世界! 🙂"
    tokens = model.tokenize(text)
    assert model.detokenize(tokens) == text
    assert model.tokenize("<|im_end|>", special=True) != model.tokenize("<|im_end|>")
    assert model.detokenize(model.tokenize("<|im_end|>", special=True), special=True) == "<|im_end|>"
    chat = model.chat_tokens("Hi")
    assert "Hi" in model.detokenize(chat) and len(chat) > 3


def test_embeddings_are_numpy_arrays_of_length_one(model: quadriga.Model) -> None:
    vectors = model.embed(["a cat", "a kitten", "the tax return of a company"])
    assert vectors.shape == (3, model.n_embd) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(model.embed("a cat"), vectors[0], atol=1e-3)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    assert model.embed([]).shape == (0, model.n_embd)


def test_facts(model: quadriga.Model) -> None:
    assert model.architecture == "llama" and not model.is_encoder
    assert model.n_ctx == 1024 and model.n_vocab == 49152
    assert model.metadata["general.architecture"] == "llama"
    assert model.devices[-1] == "cpu"
    assert "<svg" in model.plan_svg() and "<html" in model.plan_html()
    assert sum(device["weights"] for device in model.facts["memory"]) > 0
    assert "llama" in repr(model)


def test_threads_that_read_one_stream_all_come_to_its_end(tiny: quadriga.Model) -> None:
    stream = tiny.generate([1, 2, 3], stream=True, max_tokens=32, ignore_eos=True)
    with ThreadPoolExecutor(4) as pool:
        read = [pool.submit(lambda: sum(1 for _ in stream)) for _ in range(4)]
    assert sum(each.result() for each in read) == 32
    assert stream.completion.usage.completion_tokens == 32


def test_closing_a_stream_ends_the_wait_of_another_thread(tiny: quadriga.Model) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(tokens: object, logits: object) -> None:
        entered.set()
        leave.wait()

    stream = tiny.generate([1, 2, 3], stream=True, logits_processors=[slow])
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(lambda: list(stream))
        entered.wait()
        stream.close()
        assert read.result(timeout=60) == []
        leave.set()


def test_an_echo_is_in_the_text_of_the_whole_answer(tiny: quadriga.Model) -> None:
    ask: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    for prompt, text in (("ab", "ab"), (tiny.tokenize("abc"), "abc")):
        plain = tiny.generate(prompt, **ask)
        echoed = tiny.generate(prompt, echo=True, logprobs=1, **ask)
        assert echoed.text == text + plain.text and echoed.tokens == plain.tokens
        assert echoed.prompt_logprobs is not None and len(echoed.prompt_logprobs) == echoed.usage.prompt_tokens - 1
        stream = tiny.generate(prompt, echo=True, stream=True, **ask)
        assert "".join(piece.text for piece in stream) == plain.text and stream.completion.text == echoed.text


def test_rules_of_vllm_are_options(tiny: quadriga.Model) -> None:
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
    plain = tiny.generate([5, 6, 7], **options).tokens
    stopped = tiny.generate([5, 6, 7], stop_token_ids=[plain[0]], **options)
    assert stopped.finish_reason == "stop" and len(stopped.tokens) <= 1
    allowed = [9, 11]
    assert set(tiny.generate([5, 6, 7], allowed_token_ids=allowed, **options).tokens) <= set(allowed)
    with pytest.raises(quadriga.InvalidRequest, match="min_tokens"):
        tiny.generate([5, 6, 7], min_tokens=9, **options)
