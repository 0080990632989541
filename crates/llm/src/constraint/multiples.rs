//! Bounds of multiples. The compiler compares digits: with a bound between two multiples it loses those that are a beginning of the
//! bound's digits, as 0.1 is one of 0.15. Bounds at multiples, or half a multiple away from them where zeros at the end are needed,
//! lose none.

use serde_json::{Map, Value, json};

use super::bounds::NUMBER_BOUNDS;

/// A number as a whole one and the power of ten that it is multiplied by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Decimal {
    digits: i128,
    power: i32,
}

impl Decimal {
    /// A number by its digits. No digits are lost.
    fn new(mut digits: i128, mut power: i32) -> Decimal {
        if digits == 0 {
            return Decimal { digits, power: 0 };
        }
        while digits % 10 == 0 {
            (digits, power) = (digits / 10, power + 1);
        }
        Decimal { digits, power }
    }

    fn read(text: &str) -> Option<Decimal> {
        let (digits, power) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let digits = format!("{whole}{fraction}").parse().ok()?;
        let power = power.parse::<i32>().ok()?.checked_sub(i32::try_from(fraction.len()).ok()?)?;
        Some(Decimal::new(digits, power))
    }

    fn of(fields: &Map<String, Value>, name: &str) -> Option<Decimal> {
        Decimal::read(&fields.get(name)?.as_number()?.to_string())
    }

    /// How many times a positive number fits into this one, rounded down, and whether nothing is left.
    fn divided_by(self, unit: Decimal) -> Option<(i128, bool)> {
        let power = self.power.checked_sub(unit.power)?;
        let scale = |number: i128| 10_i128.checked_pow(power.unsigned_abs())?.checked_mul(number);
        let (number, unit) = match (power >= 0, scale(unit.digits)) {
            (true, _) => (scale(self.digits)?, unit.digits),
            (false, Some(unit)) => (self.digits, unit),
            // It is far less than the unit.
            (false, None) => return Some((if self.digits < 0 { -1 } else { 0 }, self.digits == 0)),
        };
        Some((number.div_euclid(unit), number.rem_euclid(unit) == 0))
    }

    /// So many tenths of it as a bound; `None` if a float is not exactly that.
    fn tenths(self, count: i128) -> Option<Value> {
        let wanted = Decimal::new(self.digits.checked_mul(count)?, self.power.checked_sub(1)?);
        let float: f64 = format!("{}e{}", wanted.digits, wanted.power).parse().ok()?;
        (Decimal::read(&float.to_string())? == wanted).then(|| json!(float))
    }
}

/// Rounds the bounds of multiples to the first and the last multiple within them.
pub(super) fn round_to_multiples(fields: &mut Map<String, Value>) {
    let bounded = NUMBER_BOUNDS.iter().any(|(name, _)| fields.contains_key(*name));
    let Some(unit) = Decimal::of(fields, "multipleOf").filter(|unit| bounded && unit.digits > 0) else {
        return;
    };
    let divided = |name: &str| Decimal::of(fields, name)?.divided_by(unit);
    let from = divided("minimum").map(|(count, is_exact)| count + i128::from(!is_exact));
    let above = divided("exclusiveMinimum").map(|(count, _)| count + 1);
    let to = divided("maximum").map(|(count, _)| count);
    let below = divided("exclusiveMaximum").map(|(count, is_exact)| count - i128::from(is_exact));
    let (first, last) = (from.max(above), to.into_iter().chain(below).min());
    let is_integer = fields.get("type").is_some_and(|name| name == "integer");
    let all_decimals = unit.digits > 9 && unit.power < 0 && !is_integer;
    let crosses_zero = first.is_none_or(|first| first < 0) && last.is_none_or(|last| last >= 0);
    let is_split = all_decimals && crosses_zero && !fields.contains_key("anyOf");
    let range =
        |first, last| if all_decimals { with_all_decimals(first, last) } else { shortest(first, last) };
    let options = match is_split {
        // Between a negative bound and zero, llguidance accepts no number whose last decimal is a zero.
        true => vec![range(first, Some(-1)), range(Some(0), last)],
        false => vec![range(first, last)],
    };
    // All or nothing: a bound that cannot be written leaves the schema as it is.
    let options: Option<Vec<Map<String, Value>>> =
        options.iter().map(|(least, most)| bounds(unit, *least, *most)).collect();
    let Some(mut options) = options else { return };
    for (side, exclusive, bound) in
        [("minimum", "exclusiveMinimum", first), ("maximum", "exclusiveMaximum", last)]
    {
        if bound.is_some() {
            fields.shift_remove(side);
            fields.shift_remove(exclusive);
        }
    }
    match options.pop() {
        Some(last) if options.is_empty() => fields.extend(last),
        last => drop(fields.insert("anyOf".to_owned(), options.into_iter().chain(last).collect())),
    }
    if first.is_some() && first == last && !all_decimals {
        // The bounds alone say all.
        fields.shift_remove("multipleOf");
    }
}

