"""litellm through all interfaces; llm and langchain-openai, through that of OpenAI."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

import server

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


class LiteLlm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        import litellm

        litellm.suppress_debug_info = True

    def call(self, **more):
        import litellm

        common = {"model": "openai/smollm2", "api_base": server.default() + "/v1", "messages": server.QUESTION, "max_tokens": 24}
        return litellm.completion(api_key="none", temperature=0, num_retries=0, **{**common, **more})

    def test_chat_and_stream(self):
        text = self.call().choices[0].message.content
        self.assertIn("Paris", text)
        chunks = self.call(stream=True)
        self.assertEqual("".join(chunk.choices[0].delta.content or "" for chunk in chunks), text)

    def test_tools_and_schema(self):
        answer = self.call(tools=server.TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=100)
        (call,) = answer.choices[0].message.tool_calls
        server.check_weather(json.loads(call.function.arguments))
        schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": server.WEATHER, "strict": True}}
        server.check_weather(json.loads(self.call(response_format=schema, max_tokens=100).choices[0].message.content))

    def test_embeddings(self):
        import litellm

        answer = litellm.embedding(
            model="openai/smollm2", input=server.TEXTS, api_base=server.default() + "/v1", api_key="none", encoding_format="float"
        )
        server.check_embeddings([item["embedding"] for item in answer.data])

    def test_text_completion(self):
        import litellm

        def complete(**more):
            return litellm.text_completion(
                model="text-completion-openai/smollm2", prompt="The capital of France is", api_base=server.default() + "/v1",
                api_key="none", temperature=0, max_tokens=8, num_retries=0, **more,
            )

        text = complete().choices[0].text
        self.assertIn("Paris", text)
        self.assertEqual("".join(chunk.choices[0].text or "" for chunk in complete(stream=True)), text)

    def test_responses(self):
        import litellm

        def respond(**more):
            return litellm.responses(
                model="openai/smollm2", input=server.QUESTION[0]["content"], api_base=server.default() + "/v1", api_key="none",
                temperature=0, max_output_tokens=24, **more,
            )

        answer = respond()
        (item,) = answer.output
        self.assertIn("Paris", item.content[0].text)
        events = list(respond(stream=True))
        self.assertEqual(events[-1].type, "response.completed")
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        self.assertEqual("".join(deltas), item.content[0].text)

    def test_other_interfaces(self):
        """Those of Anthropic and Ollama, which litellm translates to OpenAI's."""
        for name, address in [("anthropic/smollm2", server.default()), ("ollama_chat/smollm2", server.default())]:
            with self.subTest(name):
                answer = self.call(model=name, api_base=address)
                self.assertIn("Paris", answer.choices[0].message.content)
                chunks = self.call(model=name, api_base=address, stream=True)
                streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                self.assertEqual(streamed, answer.choices[0].message.content)
        answer = self.call(model="anthropic/smollm2", api_base=server.default(), tools=server.TOOLS, tool_choice="required", max_tokens=200)
        server.check_weather(json.loads(answer.choices[0].message.tool_calls[0].function.arguments))

    def test_ollama(self):
        import litellm

        common = {"model": "ollama_chat/smollm2", "api_base": server.default()}
        answer = self.call(**common, tools=server.TOOLS, messages=[{"role": "user", "content": server.CALL_PROMPT}], max_tokens=100)
        (call,) = answer.choices[0].message.tool_calls
        self.assertEqual(json.loads(call.function.arguments), {"city": "Bern", "unit": "celsius"})
        schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": server.WEATHER, "strict": True}}
        for name in ["ollama_chat/smollm2", "ollama/smollm2"]:
            with self.subTest(name):
                answer = self.call(**{**common, "model": name}, response_format=schema, max_tokens=100)
                server.check_weather(json.loads(answer.choices[0].message.content))
        answer = litellm.embedding(model="ollama/smollm2", input=server.TEXTS, api_base=server.default())
        server.check_embeddings([item["embedding"] for item in answer.data])

    def test_anthropic_messages(self):
        import asyncio

        import litellm

        async def ask():
            return await litellm.anthropic.messages.acreate(
                model="anthropic/smollm2", messages=server.QUESTION, max_tokens=24, temperature=0, api_base=server.default(), api_key="none"
            )

        answer = asyncio.run(ask())
        self.assertIn("Paris", answer["content"][0]["text"])
        self.assertIn(answer["stop_reason"], ("end_turn", "max_tokens"))


