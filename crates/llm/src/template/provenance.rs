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

const MARKS: [char; 4] = [START, END, PREFIX, BROKEN];

/// Whether a text contains a mark.
pub(super) fn has_marks(text: &str) -> bool {
    text.contains(MARKS)
}

/// Text from a message without marks: noncharacters are not meant for text from outside.
pub(super) fn replaced_marks(text: &str) -> String {
    text.replace(MARKS, "\u{fffd}")
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
        for (at, length, _) in self.tokenizer.control_tokens(text) {
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
        let mut last = 0;
        for letter in rendered.chars() {
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
                letter => {
                    last = at;
                    prompt.text.push(letter);
                }
            }
        }
        prompt
    }

    /// The tokens, with the marked control tokens, and those that begin with a prefix and are `completed` with the
    /// same token as without the contents.
    pub(super) fn encode_marked(&self, tokenizer: &Tokenizer, completed: &[Option<u32>]) -> Vec<u32> {
        let prefixes = Some(&self.prefixes).filter(|prefixes| prefixes.len() == completed.len());
        let prefix = |at: usize| {
            let found = prefixes.and_then(|prefixes| prefixes.binary_search(&at).ok());
            found.and_then(|found| completed.get(found).copied().flatten())
        };
        let at = |at: usize| self.marked_end(at).is_some() || prefix(at).is_some();
        let allow = |at: usize, token: u32, length: usize| match self.marked_end(at) {
            Some(end) => at + length <= end,
            None => prefix(at) == Some(token),
        };
        let control = ControlTokens::ParsedWhere { at: &at, allow: &allow };
        tokenizer.with_bos(tokenizer.encode_where(&self.text, control))
    }

    /// The control token that begins at each prefix, if contents have no part in it: for a prompt with harmless ones.
    pub(super) fn completed(&self, tokenizer: &Tokenizer) -> Vec<Option<u32>> {
        let control = tokenizer.control_tokens(&self.text);
        let token = |prefix: &usize| {
            let found = control.binary_search_by_key(prefix, |(at, ..)| *at).ok()?;
            control.get(found).map(|(.., token)| *token)
        };
        self.prefixes.iter().map(token).collect()
    }

    /// The end of the marked control token that begins at a position.
    fn marked_end(&self, at: usize) -> Option<usize> {
        let found = self.marked.binary_search_by_key(&at, |(start, _)| *start).ok()?;
        self.marked.get(found).map(|(_, end)| *end)
    }

    /// The tokens, with all control tokens that are not broken.
    pub(super) fn encode_unbroken(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let at = |at: usize| self.broken.binary_search(&at).is_err();
        let control = ControlTokens::ParsedWhere { at: &at, allow: &|_, _, _| true };
        tokenizer.with_bos(tokenizer.encode_where(&self.text, control))
    }
}
