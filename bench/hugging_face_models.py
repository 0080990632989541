#!/usr/bin/env python3
"""Writes small random models of each architecture as Hugging Face's transformers save them, with their logits.

usage: hugging_face_models.py FOLDER [CLASS…]

Needs the PyPI packages torch, transformers and safetensors. Each model becomes FOLDER/CLASS with config.json and
model.safetensors, and FOLDER/CLASS/logits.json: tokens and the logits after each of them (of encoders: the vectors).
"""
import json
import os
import sys

import safetensors.torch
import torch
import transformers

TOKENS = [(k * 37 + 11) % 128 for k in range(24)]
BASE = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
            tie_word_embeddings=False)
MOE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
# Rotary dimensions in sections for text and pictures: for texts alone they do not matter.
MROPE = dict(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]})
LINEAR = dict(num_hidden_layers=4, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
              linear_value_head_dim=16, linear_conv_kernel_dim=4,
              layer_types=["linear_attention"] * 3 + ["full_attention"])
MLA = dict(num_key_value_heads=4, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1,
           n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
# Class of the model, with a suffix where it has several: class of its configuration, and what differs from BASE.
MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", dict(rope_parameters=LLAMA3)),
    "MistralForCausalLM": ("MistralConfig", dict(sliding_window=8, head_dim=16)),
    "MixtralForCausalLM": ("MixtralConfig", dict(MOE, sliding_window=None)),
    "SmolLM3ForCausalLM": ("SmolLM3Config", dict(num_hidden_layers=5, no_rope_layer_interval=4)),
    "GraniteForCausalLM": ("GraniteConfig", dict(attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=5.0)),
    "Qwen2ForCausalLM": ("Qwen2Config", dict(rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64})),
    "Qwen3ForCausalLM": ("Qwen3Config", dict(head_dim=32, tie_word_embeddings=True)),
    "Phi3ForCausalLM": ("Phi3Config", {}),
    "Olmo2ForCausalLM": ("Olmo2Config", {}),
    "Olmo3ForCausalLM": ("Olmo3Config", dict(num_hidden_layers=4, sliding_window=8)),
    "CohereForCausalLM": ("CohereConfig", dict(logit_scale=0.25, tie_word_embeddings=True)),
    "Glm4ForCausalLM": ("Glm4Config", dict(head_dim=16, attention_bias=True)),
    "FalconForCausalLM": ("FalconConfig", dict(new_decoder_architecture=True, num_kv_heads=2, bias=False, alibi=False, parallel_attn=True)),
    "OPTForCausalLM": ("OPTConfig", dict(ffn_dim=96, word_embed_proj_dim=64)),
    "GemmaForCausalLM": ("GemmaConfig", dict(head_dim=16, tie_word_embeddings=True)),
    "Gemma2ForCausalLM": ("Gemma2Config", dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=8, tie_word_embeddings=True)),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=8, num_hidden_layers=7, tie_word_embeddings=True)),
    # llama.cpp knows the two published shapes only: 10 sparse layers, and 20 with keys and values of their own.
    "Gemma3nForCausalLM": ("Gemma3nTextConfig", dict(head_dim=16, sliding_window=8, num_hidden_layers=30, vocab_size_per_layer_input=128,
                           hidden_size_per_layer_input=256, num_kv_shared_layers=10, laurel_rank=64, intermediate_size=4096,
                           activation_sparsity_pattern=[0.95] * 10 + [0.0] * 20, layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 6,
                           tie_word_embeddings=True)),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", dict(MOE, shared_expert_intermediate_size=48, decoder_sparse_step=1)),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", dict(MOE, head_dim=16, norm_topk_prob=True, decoder_sparse_step=1)),
    "OlmoeForCausalLM": ("OlmoeConfig", dict(MOE, intermediate_size=32, num_key_value_heads=4)),
    "GraniteMoeForCausalLM": ("GraniteMoeConfig", dict(MOE, intermediate_size=32, attention_multiplier=0.2)),
    "GraniteMoeSharedForCausalLM": ("GraniteMoeSharedConfig", dict(MOE, intermediate_size=32, shared_intermediate_size=48)),
    "GptOssForCausalLM": ("GptOssConfig", dict(MOE, head_dim=16, intermediate_size=32, sliding_window=8, num_hidden_layers=4,
                          rope_parameters={"rope_type": "default", "rope_theta": 150000.0})),
    "Glm4MoeForCausalLM": ("Glm4MoeConfig", dict(MOE, head_dim=16, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, use_qk_norm=True, attention_bias=True)),
    "Llama4ForCausalLM": ("Llama4TextConfig", dict(MOE, num_experts_per_tok=1, intermediate_size=32, intermediate_size_mlp=96, head_dim=16, num_hidden_layers=4,
                          interleave_moe_layer_step=1, attention_chunk_size=8192, use_qk_norm=True)),
    # llama.cpp takes 27 layers for the sign of a model without low-rank queries.
    "DeepseekV2ForCausalLM": ("DeepseekV2Config", dict(MOE, **MLA, num_hidden_layers=27, q_lora_rank=None, head_dim=8, topk_method="greedy")),
    # DeepSeek V2 of full size: the score of a group is that of its best expert.
    "DeepseekV2ForCausalLM-groups": ("DeepseekV2Config", {**MOE, **MLA, "num_hidden_layers": 3, "q_lora_rank": 24, "head_dim": 8, "n_routed_experts": 16, "num_experts": 16, "num_local_experts": 16,
                                     "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", dict(MOE, **MLA, q_lora_rank=24, norm_topk_prob=True, routed_scaling_factor=2.5)),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", dict(MOE, **LINEAR, shared_expert_intermediate_size=32)),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", {**LINEAR, **MROPE}),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeTextConfig", {**MOE, **LINEAR, **MROPE, "shared_expert_intermediate_size": 32}),
    "Lfm2ForCausalLM": ("Lfm2Config", dict(conv_L_cache=3, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False)),
    "Lfm2MoeForCausalLM": ("Lfm2MoeConfig", dict(MOE, conv_L_cache=3, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1)),
    "Mamba2ForCausalLM": ("Mamba2Config", dict(state_size=16, num_heads=8, head_dim=16, n_groups=1, expand=2, conv_kernel=4, chunk_size=32)),
    "BertModel": ("BertConfig", {}),
}


