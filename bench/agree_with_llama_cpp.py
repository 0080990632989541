#!/usr/bin/env python3
"""Compares the logits of random small models with llama.cpp's.

usage: $(scripts/python-env) bench/agree_with_llama_cpp.py [--logits PROGRAM] [--only TEXT] [--keep FOLDER]

Writes models of each architecture and weight type with the PyPI package `gguf`, has llama.cpp (the prebuilt CPU
libraries of the npm package @node-llama-cpp/linux-x64) and `crates/llm/examples/logits.rs` compute the same tokens, and
prints the root mean square difference in standard deviations of the logits. Exits with 1 if a difference is past its
limit: llama.cpp quantizes activations to 8 bits for quantized weights, and its KV cache is f16 where the example's is
f32.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import gguf
import numpy as np

import llama_peer

TOKENS = [(k * 37 + 11) % 128 for k in range(24)]
FIRST = 16


def peer_logits(library, path):
    """llama.cpp's rows after the first tokens and after each of the others, or None if it does not load the model."""
    model = library.open(path, 256, 512, 1)
    if model is None:
        return None
    rows = []
    for tokens in [TOKENS[:FIRST]] + [[token] for token in TOKENS[FIRST:]]:
        model.decode(tokens)
        rows.append(np.ctypeslib.as_array(model.logits(), (model.vocabulary,)).copy())
    model.close()
    return np.array(rows, dtype=np.float64)


