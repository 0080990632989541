//! Memory of a thread's own, kept from one use to the next.

use std::cell::RefCell;

thread_local! {
    static FLOATS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Lends `len` floats of unspecified value. A use inside a use gets memory of its own.
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
