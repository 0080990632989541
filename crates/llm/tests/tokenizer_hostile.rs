//! Inconsistent vocabularies, and malicious texts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_conformance::Rng;
use quadriga_llm::Error;
use quadriga_llm::template::{ChatTemplate, Message};
use quadriga_llm::tokenizer::{Detokenizer, TokenType, Tokenizer, Vocabulary};

fn vocabulary(model: &str, tokens: &[&str]) -> Vocabulary {
    Vocabulary {
        model: model.into(),
        tokens: tokens.iter().map(|&text| text.to_owned()).collect(),
        ..Vocabulary::default()
    }
}

#[test]
fn inconsistencies_are_named() {
    let message = |vocabulary: Vocabulary| match Tokenizer::new(vocabulary) {
        Err(error @ Error::Vocabulary { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(message(vocabulary("gpt2", &[])).contains("no tokens"));
    let base = vocabulary("llama", &["a", "b"]);
    assert!(message(Vocabulary { scores: vec![1.0], ..base.clone() }).contains("1 scores for 2 tokens"));
    assert!(message(Vocabulary { types: vec![TokenType::Byte], ..base.clone() }).contains("1 token types"));
    assert!(message(Vocabulary { scores: vec![0.0, f32::NAN], ..base.clone() }).contains("token 1"));
    assert!(message(Vocabulary { bos: Some(2), ..base.clone() }).contains("beginning token is 2"));
    assert!(message(Vocabulary { eos: Some(9), ..base.clone() }).contains("end token is 9"));
    assert!(message(Vocabulary { unknown: Some(u32::MAX), ..base.clone() }).contains("unknown token"));
    assert!(message(Vocabulary { add_bos: Some(true), ..base.clone() }).contains("but there is none"));
    let table = Vocabulary { model: "t5".into(), replacements: vec![255, 255, 0, 0, 1], ..base };
    assert!(message(table).contains("replacements"));
    let unknown = Tokenizer::new(vocabulary("rwkv", &["a"])).unwrap_err().to_string();
    assert!(unknown.contains("\"rwkv\"") && unknown.contains("gpt2"), "{unknown}");
}

#[test]
fn oddities_that_others_accept_are_accepted() {
    let mut odd = vocabulary("gpt2", &["a", "b", "", "a", "ab", "Ā", "漢", ""]);
    odd.pre = Some("gpt-2".into());
    odd.merges =
        ["", " ", "a", "a b", "a b", "ab zz", "漢 字", "b q", " a", "q q"].map(String::from).to_vec();
    let tokenizer = Tokenizer::new(odd).unwrap();
    assert_eq!(tokenizer.encode("abq", true), [4], "of equal tokens the last; what has no token is left out");
    assert_eq!(tokenizer.encode("a b", true), [3, 1]);
    assert_eq!(tokenizer.encode("bq", true), [1], "a merge into what is no token falls apart into bytes");
    assert_eq!(tokenizer.decode(&[6, 2, 5]).unwrap(), "漢\0");
    assert!(matches!(tokenizer.decode(&[8]), Err(Error::Token { token: 8, count: 8 })));
    assert!(matches!(Detokenizer::new(&tokenizer).push(u32::MAX), Err(Error::Token { .. })));

    let alone = Tokenizer::new(vocabulary("llama", &["x"])).unwrap();
    assert_eq!(alone.encode("yxy", true), [0], "no bytes and no unknown token: only what is known");
    let unigram = Tokenizer::new(vocabulary("t5", &["x"])).unwrap();
    assert_eq!(
        unigram.encode("xyx", true),
        [0],
        "without an unknown token another stands in, one for a whole run"
    );
    let infinite =
        Vocabulary { scores: vec![f32::INFINITY, f32::NEG_INFINITY], ..vocabulary("t5", &["x", "y"]) };
    let _ = Tokenizer::new(infinite).unwrap().encode("xyxyz", true);
}

#[test]
fn random_normalization_tables_never_panic() {
    let seed = 5;
    let mut random = Rng::new(seed);
    for _ in 0..300 {
        let units = random.below(40);
        let mut table = ((units * 4) as u32).to_le_bytes().to_vec();
        table.extend((0..units * 4 + random.below(30)).map(|_| random.below(256) as u8));
        let odd = Vocabulary { replacements: table, ..vocabulary("t5", &["x", "y"]) };
        let tokenizer = Tokenizer::new(odd).unwrap();
        let text: String = (0..50).map(|_| char::from(random.below(256) as u8)).collect();
        let _ = tokenizer.encode(&text, true);
    }
}

/// BPE by definition: merges the best pair, the leftmost of equals, until there is none.
fn slow(text: &str, vocabulary: &Vocabulary) -> Vec<u32> {
    let mut parts: Vec<String> = text.chars().map(String::from).collect();
    let rank = |pair: &[String]| {
        vocabulary
            .merges
            .iter()
            .position(|merge| merge.split_once(' ') == Some((pair[0].as_str(), pair[1].as_str())))
    };
    while let Some((_, at)) =
        parts.windows(2).enumerate().filter_map(|(at, pair)| Some((rank(pair)?, at))).min()
    {
        let right = parts.remove(at + 1);
        parts[at].push_str(&right);
    }
    let number = |part: &String| vocabulary.tokens.iter().position(|token| token == part).unwrap() as u32;
    parts.iter().map(number).collect()
}

#[test]
fn merging_agrees_with_the_definition_on_random_vocabularies() {
    let seed = 3;
    let mut random = Rng::new(seed);
    for round in 0..300 {
        let mut made = vocabulary("gpt2", &["a", "b", "c"]);
        made.pre = Some("gpt-2".into());
        for _ in 0..random.below(25) {
            let (left, right) = (random.pick(&made.tokens).unwrap(), random.pick(&made.tokens).unwrap());
            let (merge, merged) = (format!("{left} {right}"), format!("{left}{right}"));
            if !made.tokens.contains(&merged) {
                made.tokens.push(merged);
            }
            made.merges.push(merge);
        }
        let text: String = (0..random.below(60)).map(|_| *random.pick(&['a', 'b', 'c']).unwrap()).collect();
        let tokenizer = Tokenizer::new(made.clone()).unwrap();
        assert_eq!(tokenizer.encode(&text, true), slow(&text, &made), "seed {seed}, round {round}: {text}");
    }
}

#[test]
fn a_megabyte_without_a_word_break_is_encoded_fast() {
    let mut one = vocabulary("gpt2", &["a", "aa", "aaaa", "aaaaaaaa", "Ġ", "ĠĠ"]);
    one.merges = ["a a", "aa aa", "aaaa aaaa", "Ġ Ġ"].map(String::from).to_vec();
    for pre in ["gpt-2", "llama-bpe", "qwen2", "tekken", "deepseek-coder", "default"] {
        one.pre = Some(pre.into());
        let tokenizer = Tokenizer::new(one.clone()).unwrap();
        assert_eq!(tokenizer.encode(&"a".repeat(1 << 20), true).len(), 1 << 17, "{pre}");
        assert_eq!(tokenizer.encode(&" ".repeat(1 << 20), true).len(), 1 << 19, "{pre}");
        assert_eq!(tokenizer.encode(&"a ".repeat(1 << 19), true).len(), 1 << 20, "{pre}");
    }
    let pieces = Tokenizer::new(vocabulary("llama", &["a", "aa", "aaaa", "\u{2581}"])).unwrap();
    assert!(pieces.encode(&"a".repeat(1 << 20), true).len() <= (1 << 19) + 1);
}

#[test]
fn nested_user_defined_tokens_do_not_slow_down_the_search_for_control_tokens() {
    // Walking from each token to all shorter ones would take more than ten billion steps.
    let mut tokens: Vec<String> = (2..6000).map(|length| "a".repeat(length)).collect();
    let mut types = vec![TokenType::UserDefined; tokens.len()];
    tokens.extend(["a", "<", "s", ">", "<s>"].map(String::from));
    types.extend([TokenType::Normal; 4]);
    types.push(TokenType::Control);
    let control = tokens.len() as u32 - 1;
    let tokenizer = Tokenizer::new(Vocabulary {
        tokens,
        types,
        add_space_prefix: Some(false),
        ..vocabulary("llama", &[])
    })
    .unwrap();
    let source = "{% set end = '<s>' %}{% for m in messages %}{{ m.content }}{% if end == '<s>' %}{{ end }}{% endif %}{% endfor %}";
    let template = ChatTemplate::for_tokenizer(source, &tokenizer).unwrap();
    let messages = [Message::new("user", "a".repeat(1_000_000) + "<s>")];
    let found = template.tokenize(&tokenizer, &messages, true).unwrap();
    assert_eq!(found.iter().filter(|token| **token == control).count(), 1);
    assert_eq!(found.last(), Some(&control));
}
