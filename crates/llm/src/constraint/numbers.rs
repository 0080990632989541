//! Numbers in JSON schemas, as far as the compiler computes with them.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::bounds::{MAX_BOUND, NUMBER_BOUNDS, referred};
use super::formats::parts;
use super::multiples::round_to_multiples;

/// The largest `multipleOf` as a whole number of its last decimal: the compiler has a state for every remainder.
const MAX_MULTIPLE: u128 = 100_000;
/// The same of several that hold at once. The compiler multiplies two of them in 32 bits.
const MAX_COMMON_MULTIPLE: u128 = u16::MAX as u128;
/// The sum of all in a schema.
const MAX_MULTIPLES: u128 = 400_000;
/// Schemas that are looked at for values that hold at once.
const MAX_VISITS: usize = 100_000;

/// The largest whole number up to which 64-bit floats have all of them.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// The reason why numbers of a schema cannot be computed with, if they cannot.
pub(super) fn check_numbers(schema: &Value) -> Result<(), String> {
    let mut with_multiples = false;
    let mut all: Vec<&Value> = Vec::new();
    let mut left = vec![schema];
    while let Some(part) = left.pop() {
        for name in ["const", "enum"] {
            part.get(name).map_or(Ok(()), |value| check_exact(name, value))?;
        }
        with_multiples |= part.get("multipleOf").is_some();
        all.push(part);
        left.extend(parts(part));
    }
    if with_multiples { check_multiples(schema, &all) } else { Ok(()) }
}

/// The reason why the values of `multipleOf` in the parts of a schema cannot be computed with, if they cannot.
fn check_multiples(root: &Value, all: &[&Value]) -> Result<(), String> {
    let mut sums = BTreeSet::new();
    let mut visits = 0;
    for part in all {
        let mut multiples = Multiples { root, references: BTreeSet::new(), found: BTreeSet::new() };
        visits += multiples.collect(part)?;
        if visits > MAX_VISITS {
            return Err("its values of multipleOf are in too many places to be compared".to_owned());
        }
        sums.extend(common_multiple(&multiples.found)?);
    }
    match sums.into_iter().sum::<u128>() {
        0..=MAX_MULTIPLES => Ok(()),
        sum => Err(format!(
            "its values of multipleOf are too large together ({sum}, {MAX_MULTIPLES} are supported)"
        )),
    }
}

/// Refuses numbers of a value that would be changed.
fn check_exact(name: &str, value: &Value) -> Result<(), String> {
    let mut left = vec![value];
    while let Some(value) = left.pop() {
        match value {
            Value::Number(number) if !is_exact(number) => {
                return Err(format!(
                    "{name} has the number {number}; whole numbers up to 2^53 are supported there"
                ));
            }
            Value::Array(items) => left.extend(items),
            Value::Object(fields) => left.extend(fields.values()),
            _ => {}
        }
    }
    Ok(())
}

fn is_exact(number: &serde_json::Number) -> bool {
    match whole(number) {
        Some(whole) => whole == (whole as f64) as i128,
        // A larger one was rounded when it was read.
        None => number.as_f64().is_some_and(|float| float.abs() <= MAX_EXACT),
    }
}

/// A number that is written as a whole one of at most 64 bits.
fn whole(number: &serde_json::Number) -> Option<i128> {
    number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from))
}

/// A positive number as a coefficient and a power of ten that it is divided by.
type Decimal = (u128, u32);

/// All values of `multipleOf` that a number of a schema may have to satisfy at once.
struct Multiples<'s> {
    root: &'s Value,
    /// References that were followed.
    references: BTreeSet<&'s str>,
    found: BTreeSet<Decimal>,
}

