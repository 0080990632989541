#!/usr/bin/env python3
"""Compares the logits of random small models with the same models written out in float64.

usage: $(scripts/python-env) bench/exact_models.py [--logits PROGRAM] [--only TEXT]

For what bench/agree_with_llama_cpp.py cannot compare, as llama.cpp has constants in place of keys: chunks of Llama 4 and windows of
SmallThinker that are shorter than a prompt, and queries of Llama 4 that grow after few positions. Prints the root mean square
difference in standard deviations of the logits, and exits with 1 if one is past its limit. The example's KV cache is f32; of models
with experts the median row is judged, since rounding may choose the other one of two experts that are nearly tied.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import gguf
import numpy as np

import moe_models
import other_models

TOKENS = [(k * 37 + 11 + k // 128) % 128 for k in range(90)]
FIRST = 50
# After all tokens the sequence is truncated to this length and continued with others.
KEPT, OTHERS = 61, [5, 77, 100, 3]
LIMITS = {"F32": 1e-4, "Q8_0": 0.03}


class Model:
    """The keys and the weights of a file, the latter in float64."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.arch = reader.fields["general.architecture"].contents()
        self.keys = {name: field.contents() for name, field in reader.fields.items() if name.startswith(self.arch)}
        self.weights = {}
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            self.weights[tensor.name] = values.reshape([int(size) for size in reversed(tensor.shape)])

    def key(self, name, default=None):
        return self.keys.get(f"{self.arch}.{name}", default)

    def norm(self, x, name=None):
        scaled = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.key("attention.layer_norm_rms_epsilon"))
        return scaled * self.weights[name + ".weight"] if name else scaled

    def frequencies(self, length):
        frequencies = self.key("rope.freq_base") ** (-2 * np.arange(length // 2) / length)
        return frequencies / self.weights.get("rope_freqs.weight", 1.0)

    def rotate(self, heads, adjacent):
        """Rotary embedding of heads `[tokens, heads, length]`, of neighbours or of halves."""
        tokens, _, length = heads.shape
        angles = np.arange(tokens)[:, None, None] * self.frequencies(length)
        pairs = (slice(0, None, 2), slice(1, None, 2)) if adjacent else (slice(0, length // 2), slice(length // 2, None))
        first, second = (heads[..., pair] for pair in pairs)
        rotated = np.empty_like(heads)
        rotated[..., pairs[0]] = first * np.cos(angles) - second * np.sin(angles)
        rotated[..., pairs[1]] = first * np.sin(angles) + second * np.cos(angles)
        return rotated

    def attention(self, name, x, prepare, visible):
        """Attention to what is visible, with queries and keys that `prepare` changes."""
        tokens, heads = len(x), self.key("attention.head_count")

        def split(part):
            rows = x @ self.weights[f"{name}{part}.weight"].T
            return rows.reshape(tokens, -1, self.key("attention.key_length"))

        query, key = prepare(split("attn_q"), split("attn_k"))
        value = split("attn_v")
        key, value = (np.repeat(rows, heads // rows.shape[1], axis=1) for rows in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(query.shape[2])
        scores = np.where(visible, scores, -np.inf)
        parts = np.exp(scores - scores.max(axis=-1, keepdims=True))
        parts /= parts.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", parts, value).reshape(tokens, -1)
        return mixed @ self.weights[name + "attn_output.weight"].T

    def gated(self, name, end, x, activation, expert=None):
        """A gated feed-forward network, or one of the experts."""
        gate, up, down = (self.weights[f"{name}ffn_{part}{end}.weight"] for part in ("gate", "up", "down"))
        if expert is not None:
            gate, up, down = gate[expert], up[expert], down[expert]
        return (activation(x @ gate.T) * (x @ up.T)) @ down.T

    def selected(self, logits):
        """The experts of a token: those with the largest logits, the first of equal ones first."""
        return np.argsort(-logits, kind="stable")[: self.key("expert_used_count")]

    def logits(self, tokens):
        x = self.weights["token_embd.weight"][tokens]
        for layer in range(self.key("block_count")):
            x = LAYERS[self.arch](self, layer, f"blk.{layer}.", x)
        output = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return self.norm(x, "output_norm") @ output.T


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def positions(count):
    """The positions of queries and of keys."""
    return np.arange(count)[:, None], np.arange(count)[None]


def llama4_layer(model, layer, name, x):
    query_at, key_at = positions(len(x))
    visible = key_at <= query_at
    if layer % 4 == 3:
        # Attention to everything, without rotary embedding, by queries that grow.
        times = np.floor((np.arange(len(x)) + 1) / model.key("attention.temperature_length", 8192))
        growth = 1 + model.key("attention.temperature_scale", 0.1) * np.log(times + 1)

        def prepare(query, key):
            return query * growth[:, None, None], key
    else:
        chunk = model.key("attention.sliding_window", 8192)
        visible &= key_at >= query_at // chunk * chunk

        def prepare(query, key):
            query, key = model.rotate(query, True), model.rotate(key, True)
            # The larger model, of 128 experts, has no norms.
            return (query, key) if model.key("expert_count") == 128 else (model.norm(query), model.norm(key))

    x = x + model.attention(name, model.norm(x, name + "attn_norm"), prepare, visible)
    normed = model.norm(x, name + "ffn_norm")
    if (layer + 1) % model.key("interleave_moe_layer_step"):
        return x + model.gated(name, "", normed, silu)
    router = normed @ model.weights[name + "ffn_gate_inp.weight"].T
    mixed = model.gated(name, "_shexp", normed, silu)
    for token, row in enumerate(normed):
        for expert in model.selected(router[token]):
            # The weight multiplies what the expert reads.
            mixed[token] += model.gated(name, "_exps", row * sigmoid(router[token, expert]), silu, expert)
    return x + mixed


def smallthinker_layer(model, layer, name, x):
    query_at, key_at = positions(len(x))
    visible = key_at <= query_at
    window = model.key("attention.sliding_window")
    has_window = layer % 4 != 0
    if has_window:
        visible &= query_at - key_at < window

    def prepare(query, key):
        return (model.rotate(query, False), model.rotate(key, False)) if has_window else (query, key)

    # The router reads what attention reads, before its norm.
    router = x @ model.weights[name + "ffn_gate_inp.weight"].T
    x = x + model.attention(name, model.norm(x, name + "attn_norm"), prepare, visible)
    normed = model.norm(x, name + "ffn_norm")
    mixed = np.zeros_like(x)
    for token, row in enumerate(normed):
        selected = model.selected(router[token])
        scores = router[token, selected]
        # The factor of the softmax over all experts cancels out where the weights are divided by their sum.
        weights = sigmoid(scores) if model.key("expert_gating_func") == 2 else np.exp(scores - scores.max())
        for expert, weight in zip(selected, weights / weights.sum()):
            mixed[token] += weight * model.gated(name, "_exps", row, lambda gate: np.maximum(gate, 0), expert)
    return x + mixed


LAYERS = {"llama4": llama4_layer, "smallthinker": smallthinker_layer}


def cases():
    """Architecture, weight type and options of each model."""
    chunks = {"attention.sliding_window": 8, "attention.temperature_length": 6, "attention.temperature_scale": 0.3}
    yield "llama4", "F32", dict(more=chunks)
    yield "llama4", "F32", dict(more=chunks | {"attention.sliding_window": 13}, experts=8, used=3, step=2, heads=6, kv_heads=2,
                                layers=9, tied=True, factors=True)
    yield "llama4", "F32", dict(more=chunks | {"attention.sliding_window": 64}, experts=128, step=2, layers=4)
    yield "llama4", "Q8_0", dict(more=chunks, layers=4, width=128, heads=4)
    windows = {"expert_feed_forward_length": 64, "expert_gating_func": 2, "attention.sliding_window": 7}
    yield "smallthinker", "F32", dict(keys=windows, layers=5)
    yield "smallthinker", "F32", dict(keys=windows | {"expert_gating_func": 1, "attention.sliding_window": 31}, experts=9, used=4,
                                      layers=9, tied=True, heads=6, kv_heads=2)
    yield "smallthinker", "F32", dict(keys=windows | {"attention.sliding_window": 1}, layers=6, experts=5, used=1)
    yield "smallthinker", "Q8_0", dict(keys=windows, layers=4, width=128, heads=4)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--logits", default="target/release/examples/logits", help="the built example `logits`")
    parser.add_argument("--only", default="", help="only cases whose description contains this")
    arguments = parser.parse_args()
    bad = compared = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed, (arch, dtype, options) in enumerate(cases()):
            name = f"{arch} {dtype} " + " ".join(f"{key}={value}" for key, value in options.items())
            if arguments.only not in name:
                continue
            path = os.path.join(folder, f"{seed}.gguf")
            other_models.WRITERS.get(arch, moe_models.write)(path, arch, dtype, seed, **options)
            command = [arguments.logits, path, str(FIRST), ",".join(map(str, TOKENS)), str(KEPT), ",".join(map(str, OTHERS))]
            done = subprocess.run(command, capture_output=True, text=True)
            compared += 1
            if done.returncode != 0:
                bad += 1
                print(f"{name}: {done.stderr.strip()}")
                continue
            ours = np.array([[float(value) for value in row.split()] for row in done.stdout.splitlines()])
            model = Model(path)
            exact = np.concatenate([model.logits(TOKENS)[FIRST - 1:], model.logits(TOKENS[:KEPT] + OTHERS)[KEPT:]])
            rows = np.sqrt(np.mean((ours - exact) ** 2, axis=1)) / exact.std()
            # The few rows after the truncation are judged apart: the median of all would not notice them.
            difference = max(np.median(rows[: -len(OTHERS)]), np.median(rows[-len(OTHERS):]))
            past = bool(difference > LIMITS[dtype] or np.mean(rows > 10 * LIMITS[dtype]) > 0.2)
            bad += past
            print(f"{name}: {difference:.2e}, at most {rows.max():.2e}{'  PAST THE LIMIT' * past}", flush=True)
    print(f"{compared} models compared, {bad} past their limit")
    sys.exit(1 if bad else 0)


main()
