//! Parsers of option values. Their errors state what is expected; the argument parser adds the value and the option.

/// Parses a whole number of 0 or more.
pub(crate) fn whole(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "must be a whole number of 0 or more".to_owned())
}

/// Parses a whole number of at least 1.
pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("must be a whole number of at least 1".to_owned()),
        Ok(number) => Ok(number),
    }
}

/// Parses a number of CPU threads.
pub(crate) fn threads(text: &str) -> Result<usize, String> {
    let parsed = text.parse().ok().filter(|threads| (1..=quadriga_cpu::MAX_THREADS).contains(threads));
    parsed.ok_or_else(|| format!("must be a whole number from 1 to {}", quadriga_cpu::MAX_THREADS))
}

/// Parses the largest number of tokens of an answer; -1 and llama.cpp's -2 (until the context is full) are no limit.
pub(crate) fn max_tokens(text: &str) -> Result<i64, String> {
    match text.parse() {
        Ok(number) if number >= -2 => Ok(number),
        _ => Err("must be a number of tokens, or -1 for no limit".to_owned()),
    }
}

/// Parses the most tokens of reasoning; -1 is no limit.
pub(crate) fn reasoning_budget(text: &str) -> Result<i64, String> {
    match text.parse() {
        Ok(number) if number >= -1 => Ok(number),
        _ => Err("must be a number of tokens, or -1 for no limit".to_owned()),
    }
}

/// A random seed; `None` if one is to be drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seed(pub(crate) Option<u64>);

/// Parses a seed; -1 draws one.
pub(crate) fn seed(text: &str) -> Result<Seed, String> {
    match text {
        "-1" => Ok(Seed(None)),
        number => number
            .parse()
            .map(|seed| Seed(Some(seed)))
            .map_err(|_| format!("must be a whole number from 0 to {}, or -1 for a random one", u64::MAX)),
    }
}

/// Parses a seed that must be given.
pub(crate) fn fixed_seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("must be a whole number from 0 to {}", u64::MAX))
}

/// Parses top-k; -1, as in llama.cpp, keeps all tokens as 0 does.
pub(crate) fn top_k(text: &str) -> Result<usize, String> {
    match text {
        "-1" => Ok(0),
        number => number.parse().map_err(|_| "must be a whole number, 0 or -1 for all tokens".to_owned()),
    }
}

/// Parses a number that fulfils a condition, which the error states.
fn number(text: &str, wanted: &str, holds: impl Fn(f32) -> bool) -> Result<f32, String> {
    let parsed = text.parse().ok().filter(|value: &f32| value.is_finite() && holds(*value));
    parsed.ok_or_else(|| format!("must be a number {wanted}"))
}

/// Parses a number.
pub(crate) fn finite(text: &str) -> Result<f32, String> {
    number(text, "that is finite", |_| true)
}

/// Parses a number of recent tokens; -1 stands for all.
pub(crate) fn last_n(text: &str) -> Result<usize, String> {
    match text {
        "-1" => Ok(usize::MAX),
        number => number.parse().map_err(|_| "must be a number of tokens, or -1 for all".to_owned()),
    }
}

/// Parses a token and what is added to its logit: `15043+1`, `15043-0.5`, `2-inf`.
pub(crate) fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let parsed = text.find(['+', '-']).and_then(|at| {
        let (token, bias) = text.split_at_checked(at)?;
        let bias: f32 = bias.parse().ok()?;
        Some((token.parse().ok()?, bias)).filter(|_| bias.is_finite() || bias == f32::NEG_INFINITY)
    });
    parsed.ok_or_else(|| {
        "must be a token number, + or -, and a number, as in 15043-1.5; -inf bans the token".to_owned()
    })
}

/// Parses a number of 0 or more.
pub(crate) fn not_negative(text: &str) -> Result<f32, String> {
    number(text, "of 0 or more", |value| value >= 0.0)
}

