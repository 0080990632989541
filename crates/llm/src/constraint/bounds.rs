//! Limits of what is given to the compiler, which recurses over it: within them its stack is large enough.

use rustc_hash::FxHashSet;
use serde_json::Value;

/// Bytes of the source of a grammar.
pub(super) const MAX_SOURCE: usize = 1 << 20;
/// Values in a schema.
const MAX_VALUES: usize = 200_000;
/// Values within values in a schema: as many as in JSON that is parsed.
const MAX_DEPTH: usize = 128;
/// Definitions of a schema that refer to each other, times the depth of the schema: levels that the compiler can recurse to.
const MAX_LEVELS: usize = 16_384;
/// Rules and terminals of a Lark grammar, which can be a chain.
const MAX_RULES: usize = 8_192;

/// The most items of the parser's rows that a schema may need.
pub(super) const MAX_ITEMS: usize = 4_000;

/// The stack of the thread that compiles. Memory of it is only used as far as it is needed.
pub(super) const COMPILER_STACK: usize = 256 << 20;

/// Limits of the work of a compiled grammar. Schemas that are accepted by [`MAX_ITEMS`] stay below
/// them: a vocabulary of 49,152 tokens needs 16 times the items of a row for a mask at most, and 250,000 of the lexer's.
pub(super) fn limits() -> llguidance::api::ParserLimits {
    llguidance::api::ParserLimits {
        max_items_in_row: 2 * MAX_ITEMS,
        step_max_items: 400_000,
        step_lexer_fuel: 1_000_000,
        verbose_errors: false,
        ..llguidance::api::ParserLimits::default()
    }
}

/// The reason why a source is too long, if it is.
pub(crate) fn check_source(source: &str) -> Result<(), String> {
    match source.len() {
        0..=MAX_SOURCE => Ok(()),
        bytes => Err(format!("it has {bytes} bytes, more than {MAX_SOURCE}")),
    }
}

/// The reason why a Lark grammar is too large, if it is.
pub(super) fn check_lark(source: &str) -> Result<(), String> {
    check_source(source)?;
    // Every rule begins a line, and has a colon.
    match source.lines().filter(|line| line.contains(':')).count() {
        0..=MAX_RULES => Ok(()),
        rules => Err(format!("it has {rules} rules, more than {MAX_RULES}")),
    }
}

/// A reference that leads back to itself by references alone, if there is one.
fn find_loop<'a>(schema: &'a Value, references: &[&'a str]) -> Option<&'a str> {
    // References that are known to lead to a schema, or nowhere.
    let mut ends: FxHashSet<&str> = FxHashSet::default();
    for start in references {
        let (mut path, mut next) = (FxHashSet::default(), Some(*start));
        while let Some(reference) = next.filter(|reference| !ends.contains(reference)) {
            if !path.insert(reference) {
                return Some(reference);
            }
            next = referred(schema, reference).and_then(|target| target.get("$ref")).and_then(Value::as_str);
        }
        ends.extend(path);
    }
    None
}

/// The schema that a reference within a schema refers to.
pub(super) fn referred<'a>(schema: &'a Value, reference: &str) -> Option<&'a Value> {
    match reference {
        "#" | "#/" => Some(schema),
        _ => reference.strip_prefix('#').and_then(|pointer| schema.pointer(pointer)),
    }
}

/// Bounds of numbers in a schema; the second is the looser side of each.
pub(super) const NUMBER_BOUNDS: [(&str, f64); 4] =
    [("minimum", -1.0), ("exclusiveMinimum", -1.0), ("maximum", 1.0), ("exclusiveMaximum", 1.0)];

/// The largest bound of a number: the compiler computes with 64 bits, and with all numbers of as many digits.
pub(super) const MAX_BOUND: f64 = 9e17;

/// The reason why a bound of a number in a schema is out of range, if it is.
fn check_bounds(fields: &serde_json::Map<String, Value>) -> Result<(), String> {
    for (name, loose) in NUMBER_BOUNDS {
        let bound = fields.get(name).and_then(Value::as_f64).unwrap_or(0.0);
        if bound * loose < -MAX_BOUND {
            return Err(format!("{name} is {bound:e}; bounds up to {MAX_BOUND:e} are supported"));
        }
    }
    Ok(())
}

/// The levels to which the compiler may recurse over a schema, or the reason why it is too large.
pub(super) fn check_schema(schema: &Value) -> Result<usize, String> {
    let mut references: Vec<&str> = Vec::new();
    let (mut values, mut deepest, mut bytes) = (0, 0, 0);
    let mut left = vec![(schema, 1)];
    while let Some((value, depth)) = left.pop() {
        values += 1;
        deepest = deepest.max(depth);
        if depth > MAX_DEPTH {
            return Err(format!("it has more than {MAX_DEPTH} values within each other"));
        }
        match value {
            Value::Array(items) => left.extend(items.iter().map(|item| (item, depth + 1))),
            Value::Object(fields) => {
                references.extend(fields.get("$ref").and_then(Value::as_str));
                check_bounds(fields)?;
                bytes += fields.keys().map(String::len).sum::<usize>();
                left.extend(fields.values().map(|field| (field, depth + 1)));
            }
            Value::String(text) => bytes += text.len(),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
        if values + left.len() > MAX_VALUES {
            return Err(format!("it has more than {MAX_VALUES} values"));
        }
        if bytes > MAX_SOURCE {
            return Err(format!("its texts have more than {MAX_SOURCE} bytes"));
        }
    }
    references.sort_unstable();
    references.dedup();
    let levels = (references.len() + 1).saturating_mul(deepest);
    if levels > MAX_LEVELS {
        let count = references.len();
        return Err(format!("its {count} references and depth of {deepest} are too many together"));
    }
    match find_loop(schema, &references) {
        Some(reference) => Err(format!("the $ref {reference:?} refers to itself, and describes no value")),
        None => Ok(levels),
    }
}
