//! Converts any tokenizer.json.

use quadriga_models::convert::parse_tokenizer_json;

/// Checks one input.
pub fn run(bytes: &[u8]) {
    let Ok(json) = serde_json::from_slice(bytes) else { return };
    match parse_tokenizer_json(&json, "tokenizer.json") {
        Ok(vocabulary) => {
            assert!(vocabulary.tokens.len() <= 1 << 24);
            assert!(vocabulary.merges.iter().all(|merge| vocabulary.model != "gpt2" || merge.contains(' ')));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
