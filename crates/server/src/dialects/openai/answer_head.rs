//! What all parts of an answer have in common.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::call::new_id;
use crate::model::ServedModel;

/// An answer's identifier, time and model.
#[derive(Clone, Debug)]
pub(crate) struct AnswerHead {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
}

impl AnswerHead {
    pub(crate) fn new(prefix: &str, served: &ServedModel) -> AnswerHead {
        AnswerHead { id: new_id(prefix), created: unix_time(), model: served.name.clone() }
    }
}

/// Seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
