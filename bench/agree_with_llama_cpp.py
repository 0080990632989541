#!/usr/bin/env python3
"""Compares the logits of random small models with llama.cpp's.

usage: $(scripts/python-env) bench/agree_with_llama_cpp.py [--logits PROGRAM] [--only TEXT] [--keep FOLDER]

Writes models of each architecture and weight type with the PyPI package `gguf`, has llama.cpp (the prebuilt CPU
libraries of the npm package @node-llama-cpp/linux-x64) and `crates/llm/examples/logits.rs` compute the same tokens, and
prints the root mean square difference in standard deviations of the logits (of encoders: of the tokens' vectors, or with a pooling of
embeddings and scores). Exits with 1 if llama.cpp does not load a model that it is not known to refuse, or if a difference is past its
limit: llama.cpp quantizes activations to 8 bits for quantized weights, and its KV cache is f16 where the example's is f32. Of models
with experts the median row is judged, and the share of rows that are far off.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import gguf
import numpy as np

import encoder_models
import llama_peer
import moe_models
import other_models
import random_blocks
import recurrent_models

# Longer than the windows of the models that have one.
TOKENS = [(k * 37 + 11) % 128 for k in range(40)]
FIRST = 24
# For latent attention, which takes another form for batches as long as this.
MORE_TOKENS = [(k * 37 + 11 + k // 128) % 128 for k in range(120)]
MORE_FIRST = 100
# After all tokens the sequence is truncated to this length and continued with others.
KEPT, OTHERS = 31, [5, 77, 100, 3]


def prompt(options):
    """The tokens of a model, and how many of them come first."""
    return (MORE_TOKENS, MORE_FIRST) if "mla" in options else (TOKENS, FIRST)


def peer_logits(library, path, options):
    """llama.cpp's rows after the first tokens, after each of the others, and after those that follow the truncation; or None
    if it does not load the model. It computes everything before a truncation anew."""
    model = library.open(path, 256, 512, 1)
    if model is None:
        return None
    rows = []
    all_tokens, count = prompt(options)
    for first, rest in ((all_tokens[:count], all_tokens[count:]), (all_tokens[:KEPT] + OTHERS[:1], OTHERS[1:])):
        model.clear()
        for tokens in [first] + [[token] for token in rest]:
            model.decode(tokens)
            rows.append(np.ctypeslib.as_array(model.logits(), (model.vocabulary,)).copy())
    model.close()
    return np.array(rows, dtype=np.float64)


def peer_vectors(library, path, options):
    """llama.cpp's vectors of all tokens of a text, by an encoder, or with a pooling the embeddings or scores of texts of more and
    more tokens; or None if it does not load the model."""
    model = library.open(path, 64, 64, 1)
    if model is None:
        return None
    if options.get("pooling"):
        count = options.get("labels", 1) if options["pooling"] == "rank" else model.width
        rows = []
        for length in range(FIRST, len(TOKENS) + 1):
            model.embed(TOKENS[:length])
            rows.append(np.ctypeslib.as_array(model.pooled(), (count,)).copy())
        model.close()
        return np.array(rows, dtype=np.float64)
    model.embed(TOKENS)
    rows = [np.ctypeslib.as_array(model.vector(row), (model.width,)).copy() for row in range(len(TOKENS))]
    model.close()
    return np.array(rows, dtype=np.float64)


class Shape:
    """The shape of a random model, and the features of its architecture's files: everything that FAMILIES and cases() set."""

    def __init__(self, **options):
        self.width, self.heads, self.kv_heads, self.key_length = 256, 4, 2, 64
        self.feed_forward, self.vocabulary, self.layers = 512, 128, 2
        self.rope_dims, self.rope_base = None, 10000.0
        # Keys after the architecture's prefix, for values that have no option here.
        self.keys = {}
        self.tied = self.biases = self.output_bias = self.factors = self.long_factors = False
        self.fused_attention = self.fused_feed_forward = self.layer_norm = self.parallel = False
        self.pre_norms, self.post_norms, self.query_norms = True, False, None
        self.scaling = None
        # Adds tensors of its own: called with the tensor functions, the shape and a layer's number.
        self.tensors = None
        for name, value in options.items():
            setattr(self, name, value)


