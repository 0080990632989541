//! Common beginnings and ends of texts that are made of markup: a tag is never divided.

/// The parts of a text: tags such as `<tool_call>` and `[TOOL_CALLS]`, and single characters.
pub(super) fn atoms(text: &str) -> Vec<&str> {
    let mut all = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = tag(rest).unwrap_or(first.len_utf8());
        let (atom, after) = rest.split_at_checked(length).unwrap_or((rest, ""));
        all.push(atom);
        rest = after;
    }
    all
}

/// The length of the tag that a text begins with.
fn tag(text: &str) -> Option<usize> {
    let (close, is_inner): (char, fn(char) -> bool) = match text.chars().next()? {
        '<' => ('>', |letter| !letter.is_whitespace() && !matches!(letter, '<' | '"' | '{')),
        '[' => (']', |letter| letter.is_ascii_uppercase() || matches!(letter, '_' | '/')),
        _ => return None,
    };
    let inner = text.get(1..)?;
    let end = inner.find(close).filter(|end| *end > 0)?;
    inner.get(..end)?.chars().all(is_inner).then(|| 1 + end + close.len_utf8())
}

/// The longest common beginning, in bytes.
pub(super) fn common_prefix(a: &str, b: &str) -> usize {
    let pairs = atoms(a).into_iter().zip(atoms(b));
    pairs.take_while(|(a, b)| a == b).map(|(atom, _)| atom.len()).sum()
}

/// The longest common end, in bytes.
pub(super) fn common_suffix(a: &str, b: &str) -> usize {
    let (a, b) = (atoms(a), atoms(b));
    let pairs = a.iter().rev().zip(b.iter().rev());
    pairs.take_while(|(a, b)| a == b).map(|(atom, _)| atom.len()).sum()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn tags_are_not_divided() {
        assert_eq!(atoms("<a>\n[B] {"), ["<a>", "\n", "[B]", " ", "{"]);
        assert_eq!(atoms("<f=[x]"), ["<", "f", "=", "[", "x", "]"]);
        assert_eq!(common_suffix("<begins><begin>", "<end><begin>"), "<begin>".len());
        assert_eq!(common_prefix("</a></b>", "</a></c>"), "</a>".len());
    }
}
