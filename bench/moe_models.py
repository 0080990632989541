"""Random small models with experts, as the package gguf writes them: what bench/agree_with_llama_cpp.py compares."""
import gguf
import numpy as np

import random_blocks


class Random:
    """A model file with random tensors."""

    def __init__(self, path, arch, seed, dtype="F32"):
        self.writer = gguf.GGUFWriter(path, arch)
        self.arch, self.dtype = arch, gguf.GGMLQuantizationType[dtype]
        self.random = np.random.default_rng(seed)

    def keys(self, values):
        """Keys with the architecture's prefix; the type follows the value's."""
        for key, value in values.items():
            name = f"{self.arch}.{key}"
            if isinstance(value, bool):
                self.writer.add_bool(name, value)
            elif isinstance(value, int):
                self.writer.add_uint32(name, value)
            elif isinstance(value, float):
                self.writer.add_float32(name, value)
            elif isinstance(value, str):
                self.writer.add_string(name, value)
            elif value is not None:
                self.writer.add_array(name, value)

    def matrix(self, name, *shape, size=1.0, dtype=None, as_floats=False):
        values = (self.random.standard_normal(shape) * size / np.sqrt(shape[-1])).astype(np.float32)
        self.put(name, values, dtype, as_floats)

    def put(self, name, values, dtype=None, as_floats=False):
        """A tensor of these values, or of random ones where the package cannot quantize; `as_floats` as they are after quantization."""
        kind = gguf.GGMLQuantizationType[dtype] if dtype else self.dtype
        if kind == gguf.GGMLQuantizationType.F32:
            self.writer.add_tensor(name, values)
            return
        data = random_blocks.blocks(values, kind, self.random)
        if as_floats:
            self.writer.add_tensor(name, gguf.quants.dequantize(data, kind).astype(np.float32))
        else:
            self.writer.add_tensor(name, data, raw_dtype=kind)

    def vector(self, name, *shape, middle=0.0, spread=0.5):
        values = self.random.uniform(middle - spread, middle + spread, shape)
        self.writer.add_tensor(name, values.astype(np.float32))

    def norm(self, name, length):
        self.vector(name + ".weight", length, middle=1.0)

    def finish(self):
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write(path, arch, dtype, seed, width=96, heads=3, kv_heads=1, key_length=32, layers=2, vocabulary=128, tied=False,
          biases=False, experts=6, used=2, inner=64, dense_inner=128, dense=0, shared=None, layout="stacked", keys=None,
          query_norms=None, selection_bias=False, all_biases=False, sinks=False, second_norm="ffn_norm",
          shared_gate=False, nextn=0, mla=None, rope_dims=None, output_bias=False, branch=1.0,
          expert_dtype=None, float_expansion=False):
    """A random model with experts. `layout` is how the file has them; `mla` the ranks and lengths of latent attention;
    `branch` the size of what a layer adds: in deep models, large ones would multiply rounding errors. `expert_dtype` is the
    type of the experts' matrices, if it differs; with `float_expansion` those that expand keys and values are dequantized."""
    model = Random(path, arch, seed, dtype)
    blocks = layers + nextn
    model.keys({"block_count": blocks, "context_length": 4096, "embedding_length": width,
                "feed_forward_length": dense_inner, "attention.head_count": heads,
                "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": vocabulary, "rope.freq_base": 10000.0,
                "expert_count": experts, "expert_used_count": used, "leading_dense_block_count": dense or None,
                "nextn_predict_layers": nextn or None})
    if mla is None:
        model.keys({"attention.head_count_kv": kv_heads, "attention.key_length": key_length,
                    "attention.value_length": key_length, "rope.dimension_count": rope_dims or key_length})
    model.keys(keys or {})
    model.writer.add_tokenizer_model("no_vocab")
    model.matrix("token_embd.weight", vocabulary, width)
    model.norm("output_norm", width)
    if not tied:
        model.matrix("output.weight", vocabulary, width)
    for layer in range(blocks):
        name = f"blk.{layer}."
        model.norm(name + "attn_norm", width)
        model.norm(name + second_norm, width)
        if mla:
            latent_attention(model, name, width, heads, branch, float_expansion, **mla)
        else:
            attention(model, name, width, heads, kv_heads, key_length, biases, output_bias, query_norms, branch)
        if sinks:
            model.vector(name + "attn_sinks.weight", heads, spread=3.0)
        if layer < dense:
            for part, shape in (("gate", (dense_inner, width)), ("up", (dense_inner, width)), ("down", (width, dense_inner))):
                model.matrix(f"{name}ffn_{part}.weight", *shape)
        else:
            mixture(model, name, width, experts, inner, shared, layout, selection_bias, all_biases, shared_gate, branch,
                    expert_dtype)
        if layer >= layers:
            model.matrix(name + "nextn.eh_proj.weight", width, 2 * width)
            model.norm(name + "nextn.enorm", width)
            model.norm(name + "nextn.hnorm", width)
    model.finish()


