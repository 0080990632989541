//! Tokens, chat templates and end tokens of a folder.

use std::fs;
use std::ops::ControlFlow;

use quadriga_gguf::File;
use quadriga_models::convert::{ConvertError, ConvertOptions, convert, parse_tokenizer_json};
use serde_json::{Value, json};

use crate::model_folder::{llama_config, llama_tensors, write};
use crate::{options, run};

#[test]
fn tokens_without_a_row_of_the_embedding_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let write_with = |token: Value, template: &str| {
        write(folder.path(), &llama_config(), &llama_tensors(), "F32");
        let mut tokenizer = crate::model_folder::byte_tokenizer();
        tokenizer["added_tokens"].as_array_mut().unwrap().push(token);
        fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let own = json!({ "eos_token": "<|endoftext|>", "chat_template": template });
        fs::write(folder.path().join("tokenizer_config.json"), own.to_string()).unwrap();
    };
    let plain = "{{ messages[0].content }}";
    for (special, template) in [(false, plain), (true, "<extra>{{ messages[0].content }}")] {
        write_with(json!({ "id": 300, "content": "<extra>", "special": special }), template);
        let error = run(folder.path(), &options("F32")).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, ConvertError::TokensBeyondRows { tokens: 301, rows: 300, id: 300, .. }),
            "{text}"
        );
        assert!(["301", "300", "<extra>"].iter().all(|part| text.contains(part)), "{text}");
    }
    // A special token that no text contains, as text models have those of images: left out, and said.
    write_with(json!({ "id": 300, "content": "<image>", "special": true }), plain);
    let output = folder.path().join("out.gguf");
    let report =
        convert(folder.path(), &output, &options("F32"), &mut |_| ControlFlow::Continue(())).unwrap();
    assert!(
        matches!(report.notes.as_slice(), [note, rows] if note.contains("<image>") && note.contains("300 rows")
            && rows.contains("41 of the 300 rows") && rows.contains("row 259")),
        "{:?}",
        report.notes
    );
}

#[test]
fn unknown_pre_tokenizers_are_refused_until_one_is_named() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    let mut tokenizer = crate::model_folder::byte_tokenizer();
    tokenizer["pre_tokenizer"]["pretokenizers"][0] =
        json!({ "type": "Split", "pattern": { "Regex": "[aeiou]" } });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let error = run(folder.path(), &options("F32")).unwrap_err();
    assert!(
        matches!(error, ConvertError::PreTokenizer { .. }) && error.to_string().contains("[aeiou]"),
        "{error}"
    );
    let named = ConvertOptions { pre_tokenizer: Some("gpt-2".to_owned()), ..options("F32") };
    assert_eq!(run(folder.path(), &named).unwrap().get::<&str>("tokenizer.ggml.pre").unwrap(), "gpt-2");
    fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    assert!(matches!(run(folder.path(), &options("F32")), Err(ConvertError::Tokenizer { .. })));
}

#[test]
fn text_that_would_be_changed_is_refused_by_name() {
    let file = |normalizer: &str, prefix: bool, model: &str| {
        parse_tokenizer_json(
            &serde_json::from_str(&format!(
                r#"{{"normalizer":{normalizer},"model":{model},
            "pre_tokenizer":{{"type":"ByteLevel","add_prefix_space":{prefix}}}}}"#
            ))
            .unwrap(),
            "tokenizer.json",
        )
    };
    let bytes = r#"{"type":"BPE","vocab":{"a":0},"merges":[]}"#;
    let unigram = r#"{"type":"Unigram","unk_id":0,"vocab":[["a",0.0]]}"#;
    let pieces = r#"{"type":"WordPiece","vocab":{"a":0}}"#;
    let replace = r#"{"type":"Replace","pattern":{"String":"x"},"content":"y"}"#;
    for (normalizer, prefix, model, part) in [
        (r#"{"type":"Lowercase"}"#, false, bytes, "Lowercase"),
        (r#"{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Strip"}]}"#, false, bytes, "Strip"),
        (r#"{"type":"NFKC"}"#, false, bytes, "NFKC"),
        (replace, false, bytes, "Replace of \"x\" by \"y\""),
        (replace, false, unigram, "Replace of"),
        (r#"{"type":"Lowercase"}"#, false, unigram, "Lowercase"),
        (r#"{"type":"Lowercase"}"#, false, pieces, "Lowercase"),
        ("null", true, bytes, "add_prefix_space"),
    ] {
        let error = file(normalizer, prefix, model).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("not supported"), "{normalizer}: {error}");
    }
    assert_eq!(file("null", false, bytes).unwrap().notes, [""; 0]);
    // As llama.cpp does it, with a word about it.
    let composed = file(r#"{"type":"NFC"}"#, false, bytes).unwrap();
    assert!(matches!(composed.notes.as_slice(), [note] if note.contains("NFC")), "{:?}", composed.notes);
    let usual = r#"{"type":"Sequence","normalizers":[{"type":"Precompiled","precompiled_charsmap":"AAEC"},
        {"type":"Strip"},{"type":"Replace","pattern":{"Regex":" {2,}"},"content":"▁"}]}"#;
    assert!(file(usual, false, unigram).is_ok());
}

#[test]
fn a_chat_template_that_cannot_be_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    fs::write(folder.path().join("tokenizer_config.json"), "{}").unwrap();
    for name in ["chat_template.j2", "chat_template.jinja"] {
        let path = folder.path().join(name);
        fs::write(&path, b"{{ messages }}\xff").unwrap();
        let error = run(folder.path(), &options("F32")).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("byte 14") && error.contains("UTF-8"), "{error}");
        fs::write(&path, "{{ messages }}").unwrap();
        let file = run(folder.path(), &options("F32")).unwrap();
        assert_eq!(file.get::<&str>("tokenizer.chat_template").unwrap(), "{{ messages }}");
    }
}