/// Parses a number above 0.
pub(crate) fn positive(text: &str) -> Result<f32, String> {
    number(text, "above 0", |value| value > 0.0)
}

/// Parses a probability above 0.
pub(crate) fn positive_probability(text: &str) -> Result<f32, String> {
    number(text, "above 0 and at most 1", |value| value > 0.0 && value <= 1.0)
}

/// Parses a probability.
pub(crate) fn probability(text: &str) -> Result<f32, String> {
    number(text, "from 0 to 1", |value| (0.0..=1.0).contains(&value))
}

/// The fields of a JSON object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JsonObject(pub(crate) serde_json::Map<String, serde_json::Value>);

/// Parses a JSON object.
pub(crate) fn json_object(text: &str) -> Result<JsonObject, String> {
    let parsed = serde_json::from_str(text);
    parsed
        .map(JsonObject)
        .map_err(|error| format!("must be a JSON object, such as {{\"enable_thinking\": false}}: {error}"))
}

/// Parses a text of at least one character.
pub(crate) fn not_empty(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("must not be empty".to_owned()) } else { Ok(text.to_owned()) }
}

/// A number of things, of which 0 and, as llama.cpp has it, -1 mean all.
pub(crate) fn count_or_all(text: &str) -> Result<usize, String> {
    match text {
        "-1" => Ok(0),
        _ => text.parse().map_err(|_| "must be a whole number, 0 for all".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_values_of_llama_cpp_are_understood() {
        assert_eq!((seed("-1"), seed("7")), (Ok(Seed(None)), Ok(Seed(Some(7)))));
        assert_eq!((top_k("-1"), top_k("0"), top_k("40")), (Ok(0), Ok(0), Ok(40)));
        assert_eq!((max_tokens("-1"), max_tokens("-2"), max_tokens("0")), (Ok(-1), Ok(-2), Ok(0)));
    }

    #[test]
    fn a_logit_bias_is_a_token_and_a_signed_number() {
        assert_eq!(logit_bias("15043+1"), Ok((15043, 1.0)));
        assert_eq!(logit_bias("15043-0.5"), Ok((15043, -0.5)));
        assert_eq!(logit_bias("2-inf"), Ok((2, f32::NEG_INFINITY)));
        for wrong in ["", "5", "+1", "x+1", "5+", "5+x", "5+inf", "5-nan", "4294967296+1", "-5+1"] {
            assert!(logit_bias(wrong).is_err(), "{wrong}");
        }
        assert_eq!((last_n("-1"), last_n("0"), last_n("64")), (Ok(usize::MAX), Ok(0), Ok(64)));
        assert!(last_n("-2").is_err() && finite("inf").is_err());
    }

    #[test]
    fn keyword_arguments_are_a_json_object() {
        let object = json_object(r#"{"enable_thinking": false}"#).unwrap();
        assert_eq!(object.0.get("enable_thinking"), Some(&serde_json::Value::Bool(false)));
        assert_eq!(json_object("{}").unwrap().0.len(), 0);
        assert!(["", "[]", "false", "{"].iter().all(|text| json_object(text).is_err()));
    }

    #[test]
    fn values_out_of_range_are_errors() {
        assert!(["-3", "x", "", "1.5"].iter().all(|text| max_tokens(text).is_err()));
        assert!(["-2", "x", "18446744073709551616"].iter().all(|text| seed(text).is_err()));
        assert!(["-1", "nan", "inf", "x"].iter().all(|text| not_negative(text).is_err()));
        assert!(["0", "-1", "nan"].iter().all(|text| positive(text).is_err()));
        assert!(["0", "1.1", "nan"].iter().all(|text| positive_probability(text).is_err()));
        assert!(["-0.1", "1.1", "nan"].iter().all(|text| probability(text).is_err()));
        assert_eq!((probability("0"), positive_probability("1")), (Ok(0.0), Ok(1.0)));
    }
}
