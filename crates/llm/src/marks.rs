//! Noncharacters that stand in streamed text for what is no text. Those that a model writes become U+FFFD.

use std::collections::VecDeque;

/// Before the text of a control token that is a part of a call of a tool.
pub(crate) const TOKEN_MARK: char = '\u{fdd1}';
/// Before the name of a function in the harmony format, in which the name is in the header of a message.
pub(crate) const HARMONY_OPEN: char = '\u{fdd2}';
/// Between that name and the arguments.
pub(crate) const HARMONY_BETWEEN: char = '\u{fdd3}';
/// After the arguments.
pub(crate) const HARMONY_CLOSE: char = '\u{fdd4}';

/// All of them.
pub(crate) const MARKS: [char; 4] = [TOKEN_MARK, HARMONY_OPEN, HARMONY_BETWEEN, HARMONY_CLOSE];

/// Positions of marks in streamed text, of which a part is held back without them.
#[derive(Clone, Debug, Default)]
pub(crate) struct MarkPositions {
    /// Marks, and how many bytes of the text are before them.
    marks: VecDeque<(usize, char)>,
    /// Bytes of the text that were added, and that were given back.
    added: usize,
    given: usize,
}

impl MarkPositions {
    /// Adds text, and returns it without its marks.
    pub(crate) fn without(&mut self, text: &str, is_mark: impl Fn(char) -> bool) -> String {
        let mut plain = String::with_capacity(text.len());
        for letter in text.chars() {
            match is_mark(letter) {
                true => self.marks.push_back((self.added + plain.len(), letter)),
                false => plain.push(letter),
            }
        }
        self.added += plain.len();
        plain
    }

    /// The next part of the text with its marks. One before text that is still held back stays.
    pub(crate) fn with(&mut self, text: &str) -> String {
        let (mut marked, mut from) = (String::with_capacity(text.len()), 0);
        while let Some((at, mark)) = self.marks.pop_front_if(|(at, _)| *at - self.given < text.len()) {
            let at = at - self.given;
            marked.push_str(text.get(from..at).unwrap_or_default());
            marked.push(mark);
            from = at;
        }
        marked.push_str(text.get(from..).unwrap_or_default());
        self.given += text.len();
        marked
    }
}
