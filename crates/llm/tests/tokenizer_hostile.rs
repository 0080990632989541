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

/// A byte-level vocabulary with a token for each byte, in their order.
fn all_bytes(pre: &str) -> Vocabulary {
    let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = 256..;
    let letters = (0..256).map(|byte| if printable(byte) { byte } else { others.next().unwrap() });
    let tokens = letters.map(|letter| char::from_u32(letter).unwrap().to_string()).collect();
    Vocabulary { model: "gpt2".into(), pre: Some(pre.into()), tokens, ..Vocabulary::default() }
}

#[test]
fn a_merge_into_what_is_no_token_gives_only_tokens() {
    let text = "ab ba é\u{0}\u{7f}ab";
    let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
    // In one of them whole words are looked up first.
    for pre in ["gpt-2", "llama-bpe"] {
        let merged = Vocabulary { merges: vec!["a b".into()], ..all_bytes(pre) };
        assert_eq!(Tokenizer::new(merged).unwrap().encode(text, true), bytes, "{pre}");
        // Without a token for some byte, it is left out.
        for missing in [b'a', b'b', b' ', 0xc3, 0] {
            let mut fewer = Vocabulary { merges: vec!["a b".into()], ..all_bytes(pre) };
            fewer.tokens[usize::from(missing)] = "\u{fdd0}".into();
            let left: Vec<u32> = bytes.iter().copied().filter(|byte| *byte != u32::from(missing)).collect();
            assert_eq!(Tokenizer::new(fewer).unwrap().encode(text, true), left, "{pre} without {missing}");
        }
    }
}

#[test]
fn the_best_score_is_merged_first_whatever_its_sign() {
    for scores in [[1.0, 2.0], [-2.0, -1.0], [-1.0, 1.0], [0.0, 0.5], [-0.5, 0.0]] {
        let tokens = ["a", "b", "c", "ab", "bc"];
        let of = |ab: f32, bc: f32| {
            let scores = vec![0.0, 0.0, 0.0, ab, bc];
            let made = Vocabulary { scores, add_space_prefix: Some(false), ..vocabulary("llama", &tokens) };
            Tokenizer::new(made).unwrap().encode("abc", true)
        };
        assert_eq!(of(scores[0], scores[1]), [0, 4], "{scores:?}");
        assert_eq!(of(scores[1], scores[0]), [3, 2], "{scores:?}");
    }
}

#[test]
fn user_defined_tokens_are_found_within_control_tokens_that_are_text() {
    use TokenType::{Control, Normal, UserDefined};
    let made = Vocabulary {
        types: vec![Control, UserDefined, Normal, Normal, Normal, Normal],
        add_space_prefix: Some(false),
        ..vocabulary("llama", &["<x>y", "<x>", "y", "<", "x", ">"])
    };
    let tokenizer = Tokenizer::new(made).unwrap();
    assert_eq!(tokenizer.encode("<x>y", true), [0]);
    assert_eq!(tokenizer.encode("<x>y", false), [1, 2]);
}

#[test]
fn only_two_hexadecimal_digits_are_a_byte() {
    let tokens = ["<0x41>", "<0x1>", "<0x+1>", "<0x123>", "<0xZZ>", "0x41"];
    let types = vec![TokenType::Byte; tokens.len()];
    let tokenizer = Tokenizer::new(Vocabulary { types, ..vocabulary("llama", &tokens) }).unwrap();
    assert_eq!(tokenizer.piece(0).unwrap(), b"A");
    for (token, text) in (1..).zip(&tokens[1..]) {
        assert_ne!(tokenizer.piece(token).unwrap().len(), 1, "{text}");
    }
}

#[test]
fn files_name_special_tokens_or_none() {
    let read = |own: &[(&str, quadriga_gguf::OwnedValue)]| {
        let mut writer = quadriga_gguf::Writer::new();
        writer.set("tokenizer.ggml.model", "llama").unwrap();
        writer.set("tokenizer.ggml.tokens", vec!["<unk>", "<s>"]).unwrap();
        for (key, value) in own {
            writer.set(&format!("tokenizer.ggml.{key}"), value.clone()).unwrap();
        }
        let mut bytes = Vec::new();
        writer.write_to(&mut bytes).unwrap();
        Vocabulary::from_file(&quadriga_gguf::File::from_bytes(bytes).unwrap()).unwrap()
    };
    // The default end token, 2, is beyond this vocabulary.
    let usual = read(&[]);
    assert_eq!((usual.bos, usual.eos, usual.unknown), (Some(1), None, Some(0)));
    for none in [quadriga_gguf::OwnedValue::from(-1i32), u32::MAX.into()] {
        assert_eq!(read(&[("bos_token_id", none)]).bos, None);
    }
    assert_eq!(read(&[("bos_token_id", 0u32.into()), ("eos_token_id", 1u32.into())]).eos, Some(1));
    let table = vec![1u8, 200, 0];
    assert_eq!(read(&[("precompiled_charsmap", table.clone().into())]).replacements, table);
    let signed: Vec<i8> = table.iter().map(|byte| byte.cast_signed()).collect();
    assert_eq!(read(&[("precompiled_charsmap", signed.into())]).replacements, table);
}
