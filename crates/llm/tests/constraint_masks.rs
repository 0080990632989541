//! Masks of regular expressions and GBNF grammars, each compared with that of a slow and obvious matcher: one that tries every
//! token, character by character, on all ways to read the grammar.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(feature = "constraint")]

use std::collections::BTreeSet;
use std::fmt::Write;

use quadriga_conformance::Rng;
use quadriga_llm::constraint::{ConstraintEngine, Grammar};
use quadriga_llm::tokenizer::{TokenType, Tokenizer, Vocabulary};

/// The letters of all grammars here; one of them has two bytes.
const LETTERS: [char; 5] = ['a', 'b', 'c', 'd', 'é'];

/// A vocabulary with tokens of one to four letters, of a part of a letter, of the same text twice, and two endings.
fn tokenizer() -> Tokenizer {
    let texts = [
        "a", "b", "c", "d", "<0xC3>", "<0xA9>", "ab", "ba", "aa", "bc", "abc", "cd", "dd", "éa", "bé",
        "aaaa", "abcd", "bb", "a", "<end>", "</s>",
    ];
    let kind = |text: &&str| match *text {
        "<end>" | "</s>" => TokenType::Control,
        text if text.starts_with("<0x") => TokenType::Byte,
        _ => TokenType::Normal,
    };
    let types = texts.iter().map(kind).collect();
    let tokens = texts.map(str::to_owned).to_vec();
    let count = tokens.len();
    let vocabulary = Vocabulary {
        model: "llama".into(),
        tokens,
        types,
        scores: vec![0.0; count],
        eos: Some(count as u32 - 1),
        eot: Some(count as u32 - 2),
        ..Vocabulary::default()
    };
    Tokenizer::new(vocabulary).unwrap()
}

/// An expression of a grammar.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Expression {
    Letter(BTreeSet<char>),
    Sequence(Vec<Expression>),
    Choice(Vec<Expression>),
    Repeat(Box<Expression>, u32, Option<u32>),
    Rule(usize),
}

use Expression::{Choice, Letter, Repeat, Rule, Sequence};

/// A random expression. Rules are only named after a letter, so that none begins with itself.
fn random_expression(rng: &mut Rng, depth: usize, rules: usize, after_letter: bool) -> Expression {
    let letter = |rng: &mut Rng| {
        let count = [1, 1, 1, 2, 3][rng.below(5)];
        Letter((0..count).map(|_| LETTERS[rng.below(LETTERS.len())]).collect())
    };
    if depth == 0 {
        return letter(rng);
    }
    match rng.below(8) {
        0..=2 => {
            let mut parts = vec![random_expression(rng, depth - 1, rules, after_letter)];
            for _ in 0..rng.below(3) {
                let after = after_letter || parts.iter().any(|part| !nullable(part));
                parts.push(random_expression(rng, depth - 1, rules, after));
            }
            Sequence(parts)
        }
        3 | 4 => {
            let count = 1 + rng.below(3);
            Choice((0..count).map(|_| random_expression(rng, depth - 1, rules, after_letter)).collect())
        }
        5 => {
            let inner = random_expression(rng, depth - 1, rules, after_letter);
            let (min, max) =
                [(0, Some(1)), (0, None), (1, None), (2, Some(2)), (1, Some(3)), (0, Some(2))][rng.below(6)];
            Repeat(Box::new(inner), min, max)
        }
        6 if after_letter && rules > 0 => Rule(rng.below(rules)),
        _ => letter(rng),
    }
}

/// Whether an expression without rules can be empty; with them, whether it might.
fn nullable(expression: &Expression) -> bool {
    match expression {
        Letter(_) => false,
        Sequence(parts) => parts.iter().all(nullable),
        Choice(options) => options.iter().any(nullable),
        Repeat(inner, min, _) => *min == 0 || nullable(inner),
        Rule(_) => true,
    }
}

