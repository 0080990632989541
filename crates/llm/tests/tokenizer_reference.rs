//! Small vocabularies give exactly the tokens of the reference implementations.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_conformance::Rng;
use quadriga_llm::tokenizer::{TokenType, Tokenizer, Vocabulary};
use serde_json::Value;

fn strings(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

fn tokens(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as u32).collect()
}

fn byte_level(pre: &str, data: &Value) -> Vocabulary {
    Vocabulary {
        model: "gpt2".into(),
        pre: Some(pre.into()),
        tokens: strings(&data["tokens"]),
        merges: strings(&data["merges"]),
        ..Vocabulary::default()
    }
}

#[test]
fn every_pre_tokenizer_splits_as_published() {
    let data: Value = serde_json::from_str(include_str!("data/byte_level.json")).unwrap();
    let texts = strings(&data["texts"]);
    for (pre, cases) in data["cases"].as_object().unwrap() {
        let tokenizer = Tokenizer::new(byte_level(pre, &data)).unwrap();
        for (text, case) in texts.iter().zip(cases.as_array().unwrap()) {
            assert_eq!(tokenizer.encode(text, true), tokens(case), "{pre}: {text:?}");
            assert_eq!(&tokenizer.decode(&tokens(case)).unwrap(), text, "{pre}");
        }
    }
}

#[test]
fn names_of_one_rule_split_alike() {
    let data: Value = serde_json::from_str(include_str!("data/byte_level.json")).unwrap();
    let texts = strings(&data["texts"]);
    for (pre, others) in data["names"].as_object().unwrap() {
        let cases = data["cases"][pre].as_array().unwrap();
        for other in strings(others) {
            let tokenizer = Tokenizer::new(byte_level(&other, &data)).unwrap();
            for (text, case) in texts.iter().zip(cases) {
                assert_eq!(tokenizer.encode(text, true), tokens(case), "{other} as {pre}: {text:?}");
            }
        }
    }
}

#[test]
fn vocabularies_of_characters_have_byte_tokens_for_all_others() {
    let data: Value = serde_json::from_str(include_str!("data/characters.json")).unwrap();
    let named = |text: &str| strings(&data["tokens"]).iter().position(|token| token == text).unwrap() as u32;
    let vocabulary = Vocabulary {
        model: "gemma4".into(),
        tokens: strings(&data["tokens"]),
        types: types(&data),
        merges: strings(&data["merges"]),
        bos: Some(named("<bos>")),
        eos: Some(named("<eos>")),
        // Published files say this, and are wrong.
        add_bos: Some(false),
        ..Vocabulary::default()
    };
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    for (text, case) in strings(&data["texts"]).iter().zip(data["cases"].as_array().unwrap()) {
        assert_eq!(tokenizer.encode(text, true), tokens(case), "{text:?}");
        assert_eq!(&tokenizer.decode(&tokens(case)).unwrap(), text);
    }
    assert_eq!(tokenizer.encode_prompt("x", true).first(), Some(&named("<bos>")));
}

#[test]
fn word_pieces_are_those_of_bert() {
    let data: Value = serde_json::from_str(include_str!("data/word_piece.json")).unwrap();
    for (name, lowercase) in [("uncased", None), ("cased", Some(false))] {
        let vocabulary = Vocabulary {
            model: "bert".into(),
            tokens: strings(&data["tokens"]),
            types: types(&data),
            bos: Some(2),
            separator: Some(3),
            unknown: Some(1),
            lowercase,
            ..Vocabulary::default()
        };
        let tokenizer = Tokenizer::new(vocabulary).unwrap();
        for (text, case) in strings(&data["texts"]).iter().zip(data["cases"][name].as_array().unwrap()) {
            assert_eq!(tokenizer.encode(text, false), tokens(case), "{name}: {text:?}");
            let whole = [vec![2], tokens(case), vec![3]].concat();
            assert_eq!(tokenizer.encode_sequence(text, false), whole, "{name}: {text:?}");
        }
        let parsed = tokenizer.encode("[MASK] the", true);
        assert_eq!(parsed.first(), Some(&4), "{parsed:?}");
        assert_eq!(tokenizer.decode(&tokenizer.encode("the list", true)).unwrap(), "the list");
    }
}

#[test]
fn every_known_pre_tokenizer_keeps_every_byte_of_random_text() {
    let data: Value = serde_json::from_str(include_str!("data/byte_level.json")).unwrap();
    let unknown = Tokenizer::new(byte_level("no such rule", &data)).unwrap_err().to_string();
    assert!(unknown.contains("\"no such rule\"") && unknown.contains("llama-bpe"), "{unknown}");
    let known = unknown.split_once("known are: ").unwrap().1;
    let letters: Vec<char> = strings(&data["texts"]).concat().chars().collect();
    let seed = 11;
    let mut random = Rng::new(seed);
    assert!(known.split(", ").count() > 50);
    let characters: Value = serde_json::from_str(include_str!("data/characters.json")).unwrap();
    for pre in known.split(", ") {
        let of_characters = ["gemma4", "granite-embed-multi-311m", "sarvam-moe"].contains(&pre);
        let mut vocabulary = byte_level(pre, if of_characters { &characters } else { &data });
        if of_characters {
            vocabulary.types = types(&characters);
        }
        let tokenizer = Tokenizer::new(vocabulary).unwrap();
        for _ in 0..20 {
            let text: String = (0..random.below(80)).map(|_| *random.pick(&letters).unwrap()).collect();
            let tokens = tokenizer.encode(&text, true);
            assert_eq!(tokenizer.decode(&tokens).unwrap(), text, "{pre}, seed {seed}");
        }
    }
}