def add_unused(path, config):
    """Layers that use the keys and values of others: published files have matrices of their own for them, and llama.cpp asks for those."""
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    if not shared:
        return
    file = os.path.join(path, "model.safetensors")
    tensors = safetensors.torch.load_file(file)
    for layer in range(config.num_hidden_layers - shared, config.num_hidden_layers):
        for part in ("k_proj", "v_proj", "k_norm"):
            name = f"model.layers.{{}}.self_attn.{part}.weight"
            tensors.setdefault(name.format(layer), tensors[name.format(0)].clone())
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def write(folder, name):
    """Saves one model with its logits."""
    config_name, options = MODELS[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, config_name)(**{**BASE, **options})
    config._attn_implementation = "eager"
    model = getattr(transformers, name.split("-")[0])(config).eval().float()
    with torch.no_grad():
        # Only what is saved: other buffers are constants of the architecture.
        for key, value in model.state_dict(keep_vars=True).items():
            if not value.is_floating_point() or "inv_freq" in key or "A_log" in key or key.endswith("embed_scale"):
                continue
            if value.dim() < 2:
                centre = 0.0 if key.endswith(("bias", "sinks")) or "layernorm" not in key and "norm" not in key else float(value.mean())
                value.copy_(centre + 0.3 * torch.randn_like(value))
            else:
                value.copy_(torch.randn_like(value) * 1.5 / value.shape[-1] ** 0.5)
        tokens = torch.tensor([TOKENS])
        result = model(tokens, use_cache=False) if name != "BertModel" else model(tokens)
        rows = result.logits[0] if hasattr(result, "logits") else result.last_hidden_state[0]
    path = os.path.join(folder, name)
    model.save_pretrained(path)
    add_unused(path, config)
    with open(os.path.join(path, "logits.json"), "w") as out:
        json.dump({"tokens": TOKENS, "rows": rows.double().tolist()}, out)


def main():
    folder, names = sys.argv[1], sys.argv[2:] or MODELS
    for name in names:
        try:
            write(folder, name)
            print(f"{name}: written", flush=True)
        except Exception as error:  # Classes differ between versions of transformers.
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


if __name__ == "__main__":
    main()
