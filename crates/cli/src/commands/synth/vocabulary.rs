//! The vocabulary of a synthetic model: a token per byte, an end-of-text token, and numbered words for the rest.

use quadriga_gguf::{Result, Writer};

/// The 256 bytes and the end-of-text token.
pub(super) const MIN_TOKENS: usize = 257;

/// Token types of the GGUF format.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;

/// Declares that the file has no vocabulary.
pub(super) fn none(writer: &mut Writer<'_>) -> Result<()> {
    writer.set("tokenizer.ggml.model", "no_vocab").map(|_| ())
}

/// Writes a vocabulary of `count` tokens, at least [`MIN_TOKENS`].
pub(super) fn bytes(writer: &mut Writer<'_>, count: usize) -> Result<()> {
    let mut tokens: Vec<String> = alphabet().map(String::from).collect();
    tokens.push("<|endoftext|>".to_owned());
    // A word starts with a space, which byte-level vocabularies write as "Ġ".
    tokens.extend((MIN_TOKENS..count).map(|number| format!("Ġw{number}")));
    let types: Vec<i32> =
        (0..count).map(|token| if token + 1 == MIN_TOKENS { CONTROL } else { NORMAL }).collect();
    writer.set("tokenizer.ggml.model", "gpt2")?;
    writer.set("tokenizer.ggml.pre", "gpt-2")?;
    writer.set("tokenizer.ggml.tokens", tokens)?;
    writer.set("tokenizer.ggml.token_type", types)?;
    writer.set("tokenizer.ggml.merges", Vec::<String>::new())?;
    writer.set("tokenizer.ggml.bos_token_id", MIN_TOKENS as u32 - 1)?;
    writer.set("tokenizer.ggml.eos_token_id", MIN_TOKENS as u32 - 1)?;
    writer.set("tokenizer.ggml.add_bos_token", false)?;
    Ok(())
}

/// The characters of GPT-2's byte-level encoding: printable bytes as themselves, the others as code points from 256 on.
fn alphabet() -> impl Iterator<Item = char> {
    let mut next = 256u32;
    (0..=u8::MAX).map(move |byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    })
}
