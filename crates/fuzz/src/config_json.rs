//! Converts a small fixed set of tensors with any config.json.

use std::ops::ControlFlow;
use std::sync::LazyLock;

use quadriga_models::convert::{ConvertOptions, convert};

/// A folder with the tensors of a Llama model of one layer, 8 wide.
static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let layer = "model.layers.0.";
    let tensors: &[(&str, &[usize])] = &[
        ("model.embed_tokens.weight", &[16, 8]),
        ("model.norm.weight", &[8]),
        (&format!("{layer}input_layernorm.weight"), &[8]),
        (&format!("{layer}post_attention_layernorm.weight"), &[8]),
        (&format!("{layer}self_attn.q_proj.weight"), &[8, 8]),
        (&format!("{layer}self_attn.k_proj.weight"), &[8, 8]),
        (&format!("{layer}self_attn.v_proj.weight"), &[8, 8]),
        (&format!("{layer}self_attn.o_proj.weight"), &[8, 8]),
        (&format!("{layer}mlp.gate_proj.weight"), &[16, 8]),
        (&format!("{layer}mlp.up_proj.weight"), &[16, 8]),
        (&format!("{layer}mlp.down_proj.weight"), &[8, 16]),
    ];
    let mut at = 0;
    let entries: Vec<String> = tensors
        .iter()
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
});

/// Checks one input.
pub fn run(bytes: &[u8]) {
    let folder = FOLDER.path();
    std::fs::write(folder.join("config.json"), bytes).expect("a file can be written");
    let options = ConvertOptions { vocabulary: false, threads: 1, ..ConvertOptions::default() };
    let output = folder.join("out.gguf");
    match convert(folder, &output, &options, &mut |_| ControlFlow::Continue(())) {
        Ok(_) => drop(quadriga_gguf::File::open(&output).expect("the file is valid")),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
