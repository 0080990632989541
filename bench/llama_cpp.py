#!/usr/bin/env python3
"""One measurement of llama.cpp: its prebuilt CPU libraries, called through their C interface.

usage: llama_cpp.py MODEL --threads T --prompt P --depth D --generate G

Prints one JSON object: tokens a second of a prompt of P tokens, tokens a second of G tokens generated one by one after
P + D tokens, and the seconds from the loading of the model to the end of the prompt. The libraries come from the npm
package @node-llama-cpp/linux-x64, installed on first use into the folder $QUADRIGA_PEER (target/peer by default).
"""
import argparse
import ctypes
import glob
import json
import os
import subprocess
import sys
import time

PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Opaque(ctypes.Structure):
    """Parameters by value: more room than any of the library's structs has, so that it can fill in its own."""

    _fields_ = [("words", ctypes.c_uint32 * 256)]


class Batch(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    ]


def folder():
    home = os.environ.get("QUADRIGA_PEER") or os.path.join(ROOT, "target", "peer")
    pattern = os.path.join(home, "node_modules", "@node-llama-cpp", "linux-x64", "bins", "linux-x64")
    if not os.path.isdir(pattern):
        os.makedirs(home, exist_ok=True)
        command = ["npm", "install", "--silent", "--prefix", home, "--ignore-scripts", PACKAGE]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return pattern


class Llama:
    def __init__(self):
        where = folder()
        names = ["libggml-base.so", "libggml.so", "libllama.so"]
        found = []
        for name in names:
            stem = name[: -len(".so")]
            candidates = sorted(glob.glob(os.path.join(where, stem + ".so*")) + glob.glob(os.path.join(where, stem + ".*so")))
            found.append(ctypes.CDLL(candidates[0], mode=ctypes.RTLD_GLOBAL))
        _, ggml, self.lib = found
        ggml.ggml_backend_load_all_from_path(ctypes.c_char_p(where.encode()))
        pointer, number = ctypes.c_void_p, ctypes.c_int32
        signatures = {
            "llama_model_default_params": (Opaque, []),
            "llama_context_default_params": (Opaque, []),
            "llama_model_load_from_file": (pointer, [ctypes.c_char_p, Opaque]),
            "llama_init_from_model": (pointer, [pointer, Opaque]),
            "llama_set_n_threads": (None, [pointer, number, number]),
            "llama_batch_get_one": (Batch, [pointer, number]),
            "llama_decode": (number, [pointer, Batch]),
            "llama_synchronize": (None, [pointer]),
            "llama_get_memory": (pointer, [pointer]),
            "llama_memory_clear": (None, [pointer, ctypes.c_bool]),
            "llama_log_set": (None, [pointer, pointer]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self.lib, name)
            function.restype, function.argtypes = result, arguments
        self.quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)(lambda *_: None)
        self.lib.llama_log_set(ctypes.cast(self.quiet, pointer), None)

    def open(self, path, context, batch, threads):
        model = self.lib.llama_model_load_from_file(path.encode(), self.lib.llama_model_default_params())
        parameters = self.lib.llama_context_default_params()
        parameters.words[0], parameters.words[1] = context, batch
        self.context = self.lib.llama_init_from_model(model, parameters)
        self.lib.llama_set_n_threads(self.context, threads, threads)

    def decode(self, tokens):
        values = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = self.lib.llama_batch_get_one(ctypes.cast(values, ctypes.c_void_p), len(tokens))
        if self.lib.llama_decode(self.context, batch) != 0:
            sys.exit("llama_decode failed")
        self.lib.llama_synchronize(self.context)

    def clear(self):
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)


def tokens(count, step, start):
    return [(start + i * step) % 40000 for i in range(count)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name, default in (("threads", 2), ("prompt", 512), ("depth", 0), ("generate", 64)):
        parser.add_argument("--" + name, type=int, default=default)
    a = parser.parse_args()
    llama = Llama()
    begin = time.perf_counter()
    llama.open(a.model, a.prompt + a.depth + a.generate + 64, max(a.prompt, 512), a.threads)
    llama.decode(tokens(a.prompt, 37, 11))
    first = time.perf_counter() - begin
    llama.clear()
    begin = time.perf_counter()
    llama.decode(tokens(a.prompt, 37, 11))
    prompt = time.perf_counter() - begin
    for start in range(0, a.depth, 512):
        llama.decode(tokens(min(512, a.depth - start), 7, start + 3))
    begin = time.perf_counter()
    for token in tokens(a.generate, 31, 5):
        llama.decode([token])
    generation = time.perf_counter() - begin
    print(json.dumps({"pp": a.prompt / prompt, "tg": a.generate / generation if a.generate else 0, "first": first}))


main()