impl<'s> Multiples<'s> {
    /// Adds those of a schema; the number of schemas that were looked at.
    fn collect(&mut self, schema: &'s Value) -> Result<usize, String> {
        let mut visits = 0;
        let mut left = vec![schema];
        while let Some(fields) = left.pop().and_then(Value::as_object) {
            visits += 1;
            if let Some(multiple) = fields.get("multipleOf").and_then(Value::as_f64) {
                self.found.insert(decimal(multiple)?);
            }
            let lists = ["allOf", "anyOf", "oneOf"].iter().filter_map(|name| fields.get(*name)?.as_array());
            left.extend(lists.flatten().filter(|part| part.is_object()));
            if let Some(name) = fields.get("$ref").and_then(Value::as_str)
                && self.references.insert(name)
            {
                left.extend(referred(self.root, name).filter(|target| target.is_object()));
            }
        }
        Ok(visits)
    }
}

fn decimal(number: f64) -> Result<Decimal, String> {
    let (mut coefficient, mut digits) = (number, 0);
    while coefficient.fract() != 0.0 && digits < 12 {
        coefficient *= 10.0;
        digits += 1;
    }
    if number < 0.0 || coefficient.fract() != 0.0 || coefficient > MAX_MULTIPLE as f64 {
        return Err(format!(
            "multipleOf is {number}; it may have a value of up to {MAX_MULTIPLE}, without its decimal point"
        ));
    }
    Ok((coefficient as u128, digits))
}

/// The least common multiple of decimals, as a whole number of the last digit of any.
fn common_multiple(decimals: &BTreeSet<Decimal>) -> Result<Option<u128>, String> {
    let digits = decimals.iter().map(|(_, digits)| *digits).max().unwrap_or(0);
    let mut whole = None;
    for (coefficient, own) in decimals {
        let scaled = coefficient * 10_u128.pow(digits - own);
        let common = whole.map_or(scaled, |whole| least_common_multiple(whole, scaled));
        if decimals.len() > 1 && scaled.max(common) > MAX_COMMON_MULTIPLE {
            return Err(format!(
                "its values of multipleOf have a common multiple above {MAX_COMMON_MULTIPLE}, which is not supported"
            ));
        }
        whole = Some(common);
    }
    Ok(whole)
}

fn least_common_multiple(a: u128, b: u128) -> u128 {
    let (mut divisor, mut rest) = (a, b);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a.checked_div(divisor).map_or(0, |rest| rest * b)
}

/// Tightens bounds that the compiler cannot compute with to ones that it can.
pub(super) fn tighten_bounds(fields: &mut Map<String, Value>) {
    exclude_by_number(fields);
    for (name, loose) in NUMBER_BOUNDS {
        let Some(Value::Number(number)) = fields.get(name) else { continue };
        let Some(float) = number.as_f64() else { continue };
        if float * loose > MAX_BOUND {
            fields.insert(name.to_owned(), json!(MAX_BOUND * loose));
            continue;
        }
        // The next float that is within the bound.
        let Some(whole) = whole(number) else { continue };
        let inner = match (float as i128).cmp(&whole) {
            std::cmp::Ordering::Less if loose < 0.0 => float.next_up(),
            std::cmp::Ordering::Greater if loose > 0.0 => float.next_down(),
            std::cmp::Ordering::Equal => continue,
            _ => float,
        };
        fields.insert(name.to_owned(), json!(inner));
    }
    round_to_multiples(fields);
    exclude_whole_bound(fields);
}

/// Writes exclusive bounds of earlier drafts, which say whether the other bound is one, as numbers.
fn exclude_by_number(fields: &mut Map<String, Value>) {
    for (exclusive, bound) in [("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")] {
        let Some(is_exclusive) = fields.get(exclusive).and_then(Value::as_bool) else { continue };
        match fields.get(bound).filter(|bound| is_exclusive && bound.is_number()).cloned() {
            Some(number) => drop(fields.insert(exclusive.to_owned(), number)),
            None => drop(fields.shift_remove(exclusive)),
        }
    }
}