/// In GBNF or, without rules, as a regular expression.
fn print(expression: &Expression, gbnf: bool) -> String {
    let group = |inner: &Expression| {
        if gbnf { format!("({})", print(inner, gbnf)) } else { format!("(?:{})", print(inner, gbnf)) }
    };
    match expression {
        Letter(letters) if letters.len() == 1 && gbnf => format!("\"{}\"", letters.first().unwrap()),
        Letter(letters) => format!("[{}]", letters.iter().collect::<String>()),
        Sequence(parts) => parts.iter().map(group).collect::<Vec<_>>().join(if gbnf { " " } else { "" }),
        Choice(options) => options.iter().map(group).collect::<Vec<_>>().join("|"),
        Repeat(inner, min, max) => {
            let mut text = group(inner);
            match max {
                Some(max) => write!(text, "{{{min},{max}}}").unwrap(),
                None => write!(text, "{{{min},}}").unwrap(),
            }
            text
        }
        Rule(rule) => format!("rule-{rule}"),
    }
}

/// Whether some text is complete under an expression.
fn ends(expression: &Expression, rules: &[bool]) -> bool {
    match expression {
        Letter(_) => true,
        Sequence(parts) => parts.iter().all(|part| ends(part, rules)),
        Choice(options) => options.iter().any(|option| ends(option, rules)),
        Repeat(inner, min, _) => *min == 0 || ends(inner, rules),
        Rule(rule) => rules[*rule],
    }
}

/// The rules under which some text is complete.
fn ending_rules(rules: &[Expression]) -> Vec<bool> {
    let mut known = vec![false; rules.len()];
    for _ in rules {
        known = rules.iter().map(|rule| ends(rule, &known)).collect();
    }
    known
}

/// All ways to read a text so far: what each has left to read, the next part last.
type Readings = BTreeSet<Vec<Expression>>;

/// Adds a reading to others, replaces its next part by letters in all ways, and drops those that have no end.
fn expand(rest: Vec<Expression>, rules: &[Expression], into: &mut Readings) {
    let mut readings = Readings::new();
    expand_all(rest, rules, &mut readings);
    let ending = ending_rules(rules);
    into.extend(readings.into_iter().filter(|reading| reading.iter().all(|part| ends(part, &ending))));
}

fn expand_all(mut rest: Vec<Expression>, rules: &[Expression], into: &mut Readings) {
    let Some(next) = rest.pop() else {
        into.insert(rest);
        return;
    };
    match next {
        Letter(_) => {
            rest.push(next);
            into.insert(rest);
        }
        Sequence(parts) => {
            rest.extend(parts.into_iter().rev());
            expand_all(rest, rules, into);
        }
        Choice(options) => {
            for option in options {
                expand_all([rest.clone(), vec![option]].concat(), rules, into);
            }
        }
        Repeat(inner, min, max) => {
            if min == 0 {
                expand_all(rest.clone(), rules, into);
            }
            if max != Some(0) {
                // An inner expression that is empty leads nowhere new.
                let left = Repeat(inner.clone(), min.saturating_sub(1), max.map(|max| max - 1));
                let mut inside = Readings::new();
                expand_all(vec![*inner], rules, &mut inside);
                for reading in inside {
                    if !reading.is_empty() {
                        into.insert([rest.clone(), vec![left.clone()], reading].concat());
                    } else if min > 0 {
                        expand_all([rest.clone(), vec![left.clone()]].concat(), rules, into);
                    }
                }
            }
        }
        Rule(rule) => {
            rest.push(rules[rule].clone());
            expand_all(rest, rules, into);
        }
    }
}

fn advance(readings: &Readings, letter: char, rules: &[Expression]) -> Readings {
    let mut after = Readings::new();
    for reading in readings {
        if let Some((Letter(letters), rest)) = reading.split_last()
            && letters.contains(&letter)
        {
            expand(rest.to_vec(), rules, &mut after);
        }
    }
    after
}

/// Whether bytes after a text are its continuation: the end may be part of a letter.
fn allowed(readings: &Readings, bytes: &[u8], rules: &[Expression]) -> bool {
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let (whole, part) = bytes.split_at(error.valid_up_to());
            let after = after_text(readings, std::str::from_utf8(whole).unwrap(), rules);
            let begins = |letter: &char| letter.to_string().as_bytes().starts_with(part);
            return LETTERS
                .iter()
                .filter(|letter| begins(letter))
                .any(|letter| !advance(&after, *letter, rules).is_empty());
        }
    };
    !after_text(readings, text, rules).is_empty()
}

fn after_text(readings: &Readings, text: &str, rules: &[Expression]) -> Readings {
    text.chars().fold(readings.clone(), |readings, letter| advance(&readings, letter, rules))
}

