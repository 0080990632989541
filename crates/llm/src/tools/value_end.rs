//! Where the value of an argument between tags ends.

use super::json_extent::JsonExtent;

/// The place of the tag that ends a value, which the text begins with; `None` if it is not there yet. In JSON the tag may be a part
/// of a string; `is_json` says whether a value that begins as JSON does is JSON.
pub(super) fn value_end(text: &str, tag: &str, ended: bool, is_json: impl FnOnce() -> bool) -> Option<usize> {
    let first = text.find(tag)?;
    if !text.trim_start().starts_with(['{', '[', '"']) {
        return Some(first);
    }
    let after_json = match JsonExtent::default().push(text) {
        Some(end) => {
            let rest = text.get(end..).unwrap_or_default();
            let begin = rest.trim_start();
            match begin.starts_with(tag) {
                true => Some(text.len() - begin.len()),
                false if tag.starts_with(begin) && !ended => None,
                // What looks like JSON is not.
                false => return Some(first),
            }
        }
        None if ended => return Some(first),
        None => None,
    };
    match after_json {
        Some(place) if place == first => Some(first),
        place if is_json() => place,
        _ => Some(first),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_within_json_are_no_ends() {
        let tag = "</p>";
        let end = |text: &str, ended| value_end(text, tag, ended, || true);
        for (text, wanted) in [
            ("a</p>b</p>", Some(1)),
            ("{\"a\": \"</p>\"}\n</p>", Some(14)),
            ("[\"</p>\", 1]</p>x", Some(11)),
            ("\"</p>\"</p>", Some(6)),
            ("{\"a\": \"</p>\"}", None),
            ("{\"a\": \"</p>\"} <", None),
            ("{\"a\": \"</p>", None),
            ("{\"a\": 1}</p>", Some(8)),
            ("[1", None),
            // No JSON after all.
            ("\"a\" is</p> \"b\"</p>", Some(6)),
        ] {
            assert_eq!(end(text, false), wanted, "{text}");
        }
        assert_eq!(end("{\"a\": \"b</p>", true), Some(8));
        assert_eq!(end("{\"a\": \"</p>\"} ", true), Some(7));
        assert_eq!(value_end("[\"</p>\"]</p>", tag, false, || false), Some(2));
    }
}
