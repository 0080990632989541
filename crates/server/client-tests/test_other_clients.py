"""litellm, llm and langchain-openai, through the interface of OpenAI."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

import server

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


class LiteLlm(unittest.TestCase):
    def call(self, **more):
        import litellm

        return litellm.completion(
            model="openai/smollm2", api_base=server.default() + "/v1", api_key="none", temperature=0, num_retries=0,
            **{"messages": server.QUESTION, "max_tokens": 24, **more},
        )

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


class Llm(unittest.TestCase):
    def test_prompt_stream_and_schema(self):
        with tempfile.TemporaryDirectory() as home:
            entry = f"- model_id: local\n  model_name: smollm2\n  api_base: {server.default()}/v1\n  supports_schema: true\n"
            with open(os.path.join(home, "extra-openai-models.yaml"), "w") as file:
                file.write(entry)
            environment = {**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "none"}

            def llm(*arguments):
                command = [sys.executable, "-m", "llm", "prompt", "-m", "local", "-o", "temperature", "0", *arguments]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
                self.assertEqual(done.returncode, 0, done.stderr)
                return done.stdout

            question = server.QUESTION[0]["content"]
            self.assertIn("Paris", llm(question))
            self.assertIn("Paris", llm("--no-stream", question))
            server.check_weather(json.loads(llm("--schema", json.dumps(server.WEATHER), "Weather in Bern?")))


if __name__ == "__main__":
    unittest.main()