/// A SentencePiece model of the unknown token, bytes and two pieces.
fn sentence_pieces() -> Vec<u8> {
    let field = |number: u8, content: &[u8]| [&[number << 3 | 2, content.len() as u8], content].concat();
    let piece = |text: &str, kind: u8| {
        let score = [&[2 << 3 | 5][..], &(-1.0f32).to_le_bytes()].concat();
        field(1, &[field(1, text.as_bytes()), score, vec![3 << 3, kind]].concat())
    };
    let mut model = [piece("<unk>", 2), piece("<s>", 3), piece("</s>", 3)].concat();
    (0..=255u8).for_each(|byte| model.extend(piece(&format!("<0x{byte:02X}>"), 6)));
    model.extend([piece("\u{2581}", 1), piece("a", 1)].concat());
    model.extend([field(2, &[3 << 3, 2]), field(3, &[3 << 3, 0])].concat());
    model
}

#[test]
fn added_tokens_of_older_folders_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    fs::remove_file(path("tokenizer.json")).unwrap();
    fs::write(path("tokenizer.model"), sentence_pieces()).unwrap();
    let special = json!({ "eos_token": "</s>", "additional_special_tokens": ["[TOOL]"] });
    fs::write(path("tokenizer_config.json"), special.to_string()).unwrap();
    let added = json!({ "<s>": 1, "<|im_end|>": 279, "[TOOL]": 280, "word": 281 });
    fs::write(path("added_tokens.json"), added.to_string()).unwrap();
    let output = path("out.gguf");
    let report =
        convert(folder.path(), &output, &options("F32"), &mut |_| ControlFlow::Continue(())).unwrap();
    let file = File::open(&output).unwrap();
    let texts = file.get::<Vec<&str>>("tokenizer.ggml.tokens").unwrap();
    let kinds = file.get::<Vec<i32>>("tokenizer.ggml.token_type").unwrap();
    let found: Vec<(&str, i32)> = [1, 278, 279, 280, 281].iter().map(|id| (texts[*id], kinds[*id])).collect();
    assert_eq!(found, [("<s>", 3), ("[PAD278]", 5), ("<|im_end|>", 3), ("[TOOL]", 3), ("word", 4)]);
    // 261 pieces and three tokens.
    assert!(
        matches!(report.notes.as_slice(), [note] if note.contains("36 of the 300 rows") && note.contains("row 261")),
        "{:?}",
        report.notes
    );
    // What tokenizer.json says of an id comes first.
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    fs::remove_file(path("tokenizer.model")).unwrap();
    let added = json!({ "other": 258, "<|im_end|>": 279 });
    fs::write(path("added_tokens.json"), added.to_string()).unwrap();
    let file = run(folder.path(), &options("F32")).unwrap();
    let texts = file.get::<Vec<&str>>("tokenizer.ggml.tokens").unwrap();
    assert_eq!((texts[258], texts[279]), ("<|endoftext|>", "<|im_end|>"));
    for (id, part) in [(json!("x"), "whole number"), (json!(16_777_215), "16777215")] {
        fs::write(path("added_tokens.json"), json!({ "<|im_end|>": id }).to_string()).unwrap();
        let error = run(folder.path(), &options("F32")).unwrap_err().to_string();
        assert!(error.contains("added_tokens.json") && error.contains(part), "{error}");
    }
}

#[test]
fn a_token_id_beyond_any_vocabulary_takes_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    let mut tokenizer = crate::model_folder::byte_tokenizer();
    tokenizer["added_tokens"].as_array_mut().unwrap().push(json!({ "id": 16_777_215, "content": "<image>",
        "special": true }));
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let error = run(folder.path(), &options("F32")).unwrap_err().to_string();
    assert!(error.contains("<image>") && error.contains("16777215"), "{error}");
}

#[test]
fn every_token_that_ends_generation_ends_it_after_conversion() {
    let converted = |ids: Value| {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &llama_config(), &llama_tensors(), "F32");
        let path = folder.path().join("tokenizer_config.json");
        fs::write(path, json!({ "add_bos_token": false }).to_string()).unwrap();
        fs::write(folder.path().join("generation_config.json"), json!({ "eos_token_id": ids }).to_string())
            .unwrap();
        let output = folder.path().join("out.gguf");
        let report = convert(folder.path(), &output, &options("F32"), &mut |_| ControlFlow::Continue(()));
        let file = File::open(&output).unwrap();
        let endings: Vec<Option<u32>> = ["eos", "eot", "eom"]
            .iter()
            .map(|key| file.find(&format!("tokenizer.ggml.{key}_token_id")).unwrap())
            .collect();
        let vocabulary = quadriga_llm::tokenizer::Tokenizer::from_file(&file).unwrap();
        let ends: Vec<u32> = (0..8).filter(|token| vocabulary.is_end(*token)).collect();
        (endings, ends, report.unwrap().notes.join("\n"))
    };
    let (keys, ends, notes) = converted(json!([1, 3]));
    assert_eq!((keys, ends), (vec![Some(1), Some(3), None], vec![1, 3]));
    assert!(!notes.contains("eos_token_id"), "{notes}");
    let (keys, ends, notes) = converted(json!([1, 3, 5, 1, 7]));
    assert_eq!((keys, ends), (vec![Some(1), Some(3), Some(5)], vec![1, 3, 5]));
    assert!(notes.contains("token 7") && notes.contains("stop string"), "{notes}");
    assert_eq!(converted(json!(2)).0, [Some(2), None, None]);
}
