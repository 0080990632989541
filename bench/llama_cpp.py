#!/usr/bin/env python3
"""One measurement of llama.cpp's prebuilt CPU libraries.

usage: llama_cpp.py MODEL --threads T --prompt P --depth D --generate G

Prints one JSON object: `pp`, tokens per second of a prompt of P tokens; `tg`, tokens per second of G tokens decoded one by one
after P + D tokens; `first`, the seconds from loading the model to the end of the prompt.
"""
import argparse
import json
import time

import llama_peer


def tokens(count, step, start):
    return [(start + i * step) % 40000 for i in range(count)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name, default in (("threads", 2), ("prompt", 512), ("depth", 0), ("generate", 64)):
        parser.add_argument("--" + name, type=int, default=default)
    a = parser.parse_args()
    library = llama_peer.Library()
    begin = time.perf_counter()
    model = library.open(a.model, a.prompt + a.depth + a.generate + 64, max(a.prompt, 512), a.threads)
    model.decode(tokens(a.prompt, 37, 11))
    first = time.perf_counter() - begin
    model.clear()
    begin = time.perf_counter()
    model.decode(tokens(a.prompt, 37, 11))
    prompt = time.perf_counter() - begin
    for start in range(0, a.depth, 512):
        model.decode(tokens(min(512, a.depth - start), 7, start + 3))
    begin = time.perf_counter()
    for token in tokens(a.generate, 31, 5):
        model.decode([token])
    generation = time.perf_counter() - begin
    print(json.dumps({"pp": a.prompt / prompt, "tg": a.generate / generation if a.generate else 0, "first": first}))


main()