GEMMA = dict(tied=True, post_norms=True, keys={"attention.sliding_window": 12})
# The features of each architecture.
FAMILIES = {
    "llama": {},
    "qwen2": dict(biases=True),
    "qwen3": dict(query_norms="head"),
    "granite": dict(keys={"embedding_scale": 3.0, "residual_scale": 0.3, "attention.scale": 0.1, "logit_scale": 8.0}),
    "smollm3": dict(layers=5),
    "phi3": dict(fused_attention=True, fused_feed_forward=True),
    "gemma": dict(tied=True),
    "gemma2": dict(GEMMA, keys=GEMMA["keys"] | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 5.0}),
    "gemma3": dict(GEMMA, layers=7, query_norms="head", rope_base=1000000.0, scaling=("linear", 8.0)),
    "olmo2": dict(pre_norms=False, post_norms=True, query_norms="all", key_length=64, heads=4),
    "command-r": dict(layer_norm=True, parallel=True, tied=True, keys={"logit_scale": 0.25}),
    "glm4": dict(post_norms=True, biases=True, fused_feed_forward=True, rope_dims=32),
}


def write(path, arch, dtype, seed, **options):
    """A random model as the package gguf writes it."""
    s = Shape(**{**FAMILIES[arch], **options})
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(s.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(s.width)
    writer.add_feed_forward_length(s.feed_forward)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.key_length)
    writer.add_value_length(s.key_length)
    writer.add_rope_dimension_count(s.rope_dims or s.key_length)
    writer.add_rope_freq_base(s.rope_base)
    (writer.add_layer_norm_eps if s.layer_norm else writer.add_layer_norm_rms_eps)(1e-5)
    writer.add_vocab_size(s.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    for key, value in s.keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](f"{arch}.{key}", value)
    if s.scaling:
        kind, factor = s.scaling
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(factor)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(512)
    if s.long_factors:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        # llama.cpp's context is 256 tokens here, and the example's too.
        writer.add_rope_scaling_orig_ctx_len(128 if s.long_factors == "long" else 1024)
        writer.add_rope_scaling_attn_factors(1.19)

    def matrix(name, rows, cols, size=1.0):
        values = (random.standard_normal((rows, cols)) * size / np.sqrt(cols)).astype(np.float32)
        kind = gguf.GGMLQuantizationType[dtype]
        # As in real files, since the scales of NVFP4 have little range; llama.cpp ignores those of Qwen 2's feed-forward network.
        if dtype == "NVFP4" and name.startswith("blk.") and not (arch == "qwen2" and ".ffn_" in name):
            scale = np.float32(values.std() / 8)
            writer.add_tensor(name.removesuffix("weight") + "scale", scale.reshape(1))
            values = values / scale
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, random_blocks.blocks(values, kind, random), raw_dtype=kind)

    def vector(name, shape, middle=1.0, spread=0.5):
        writer.add_tensor(name, random.uniform(middle - spread, middle + spread, shape).astype(np.float32))

    matrix("token_embd.weight", s.vocabulary, s.width)
    vector("output_norm.weight", s.width)
    if not s.tied:
        matrix("output.weight", s.vocabulary, s.width)
    half = (s.rope_dims or s.key_length) // 2
    if s.factors:
        vector("rope_freqs.weight", half, 4.0, 3.0)
    if s.long_factors:
        vector("rope_factors_short.weight", half, 4.0, 3.0)
        vector("rope_factors_long.weight", half, 4.0, 3.0)
    for layer in range(s.layers):
        write_layer(s, f"blk.{layer}.", matrix, vector)
        if s.tensors:
            s.tensors(s, layer, matrix, vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_layer(s, name, matrix, vector):
    """The tensors of a layer with attention and a dense feed-forward network."""
    query, keys = s.heads * s.key_length, s.kv_heads * s.key_length
    linear = [("attn_qkv", query + 2 * keys, s.width, 1.5, s.biases)] if s.fused_attention else [
        ("attn_q", query, s.width, 2.0, s.biases), ("attn_k", keys, s.width, 2.0, s.biases),
        ("attn_v", keys, s.width, 1.0, s.biases)]
    linear += [("attn_output", s.width, query, 1.0, s.output_bias)]
    linear += [("ffn_up", 2 * s.feed_forward, s.width, 1.0, False)] if s.fused_feed_forward else [
        ("ffn_gate", s.feed_forward, s.width, 1.0, False), ("ffn_up", s.feed_forward, s.width, 1.0, False)]
    linear += [("ffn_down", s.width, s.feed_forward, 1.0, False)]
    for part, rows, cols, size, bias in linear:
        matrix(f"{name}{part}.weight", rows, cols, size)
        if bias:
            vector(f"{name}{part}.bias", rows, 0.0, 0.5)
    norms = ["attn_norm"] * s.pre_norms + ["ffn_norm"] * (s.pre_norms and not s.parallel)
    norms += ["post_attention_norm", "post_ffw_norm"] * s.post_norms
    for part in norms:
        vector(f"{name}{part}.weight", s.width)
    if s.query_norms:
        shape = {"head": lambda heads: s.key_length, "all": lambda heads: heads * s.key_length,
                 "each": lambda heads: (heads, s.key_length)}[s.query_norms]
        vector(name + "attn_q_norm.weight", shape(s.heads), 1.5)
        vector(name + "attn_k_norm.weight", shape(s.kv_heads), 1.5)


def cases():
    """Architecture, weight type and options of every model."""
    for arch in ("llama", "qwen2", "qwen3"):
        for dtype in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
                      "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0",
                      "MXFP4", "NVFP4"):
            yield arch, dtype, dict(tied=dtype.endswith("_K"))
    yield "llama", "F32", dict(biases=True, output_bias=True)
    yield "llama", "F32", dict(scaling=("linear", 4.0))
    yield "qwen2", "F32", dict(scaling=("yarn", 4.0))
    yield "llama", "F32", dict(scaling=("yarn", 8.0))
    yield "llama", "F32", dict(scaling=("yarn", 8.0), keys={"rope.scaling.attn_factor": 1.3})
    yield "llama", "F32", dict(factors=True)
    yield "qwen3", "F32", dict(key_length=128, kv_heads=1)
    yield "llama", "F32", dict(rope_dims=32)
    yield "llama", "F32", dict(kv_heads=4, layers=3)
    odd = dict(width=192, heads=6, kv_heads=3, key_length=32, feed_forward=352, rope_dims=32)
    for arch in [arch for arch in FAMILIES if arch not in ("llama", "qwen2", "qwen3")]:
        partial = dict(rope_dims=16) if arch == "glm4" else {}
        yield arch, "F32", {}
        # llama.cpp accepts either with or without an output matrix from some architectures.
        other = {} if arch in ("gemma", "gemma2", "command-r", "olmo2") else dict(tied=not FAMILIES[arch].get("tied"))
        yield arch, "F32", dict(odd, **other, **partial)
        yield arch, "F32", dict(odd, scaling=("yarn", 4.0), rope_base=500000.0, **partial)
        yield arch, "Q8_0", {}
        yield arch, "Q4_K", dict(layers=FAMILIES[arch].get("layers", 2) + 1)
    yield "granite", "F32", dict(keys={"logit_scale": 1.0, "rope.scaling.finetuned": False})
    yield "phi3", "F32", dict(long_factors="long", rope_dims=32)
    yield "phi3", "F32", dict(long_factors="short")
    yield "phi3", "F32", dict(keys={"attention.sliding_window": 9})
    windows = {"attention.sliding_window": 7}
    yield "gemma2", "F32", dict(keys=windows | {"attention.sliding_window_pattern": 3}, layers=4)
    yield "gemma3", "F32", dict(keys=windows | {"rope.freq_base_swa": 5000.0, "final_logit_softcapping": 9.0})
    yield "gemma3", "F32", dict(layers=62, width=128, heads=2, kv_heads=1, key_length=32)
    yield "gemma3", "F32", dict(keys={})
    yield "olmo2", "F32", dict(keys=windows, layers=5, scaling=("yarn", 8.0))
    yield "command-r", "F32", dict(layers=64, width=128, heads=4, key_length=32, query_norms="each")
    yield from moe_models.cases()
    yield from recurrent_models.cases()
    yield from other_models.cases()
    yield from encoder_models.cases()
    # The number of a case is its seed: further ones come last.
    yield from moe_models.layouts()
    yield from moe_models.without_biases()
    yield from recurrent_models.scaled()
    # As many layers as the 27B model, whose scores are scaled by the width per head.
    yield "gemma2", "F32", dict(layers=46, width=128, heads=2, kv_heads=1, key_length=32)
    yield from moe_models.quantized()


