//! Which tokens the parts of an answer were made of. Text comes later than its tokens: characters of several tokens, possible stop
//! strings and marks of reasoning and calls are held back, and some of it never comes.

use quadriga_llm::TextPiece;
use quadriga_llm::serving::TokenLogprobs;

/// What a token of an answer was for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TokenPart {
    /// It is in the text of the answer.
    Text,
    /// It is in the reasoning.
    Reasoning,
    /// It has no text: a control token, such as the one that ends an answer.
    Control,
    /// It is in a call of a tool, or a mark of one or of reasoning.
    Hidden,
}

/// A token of an answer. Those of a stop string, and whatever else was cut with it, are not of the answer.
#[derive(Clone, PartialEq, Debug)]
pub struct AnswerToken {
    /// The token.
    pub token: u32,
    /// What it was for.
    pub part: TokenPart,
    /// Log-probabilities, if they were asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// The tokens whose text was held back so far.
#[derive(Default)]
pub(crate) struct HeldTokens(Vec<HeldToken>);

struct HeldToken {
    token: u32,
    logprobs: Option<TokenLogprobs>,
    /// Of its bytes, those that no part of the answer has yet.
    bytes: Vec<u8>,
    /// Whether another part of it was found in the answer before.
    told: bool,
}

impl HeldToken {
    fn told_as(self, part: TokenPart) -> Option<AnswerToken> {
        let HeldToken { token, logprobs, told, .. } = self;
        (!told).then_some(AnswerToken { token, part, logprobs })
    }

    fn told_hidden(self) -> Option<AnswerToken> {
        let part = if self.bytes.is_empty() { TokenPart::Control } else { TokenPart::Hidden };
        self.told_as(part)
    }
}

impl HeldTokens {
    /// Adds a token, which has these bytes in the text, with what it completes. Returns the tokens, in their order, of which it is known now what they were for.
    pub(crate) fn add(
        &mut self,
        bytes: &[u8],
        piece: &TextPiece,
        logprobs: Option<TokenLogprobs>,
    ) -> Vec<AnswerToken> {
        let token = piece.token;
        let TextPiece { text, reasoning, tool_calls, .. } = piece;
        // Nearly all tokens.
        if self.0.is_empty() && tool_calls.is_empty() && !bytes.is_empty() {
            let part = match (text.as_bytes() == bytes, reasoning.as_bytes() == bytes) {
                (true, _) if reasoning.is_empty() => Some(TokenPart::Text),
                (_, true) if text.is_empty() => Some(TokenPart::Reasoning),
                _ => None,
            };
            if let Some(part) = part {
                return vec![AnswerToken { token, part, logprobs }];
            }
        }
        self.0.push(HeldToken { token, logprobs, bytes: bytes.to_vec(), told: false });
        let mut told = Vec::new();
        self.tell(reasoning, TokenPart::Reasoning, &mut told);
        self.tell(text, TokenPart::Text, &mut told);
        if text.is_empty() && !tool_calls.is_empty() {
            told.extend(self.0.drain(..).filter_map(HeldToken::told_hidden));
        }
        let controls = self.0.iter().take_while(|held| held.bytes.is_empty()).count();
        told.extend(self.0.drain(..controls).filter_map(HeldToken::told_hidden));
        told
    }

    /// The tokens that are left at the end of an answer; none of them belongs to it if a stop string ended it.
    pub(crate) fn finish(&mut self, stopped: bool) -> Vec<AnswerToken> {
        let rest = std::mem::take(&mut self.0);
        rest.into_iter().filter(|_| !stopped).filter_map(HeldToken::told_hidden).collect()
    }

    /// Finds the tokens that a part was made of. What comes before it was hidden; what follows is still held.
    fn tell(&mut self, text: &str, part: TokenPart, told: &mut Vec<AnswerToken>) {
        if text.is_empty() {
            return;
        }
        let (start, end) = self.range(text);
        let mut offset = 0;
        for mut held in std::mem::take(&mut self.0) {
            let (first, last) = (offset, offset + held.bytes.len());
            offset = last;
            if first >= end {
                self.0.push(held);
                continue;
            }
            let rest =
                held.bytes.split_off(held.bytes.len() - last.saturating_sub(end).min(held.bytes.len()));
            let (token, is_hidden) = (held.token, held.bytes.is_empty() || last <= start);
            told.extend(if is_hidden { held.told_hidden() } else { held.told_as(part) });
            if !rest.is_empty() {
                self.0.push(HeldToken { token, logprobs: None, bytes: rest, told: true });
            }
        }
    }

