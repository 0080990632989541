//! Thread-local scratch memory, kept from one use to the next.

use std::cell::RefCell;

thread_local! {
    static FLOATS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Calls `work` with `len` floats of unspecified value. A nested call gets a new allocation.
pub(super) fn with_floats<T>(len: usize, work: impl FnOnce(&mut [f32]) -> T) -> T {
    FLOATS.with(|floats| match floats.try_borrow_mut() {
        Ok(mut floats) => {
            if floats.len() < len {
                floats.resize(len, 0.0);
            }
            work(floats.get_mut(..len).unwrap_or_default())
        }
        Err(_) => work(&mut vec![0.0; len]),
    })
}
