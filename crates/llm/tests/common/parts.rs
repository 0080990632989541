//! The contents of model files.

use quadriga_conformance::Rng;
use quadriga_gguf::{File, OwnedValue, Writer};
use quadriga_graph::{DType, blocks};
use quadriga_llm::Model;

/// The contents of a model file, which a test can change before it is written.
pub struct Parts {
    pub keys: Vec<(String, OwnedValue)>,
    pub tensors: Vec<(String, DType, Vec<usize>, Vec<u8>)>,
    pub(super) rng: Rng,
}

impl Parts {
    /// Sets a key, in place of what it was.
    pub fn set(&mut self, key: &str, value: impl Into<OwnedValue>) -> &mut Parts {
        self.keys.retain(|(name, _)| name != key);
        self.keys.push((key.to_owned(), value.into()));
        self
    }

    /// Takes a key or tensor away.
    pub fn remove(&mut self, name: &str) -> &mut Parts {
        let before = self.keys.len() + self.tensors.len();
        self.keys.retain(|(key, _)| key != name);
        self.tensors.retain(|(tensor, ..)| tensor != name);
        assert_eq!(self.keys.len() + self.tensors.len() + 1, before, "{name} is not there");
        self
    }

    /// A matrix whose product with a vector is about `size` times as large as it.
    pub fn matrix(&mut self, name: &str, dtype: DType, [rows, cols]: [usize; 2], size: f64) {
        let spread = size / (cols as f64).sqrt();
        let mut bytes = vec![0; dtype.row_bytes(cols).unwrap() * rows];
        let limit = spread * 3f64.sqrt();
        let values: Vec<f32> = (0..rows * cols).map(|_| self.rng.uniform(-limit, limit) as f32).collect();
        if blocks::quantize(dtype, &values, &mut bytes).is_err() {
            random_blocks(dtype, &mut bytes, rows * cols, spread, &mut self.rng);
        }
        self.tensors.push((name.to_owned(), dtype, vec![rows, cols], bytes));
    }

    /// F32 values within `spread` of `middle`.
    pub fn vector(&mut self, name: &str, len: usize, middle: f64, spread: f64) {
        let bytes = (0..len)
            .flat_map(|_| (self.rng.uniform(middle - spread, middle + spread) as f32).to_le_bytes())
            .collect();
        self.tensors.push((name.to_owned(), DType::F32, vec![len], bytes));
    }

    /// The printable letters of ASCII (a space is written `Ġ`), two longer tokens, and three special ones: 100 tokens.
    pub(super) fn add_vocabulary(&mut self) {
        let mut tokens: Vec<String> = ('!'..='~').map(String::from).collect();
        tokens.extend(["Ġ", "<|start|>", "<|end|>", "the", "Ġthe", "<|x|>"].map(String::from));
        assert_eq!(tokens.len(), 100);
        let types: Vec<i32> =
            tokens.iter().map(|token| if token.starts_with("<|") { 3 } else { 1 }).collect();
        let texts: Vec<&str> = tokens.iter().map(String::as_str).collect();
        let end = texts.iter().position(|token| *token == "<|end|>").unwrap() as u32;
        self.set("tokenizer.ggml.model", "gpt2");
        self.set("tokenizer.ggml.pre", "gpt-2");
        self.set("tokenizer.ggml.tokens", texts);
        self.set("tokenizer.ggml.token_type", types);
        self.set("tokenizer.ggml.merges", vec!["t h", "th e", "Ġ the"]);
        self.set("tokenizer.ggml.eos_token_id", end);
        self.set(
            "tokenizer.chat_template",
            "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}\
             {% if add_generation_prompt %}<|start|>{% endif %}",
        );
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        for (key, value) in &self.keys {
            writer.set(key, value.clone()).unwrap();
        }
        for (name, dtype, dims, bytes) in &self.tensors {
            match dims[..] {
                [a] => writer.tensor_bytes(name, *dtype, [a], bytes).unwrap(),
                [a, b] => writer.tensor_bytes(name, *dtype, [a, b], bytes).unwrap(),
                [a, b, c] => writer.tensor_bytes(name, *dtype, [a, b, c], bytes).unwrap(),
                _ => panic!("{name} has {} dimensions", dims.len()),
            };
        }
        let mut out = Vec::new();
        writer.write_to(&mut out).unwrap();
        out
    }

    /// The model, or what is wrong with it.
    pub fn model(&self) -> Result<Model, quadriga_llm::Error> {
        Model::from_file(File::from_bytes(self.bytes())?)
    }
}

/// Random blocks of types that have no quantizer, with scales that give the requested standard deviation.
fn random_blocks(dtype: DType, bytes: &mut [u8], count: usize, spread: f64, rng: &mut Rng) {
    bytes.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
    let set = |bytes: &mut [u8], unit: f64| {
        for block in bytes.chunks_mut(dtype.block_bytes()) {
            blocks::set_scale(dtype, block, unit as f32);
        }
    };
    set(bytes, 1.0);
    let mut values = vec![0f32; count];
    blocks::dequantize(dtype, bytes, &mut values).unwrap();
    let square: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / count as f64;
    set(bytes, spread / square.sqrt());
}