/// Follows random answers, and compares each mask with the matcher's.
fn check(
    engine: &ConstraintEngine,
    tokenizer: &Tokenizer,
    grammar: &Grammar,
    rules: &[Expression],
    rng: &mut Rng,
) -> usize {
    let constraint = engine.compile(grammar).unwrap_or_else(|error| panic!("{grammar:?}: {error}"));
    let mut compared = 0;
    for answer in 0..3 {
        let mut hook = constraint.hook();
        let mut start = Readings::new();
        expand(vec![rules[0].clone()], rules, &mut start);
        // A prompt, of which the grammar knows nothing.
        let mut tokens = vec![3, 1];
        let mut bytes: Vec<u8> = Vec::new();
        for _ in 0..7 {
            let mut logits = vec![0.0; tokenizer.token_count() + 3];
            hook.apply(&tokens, &mut logits)
                .unwrap_or_else(|error| panic!("{grammar:?} after {bytes:?}: {error}"));
            let whole = std::str::from_utf8(&bytes).map(|text| after_text(&start, text, rules));
            let mut possible = Vec::new();
            for token in 0..tokenizer.token_count() as u32 {
                let wanted = if tokenizer.is_end(token) {
                    whole.as_ref().is_ok_and(|readings| readings.contains(&Vec::new()))
                } else {
                    let piece = tokenizer.piece(token).unwrap();
                    allowed(&start, &[&bytes, piece].concat(), rules)
                };
                let found = logits[token as usize] == 0.0;
                assert_eq!(
                    found,
                    wanted,
                    "{grammar:?} after {:?}: token {token}",
                    String::from_utf8_lossy(&bytes)
                );
                compared += 1;
                if wanted {
                    possible.push(token);
                }
            }
            assert!(logits[tokenizer.token_count()..].iter().all(|logit| *logit == f32::NEG_INFINITY));
            let token = possible[rng.below(possible.len())];
            if tokenizer.is_end(token) {
                break;
            }
            tokens.push(token);
            bytes.extend_from_slice(tokenizer.piece(token).unwrap());
            // The mask is the same whether the hook hears of the token at once or later.
            if answer % 2 == 0 {
                hook.accepted(&tokens);
            }
        }
    }
    compared
}

#[test]
fn masks_of_regular_expressions_are_those_of_a_matcher_that_tries_every_token() {
    let (tokenizer, mut compared) = (tokenizer(), 0);
    let engine = ConstraintEngine::new(&tokenizer).unwrap();
    for seed in 0..150 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let rules = [random_expression(&mut rng, 3, 0, false)];
        let pattern = print(&rules[0], false);
        compared += check(&engine, &tokenizer, &Grammar::Regex(pattern), &rules, &mut rng);
        let gbnf = format!("root ::= {}", print(&rules[0], true));
        compared += check(&engine, &tokenizer, &Grammar::Gbnf(gbnf), &rules, &mut rng);
    }
    assert!(compared > 20_000, "{compared}");
}

#[test]
fn masks_of_grammars_with_rules_are_those_of_a_matcher_that_tries_every_token() {
    let tokenizer = tokenizer();
    let engine = ConstraintEngine::new(&tokenizer).unwrap();
    let (mut recursive, mut compared) = (0, 0);
    for seed in 0..400 {
        println!("seed {seed}");
        let mut rng = Rng::new(1000 + seed);
        let count = 1 + rng.below(3);
        let rules: Vec<Expression> =
            (0..count).map(|_| random_expression(&mut rng, 3, count, false)).collect();
        let names = |rule: usize| if rule == 0 { "root".to_owned() } else { format!("rule-{rule}") };
        let mut gbnf = String::new();
        for (rule, expression) in rules.iter().enumerate() {
            writeln!(gbnf, "{} ::= {}", names(rule), print(expression, true).replace("rule-0", "root"))
                .unwrap();
        }
        let grammar = Grammar::Gbnf(gbnf);
        match engine.compile(&grammar) {
            // Some have no complete text.
            Err(error) => {
                assert!(error.to_string().contains("no text is complete"), "{grammar:?}: {error}");
                assert!(!ends(&rules[0], &ending_rules(&rules)), "{grammar:?}");
            }
            Ok(_) => {
                recursive += usize::from(format!("{rules:?}").contains("Rule("));
                compared += check(&engine, &tokenizer, &grammar, &rules, &mut rng);
            }
        }
    }
    assert!(recursive > 60 && compared > 50_000, "{recursive} {compared}");
}
