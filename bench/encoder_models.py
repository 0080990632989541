"""Random small encoders, as the package gguf writes them: what bench/agree_with_llama_cpp.py compares."""
from moe_models import Random

# By the number in files.
POOLINGS = (None, "mean", "cls", "last", "rank")


def write(path, arch, dtype, seed, width=96, heads=3, layers=2, inner=160, vocabulary=128, fused=False, pooling=None, labels=1,
          dense_head=True, encoder=True):
    """BERT, with biases and embedded positions, or Nomic's, with RoPE and gates; with the pooling "rank" a classification head of
    so many scores, behind a dense layer or not."""
    assert encoder
    model = Random(path, arch, seed, dtype)
    bert = arch == "bert"
    model.keys({"block_count": layers, "context_length": 64, "embedding_length": width, "feed_forward_length": inner,
                "attention.head_count": heads, "attention.layer_norm_epsilon": 1e-5, "attention.causal": False,
                "pooling_type": POOLINGS.index(pooling), "vocab_size": vocabulary, "rope.freq_base": 1000.0})
    model.writer.add_tokenizer_model("no_vocab")
    model.writer.add_token_type_count(2)
    model.matrix("token_embd.weight", vocabulary, width, size=3.0)
    model.matrix("token_types.weight", 2, width, size=3.0, dtype="F32")
    if bert:
        model.matrix("position_embd.weight", 64, width, size=3.0, dtype="F32")

    def norm(name):
        model.norm(name, width)
        model.vector(name + ".bias", width)

    def linear(name, rows, columns, size=1.0):
        model.matrix(name + ".weight", rows, columns, size=size)
        if bert:
            model.vector(name + ".bias", rows)

    norm("token_embd_norm")
    for layer in range(layers):
        name = f"blk.{layer}."
        if fused:
            linear(name + "attn_qkv", 3 * width, width, 1.5)
        else:
            for part in ("attn_q", "attn_k", "attn_v"):
                linear(name + part, width, width, 1.5)
        linear(name + "attn_output", width, width)
        norm(name + "attn_output_norm")
        for part in ["ffn_up"] if bert else ["ffn_gate", "ffn_up"]:
            linear(name + part, inner, width)
        linear(name + "ffn_down", width, inner)
        norm(name + "layer_output_norm")
    if pooling == "rank":
        if labels > 1:
            model.keys({"classifier.output_labels": [f"label {number}" for number in range(labels)]})
        for name, rows in [("cls", width)] * dense_head + [("cls.output", labels)]:
            model.matrix(name + ".weight", rows, width)
            model.vector(name + ".bias", rows)
    model.finish()


def cases():
    """Architecture, weight type and options of each model."""
    yield "bert", "F32", dict(encoder=True)
    yield "bert", "F32", dict(encoder=True, width=80, heads=5, layers=5)
    yield "bert", "Q8_0", dict(encoder=True, width=128, heads=4, inner=256)
    yield "nomic-bert", "F32", dict(encoder=True, fused=True)
    yield "nomic-bert", "F32", dict(encoder=True, fused=True, width=80, heads=5, layers=5)
    yield "nomic-bert", "Q8_0", dict(encoder=True, fused=True, width=128, heads=4, inner=256)
    yield "nomic-bert", "F32", dict(encoder=True, layers=3)
    yield "nomic-bert", "Q8_0", dict(encoder=True, width=128, heads=4, inner=256)
    for arch, fused in (("bert", False), ("nomic-bert", True)):
        for pooling in ("mean", "cls", "last"):
            yield arch, "F32", dict(encoder=True, pooling=pooling, fused=fused, layers=3)
        yield arch, "Q8_0", dict(encoder=True, pooling="mean", fused=fused, width=128, heads=4, inner=256)
    yield "bert", "F32", dict(encoder=True, pooling="rank")
    yield "bert", "F32", dict(encoder=True, pooling="rank", labels=3, layers=3)
    yield "bert", "F32", dict(encoder=True, pooling="rank", labels=3, dense_head=False, width=80, heads=5)
    yield "bert", "Q8_0", dict(encoder=True, pooling="rank", labels=5, width=128, heads=4, inner=256)
