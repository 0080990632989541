"""openai-python: chat, streams and their helpers, tools, `.parse()`, responses, embeddings, models, errors."""
import enum
import json
import unittest

import httpx
import openai
import pydantic
from openai import types
from openai.types import chat, responses

import server


class Unit(enum.Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class Weather(pydantic.BaseModel):
    """The weather in a city."""

    city: str = pydantic.Field(max_length=20)
    unit: Unit


class Verdict(pydantic.BaseModel):
    correct: bool
    points: int


class OpenAi(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = openai.OpenAI(base_url=server.default() + "/v1", api_key="none", max_retries=0, timeout=120)
        cls.common = {"model": "smollm2", "temperature": 0, "seed": 1}

    def chat(self, **more):
        return self.client.chat.completions.create(**{"messages": server.QUESTION, "max_tokens": 24, **self.common, **more})

    def test_chat_and_stream(self):
        answer = self.chat()
        text = answer.choices[0].message.content
        self.assertIn("Paris", text)
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
        chunks = list(self.chat(stream=True, stream_options={"include_usage": True}))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        self.assertEqual(streamed, text)
        self.assertEqual(chunks[-1].usage.total_tokens, answer.usage.total_tokens)

    def test_stream_helper(self):
        with self.client.chat.completions.stream(messages=server.QUESTION, max_tokens=24, **self.common) as stream:
            events = [event.type for event in stream]
            final = stream.get_final_completion()
        self.assertIn("content.delta", events)
        self.assertIn("Paris", final.choices[0].message.content)

    def test_tools(self):
        messages = [{"role": "user", "content": "How is the weather in Bern?"}]
        for choice in ["required", {"type": "function", "function": {"name": "weather"}}]:
            answer = self.chat(messages=messages, tools=server.TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=100)
            self.assertEqual(answer.choices[0].finish_reason, "tool_calls")
            (call,) = answer.choices[0].message.tool_calls
            server.check_weather(json.loads(call.function.arguments))
        result = [*messages, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}]
        self.assertTrue(self.chat(messages=result, tools=server.TOOLS).choices[0].message.content)
        none = self.chat(messages=messages, tools=server.TOOLS, tool_choice="none")
        self.assertIsNone(none.choices[0].message.tool_calls)

    def test_streamed_tools(self):
        tool = openai.pydantic_function_tool(Weather)
        with self.client.chat.completions.stream(
            messages=[{"role": "user", "content": "How is the weather in Bern?"}],
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=100,
            **self.common,
        ) as stream:
            events = [event.type for event in stream]
            final = stream.get_final_completion()
        self.assertIn("tool_calls.function.arguments.delta", events)
        (call,) = final.choices[0].message.tool_calls
        self.assertIsInstance(call.function.parsed_arguments, Weather)

    def test_parse(self):
        answer = self.client.chat.completions.parse(
            messages=[{"role": "user", "content": "Is 2 + 2 = 4 correct? Give points."}],
            response_format=Verdict,
            max_tokens=100,
            **self.common,
        )
        self.assertIsInstance(answer.choices[0].message.parsed, Verdict)

    def test_responses(self):
        answer = self.client.responses.create(
            model="smollm2", input="What is the capital of France? Answer with one word.", max_output_tokens=24, temperature=0
        )
        self.assertIn("Paris", answer.output_text)
        with self.client.responses.stream(
            model="smollm2", input="What is the capital of France? Answer with one word.", max_output_tokens=24, temperature=0
        ) as stream:
            events = [event.type for event in stream]
            self.assertEqual(stream.get_final_response().output_text, answer.output_text)
        self.assertEqual((events[0], events[-1]), ("response.created", "response.completed"))
        parsed = self.client.responses.parse(
            model="smollm2", input="Is 2 + 2 = 4 correct?", text_format=Verdict, max_output_tokens=100, temperature=0
        )
        self.assertIsInstance(parsed.output_parsed, Verdict)
        tool = {"type": "function", **server.TOOLS[0]["function"], "strict": True}
        called = self.client.responses.create(
            model="smollm2",
            input="How is the weather in Bern?",
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=100,
            temperature=0,
        )
        calls = [item for item in called.output if item.type == "function_call"]
        server.check_weather(json.loads(calls[0].arguments))

    def test_one_call_of_a_named_tool(self):
        choice = {"type": "function", "function": {"name": "weather"}}
        messages = [{"role": "user", "content": "How is the weather in Bern?"}]
        answer = self.chat(messages=messages, tools=server.TOOLS, tool_choice=choice, max_tokens=400)
        (call,) = answer.choices[0].message.tool_calls
        server.check_weather(json.loads(call.function.arguments))

    def test_embeddings(self):
        # The library asks for base64 by itself, and decodes it.
        answer = self.client.embeddings.create(model="smollm2", input=server.TEXTS)
        self.assertGreater(answer.usage.prompt_tokens, 0)
        vectors = [item.embedding for item in answer.data]
        server.check_embeddings(vectors)
        numbers = self.client.embeddings.create(model="smollm2", input=server.TEXTS, encoding_format="float")
        server.check_same(vectors, [item.embedding for item in numbers.data])
        short = self.client.embeddings.create(model="smollm2", input=server.TEXTS[0], dimensions=8)
        self.assertEqual(len(short.data[0].embedding), 8)

    def test_models_and_errors(self):
        self.assertEqual([model.id for model in self.client.models.list()], ["smollm2"])
        self.assertEqual(self.client.models.retrieve("smollm2").id, "smollm2")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}})
        self.assertEqual(caught.exception.param, "response_format")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.chat(messages=[{"role": "user", "content": "word " * 20000}])
        self.assertEqual(caught.exception.code, "context_length_exceeded")

    def test_noise_in_form(self):
        """Random weights give calls and JSON of the schema, too."""
        client = openai.OpenAI(base_url=server.small() + "/v1", api_key="none", max_retries=0, timeout=120)
        answer = client.chat.completions.create(
            model="small", messages=server.QUESTION, tools=server.TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=400
        )
        (call,) = answer.choices[0].message.tool_calls
        server.check_weather(json.loads(call.function.arguments))


