//! Where an answer ends at a line: after a time, or before a line that is indented less than its place asks for.

use std::time::Duration;

/// What ends an answer at one of its lines, as completions in editors want it.
///
/// ```
/// use std::time::Duration;
///
/// use quadriga_llm::{AnswerRules, LineRules};
///
/// // The rest of a block, whose lines have four spaces or more, and no more than a second of it.
/// let lines = LineRules { min_indent: 4, time: Some(Duration::from_secs(1)) };
/// let rules = AnswerRules { lines, ..AnswerRules::default() };
/// # assert_eq!(rules.lines, lines);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LineRules {
    /// The answer ends before the text of a new line that has fewer spaces and tabs before it. Blank lines, and what comes before
    /// the first line break, do not count; 0 ends none.
    pub min_indent: usize,
    /// Once so much time has passed since the first token, the answer ends with the text that has the next line break.
    pub time: Option<Duration>,
}

/// Applies [`LineRules`] to a text as it comes.
#[derive(Default)]
pub(crate) struct LineLimits {
    rules: LineRules,
    /// Spaces and tabs of a new line so far; `None` within the text of a line, and in the first one.
    indent: Option<usize>,
    /// Whether a line was cut: nothing follows.
    cut: bool,
}

impl LineLimits {
    pub(crate) fn new(rules: LineRules) -> LineLimits {
        LineLimits { rules, ..LineLimits::default() }
    }

    /// Cuts the next part of a text where the answer ends; true if it does. So much time has passed since its first token.
    pub(crate) fn limit(&mut self, text: &mut String, elapsed: Duration) -> bool {
        if self.cut {
            text.clear();
            return true;
        }
        if self.rules.min_indent > 0
            && let Some(end) = self.end(text)
        {
            text.truncate(end);
            self.cut = true;
            return true;
        }
        self.rules.time.is_some_and(|time| elapsed > time) && text.contains('\n')
    }

    /// Where the text of a line begins that is indented too little.
    fn end(&mut self, text: &str) -> Option<usize> {
        for (place, letter) in text.char_indices() {
            match (letter, self.indent) {
                ('\n', _) => self.indent = Some(0),
                (' ' | '\t', Some(count)) => self.indent = Some(count + 1),
                // It belongs to the line break behind it.
                ('\r', _) | (_, None) => {}
                (_, Some(count)) if count < self.rules.min_indent => return Some(place),
                (_, Some(_)) => self.indent = None,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is left of a text that comes in parts of so many letters, and whether the answer ended.
    fn limited(rules: LineRules, text: &str, part: usize, elapsed: Duration) -> (String, bool) {
        let letters: Vec<char> = text.chars().collect();
        let (mut limits, mut kept) = (LineLimits::new(rules), String::new());
        for part in letters.chunks(part) {
            let mut part: String = part.iter().collect();
            let ended = limits.limit(&mut part, elapsed);
            kept.push_str(&part);
            if ended {
                return (kept, true);
            }
        }
        (kept, false)
    }

    #[test]
    fn lines_with_too_little_white_space_end_an_answer() {
        let rules = LineRules { min_indent: 2, time: None };
        for (text, kept) in [
            ("a\n  b\n\n\t c\n }x", "a\n  b\n\n\t c\n "),
            ("a\nb", "a\n"),
            ("\r\n\r\n  a\r\n\r\n", "\r\n\r\n  a\r\n\r\n"),
            ("a b\n   \n  é\né", "a b\n   \n  é\n"),
            ("one line", "one line"),
        ] {
            for part in 1..=text.len() {
                let found = limited(rules, text, part, Duration::MAX);
                assert_eq!(found, (kept.to_owned(), kept != text), "{text:?} in parts of {part}");
            }
        }
        assert_eq!(limited(LineRules::default(), "a\nb", 1, Duration::MAX), ("a\nb".to_owned(), false));
    }

    #[test]
    fn what_comes_after_a_cut_is_dropped() {
        let mut limits = LineLimits::new(LineRules { min_indent: 1, time: None });
        let (mut first, mut rest) = ("a\nb".to_owned(), "c\n".to_owned());
        assert!(limits.limit(&mut first, Duration::ZERO) && limits.limit(&mut rest, Duration::ZERO));
        assert_eq!((first.as_str(), rest.as_str()), ("a\n", ""));
    }

    #[test]
    fn a_line_break_ends_an_answer_once_its_time_is_over() {
        let rules = LineRules { min_indent: 0, time: Some(Duration::from_millis(5)) };
        let over = Duration::from_millis(6);
        assert_eq!(limited(rules, "ab\ncd\nef", 2, over), ("ab\nc".to_owned(), true));
        assert!(!limited(rules, "ab\ncd\nef", 2, rules.time.unwrap_or_default()).1);
        assert!(!limited(rules, "abcdef", 2, over).1);
    }
}
