//! What can be written between tags so that it is read as it was meant.

use llguidance::derivre::{RegexAst, RegexBuilder};
use llguidance::regex_to_lark;

use super::atoms::atoms;
use super::format::{CallSyntax, ToolFormat};
use super::tagged::{TextRules, ValueForm};
use crate::marks::MARKS;
use crate::tokenizer::{TokenType, Tokenizer};

/// The work of finding out once whether a text can follow all of its rules, and how often that is tried for the tools of a request.
const MAX_WORK: u64 = 100_000;
pub(super) const MAX_TRIALS: usize = 64;

/// Why an argument of a name cannot be written, if that is so.
pub(super) fn unwritable_name(name: &str, format: &ToolFormat, tokenizer: &Tokenizer) -> Option<String> {
    let CallSyntax::Tagged { open, between, json_between, close, .. } = &format.syntax else { return None };
    if name.trim() != name {
        return Some("white space at the ends of a name is lost between tags".to_owned());
    }
    let vocabulary = tokenizer.vocabulary();
    let is_control =
        |(_, _, token): &(usize, usize, u32)| vocabulary.token_type(*token) == TokenType::Control;
    let control = tokenizer.control_tokens(name).into_iter().find(is_control);
    if let Some(token) = control.and_then(|(_, _, token)| vocabulary.tokens.get(token as usize)) {
        return Some(format!("the name has the control token {token:?}"));
    }
    // What ends a name ends it where it is found first.
    let ends = [Some(between), json_between.as_ref()].into_iter().flatten();
    for end in ends.clone() {
        let core = end.trim();
        let written = format!("{name}{end}");
        let own = name.len() + end.len() - end.trim_start().len();
        let is_early = |other: &String| {
            !other.trim().is_empty() && written.find(other.trim()).is_some_and(|at| at < own)
        };
        if core.is_empty() || ends.clone().any(is_early) {
            return Some(format!("a name ends at {core:?} there"));
        }
    }
    let around = [&format.section_open, &format.section_close, &format.call_open, &format.call_close];
    let texts = around.into_iter().chain([open, close]).chain(ends);
    let mut tags = texts.flat_map(|text| atoms(text).into_iter().chain([text.trim()]));
    let tag = tags.find(|tag| tag.chars().nth(1).is_some() && name.contains(*tag));
    tag.map(|tag| format!("the name has the tag {tag:?}"))
        .or_else(|| name.contains(MARKS).then(|| "the name has a character that is no text".to_owned()))
}

/// Drops the forms of a value that have the tag behind it in them, or are of no text without it; why the last of them cannot be written.
/// `trials` is how often that may still be tried of rules.
pub(super) fn drop_unwritable(forms: &mut Vec<ValueForm>, close: &str, trials: &mut usize) -> Option<String> {
    let tag = close.trim();
    let mut reason = None;
    forms.retain(|form| {
        let found = match form {
            ValueForm::Exact(text) => ends_early(text, close)
                .then(|| format!("its value {text:?} has {tag:?} in it, which ends a value between tags")),
            ValueForm::Text(rules) => is_impossible(rules, tag, trials)
                .then(|| format!("no text without {tag:?}, which ends it, is as its schema says")),
            ValueForm::Json(_) => None,
        };
        let is_kept = found.is_none();
        reason = reason.take().or(found);
        is_kept
    });
    reason
}

/// Whether a tag is found before the end of the text that it is written behind.
fn ends_early(text: &str, close: &str) -> bool {
    let own = text.len() + close.len() - close.trim_start().len();
    format!("{text}{close}").find(close.trim()) != Some(own)
}

/// Whether no text without a tag follows rules, as far as that is found out with bounded work.
fn is_impossible(rules: &TextRules, tag: &str, trials: &mut usize) -> bool {
    if rules.expressions.is_empty() {
        return false;
    }
    let most = rules.most.map_or(String::new(), |most| most.to_string());
    let expressions = rules.expressions.iter().map(|text| format!("(?:{})", regex_to_lark(text, "dw")));
    let mut all: Vec<String> = expressions.collect();
    let mut try_all = |all: &[String]| {
        *trials > 0 && {
            *trials -= 1;
            has_none_without(all, tag)
        }
    };
    // Lengths make much more work, and seldom matter.
    if try_all(&all) {
        return true;
    }
    all.push(format!("(?s:.{{{},{most}}})", rules.least));
    try_all(&all)
}

/// Whether every text that matches some expressions contains a tag.
fn has_none_without(expressions: &[String], tag: &str) -> bool {
    let all = expressions.iter().cloned().map(RegexAst::Regex);
    let without_tag = RegexAst::Not(Box::new(RegexAst::Regex(containing(tag))));
    let mut builder = RegexBuilder::new();
    let Ok(whole) = builder.mk(&RegexAst::And(all.chain([without_tag]).collect())) else { return false };
    builder.into_regex_limited(whole, MAX_WORK).is_ok_and(|mut regex| regex.always_empty())
}

/// The expression of the texts that contain a tag, in Lark.
pub(super) fn containing(tag: &str) -> String {
    format!("(?s:.*){}(?s:.*)", regex_to_lark(&regex::escape(tag), ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trials_of_a_request_are_counted() {
        let impossible = || {
            let expressions = vec!["x</tag>y".to_owned()];
            vec![ValueForm::Text(TextRules { expressions, ..TextRules::default() })]
        };
        let mut trials = 1;
        assert!(drop_unwritable(&mut impossible(), "</tag>", &mut trials).is_some());
        assert_eq!(trials, 0);
        assert!(drop_unwritable(&mut impossible(), "</tag>", &mut trials).is_none());
    }
}
