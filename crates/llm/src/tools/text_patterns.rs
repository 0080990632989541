//! Patterns and formats of texts that are written without quotes, as regular expressions of whole texts.

use serde_json::Value;

/// Formats of texts that are enforced, each as an expression of the whole text.
const FORMATS: &[(&str, &str)] = &[
    ("date", DATE),
    ("time", TIME),
    ("uuid", "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"),
    ("ipv4", IPV4),
    ("email", r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*@LABEL(\.LABEL)*"),
    ("hostname", r"LABEL(\.LABEL)*"),
    ("uri", r"[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:/?#@!$&'()*+,;=-]|\[|\]|%[0-9A-Fa-f]{2})+"),
    ("json-pointer", "(/([^/~]|~[01])*)*"),
    ("relative-json-pointer", "(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)"),
    ("base64", "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"),
    ("base64url", "[A-Za-z0-9_-]*={0,2}"),
];

const DATE: &str = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))";
const TIME: &str =
    r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
const IPV4: &str =
    r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
/// A part of a host's name between dots.
const LABEL: &str = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?";

/// The expressions that a text of a schema must match as a whole.
///
/// # Errors
/// The reason why one cannot be enforced.
pub(super) fn expressions(schema: &Value) -> Result<Vec<String>, String> {
    let text = |keyword: &str| schema.get(keyword).and_then(Value::as_str);
    let mut all = Vec::new();
    if let Some(pattern) = text("pattern") {
        let whole = whole_text(pattern).ok_or_else(|| {
            format!(
                "the pattern {pattern:?} has an anchor within it, which cannot be enforced in a text without quotes"
            )
        })?;
        all.push(whole);
    }
    if let Some(name) = text("format") {
        all.extend(format(name));
    }
    Ok(all)
}

/// The expression of a format; `None` if the format says nothing about a text.
fn format(name: &str) -> Option<String> {
    // Versions of UUIDs are not told apart.
    let name = if name.len() == 5 && name.starts_with("uuid") { "uuid" } else { name };
    match name {
        "date-time" => Some(format!("{DATE}[Tt]{TIME}")),
        "duration" => Some(duration()),
        "ipv6" => Some(ipv6()),
        _ => FORMATS.iter().find(|(own, _)| *own == name).map(|(_, whole)| whole.replace("LABEL", LABEL)),
    }
}

/// A duration of ISO 8601: units from the largest to the smallest, without gaps.
fn duration() -> String {
    let chain = |units: [&str; 3]| {
        let [first, second, third] = units.map(|unit| format!("[0-9]+{unit}"));
        format!("({first}({second}({third})?)?|{second}({third})?|{third})")
    };
    let (days, hours) = (chain(["Y", "M", "D"]), chain(["H", "M", "S"]));
    format!("P({days}(T{hours})?|T{hours}|[0-9]+W)")
}

/// Eight groups, or fewer with one gap.
fn ipv6() -> String {
    let group = "[0-9A-Fa-f]{1,4}";
    let groups = |most: usize| match most {
        0 => String::new(),
        _ => format!("({group}(:{group}){{0,{}}})?", most - 1),
    };
    let gaps: Vec<String> =
        (0..8).map(|before| format!("{}::{}", exactly(group, before), groups(7 - before))).collect();
    format!("({group}(:{group}){{7}}|{})", gaps.join("|"))
}

/// So many groups with colons between them.
fn exactly(group: &str, count: usize) -> String {
    match count {
        0 => String::new(),
        _ => format!("{group}(:{group}){{{}}}", count - 1),
    }
}

/// The expression of the whole texts in which a pattern is found. `None` if an anchor is anywhere but at an end of one of the
/// pattern's alternatives.
fn whole_text(pattern: &str) -> Option<String> {
    const ANY: &str = "(?s:.*)";
    let mut all = Vec::new();
    for alternative in alternatives(pattern) {
        let (start, rest) = match alternative.strip_prefix('^') {
            Some(rest) => ("", rest),
            None => (ANY, alternative),
        };
        let ends = |rest: &str| rest.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 0;
        let (rest, end) = match rest.strip_suffix('$').filter(|rest| ends(rest)) {
            Some(rest) => (rest, ""),
            None => (rest, ANY),
        };
        if has_anchor(rest) {
            return None;
        }
        all.push(format!("{start}(?:{rest}){end}"));
    }
    Some(format!("(?:{})", all.join("|")))
}

