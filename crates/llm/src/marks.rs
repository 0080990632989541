//! Noncharacters that stand in streamed text for what is no text. Those that a model writes become U+FFFD.

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