def write(path, arch, dtype, seed, tied=False, biases=False, output_bias=False, key_length=64, kv_heads=2,
          scaling=None, factors=False, layers=2, rope_dims=None):
    """A random model as the package gguf writes it."""
    random = np.random.default_rng(seed)
    width, heads, feed_forward, vocabulary = 256, 4, 512, 128
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(key_length)
    writer.add_value_length(key_length)
    writer.add_rope_dimension_count(rope_dims or key_length)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("no_vocab")
    if scaling:
        kind, factor = scaling
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(factor)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(512)

    def matrix(name, rows, cols, size=1.0):
        values = (random.standard_normal((rows, cols)) * size / np.sqrt(cols)).astype(np.float32)
        kind = gguf.GGMLQuantizationType[dtype]
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, blocks(values, kind, random), raw_dtype=kind)

    def vector(name, length, middle, spread):
        writer.add_tensor(name, random.uniform(middle - spread, middle + spread, length).astype(np.float32))

    matrix("token_embd.weight", vocabulary, width)
    vector("output_norm.weight", width, 1.0, 0.5)
    if not tied:
        matrix("output.weight", vocabulary, width)
    if factors:
        vector("rope_freqs.weight", (rope_dims or key_length) // 2, 4.0, 3.0)
    for layer in range(layers):
        name = f"blk.{layer}."
        for part, rows, cols, size, bias in (
                ("attn_q", heads * key_length, width, 2.0, biases), ("attn_k", kv_heads * key_length, width, 2.0, biases),
                ("attn_v", kv_heads * key_length, width, 1.0, biases),
                ("attn_output", width, heads * key_length, 1.0, output_bias), ("ffn_gate", feed_forward, width, 1.0, False),
                ("ffn_up", feed_forward, width, 1.0, False), ("ffn_down", width, feed_forward, 1.0, False)):
            matrix(f"{name}{part}.weight", rows, cols, size)
            if bias:
                vector(f"{name}{part}.bias", rows, 0.0, 0.5)
        vector(name + "attn_norm.weight", width, 1.0, 0.5)
        vector(name + "ffn_norm.weight", width, 1.0, 0.5)
        if arch == "qwen3":
            vector(name + "attn_q_norm.weight", key_length, 1.5, 0.5)
            vector(name + "attn_k_norm.weight", key_length, 1.5, 0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Byte offsets of the f16 scales in a block, and the ratio between them that centres values at zero, for the types that
# the package `gguf` cannot quantize to.
SCALES = {"Q2_K": [(80, 1.0), (82, 1.5)], "Q3_K": [(108, 1.0)], "Q4_K": [(0, 1.0), (2, 7.5)],
          "Q5_K": [(0, 1.0), (2, 15.5)], "Q6_K": [(208, 1.0)], "IQ4_NL": [(0, 1.0)], "IQ4_XS": [(0, 1.0)]}


def blocks(values, kind, random):
    """The quantized values, or random blocks of the same standard deviation where the package cannot quantize."""
    if kind.name not in SCALES and kind.name != "MXFP4":
        return gguf.quants.quantize(values, kind)
    size, bytes_ = gguf.GGML_QUANT_SIZES[kind]
    rows, cols = values.shape
    data = random.integers(0, 256, (rows * cols // size, bytes_), dtype=np.uint8)

    def scale(unit):
        if kind.name == "MXFP4":
            data[:, 0] = round(127 + np.log2(unit))
        for at, ratio in SCALES.get(kind.name, ()):
            data[:, at:at + 2] = np.frombuffer(np.float16(unit * ratio).tobytes(), dtype=np.uint8)

    scale(1.0)
    scale(values.std() / gguf.quants.dequantize(data, kind).std())
    return data.reshape(rows, -1)


def cases():
    for arch in ("llama", "qwen2", "qwen3"):
        for dtype in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
                      "IQ4_NL", "IQ4_XS", "MXFP4"):
            yield arch, dtype, dict(biases=arch == "qwen2", tied=dtype.endswith("_K"))
    yield "llama", "F32", dict(biases=True, output_bias=True)
    yield "llama", "F32", dict(scaling=("linear", 4.0))
    yield "qwen2", "F32", dict(scaling=("yarn", 4.0), biases=True)
    yield "llama", "F32", dict(scaling=("yarn", 8.0))
    yield "llama", "F32", dict(factors=True)
    yield "qwen3", "F32", dict(key_length=128, kv_heads=1)
    yield "llama", "F32", dict(rope_dims=32)
    yield "llama", "F32", dict(kv_heads=4, layers=3)


def limit(dtype):
    return {"F32": 5e-3, "F16": 0.06, "BF16": 0.06}.get(dtype, 0.15)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--logits", default="target/release/examples/logits", help="the built example `logits`")
    parser.add_argument("--only", default="", help="only cases whose description contains this")
    parser.add_argument("--keep", help="keep the models in this folder")
    arguments = parser.parse_args()
    library, bad, compared = llama_peer.Library(), 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or temporary
        os.makedirs(folder, exist_ok=True)
        for seed, (arch, dtype, options) in enumerate(cases()):
            name = f"{arch} {dtype} " + " ".join(f"{key}={value}" for key, value in options.items() if value)
            if arguments.only not in name:
                continue
            path = os.path.join(folder, f"{seed}.gguf")
            write(path, arch, dtype, seed, **options)
            theirs = peer_logits(library, path)
            if theirs is None:
                print(f"{name}: llama.cpp does not load it: {''.join(library.messages).strip().splitlines()[:1]}")
                continue
            command = [arguments.logits, path, str(FIRST)] + [str(token) for token in TOKENS]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                bad += 1
                print(f"{name}: {done.stderr.strip()}")
                continue
            ours = np.array([[float(v) for v in row.split()] for row in done.stdout.splitlines()])
            difference = np.sqrt(np.mean((ours - theirs) ** 2)) / theirs.std()
            best = np.mean(ours.argmax(axis=1) == theirs.argmax(axis=1))
            verdict = "" if difference <= limit(dtype) else "  PAST THE LIMIT"
            bad += bool(verdict)
            compared += 1
            print(f"{name}: {difference:.2e} (same best token in {best:.0%} of rows){verdict}", flush=True)
    print(f"{compared} models compared, {bad} past their limit")
    sys.exit(1 if bad else 0)


main()
