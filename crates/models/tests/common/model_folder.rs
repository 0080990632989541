//! Folders of safetensors for tests.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

/// A tensor of a folder.
#[derive(Clone)]
pub struct TestTensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

impl TestTensor {
    /// Values that differ everywhere, and are exact in every type.
    pub fn new(name: &str, shape: &[usize]) -> TestTensor {
        let count: usize = shape.iter().product();
        let seed = name.bytes().fold(7u32, |seed, byte| seed.wrapping_mul(31).wrapping_add(u32::from(byte)));
        let value = |index: usize| {
            ((seed.wrapping_add(index as u32).wrapping_mul(2_654_435_761) >> 24) as f32 - 128.0) / 64.0
        };
        TestTensor { name: name.to_owned(), shape: shape.to_vec(), values: (0..count).map(value).collect() }
    }
}

/// The bytes of a safetensors file of type F32, F16 or BF16.
pub fn safetensors(tensors: &[TestTensor], dtype: &str) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for tensor in tensors {
        let start = data.len();
        for value in &tensor.values {
            match dtype {
                "F32" => data.extend(value.to_le_bytes()),
                "F16" => data.extend(half::f16::from_f32(*value).to_le_bytes()),
                "BF16" => data.extend(half::bf16::from_f32(*value).to_le_bytes()),
                other => panic!("{other}"),
            }
        }
        let entry = json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": [start, data.len()] });
        header.insert(tensor.name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

/// The names and shapes of a small Llama: two layers, 8 wide, two heads, one of keys and values.
pub fn llama_tensors() -> Vec<TestTensor> {
    let mut tensors = vec![
        TestTensor::new("model.embed_tokens.weight", &[300, 8]),
        TestTensor::new("model.norm.weight", &[8]),
        TestTensor::new("lm_head.weight", &[300, 8]),
    ];
    for layer in 0..2 {
        for (part, shape) in [
            ("input_layernorm", &[8][..]),
            ("post_attention_layernorm", &[8]),
            ("self_attn.q_proj", &[8, 8]),
            ("self_attn.k_proj", &[4, 8]),
            ("self_attn.v_proj", &[4, 8]),
            ("self_attn.o_proj", &[8, 8]),
            ("mlp.gate_proj", &[16, 8]),
            ("mlp.up_proj", &[16, 8]),
            ("mlp.down_proj", &[8, 16]),
        ] {
            tensors.push(TestTensor::new(&format!("model.layers.{layer}.{part}.weight"), shape));
        }
    }
    tensors
}

/// Its configuration.
pub fn llama_config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "hidden_act": "silu",
    })
}

/// A tokenizer of bytes, two merges and an end-of-text token.
pub fn byte_tokenizer() -> Value {
    let mut next = 256u32;
    let letters = (0..=255u8).map(|byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap()
        }
    });
    let mut vocabulary: serde_json::Map<String, Value> =
        letters.enumerate().map(|(id, letter)| (letter.to_string(), id.into())).collect();
    vocabulary.insert("he".to_owned(), 256.into());
    vocabulary.insert("hel".to_owned(), 257.into());
    json!({
        "added_tokens": [{ "id": 258, "content": "<|endoftext|>", "special": true }],
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Digits", "individual_digits": true }, { "type": "ByteLevel", "use_regex": true } ] },
        "model": { "type": "BPE", "vocab": vocabulary, "merges": ["h e", "he l"] },
    })
}

/// Writes a folder.
pub fn write(folder: &Path, config: &Value, tensors: &[TestTensor], dtype: &str) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    fs::write(folder.join("tokenizer.json"), byte_tokenizer().to_string()).unwrap();
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let special = json!({ "eos_token": "<|endoftext|>", "add_bos_token": false, "chat_template": template });
    fs::write(folder.join("tokenizer_config.json"), special.to_string()).unwrap();
    fs::write(folder.join("model.safetensors"), safetensors(tensors, dtype)).unwrap();
}
