"""Reasoning in openai, anthropic, ollama and litellm: apart from the answer, the same in a stream, and switched off.

The model's weights are random: its reasoning is noise that a budget ends, and a schema gives the answer its form."""
import json
import os
import unittest

import anthropic
import ollama
import openai

import server

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

# Tokens of the reasoning, and of everything.
BUDGET, MOST = 16, 400
SCHEMA = {"type": "json_schema", "json_schema": {"name": "weather", "schema": server.WEATHER, "strict": True}}


class OpenAi(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = openai.OpenAI(base_url=server.thinking() + "/v1", api_key="none", max_retries=0, timeout=120)
        cls.common = {"model": "thinking", "messages": server.QUESTION, "max_tokens": MOST, "seed": 3, "response_format": SCHEMA}

    def test_chat_and_stream(self):
        extra = {"reasoning_budget_tokens": BUDGET}
        answer = self.client.chat.completions.create(**self.common, extra_body=extra)
        message = answer.choices[0].message
        # A field beyond OpenAI's own, as vLLM and DeepSeek have it.
        self.assertTrue(message.reasoning_content)
        server.check_weather(json.loads(message.content))
        self.assertGreater(answer.usage.completion_tokens_details.reasoning_tokens, 0)
        deltas = [chunk.choices[0].delta for chunk in self.client.chat.completions.create(**self.common, extra_body=extra, stream=True) if chunk.choices]
        self.assertEqual("".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas), message.reasoning_content)
        self.assertEqual("".join(delta.content or "" for delta in deltas), message.content)

    def test_switched_off(self):
        for more in [{"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}]:
            answer = self.client.chat.completions.create(**self.common, **more)
            self.assertFalse(getattr(answer.choices[0].message, "reasoning_content", None))
            server.check_weather(json.loads(answer.choices[0].message.content))

    def test_responses(self):
        common = {
            "model": "thinking",
            "input": "What is the capital of France?",
            "max_output_tokens": MOST,
            "text": {"format": {"type": "json_schema", "name": "weather", "schema": server.WEATHER, "strict": True}},
            "extra_body": {"reasoning_budget_tokens": BUDGET, "seed": 3},
        }
        answer = self.client.responses.create(**common)
        self.assertEqual([item.type for item in answer.output], ["reasoning", "message"])
        server.check_weather(json.loads(answer.output_text))
        with self.client.responses.stream(**common) as stream:
            events = {event.type for event in stream}
            final = stream.get_final_response()
        self.assertTrue(any("reasoning" in event for event in events), events)
        self.assertEqual(final.output_text, answer.output_text)


class Anthropic(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = anthropic.Anthropic(base_url=server.thinking(), api_key="none", max_retries=0, timeout=120)
        config = {"format": {"type": "json_schema", "schema": server.WEATHER}}
        cls.common = {"model": "thinking", "messages": server.QUESTION, "max_tokens": MOST, "output_config": config, "extra_body": {"seed": 3}}

    def test_message_and_stream(self):
        thinking = {"type": "enabled", "budget_tokens": BUDGET}
        answer = self.client.messages.create(**self.common, thinking=thinking)
        first, second = answer.content
        self.assertEqual((first.type, second.type), ("thinking", "text"))
        self.assertTrue(first.thinking)
        server.check_weather(json.loads(second.text))
        with self.client.messages.stream(**self.common, thinking=thinking) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_message()
        self.assertIn("thinking", kinds)
        self.assertEqual((final.content[0].thinking, final.content[1].text), (first.thinking, second.text))
        # The blocks go back as they came.
        history = [*server.QUESTION, {"role": "assistant", "content": final.content}, {"role": "user", "content": "And now?"}]
        again = self.client.messages.create(**{**self.common, "messages": history}, thinking=thinking)
        self.assertEqual([block.type for block in again.content], ["thinking", "text"])

    def test_switched_off(self):
        answer = self.client.messages.create(**self.common, thinking={"type": "disabled"})
        (block,) = answer.content
        server.check_weather(json.loads(block.text))


class Ollama(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = ollama.Client(host=server.thinking(), timeout=120)

    def chat(self, **more):
        options = {"num_predict": MOST, "num_ctx": 1024, "seed": 3}
        return self.client.chat(model="thinking", messages=server.QUESTION, options=options, **more)

    def test_thinking_and_stream(self):
        message = self.chat(think=True).message
        self.assertTrue(message.thinking)
        parts = list(self.chat(think=True, stream=True))
        self.assertEqual("".join(part.message.thinking or "" for part in parts), message.thinking)
        self.assertEqual("".join(part.message.content or "" for part in parts), message.content or "")

    def test_switched_off(self):
        message = self.chat(think=False, format=server.WEATHER).message
        self.assertFalse(message.thinking)
        server.check_weather(json.loads(message.content))

    def test_the_model_says_that_it_thinks(self):
        self.assertIn("thinking", self.client.show("thinking").capabilities)
        self.assertNotIn("thinking", ollama.Client(host=server.small()).show("small").capabilities)


class LiteLlm(unittest.TestCase):
    def test_chat_and_stream(self):
        import litellm

        def call(**more):
            return litellm.completion(
                model="openai/thinking", api_base=server.thinking() + "/v1", api_key="none", num_retries=0, seed=3,
                messages=server.QUESTION, max_tokens=MOST, response_format=SCHEMA,
                extra_body={"reasoning_budget_tokens": BUDGET}, **more,
            )

        message = call().choices[0].message
        self.assertTrue(message.reasoning_content)
        server.check_weather(json.loads(message.content))
        deltas = [chunk.choices[0].delta for chunk in call(stream=True)]
        self.assertEqual("".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas), message.reasoning_content)
        self.assertEqual("".join(delta.content or "" for delta in deltas), message.content)


if __name__ == "__main__":
    unittest.main()
