"""Random small models of LFM2, Mamba 2, Llama 4 and Gemma 3n, as the package gguf writes them: what
bench/agree_with_llama_cpp.py compares."""
from moe_models import Random, attention, mixture


def begin(path, arch, dtype, seed, keys, vocabulary=128, tied=False, output_norm="output_norm"):
    """A model with the keys that all have, and the tensors of no layer."""
    model = Random(path, arch, seed, dtype)
    model.keys({"context_length": 4096, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
                "vocab_size": vocabulary} | keys)
    model.writer.add_tokenizer_model("no_vocab")
    width = keys["embedding_length"]
    model.matrix("token_embd.weight", vocabulary, width)
    model.norm(output_norm, width)
    if not tied:
        model.matrix("output.weight", vocabulary, width)
    return model


def feed_forward(model, name, width, inner):
    for part, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
        model.matrix(f"{name}ffn_{part}.weight", *shape)


def lfm2(path, arch, dtype, seed, heads=3, kv_heads=1, key_length=32, layers=5, inner=160, kernel=3, experts=0, used=2, dense=1,
         tied=True, window=None):
    """Every third layer has attention, the others are short convolutions."""
    width = heads * key_length
    keys = {"block_count": layers, "embedding_length": width, "feed_forward_length": inner, "attention.head_count": heads,
            "attention.head_count_kv": [kv_heads if layer % 3 == 2 else 0 for layer in range(layers)],
            "shortconv.l_cache": kernel, "attention.sliding_window": window}
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": used, "expert_feed_forward_length": 64,
                 "leading_dense_block_count": dense, "expert_gating_func": 2}
    model = begin(path, arch, dtype, seed, keys, tied=tied, output_norm="token_embd_norm")
    for layer in range(layers):
        name = f"blk.{layer}."
        model.norm(name + "attn_norm", width)
        model.norm(name + "ffn_norm", width)
        if layer % 3 == 2:
            attention(model, name, width, heads, kv_heads, key_length, False, False, "head", 1.0)
        else:
            model.matrix(name + "shortconv.in_proj.weight", 3 * width, width, size=1.5)
            model.matrix(name + "shortconv.conv.weight", width, kernel, size=1.5, dtype="F32")
            model.matrix(name + "shortconv.out_proj.weight", width, width)
        if experts and layer >= dense:
            mixture(model, name, width, experts, 64, None, "stacked", True, False, False, 1.0)
        else:
            feed_forward(model, name, width, inner)
    model.finish()


