//! Packing instances as CSV: a line per item, with columns named in the heading.

use thiserror::Error;

use super::problem::PackingItem;

/// Why the text of a packing instance could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CsvError {
    /// A column is missing from the heading.
    #[error("line 1: no column `{column}`; the heading must name `id,lower,upper,size`")]
    Heading {
        /// The missing column.
        column: &'static str,
    },
    /// A field is missing or not a whole number.
    #[error("line {line}, column `{column}`: {reason}")]
    Field {
        /// The line, counted from 1.
        line: usize,
        /// The column.
        column: &'static str,
        /// Why the field was refused.
        reason: String,
    },
}

/// Reads the items of a packing instance. The columns `lower`, `upper` and `size` may come in any order; `lower` is the
/// first step of an item's lifetime, `upper` one past the last. Other columns and empty lines are ignored.
///
/// ```
/// use quadriga_runtime::memory::packing::{PackingItem, parse_csv};
/// let items = parse_csv("id,lower,upper,size\n0,0,2,4\n1,1,3,8\n")?;
/// assert_eq!(items[1], PackingItem { size: 8, start: 1, end: 3 });
/// # Ok::<(), quadriga_runtime::memory::packing::CsvError>(())
/// ```
pub fn parse_csv(text: &str) -> Result<Vec<PackingItem>, CsvError> {
    let mut lines = text.lines().enumerate();
    let heading = lines.next().map(|(_, line)| line).unwrap_or_default();
    let find = |column: &'static str| {
        let index = heading.split(',').position(|name| name.trim() == column);
        index.map(|index| (column, index)).ok_or(CsvError::Heading { column })
    };
    let (lower, upper, size) = (find("lower")?, find("upper")?, find("size")?);
    let mut items = Vec::new();
    for (index, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
        let field = |(column, index_in_line): (&'static str, usize)| {
            let wrong = |reason: String| CsvError::Field { line: index + 1, column, reason };
            let text = line.split(',').nth(index_in_line).ok_or_else(|| wrong("missing".into()))?.trim();
            text.parse::<u64>().map_err(|error| wrong(format!("`{}`: {error}", text.escape_debug())))
        };
        let step = |at: (&'static str, usize)| {
            field(at).and_then(|step| {
                u32::try_from(step).map_err(|_| CsvError::Field {
                    line: index + 1,
                    column: at.0,
                    reason: format!("`{step}`: time steps must be below 2^32"),
                })
            })
        };
        items.push(PackingItem { start: step(lower)?, end: step(upper)?, size: field(size)? });
    }
    Ok(items)
}