/// Where an exclusive bound is a whole number and the other is less than one away, the compiler takes the bound in.
pub(super) fn exclude_whole_bound(fields: &mut Map<String, Value>) {
    let number = |name: &str| fields.get(name).and_then(Value::as_f64);
    let least =
        number("exclusiveMinimum").filter(|least| number("minimum").is_none_or(|other| other <= *least));
    let most = number("exclusiveMaximum").filter(|most| number("maximum").is_none_or(|other| other >= *most));
    let end = most.or(number("maximum"));
    let start = least.or(number("minimum"));
    let (Some(start), Some(end)) = (start, end) else { return };
    // A hundredth of the range, as a power of ten.
    let step = 10_f64.powf((end - start).log10().floor() - 2.0);
    if end <= start || end - start >= 1.0 || !step.is_normal() {
        return;
    }
    if let Some(least) = least.filter(|least| least.fract() == 0.0 && *least >= 0.0) {
        fields.shift_remove("exclusiveMinimum");
        fields.insert("minimum".to_owned(), json!(least + step));
    }
    if let Some(most) = most.filter(|most| most.fract() == 0.0 && *most <= 0.0) {
        fields.shift_remove("exclusiveMaximum");
        fields.insert("maximum".to_owned(), json!(most - step));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::super::cancellation::Cancellation;
    use super::super::intersections::accepts;
    use super::super::schema::prepared;
    use super::*;

    fn check(schema: &Value) -> Result<(), String> {
        prepared(schema, &Cancellation::default()).map(drop)
    }

    const TEXTS: &[&str] = &[
        "0", "-0", "0.0", "-0.0", "0.001", "0.005", "0.01", "0.010", "0.5", "0.99", "1", "1.0", "1.5",
        "1.99", "2", "2.0", "2.001", "3", "10", "11", "-0.001", "-0.05", "-0.1", "-0.5", "-1", "-1.0",
        "-1.5", "-2", "-2.5", "-10", "100.25",
    ];

    /// Every number that is accepted is within the bounds, and where some of these are, one is accepted.
    #[test]
    fn numbers_are_within_their_bounds() {
        let bounds = [-10.0, -2.0, -1.5, -1.0, -0.1, 0.0, 0.01, 0.5, 1.0, 1.5, 2.0, 10.0];
        for (at, least) in bounds.iter().enumerate() {
            for most in &bounds[at + 1..] {
                for (exclusive_least, exclusive_most) in
                    [(false, false), (true, false), (false, true), (true, true)]
                {
                    let lower = if exclusive_least { "exclusiveMinimum" } else { "minimum" };
                    let upper = if exclusive_most { "exclusiveMaximum" } else { "maximum" };
                    let schema = json!({ "type": "number", lower: least, upper: most });
                    let accepted =
                        accepts(&schema, TEXTS).unwrap_or_else(|error| panic!("{schema}: {error}"));
                    let mut any = (false, false);
                    for (text, accepted) in TEXTS.iter().zip(accepted) {
                        let value: f64 = text.parse().unwrap();
                        let within = value >= *least
                            && value <= *most
                            && !(exclusive_least && value == *least)
                            && !(exclusive_most && value == *most);
                        assert!(!accepted || within, "{schema} accepts {text}");
                        any = (any.0 | within, any.1 | accepted);
                    }
                    assert_eq!(any.0, any.1, "{schema}");
                }
            }
        }
    }

    #[test]
    fn large_whole_numbers_are_exact_or_refused() {
        let both = ["9007199254740992", "9007199254740993", "9007199254740994"];
        let exactly = |number: i64| json!({ "type": "integer", "minimum": number, "maximum": number });
        assert_eq!(accepts(&exactly(9_007_199_254_740_992), &both), Ok(vec![true, false, false]));
        assert!(accepts(&exactly(9_007_199_254_740_993), &both).is_err());
        let from = json!({ "type": "integer", "minimum": 9_007_199_254_740_993_i64 });
        assert_eq!(accepts(&from, &both), Ok(vec![false, false, true]));
        assert_eq!(
            accepts(&json!({ "const": 9_007_199_254_740_992_i64 }), &both),
            Ok(vec![true, false, false])
        );
        for schema in [
            json!({ "const": 1_234_567_890_123_456_789_i64 }),
            json!({ "enum": ["a", { "b": [u64::MAX] }] }),
            json!({ "type": "object", "properties": { "const": { "const": 1_234_567_890_123_456_789_i64 } } }),
            json!({ "const": 1e300 }),
        ] {
            assert!(check(&schema).unwrap_err().contains("2^53"), "{schema}");
        }
        // Data is not compared with anything.
        check(&json!({ "type": "integer", "default": u64::MAX, "examples": [u64::MAX] })).unwrap();
    }

    fn with_doubling(last: Value) -> Value {
        let mut definitions: Map<String, Value> = (0..60)
            .map(|at| {
                let next = json!({ "$ref": format!("#/$defs/d{}", at + 1) });
                (format!("d{at}"), json!({ "anyOf": [next, next] }))
            })
            .collect();
        definitions.insert("d60".to_owned(), last);
        json!({ "$ref": "#/$defs/d0", "$defs": definitions })
    }

    #[test]
    fn multiples_that_cost_too_much_are_refused() {
        let multiple = |of: f64| json!({ "type": "number", "multipleOf": of });
        let all =
            |of: &[u32]| json!({ "allOf": of.iter().map(|of| multiple(f64::from(*of))).collect::<Vec<_>>() });
        for fine in [
            multiple(0.01),
            multiple(1e-9),
            multiple(86_400.0),
            multiple(0.25),
            all(&[7, 11, 13]),
            all(&[6, 4, 100]),
        ] {
            check(&fine).unwrap_or_else(|error| panic!("{fine}: {error}"));
        }
        let definitions =
            json!({ "a": { "multipleOf": 251 }, "b": { "$ref": "#/$defs/a", "multipleOf": 263 } });
        let many: Vec<Value> = (0..10).map(|at| multiple(f64::from(90_001 + at))).collect();
        for refused in [
            multiple(215_656_441.0),
            multiple(0.123_456_789),
            multiple(-1.0),
            all(&[7, 11, 13, 17, 19, 23, 29]),
            json!({ "type": "object", "properties": { "x": all(&[257, 263]) } }),
            json!({ "$ref": "#/$defs/b", "$defs": definitions }),
            json!({ "multipleOf": 257, "anyOf": [{ "multipleOf": 263 }] }),
            json!({ "type": "array", "prefixItems": many }),
            // References that double at every step.
            with_doubling(json!({ "allOf": [multiple(257.0), multiple(263.0)] })),
        ] {
            assert!(check(&refused).unwrap_err().contains("multipleOf"), "{refused}");
        }
        check_numbers(&with_doubling(multiple(5.0))).unwrap();
        let texts = ["0", "1001", "-2002", "1000"];
        assert_eq!(accepts(&all(&[7, 11, 13]), &texts), Ok(vec![true, true, true, false]));
    }

    #[test]
    fn names_are_written_in_one_way() {
        let schema = json!({ "type": "object", "properties": { "a": { "type": "boolean" } }, "additionalProperties": { "type": "integer" } });
        let texts = [r#"{"a": true}"#, r#"{"\u0061": 5}"#, r#"{"a": true, "\u0061": 5}"#, r#"{"b\n": 5}"#];
        assert_eq!(accepts(&schema, &texts), Ok(vec![true, false, false, true]));
        let pattern = json!({ "type": "object", "patternProperties": { "^a": { "type": "boolean" } }, "additionalProperties": { "type": "integer" } });
        assert_eq!(accepts(&pattern, &texts), Ok(vec![true, false, false, true]));
        let own = json!({ "type": "string", "x-guidance": { "whitespace_flexible": false } });
        assert_eq!(accepts(&own, &[r#""\u0061""#, r#""a""#]), Ok(vec![false, true]));
        // A text that needs such an escape is written with it.
        assert_eq!(accepts(&json!({ "const": "\u{1}" }), &[r#""\u0001""#]), Ok(vec![true]));
    }
}
