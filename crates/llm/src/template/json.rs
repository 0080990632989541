//! The `tojson` filter, as Python formats JSON.

use std::io;

use minijinja::value::{Kwargs, Value};
use minijinja::{ErrorKind, State};
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter};

use super::limits::{LimitedWriter, MAX_VALUE, spend};

/// JSON as Python formats it, which models were trained on: a space after `,` and `:`, no escapes for HTML.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

pub(super) fn to_json(
    state: &mut State,
    value: &Value,
    indent: Option<usize>,
    options: Kwargs,
) -> Result<String, minijinja::Error> {
    let wrong = |message: String| minijinja::Error::new(ErrorKind::InvalidOperation, message);
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    // The other arguments of Python's `tojson` are accepted and ignored.
    for known in ["ensure_ascii", "separators", "sort_keys"] {
        let _ = options.get::<Option<Value>>(known)?;
    }
    options.assert_all_used()?;
    // Indentation is limited to 16 spaces a level, and levels to `MAX_DEPTH`.
    let mut limited = LimitedWriter { bytes: Vec::new(), left: MAX_VALUE };
    let written = match indent {
        None => write_json(value, &mut limited, PythonFormatter),
        Some(0) => write_json(value, &mut limited, CompactFormatter),
        Some(spaces) => {
            let spaces = " ".repeat(spaces.min(16));
            write_json(value, &mut limited, PrettyFormatter::with_indent(spaces.as_bytes()))
        }
    };
    written.map_err(|error| wrong(error.to_string()))?;
    spend(state, limited.bytes.len(), 0)?;
    String::from_utf8(limited.bytes).map_err(|error| wrong(error.to_string()))
}

fn write_json(value: &Value, into: &mut LimitedWriter, formatter: impl Formatter) -> serde_json::Result<()> {
    value.serialize(&mut serde_json::Serializer::with_formatter(into, formatter))
}
