//! Converts small fixed sets of tensors with any config.json.

use std::ops::ControlFlow;
use std::sync::LazyLock;

use quadriga_models::convert::{ConvertOptions, convert};

/// Names and shapes of tensors.
type Tensors = &'static [(&'static str, &'static [usize])];

/// The tensors of models of one layer, 8 wide: each family reads other keys.
const MODELS: &[&[Tensors]] = &[&[TEXT, MLP, LLAMA], &[TEXT, MLP, QWEN35], &[TEXT, MLP, DEEPSEEK], &[MAMBA]];

const TEXT: Tensors = &[
    ("model.embed_tokens.weight", &[16, 8]),
    ("model.norm.weight", &[8]),
    ("model.layers.0.input_layernorm.weight", &[8]),
    ("model.layers.0.post_attention_layernorm.weight", &[8]),
];

const MLP: Tensors = &[
    ("model.layers.0.mlp.gate_proj.weight", &[16, 8]),
    ("model.layers.0.mlp.up_proj.weight", &[16, 8]),
    ("model.layers.0.mlp.down_proj.weight", &[8, 16]),
];

const LLAMA: Tensors = &[
    ("model.layers.0.self_attn.q_proj.weight", &[8, 8]),
    ("model.layers.0.self_attn.k_proj.weight", &[8, 8]),
    ("model.layers.0.self_attn.v_proj.weight", &[8, 8]),
    ("model.layers.0.self_attn.o_proj.weight", &[8, 8]),
];

const QWEN35: Tensors = &[
    ("model.layers.0.linear_attn.A_log", &[2]),
    ("model.layers.0.linear_attn.dt_bias", &[2]),
    ("model.layers.0.linear_attn.conv1d.weight", &[24, 1, 4]),
    ("model.layers.0.linear_attn.in_proj_a.weight", &[2, 8]),
    ("model.layers.0.linear_attn.in_proj_b.weight", &[2, 8]),
    ("model.layers.0.linear_attn.in_proj_qkv.weight", &[24, 8]),
    ("model.layers.0.linear_attn.in_proj_z.weight", &[8, 8]),
    ("model.layers.0.linear_attn.norm.weight", &[4]),
    ("model.layers.0.linear_attn.out_proj.weight", &[8, 8]),
];

const DEEPSEEK: Tensors = &[
    ("model.layers.0.self_attn.q_proj.weight", &[12, 8]),
    ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", &[6, 8]),
    ("model.layers.0.self_attn.kv_a_layernorm.weight", &[4]),
    ("model.layers.0.self_attn.kv_b_proj.weight", &[16, 4]),
    ("model.layers.0.self_attn.o_proj.weight", &[8, 8]),
];

const MAMBA: Tensors = &[
    ("backbone.embeddings.weight", &[16, 8]),
    ("backbone.norm_f.weight", &[8]),
    ("backbone.layers.0.norm.weight", &[8]),
    ("backbone.layers.0.mixer.in_proj.weight", &[42, 8]),
    ("backbone.layers.0.mixer.conv1d.weight", &[24, 1, 4]),
    ("backbone.layers.0.mixer.conv1d.bias", &[24]),
    ("backbone.layers.0.mixer.dt_bias", &[2]),
    ("backbone.layers.0.mixer.A_log", &[2]),
    ("backbone.layers.0.mixer.D", &[2]),
    ("backbone.layers.0.mixer.norm.weight", &[16]),
    ("backbone.layers.0.mixer.out_proj.weight", &[8, 16]),
];

/// A folder for each model.
static FOLDERS: LazyLock<Vec<tempfile::TempDir>> =
    LazyLock::new(|| MODELS.iter().map(|parts| folder(parts)).collect());

/// A folder with a safetensors file of zeros.
fn folder(parts: &[Tensors]) -> tempfile::TempDir {
    let mut at = 0;
    let entries: Vec<String> = parts
        .iter()
        .flat_map(|tensors| tensors.iter())
        .map(|(name, shape)| {
            let bytes = 4 * shape.iter().product::<usize>();
            at += bytes;
            format!(
                "{name:?}:{{\"dtype\":\"F32\",\"shape\":{shape:?},\"data_offsets\":[{},{at}]}}",
                at - bytes
            )
        })
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(std::iter::repeat_n(0, at));
    std::fs::write(folder.path().join("model.safetensors"), file).expect("a file can be written");
    folder
}

/// Checks one input.
pub fn run(bytes: &[u8]) {
    for folder in FOLDERS.iter() {
        let folder = folder.path();
        std::fs::write(folder.join("config.json"), bytes).expect("a file can be written");
        let options = ConvertOptions { vocabulary: false, threads: 1, ..ConvertOptions::default() };
        let output = folder.join("out.gguf");
        match convert(folder, &output, &options, &mut |_| ControlFlow::Continue(())) {
            Ok(_) => drop(quadriga_gguf::File::open(&output).expect("the file is valid")),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}
