//! The names of fields that parsers ask for, whether a request has them or not: what `/openapi.json` has to describe.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

/// The fields that requests were asked for, by the path of their route.
#[derive(Debug, Default)]
pub struct FieldLog {
    read: Mutex<BTreeMap<String, BTreeSet<String>>>,
}

impl FieldLog {
    /// The fields of a path, such as `messages[].role`.
    pub fn fields(&self, path: &str) -> BTreeSet<String> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner).get(path).cloned().unwrap_or_default()
    }

    fn note(&self, path: &str, field: String) {
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        read.entry(path.to_owned()).or_default().insert(field);
    }
}

/// The log of one route.
#[derive(Clone, Debug)]
pub struct RouteFieldLog {
    log: Arc<FieldLog>,
    path: String,
}

impl RouteFieldLog {
    /// The part of a log that belongs to a path.
    pub fn new(log: &Arc<FieldLog>, path: &str) -> RouteFieldLog {
        RouteFieldLog { log: Arc::clone(log), path: path.to_owned() }
    }

    /// Notes a field by its place in a request; fields of all elements of a list have one name.
    pub(crate) fn note(&self, place: &str) {
        self.log.note(&self.path, without_indices(place));
    }
}

/// A place such as `messages[0].role` as `messages[].role`.
fn without_indices(place: &str) -> String {
    let mut name = String::with_capacity(place.len());
    let mut within = false;
    for letter in place.chars() {
        within = match letter {
            '[' => true,
            ']' => false,
            _ => within,
        };
        if !within || letter == '[' {
            name.push(letter);
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_lists_have_one_name() {
        let log = Arc::new(FieldLog::default());
        let route = RouteFieldLog::new(&log, "/a");
        for place in ["messages[0].content[12].text", "messages[1].content[0].text", "model"] {
            route.note(place);
        }
        let wanted = ["messages[].content[].text", "model"].map(str::to_owned);
        assert_eq!(log.fields("/a"), BTreeSet::from(wanted));
        assert_eq!(log.fields("/b"), BTreeSet::new());
    }
}
