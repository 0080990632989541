//! `convert`, `quantize`, `lora`, `split` and `merge`: copies and pruned layers, the default model by its name, memory, and SIGTERM.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::fs;
use std::path::Path;

use crate::common::{Fixture, output, quadriga};
use quadriga_gguf::File;
use quadriga_graph::DType;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_copy_keeps_all_tensors_and_layers_can_be_pruned() {
    let fixture = Fixture::new(&["--type", "q8_0", "--layers", "3"]);
    let (model, out) = (text(&fixture.model), fixture.path("out.gguf"));
    let copied = output(&mut quadriga(["quantize", model, text(&out), "copy"])).success();
    assert!(!copied.err.contains("KL divergence"), "{copied:?}");
    let (old, new) = (File::open(model).unwrap(), File::open(&out).unwrap());
    assert!(old.tensors().zip(new.tensors()).all(|(a, b)| a.name() == b.name() && a.bytes() == b.bytes()));
    // Without a name for the output, the type is in it.
    output(&mut quadriga(["quantize", "-q", "--prune-layers", "0,2", model, "COPY"])).success();
    let pruned = File::open(fixture.path("ggml-model-COPY.gguf")).unwrap();
    assert_eq!(pruned.get::<u32>("llama.block_count").unwrap(), 1);
    let bytes = |file: &File, name: &str| file.tensor(name).unwrap().bytes().to_vec();
    assert_eq!(bytes(&pruned, "blk.0.attn_q.weight"), bytes(&old, "blk.1.attn_q.weight"));
    let run = ["run", "hi", "-n", "2", "-q", "-m"];
    output(quadriga(run).arg(fixture.path("ggml-model-COPY.gguf"))).success();
    output(&mut quadriga([
        "quantize",
        "--prune-layers",
        "1",
        "--allow-requantize",
        model,
        text(&out),
        "Q4_0",
    ]))
    .success();
    assert_eq!(File::open(&out).unwrap().tensor("blk.1.attn_q.weight").unwrap().dtype(), DType::Q4_0);
    let prune = |layers: &str| {
        output(&mut quadriga(["quantize", "--prune-layers", layers, model, text(&out), "COPY"]))
    };
    prune("3").failed(1, &["layers 0 to 2"]);
    prune("0,1,2").failed(1, &["all 3 layers"]);
    let unknown = prune("x").failed_usage();
    assert!(unknown.err.contains("\"x\" is not a layer number"), "{unknown:?}");
}

/// Each command asks for the default model, which a script in place of pip does not have.
#[cfg(unix)]
#[test]
fn an_adapter_without_effect_changes_no_tensor_and_one_of_peft_becomes_a_file() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let (peft, adapter, out) = (fixture.path("peft"), fixture.path("adapter.gguf"), fixture.path("out.gguf"));
    fs::create_dir(&peft).unwrap();
    let config = r#"{ "peft_type": "LORA", "r": 1, "lora_alpha": 1 }"#;
    fs::write(peft.join("adapter_config.json"), config).unwrap();
    let name = |end: &str| format!("base_model.model.model.layers.0.mlp.up_proj.lora_{end}.weight");
    let model = File::open(&fixture.model).unwrap();
    let shape = model.tensor("blk.0.ffn_up.weight").unwrap().shape().dims().to_vec();
    let (outputs, inputs) = (shape[0], shape[1]);
    let header = format!(
        r#"{{"{}":{{"dtype":"F32","shape":[1,{inputs}],"data_offsets":[0,{}]}},"{}":{{"dtype":"F32","shape":[{outputs},1],"data_offsets":[{},{}]}}}}"#,
        name("A"),
        4 * inputs,
        name("B"),
        4 * inputs,
        4 * (inputs + outputs)
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend((0..inputs + outputs).flat_map(|index| (index as f32 / 64.0).to_le_bytes()));
    fs::write(peft.join("adapter_model.safetensors"), bytes).unwrap();
    let convert = ["convert", text(&peft), "-o", text(&adapter)];
    output(&mut quadriga(convert)).failed(2, &["peft", "--base"]);
    let done = output(quadriga(convert).arg("--base").arg(&fixture.model)).success();
    assert!(done.err.contains("adapter for 1 matrix"), "{done:?}");
    for (scale, changed) in [("", "1 tensor changed"), ("=0", "0 tensors changed")] {
        let lora = format!("{}{scale}", text(&adapter));
        let line = ["lora", "-m", text(&fixture.model), "--lora", &lora, "-o", text(&out)];
        let done = output(&mut quadriga(line)).success();
        assert!(done.err.contains(changed), "{done:?}");
    }
    let same =
        |path: &Path| File::open(path).unwrap().tensor("blk.0.ffn_up.weight").unwrap().bytes().to_vec();
    assert_eq!(same(&out), same(&fixture.model));
    let nothing = ["split", text(&fixture.model), "part", "--split-max-size", "0"];
    let refused = output(&mut quadriga(nothing)).failed_usage();
    assert!(
        refused.err.contains("--split-max-size") && refused.err.contains("at least 1 byte"),
        "{refused:?}"
    );
}

