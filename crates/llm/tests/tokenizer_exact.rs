//! The default model's tokenizer gives exactly the reference tokens.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_llm::tokenizer::Tokenizer;
use serde_json::Value;

fn tokenizer() -> Tokenizer {
    let path =
        quadriga_llm::default_model::fetch(None, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    Tokenizer::from_file(&quadriga_gguf::File::open(path).unwrap()).unwrap()
}

#[test]
fn the_default_models_vocabulary_gives_the_reference_tokens_and_the_text_back() {
    let tokenizer = tokenizer();
    let mut compared = 0;
    for line in quadriga_llm::judge::DEFAULT_MODEL_CASES.lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let (text, name) = (case["text"].as_str().unwrap(), &case["name"]);
        let special = case["special"].as_bool().unwrap_or(true);
        let tokens = tokenizer.encode(text, special);
        if let Some(expected) = case["tokens"].as_array() {
            let expected: Vec<u32> = expected.iter().map(|token| token.as_u64().unwrap() as u32).collect();
            assert_eq!(tokens, expected, "{name}");
            compared += 1;
        }
        if !text.contains("<|") {
            assert_eq!(tokenizer.decode(&tokens).unwrap(), text, "{name}");
        }
    }
    assert!(compared >= 20, "only {compared} cases had tokens");
    assert!(tokenizer.is_end(2) && tokenizer.is_end(0) && !tokenizer.is_end(1));
    assert_eq!(tokenizer.encode_prompt("The", true), [504], "this vocabulary wants no beginning token");
}

#[test]
fn control_tokens_in_plain_text_are_plain_text() {
    let tokenizer = tokenizer();
    let tokens = tokenizer.encode("<|im_start|>", false);
    assert!(!tokens.contains(&1) && tokens.len() > 1);
    assert_eq!(tokenizer.decode(&tokens).unwrap(), "<|im_start|>");
}
