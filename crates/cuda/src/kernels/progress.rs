//! Who is told when kernels are compiled, which can take seconds.

use std::sync::{Mutex, OnceLock, PoisonError};

/// A kernel file that is compiled on this machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct KernelCompilation {
    /// The file.
    pub file: &'static str,
    /// Whether it is done, or only started.
    pub finished: bool,
    /// How many files were compiled so far.
    pub done: usize,
    /// How many files are known to be needed.
    pub total: usize,
}

type Observer = Box<dyn Fn(KernelCompilation) + Send + Sync>;

static OBSERVER: OnceLock<Observer> = OnceLock::new();
/// Files done, and files known to be needed.
static COUNTS: Mutex<(usize, usize)> = Mutex::new((0, 0));

/// Sets what is called, from several threads at once, when a kernel file starts and ends to be compiled on this machine;
/// `false` where it was set before. With machine code in the binary, as for common devices, nothing is compiled.
pub fn observe_compilation(observer: impl Fn(KernelCompilation) + Send + Sync + 'static) -> bool {
    OBSERVER.set(Box::new(observer)).is_ok()
}

/// Announces files that will be compiled.
pub(super) fn expect(files: usize) {
    let mut counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    counts.1 = counts.0 + files;
}

/// Compiles a file, and tells the observer.
pub(super) fn report<T>(file: &'static str, compile: impl FnOnce() -> T) -> T {
    let tell = |finished: bool| {
        let (done, total) = {
            let mut counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
            counts.0 += usize::from(finished);
            counts.1 = counts.1.max(counts.0 + usize::from(!finished));
            *counts
        };
        if let Some(observer) = OBSERVER.get() {
            observer(KernelCompilation { file, finished, done, total });
        }
    };
    tell(false);
    let compiled = compile();
    tell(true);
    compiled
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn the_observer_hears_of_the_start_and_the_end_of_each_file() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&seen);
        assert!(observe_compilation(move |compilation| to.lock().unwrap().push(compilation)));
        assert!(!observe_compilation(|_| ()));
        expect(2);
        assert_eq!(report("a.cu", || 5), 5);
        report("b.cu", || ());
        // One that was not announced.
        report("c.cu", || ());
        let seen: Vec<_> =
            seen.lock().unwrap().iter().map(|c| (c.file, c.finished, c.done, c.total)).collect();
        assert_eq!(
            seen,
            [
                ("a.cu", false, 0, 2),
                ("a.cu", true, 1, 2),
                ("b.cu", false, 1, 2),
                ("b.cu", true, 2, 2),
                ("c.cu", false, 2, 3),
                ("c.cu", true, 3, 3)
            ]
        );
    }
}