#[test]
fn the_word_default_names_the_default_model() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = Fixture::new(&[]);
    let (model, out, pip) = (text(&fixture.model), fixture.path("out.gguf"), fixture.path("pip"));
    fs::write(&pip, "#!/bin/sh\nexit 1\n").unwrap();
    fs::set_permissions(&pip, fs::Permissions::from_mode(0o755)).unwrap();
    for arguments in [
        &["inspect", "default"][..],
        &["quantize", "default", text(&out), "Q8_0"],
        &["lora", "-m", "default", "--lora", model, "-o", text(&out)],
        &["compare", model, "default"],
        &["compare", "default", model],
    ] {
        let mut command = quadriga(arguments);
        command.current_dir(fixture.folder.path());
        command.env("QUADRIGA_PIP", &pip).env("QUADRIGA_CACHE", fixture.path("cache"));
        output(&mut command).without_download().failed(1, &["cannot fetch the default model"]);
    }
    // A file of that name is that file.
    fs::copy(&fixture.model, fixture.path("default")).unwrap();
    output(quadriga(["inspect", "default"]).current_dir(fixture.folder.path())).success();
}

#[test]
fn fitting_runs_the_model_only_within_the_memory() {
    let fixture = Fixture::new(&["--type", "f16", "--width", "256", "--heads", "4", "--vocab", "300"]);
    let (model, out) = (text(&fixture.model), fixture.path("out.gguf"));
    let size = (fs::metadata(&fixture.model).unwrap().len() / 2).to_string();
    let fit = ["quantize", "--no-check", "--fit", &size, model, text(&out)];
    let small = output(quadriga(fit).args(["--memory", "1M"])).success();
    assert!(small.err.contains("count alike") && small.err.contains("1.0 MiB of --memory"), "{small:?}");
    let large = output(quadriga(fit).args(["--memory", "4G"])).success();
    assert!(!large.err.contains("count alike"), "{large:?}");
}

#[cfg(unix)]
mod terminated {
    use std::process::{Command, Stdio};

    use quadriga_gguf::Writer;
    use serde_json::json;

    use super::*;

    /// A GGUF file of holes, with the tensors of these names, rows of 4096 and bytes of F32.
    fn sparse(path: &Path, keys: &[(&str, u32, &[u8])], tensors: &[(&str, u64)]) {
        let string = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        let mut bytes = [&b"GGUF"[..], &3u32.to_le_bytes()].concat();
        bytes.extend((tensors.len() as u64).to_le_bytes());
        bytes.extend((keys.len() as u64 + 1).to_le_bytes());
        bytes.extend([string("general.architecture"), 8u32.to_le_bytes().to_vec(), string("llama")].concat());
        for (key, kind, value) in keys {
            bytes.extend([string(key).as_slice(), &kind.to_le_bytes(), value].concat());
        }
        let mut offset = 0u64;
        for (name, rows) in tensors {
            bytes.extend([string(name).as_slice(), &2u32.to_le_bytes()].concat());
            bytes.extend([4096, *rows].iter().flat_map(|dim| dim.to_le_bytes()));
            bytes.extend([&0u32.to_le_bytes()[..], &offset.to_le_bytes()].concat());
            offset += 4 * 4096 * rows;
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        fs::write(path, &bytes).unwrap();
        fs::File::options().append(true).open(path).unwrap().set_len(bytes.len() as u64 + offset).unwrap();
    }

    /// 16 GiB: writing them takes longer than a signal.
    const HUGE: u64 = 1 << 20;

    /// Starts a command that writes into an empty folder, or one with an old file, and ends it as soon as it writes.
    #[track_caller]
    fn terminate(mut command: Command, folder: &Path) {
        let list =
            || -> Vec<_> { fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect() };
        let before = list();
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        while list().len() == before.len() && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(143), "{output:?}");
        assert_eq!(list(), before, "{output:?}");
        for name in before {
            assert_eq!(fs::read(folder.join(name)).unwrap(), b"old");
        }
    }

