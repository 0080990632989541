//! API keys.

use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

use axum::http::{HeaderMap, header};
use subtle::ConstantTimeEq;

use super::caller::{Caller, KeyLimits};

/// A key, and who has it.
#[derive(Clone)]
struct Key {
    text: String,
    caller: Caller,
}

/// The keys of a server. Without any, everybody may ask.
#[derive(Default)]
pub struct Keys {
    /// Those of the command line.
    given: Vec<String>,
    file: Option<PathBuf>,
    keys: RwLock<Vec<Key>>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Keys").field("count", &self.count()).finish_non_exhaustive()
    }
}

impl Keys {
    /// These keys, and those of a file. It has one key a line, which may be followed by `tokens-per-minute=N` and
    /// `concurrent=N`; empty lines and those that begin with `#` are ignored.
    ///
    /// # Errors
    /// The file cannot be read, or a line is wrong.
    pub fn new(given: Vec<String>, file: Option<PathBuf>) -> Result<Keys, String> {
        let keys = Keys { given, file, keys: RwLock::default() };
        keys.reload()?;
        Ok(keys)
    }

    /// Reads the file again. A key that stays keeps what it has used. After an error, the keys are as before.
    ///
    /// # Errors
    /// The file cannot be read, or a line is wrong.
    pub fn reload(&self) -> Result<(), String> {
        let mut found: Vec<(String, KeyLimits)> =
            self.given.iter().map(|key| (key.clone(), KeyLimits::default())).collect();
        if let Some(path) = &self.file {
            found.extend(read(path)?);
            if found.is_empty() {
                // An empty file must not open the server to everybody.
                return Err(format!("{} has no key", path.display()));
            }
        }
        let mut keys = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::take(&mut *keys);
        let mut next = before.iter().map(|key| key.caller.client()).max().unwrap_or(0);
        for (text, limits) in found {
            // Of a key that is listed twice, the last limits count.
            if let Some(twice) = keys.iter_mut().find(|key| key.text == text) {
                twice.caller = twice.caller.with_limits(limits);
                continue;
            }
            let known = before.iter().find(|key| key.text == text);
            let caller = match known {
                Some(key) => key.caller.with_limits(limits),
                None => {
                    next += 1;
                    Caller::new(next, limits)
                }
            };
            keys.push(Key { text, caller });
        }
        Ok(())
    }

    /// The number of keys.
    pub fn count(&self) -> usize {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Who asks, by the key in a request's headers. Without any keys, anybody.
    pub fn caller(&self, headers: &HeaderMap) -> Option<Caller> {
        if self.count() == 0 {
            return Some(Caller::default());
        }
        given_key(headers).and_then(|key| self.find(key))
    }

    /// Whether a request has a key, known or not.
    pub(crate) fn are_in(headers: &HeaderMap) -> bool {
        given_key(headers).is_some_and(|key| !key.is_empty())
    }

    /// Who has this key. All keys are compared, each in a time that does not depend on how much of it is right.
    fn find(&self, given: &[u8]) -> Option<Caller> {
        let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        let mut found = None;
        for key in keys.iter() {
            if bool::from(key.text.as_bytes().ct_eq(given)) {
                found = Some(key.caller.clone());
            }
        }
        found
    }
}

fn read(path: &Path) -> Result<Vec<(String, KeyLimits)>, String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("cannot read the keys in {}: {error}", path.display()))?;
    let lines = text.lines().enumerate().map(|(number, line)| (number + 1, line.trim()));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let parse = |(number, line)| {
        // The line itself is a secret.
        parse_line(line).map_err(|problem| format!("{}, line {number}: {problem}", path.display()))
    };
    lines.map(parse).collect()
}

fn parse_line(line: &str) -> Result<(String, KeyLimits), String> {
    let mut words = line.split_whitespace();
    let key = words.next().unwrap_or_default().to_owned();
    let mut limits = KeyLimits::default();
    for word in words {
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        let number = value.parse::<u64>().map_err(|_| format!("{name} needs a number, as in {name}=100"))?;
        match name {
            "tokens-per-minute" => limits.tokens_per_minute = Some(number),
            "concurrent" => limits.concurrent = Some(usize::try_from(number).unwrap_or(usize::MAX)),
            _ => return Err("a key may be followed by tokens-per-minute=N and concurrent=N".to_owned()),
        }
    }
    Ok((key, limits))
}

/// The key of a request: `Authorization: Bearer KEY`, `Authorization: KEY` or `x-api-key: KEY`.
fn given_key(headers: &HeaderMap) -> Option<&[u8]> {
    let authorization = headers.get(header::AUTHORIZATION).map(|value| {
        let bytes = value.as_bytes();
        match bytes.split_at_checked(7) {
            Some((scheme, key)) if scheme.eq_ignore_ascii_case(b"bearer ") => key.trim_ascii(),
            _ => bytes.trim_ascii(),
        }
    });
    authorization.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes().trim_ascii()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn lines_have_a_key_and_limits() {
        let (key, limits) = parse_line("secret tokens-per-minute=100 concurrent=2").unwrap();
        assert_eq!(key, "secret");
        assert_eq!(limits, KeyLimits { tokens_per_minute: Some(100), concurrent: Some(2) });
        assert!(parse_line("secret rate=1").is_err());
        assert!(parse_line("secret concurrent").is_err());
    }

    #[test]
    fn keys_are_found_whole() {
        let keys = Keys::new(vec!["first".to_owned(), "second".to_owned()], None).unwrap();
        assert_eq!(keys.find(b"second").map(|caller| caller.client()), Some(2));
        for wrong in [&b"secon"[..], b"secondary", b""] {
            assert!(keys.find(wrong).is_none());
        }
        keys.reload().unwrap();
        assert_eq!(keys.find(b"second").map(|caller| caller.client()), Some(2));
    }

    #[test]
    fn a_key_that_is_listed_twice_is_one() {
        let twice = vec!["first".to_owned(), "second".to_owned(), "second".to_owned()];
        let keys = Keys::new(twice, None).unwrap();
        assert_eq!(keys.count(), 2);
        let before = keys.find(b"second").unwrap().client();
        // It keeps what it has used: it is the same caller.
        keys.reload().unwrap();
        assert_eq!(keys.find(b"second").unwrap().client(), before);
    }

    #[test]
    fn keys_come_in_three_headers() {
        let found = |name: &'static str, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            given_key(&headers).map(<[u8]>::to_vec)
        };
        for (name, value) in [("authorization", "Bearer k"), ("authorization", "k"), ("x-api-key", "k")] {
            assert_eq!(found(name, value).as_deref(), Some(&b"k"[..]));
        }
    }
}