    /// Where a text is in the bytes that are held; everywhere if it is not found, as marks may have been replaced in it.
    fn range(&self, text: &str) -> (usize, usize) {
        let bytes: Vec<u8> = self.0.iter().flat_map(|held| held.bytes.iter().copied()).collect();
        // Of each byte of the text that is shown, where those bytes end that it was made of.
        let (mut shown, mut ends) = (String::new(), Vec::new());
        let mut end = 0;
        for chunk in bytes.utf8_chunks() {
            shown.push_str(chunk.valid());
            ends.extend((1..=chunk.valid().len()).map(|len| end + len));
            end += chunk.valid().len() + chunk.invalid().len();
            if !chunk.invalid().is_empty() {
                shown.push(char::REPLACEMENT_CHARACTER);
                ends.extend([end; char::REPLACEMENT_CHARACTER.len_utf8()]);
            }
        }
        let is_first = |at: &usize| shown.get(..*at).is_some_and(|before| before.trim().is_empty());
        // Behind a mark, the text is the last that looks like it: the mark may have its words.
        let found = shown.find(text).filter(is_first).or_else(|| shown.rfind(text));
        let Some(at) = found else { return (0, bytes.len()) };
        let end_of = |len: usize| len.checked_sub(1).and_then(|last| ends.get(last)).copied().unwrap_or(0);
        (end_of(at), end_of(at + text.len()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    /// Adds tokens with these bytes and what they complete; returns what each was for at the end.
    fn parts(pieces: &[(&[u8], &str, &str)], stopped: bool) -> Vec<(u32, TokenPart)> {
        let mut held = HeldTokens::default();
        let mut all = Vec::new();
        for (number, (bytes, text, reasoning)) in pieces.iter().enumerate() {
            held.0.push(HeldToken {
                token: number as u32,
                logprobs: None,
                bytes: bytes.to_vec(),
                told: false,
            });
            held.tell(reasoning, TokenPart::Reasoning, &mut all);
            held.tell(text, TokenPart::Text, &mut all);
        }
        all.extend(held.finish(stopped));
        all.into_iter().map(|token| (token.token, token.part)).collect()
    }

    #[test]
    fn tokens_follow_the_text_that_they_made() {
        use TokenPart::{Control, Hidden, Reasoning, Text};
        // A character of two tokens, then a stop string of which the last token has text before it.
        let pieces: &[(&[u8], &str, &str)] =
            &[(b"a\xc3", "a", ""), (b"\xa9", "é", ""), (b"bS", "b", ""), (b"TOP", "", "")];
        assert_eq!(parts(pieces, true), [(0, Text), (1, Text), (2, Text)]);
        // Marks, with a token that ends one part and begins the next.
        let pieces: &[(&[u8], &str, &str)] = &[
            (b"<think>", "", ""),
            (b"hm", "", "hm"),
            (b"\n</th", "", ""),
            (b"ink>", "", ""),
            (b"\n\n", "", ""),
            (b"think", "think", ""),
            (b"", "", ""),
        ];
        let found = [Hidden, Reasoning, Hidden, Hidden, Hidden, Text, Control];
        assert_eq!(parts(pieces, false), (0..).zip(found).collect::<Vec<_>>());
        let pieces: &[(&[u8], &str, &str)] = &[(b"x</t>", "", "x"), (b"y", "y", "")];
        assert_eq!(parts(pieces, false), [(0, Reasoning), (1, Text)]);
        // What is held back twice comes at once.
        let pieces: &[(&[u8], &str, &str)] = &[(b"ab", "", ""), (b"ab", "ab", ""), (b"c", "abc", "")];
        assert_eq!(parts(pieces, false), [(0, Text), (1, Text), (2, Text)]);
        // Broken characters at the end.
        let pieces: &[(&[u8], &str, &str)] = &[(b"z\xe6", "z", ""), (b"\x97", "\u{fffd}", "")];
        assert_eq!(parts(pieces, false), [(0, Text), (1, Text)]);
    }
}
