//! Where a JSON value ends in text that arrives in pieces.

/// Finds the end of one JSON value. It does not check the value: what has no end is not JSON either.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonExtent {
    depth: usize,
    in_string: bool,
    escaped: bool,
    begun: bool,
}

impl JsonExtent {
    /// Goes on with text; the number of bytes up to and with the value's end, once it is there. A number or word ends before the
    /// character that follows it.
    pub(super) fn push(&mut self, text: &str) -> Option<usize> {
        for (at, letter) in text.char_indices() {
            if self.in_string {
                match letter {
                    _ if self.escaped => self.escaped = false,
                    '\\' => self.escaped = true,
                    '"' => self.in_string = false,
                    _ => {}
                }
                if !self.in_string && self.depth == 0 {
                    return Some(at + 1);
                }
                continue;
            }
            let is_scalar = self.begun && self.depth == 0;
            match letter {
                '"' => self.in_string = true,
                '{' | '[' if !is_scalar => self.depth += 1,
                '}' | ']' | ',' | ' ' | '\t' | '\r' | '\n' if is_scalar => return Some(at),
                '}' | ']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                letter if letter.is_whitespace() => continue,
                _ => {}
            }
            self.begun = true;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_end_where_they_end_however_they_arrive() {
        let values = [
            (r#"{"a": [1, "}\"]"], "b": {}}x"#, 27),
            (r#" "a\\" "#, 6),
            ("12, ", 2),
            ("true}", 4),
            ("[[],[{}]]]", 9),
        ];
        for (text, end) in values {
            assert_eq!(JsonExtent::default().push(text), Some(end), "{text}");
            let (mut extent, mut found) = (JsonExtent::default(), None);
            for (at, letter) in text.char_indices() {
                if let Some(more) = extent.push(letter.encode_utf8(&mut [0; 4])) {
                    found = Some(at + more);
                    break;
                }
            }
            assert_eq!(found, Some(end), "{text}");
        }
    }
}