/// The characters of a pattern that are neither escaped nor in a class, each with its place and the groups that it is in; an
/// escaped one has a backslash in front.
fn bare(pattern: &str) -> impl Iterator<Item = (usize, usize, bool, char)> {
    let (mut depth, mut in_class, mut escaped) = (0_usize, false, false);
    pattern.char_indices().filter_map(move |(at, letter)| {
        if std::mem::take(&mut escaped) {
            return (!in_class).then_some((at, depth, true, letter));
        }
        match letter {
            '\\' => {
                escaped = true;
                return None;
            }
            ']' => in_class = false,
            _ if in_class => return None,
            '[' => in_class = true,
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        Some((at, depth, false, letter))
    })
}

/// The alternatives of a pattern, outside of groups.
fn alternatives(pattern: &str) -> Vec<&str> {
    let bars: Vec<usize> = bare(pattern)
        .filter(|(_, depth, escaped, letter)| *depth == 0 && !escaped && *letter == '|')
        .map(|(at, ..)| at)
        .collect();
    let starts = std::iter::once(0).chain(bars.iter().map(|at| at + 1));
    let ends = bars.iter().copied().chain([pattern.len()]);
    starts.zip(ends).filter_map(|(start, end)| pattern.get(start..end)).collect()
}

/// Whether an expression has an anchor or a boundary of a word.
fn has_anchor(expression: &str) -> bool {
    bare(expression).any(|(_, _, escaped, letter)| match escaped {
        true => "bBAzZG".contains(letter),
        false => letter == '^' || letter == '$',
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use regex::Regex;
    use serde_json::json;

    use super::*;

    /// Whether a text as a whole matches all expressions.
    fn matches(all: &[String], text: &str) -> bool {
        all.iter().all(|one| Regex::new(&format!("^(?:{one})$")).unwrap().is_match(text))
    }

    #[test]
    fn whole_texts_are_those_in_which_a_pattern_is_found() {
        let texts = ["", "a", "b", "ab", "ba", "aab", "a|b", "$", "a$", "^a", "[a", "xay", "b\na"];
        for pattern in [
            "a", "^a", "a$", "^a$", "^a|b$", "^(a|b)+$", r"\$$", r"^\^", "[$^|]", r"a\|b", "^[^a]", "",
            r"[\]a]",
        ] {
            let own = Regex::new(pattern).unwrap();
            let whole = expressions(&json!({ "pattern": pattern })).unwrap();
            for text in texts {
                assert_eq!(matches(&whole, text), own.is_match(text), "{pattern:?} and {text:?}");
            }
        }
        for pattern in ["(^a|b)", r"\ba", "a^b", "(a$)"] {
            assert!(expressions(&json!({ "pattern": pattern })).unwrap_err().contains("anchor"), "{pattern}");
        }
    }

    #[test]
    fn formats_are_expressions() {
        let cases: &[(&str, &[&str], &[&str])] = &[
            ("date", &["2026-02-28", "1999-12-31"], &["2026-02-30", "2026-13-01", "26-01-01", "2026-04-31"]),
            ("time", &["23:59:60Z", "00:00:00.5+01:00"], &["24:00:00Z", "1:00:00Z", "10:00:00"]),
            ("date-time", &["2026-02-28T10:00:00Z"], &["2026-02-28", "2026-02-28 10:00:00Z"]),
            (
                "duration",
                &["P1Y", "P1Y2M3DT4H5M6S", "PT5S", "P3W", "P1DT1H"],
                &["P", "PT", "P1YT", "P1Y3D", "1Y"],
            ),
            ("uuid4", &["123e4567-e89b-12d3-a456-426614174000"], &["123e4567e89b12d3a456426614174000"]),
            ("ipv4", &["0.0.0.0", "255.249.99.1"], &["256.0.0.1", "1.2.3", "01.2.3.4"]),
            (
                "ipv6",
                &["::", "::1", "1::", "1:2:3:4:5:6:7:8", "fe80::1:2", "1:2:3:4:5:6:7::"],
                &[":", "1:2", "1::2::3", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7::8"],
            ),
            ("email", &["a@b.ch", "a.b+c@example.com"], &["a", "@b.ch", "a@", "a b@c.ch"]),
            ("hostname", &["example.com", "a"], &["-a", "a..b", "a_b"]),
            ("uri", &["https://example.com/a?b=c#d", "mailto:a@b.ch"], &["example.com", "https:", "a b:c"]),
            ("binary", &["anything"], &[]),
        ];
        for (format, fine, wrong) in cases {
            let all = expressions(&json!({ "format": format })).unwrap();
            for text in *fine {
                assert!(matches(&all, text), "{format}: {text}");
            }
            for text in *wrong {
                assert!(!matches(&all, text), "{format}: {text}");
            }
        }
    }
}
