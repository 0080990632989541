//! Builds a tokenizer of any vocabulary, encodes any text with it, and decodes the tokens.
//!
//! Parts of the input end with a NUL byte: settings (one letter each), tokens (a line each; the first byte is type and score),
//! merges (a line each), a normalization table. The rest is the text.

use quadriga_llm::tokenizer::{Detokenizer, TokenType, Tokenizer, Vocabulary};

const MODELS: [&str; 5] = ["gpt2", "gemma4", "llama", "t5", "bert"];
const PRE_TOKENIZERS: [&str; 6] = ["gpt-2", "llama-bpe", "qwen2", "tekken", "deepseek-llm", "bloom"];

/// Checks one input.
pub fn run(bytes: &[u8]) {
    let mut parts = bytes.splitn(5, |byte| *byte == 0);
    let mut part = || parts.next().unwrap_or_default();
    let (settings, tokens, merges, table, text) = (part(), part(), part(), part(), part());
    let setting = |at: usize| settings.get(at).map_or(0, |letter| usize::from(letter.wrapping_sub(b'a')));
    let flag = |at: usize| [None, Some(false), Some(true)].get(setting(at) % 3).copied().flatten();
    let model = MODELS[setting(0) % MODELS.len()];
    let lines = |part: &[u8]| -> Vec<String> {
        part.split(|byte| *byte == b'\n').map(|line| String::from_utf8_lossy(line).into_owned()).collect()
    };
    let first = |line: &String| line.bytes().next().unwrap_or(b'0');
    let tokens = lines(tokens);
    let mut vocabulary = Vocabulary {
        model: model.to_owned(),
        pre: Some(PRE_TOKENIZERS[setting(1) % PRE_TOKENIZERS.len()].to_owned()),
        types: tokens.iter().map(|line| TokenType::from_id(i64::from(first(line) % 8))).collect(),
        scores: tokens.iter().map(|line| -f32::from(first(line) / 8)).collect(),
        tokens: tokens.iter().map(|line| line.chars().skip(1).collect()).collect(),
        merges: lines(merges),
        add_bos: flag(2),
        add_eos: flag(3),
        add_separator: flag(4),
        strip_after_special: flag(5) == Some(true),
        add_space_prefix: flag(6),
        remove_extra_spaces: flag(7) == Some(true),
        lowercase: flag(8),
        strip_accents: flag(9),
        replacements: table.to_vec(),
        ..Vocabulary::default()
    };
    let named = |at: usize| settings.get(at).map(|letter| u32::from(letter.wrapping_sub(b'a')));
    (vocabulary.bos, vocabulary.eos) = (named(10), named(11));
    (vocabulary.unknown, vocabulary.separator) = (named(12), named(13));
    let Ok(tokenizer) = Tokenizer::new(vocabulary) else { return };
    let text = String::from_utf8_lossy(text);
    let unknown = tokenizer.vocabulary().unknown;
    let types = &tokenizer.vocabulary().types;
    let is_control = |token: &u32| types.get(*token as usize) == Some(&TokenType::Control);
    // A unigram vocabulary without an unknown token uses another one.
    if model != "t5" {
        let tokens = tokenizer.encode(&text, false);
        let forged = tokens.iter().find(|token| is_control(token) && Some(**token) != unknown);
        assert!(forged.is_none(), "plain text became the control token {forged:?}");
    }
    for special in [false, true] {
        check(&tokenizer, &tokenizer.encode(&text, special));
        check(&tokenizer, &tokenizer.encode_sequence(&text, special));
    }
    let (begin, end) = text.split_once(' ').unwrap_or((&text, ""));
    check(&tokenizer, &tokenizer.encode_pair(begin, end));
}

/// Tokens exist and have a text, which is the same at once and token by token.
fn check(tokenizer: &Tokenizer, tokens: &[u32]) {
    let decoded = tokenizer.decode(tokens).expect("an encoded token exists");
    let mut stream = Detokenizer::new(tokenizer);
    let mut text: String = tokens.iter().map(|token| stream.push(*token).expect("it exists")).collect();
    text.push_str(&stream.finish());
    // Decoding removes the space that encoding added.
    assert!(text == decoded || text.strip_prefix(' ') == Some(&decoded), "{text:?} {decoded:?}");
}
