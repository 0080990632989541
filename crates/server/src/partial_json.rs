//! Arguments of calls that were cut, as objects.

use serde_json::{Map, Value};

/// The object that a JSON text is. Of a text that was cut, the object of all that is whole, with a text at its end as far as it
/// goes; an empty one if nothing is.
pub(crate) fn object(text: &str) -> Map<String, Value> {
    let parsed = |text: &str| match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Some(object),
        _ => None,
    };
    parsed(text).or_else(|| ends(text).iter().find_map(|text| parsed(text))).unwrap_or_default()
}

/// Texts that may be JSON, longest first: the text with its brackets closed, and that up to the last whole value.
fn ends(text: &str) -> [String; 2] {
    let mut open: Vec<char> = Vec::new();
    // The bytes up to the last whole value, and the brackets that are open there.
    let mut whole: (usize, Vec<char>) = (0, Vec::new());
    let (mut in_string, mut escape) = (false, None);
    for (at, letter) in text.char_indices() {
        match (in_string, letter) {
            // `\u` and four digits are one escape.
            (true, _) if escape.is_some_and(|(_, left)| left > 0) => {
                escape = match escape {
                    Some((from, 1)) if letter == 'u' => Some((from, 4)),
                    Some((from, left)) => Some((from, left - 1)),
                    None => None,
                };
            }
            (true, '\\') => escape = Some((at, 1)),
            (_, '"') => in_string = !in_string,
            (true, _) => {}
            (false, '{' | '[') => {
                open.push(if letter == '{' { '}' } else { ']' });
                whole = (at + 1, open.clone());
            }
            (false, '}' | ']') => {
                open.pop();
                whole = (at + 1, open.clone());
            }
            (false, ',') => whole = (at, open.clone()),
            (false, _) => {}
        }
    }
    // An escape that was cut is no character.
    let kept = escape.filter(|(_, left)| in_string && *left > 0).map_or(text.len(), |(from, _)| from);
    let closed = |end: usize, quote: &str, open: &[char]| {
        let brackets: String = open.iter().rev().collect();
        format!("{}{quote}{brackets}", text.get(..end).unwrap_or_default())
    };
    [closed(kept, if in_string { "\"" } else { "" }, &open), closed(whole.0, "", &whole.1)]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn cut_objects_keep_what_is_whole() {
        for (text, wanted) in [
            (r#"{"city": "Bern"}"#, json!({ "city": "Bern" })),
            (r#"{"city": "Be"#, json!({ "city": "Be" })),
            (r#"{"city": "Be\"#, json!({ "city": "Be" })),
            (r#"{"city": "Be\u00e"#, json!({ "city": "Be" })),
            (r#"{"city": "B\"e"#, json!({ "city": "B\"e" })),
            (r#"{"city": "Bern", "da"#, json!({ "city": "Bern" })),
            (r#"{"city": "Bern", "days":"#, json!({ "city": "Bern" })),
            (r#"{"a": {"b": [1, 2"#, json!({ "a": { "b": [1, 2] } })),
            (r#"{"a": {"b": tr"#, json!({ "a": {} })),
            (r#"{"a": [{"b": 1}, "#, json!({ "a": [{ "b": 1 }] })),
            ("{", json!({})),
            ("", json!({})),
            ("[1", json!({})),
            ("word", json!({})),
        ] {
            assert_eq!(Value::Object(object(text)), wanted, "{text}");
        }
    }
}
