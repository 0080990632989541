//! The vocabulary of a synthetic model: a token per byte, an end-of-text token, and numbered words for the rest; of encoders
//! word pieces of one character, and numbered words.

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

/// The special tokens of a WordPiece vocabulary, by their roles in the order of the tokens.
const SPECIAL: [(&str, &str); 5] = [
    ("[PAD]", "padding"),
    ("[UNK]", "unknown"),
    ("[CLS]", "bos"),
    // The key is spelled like this.
    ("[SEP]", "seperator"),
    ("[MASK]", "mask"),
];

/// Writes a WordPiece vocabulary of `count` tokens, at least [`MIN_TOKENS`], with which every text of ASCII characters can be
/// written.
pub(super) fn word_pieces(writer: &mut Writer<'_>, count: usize) -> Result<()> {
    let mut tokens: Vec<String> = SPECIAL.iter().map(|(text, _)| (*text).to_owned()).collect();
    // Texts become lower case, and words begin with U+2581 instead of a space.
    let characters = || (b'!'..=b'~').filter(|byte| !byte.is_ascii_uppercase()).map(char::from);
    tokens.extend(characters().map(|character| format!("\u{2581}{character}")));
    tokens.extend(characters().filter(char::is_ascii_alphanumeric).map(String::from));
    tokens.extend((tokens.len()..count).map(|number| format!("\u{2581}w{number}")));
    let types: Vec<i32> =
        (0..count).map(|token| if token < SPECIAL.len() { CONTROL } else { NORMAL }).collect();
    writer.set("tokenizer.ggml.model", "bert")?;
    writer.set("tokenizer.ggml.tokens", tokens)?;
    writer.set("tokenizer.ggml.token_type", types)?;
    for (token, (_, role)) in (0u32..).zip(SPECIAL) {
        writer.set(&format!("tokenizer.ggml.{role}_token_id"), token)?;
    }
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
