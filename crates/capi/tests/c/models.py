"""Writes the models of text.c into a folder: a reranker, made of an encoder, an adapter, and one of PEFT. `models.py ENCODER FOLDER`."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np

encoder, folder = gguf.GGUFReader(sys.argv[1]), Path(sys.argv[2])

writer = gguf.GGUFWriter(folder / "reranker.gguf", "bert")
for field in encoder.fields.values():
    if field.name.startswith("GGUF.") or field.name == "general.architecture":
        continue
    kind, value = field.types[0], field.contents()
    if kind != gguf.GGUFValueType.ARRAY:
        writer.add_key_value(field.name, value, kind)
    elif value:  # the writer refuses empty lists
        writer.add_key_value(field.name, value, kind, field.types[-1])
for tensor in encoder.tensors:
    writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
width = int(encoder.get_field("bert.embedding_length").contents())
writer.add_tensor("cls.output.weight", np.random.default_rng(1).standard_normal((1, width), dtype=np.float32))
writer.add_tensor("cls.output.bias", np.array([3], dtype=np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

# Rank 2, on one matrix of 64 × 64; the elements of A are 0, 1/256, 2/256 …
writer = gguf.GGUFWriter(folder / "adapter.gguf", "llama")
writer.add_string("general.type", "adapter")
writer.add_string("adapter.type", "lora")
writer.add_float32("adapter.lora.alpha", 2.0)
writer.add_tensor("blk.0.attn_q.weight.lora_a", (np.arange(128, dtype=np.float32) / 256).reshape(2, 64))
writer.add_tensor("blk.0.attn_q.weight.lora_b", np.random.default_rng(2).standard_normal((64, 2), dtype=np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

# The same kind of matrices as PEFT saves them.
peft = folder / "peft"
peft.mkdir(exist_ok=True)
(peft / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
header, data = {}, b""
for end, shape in (("A", (2, 64)), ("B", (64, 2))):
    matrix = np.random.default_rng(3).standard_normal(shape, dtype=np.float32).tobytes()
    name = f"base_model.model.model.layers.0.self_attn.q_proj.lora_{end}.weight"
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(matrix)]}
    data += matrix
text = json.dumps(header).encode()
(peft / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
