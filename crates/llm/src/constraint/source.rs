//! A grammar as the compiler takes it.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::regex_to_lark;
use serde_json::{Value, json};

use super::bounds::{check_lark, check_source};
use super::cancellation::Cancellation;
use super::grammar::Grammar;
use super::{gbnf, schema};

/// The name under which the answer is known to the grammar of what comes before it.
pub(super) const ANSWER: &str = "answer";

/// Checks a grammar and puts it into the compiler's form; the reason if that fails. `token` is the number of a special token. The
/// thread must have the stack of the compiler.
pub(super) fn of(
    grammar: &Grammar,
    token: &dyn Fn(&str) -> Option<u32>,
    cancellation: &Cancellation,
) -> Result<GrammarWithLexer, String> {
    match grammar {
        Grammar::JsonSchema(schema) => of_schema(schema, cancellation),
        Grammar::JsonObject => of_schema(&json!({ "type": "object" }), cancellation),
        Grammar::Json => of_schema(&json!({}), cancellation),
        Grammar::Regex(pattern) => {
            check_source(pattern)?;
            Ok(of_regex(without_anchors(pattern)))
        }
        Grammar::Lark(source) => {
            check_lark(source)?;
            Ok(of_lark(source.clone()))
        }
        Grammar::Gbnf(source) => {
            check_source(source)?;
            gbnf::to_lark_with(source, token).map(of_lark).map_err(|error| error.to_string())
        }
        Grammar::Choices(choices) => {
            if choices.is_empty() {
                return Err("it is empty".to_owned());
            }
            let all: Vec<String> = choices.iter().map(|choice| regex::escape(choice)).collect();
            let pattern = all.join("|");
            check_source(&pattern)?;
            Ok(of_regex(&pattern))
        }
    }
}

/// The grammar of an answer with `before` in front of it: a Lark grammar that ends with `@answer`.
pub(super) fn top_level(answer: GrammarWithLexer, before: Option<String>) -> TopLevelGrammar {
    let answer = GrammarWithLexer { name: Some(ANSWER.to_owned()), ..answer };
    let grammars = match before {
        Some(before) => {
            let before = GrammarWithLexer { name: Some("start".to_owned()), ..of_lark(before) };
            vec![before, answer]
        }
        None => vec![answer],
    };
    TopLevelGrammar { grammars, max_tokens: None }
}

fn of_schema(schema: &Value, cancellation: &Cancellation) -> Result<GrammarWithLexer, String> {
    if !matches!(schema, Value::Object(_) | Value::Bool(_)) {
        return Err("it must be an object or a boolean".to_owned());
    }
    let schema = schema::prepared(schema, cancellation)?;
    Ok(GrammarWithLexer { json_schema: Some(schema), ..GrammarWithLexer::default() })
}

fn of_lark(source: String) -> GrammarWithLexer {
    GrammarWithLexer { lark_grammar: Some(source), ..GrammarWithLexer::default() }
}

fn of_regex(pattern: &str) -> GrammarWithLexer {
    // An empty expression would be a comment.
    let pattern = if pattern.is_empty() { "(?:)" } else { pattern };
    of_lark(format!("start: TEXT\nTEXT: /{}/\n", regex_to_lark(pattern, "")))
}

/// The expression without `^` and `$` around it: it matches the whole text in any case.
fn without_anchors(pattern: &str) -> &str {
    let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
    match pattern.strip_suffix('$') {
        // The dollar sign itself if an odd number of backslashes is before it.
        Some(rest) if rest.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 0 => rest,
        _ => pattern,
    }
}
