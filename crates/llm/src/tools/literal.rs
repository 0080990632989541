//! Fixed text in a model's output, which may have other white space.

use crate::marks::TOKEN_MARK;

/// Whether a text begins with a literal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LiteralMatch {
    /// Yes: so many bytes.
    Whole(usize),
    /// The text may become the literal.
    Partial,
    /// No.
    Missing,
}

/// Compares the beginning of a text with a literal. Marks of tokens in the text are skipped. White space may differ, but for that
/// at the literal's end: no more of it is taken than the literal has, since it may belong to what follows.
pub(super) fn begins_with(text: &str, literal: &str, ended: bool) -> LiteralMatch {
    let core = literal.trim_end();
    let mut at = 0;
    let rest = |at: usize| text.get(at..).unwrap_or_default();
    let is_skipped = |letter: char| letter.is_whitespace() || letter == TOKEN_MARK;
    let spaces = |at: usize| rest(at).len() - rest(at).trim_start_matches(is_skipped).len();
    let partial = if ended { LiteralMatch::Missing } else { LiteralMatch::Partial };
    for wanted in core.chars().filter(|letter| !letter.is_whitespace()) {
        at += spaces(at);
        match rest(at).chars().next() {
            Some(letter) if letter == wanted => at += letter.len_utf8(),
            Some(_) => return LiteralMatch::Missing,
            None => return partial,
        }
    }
    for wanted in literal.get(core.len()..).unwrap_or_default().chars() {
        match rest(at).chars().next() {
            Some(letter) if letter == wanted => at += letter.len_utf8(),
            Some(_) => break,
            None if ended => break,
            None => return LiteralMatch::Partial,
        }
    }
    LiteralMatch::Whole(at)
}

#[cfg(test)]
mod tests {
    use super::LiteralMatch::{Missing, Partial, Whole};
    use super::*;

    #[test]
    fn white_space_may_differ() {
        assert_eq!(begins_with("<a> {\"n\" :x", "<a>\n{\"n\": ", false), Whole(10));
        assert_eq!(begins_with("<a>\n\n\nx", "<a>\n", false), Whole(4));
        assert_eq!(begins_with("<a", "<a>", false), Partial);
        assert_eq!(begins_with("<a", "<a>", true), Missing);
        assert_eq!(begins_with("<a>", "<a>\n", false), Partial);
        assert_eq!(begins_with("<a>", "<a>\n", true), Whole(3));
        assert_eq!(begins_with("<b>", "<a>", false), Missing);
        assert_eq!(begins_with("x", "", false), Whole(0));
        assert_eq!(begins_with("]\u{fdd1}<a>\u{fdd1}<b>", "]<a>", false), Whole(7));
    }
}
