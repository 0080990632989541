//! Which control tokens of a prompt the template wrote, and which are spelled out in a message.
//!
//! Contents are text: `<|im_start|>` in a message must not begin a turn. The template's control tokens are therefore
//! marked with noncharacters, which [`rewrite`](super::rewrite) puts into its string constants, and only marked ones
//! become control tokens. Contents stay as they are, so that templates can trim, split and search them as ever.

use std::collections::BTreeSet;

use crate::tokenizer::{ControlTokens, Tokenizer};

/// Before a control token of the template.
const START: char = '\u{fdd0}';
/// After a control token of the template.
const END: char = '\u{fdd1}';
/// Before the beginning of a control token at the end of a constant, as in `'<|' + role + '|>'`.
const PREFIX: char = '\u{fdd2}';
/// After the first character of a control token in a content.
const BROKEN: char = '\u{fdd3}';
/// Before the letter of a mark that is part of a message.
const ESCAPE: char = '\u{fdd4}';

const MARKS: [char; 5] = [START, END, PREFIX, BROKEN, ESCAPE];

/// Whether a text contains a mark.
pub(super) fn has_marks(text: &str) -> bool {
    text.contains(MARKS)
}

/// Text from a message, with marks in it escaped.
pub(super) fn escaped(text: &str) -> String {
    if !has_marks(text) {
        return text.to_owned();
    }
    let mut result = String::with_capacity(text.len() + 8);
    for letter in text.chars() {
        match MARKS.iter().zip('a'..).find(|(mark, _)| **mark == letter) {
            Some((_, name)) => result.extend([ESCAPE, name]),
            None => result.push(letter),
        }
    }
    result
}

/// Marks control tokens in the text of a template.
pub(super) struct Marker<'t> {
    tokenizer: &'t Tokenizer,
    control: BTreeSet<&'t str>,
}

impl<'t> Marker<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer) -> Marker<'t> {
        let control = tokenizer.control_texts().filter(|text| !text.is_empty()).collect();
        Marker { tokenizer, control }
    }

    /// A text with its control tokens marked, and a control token that only begins at its end.
    pub(super) fn mark(&self, text: &str) -> String {
        let mut result = String::with_capacity(text.len() + 8);
        let mut from = 0;
        for (at, length) in self.tokenizer.control_tokens(text) {
            result.push_str(text.get(from..at).unwrap_or_default());
            result.push(START);
            result.push_str(text.get(at..at + length).unwrap_or_default());
            result.push(END);
            from = at + length;
        }
        let rest = text.get(from..).unwrap_or_default();
        // Control tokens have a few dozen characters.
        let last: Vec<usize> = rest.char_indices().rev().take(64).map(|(at, _)| at).collect();
        let begins = |at: &&usize| rest.get(**at..).is_some_and(|end| self.begins(end));
        match last.iter().rev().find(begins) {
            Some(&at) => {
                result.push_str(rest.get(..at).unwrap_or_default());
                result.push(PREFIX);
                result.push_str(rest.get(at..).unwrap_or_default());
            }
            None => result.push_str(rest),
        }
        result
    }

    /// Whether a longer control token begins with a text.
    fn begins(&self, text: &str) -> bool {
        use std::ops::Bound::{Excluded, Unbounded};
        let mut after = self.control.range::<str, _>((Excluded(text), Unbounded));
        after.next().is_some_and(|next| next.starts_with(text))
    }
}

/// Breaks every control token in a text, so that it is not recognised.
pub(super) fn broken(tokenizer: &Tokenizer, text: &str) -> String {
    let mut result = String::with_capacity(text.len() + 8);
    let mut from = 0;
    for at in tokenizer.control_starts(text) {
        let first = text.get(at..).and_then(|rest| rest.chars().next()).map_or(0, char::len_utf8);
        result.push_str(text.get(from..at + first).unwrap_or_default());
        result.push(BROKEN);
        from = at + first;
    }
    result.push_str(text.get(from..).unwrap_or_default());
    result
}

/// A rendered prompt without its marks, and where they were.
pub(super) struct Prompt {
    pub(super) text: String,
    /// Start and end of each marked control token.
    marked: Vec<(usize, usize)>,
    prefixes: Vec<usize>,
    broken: Vec<usize>,
}

impl Prompt {
    pub(super) fn new(rendered: &str) -> Prompt {
        let mut prompt = Prompt {
            text: String::with_capacity(rendered.len()),
            marked: Vec::new(),
            prefixes: Vec::new(),
            broken: Vec::new(),
        };
        let mut letters = rendered.chars();
        let mut last = 0;
        while let Some(letter) = letters.next() {
            let at = prompt.text.len();
            match letter {
                START => prompt.marked.push((at, at)),
                END => {
                    if let Some(open) = prompt.marked.last_mut().filter(|(start, end)| start == end) {
                        open.1 = at;
                    }
                }
                PREFIX => prompt.prefixes.push(at),
                BROKEN => prompt.broken.push(last),
                ESCAPE => {
                    let name = letters.next();
                    let mark = MARKS.iter().zip('a'..).find(|(_, own)| Some(*own) == name);
                    prompt.text.extend(mark.map(|(mark, _)| *mark));
                }
                letter => {
                    last = at;
                    prompt.text.push(letter);
                }
            }
        }
        prompt
    }

    /// The tokens, with the marked control tokens. A control token that only begins in the template must contain one
    /// of the roles.
    pub(super) fn encode_marked(&self, tokenizer: &Tokenizer, roles: &[&str]) -> Vec<u32> {
        let texts = &tokenizer.vocabulary().tokens;
        let marked = |at: usize| {
            let found = self.marked.binary_search_by_key(&at, |(start, _)| *start);
            found.ok().and_then(|found| self.marked.get(found))
        };
        let at = |at: usize| marked(at).is_some() || self.prefixes.binary_search(&at).is_ok();
        let allow = |at: usize, token: u32, length: usize| match marked(at) {
            Some((_, end)) => at + length <= *end,
            None => {
                let text = texts.get(token as usize).map_or("", String::as_str);
                roles.iter().any(|role| !role.is_empty() && text.contains(role))
            }
        };
        let control = ControlTokens::ParsedWhere { at: &at, allow: &allow };
        tokenizer.with_bos(tokenizer.encode_where(&self.text, control))
    }

    /// The tokens, with all control tokens that are not broken.
    pub(super) fn encode_unbroken(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let at = |at: usize| self.broken.binary_search(&at).is_err();
        let control = ControlTokens::ParsedWhere { at: &at, allow: &|_, _, _| true };
        tokenizer.with_bos(tokenizer.encode_where(&self.text, control))
    }
}
