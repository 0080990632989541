"""Conversations: tools, structured output, streams in an event loop."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
import quadriga
from pydantic import BaseModel, ValidationError, field_validator

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class City(BaseModel):
    name: str
    people: int


def test_a_conversation_goes_on(model: quadriga.Model) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "My name is Ada. Say hello."}]
    first = model.chat(messages, temperature=0, max_tokens=20)
    messages += [first.message(), {"role": "user", "content": "Go on."}]
    second = model.chat(messages, temperature=0, max_tokens=5)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_an_answer_satisfies_a_class_of_pydantic(model: quadriga.Model) -> None:
    answer = model.chat("Name a city in Peru.", response_format=City, temperature=0, max_tokens=60)
    assert isinstance(answer.parsed, City)
    assert answer.json() == answer.parsed.model_dump()


def test_an_answer_satisfies_a_schema_or_a_grammar(model: quadriga.Model) -> None:
    number = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}
    answer = model.chat("A number?", response_format=schema, temperature=0, max_tokens=100)
    assert isinstance(answer.json()["n"], int)
    grammar = 'root ::= "yes" | "no"'
    assert model.chat("Is 91 a prime?", grammar=grammar, max_tokens=10).text in ("yes", "no")
    with pytest.raises(quadriga.InvalidRequest, match="grammar"):
        model.chat("Hi", grammar="root ::= (")


def test_a_tool_that_must_be_called_is_called(model: quadriga.Model) -> None:
    answer = model.chat(
        "What is the weather in Lima?",
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=120,
    )
    assert answer.finish_reason == "tool_calls"
    [call] = answer.tool_calls
    assert call.name == "get_weather"
    assert isinstance(call.parsed()["city"], str)
    assert answer.message()["tool_calls"][0]["function"]["arguments"] == call.arguments


def test_streams_in_an_event_loop(model: quadriga.Model) -> None:
    async def run() -> list[str]:
        async def one(number: int) -> str:
            text = ""
            async for piece in model.generate(f"{number}, {number + 1},", temperature=0, max_tokens=6, stream=True):
                text += piece.text
            return text

        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticking = asyncio.create_task(tick())
        texts = await asyncio.gather(*(one(number) for number in range(12)))
        ticking.cancel()
        # The loop was free meanwhile.
        assert ticks > 100
        return texts

    streamed = asyncio.run(run())
    whole = [model.generate(f"{n}, {n + 1},", temperature=0, max_tokens=6).text for n in range(12)]
    assert streamed == whole


def test_whole_answers_in_an_event_loop(model: quadriga.Model) -> None:
    async def run() -> tuple[quadriga.Completion, quadriga.Completion]:
        return await asyncio.gather(
            model.chat_async("Hi", temperature=0, max_tokens=4), model.generate_async("Hi", temperature=0, max_tokens=4)
        )

    chat, text = asyncio.run(run())
    assert chat.usage.completion_tokens == text.usage.completion_tokens == 4


def test_a_cancelled_task_ends_its_request(model: quadriga.Model) -> None:
    async def run() -> None:
        stream = model.generate("Once upon a time", ignore_eos=True, stream=True)

        async def read() -> None:
            async for _ in stream:
                pass

        task = asyncio.create_task(read())
        while model.facts["running"] == 0:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while model.facts["running"] > 0:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_closed_stream_ends_its_request(model: quadriga.Model) -> None:
    with model.generate("Once upon a time", ignore_eos=True, stream=True) as stream:
        next(stream)
    assert list(stream) == []
    while model.facts["running"] > 0:
        time.sleep(0.001)


def test_errors_name_what_is_wrong(model: quadriga.Model) -> None:
    with pytest.raises(quadriga.InvalidRequest, match=r"messages\[0\].role"):
        model.chat([{"role": "nobody", "content": "Hi"}])
    with pytest.raises(quadriga.InvalidRequest, match="top_p"):
        model.generate("Hi", top_p=2.0)
    with pytest.raises(TypeError, match="no_such_option"):
        model.generate("Hi", no_such_option=1)
    with pytest.raises(quadriga.ContextFull, match="1024"):
        model.generate("word " * 3000)
    with pytest.raises(ValueError):
        model.generate([10_000_000])
    assert json.loads(json.dumps(model.chat("Hi", max_tokens=1).message()))["role"] == "assistant"


def test_an_answer_that_a_class_refuses_is_not_lost(model: quadriga.Model) -> None:
    class Never(BaseModel):
        name: str

        @field_validator("name")
        @classmethod
        def refuse(cls, value: str) -> str:
            raise ValueError("no name is good enough")

    ask: dict[str, Any] = {"response_format": Never, "temperature": 0, "max_tokens": 60}
    for answer in (model.chat("Name a city.", **ask), model.chat("Name a city.", stop=["}"], **ask)):
        assert answer.finish_reason == "stop" and answer.usage.completion_tokens > 0 and '"name"' in answer.text
        for _ in range(2):
            with pytest.raises(ValidationError):
                _ = answer.parsed
    assert model.chat("Name a city.", max_tokens=1, response_format=Never).parsed is None
    assert model.chat("Hi", max_tokens=1).parsed is None