/// Bounds in tenths of a multiple.
type Tenths = (Option<i128>, Option<i128>);

/// Bounds of multiples that may be written without zeros behind the last decimal.
fn shortest(first: Option<i128>, last: Option<i128>) -> Tenths {
    let (least, most) = (first.map(|count| 10 * count), last.map(|count| 10 * count));
    // The compiler counts the multiples between two bounds with floats, each of which may be one multiple off. Where there are only
    // two, the bound next to zero is half a multiple away from the first.
    match first.zip(last).filter(|(first, last)| last - first == 1) {
        Some((first, _)) if first > 0 => (Some(10 * first - 5), most),
        Some((_, last)) if last < 0 => (least, Some(10 * last + 5)),
        _ => (least, most),
    }
}

/// Bounds of multiples that are written with all of their decimals, zeros too, as the compiler wants those with two digits. It takes
/// such a number only if it is no beginning of a bound: all bounds are half a multiple away, but for that at zero.
fn with_all_decimals(first: Option<i128>, last: Option<i128>) -> Tenths {
    let away = |count: i128, half: i128| if count == 0 { 0 } else { 10 * count + half };
    (first.map(|count| away(count, -5)), last.map(|count| away(count, 5)))
}

/// The keywords of bounds; `None` if one cannot be written.
fn bounds(unit: Decimal, least: Option<i128>, most: Option<i128>) -> Option<Map<String, Value>> {
    let sides = [("minimum", least), ("maximum", most)].into_iter();
    let written = sides.filter_map(|(name, count)| Some((name, count?)));
    written.map(|(name, count)| Some((name.to_owned(), unit.tenths(count)?))).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use quadriga_conformance::Rng;

    use super::super::intersections::accepts;
    use super::*;

    /// A number of hundredths as texts, the shortest first.
    fn texts(hundredths: i64) -> Vec<String> {
        let sign = if hundredths < 0 { "-" } else { "" };
        let (whole, rest) = (hundredths.abs() / 100, hundredths.abs() % 100);
        let mut all = vec![format!("{sign}{whole}.{rest:02}"), format!("{sign}{whole}.{rest:02}0")];
        if rest % 10 == 0 {
            all.insert(0, format!("{sign}{whole}.{}", rest / 10));
        }
        if rest == 0 {
            all.insert(0, format!("{sign}{whole}"));
        }
        all
    }

    fn number(hundredths: i64) -> Value {
        serde_json::from_str(&texts(hundredths)[0]).unwrap()
    }

    /// Every number of up to two decimals is accepted in some form if it is valid, and in none if it is not.
    #[test]
    fn no_value_within_bounds_is_lost() {
        let seed = 17;
        let mut rng = Rng::new(seed);
        let steps = [10, 50, 5, 25, 20, 2, 100, 300, 150, 40, 12, 75];
        for round in 0..400 {
            let step = (round % 4 != 0).then(|| steps[rng.below(steps.len())]);
            let mut bounds = [0; 2].map(|_| rng.below(52) as i64 * 5 - 130);
            bounds.sort_unstable();
            if bounds[0] == bounds[1] {
                bounds[1] += 5;
            }
            let exclusive = [0; 2].map(|_| rng.below(4) == 0);
            let has = [0; 2].map(|_| rng.below(6) != 0);
            let mut schema = json!({ "type": "number" });
            let names = [["minimum", "exclusiveMinimum"], ["maximum", "exclusiveMaximum"]];
            for side in 0..2 {
                if has[side] {
                    schema[names[side][usize::from(exclusive[side])]] = number(bounds[side]);
                }
            }
            if let Some(step) = step {
                schema["multipleOf"] = number(step);
            }
            let is_valid = |value: i64| {
                (!has[0] || value > bounds[0] || value == bounds[0] && !exclusive[0])
                    && (!has[1] || value < bounds[1] || value == bounds[1] && !exclusive[1])
                    && step.is_none_or(|step| value % step == 0)
            };
            let values: Vec<i64> = (-150..=150).collect();
            let all: Vec<(i64, String)> = values
                .iter()
                .flat_map(|value| texts(*value).into_iter().map(|text| (*value, text)))
                .collect();
            let plain: Vec<&str> = all.iter().map(|(_, text)| text.as_str()).collect();
            let at = format!("{schema} in round {round} of seed {seed}");
            let accepted = match accepts(&schema, &plain) {
                Ok(accepted) => accepted,
                Err(error) => {
                    let valid: Vec<&i64> = values.iter().filter(|value| is_valid(**value)).collect();
                    assert!(
                        valid.is_empty(),
                        "{at} is refused ({error}), but {valid:?} hundredths are valid"
                    );
                    continue;
                }
            };
            for value in values {
                let own = all.iter().zip(&accepted).filter(|((other, _), _)| *other == value);
                let found: Vec<&String> = own.filter(|(_, fine)| **fine).map(|((_, text), _)| text).collect();
                assert_eq!(!found.is_empty(), is_valid(value), "{at}: {value} hundredths as {found:?}");
            }
        }
    }

    #[test]
    fn multiples_are_written_as_they_are() {
        let accepted = |step: f64, least: f64, most: f64, text: &str| {
            let schema = json!({ "type": "number", "multipleOf": step, "minimum": least, "maximum": most });
            accepts(&schema, &[text]).unwrap_or_else(|error| panic!("{schema}: {error}"))[0]
        };
        for (step, least, most, fine) in [
            (0.1, 0.05, 0.15, &["0.1"][..]),
            (0.1, 0.05, 0.95, &["0.1", "0.5", "0.9"]),
            (0.1, -0.95, -0.05, &["-0.1", "-0.9"]),
            (0.1, 0.3, 0.3, &["0.3"]),
            (0.1, 0.6, 0.7, &["0.6", "0.7"]),
            (0.1, 1.1, 1.2, &["1.1", "1.2"]),
            (0.1, -1.2, -1.1, &["-1.1", "-1.2"]),
            (0.001, 0.0005, 0.0015, &["0.001"]),
            (0.001, 1.0005, 1.0015, &["1.001"]),
            (1e-9, 5e-10, 1.5e-9, &["0.000000001"]),
            (7.0, 7.0, 7.0, &["7"]),
            (0.5, 1e-300, 0.7, &["0.5"]),
            (0.5, -1e-300, 0.4, &["0"]),
            (1.0, 0.5, 8e17, &["1", "9007199254740993"]),
        ] {
            for text in fine {
                assert!(accepted(step, least, most, text), "{step} in {least} to {most}: {text}");
            }
        }
        for (step, least, most, text) in
            [(0.1, 0.05, 0.15, "0.2"), (0.1, 0.3, 0.3, "0.4"), (0.1, 1.1, 1.2, "1.0")]
        {
            assert!(!accepted(step, least, most, text), "{step} in {least} to {most}: {text}");
        }
    }
}