def mamba2(path, arch, dtype, seed, width=96, layers=3, heads=6, length=32, groups=2, state=16, kernel=4, tied=False):
    inner = heads * length
    channels = inner + 2 * groups * state
    keys = {"block_count": layers, "embedding_length": width, "feed_forward_length": 0, "attention.head_count": 0,
            "ssm.conv_kernel": kernel, "ssm.inner_size": inner, "ssm.state_size": state, "ssm.time_step_rank": heads,
            "ssm.group_count": groups}
    model = begin(path, arch, dtype, seed, keys, tied=tied)
    for layer in range(layers):
        name = f"blk.{layer}."
        model.norm(name + "attn_norm", width)
        model.matrix(name + "ssm_in.weight", inner + channels + heads, width, size=1.5)
        model.matrix(name + "ssm_conv1d.weight", channels, kernel, size=1.5, dtype="F32")
        model.vector(name + "ssm_conv1d.bias", channels)
        model.vector(name + "ssm_dt.bias", heads, spread=1.0)
        model.vector(name + "ssm_a", heads, 1, middle=-0.5, spread=0.4)
        model.vector(name + "ssm_d", heads, 1, middle=0.7, spread=0.4)
        model.vector(name + "ssm_norm.weight", groups, inner // groups, middle=1.0)
        model.matrix(name + "ssm_out.weight", width, inner)
    model.finish()


def llama4(path, arch, dtype, seed, width=96, heads=3, kv_heads=1, key_length=32, layers=5, inner=64, dense_inner=160, experts=6,
           used=1, step=1, tied=False, factors=False, more=None):
    keys = {"block_count": layers, "embedding_length": width, "feed_forward_length": dense_inner,
            "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": key_length,
            "attention.value_length": key_length, "rope.dimension_count": key_length, "expert_count": experts,
            "expert_used_count": used, "expert_feed_forward_length": inner, "interleave_moe_layer_step": step}
    keys |= more or {}
    model = begin(path, arch, dtype, seed, keys, tied=tied)
    if factors:
        model.vector("rope_freqs.weight", key_length // 2, middle=4.0, spread=3.0)
    for layer in range(layers):
        name = f"blk.{layer}."
        model.norm(name + "attn_norm", width)
        model.norm(name + "ffn_norm", width)
        attention(model, name, width, heads, kv_heads, key_length, False, False, None, 1.0)
        if (layer + 1) % step == 0:
            mixture(model, name, width, experts, inner, inner, "stacked", False, False, False, 1.0)
        else:
            feed_forward(model, name, width, dense_inner)
    model.finish()


def gemma3n(path, arch, dtype, seed, width=64, heads=2, kv_heads=1, key_length=32, layers=22, inner=4096, window=12):
    """llama.cpp has constants for everything but the usual sizes: 4 streams, inputs of 256, a rank of 64, 20 layers with KV caches
    of their own, 10 with cut gates."""
    streams, inputs, rank = 4, 256, 64
    keys = {"block_count": layers, "embedding_length": width, "feed_forward_length": inner, "attention.head_count": heads,
            "attention.head_count_kv": kv_heads, "attention.key_length": key_length, "attention.value_length": key_length,
            "rope.dimension_count": key_length, "rope.freq_base": 1000000.0, "attention.sliding_window": window,
            "altup.num_inputs": streams, "altup.active_idx": 0, "embedding_length_per_layer_input": inputs,
            "attention.shared_kv_layers": max(layers - 20, 0)}
    model = begin(path, arch, dtype, seed, keys, tied=True)
    model.matrix("altup_proj.weight", streams - 1, width, width)
    model.matrix("altup_unembd_proj.weight", streams - 1, width, width)
    model.matrix("per_layer_token_embd.weight", 128, inputs * layers)
    model.matrix("per_layer_model_proj.weight", inputs * layers, width)
    model.norm("per_layer_proj_norm", inputs)
    for layer in range(layers):
        name = f"blk.{layer}."
        for part in ("attn_norm", "ffn_norm", "altup_router_norm", "altup_correct_scale"):
            model.norm(name + part, width)
        # So many large branches would multiply rounding errors.
        for part in ("post_attention_norm", "post_ffw_norm", "post_norm", "laurel_post_norm"):
            model.vector(f"{name}{part}.weight", width, middle=0.4, spread=0.2)
        attention(model, name, width, heads, kv_heads, key_length, False, False, None, 1.0)
        # Scores are not divided by the root of the length.
        model.vector(name + "attn_q_norm.weight", key_length, middle=0.5, spread=0.2)
        model.vector(name + "attn_k_norm.weight", key_length, middle=0.5, spread=0.2)
        feed_forward(model, name, width, inner)
        for part, rows, columns, size in (
                ("inp_gate", inputs, width, 1.0), ("proj", width, inputs, 1.0), ("laurel_l", rank, width, 1.0),
                ("laurel_r", width, rank, 1.0), ("altup_router", streams, width, 20.0),
                ("altup_predict_coef", streams * streams, streams, 0.3), ("altup_correct_coef", streams, streams, 0.3)):
            small = part.startswith("altup")
            model.matrix(f"{name}{part}.weight", rows, columns, size=size, dtype="F32" if small else None)
    model.finish()


WRITERS = {"lfm2": lfm2, "lfm2moe": lfm2, "mamba2": mamba2, "llama4": llama4, "gemma3n": gemma3n}


def cases():
    """Architecture, weight type and options of each model."""
    yield "lfm2", "F32", {}
    yield "lfm2", "F32", dict(heads=5, key_length=24, kernel=4, layers=7, tied=False)
    yield "lfm2", "F32", dict(heads=4, kv_heads=2, window=9)
    yield "lfm2", "Q8_0", dict(heads=4, kv_heads=4, layers=3)
    yield "lfm2moe", "F32", dict(experts=6)
    yield "lfm2moe", "F32", dict(experts=9, used=4, heads=4, kv_heads=2, dense=2, kernel=2)
    yield "lfm2moe", "F16", dict(experts=5, used=5, dense=0, tied=False)
    yield "mamba2", "F32", {}
    yield "mamba2", "F32", dict(width=80, heads=5, groups=1, state=32, tied=True, layers=5)
    yield "mamba2", "Q8_0", dict(heads=8, groups=4, kernel=3)
    yield "llama4", "F32", {}
    yield "llama4", "F32", dict(experts=8, used=3, step=2, heads=6, kv_heads=2, tied=True, factors=True)
    yield "llama4", "F32", dict(experts=128, step=2, layers=4)
    yield "llama4", "Q8_0", dict(experts=5, layers=4, width=128, heads=4)
    yield "gemma3n", "F32", dict(layers=6)
    yield "gemma3n", "F32", {}
    yield "gemma3n", "F32", dict(layers=26, heads=3, kv_heads=3, width=96, inner=4096)
    yield "gemma3n", "Q8_0", dict(width=128, heads=4, kv_heads=2, inner=4096)
