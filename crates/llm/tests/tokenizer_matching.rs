//! Special tokens are found as by the simplest search, in linear time and little memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use quadriga_conformance::Rng;
use quadriga_llm::tokenizer::{TokenType, Tokenizer, Vocabulary};

/// The system's allocator, counting current and peak bytes in use.
struct Counting;

static USED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator, which keeps the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(USED.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`, and the memory came from the same allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Serializes the tests: a concurrent one would allocate, too.
static ALONE: Mutex<()> = Mutex::new(());

/// A byte-level vocabulary of single letters, followed by special tokens.
fn byte_level(special: Vec<(String, TokenType)>) -> Vocabulary {
    let mut tokens: Vec<String> = ('a'..='d').map(String::from).collect();
    let mut types = vec![TokenType::Normal; tokens.len()];
    for (text, token_type) in special {
        tokens.push(text);
        types.push(token_type);
    }
    Vocabulary { model: "gpt2".into(), pre: Some("gpt-2".into()), tokens, types, ..Vocabulary::default() }
}

/// Leftmost first, the longest of several, the last of equal ones; letters otherwise.
fn searched(vocabulary: &Vocabulary, text: &str, special: bool) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let found = (0u32..)
            .zip(vocabulary.tokens.iter().zip(&vocabulary.types))
            .filter(|(_, (_, kind))| {
                **kind == TokenType::UserDefined || (special && **kind == TokenType::Control)
            })
            .filter(|(_, (text, _))| !text.is_empty() && rest.starts_with(text.as_str()))
            .max_by_key(|(_, (text, _))| text.len());
        let (token, length) = found.map_or_else(
            || (u32::from(rest.as_bytes()[0] - b'a'), 1),
            |(token, (text, _))| (token, text.len()),
        );
        tokens.push(token);
        rest = &rest[length..];
    }
    tokens
}

fn word(rng: &mut Rng, letters: usize, longest: usize) -> String {
    (0..rng.below(longest)).map(|_| char::from(b'a' + rng.below(letters) as u8)).collect()
}

#[test]
fn special_tokens_are_found_as_by_the_simplest_search() {
    let _alone = ALONE.lock();
    for seed in 0..3000 {
        let mut rng = Rng::new(seed);
        let letters = 1 + rng.below(3);
        let special = (0..rng.below(12))
            .map(|_| {
                let token_type = if rng.below(2) == 0 { TokenType::Control } else { TokenType::UserDefined };
                (word(&mut rng, letters, 7), token_type)
            })
            .collect();
        let vocabulary = byte_level(special);
        let tokenizer = Tokenizer::new(vocabulary.clone()).unwrap();
        let text = word(&mut rng, letters, 60);
        for special in [false, true] {
            let wanted = searched(&vocabulary, &text, special);
            assert_eq!(
                tokenizer.encode(&text, special),
                wanted,
                "seed {seed}: {text:?} {:?}",
                vocabulary.tokens
            );
        }
    }
}

/// The segmentation with the best sum of scores; of equal ones the one whose last token is longest, and so on.
fn best_segmentation(vocabulary: &Vocabulary, text: &str) -> Vec<u32> {
    let worst = f64::from(*vocabulary.scores.iter().min_by(|a, b| a.total_cmp(b)).unwrap());
    let mut best: Vec<(f64, Vec<u32>)> = vec![(0.0, Vec::new())];
    for end in 1..=text.len() {
        let mut here: Option<(f64, Vec<u32>)> = None;
        for from in 0..end {
            let token = vocabulary.tokens.iter().rposition(|token| *token == text[from..end]);
            let own = match token {
                Some(token) => f64::from(vocabulary.scores[token]),
                None if end - from == 1 => worst - 10.0,
                None => continue,
            };
            let score = best[from].0 + own;
            if here.as_ref().is_none_or(|(other, _)| score > *other) {
                let mut path = best[from].1.clone();
                let token = token.map_or(0, |token| token as u32);
                // Consecutive unknown characters are one token.
                if !(token == 0 && path.last() == Some(&0)) {
                    path.push(token);
                }
                here = Some((score, path));
            }
        }
        best.push(here.unwrap());
    }
    best.pop().unwrap().1
}

#[test]
fn unigram_segmentations_are_the_best_ones() {
    let _alone = ALONE.lock();
    for seed in 0..2000 {
        let mut rng = Rng::new(seed);
        let letters = 1 + rng.below(3);
        let mut tokens = vec!["?".to_owned()];
        tokens.extend(
            (0..1 + rng.below(12)).map(|_| word(&mut rng, letters, 5)).filter(|word| !word.is_empty()),
        );
        // Few different scores, so that there are ties.
        let scores: Vec<f32> = tokens.iter().map(|_| -(rng.below(4) as f32) - 1.0).collect();
        let types = vec![TokenType::Normal; tokens.len()];
        let vocabulary = Vocabulary {
            model: "t5".into(),
            tokens,
            types,
            scores,
            unknown: Some(0),
            add_space_prefix: Some(false),
            ..Vocabulary::default()
        };
        let tokenizer = Tokenizer::new(vocabulary.clone()).unwrap();
        let text = word(&mut rng, letters + 1, 20);
        let wanted = best_segmentation(&vocabulary, &text);
        assert_eq!(tokenizer.encode(&text, false), wanted, "seed {seed}: {text:?} {:?}", vocabulary.tokens);
    }
}

/// A search that begins anew at each letter takes 10¹¹ steps here.
#[test]
fn long_tokens_that_almost_match_take_linear_time() {
    let _alone = ALONE.lock();
    let count = 1 << 18;
    let text = "a".repeat(count);
    for token_type in [TokenType::UserDefined, TokenType::Control] {
        let tokenizer = Tokenizer::new(byte_level(vec![(text.clone() + "b", token_type)])).unwrap();
        assert_eq!(tokenizer.encode(&text, true), vec![0; count]);
        assert_eq!(tokenizer.encode(&(text.clone() + "b"), true), [4]);
    }
    let words = vec!["?".to_owned(), "a".to_owned(), text.clone() + "b"];
    let unigram = Vocabulary {
        model: "t5".into(),
        scores: vec![-1.0; words.len()],
        tokens: words,
        unknown: Some(0),
        ..Vocabulary::default()
    };
    assert_eq!(Tokenizer::new(unigram).unwrap().encode(&text, false), vec![1; count]);
    // Every suffix of the text is a beginning of a token.
    let nested = (1..500).map(|length| ("ab".repeat(length) + "c", TokenType::Control)).collect();
    let tokenizer = Tokenizer::new(byte_level(nested)).unwrap();
    assert_eq!(tokenizer.encode(&"ab".repeat(50_000), true).len(), 100_000);
}

#[test]
fn special_tokens_take_little_memory() {
    let _alone = ALONE.lock();
    let mut rng = Rng::new(7);
    let texts: Vec<String> =
        (0..10_000).map(|_| (0..100).map(|_| char::from(b'a' + rng.below(26) as u8)).collect()).collect();
    let bytes: usize = texts.iter().map(String::len).sum();
    for token_type in [TokenType::UserDefined, TokenType::Control] {
        let vocabulary = byte_level(texts.iter().map(|text| (text.clone(), token_type)).collect());
        let before = USED.load(Relaxed);
        PEAK.store(before, Relaxed);
        let tokenizer = Tokenizer::new(vocabulary).unwrap();
        let (peak, kept) = (PEAK.load(Relaxed) - before, USED.load(Relaxed) - before);
        assert!(kept < 18 * bytes && peak < 24 * bytes, "{kept} bytes are kept, {peak} at most, for {bytes}");
        assert_eq!(tokenizer.encode(&texts[17], true).len(), 1);
    }
}

#[test]
fn white_space_after_special_tokens_is_dropped_where_the_vocabulary_says_so() {
    let special = ["<|user|>", "<|end|>", "<s>"].map(|text| (text.to_owned(), TokenType::Control));
    let mut plain = byte_level(special.to_vec());
    for letter in ["Ġ", "Ċ"] {
        plain.tokens.push(letter.to_owned());
        plain.types.push(TokenType::Normal);
    }
    let strips = Vocabulary { strip_after_special: true, ..plain.clone() };
    let [plain, strips] = [plain, strips].map(|vocabulary| Tokenizer::new(vocabulary).unwrap());
    let (user, end, begin, space, line) = (4, 5, 6, 7, 8);
    let text = "<s> <|user|>\n a<|end|> \n <|user|>b c<|end|>\n";
    assert_eq!(
        plain.encode(text, true),
        [begin, space, user, line, space, 0, end, space, line, space, user, 1, space, 2, end, line]
    );
    assert_eq!(strips.encode(text, true), [begin, space, user, 0, end, user, 1, space, 2, end]);
    // Control tokens that are text drop nothing.
    assert_eq!(strips.encode("a \n", false), plain.encode("a \n", false));
}

#[test]
fn pairs_have_the_separators_that_the_vocabulary_uses() {
    let special = ["<s>", "</s>"].map(|text| (text.to_owned(), TokenType::Control));
    let roberta = Vocabulary {
        bos: Some(4),
        eos: Some(5),
        separator: Some(5),
        add_bos: Some(true),
        add_eos: Some(true),
        add_separator: Some(true),
        ..byte_level(special.to_vec())
    };
    let pair = |vocabulary: Vocabulary| Tokenizer::new(vocabulary).unwrap().encode_pair("ab", "c");
    assert_eq!(pair(roberta.clone()), [4, 0, 1, 5, 5, 2, 5]);
    assert_eq!(pair(Vocabulary { separator: None, ..roberta.clone() }), [4, 0, 1, 5, 5, 2, 5]);
    assert_eq!(pair(Vocabulary { add_separator: Some(false), ..roberta.clone() }), [4, 0, 1, 5, 2, 5]);
    assert_eq!(pair(Vocabulary { add_separator: None, ..roberta.clone() }), [4, 0, 1, 5, 2, 5]);
    assert_eq!(pair(Vocabulary { add_bos: Some(false), ..roberta }), [0, 1, 5, 5, 2, 5]);
}
