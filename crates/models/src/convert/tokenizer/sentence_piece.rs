//! `tokenizer.model`: SentencePiece's own file, a protocol buffer.

use std::path::Path;

use super::super::config::{MAX_PIECES, read_bytes};
use super::super::error::{ConvertError, ConvertResult, invalid};
use super::{ConvertedVocabulary, TokenKind, VocabularyToken};

/// A field of a message: its number and its value.
enum Field<'a> {
    Number(u64),
    Fixed32(u32),
    Bytes(&'a [u8]),
}

/// Reads the fields of a message; `None` if the bytes are not one.
fn fields(mut bytes: &[u8]) -> Option<Vec<(u64, Field<'_>)>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes)?;
        let field = match tag & 7 {
            0 => Field::Number(varint(&mut bytes)?),
            1 => {
                take(&mut bytes, 8)?;
                Field::Number(0)
            }
            2 => {
                let length = varint(&mut bytes)?;
                Field::Bytes(take(&mut bytes, usize::try_from(length).ok()?)?)
            }
            5 => Field::Fixed32(u32::from_le_bytes(take(&mut bytes, 4)?.try_into().ok()?)),
            _ => return None,
        };
        found.push((tag >> 3, field));
    }
    Some(found)
}

fn take<'a>(bytes: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(taken)
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 127) << shift;
        if first & 128 == 0 {
            return Some(value);
        }
    }
    None
}

/// Reads a file.
pub(super) fn open(path: &Path) -> ConvertResult<ConvertedVocabulary> {
    let bytes = read_bytes(path, MAX_PIECES)?;
    parse(&bytes, &path.display().to_string())
}

/// Reads a model; `file` names it in errors.
fn parse(bytes: &[u8], file: &str) -> ConvertResult<ConvertedVocabulary> {
    let message = |bytes, place: String| {
        fields(bytes).ok_or_else(|| invalid(file, place, "it is not a SentencePiece model, or cut off"))
    };
    let mut pieces = Vec::new();
    let mut is_bpe = false;
    let (mut prefix, mut removes, mut table) = (true, true, Vec::new());
    for (number, field) in message(bytes, "message".to_owned())? {
        let Field::Bytes(inner) = field else { continue };
        match number {
            1 => {
                let place = format!("piece {}", pieces.len());
                pieces.push(
                    piece(message(inner, place.clone())?)
                        .ok_or_else(|| invalid(file, place, "its text is not UTF-8"))?,
                );
            }
            2 => {
                for (number, field) in message(inner, "trainer_spec".to_owned())? {
                    if let (3, Field::Number(kind)) = (number, field) {
                        is_bpe = kind == 2;
                    }
                }
            }
            3 => {
                for (number, field) in message(inner, "normalizer_spec".to_owned())? {
                    match (number, field) {
                        (2, Field::Bytes(bytes)) => table = bytes.to_vec(),
                        (3, Field::Number(flag)) => prefix = flag != 0,
                        (4, Field::Number(flag)) => removes = flag != 0,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if pieces.is_empty() {
        let missing = format!("{file} has no pieces; it is not a SentencePiece model");
        return Err(ConvertError::Tokenizer { missing });
    }
    let mut vocabulary = ConvertedVocabulary::new(if is_bpe { "llama" } else { "t5" });
    vocabulary.tokens = pieces.into_iter().map(Some).collect();
    vocabulary.keys.push(("add_space_prefix", prefix.into()));
    if !is_bpe {
        vocabulary.keys.push(("remove_extra_whitespaces", removes.into()));
        if !table.is_empty() {
            vocabulary.keys.push(("precompiled_charsmap", table.into()));
        }
    }
    Ok(vocabulary)
}

/// A piece: text, score and type.
fn piece(message: Vec<(u64, Field<'_>)>) -> Option<VocabularyToken> {
    let mut piece = VocabularyToken { text: String::new(), score: 0.0, kind: TokenKind::Normal };
    for (number, field) in message {
        match (number, field) {
            (1, Field::Bytes(text)) => piece.text = str::from_utf8(text).ok()?.to_owned(),
            (2, Field::Fixed32(bits)) => piece.score = f32::from_bits(bits),
            (3, Field::Number(kind)) => {
                piece.kind = match kind {
                    2 => TokenKind::Unknown,
                    3 => TokenKind::Control,
                    4 => TokenKind::UserDefined,
                    5 => TokenKind::Unused,
                    6 => TokenKind::Byte,
                    _ => TokenKind::Normal,
                }
            }
            _ => {}
        }
    }
    Some(piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field with bytes.
    fn bytes(number: u8, content: &[u8]) -> Vec<u8> {
        [&[number << 3 | 2, content.len() as u8], content].concat()
    }

    #[test]
    fn a_model_is_read_and_a_broken_one_refused() {
        let piece = |text: &str, score: f32, kind: u8| {
            let score = [&[2 << 3 | 5][..], &score.to_le_bytes()].concat();
            bytes(1, &[bytes(1, text.as_bytes()), score, vec![3 << 3, kind]].concat())
        };
        let pieces = [piece("<unk>", 0.0, 2), piece("\u{2581}a", -1.5, 1), piece("<0x0A>", 0.0, 6)].concat();
        let model = [pieces, bytes(2, &[3 << 3, 2]), bytes(3, &[3 << 3, 0])].concat();
        let vocabulary = parse(&model, "tokenizer.model").unwrap();
        assert_eq!(vocabulary.model, "llama");
        let token = vocabulary.tokens[1].as_ref().unwrap();
        assert_eq!((token.text.as_str(), token.score), ("\u{2581}a", -1.5));
        assert!(vocabulary.keys.contains(&("add_space_prefix", false.into())));
        for broken in [&model[..model.len() - 1], b"", b"{\"a\":1}", &[0xff; 30]] {
            assert!(parse(broken, "tokenizer.model").is_err());
        }
    }
}