# Beginnings of the descriptions of cases that the peer's version is known not to load.
NOT_LOADED = ("llama F32 rope_dims=32",)


def limit(arch, dtype, options):
    """Differences grow with the number of layers."""
    layers = options.get("layers") or FAMILIES.get(arch, {"layers": 22 if arch == "gemma3n" else 2}).get("layers", 2)
    return {"F32": 5e-3, "F16": 0.06, "BF16": 0.06}.get(dtype, 0.15) * max(1, layers / 3)


# Of a model with experts, so large a share of the rows may be past so many times the limit.
MOST_ROWS, FACTOR = 0.2, 4


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
            has_own = recurrent_models if "recurrent" in options else moe_models if "experts" in options else None
            writer = other_models.WRITERS.get(arch) or (has_own.write if has_own else write)
            writer = encoder_models.write if "encoder" in options else writer
            writer(path, arch, dtype, seed, **options)
            # What llama.cpp does not load, and on some CPUs not compute: other layouts of experts, and quantized matrices that expand
            # keys and values. It gets the same weights in stacks, and as floats.
            peer_path, of_peer = path, {}
            if "layout" in options:
                of_peer["layout"] = "stacked"
            if dtype == "Q8_0" and options.get("mla", {}).get("split"):
                of_peer["float_expansion"] = True
            if of_peer:
                peer_path = os.path.join(folder, f"{seed}-peer.gguf")
                writer(peer_path, arch, dtype, seed, **{**options, **of_peer})
            theirs = (peer_vectors if "encoder" in options else peer_logits)(library, peer_path, options)
            if theirs is None:
                known = any(name.startswith(beginning) for beginning in NOT_LOADED)
                bad += not known
                reason = "".join(library.messages).strip().splitlines()[:1]
                print(f"{name}: llama.cpp does not load it{' (known)' * known}: {reason}", flush=True)
                continue
            all_tokens, count = prompt(options)
            command = [arguments.logits, path, str(count), ",".join(map(str, all_tokens)), str(KEPT), ",".join(map(str, OTHERS))]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                bad += 1
                print(f"{name}: {done.stderr.strip()}")
                continue
            ours = np.array([[float(v) for v in row.split()] for row in done.stdout.splitlines()])
            rows = np.mean((ours - theirs) ** 2, axis=1)
            # Where two experts are nearly tied, rounding may choose the other one: that row is far off, and those that attend to it
            # may be past the limit, but few rows are far off. The few rows after the truncation are judged apart: the median of all
            # would not notice them.
            has_experts = "experts" in options or arch == "llama4"
            middle = np.median if has_experts else np.mean
            # A single score differs little from text to text.
            spread = theirs.std() if theirs.shape[1] > 1 else np.sqrt(np.mean(theirs**2))
            difference = np.sqrt(max(middle(rows[:-len(OTHERS)]), middle(rows[-len(OTHERS):]))) / spread
            most = limit(arch, dtype, options)
            others = np.mean(np.sqrt(rows) / spread > FACTOR * most) if has_experts else 0.0
            best = np.mean(ours.argmax(axis=1) == theirs.argmax(axis=1))
            verdict = "  PAST THE LIMIT" * bool(difference > most)
            verdict += "  TOO MANY ROWS DIFFER" * bool(others > MOST_ROWS)
            bad += bool(verdict)
            compared += 1
            rest = f", {others:.0%} of rows far off" * bool(others)
            print(f"{name}: {difference:.2e} (same best token in {best:.0%} of rows{rest}){verdict}", flush=True)
    print(f"{compared} models compared, {bad} past their limit or not comparable")
    sys.exit(1 if bad else 0)


main()