fn types(data: &Value) -> Vec<TokenType> {
    data["types"].as_array().unwrap().iter().map(|id| TokenType::from_id(id.as_i64().unwrap())).collect()
}

fn scored(model: &str, data: &Value) -> Vocabulary {
    Vocabulary {
        model: model.into(),
        tokens: strings(&data["tokens"]),
        scores: data["scores"]
            .as_array()
            .unwrap()
            .iter()
            .map(|score| score.as_f64().unwrap() as f32)
            .collect(),
        types: types(data),
        bos: Some(1),
        eos: Some(2),
        unknown: Some(0),
        ..Vocabulary::default()
    }
}

#[test]
fn sentence_piece_merges_by_score_with_byte_fallback() {
    let data: Value = serde_json::from_str(include_str!("data/sentence_piece.json")).unwrap();
    let tokenizer = Tokenizer::new(scored("llama", &data)).unwrap();
    let cases = data["cases"].as_array().unwrap();
    for ((text, case), decoded) in strings(&data["texts"]).iter().zip(cases).zip(strings(&data["decoded"])) {
        assert_eq!(tokenizer.encode(text, true), tokens(case), "{text:?}");
        assert_eq!(tokenizer.decode(&tokens(case)).unwrap(), decoded, "{text:?}");
    }
    let prompt = tokenizer.encode_prompt("<s>the", true);
    assert_eq!(
        prompt.iter().filter(|&&token| token == 1).count(),
        1,
        "one beginning token, not two: {prompt:?}"
    );
    assert!(!tokenizer.encode("<s>the</s>", false).iter().any(|&token| token == 1 || token == 2));
}

#[test]
fn sentence_piece_can_do_without_a_space_before_the_text() {
    let data: Value = serde_json::from_str(include_str!("data/sentence_piece.json")).unwrap();
    let vocabulary = Vocabulary { add_space_prefix: Some(false), ..scored("llama", &data) };
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    let cases = data["without_prefix"].as_array().unwrap();
    for (text, case) in strings(&data["texts"]).iter().zip(cases) {
        assert_eq!(tokenizer.encode(text, true), tokens(case), "{text:?}");
        assert_eq!(&tokenizer.decode(&tokens(case)).unwrap(), text);
    }
}

#[test]
fn unigram_finds_the_best_segmentation_after_normalization() {
    let data: Value = serde_json::from_str(include_str!("data/unigram.json")).unwrap();
    let mut vocabulary = scored("t5", &data);
    vocabulary.add_space_prefix = Some(true);
    vocabulary.remove_extra_spaces = true;
    vocabulary.replacements = base64(data["replacements"].as_str().unwrap());
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    for (text, case) in strings(&data["texts"]).iter().zip(data["cases"].as_array().unwrap()) {
        assert_eq!(tokenizer.encode(text, true), tokens(case), "{text:?}");
    }
}

fn base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut bytes = Vec::new();
    let (mut bits, mut held) = (0u32, 0);
    for letter in text.bytes().filter(|&byte| byte != b'=') {
        bits = bits << 6 | u32::from(digit(letter));
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
        }
    }
    bytes
}

#[test]
fn numbers_of_files_are_types_of_tokens() {
    use quadriga_llm::tokenizer::TokenType::{Byte, Control, Normal, Unknown, Unused, UserDefined};
    let types = [Normal, Normal, Unknown, Control, UserDefined, Unused, Byte, Normal];
    assert_eq!([0, 1, 2, 3, 4, 5, 6, 7].map(TokenType::from_id), types);
}

#[test]
fn prompts_begin_with_a_token_if_the_vocabulary_says_so() {
    let tokenizer = |model: &str, add_bos: Option<bool>| {
        let tokens = ["<s>", "a"].map(str::to_owned).to_vec();
        let pre = Some("gpt-2".to_owned());
        Tokenizer::new(Vocabulary {
            model: model.into(),
            pre,
            tokens,
            bos: Some(0),
            add_bos,
            ..Vocabulary::default()
        })
        .unwrap()
    };
    for (model, add_bos, adds) in [
        ("llama", None, true),
        ("llama", Some(false), false),
        ("gpt2", None, false),
        ("gpt2", Some(true), true),
        ("t5", None, false),
    ] {
        let tokenizer = tokenizer(model, add_bos);
        assert_eq!(tokenizer.adds_bos(), adds, "{model}");
        assert_eq!(tokenizer.encode_prompt("a", false).first() == Some(&0), adds, "{model}");
        assert_eq!(tokenizer.token_count(), 2);
    }
}
