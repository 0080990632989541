//! llama.cpp's grammar format: its syntax, its errors, and grammars that llama.cpp's users have.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(feature = "constraint")]

use quadriga_llm::constraint::{ConstraintEngine, Grammar, gbnf};
use quadriga_llm::tokenizer::{TokenType, Tokenizer, Vocabulary};

/// Every byte, and an ending.
fn tokenizer() -> Tokenizer {
    let bytes = (0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), TokenType::Byte));
    let (tokens, types) = bytes.chain([("</s>".to_owned(), TokenType::Control)]).unzip();
    let vocabulary = Vocabulary {
        model: "llama".into(),
        tokens,
        types,
        scores: vec![0.0; 257],
        eos: Some(256),
        ..Vocabulary::default()
    };
    Tokenizer::new(vocabulary).unwrap()
}

/// Whether a text is complete under a grammar, or at least the beginning of such a text.
fn reads(engine: &ConstraintEngine, grammar: &str, text: &str) -> (bool, bool) {
    let constraint = engine.compile(&Grammar::Gbnf(grammar.to_owned()));
    let mut hook = constraint.unwrap_or_else(|error| panic!("{grammar}: {error}")).hook();
    let mut tokens: Vec<u32> = Vec::new();
    let mut logits = vec![0.0; 257];
    hook.apply(&tokens, &mut logits).unwrap();
    for byte in text.bytes() {
        if logits[usize::from(byte)] != 0.0 {
            return (false, false);
        }
        tokens.push(byte.into());
        logits.fill(0.0);
        hook.apply(&tokens, &mut logits).unwrap_or_else(|error| panic!("{grammar}: {text}: {error}"));
    }
    (logits[256] == 0.0, true)
}

#[test]
fn every_part_of_the_syntax_is_understood() {
    let tokenizer = tokenizer();
    let engine = ConstraintEngine::new(&tokenizer).unwrap();
    for (grammar, complete, wrong) in [
        ("root ::= \"a\"", &["a"][..], &["", "b", "aa"][..]),
        ("root ::= \"a\" | \"b\" \"c\" |", &["", "a", "bc"], &["ab", "c"]),
        ("# a comment\nroot ::= x # one\n\n\nx ::= # nothing yet\n  \"a\"\r\n", &["a"], &["b"]),
        ("root ::= (\"a\" |\n  \"b\"\n)* \"c\"", &["c", "abac"], &["a", "cc"]),
        ("root ::= \"ab\"+", &["ab", "abab"], &["", "aab"]),
        ("root ::= \"a\"? \"b\"", &["b", "ab"], &["a", "aab"]),
        (
            "root ::= \"a\"{2} \"b\"{1,} \"c\"{0,2} \"d\"{ 1 , 2 }",
            &["aabd", "aabbccdd"],
            &["abd", "aad", "aabcccd"],
        ),
        ("root ::= [a-cx] [^a-c\\n] [\\]-] [-a]", &["ax]-", "xé-a"], &["aa]-", "a\n]-", "ax--b"]),
        ("root ::= [^\\x00-\\x7f]", &["é", "漢", "🙂"], &["a"]),
        ("root ::= . . \"!\"", &["a\n!", "漢🙂!"], &["a!", "abc!"]),
        (r#"root ::= "\"\\\n\t\r\x41\u00e9\U0001F642\[\]""#, &["\"\\\n\t\rAé🙂[]"], &["\""]),
        ("root ::= [\\x41-\\x43\\u00e9-\\u00ea\\U0001F642]", &["A", "B", "é", "ê", "🙂"], &["D", "ë"]),
        ("root ::= a-b_1\na-b_1 ::= \"x\" a-b_1 | \"y\"", &["y", "xxy"], &["x", "yx"]),
        ("root ::= \"(\" root \")\" | \"\"", &["", "()", "((()))"], &["(", "())", "(()"]),
        ("root ::= expr\nexpr ::= expr \"+\" expr | [0-9]+", &["1", "12+3+45"], &["1+", "+1"]),
        ("root ::= (\"a\" | \"ab\") \"bc\"", &["abc", "abbc"], &["ac", "abbbc"]),
        ("root ::= \"\"", &[""], &["a"]),
        ("root ::= \"a\"*?{0,1} \"b\"", &["b", "aab"], &["a"]),
        ("root ::= \"one\"\nroot ::= \"two\"", &["two"], &["one"]),
    ] {
        for text in complete {
            assert_eq!(reads(&engine, grammar, text), (true, true), "{grammar}: {text:?}");
        }
        for text in wrong {
            assert!(!reads(&engine, grammar, text).0, "{grammar}: {text:?}");
        }
    }
}

#[test]
fn errors_say_where_and_why() {
    for (grammar, line, column, part) in [
        ("", 1, 1, "root"),
        ("other ::= \"a\"\n", 2, 1, "root"),
        ("root = \"a\"", 1, 6, "::="),
        ("root ::= \"a", 1, 10, "quote"),
        ("root ::= \"é\" \"a", 1, 14, "quote"),
        ("root ::= \"a\n\"", 1, 10, "quote"),
        ("root ::= \"a\"\nx ::= [a-", 2, 10, "]"),
        ("root ::= [z-a]", 1, 13, "range"),
        ("root ::= \"\\q\"", 1, 11, "\\q"),
        ("root ::= \"\\x4\"", 1, 11, "2 hexadecimal"),
        ("root ::= \"\\ud800\"", 1, 11, "no character d800"),
        ("root ::= (\"a\"", 1, 10, ")"),
        ("root ::= \"a\")", 1, 13, "not expected"),
        ("root ::= * \"a\"", 1, 10, "not expected"),
        ("root ::= \"a\"{x}", 1, 14, "number"),
        ("root ::= \"a\"{2,1}", 1, 13, "below"),
        ("root ::= \"a\"{2", 1, 15, "}"),
        ("root ::= \"a\"{99999999999}", 1, 14, "more than"),
        ("root ::= x y\ny ::= \"a\"", 1, 10, "x is not defined"),
        ("root ::= \"a\" root", 1, 1, "complete"),
        ("root ::= <think", 1, 10, ">"),
        ("root ::= <[x]>", 1, 10, "number"),
        ("root ::= !\"a\"", 1, 11, "token"),
        ("\"a\"", 1, 1, "name"),
    ] {
        let error = gbnf::to_lark(grammar).expect_err(grammar);
        assert_eq!((error.line, error.column), (line, column), "{grammar:?}: {error}");
        assert!(error.reason.contains(part), "{grammar:?}: {error}");
    }
}

/// In the style of the grammars that come with llama.cpp.
const JSON: &str = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"#;

#[test]
fn a_json_grammar_reads_json() {
    let tokenizer = tokenizer();
    let engine = ConstraintEngine::new(&tokenizer).unwrap();
    for text in ["{}", "{\"a\": [1, -2.5e+7 ,true]}\n", "{ \"é\\n\\u00e9\":{\n  \"b\":null }} "] {
        assert_eq!(reads(&engine, JSON, text), (true, true), "{text}");
    }
    for text in ["[1]", "{\"a\"}", "{\"a\":01}", "{\"a\":\"\n\"}", "{\"a\":1,}", "{,}", "{\"a\":tru}"] {
        assert!(!reads(&engine, JSON, text).1, "{text}");
    }
    // Strings and numbers are terminals: a mask is not computed character by character.
    let lark = gbnf::to_lark(JSON).unwrap();
    assert!(lark.contains("TEXT"), "{lark}");
    let rules = lark.lines().filter(|line| line.starts_with("rule")).count();
    assert!(rules < 25, "{rules} rules:\n{lark}");
}