class LangChain(unittest.TestCase):
    def setUp(self):
        from langchain_openai import ChatOpenAI

        self.model = ChatOpenAI(
            model="smollm2", base_url=server.default() + "/v1", api_key="none", temperature=0, max_tokens=100, max_retries=0
        )

    def test_chat_and_stream(self):
        self.assertIn("Paris", self.model.invoke(server.QUESTION).content)
        self.assertIn("Paris", "".join(chunk.content for chunk in self.model.stream(server.QUESTION)))

    def test_tools_and_schema(self):
        bound = self.model.bind_tools(server.TOOLS, tool_choice="required", parallel_tool_calls=False)
        (call,) = bound.invoke("How is the weather in Bern?").tool_calls
        server.check_weather(call["args"])
        schema = {"title": "weather", "description": "Weather.", **server.WEATHER}
        server.check_weather(self.model.with_structured_output(schema, method="json_schema").invoke("Weather in Bern?"))

    def test_embeddings(self):
        from langchain_openai import OpenAIEmbeddings

        # To count tokens it would need OpenAI's vocabulary, which it downloads.
        embeddings = OpenAIEmbeddings(
            model="smollm2", base_url=server.default() + "/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
        )
        vectors = embeddings.embed_documents(server.TEXTS)
        server.check_embeddings(vectors)
        server.check_same([vectors[1]], [embeddings.embed_query(server.TEXTS[1])])


WEATHER_FUNCTION = '''
def weather(city: str, unit: str) -> str:
    "The weather in a city."
    return f"12 degrees {unit} in {city}"
'''


class Llm(unittest.TestCase):
    def test_prompt_stream_schema_and_tools(self):
        with tempfile.TemporaryDirectory() as home:
            entry = f"- model_id: local\n  model_name: smollm2\n  api_base: {server.default()}/v1\n  supports_schema: true\n  supports_tools: true\n"
            with open(os.path.join(home, "extra-openai-models.yaml"), "w") as file:
                file.write(entry)
            environment = {**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "none"}

            def llm(*arguments, may_fail=False):
                command = [sys.executable, "-m", "llm", "prompt", "-m", "local", "-o", "temperature", "0", *arguments]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
                self.assertTrue(done.returncode == 0 or may_fail, done.stderr)
                self.log = done.stderr
                return done.stdout

            question = server.QUESTION[0]["content"]
            self.assertIn("Paris", llm(question))
            self.assertIn("Paris", llm("--no-stream", question))
            server.check_weather(json.loads(llm("--schema", json.dumps(server.WEATHER), "Weather in Bern?")))
            # It runs the function, and sends the result back. The model may call it again, as it was told to, which llm ends with an error.
            tools = ["--functions", WEATHER_FUNCTION, "--tools-debug", "--chain-limit", "2"]
            for stream in [[], ["--no-stream"]]:
                llm(*stream, *tools, server.CALL_PROMPT, may_fail=True)
                self.assertIn("weather({'city': 'Bern', 'unit': 'celsius'})", self.log)
                self.assertIn("12 degrees celsius in Bern", self.log)

    def test_endpoint(self):
        """An address alone, without a configured model."""
        address = server.default() + "/v1"

        def llm(*arguments):
            with tempfile.TemporaryDirectory() as home:
                environment = {**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "none"}
                command = [sys.executable, "-m", "llm", "openai", "endpoint", address, *arguments]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout

        self.assertEqual(llm("--models").split(), ["smollm2"])
        for more in [[], ["--responses"], ["--no-stream"]]:
            self.assertIn("Paris", llm("-m", "smollm2", "-o", "temperature", "0", *more, server.QUESTION[0]["content"]))


if __name__ == "__main__":
    unittest.main()
