"""anthropic: messages, streams, tools, schemas, and the number of tokens."""
import json
import unittest

import anthropic

import server

TOOL = {"name": "weather", "description": "The weather in a city.", "input_schema": server.WEATHER}


class Anthropic(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = anthropic.Anthropic(base_url=server.default(), api_key="none", max_retries=0, timeout=120)
        cls.common = {"model": "smollm2", "max_tokens": 100, "extra_body": {"temperature": 0}}

    def test_message_and_stream(self):
        answer = self.client.messages.create(messages=server.QUESTION, **self.common)
        self.assertIn("Paris", answer.content[0].text)
        self.assertEqual(answer.stop_reason, "end_turn")
        with self.client.messages.stream(messages=server.QUESTION, **self.common) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        self.assertEqual(text, answer.content[0].text)
        self.assertEqual(final.usage.output_tokens, answer.usage.output_tokens)

    def test_tools(self):
        messages = [{"role": "user", "content": "How is the weather in Bern?"}]
        for choice in [{"type": "any"}, {"type": "tool", "name": "weather"}]:
            choice = {**choice, "disable_parallel_tool_use": True}
            answer = self.client.messages.create(messages=messages, tools=[TOOL], tool_choice=choice, **self.common)
            self.assertEqual(answer.stop_reason, "tool_use")
            (call,) = [block for block in answer.content if block.type == "tool_use"]
            server.check_weather(call.input)
            with self.client.messages.stream(messages=messages, tools=[TOOL], tool_choice=choice, **self.common) as stream:
                final = stream.get_final_message()
            self.assertEqual([block.input for block in final.content if block.type == "tool_use"], [call.input])
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
        history = [*messages, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        self.assertTrue(self.client.messages.create(messages=history, tools=[TOOL], **self.common).content)

    def test_one_call_of_a_named_tool(self):
        messages = [{"role": "user", "content": "How is the weather in Bern?"}]
        choice = {"type": "tool", "name": "weather"}
        common = {**self.common, "max_tokens": 400}
        answer = self.client.messages.create(messages=messages, tools=[TOOL], tool_choice=choice, **common)
        (call,) = answer.content
        self.assertTrue(call.id.startswith("toolu_"), call.id)
        server.check_weather(call.input)

    def test_schema(self):
        messages = [{"role": "user", "content": "How is the weather in Bern? Answer in JSON."}]
        config = {"format": {"type": "json_schema", "schema": server.WEATHER}}
        answer = self.client.messages.create(messages=messages, output_config=config, **self.common)
        server.check_weather(json.loads(answer.content[0].text))
        with self.client.messages.stream(messages=messages, output_config=config, **self.common) as stream:
            text = "".join(stream.text_stream)
        self.assertEqual(json.loads(text), json.loads(answer.content[0].text))

    def test_tokens_and_errors(self):
        count = self.client.messages.count_tokens(model="smollm2", messages=server.QUESTION).input_tokens
        answer = self.client.messages.create(messages=server.QUESTION, **{**self.common, "max_tokens": 1})
        usage = answer.usage
        cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        self.assertEqual(count, usage.input_tokens + cached)
        self.assertEqual(answer.stop_reason, "max_tokens")
        with self.assertRaises(anthropic.BadRequestError):
            self.client.messages.create(messages=[], **self.common)


if __name__ == "__main__":
    unittest.main()
