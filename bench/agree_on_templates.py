#!/usr/bin/env python3
"""Compares chat templates with Python's Jinja, set up as Hugging Face's Transformers do it.

    python bench/agree_on_templates.py [-v] TEMPLATE.jinja...

Renders each template with conversations (tools, reasoning, keyword arguments) and prints where the texts differ. llama.cpp's repository
has published templates in models/templates. Needs: pip install jinja2, and cargo build --profile test -p quadriga-llm --example render.
"""
import datetime
import json
import os
import subprocess
import sys

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RENDER = os.path.join(os.environ.get("CARGO_TARGET_DIR") or os.path.join(ROOT, "target"), "debug", "examples", "render")

TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather of a city. \"Now\", or <later>: ümläut & co.",
        "parameters": {
            "type": "object", "required": ["city"],
            "properties": {
                "city": {"type": "string", "description": "Name of the city"},
                "days": {"type": "integer", "default": 1, "minimum": 0},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "details": {"type": "object", "properties": {"wind": {"type": "boolean"}, "hours": {"type": "array", "items": {"type": "number"}}}},
            },
        },
        "return": {"type": "object"},
    }},
    {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}},
]
DOCUMENTS = [{"title": "Rain", "text": "It rains."}, {"title": "Sun", "text": "It shines.\nA lot."}]


def call(name, arguments, identifier="abcdef123"):
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM, HELLO = {"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi <b>&'\"!\n"}
ARGUMENTS = {"city": "Zürich", "days": 2, "details": {"wind": True, "hours": [1, 2.5]}, "unit": None}
TOOL_USE = [
    HELLO, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "reasoning_content": "I need\nthe tool.", "tool_calls": [call("get_weather", ARGUMENTS)]},
    {"role": "tool", "name": "get_weather", "tool_call_id": "abcdef123", "content": "{\"sky\": \"blue\"}"},
]
CONVERSATIONS = {
    "user": [HELLO],
    "system": [SYSTEM, HELLO],
    "turns": [SYSTEM, HELLO, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Why?"}],
    "reasoning": [HELLO, {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me\n\nthink."}, {"role": "user", "content": "Why?"}],
    "inline reasoning": [HELLO, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}, {"role": "user", "content": "Why?"}],
    "answered": [SYSTEM, HELLO, {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me think."}],
    "tool call": TOOL_USE,
    "tool answer": [SYSTEM] + TOOL_USE + [{"role": "assistant", "content": "Blue."}, {"role": "user", "content": "Thanks"}],
    "two calls": TOOL_USE[:3] + [
        {"role": "assistant", "content": "Both.", "tool_calls": [call("now", {}, "aaaaaaaa1"), call("get_weather", {"city": "Bern"}, "aaaaaaaa2")]},
        {"role": "tool", "name": "now", "tool_call_id": "aaaaaaaa1", "content": "noon"},
        {"role": "tool", "name": "get_weather", "tool_call_id": "aaaaaaaa2", "content": "rain"}],
}
VARIABLES = {
    "": {},
    "tools": {"tools": TOOLS},
    "documents": {"documents": DOCUMENTS},
    "no thinking": {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"},
    "thinking": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high", "tools": TOOLS[:1]},
    "no generation": {"add_generation_prompt": False},
}


class Generation(Extension):
    """The tag {% generation %}, which marks answers for training."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def environment():
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def python(case):
    context = {"tools": None, "documents": None, "add_generation_prompt": True} | case["variables"]
    context |= {key: case[key] for key in ("messages", "bos_token", "eos_token")}
    try:
        return {"text": environment().from_string(case["template"]).render(context)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def cases(paths):
    for path in paths:
        with open(path, encoding="utf-8") as file:
            source = file.read()
        for talk, messages in CONVERSATIONS.items():
            for name, variables in VARIABLES.items():
                yield f"{os.path.basename(path)}, {talk}, {name}", {
                    "template": source, "messages": messages, "variables": variables, "bos_token": "<s>", "eos_token": "</s>"}


def main():
    verbose = "-v" in sys.argv
    named = list(cases([argument for argument in sys.argv[1:] if argument != "-v"]))
    lines = "".join(json.dumps(case) + "\n" for _, case in named)
    run = subprocess.run([RENDER], input=lines, capture_output=True, text=True, check=True)
    agree, refused, different = 0, 0, 0
    for (name, case), line in zip(named, run.stdout.splitlines(), strict=True):
        ours, theirs = json.loads(line), python(case)
        if ours == theirs:
            agree += 1
        elif "error" in theirs:
            refused += 1  # By both, or by Python alone: for it, iterating over none is an error.
        else:
            different += 1
            print(f"{name}:\n   ours   {str(ours)[:300 if not verbose else 10000]}\n   python {str(theirs)[:300 if not verbose else 10000]}")
    print(f"{agree} agree, {refused} are refused by Python, {different} differ")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