class Responses(unittest.TestCase):
    """Reasoning and calls in a stream, as the library's accumulator reads them."""

    def test_streamed_tools(self):
        client = openai.OpenAI(base_url=server.thinking() + "/v1", api_key="none", max_retries=0, timeout=120)
        request = {
            "model": "thinking",
            "input": "How is the weather in Bern?",
            "tools": [openai.pydantic_function_tool(Weather)],
            "tool_choice": "required",
            # Random weights may go on calling for ever, and the accumulator wants an answer that is complete.
            "parallel_tool_calls": False,
            "max_output_tokens": 600,
            "extra_body": {"reasoning_budget_tokens": 16, "seed": 3},
        }
        with client.responses.stream(**request) as stream:
            events = list(stream)
            final = stream.get_final_response()
        kinds = [item.type for item in final.output]
        self.assertEqual(kinds, ["reasoning", "function_call"])
        for number, item in enumerate(final.output):
            own = [event for event in events if getattr(event, "output_index", None) == number]
            self.assertEqual((own[0].type, own[-1].type), ("response.output_item.added", "response.output_item.done"))
            if item.type == "function_call":
                self.assertIsInstance(item.parsed_arguments, Weather)
                deltas = [event for event in own if event.type == "response.function_call_arguments.delta"]
                self.assertEqual(deltas[-1].snapshot, item.arguments)


class Types(unittest.TestCase):
    """Answers have all that the library's types have: it does not check that by itself."""

    def send(self, path, **body):
        answer = httpx.post(f"{server.thinking()}/v1{path}", json={"model": "thinking", "seed": 3, **body}, timeout=120)
        self.assertEqual(answer.status_code, 200, answer.text)
        return answer.text

    def check(self, kind, text):
        return pydantic.TypeAdapter(kind).validate_json(text, strict=True)

    def check_stream(self, kind, path, **body):
        lines = [line.removeprefix("data: ") for line in self.send(path, stream=True, **body).splitlines() if line.startswith("data: ")]
        return [self.check(kind, line) for line in lines if line != "[DONE]"]

    def test_chat(self):
        plain = {"messages": server.QUESTION, "max_tokens": 40, "reasoning_budget_tokens": 8, "logprobs": True, "top_logprobs": 2}
        called = {"messages": server.QUESTION, "max_tokens": 400, "tools": server.TOOLS, "tool_choice": "required", "reasoning_budget_tokens": 8}
        for body in [plain, called]:
            self.check(chat.ChatCompletion, self.send("/chat/completions", **body))
            chunks = self.check_stream(chat.ChatCompletionChunk, "/chat/completions", stream_options={"include_usage": True}, **body)
            self.assertEqual({chunk.id for chunk in chunks}, {chunks[0].id})

    def test_others(self):
        body = {"prompt": "The capital of France is", "max_tokens": 8, "logprobs": 2}
        self.check(types.Completion, self.send("/completions", **body))
        # The type knows no chunk before the last, which have no reason of their end.
        lines = self.send("/completions", stream=True, **body).split("\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        self.assertEqual([chunk["choices"][0]["finish_reason"] for chunk in chunks], [None] * (len(chunks) - 1) + ["length"])
        for chunk in chunks:
            chunk["choices"][0]["finish_reason"] = "length"
            self.check(types.Completion, json.dumps(chunk))
        self.check(types.CreateEmbeddingResponse, self.send("/embeddings", input=["a", "b"]))
        listed = httpx.get(server.thinking() + "/v1/models").json()
        self.check(list[types.Model], json.dumps(listed["data"]))

    def test_responses(self):
        tool = {"type": "function", **server.TOOLS[0]["function"]}
        budget = {"input": "How is the weather in Bern?", "reasoning_budget_tokens": 8}
        form = {"format": {"type": "json_schema", "name": "weather", "schema": server.WEATHER, "strict": True}}
        for body in [
            {"max_output_tokens": 40},
            {"max_output_tokens": 40, "top_logprobs": 2},
            {"max_output_tokens": 400, "text": form, "reasoning": {"effort": "low"}, "metadata": {"a": "b"}},
            {"max_output_tokens": 600, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": True},
            {"max_output_tokens": 400, "tools": [tool], "tool_choice": {"type": "function", "name": "weather"}},
        ]:
            whole = self.check(responses.Response, self.send("/responses", **budget, **body))
            events = self.check_stream(responses.ResponseStreamEvent, "/responses", **budget, **body)
            self.assertEqual([event.sequence_number for event in events], list(range(len(events))))
            last = events[-1].response
            self.assertEqual([item.type for item in last.output], [item.type for item in whole.output])
            self.assertEqual((last.status, last.usage.output_tokens), (whole.status, whole.usage.output_tokens))
            self.assertEqual(last.completed_at is None, last.status != "completed")


if __name__ == "__main__":
    unittest.main()
