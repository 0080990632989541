#!/usr/bin/env python3
"""Compares the logits of random small models with llama.cpp's.

usage: $(scripts/python-env) bench/agree_with_llama_cpp.py [--logits PROGRAM] [--only TEXT] [--keep FOLDER]

Writes models of each architecture and weight type with the PyPI package `gguf`, has llama.cpp (the prebuilt CPU
libraries of the npm package @node-llama-cpp/linux-x64) and `crates/llm/examples/logits.rs` compute the same tokens, and
prints the root mean square difference in standard deviations of the logits. PEER_DIR names the folder of the npm
package, which is installed there on first use. Exits with 1 if a difference is past its limit: llama.cpp rounds
activations to 8 bits before they meet quantized weights, and its cache is f16 where the example's is f32.
"""
import argparse, ctypes as c, glob, os, subprocess, sys, tempfile
import gguf, numpy as np

TOKENS = [(k * 37 + 11) % 128 for k in range(24)]
FIRST = 16


class Params(c.Structure):  # larger than any of the library's parameter structs; passed by value
    _fields_ = [("u32", c.c_uint32 * 256)]


class Batch(c.Structure):
    _fields_ = [("n_tokens", c.c_int32)] + [
        (name, c.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")]


class Peer:
    """llama.cpp's C interface, as much of it as is needed."""

    FUNCTIONS = {
        "llama_model_default_params": (Params, []),
        "llama_context_default_params": (Params, []),
        "llama_model_load_from_file": (c.c_void_p, [c.c_char_p, Params]),
        "llama_model_free": (None, [c.c_void_p]),
        "llama_init_from_model": (c.c_void_p, [c.c_void_p, Params]),
        "llama_free": (None, [c.c_void_p]),
        "llama_set_n_threads": (None, [c.c_void_p, c.c_int32, c.c_int32]),
        "llama_batch_get_one": (Batch, [c.c_void_p, c.c_int32]),
        "llama_decode": (c.c_int32, [c.c_void_p, Batch]),
        "llama_get_logits": (c.POINTER(c.c_float), [c.c_void_p]),
        "llama_log_set": (None, [c.c_void_p, c.c_void_p]),
    }

    def __init__(self):
        home = os.environ.get("PEER_DIR") or os.path.join(tempfile.gettempdir(), "llama-cpp-peer")
        pattern = home + "/node_modules/@node-llama-cpp/linux-x64/bins/linux-x64/"
        if not glob.glob(pattern):
            os.makedirs(home, exist_ok=True)
            package = "@node-llama-cpp/linux-x64@3.22.1"
            subprocess.run(["npm", "install", "--prefix", home, "--ignore-scripts", package], check=True)
        folder = glob.glob(pattern)[0]
        for name in ("libggml-base.so", "libggml.*so", "libllama.*so"):
            library = c.CDLL(sorted(glob.glob(folder + name))[0], mode=c.RTLD_GLOBAL)
            if name.startswith("libggml."):
                library.ggml_backend_load_all_from_path(c.c_char_p(folder.encode()))
        for name, (result, arguments) in self.FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.messages = []
        self.listener = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(
            lambda level, text, _: self.messages.append(text.decode(errors="replace")) if level >= 3 else None)
        library.llama_log_set(c.cast(self.listener, c.c_void_p), None)
        self.library = library

    def logits(self, path, vocabulary):
        """The rows after the first tokens and after each of the others, or None if the model is not taken."""
        lib = self.library
        self.messages.clear()
        model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not model:
            return None
        params = lib.llama_context_default_params()
        params.u32[0], params.u32[1] = 256, 512  # n_ctx, n_batch
        context = lib.llama_init_from_model(model, params)
        lib.llama_set_n_threads(context, 1, 1)
        rows = []
        for tokens in [TOKENS[:FIRST]] + [[token] for token in TOKENS[FIRST:]]:
            buffer = (c.c_int32 * len(tokens))(*tokens)
            batch = lib.llama_batch_get_one(c.cast(buffer, c.c_void_p), len(tokens))
            if lib.llama_decode(context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            rows.append(np.ctypeslib.as_array(lib.llama_get_logits(context), (vocabulary,)).copy())
        lib.llama_free(context)
        lib.llama_model_free(model)
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
    return vocabulary


# Where the f16 scales of a block stand, and their ratio that puts zero in the middle: types that `gguf` cannot make.
SCALES = {"Q2_K": [(80, 1.0), (82, 1.5)], "Q3_K": [(108, 1.0)], "Q4_K": [(0, 1.0), (2, 7.5)],
          "Q5_K": [(0, 1.0), (2, 15.5)], "Q6_K": [(208, 1.0)], "IQ4_NL": [(0, 1.0)], "IQ4_XS": [(0, 1.0)]}


def blocks(values, kind, random):
    """The values in blocks, or random blocks of about their size where the package cannot make them."""
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
    peer, bad, compared = Peer(), 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or temporary
        os.makedirs(folder, exist_ok=True)
        for seed, (arch, dtype, options) in enumerate(cases()):
            name = f"{arch} {dtype} " + " ".join(f"{key}={value}" for key, value in options.items() if value)
            if arguments.only not in name:
                continue
            path = os.path.join(folder, f"{seed}.gguf")
            vocabulary = write(path, arch, dtype, seed, **options)
            theirs = peer.logits(path, vocabulary)
            if theirs is None:
                print(f"{name}: llama.cpp does not take it: {''.join(peer.messages).strip().splitlines()[:1]}")
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
