//! Joining neighbouring operations into steps, so that fewer barriers are needed and rows stay in the cache.
//!
//! Two kinds of joining, both of which leave the arithmetic as it is, so that results are the same bit for bit:
//!
//! - Operations too small to share out follow each other on one thread. That is always right: one thread keeps
//!   the order.
//! - Operations with equally many units, each of which touches only its own share of what the others write (its
//!   rows), run unit by unit: a thread takes some rows through all of them.

use quadriga_runtime::BackendError;

use crate::step::{Part, Step, TINY};

/// Work memory for a number of threads.
pub(crate) type WorkBytes = Box<dyn Fn(usize) -> Result<usize, BackendError> + Send>;

/// An operation to be made a step of, or part of one.
pub(crate) enum Item {
    /// Units of work.
    Part(Part),
}

impl Item {
    /// Sets the index of the node's name.
    pub(crate) fn set_name(&mut self, name: usize) {
        match self {
            Item::Part(part) => part.name = name,
        }
    }
}

/// Joins operations into steps, or makes each a step of its own.
pub(crate) fn join(items: Vec<Item>, fuse: bool) -> (Vec<Step>, WorkBytes) {
    let mut steps: Vec<Step> = Vec::new();
    for item in items {
        let Item::Part(part) = item;
        let refused = if fuse { append(steps.last_mut(), part) } else { Some(part) };
        if let Some(part) = refused {
            steps.push(if is_tiny(&part) { Step::Single(vec![part]) } else { Step::Shared(vec![part]) });
        }
    }
    (steps, Box::new(|_| Ok(0)))
}

fn is_tiny(part: &Part) -> bool {
    part.units <= 1 || part.cost <= TINY
}

/// Adds a part to the last step if that is right and pays; else gives it back.
fn append(last: Option<&mut Step>, part: Part) -> Option<Part> {
    match last {
        Some(Step::Single(parts)) if is_tiny(&part) => {
            parts.push(part);
            None
        }
        Some(Step::Shared(parts)) if !is_tiny(&part) && goes_with(parts, &part) => {
            parts.push(part);
            None
        }
        _ => Some(part),
    }
}

/// Whether a part can run unit by unit with others: equally many units, and no unit touches what another writes.
fn goes_with(parts: &[Part], part: &Part) -> bool {
    parts.iter().all(|other| {
        other.units == part.units
            && other
                .accesses
                .iter()
                .all(|theirs| part.accesses.iter().all(|ours| !theirs.conflicts_across_units(ours)))
    })
}
