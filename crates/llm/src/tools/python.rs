//! Calls as Python writes them: `weather(city="Bern", days=2)`.

use serde::de::IgnoredAny;
use serde_json::{Map, Value};

/// Values within values that are read.
const MAX_DEPTH: usize = 64;

/// What a text begins with.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum PythonText<T> {
    /// This, in so many bytes.
    Whole(T, usize),
    /// Its beginning.
    Partial,
    /// Something else.
    Wrong,
}

/// What is between two keyword arguments.
pub(super) fn is_between(letter: char) -> bool {
    letter.is_whitespace() || letter == ','
}

/// A keyword argument, its value as JSON text, up to the comma or bracket that follows it, which is not taken. The name is an
/// identifier, or one of those that are known.
pub(super) fn keyword(text: &str, known: &[&str], ended: bool) -> PythonText<(String, String)> {
    let (name, at) = match keyword_name(text, known, ended) {
        PythonText::Whole(name, at) => (name, at),
        PythonText::Partial => return PythonText::Partial,
        PythonText::Wrong => return PythonText::Wrong,
    };
    let mut reader = LiteralReader { text, at };
    match reader.value(0) {
        Ok(value) => {
            reader.skip_spaces();
            match reader.peek() {
                Some(',' | ')') => PythonText::Whole((name.to_owned(), value), reader.at),
                Some(_) => PythonText::Wrong,
                None if ended => PythonText::Wrong,
                None => PythonText::Partial,
            }
        }
        Err(Stop::End) if !ended => PythonText::Partial,
        Err(_) => PythonText::Wrong,
    }
}

/// The name of a keyword argument, up to and with its equals sign.
fn keyword_name<'a>(text: &'a str, known: &[&'a str], ended: bool) -> PythonText<&'a str> {
    let mut found: Option<(usize, &str)> = None;
    let mut may_continue = text.trim().chars().all(is_name_letter);
    for name in known.iter().filter(|name| !is_identifier(name)) {
        // What is before a name is taken for what is between two arguments.
        let core = name.trim_start_matches(is_between);
        let Some(rest) = text.strip_prefix(core) else {
            may_continue |= core.starts_with(text);
            continue;
        };
        may_continue |= rest.trim().is_empty();
        if let Some(value) = rest.trim_start().strip_prefix('=') {
            found = found.max(Some((text.len() - value.len(), name)));
        }
    }
    if may_continue {
        return if ended { PythonText::Wrong } else { PythonText::Partial };
    }
    if let Some((at, name)) = found {
        return PythonText::Whole(name, at);
    }
    let Some((name, _)) = text.split_once('=') else { return PythonText::Wrong };
    if is_identifier(name.trim()) {
        PythonText::Whole(name.trim(), name.len() + 1)
    } else {
        PythonText::Wrong
    }
}

fn is_identifier(name: &str) -> bool {
    !name.is_empty() && name.chars().all(is_name_letter)
}

fn is_name_letter(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// All keyword arguments from an opening bracket to the closing one, and the length of that.
pub(super) fn keywords(text: &str) -> Option<(Map<String, Value>, usize)> {
    let mut at = text.len() - text.strip_prefix('(')?.len();
    let mut all = Map::new();
    loop {
        let rest = text.get(at..)?;
        at += rest.len() - rest.trim_start_matches(is_between).len();
        if text.get(at..)?.starts_with(')') {
            return Some((all, at + 1));
        }
        let PythonText::Whole((name, value), length) = keyword(text.get(at..)?, &[], true) else {
            return None;
        };
        all.insert(name, serde_json::from_str(&value).ok()?);
        at += length;
    }
}

/// A value as Python writes it. Strings are those of JSON, which Python reads as well.
pub(super) fn literal(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(_) | Value::String(_) => value.to_string(),
        Value::Array(values) => {
            format!("[{}]", values.iter().map(literal).collect::<Vec<_>>().join(", "))
        }
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| {
                format!("{}: {}", Value::from(name.as_str()), literal(value))
            };
            format!("{{{}}}", fields.iter().map(field).collect::<Vec<_>>().join(", "))
        }
    }
}

