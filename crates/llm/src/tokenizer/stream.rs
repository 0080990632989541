//! Streaming detokenization, in whole characters.

use super::Tokenizer;
use crate::Result;

/// Decodes a stream of tokens to whole characters. Bytes that cannot become a character are replaced by U+FFFD.
///
/// The first token keeps its leading space, since the text continues a prompt.
#[derive(Clone, Debug)]
pub struct Detokenizer<'t> {
    tokenizer: &'t Tokenizer,
    pending: Pending,
}

impl<'t> Detokenizer<'t> {
    /// A detokenizer at the start of a stream.
    pub fn new(tokenizer: &'t Tokenizer) -> Detokenizer<'t> {
        Detokenizer { tokenizer, pending: Pending::default() }
    }

    /// The characters that this token completes; empty while a character is incomplete.
    pub fn push(&mut self, token: u32) -> Result<String> {
        Ok(self.pending.push(self.tokenizer.piece(token)?))
    }

    /// The rest at the end of the stream: nothing, or U+FFFD for an incomplete character.
    pub fn finish(&mut self) -> String {
        self.pending.finish()
    }
}

/// The bytes of an incomplete character.
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

/// Whether bytes are the start of a character.
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
    fn a_character_in_parts_is_completed() {
        let (texts, rest) = stream(&[b"a\xf0", b"\x9f", b"\x99", b"\x82b"]);
        assert_eq!((texts, rest.as_str()), (["a", "", "", "🙂b"].map(String::from).to_vec(), ""));
    }

    #[test]
    fn invalid_bytes_are_replaced_at_once() {
        let (texts, rest) = stream(&[b"\x80", b"\xc3", b"x", b"\xff\xfe", b"\xe4\xbd"]);
        let expected = ["\u{fffd}", "", "\u{fffd}x", "\u{fffd}\u{fffd}", ""].map(String::from).to_vec();
        assert_eq!((texts, rest.as_str()), (expected, "\u{fffd}"));
    }

    #[test]
    fn chunks_of_any_size_give_the_same_text() {
        let bytes = b"na\xc3\xafve \xf0\x9f\x99\x82\xf0\x9f \xed\xa0\x80 \xe4\xbd\xa0\xc3";
        let whole = String::from_utf8_lossy(bytes);
        for size in 1..bytes.len() {
            let parts: Vec<&[u8]> = bytes.chunks(size).collect();
            let (texts, rest) = stream(&parts);
            assert_eq!(texts.concat() + &rest, whole, "chunks of {size}");
        }
    }
}
