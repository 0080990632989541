//! Files of a folder and of the result: missing, unknown, too long, pipes, and those that must stay.

use std::fs;
use std::ops::ControlFlow;

use quadriga_models::convert::{ConvertError, convert, parse_header};
use serde_json::{Value, json};

use crate::model_folder::{TestTensor, llama_config, llama_tensors, write};
use crate::{options, run};

/// A pipe that is opened would block the test for ever.
#[cfg(unix)]
#[test]
fn pipes_are_refused_before_they_are_opened() {
    for name in [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "added_tokens.json",
        "chat_template.jinja",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "model-2.safetensors",
        "modules.json",
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &llama_config(), &llama_tensors(), "F32");
        let path = folder.path().join(name);
        let _ = fs::remove_file(&path);
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = run(folder.path(), &options("F32")).unwrap_err();
        assert!(
            matches!(&error, ConvertError::NotRegular { path: found } if *found == path),
            "{name}: {error}"
        );
        assert!(!folder.path().join("out.gguf").exists());
    }
}

#[test]
fn what_is_missing_or_unknown_is_named_and_no_file_is_left() {
    type Change<'a> = &'a dyn Fn(&mut Value, &mut Vec<TestTensor>);
    let cases: &[(&str, Change<'_>, &str)] = &[
        ("class", &|config, _| config["architectures"] = json!(["NewForCausalLM"]), "NewForCausalLM"),
        (
            "key",
            &|config, _| drop(config.as_object_mut().unwrap().remove("num_hidden_layers")),
            "num_hidden_layers",
        ),
        ("layers", &|config, _| config["num_hidden_layers"] = 3.into(), "blk.2."),
        ("fewer", &|config, _| config["num_hidden_layers"] = 1.into(), "model.layers.1."),
        ("huge", &|config, _| config["num_hidden_layers"] = 2_000_000.into(), "num_hidden_layers"),
        ("heads", &|config, _| config["num_attention_heads"] = 3.into(), "heads"),
        ("negative", &|config, _| config["hidden_size"] = (-8).into(), "hidden_size"),
        ("activation", &|config, _| config["hidden_act"] = "gelu".into(), "hidden_act"),
        (
            "head",
            &|config, _| {
                config["head_dim"] = (1u64 << 31).into();
                config["rope_scaling"] = json!({ "rope_type": "llama3", "factor": 8.0 });
            },
            "head_dim",
        ),
        (
            "rope",
            &|config, _| config["rope_scaling"] = json!({ "rope_type": "dynamic", "factor": 2.0 }),
            "dynamic",
        ),
        (
            "tensor",
            &|_, tensors| tensors.retain(|tensor| !tensor.name.ends_with("1.mlp.up_proj.weight")),
            "ffn_up",
        ),
        (
            "extra",
            &|_, tensors| tensors.push(TestTensor::new("model.layers.0.mlp.router.weight", &[8, 8])),
            "mlp.router",
        ),
        ("not finite", &|_, tensors| tensors[4].values[3] = f32::NAN, "blk.0.ffn_norm.weight"),
        ("infinite", &|_, tensors| tensors[0].values[9] = f32::INFINITY, "token_embd.weight"),
        (
            "shape",
            &|_, tensors| {
                tensors
                    .iter_mut()
                    .filter(|tensor| tensor.name.ends_with("0.mlp.up_proj.weight"))
                    .for_each(|tensor| tensor.shape = vec![8, 16])
            },
            "ffn_up",
        ),
    ];
    for (case, change, part) in cases {
        let folder = tempfile::tempdir().unwrap();
        let (mut config, mut tensors) = (llama_config(), llama_tensors());
        change(&mut config, &mut tensors);
        write(folder.path(), &config, &tensors, "F32");
        let error = run(folder.path(), &options("F32")).unwrap_err().to_string();
        assert!(error.contains(part), "{case}: {error}");
        assert!(!folder.path().join("out.gguf").exists(), "{case}");
    }
}

#[test]
fn a_cancelled_conversion_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    let output = folder.path().join("out.gguf");
    fs::write(&output, "old").unwrap();
    let cancelled = convert(folder.path(), &output, &options("F32"), &mut |progress| match progress.done * 2
        > progress.total
    {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    });
    assert!(matches!(cancelled, Err(ConvertError::Cancelled)));
    assert_eq!(fs::read(&output).unwrap(), b"old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5);
}

#[test]
fn a_name_that_appears_twice_is_refused() {
    let header = r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
    let error = parse_header(header.as_bytes(), header.len() as u64 + 16, "m.safetensors").unwrap_err();
    assert!(error.to_string().contains("\"w\"") && error.to_string().contains("twice"), "{error}");
}

#[test]
fn files_of_the_source_are_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        let output = folder.path().join(name);
        let before = fs::read(&output).unwrap();
        let converted = convert(folder.path(), &output, &options("F32"), &mut |_| ControlFlow::Continue(()));
        assert!(matches!(converted, Err(ConvertError::Output(_))), "{name}");
        assert_eq!(fs::read(&output).unwrap(), before);
    }
    // The result of an earlier conversion may be.
    run(folder.path(), &options("F32")).unwrap();
    run(folder.path(), &options("F16")).unwrap();
}

#[test]
fn files_that_are_too_long_are_refused() {
    for (name, megabytes) in [
        ("config.json", 4),
        ("generation_config.json", 4),
        ("modules.json", 4),
        ("chat_template.jinja", 4),
        ("chat_template.j2", 4),
        ("tokenizer.model", 16),
        ("tokenizer.json", 64),
        ("tokenizer_config.json", 64),
        ("added_tokens.json", 64),
        ("model.safetensors.index.json", 64),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &llama_config(), &llama_tensors(), "F32");
        if name == "tokenizer.model" {
            fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
        }
        let path = folder.path().join(name);
        let file = fs::File::options().create(true).append(true).open(&path).unwrap();
        file.set_len((megabytes << 20) + 1).unwrap();
        let error = run(folder.path(), &options("F32")).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(&(megabytes << 20).to_string()), "{name}: {error}");
    }
}
