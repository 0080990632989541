"""ollama-python: chat, generate, streams, tools, schemas, embeddings and the list of models."""
import json
import unittest

import ollama

import server


class Ollama(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = ollama.Client(host=server.default(), timeout=120)
        cls.options = {"temperature": 0, "num_predict": 100, "num_ctx": 1024}

    def chat(self, **more):
        return self.client.chat(model="smollm2", options=self.options, **{"messages": server.QUESTION, **more})

    def test_chat_and_stream(self):
        text = self.chat().message.content
        self.assertIn("Paris", text)
        chunks = list(self.chat(stream=True))
        self.assertEqual("".join(chunk.message.content or "" for chunk in chunks), text)
        self.assertTrue(chunks[-1].done)
        self.assertGreater(chunks[-1].eval_count, 0)

    def test_generate(self):
        answer = self.client.generate(model="smollm2", prompt=server.QUESTION[0]["content"], options=self.options)
        self.assertIn("Paris", answer.response)

    def test_schema_and_tools(self):
        server.check_weather(json.loads(self.chat(format=server.WEATHER).message.content))
        # Ollama has no way to require a call: the model has to want it.
        prompt = [{"role": "user", "content": server.CALL_PROMPT}]
        for answers in [[self.chat(messages=prompt, tools=server.TOOLS)], self.chat(messages=prompt, tools=server.TOOLS, stream=True)]:
            calls = [call for answer in answers for call in answer.message.tool_calls or []]
            self.assertEqual(len(calls), 1)
            self.assertEqual(calls[0].function.name, "weather")
            server.check_weather(calls[0].function.arguments)
        # The conversation with one goes on.
        call = {"function": {"name": "weather", "arguments": {"city": "Bern", "unit": "celsius"}}}
        messages = [
            {"role": "user", "content": "How is the weather in Bern?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "weather", "content": "12 degrees"},
        ]
        answer = self.chat(messages=messages, tools=server.TOOLS)
        self.assertTrue(answer.message.content or answer.message.tool_calls)

    def test_embeddings(self):
        answer = self.client.embed(model="smollm2", input=server.TEXTS)
        server.check_embeddings(answer.embeddings)
        one = self.client.embeddings(model="smollm2", prompt=server.TEXTS[0])
        server.check_same([answer.embeddings[0]], [one.embedding])

    def test_models(self):
        self.assertEqual([model.model for model in self.client.list().models][:1], ["smollm2"])
        self.assertIn("completion", self.client.show("smollm2").capabilities)
        # A server with one model answers to every name; wrong options are errors.
        with self.assertRaises(ollama.ResponseError) as caught:
            self.client.chat(model="nobody", messages=server.QUESTION, options={"temperature": -1})
        self.assertEqual(caught.exception.status_code, 400)


if __name__ == "__main__":
    unittest.main()
