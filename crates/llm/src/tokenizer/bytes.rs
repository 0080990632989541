//! The alphabet of byte-level vocabularies, in which a printable character stands for each byte.

/// The character that stands for a byte: itself where it is printable Latin-1, else one from U+0100 upwards.
pub(super) fn character(byte: u8) -> char {
    if is_printable(byte) {
        return char::from(byte);
    }
    let earlier = (0..byte).filter(|&other| !is_printable(other)).count() as u32;
    char::from_u32(0x100 + earlier).unwrap_or(char::REPLACEMENT_CHARACTER)
}

fn is_printable(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}

/// The inverse mapping, from characters to bytes.
#[derive(Clone, Debug)]
pub(super) struct Alphabet([Option<u8>; 0x144]);

impl Alphabet {
    pub(super) fn new() -> Alphabet {
        let mut table = [None; 0x144];
        for byte in 0..=u8::MAX {
            if let Some(slot) = table.get_mut(character(byte) as usize) {
                *slot = Some(byte);
            }
        }
        Alphabet(table)
    }

    /// The bytes that a token's text stands for, or `None` when it uses a character outside the alphabet.
    pub(super) fn decode(&self, text: &str) -> Option<Vec<u8>> {
        let mut bytes = Vec::with_capacity(text.len());
        self.decode_onto(text, &mut bytes).then_some(bytes)
    }

    /// Appends the bytes that a text stands for; false when it uses a character outside the alphabet.
    pub(super) fn decode_onto(&self, text: &str, bytes: &mut Vec<u8>) -> bool {
        text.chars().all(|letter| {
            let byte = self.0.get(letter as usize).copied().flatten();
            bytes.extend(byte);
            byte.is_some()
        })
    }
}

/// The byte that a token like `<0x0A>` stands for.
pub(super) fn hexadecimal(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        u8::from_str_radix(digits, 16).ok()
    } else {
        None
    }
}
