//! Ctrl-C. By default it ends the process; a stage that must clean up or keep a result catches it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The exit code after Ctrl-C: 128 plus the number of SIGINT.
pub(crate) const EXIT_CODE: u8 = 130;

/// Whether a [`CtrlC`] guard is alive.
static CAUGHT: AtomicBool = AtomicBool::new(false);

/// Whether Ctrl-C was pressed since the guard was made.
static PENDING: AtomicBool = AtomicBool::new(false);

/// A cancellation flag that the handler sets, too.
static CANCEL: Mutex<Option<Arc<AtomicBool>>> = Mutex::new(None);

fn set_cancel_flag(flag: Option<Arc<AtomicBool>>) {
    *CANCEL.lock().unwrap_or_else(PoisonError::into_inner) = flag;
}

/// Installs the handler. The first Ctrl-C under a guard is recorded; any other ends the process.
pub(crate) fn install() {
    // Without the handler the signal's default action still ends the process.
    let _ = ctrlc::set_handler(|| {
        if !CAUGHT.load(Ordering::SeqCst) || PENDING.swap(true, Ordering::SeqCst) {
            note!("");
            std::process::exit(i32::from(EXIT_CODE));
        }
        if let Some(flag) = &*CANCEL.lock().unwrap_or_else(PoisonError::into_inner) {
            flag.store(true, Ordering::Release);
        }
    });
}

/// A guard: while it lives, the first Ctrl-C is recorded instead of ending the process.
pub(crate) struct CtrlC(());

/// Catches Ctrl-C until the guard is dropped.
pub(crate) fn catch() -> CtrlC {
    PENDING.store(false, Ordering::SeqCst);
    CAUGHT.store(true, Ordering::SeqCst);
    CtrlC(())
}

/// Catches Ctrl-C to the end of the process, for a stage that has a handler of its own: the one here runs on a thread, perhaps only
/// after that stage has ended because of the same Ctrl-C.
pub(crate) fn catch_to_the_end() {
    std::mem::forget(catch());
}

/// Catches Ctrl-C until the guard is dropped, and sets a cancellation flag when it comes.
pub(crate) fn catch_and_cancel(flag: Arc<AtomicBool>) -> CtrlC {
    set_cancel_flag(Some(flag));
    catch()
}

impl CtrlC {
    /// Whether Ctrl-C was pressed since the guard was made.
    pub(crate) fn is_pressed(&self) -> bool {
        PENDING.load(Ordering::SeqCst)
    }

    /// The flag behind [`is_pressed`](CtrlC::is_pressed).
    pub(crate) fn flag(&self) -> &'static AtomicBool {
        &PENDING
    }
}

impl Drop for CtrlC {
    fn drop(&mut self) {
        CAUGHT.store(false, Ordering::SeqCst);
        set_cancel_flag(None);
    }
}
