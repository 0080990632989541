//! The `tojson` filter, as Python formats JSON.

use std::io;

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind, State};
use serde::Serialize;
use serde_json::ser::{CharEscape, Formatter};

use super::limits::{LimitedWriter, MAX_VALUE, spend};

/// JSON as Python formats it, which models were trained on: a space after `,` and `:`, no escapes for HTML.
struct PythonFormatter {
    /// Spaces per level; everything is on one line without it.
    indent: Option<usize>,
    level: usize,
    between_items: String,
    after_key: String,
    ensure_ascii: bool,
    /// Whether the innermost list or object has elements.
    has_items: bool,
}

impl PythonFormatter {
    fn new_line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        match self.indent {
            Some(spaces) => write!(writer, "\n{:width$}", "", width = spaces.saturating_mul(self.level)),
            None => Ok(()),
        }
    }

    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &str) -> io::Result<()> {
        self.level += 1;
        self.has_items = false;
        writer.write_all(bracket.as_bytes())
    }

    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &str) -> io::Result<()> {
        self.level = self.level.saturating_sub(1);
        if self.has_items {
            self.new_line(writer)?;
        }
        self.has_items = true;
        writer.write_all(bracket.as_bytes())
    }

    fn separate<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.between_items.as_bytes())?;
        }
        self.has_items = true;
        self.new_line(writer)
    }
}

impl Formatter for PythonFormatter {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, "[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, "]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.separate(writer, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, "{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, "}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.separate(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.after_key.as_bytes())
    }

    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        let exponent = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
        if (-4..16).contains(&exponent) {
            return write!(writer, "{value:?}");
        }
        // Python writes a sign and two digits: 1e-05, 1e+16.
        let digits = format!("{value:e}");
        let (mantissa, exponent) = digits.split_once('e').unwrap_or((&digits, "0"));
        let exponent: i32 = exponent.parse().unwrap_or(0);
        let sign = if exponent < 0 { '-' } else { '+' };
        write!(writer, "{mantissa}e{sign}{:02}", exponent.unsigned_abs())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.ensure_ascii || fragment.is_ascii() {
            return writer.write_all(fragment.as_bytes());
        }
        let mut units = [0; 2];
        fragment.chars().try_for_each(|letter| match letter {
            letter if letter.is_ascii() => write!(writer, "{letter}"),
            letter => {
                letter.encode_utf16(&mut units).iter().try_for_each(|unit| write!(writer, "\\u{unit:04x}"))
            }
        })
    }

    fn write_char_escape<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        escape: CharEscape,
    ) -> io::Result<()> {
        match escape {
            CharEscape::Quote => writer.write_all(b"\\\""),
            CharEscape::ReverseSolidus => writer.write_all(b"\\\\"),
            CharEscape::Solidus => writer.write_all(b"/"),
            CharEscape::Backspace => writer.write_all(b"\\b"),
            CharEscape::FormFeed => writer.write_all(b"\\f"),
            CharEscape::LineFeed => writer.write_all(b"\\n"),
            CharEscape::CarriageReturn => writer.write_all(b"\\r"),
            CharEscape::Tab => writer.write_all(b"\\t"),
            CharEscape::AsciiControl(byte) => write!(writer, "\\u{byte:04x}"),
        }
    }
}

pub(super) fn to_json(
    state: &mut State,
    value: &Value,
    ensure_ascii: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let wrong = |message: String| Error::new(ErrorKind::InvalidOperation, message);
    // The engine's own filter takes the indentation as its first argument, Python's takes `ensure_ascii`.
    let number = ensure_ascii.as_ref().filter(|value| value.is_integer()).and_then(Value::as_usize);
    let named = options.get::<Option<Value>>("ensure_ascii")?;
    let ensure_ascii =
        named.or(ensure_ascii.filter(|_| number.is_none())).is_some_and(|value| value.is_true());
    let indent = number.or(options.get::<Option<usize>>("indent")?).map(|spaces| spaces.min(16));
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let line_end = if indent.is_some() { "," } else { ", " };
    let mut separators = separators.unwrap_or_default().into_iter();
    let mut separator = |usual: &str| separators.next().unwrap_or_else(|| usual.to_owned());
    let (between_items, after_key) = (separator(line_end), separator(": "));
    let formatter =
        PythonFormatter { indent, level: 0, between_items, after_key, ensure_ascii, has_items: false };
    // Indentation is limited to 16 spaces a level, and levels to `MAX_DEPTH`.
    let mut limited = LimitedWriter { bytes: Vec::new(), left: MAX_VALUE };
    let written = if sort_keys {
        serde_json::to_value(value).and_then(|mut value| {
            value.sort_all_objects();
            write_json(&value, &mut limited, formatter)
        })
    } else {
        write_json(value, &mut limited, formatter)
    };
    written.map_err(|error| wrong(error.to_string()))?;
    spend(state, limited.bytes.len(), 0)?;
    String::from_utf8(limited.bytes).map_err(|error| wrong(error.to_string()))
}

fn write_json(
    value: &impl Serialize,
    into: &mut LimitedWriter,
    formatter: PythonFormatter,
) -> serde_json::Result<()> {
    value.serialize(&mut serde_json::Serializer::with_formatter(into, formatter))
}
