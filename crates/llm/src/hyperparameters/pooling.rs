//! How an embedding model makes one vector of a text.

use std::str::FromStr;

use super::keys::Keys;
use crate::{Error, Result};

/// How the vectors of a text's tokens become one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The vector of the first token.
    Cls,
    /// The vector of the last token.
    Last,
    /// Scores of the model's classification head, which judge how well a document answers a query.
    Rank,
    /// They stay as they are.
    None,
}

impl Pooling {
    /// Every kind, with its name on the command line.
    pub const ALL: [(Pooling, &str); 5] = [
        (Pooling::Mean, "mean"),
        (Pooling::Cls, "cls"),
        (Pooling::Last, "last"),
        (Pooling::Rank, "rank"),
        (Pooling::None, "none"),
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        Pooling::ALL.iter().find(|(known, _)| *known == self).map_or("", |(_, name)| name)
    }

    /// The kind that a file names; `None` if it names none.
    pub(super) fn read(keys: &Keys<'_>) -> Result<Option<Pooling>> {
        let key = "pooling_type";
        match keys.find_count_or_zero(key)? {
            None | Some(0) => Ok(None),
            Some(1) => Ok(Some(Pooling::Mean)),
            Some(2) => Ok(Some(Pooling::Cls)),
            Some(3) => Ok(Some(Pooling::Last)),
            Some(4) => Ok(Some(Pooling::Rank)),
            Some(other) => Err(keys.wrong(key, other, "0 (none), 1 (mean), 2 (cls), 3 (last) or 4 (rank)")),
        }
    }
}

impl FromStr for Pooling {
    type Err = Error;

    fn from_str(name: &str) -> Result<Pooling> {
        let known = Pooling::ALL.iter().find(|(_, known)| *known == name);
        known.map(|(pooling, _)| *pooling).ok_or_else(|| Error::Option {
            name: "the pooling",
            value: name.to_owned(),
            wanted: "mean, cls, last, rank or none",
        })
    }
}