def attention(model, name, width, heads, kv_heads, length, biases, output_bias, query_norms, branch):
    for part, rows, cols, size, bias in (
            ("attn_q", heads * length, width, 2.0, biases), ("attn_k", kv_heads * length, width, 2.0, biases),
            ("attn_v", kv_heads * length, width, 1.0, biases), ("attn_output", width, heads * length, branch, output_bias)):
        model.matrix(f"{name}{part}.weight", rows, cols, size=size)
        if bias:
            model.vector(f"{name}{part}.bias", rows)
    if query_norms == "head":
        model.vector(name + "attn_q_norm.weight", length, middle=1.5)
        model.vector(name + "attn_k_norm.weight", length, middle=1.5)
    if query_norms == "all":
        model.vector(name + "attn_q_norm.weight", heads * length, middle=1.5)
        model.vector(name + "attn_k_norm.weight", kv_heads * length, middle=1.5)


def latent_attention(model, name, width, heads, branch, as_floats, rank, query_rank, plain, rope, value, split):
    """DeepSeek's attention: `split` files have the two matrices that expand keys and values apart."""
    if query_rank:
        model.matrix(name + "attn_q_a.weight", query_rank, width)
        model.norm(name + "attn_q_a_norm", query_rank)
        model.matrix(name + "attn_q_b.weight", heads * (plain + rope), query_rank, size=2.0)
    else:
        model.matrix(name + "attn_q.weight", heads * (plain + rope), width, size=2.0)
    model.matrix(name + "attn_kv_a_mqa.weight", rank + rope, width)
    model.norm(name + "attn_kv_a_norm", rank)
    if split:
        # The rows are those of the product with a query, so that their length is the plain part's.
        model.matrix(name + "attn_k_b.weight", heads, rank, plain, as_floats=as_floats)
        model.matrix(name + "attn_v_b.weight", heads, value, rank, as_floats=as_floats)
    else:
        model.matrix(name + "attn_kv_b.weight", heads * (plain + value), rank)
    model.matrix(name + "attn_output.weight", width, heads * value, size=branch)


def mixture(model, name, width, experts, inner, shared, layout, selection_bias, all_biases, shared_gate, branch, dtype):
    model.matrix(name + "ffn_gate_inp.weight", experts, width, size=3.0, dtype="F32")
    if selection_bias:
        model.vector(name + "exp_probs_b.bias", experts, spread=0.3)
    # The same values in every layout.
    weights, vectors = {}, {}
    for part, rows, columns, size in (("gate", inner, width, 1.0), ("up", inner, width, 1.0), ("down", width, inner, branch)):
        values = model.random.standard_normal((experts, rows, columns)) * size / np.sqrt(columns)
        weights[part] = values.astype(np.float32)
        if all_biases:
            vectors[part] = model.random.uniform(-0.5, 0.5, (experts, rows)).astype(np.float32)
    if layout == "fused":
        for parts in filter(None, (weights, vectors)):
            parts["gate_up"] = np.concatenate([parts.pop("gate"), parts.pop("up")], axis=1)
    for part, values in weights.items():
        if layout == "apart":
            for expert in range(experts):
                model.put(f"{name}ffn_{part}.{expert}.weight", values[expert], dtype)
        else:
            model.put(f"{name}ffn_{part}_exps.weight", values, dtype)
    for part, values in vectors.items():
        model.writer.add_tensor(f"{name}ffn_{part}_exps.bias", values)
    if all_biases:
        model.vector(name + "ffn_gate_inp.bias", experts)
    if shared:
        for part, shape in (("gate", (shared, width)), ("up", (shared, width)), ("down", (width, shared))):
            model.matrix(f"{name}ffn_{part}_shexp.weight", *shape)
    if shared_gate:
        model.matrix(name + "ffn_gate_inp_shexp.weight", width, dtype="F32")


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 256}


