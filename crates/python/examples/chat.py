"""A conversation with tools: `python chat.py [MODEL]`."""

import sys
from typing import Any

import quadriga

model = quadriga.Model(sys.argv[1] if len(sys.argv) > 1 else None, n_ctx=2048)
messages: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helpful assistant who answers briefly."},
    {"role": "user", "content": "What is the capital of France?"},
]
answer = model.chat(messages, max_tokens=40, temperature=0)
print(answer)
assert answer.text

messages += [answer.message(), {"role": "user", "content": "And of Italy?"}]
print(model.chat(messages, max_tokens=40, temperature=0))

# A function that the model must call; its arguments satisfy the schema.
weather = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
        },
    },
}
question = "How is the weather in Lima?"
answer = model.chat(
    question, tools=[weather], tool_choice="required", parallel_tool_calls=False, max_tokens=120, temperature=0
)
for call in answer.tool_calls:
    print(call.name, call.parsed())
assert answer.tool_calls[0].name == "get_weather"
