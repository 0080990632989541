#!/usr/bin/env python3
"""One measurement of llama.cpp's prebuilt CPU libraries with several sequences that are computed together.

usage: llama_cpp_streams.py MODEL --threads T --streams S --prompt P --generate G

After a prompt of P tokens each, G steps compute one token of every sequence, with logits for each. Prints one JSON object: `tg`,
tokens per second of these steps, all sequences together.
"""
import argparse
import json
import time

import llama_peer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name, default in (("threads", 2), ("streams", 8), ("prompt", 64), ("generate", 32)):
        parser.add_argument("--" + name, type=int, default=default)
    a = parser.parse_args()
    # Each sequence has an equal part of the context, a multiple of 256.
    context = a.streams * -(-(a.prompt + a.generate) // 256) * 256
    model = llama_peer.Library().open(a.model, context, 2048, a.threads, a.streams)
    speeds = []
    # The first round warms up.
    for _ in range(2):
        model.clear()
        for stream in range(a.streams):
            model.decode_many([((k * 37 + 11 + stream) % 40000, k, stream, k + 1 == a.prompt) for k in range(a.prompt)])
        begin = time.perf_counter()
        for k in range(a.generate):
            model.decode_many([((k * 31 + 5 + stream) % 40000, a.prompt + k, stream, True) for stream in range(a.streams)])
        speeds.append(a.streams * a.generate / (time.perf_counter() - begin))
    print(json.dumps({"streams": a.streams, "tg": speeds[-1]}))


main()