def cases():
    """Architecture, weight type and options of each model."""
    for arch, options in models():
        yield arch, options.pop("dtype", "F32"), {"experts": 6, **options}


def layouts():
    """The same of files that have experts in other layouts. llama.cpp does not load those: it computes the same weights in stacks."""
    for layout in ("fused", "apart"):
        yield "llama", "F32", dict(experts=6, inner=128, layout=layout)
        yield "llama", "F32", dict(experts=5, used=3, inner=128, layout=layout, tied=True, biases=True, layers=3)
        yield "llama", "Q8_0", dict(experts=8, inner=128, layout=layout, heads=6, kv_heads=2)
    yield "qwen3moe", "F32", dict(experts=7, query_norms="head", layout="fused", keys={"expert_feed_forward_length": 64})
    options = next(gpt_oss())[1]
    yield "gpt-oss", "F32", dict(options, experts=5, layers=2, layout="fused")


def without_biases():
    """Models of architectures that usually have biases on queries, keys and values."""
    keys = {"expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 96}
    yield "qwen2moe", "F32", dict(experts=6, keys=keys, shared=96, shared_gate=True)
    options = next(glm())[1]
    yield "glm4moe", "F32", dict(options, experts=6, biases=False)


def quantized():
    """Models whose experts have the types that published files have, and the split layout of latent attention quantized."""
    options = next(gpt_oss())[1]
    for dtype, of_experts in (("Q8_0", "MXFP4"), ("F16", "MXFP4"), ("MXFP4", None)):
        yield "gpt-oss", dtype, dict(options, experts=8, used=4, expert_dtype=of_experts)
    keys = {"expert_feed_forward_length": 256}
    for dtype in ("Q4_0", "Q4_K", "Q6_K", "IQ4_XS"):
        yield "qwen3moe", "Q8_0", dict(experts=8, used=3, width=256, inner=256, query_norms="head", keys=keys, expert_dtype=dtype)
    for options in (dict(), dict(keys=V3, experts=16, used=3, selection_bias=True)):
        yield "deepseek2", "Q8_0", {"experts": 6, **latent(64, 64, 32, 32, 32, True, layers=3, heads=4, width=128, **options)}


def models():
    yield "llama", dict(inner=128)
    yield "llama", dict(inner=128, tied=True, experts=5, used=3, biases=True, keys=YARN)
    yield "llama", dict(inner=128, dtype="Q8_0", experts=8, used=8, layers=3)
    for arch, options in (("qwen3moe", dict(query_norms="head")),
                          ("qwen2moe", dict(biases=True, shared=96, shared_gate=True)),
                          ("olmoe", dict(query_norms="all", inner=128, kv_heads=3))):
        own = {"expert_feed_forward_length": 64} if arch != "olmoe" else {}
        if arch == "qwen2moe":
            own["expert_shared_feed_forward_length"] = 96
        yield arch, dict(options, keys=own)
        yield arch, dict(options, keys=dict(own), experts=7, used=1, layers=3)
        yield arch, dict(options, keys=dict(own, **YARN), experts=16, used=5, dtype="Q8_0", width=128, heads=4, kv_heads=4)
    yield "qwen3moe", dict(query_norms="head", tied=True, heads=6, kv_heads=2, key_length=64, dense_inner=128)
    granite = {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.3, "logit_scale": 4.0}
    yield "granitemoe", dict(inner=128, keys=granite, tied=True)
    yield "granitemoe", dict(inner=128, keys=dict(granite, expert_shared_feed_forward_length=96), shared=96)
    yield "granitemoe", dict(inner=128, keys=granite, dtype="Q8_0", experts=9, used=4, layers=3)
    yield "granitemoe", dict(inner=128, keys=dict(granite, **YARN), heads=6, kv_heads=2)
    yield from gpt_oss()
    yield from glm()
    yield from deepseek()
    yield from smallthinker()


def gpt_oss():
    keys = dict(YARN, **{"expert_feed_forward_length": 64, "attention.sliding_window": 8, "rope.scaling.factor": 32.0})
    same = dict(keys=keys, biases=True, output_bias=True, all_biases=True, sinks=True, second_norm="post_attention_norm")
    yield "gpt-oss", dict(same, layers=3, branch=0.5)
    yield "gpt-oss", dict(same, experts=32, used=4, heads=6, kv_heads=2, layers=4, branch=0.5)
    yield "gpt-oss", dict(same, experts=5, used=5, layers=2, key_length=64, dtype="Q8_0")
    yield "gpt-oss", dict(same, experts=5, used=1, layers=1, keys=dict(keys, **{"attention.sliding_window": 3}))


def glm():
    keys = {"expert_feed_forward_length": 64, "expert_shared_count": 1, "expert_weights_norm": True,
            "expert_weights_scale": 1.7, "expert_gating_func": 2}
    same = dict(keys=keys, biases=True, selection_bias=True, shared=64, second_norm="post_attention_norm", dense=1, layers=3,
                rope_dims=16)
    yield "glm4moe", dict(same)
    yield "glm4moe", dict(same, query_norms="head", nextn=1, experts=9, used=4)
    yield "glm4moe", dict(same, heads=6, kv_heads=2, width=128, dtype="Q8_0", dense=2)
    softmax = dict(keys, expert_gating_func=1, expert_weights_norm=False, expert_shared_count=2)
    yield "glm4moe", dict(same, keys=softmax, shared=128)
    yield "glm4moe", dict(same, keys=dict(keys, **YARN), tied=True, experts=7, used=3)


def smallthinker():
    # llama.cpp's windows are always of 4096 tokens here.
    windows = {"expert_feed_forward_length": 64, "expert_gating_func": 2, "attention.sliding_window": 4096}
    yield "smallthinker", dict(keys=windows, layers=5)
    yield "smallthinker", dict(keys=dict(windows, expert_gating_func=1, **YARN), experts=9, used=4, tied=True, heads=6, kv_heads=2)
    yield "smallthinker", dict(keys={key: windows[key] for key in list(windows)[:2]}, dtype="Q8_0", width=128, heads=4)


def latent(rank, query_rank, plain, rope, value, split, **more):
    """Options of a model with multi-head latent attention."""
    keys = {"attention.kv_lora_rank": rank, "rope.dimension_count": rope, "expert_feed_forward_length": 64,
            "expert_shared_count": 2}
    if query_rank:
        keys["attention.q_lora_rank"] = query_rank
    if split:
        keys.update({"attention.head_count_kv": 1, "attention.key_length": rank + rope, "attention.value_length": rank,
                     "attention.key_length_mla": plain + rope, "attention.value_length_mla": value})
    else:
        keys.update({"attention.head_count_kv": more.get("heads", 3), "attention.key_length": plain + rope,
                     "attention.value_length": value})
    keys.update(more.pop("keys", {}))
    mla = dict(rank=rank, query_rank=query_rank, plain=plain, rope=rope, value=value, split=split)
    return dict(mla=mla, keys=keys, shared=128, dense=1, **more)


V3 = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_group_count": 4,
      "expert_group_used_count": 2}


