//! Which pages a thread has asked to bind: for tests, since a machine with one node refuses all others.

use std::cell::RefCell;
use std::ops::Range;

use super::system::PagePolicy;

/// Pages that the system was asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BoundPages {
    /// Their addresses.
    pub addresses: Range<usize>,
    /// The nodes: in turns where there are several.
    pub nodes: Vec<usize>,
    /// Whether pages are on the nodes in turns.
    pub interleaved: bool,
}

thread_local! {
    static RECORDED: RefCell<Option<Vec<BoundPages>>> = const { RefCell::new(None) };
}

/// Calls a function, and returns its result and the pages that this thread has asked to bind meanwhile.
pub fn record_bound_pages<T>(call: impl FnOnce() -> T) -> (T, Vec<BoundPages>) {
    RECORDED.set(Some(Vec::new()));
    let result = call();
    (result, RECORDED.take().unwrap_or_default())
}

pub(super) fn note(pages: &Range<usize>, nodes: &[usize], policy: PagePolicy) {
    RECORDED.with_borrow_mut(|recorded| {
        if let Some(recorded) = recorded {
            recorded.push(BoundPages {
                addresses: pages.clone(),
                nodes: nodes.to_vec(),
                interleaved: policy == PagePolicy::Interleaved,
            });
        }
    });
}