/// Keyword arguments between commas.
pub(super) fn written(arguments: &Map<String, Value>) -> String {
    let argument = |(name, value): (&String, &Value)| format!("{name}={}", literal(value));
    arguments.iter().map(argument).collect::<Vec<_>>().join(", ")
}

fn push(units: &mut Vec<u16>, letter: char) {
    units.extend_from_slice(letter.encode_utf16(&mut [0; 2]));
}

/// Why reading stops.
enum Stop {
    /// The text ends.
    End,
    /// This is no value.
    Wrong,
}

struct LiteralReader<'a> {
    text: &'a str,
    at: usize,
}

impl LiteralReader<'_> {
    fn peek(&self) -> Option<char> {
        self.text.get(self.at..).and_then(|rest| rest.chars().next())
    }

    fn next(&mut self) -> Result<char, Stop> {
        let letter = self.peek().ok_or(Stop::End)?;
        self.at += letter.len_utf8();
        Ok(letter)
    }

    fn skip_spaces(&mut self) {
        while self.peek().is_some_and(char::is_whitespace) {
            let _ = self.next();
        }
    }

    /// A value, as JSON text.
    fn value(&mut self, depth: usize) -> Result<String, Stop> {
        if depth > MAX_DEPTH {
            return Err(Stop::Wrong);
        }
        self.skip_spaces();
        match self.peek().ok_or(Stop::End)? {
            quote @ ('"' | '\'') => self.string(quote).map(|text| Value::from(text).to_string()),
            '[' => self.list(']', depth),
            '(' => self.list(')', depth),
            '{' => self.dictionary(depth),
            _ => self.word(),
        }
    }

    /// A number, or a constant in Python's or JSON's spelling. It ends before the character that follows it.
    fn word(&mut self) -> Result<String, Stop> {
        let rest = self.text.get(self.at..).unwrap_or_default();
        let is_inner =
            |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '+' | '-' | '.' | '_');
        let length = rest.find(|letter: char| !is_inner(letter)).ok_or(Stop::End)?;
        let word = rest.get(..length).unwrap_or_default();
        self.at += length;
        Ok(match word {
            "True" | "true" => "true".to_owned(),
            "False" | "false" => "false".to_owned(),
            "None" | "null" => "null".to_owned(),
            _ => {
                let plain = word.replace('_', "");
                let number = plain.strip_prefix('+').unwrap_or(&plain);
                // One that is out of range is written as it is.
                if serde_json::from_str::<IgnoredAny>(number).is_ok() {
                    return Ok(number.to_owned());
                }
                // Python writes 1. and .5, too.
                let float = plain.parse::<f64>().ok().and_then(serde_json::Number::from_f64);
                float.ok_or(Stop::Wrong)?.to_string()
            }
        })
    }

    fn string(&mut self, quote: char) -> Result<String, Stop> {
        self.next()?;
        let mut units: Vec<u16> = Vec::new();
        loop {
            let letter = self.next()?;
            if letter == quote {
                break;
            }
            if letter != '\\' {
                push(&mut units, letter);
                continue;
            }
            let escaped = self.next()?;
            let digits = match escaped {
                'x' => 2,
                'u' => 4,
                'U' => 8,
                _ => 0,
            };
            match escaped {
                'n' => push(&mut units, '\n'),
                't' => push(&mut units, '\t'),
                'r' => push(&mut units, '\r'),
                'a' => push(&mut units, '\u{7}'),
                'b' => push(&mut units, '\u{8}'),
                'f' => push(&mut units, '\u{c}'),
                'v' => push(&mut units, '\u{b}'),
                '0' => push(&mut units, '\0'),
                '\\' | '\'' | '"' | '/' => push(&mut units, escaped),
                '\n' => {}
                _ if digits > 0 => {
                    let mut number = 0u32;
                    for _ in 0..digits {
                        let digit = self.next()?.to_digit(16).ok_or(Stop::Wrong)?;
                        number = number.checked_mul(16).ok_or(Stop::Wrong)? + digit;
                    }
                    match (char::from_u32(number), u16::try_from(number)) {
                        (Some(letter), _) => push(&mut units, letter),
                        // A half of a pair, as JSON writes characters beyond the first 65,536.
                        (None, Ok(half)) => units.push(half),
                        (None, Err(_)) => return Err(Stop::Wrong),
                    }
                }
                other => {
                    push(&mut units, '\\');
                    push(&mut units, other);
                }
            }
        }
        Ok(String::from_utf16_lossy(&units))
    }

    fn list(&mut self, close: char, depth: usize) -> Result<String, Stop> {
        self.next()?;
        let mut all: Vec<String> = Vec::new();
        loop {
            self.skip_spaces();
            if self.peek().ok_or(Stop::End)? == close {
                self.next()?;
                return Ok(format!("[{}]", all.join(",")));
            }
            all.push(self.value(depth + 1)?);
            self.comma(close)?;
        }
    }

    fn dictionary(&mut self, depth: usize) -> Result<String, Stop> {
        self.next()?;
        let mut all: Vec<String> = Vec::new();
        loop {
            self.skip_spaces();
            let name = match self.peek().ok_or(Stop::End)? {
                '}' => {
                    self.next()?;
                    return Ok(format!("{{{}}}", all.join(",")));
                }
                quote @ ('"' | '\'') => self.string(quote)?,
                _ => return Err(Stop::Wrong),
            };
            self.skip_spaces();
            if self.next()? != ':' {
                return Err(Stop::Wrong);
            }
            let value = self.value(depth + 1)?;
            all.push(format!("{}:{value}", Value::from(name)));
            self.comma('}')?;
        }
    }

    /// A comma, or the bracket that ends a list, which is left.
    fn comma(&mut self, close: char) -> Result<(), Stop> {
        self.skip_spaces();
        match self.peek().ok_or(Stop::End)? {
            ',' => self.next().map(drop),
            letter if letter == close => Ok(()),
            _ => Err(Stop::Wrong),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn literals_of_python_are_read_and_written() {
        let text = r#"(a='it\'s', b="x\n\u00e9\ud83d\ude00", c=[1, -2.5, .5, (True, None)], d={'k': {"n": false}}, e = 1_000,)"#;
        let wanted = json!({ "a": "it's", "b": "x\né😀", "c": [1, -2.5, 0.5, [true, null]], "d": { "k": { "n": false } },
            "e": 1000 });
        let (read, length) = keywords(text).unwrap_or_default();
        assert_eq!((Value::Object(read.clone()), length), (wanted, text.len()));
        let again = keywords(&format!("({})", written(&read))).unwrap_or_default();
        assert_eq!(again.0, read);
    }

    #[test]
    fn arguments_end_where_they_end() {
        let keyword = |text: &str, ended: bool| keyword(text, &[], ended);
        assert_eq!(keyword("a=1", false), PythonText::Partial);
        assert_eq!(keyword("a=1", true), PythonText::Wrong);
        assert_eq!(keyword("a=1,", false), PythonText::Whole(("a".to_owned(), "1".to_owned()), 3));
        assert_eq!(keyword("ab", false), PythonText::Partial);
        assert_eq!(keyword("a b=", false), PythonText::Wrong);
        assert_eq!(keyword("a='x)", false), PythonText::Partial);
        assert_eq!(keyword("a=f(1))", false), PythonText::Wrong);
        assert_eq!(keyword(&format!("a={}1", "[".repeat(1000)), false), PythonText::Wrong);
    }

    #[test]
    fn known_names_need_not_be_identifiers() {
        let known = ["a", "a=b", "x y", "x", "$top", ", z", ")", ""];
        for (text, name) in [
            ("a=1)", "a"),
            ("a=b=1)", "a=b"),
            ("x y=1)", "x y"),
            ("x = 1,", "x"),
            ("$top=1)", "$top"),
            ("z=1)", ", z"),
            (")=1)", ")"),
            ("=1)", ""),
            ("other=1)", "other"),
        ] {
            let whole = PythonText::Whole((name.to_owned(), "1".to_owned()), text.len() - 1);
            assert_eq!(keyword(text, &known, false), whole, "{text}");
            for (end, _) in text.char_indices() {
                assert_eq!(keyword(&text[..end], &known, false), PythonText::Partial, "{text} up to {end}");
            }
        }
        assert_eq!(keyword("$to=1)", &known, false), PythonText::Wrong);
        assert_eq!(keyword(")]", &known, false), PythonText::Wrong);
    }
}