def deepseek():
    yarn = dict(YARN, **{"rope.scaling.yarn_log_multiplier": 0.0707})
    one = dict(YARN, **{"rope.scaling.yarn_log_multiplier": 0.1})
    for split in (True, False):
        yield "deepseek2", latent(64, 48, 32, 16, 32, split, layers=3)
        yield "deepseek2", latent(32, 32, 32, 8, 64, split, layers=2, keys=yarn, heads=5)
        yield "deepseek2", latent(32, 32, 16, 8, 16, split, layers=3, keys=dict(V3, **one), experts=16, used=3,
                                  selection_bias=True)
        yield "deepseek2", latent(64, None, 32, 16, 32, split, layers=27, keys=yarn, heads=4, width=64, branch=0.1)
    yield "deepseek2", latent(64, 48, 32, 16, 32, True, layers=2, tied=True, keys=V3, experts=12, used=5, selection_bias=True)
    # llama.cpp on some CPUs cannot compute quantized models of the other layout.
    yield "deepseek2", latent(64, 64, 32, 32, 32, False, layers=3, dtype="Q8_0", heads=4, width=128)
    yield "deepseek2", latent(64, 48, 32, 16, 32, True, layers=3, nextn=1, keys=V3, experts=8, used=4, selection_bias=True)
