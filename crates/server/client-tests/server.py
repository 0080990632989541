"""Servers for the tests: `quadriga serve` with the default model, and with a small model of random weights that reasons or does not."""
import atexit
import os
import re
import subprocess
import tempfile
import threading

BINARY = os.environ["QUADRIGA_BINARY"]
FOLDER = tempfile.TemporaryDirectory()
RUNNING = []

# A compact template with tools, in the format that many models share.
TEMPLATE = r"""
{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# Behind that one: reasoning, which can be switched off.
THINKING = r"""
{%- if add_generation_prompt %}
{{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '<think>\n' }}
{%- endif %}
"""


def start(*options):
    """Starts a server and returns its address."""
    process = subprocess.Popen(
        [BINARY, "serve", "--port", "0", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    RUNNING.append(process)
    output = ""
    for line in process.stdout:
        output += line
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        if found:
            # Nothing may wait for somebody who reads the log.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return found.group()
    raise RuntimeError(f"quadriga serve ended with {process.wait()}: {output}")


@atexit.register
def stop():
    for process in RUNNING:
        process.terminate()
    for process in RUNNING:
        process.wait()
    FOLDER.cleanup()


_addresses = {}


def default():
    """The default model, whose answers mean something."""
    if "default" not in _addresses:
        _addresses["default"] = start("--alias", "smollm2")
    return _addresses["default"]


def noise(name, template):
    """A small model of random weights with a template, whose answers are noise."""
    if name not in _addresses:
        model = os.path.join(FOLDER.name, "small.gguf")
        if not os.path.exists(model):
            subprocess.run([BINARY, "synth", "-o", model, "--context", "8192"], check=True, capture_output=True)
        path = os.path.join(FOLDER.name, f"{name}.jinja")
        with open(path, "w") as file:
            file.write(template)
        _addresses[name] = start("-m", model, "--chat-template-file", path, "--alias", name, "-t", "1")
    return _addresses[name]


def small():
    """A model without reasoning."""
    return noise("small", TEMPLATE)


def thinking():
    """A model that reasons before each answer: its template opens the reasoning, unless that is switched off."""
    return noise("thinking", TEMPLATE + THINKING)


QUESTION = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather in a city.", "parameters": WEATHER},
    }
]


def check_weather(arguments):
    """Asserts that arguments are of the schema."""
    assert set(arguments) == {"city", "unit"}, arguments
    assert isinstance(arguments["city"], str) and arguments["unit"] in ("celsius", "fahrenheit"), arguments


# The first two mean almost the same.
TEXTS = [
    "A cat is sleeping on the sofa in the living room.",
    "A cat sleeps on the couch in the living room.",
    "The central bank raised its interest rates again on Thursday.",
]


def similarity(a, b):
    """The cosine of the angle between two vectors."""
    length = sum(x * x for x in a) ** 0.5 * sum(x * x for x in b) ** 0.5
    return sum(x * y for x, y in zip(a, b)) / length


def check_embeddings(vectors):
    """Asserts that vectors are those of TEXTS: of length 1, and closer the more the texts have in common."""
    assert len(vectors) == len(TEXTS) and len({len(vector) for vector in vectors}) == 1, [len(v) for v in vectors]
    for vector in vectors:
        assert abs(sum(x * x for x in vector) - 1) < 1e-3, sum(x * x for x in vector)
    near, far = similarity(vectors[0], vectors[1]), similarity(vectors[0], vectors[2])
    assert near > far, (near, far)


def check_same(vectors, others):
    """Asserts that two lists of vectors are the same but for rounding."""
    assert len(vectors) == len(others)
    for vector, other in zip(vectors, others):
        assert similarity(vector, other) > 0.9999, similarity(vector, other)


# A small model calls a tool if it is told how, word for word.
CALL_PROMPT = (
    "Repeat the following lines exactly, and write nothing else:\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "unit": "celsius"}}\n</tool_call>'
)
