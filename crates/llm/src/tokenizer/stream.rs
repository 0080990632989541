//! Tokens to text as they come, never half a character.

use super::Tokenizer;
use crate::Result;

/// Collects what tokens print and hands out whole characters. What cannot become a character any more is U+FFFD.
///
/// The first token keeps its leading space: a continuation is to be printed right after what it continues.
#[derive(Clone, Debug)]
pub struct Detokenizer<'t> {
    tokenizer: &'t Tokenizer,
    pending: Pending,
}

impl<'t> Detokenizer<'t> {
    /// Starts with nothing pending.
    pub fn new(tokenizer: &'t Tokenizer) -> Detokenizer<'t> {
        Detokenizer { tokenizer, pending: Pending::default() }
    }

    /// The text that is complete with this token; empty while a character is still incomplete.
    pub fn push(&mut self, token: u32) -> Result<String> {
        Ok(self.pending.push(self.tokenizer.piece(token)?))
    }

    /// What is left at the end: nothing, or U+FFFD for a character that never was completed.
    pub fn finish(&mut self) -> String {
        self.pending.finish()
    }
}

/// Bytes of a character that is not complete.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pending(Vec<u8>);

impl Pending {
    pub(crate) fn push(&mut self, bytes: &[u8]) -> String {
        self.0.extend_from_slice(bytes);
        let mut text = String::new();
        let mut kept = 0;
        for chunk in self.0.utf8_chunks() {
            text.push_str(chunk.valid());
            let invalid = chunk.invalid();
            let at_end = kept + chunk.valid().len() + invalid.len() == self.0.len();
            if at_end && may_continue(invalid) {
                kept += chunk.valid().len();
                break;
            }
            kept += chunk.valid().len() + invalid.len();
            if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.0.drain(..kept.min(self.0.len()));
        text
    }

    pub(crate) fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.0).into_owned();
        self.0.clear();
        text
    }
}

/// Whether bytes that are not a character yet are the start of one.
fn may_continue(bytes: &[u8]) -> bool {
    !bytes.is_empty() && std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::Pending;

    fn stream(parts: &[&[u8]]) -> (Vec<String>, String) {
        let mut pending = Pending::default();
        let texts = parts.iter().map(|part| pending.push(part)).collect();
        (texts, pending.finish())
    }

    #[test]
    fn a_character_in_parts_comes_whole() {
        let (texts, rest) = stream(&[b"a\xf0", b"\x9f", b"\x99", b"\x82b"]);
        assert_eq!((texts, rest.as_str()), (["a", "", "", "🙂b"].map(String::from).to_vec(), ""));
    }

    #[test]
    fn what_cannot_become_a_character_is_replaced_at_once() {
        let (texts, rest) = stream(&[b"\x80", b"\xc3", b"x", b"\xff\xfe", b"\xe4\xbd"]);
        let expected = ["\u{fffd}", "", "\u{fffd}x", "\u{fffd}\u{fffd}", ""].map(String::from).to_vec();
        assert_eq!((texts, rest.as_str()), (expected, "\u{fffd}"));
    }

    #[test]
    fn any_cut_of_any_bytes_gives_what_the_whole_gives() {
        let bytes = b"na\xc3\xafve \xf0\x9f\x99\x82\xf0\x9f \xed\xa0\x80 \xe4\xbd\xa0\xc3";
        let whole = String::from_utf8_lossy(bytes);
        for size in 1..bytes.len() {
            let parts: Vec<&[u8]> = bytes.chunks(size).collect();
            let (texts, rest) = stream(&parts);
            assert_eq!(texts.concat() + &rest, whole, "chunks of {size}");
        }
    }
}
