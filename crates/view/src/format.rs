//! Formatting of numbers, units, plurals and escaped text.

use std::fmt::Write;

/// Bytes with a binary unit: `96.0 MiB`.
pub fn bytes(bytes: u64) -> String {
    quadriga_runtime::byte_text(bytes)
}

/// A count with a decimal unit: `1.5 G`, `12 k`, `999`.
pub fn count(count: f64) -> String {
    let (value, unit) = scale(count, 1000.0, &["", "k", "M", "G", "T", "P"]);
    let digits = if unit.is_empty() || value >= 100.0 { 0 } else { 1 };
    format!("{value:.digits$} {unit}").trim_end().to_owned()
}

/// Seconds with the unit that leaves few digits: `3.2 ms`.
pub fn seconds(seconds: f64) -> String {
    let (value, unit) = match seconds.abs() {
        s if s >= 1.0 => (seconds, "s"),
        s if s >= 1e-3 => (seconds * 1e3, "ms"),
        _ => (seconds * 1e6, "µs"),
    };
    let digits = if value.abs() >= 100.0 { 0 } else { 1 };
    format!("{value:.digits$} {unit}")
}

fn scale<'u>(mut value: f64, step: f64, units: &[&'u str]) -> (f64, &'u str) {
    let mut units = units.iter();
    let mut unit = units.next();
    while value >= step
        && let Some(next) = units.next()
    {
        value /= step;
        unit = Some(next);
    }
    (value, unit.copied().unwrap_or_default())
}

/// A count with its noun in the singular or plural: `1 copy`, `2 copies`.
pub fn plural(count: usize, one: &str, many: &str) -> String {
    format!("{} {}", grouped(count), if count == 1 { one } else { many })
}

/// A number with commas as thousands separators.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `a, b and c`.
pub fn list(parts: &[String]) -> String {
    match parts {
        [] => String::new(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

/// Escapes text for elements and quoted attributes of HTML and SVG. Characters that XML forbids become `�`.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\t' | '\n' => out.push(' '),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Appends a number for SVG: rounded to one decimal, which is left out if it is zero.
pub(crate) fn coordinate(out: &mut String, value: f64) {
    let tenths = (value * 10.0).round() as i64;
    let sign = if tenths < 0 { "-" } else { "" };
    let (whole, rest) = (tenths.abs() / 10, tenths.abs() % 10);
    // Writing to a string cannot fail.
    let _ = if rest == 0 { write!(out, "{sign}{whole}") } else { write!(out, "{sign}{whole}.{rest}") };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_units() {
        assert_eq!([bytes(0), bytes(1536), bytes(6 << 30)], ["0 B", "1.5 KiB", "6.0 GiB"]);
        assert_eq!([count(12.0), count(12_345.0), count(2.5e12)], ["12", "12.3 k", "2.5 T"]);
        assert_eq!([seconds(2.0), seconds(0.0032), seconds(1.5e-7)], ["2.0 s", "3.2 ms", "0.1 µs"]);
    }

    #[test]
    fn counts_have_commas_and_the_right_plural() {
        assert_eq!(
            [plural(1, "copy", "copies"), plural(100_000, "copy", "copies")],
            ["1 copy", "100,000 copies"]
        );
        assert_eq!(list(&["a", "b", "c"].map(str::to_owned)), "a, b and c");
    }

    #[test]
    fn markup_is_escaped() {
        assert_eq!(escape("</text>&\"'\u{1}\n"), "&lt;/text&gt;&amp;&quot;&#39;\u{fffd} ");
    }
}
