#!/usr/bin/env python3
"""Compares a model with a random LoRA adapter between Quadriga and llama.cpp.

usage: agree_on_lora.py MODEL.gguf --quadriga PROGRAM [--scale S] [--rank R]

Writes an adapter of random matrices for all projections of a model of architecture llama, and compares the log-probabilities of
Quadriga's five most probable tokens after a text with llama.cpp's: without the adapter, with it, and with the file that
`quadriga lora` merges it into. Exits with 1 if the adapter adds to the difference more than its limit.
"""
import argparse
import ctypes
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile

import llama_peer

TEXT = "The history of bridges is a history of materials. Stone carries weight well when it is"
PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
# The KV cache of llama.cpp is f16, and its activations have 8 bits for some types.
LIMIT = 0.05


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def write_adapter(path, shapes, rank):
    """A GGUF adapter: for each matrix `lora_a` [rank, inputs] and `lora_b` [outputs, rank], in GGUF's order of dimensions."""
    generator = random.Random(5)
    keys = [("general.architecture", "llama"), ("general.type", "adapter"), ("adapter.type", "lora")]
    head = b"".join(text(key) + struct.pack("<I", 8) + text(value) for key, value in keys)
    head += text("adapter.lora.alpha") + struct.pack("<If", 6, float(rank))
    infos, data = b"", b""
    for name, (outputs, inputs) in shapes.items():
        for end, dims in (("a", (inputs, rank)), ("b", (rank, outputs))):
            size = 1 / math.sqrt(inputs) if end == "a" else 0.3 / math.sqrt(rank)
            infos += text(f"{name}.lora_{end}") + struct.pack("<IQQIQ", 2, *dims, 0, len(data))
            values = [generator.gauss(0, size) for _ in range(dims[0] * dims[1])]
            data += struct.pack(f"<{len(values)}f", *values)
            data += bytes(-len(data) % 32)
    start = struct.pack("<4sIQQ", b"GGUF", 3, 2 * len(shapes), len(keys) + 1) + head + infos
    with open(path, "wb") as out:
        out.write(start + bytes(-len(start) % 32) + data)


def run(program, *arguments, **options):
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True, **options).stdout


def ours(program, *arguments):
    case = json.dumps({"name": "a", "kind": "next", "text": TEXT})
    return json.loads(run(program, "eval", "-q", *arguments, "-", input=case))["top5"]


def difference(library, model, top, adapter=None, scale=1.0):
    """The largest difference of the log-probabilities of some tokens from llama.cpp's."""
    opened = library.open(model, 512, 512, os.cpu_count())
    if adapter:
        lib = library.lib
        lib.llama_adapter_lora_init.restype = ctypes.c_void_p
        lib.llama_adapter_lora_init.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        loaded = ctypes.c_void_p(lib.llama_adapter_lora_init(opened.model, adapter.encode()))
        if not loaded.value:
            sys.exit("llama.cpp does not load the adapter: " + "".join(library.messages))
        set_adapters = lib.llama_set_adapters_lora
        set_adapters.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        adapters, scales = (ctypes.c_void_p * 1)(loaded), (ctypes.c_float * 1)(scale)
        if set_adapters(opened.context, ctypes.cast(adapters, ctypes.c_void_p), 1, ctypes.cast(scales, ctypes.c_void_p)) != 0:
            sys.exit("llama_set_adapters_lora failed")
    opened.decode(opened.tokenize(TEXT, False))
    logits = opened.logits()[: opened.vocabulary]
    most = max(logits)
    total = most + math.log(sum(math.exp(logit - most) for logit in logits))
    found = max(abs(logits[token] - total - value) for token, value in top)
    opened.close()
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--quadriga", required=True)
    parser.add_argument("--scale", type=float, default=0.8)
    parser.add_argument("--rank", type=int, default=8)
    a = parser.parse_args()
    tensors = json.loads(run(a.quadriga, "inspect", a.model, "--json"))["tensors"]
    shapes = {t["name"]: t["shape"] for t in tensors if t["name"].split(".")[-2] in PARTS}
    library = llama_peer.Library()
    with tempfile.TemporaryDirectory() as folder:
        adapter, merged = os.path.join(folder, "adapter.gguf"), os.path.join(folder, "merged.gguf")
        write_adapter(adapter, shapes, a.rank)
        argument = f"{adapter}={a.scale}"
        plain, adapted = ours(a.quadriga, "-m", a.model), ours(a.quadriga, "-m", a.model, "--lora", argument)
        run(a.quadriga, "lora", "-q", "-m", a.model, "--lora", argument, "-o", merged)
        base = difference(library, a.model, plain)
        with_adapter = difference(library, a.model, adapted, adapter, a.scale)
        ignored = difference(library, a.model, adapted)
        of_merged = difference(library, merged, ours(a.quadriga, "-m", merged))
    print(f"largest difference of log-probabilities: model {base:.5f}, with adapter {with_adapter:.5f}, merged {of_merged:.5f}; "
          f"the adapter itself changes them by {ignored:.3f}")
    # With activations of 8 bits, the model itself is not the same to the last digit either.
    sys.exit(0 if max(with_adapter, of_merged) <= 2 * base + LIMIT and ignored > 10 * LIMIT else 1)


main()
