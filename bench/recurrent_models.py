"""Random small models with recurrent layers, as the package gguf writes them: what bench/agree_with_llama_cpp.py compares."""
from moe_models import YARN, Random


def write(path, arch, dtype, seed, width=96, heads=3, kv_heads=1, key_length=32, rope=8, key_heads=2, value_heads=6, state=16,
          layers=5, feed_forward=160, vocabulary=128, tied=False, experts=0, used=2, grouped=False, legacy=False,
          recurrent=True, more=None):
    """A model of linear attention by the gated delta rule; every fourth layer has attention with an output gate."""
    assert recurrent
    model = Random(path, arch, seed, dtype)
    keys, values, inner, shared = key_heads * state, value_heads * state, 64, 96
    model.keys({"block_count": layers, "context_length": 4096, "embedding_length": width, "feed_forward_length": feed_forward,
                "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": key_length,
                "attention.value_length": key_length, "rope.dimension_count": rope, "rope.freq_base": 10000.0,
                "rope.dimension_sections": [rope // 2 - 2, 1, 1, 0], "attention.layer_norm_rms_epsilon": 1e-6,
                "vocab_size": vocabulary, "ssm.conv_kernel": 4, "ssm.state_size": state, "ssm.group_count": key_heads,
                "ssm.time_step_rank": value_heads, "ssm.inner_size": values})
    if experts:
        model.keys({"expert_count": experts, "expert_used_count": used, "expert_feed_forward_length": inner,
                    "expert_shared_feed_forward_length": shared})
    model.keys(more or {})
    model.writer.add_tokenizer_model("no_vocab")
    model.matrix("token_embd.weight", vocabulary, width)
    model.norm("output_norm", width)
    if not tied:
        model.matrix("output.weight", vocabulary, width)
    for layer in range(layers):
        name = f"blk.{layer}."
        model.norm(name + "attn_norm", width)
        model.norm(name + "post_attention_norm", width)
        if layer % 4 == 3:
            model.matrix(name + "attn_q.weight", 2 * heads * key_length, width, size=2.0)
            model.matrix(name + "attn_k.weight", kv_heads * key_length, width, size=2.0)
            model.matrix(name + "attn_v.weight", kv_heads * key_length, width)
            model.matrix(name + "attn_output.weight", width, heads * key_length)
            model.vector(name + "attn_q_norm.weight", key_length, middle=1.5)
            model.vector(name + "attn_k_norm.weight", key_length, middle=1.5)
        else:
            delta_rule(model, name, width, keys, values, value_heads, state, grouped, legacy)
        if experts:
            mixture(model, name, width, experts, inner, shared)
        else:
            for part, rows, columns in (("gate", feed_forward, width), ("up", feed_forward, width), ("down", width, feed_forward)):
                model.matrix(f"{name}ffn_{part}.weight", rows, columns)
    model.finish()


def delta_rule(model, name, width, keys, values, value_heads, state, grouped, legacy):
    if legacy:
        model.matrix(name + "ssm_in.weight", 2 * keys + 2 * values, width)
    else:
        model.matrix(name + "attn_qkv.weight", 2 * keys + values, width)
        model.matrix(name + "attn_gate.weight", values, width)
    if grouped:
        model.matrix(name + "ssm_ba.weight", 2 * value_heads, width)
    else:
        model.matrix(name + "ssm_beta.weight", value_heads, width)
        model.matrix(name + "ssm_alpha.weight", value_heads, width)
    model.matrix(name + "ssm_conv1d.weight", 2 * keys + values, 4, dtype="F32")
    model.vector(name + "ssm_dt.bias", value_heads, spread=1.0)
    model.vector(name + "ssm_a", value_heads, middle=-0.5, spread=0.4)
    model.norm(name + "ssm_norm", state)
    model.matrix(name + "ssm_out.weight", width, values)


def mixture(model, name, width, experts, inner, shared):
    model.matrix(name + "ffn_gate_inp.weight", experts, width, size=2.0, dtype="F32")
    for part, rows, columns in (("gate", inner, width), ("up", inner, width), ("down", width, inner)):
        model.matrix(f"{name}ffn_{part}_exps.weight", experts, rows, columns)
    model.vector(name + "ffn_gate_inp_shexp.weight", width, spread=0.3)
    for part, rows, columns in (("gate", shared, width), ("up", shared, width), ("down", width, shared)):
        model.matrix(f"{name}ffn_{part}_shexp.weight", rows, columns)


def cases():
    """Architecture, weight type and options of each model."""
    odd = dict(heads=5, key_heads=1, value_heads=3, state=32)
    yield "qwen35", "F32", dict(recurrent=True)
    yield "qwen35", "F32", dict(recurrent=True, tied=True, **odd)
    yield "qwen35", "F32", dict(recurrent=True, key_heads=4, value_heads=4, layers=9)
    yield "qwen35", "Q8_0", dict(recurrent=True, layers=5)
    yield "qwen35", "F32", dict(recurrent=True, more=YARN)
    yield "qwen35moe", "F32", dict(recurrent=True, experts=6)
    yield "qwen35moe", "F32", dict(recurrent=True, experts=5, used=4, tied=True, **odd)
    yield "qwen35moe", "F16", dict(recurrent=True, experts=8, used=8, layers=4)
    yield "qwen3next", "F32", dict(recurrent=True, experts=9, used=3, grouped=True)
    yield "qwen3next", "F32", dict(recurrent=True, experts=7, used=1, grouped=True, **odd)
    yield "qwen3next", "F32", dict(recurrent=True, experts=6, grouped=True, legacy=True, key_heads=3, value_heads=6)
    yield "qwen3next", "F32", dict(recurrent=True, experts=8, grouped=True, tied=True, more=YARN)


def scaled():
    """The same with experts and scaled rotary embedding."""
    yield "qwen35moe", "F32", dict(recurrent=True, experts=6, more=YARN)
