//! Ends compiling that nobody waits for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A flag that ends the compiling of a grammar: whoever asked for it has gone. Clones share it.
///
/// ```
/// use quadriga_llm::constraint::Cancellation;
/// use quadriga_llm::serving::Request;
///
/// let cancellation = Cancellation::default();
/// // Whatever the request is constrained by is not compiled to its end once the flag is set.
/// let request = Request { cancellation: cancellation.clone(), ..Request::new(vec![1]) };
/// cancellation.cancel();
/// assert!(request.cancellation.is_cancelled());
/// ```
#[derive(Clone, Debug, Default)]
pub struct Cancellation(Arc<AtomicBool>);

impl Cancellation {
    /// Sets the flag, for good.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the flag is set.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// [`Error::Cancelled`](crate::Error::Cancelled) if the flag is set.
    #[cfg(feature = "constraint")]
    pub(super) fn check(&self) -> crate::Result<()> {
        if self.is_cancelled() { Err(crate::Error::Cancelled) } else { Ok(()) }
    }
}