    #[test]
    fn while_a_model_is_quantized_merged_or_split() {
        let fixture = tempfile::tempdir().unwrap();
        let (input, out) = (fixture.path().join("in.gguf"), fixture.path().join("out"));
        let output = out.join("out.gguf");
        fs::create_dir(&out).unwrap();
        sparse(&input, &[], &[("blk.0.attn_q.weight", 8), ("blk.0.ffn_up.weight", HUGE)]);
        terminate(quadriga(["split", text(&input), text(&output)]), &out);
        fs::write(&output, "old").unwrap();
        terminate(quadriga(["quantize", text(&input), text(&output), "Q8_0"]), &out);
        let lora = fixture.path().join("lora.gguf");
        let zeros = vec![0; 4 * 4096];
        let mut writer = Writer::new();
        for (key, value) in
            [("general.architecture", "llama"), ("general.type", "adapter"), ("adapter.type", "lora")]
        {
            writer.set(key, value).unwrap();
        }
        writer.tensor_bytes("blk.0.attn_q.weight.lora_a", DType::F32, [1, 4096], &zeros).unwrap();
        writer.tensor_bytes("blk.0.attn_q.weight.lora_b", DType::F32, [8, 1], &zeros[..32]).unwrap();
        writer.write(&lora).unwrap();
        terminate(quadriga(["lora", "-m", text(&input), "--lora", text(&lora), "-o", text(&output)]), &out);
        for (number, tensor) in [("blk.0.attn_q.weight", 8), ("blk.0.ffn_up.weight", HUGE)].iter().enumerate()
        {
            let part = fixture.path().join(format!("part-{:05}-of-00002.gguf", number + 1));
            let keys: &[(&str, u32, &[u8])] = &[
                ("split.no", 2, &(number as u16).to_le_bytes()),
                ("split.count", 2, &2u16.to_le_bytes()),
                ("split.tensors.count", 5, &2i32.to_le_bytes()),
            ];
            sparse(&part, keys, &[*tensor]);
        }
        let part = fixture.path().join("part-00001-of-00002.gguf");
        terminate(quadriga(["merge", text(&part), text(&output)]), &out);
    }

    #[test]
    fn while_a_model_is_converted() {
        let fixture = tempfile::tempdir().unwrap();
        let (model, out) = (fixture.path().join("model"), fixture.path().join("out"));
        fs::create_dir_all(&model).unwrap();
        fs::create_dir_all(&out).unwrap();
        let rows = 1u64 << 28;
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": rows, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true,
        });
        fs::write(model.join("config.json"), config.to_string()).unwrap();
        let own = |part: &str| format!("model.layers.0.{part}.weight");
        let mut header = serde_json::Map::new();
        let mut end = 0;
        for (name, shape) in [
            ("model.embed_tokens.weight".to_owned(), vec![rows, 8]),
            ("model.norm.weight".to_owned(), vec![8]),
            (own("input_layernorm"), vec![8]),
            (own("post_attention_layernorm"), vec![8]),
            (own("self_attn.q_proj"), vec![8, 8]),
            (own("self_attn.k_proj"), vec![4, 8]),
            (own("self_attn.v_proj"), vec![4, 8]),
            (own("self_attn.o_proj"), vec![8, 8]),
            (own("mlp.gate_proj"), vec![16, 8]),
            (own("mlp.up_proj"), vec![16, 8]),
            (own("mlp.down_proj"), vec![8, 16]),
        ] {
            let start = end;
            end += 2 * shape.iter().product::<u64>();
            header.insert(name, json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, end] }));
        }
        let header = serde_json::Value::Object(header).to_string();
        let path = model.join("model.safetensors");
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        fs::write(&path, &bytes).unwrap();
        let file = fs::File::options().append(true).open(&path).unwrap();
        file.set_len(bytes.len() as u64 + end).unwrap();
        let output = out.join("out.gguf");
        fs::write(&output, "old").unwrap();
        terminate(quadriga(["convert", "--no-vocab", text(&model), "-o", text(&output)]), &out);
    }
}
