//! Ctrl-C. Most stages can simply end; those that have something to clean up or to keep ask for a gentle stop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The exit code after Ctrl-C: 128 and the signal's number, as shells have it.
pub(crate) const EXIT_CODE: u8 = 130;

/// Whether the stage under way looks at [`pending`].
static GENTLE: AtomicBool = AtomicBool::new(false);

/// Whether Ctrl-C came during a gentle stage.
static PENDING: AtomicBool = AtomicBool::new(false);

/// A flag of the stage under way that Ctrl-C sets.
static FLAG: Mutex<Option<Arc<AtomicBool>>> = Mutex::new(None);

fn set_flag(flag: Option<Arc<AtomicBool>>) {
    *FLAG.lock().unwrap_or_else(PoisonError::into_inner) = flag;
}

/// Takes over Ctrl-C. The first one in a gentle stage is noted; any other ends the process.
pub(crate) fn install() {
    // Without the handler Ctrl-C still ends the process, only less tidily.
    let _ = ctrlc::set_handler(|| {
        if !GENTLE.load(Ordering::SeqCst) || PENDING.swap(true, Ordering::SeqCst) {
            note!();
            std::process::exit(i32::from(EXIT_CODE));
        }
        if let Some(flag) = &*FLAG.lock().unwrap_or_else(PoisonError::into_inner) {
            flag.store(true, Ordering::Release);
        }
    });
}

/// A stage that looks at [`pending`] while this value lives.
pub(crate) struct Gentle(());

/// Begins a gentle stage.
pub(crate) fn gently() -> Gentle {
    PENDING.store(false, Ordering::SeqCst);
    GENTLE.store(true, Ordering::SeqCst);
    Gentle(())
}

/// Begins a gentle stage in which Ctrl-C also sets this flag.
pub(crate) fn gently_setting(flag: Arc<AtomicBool>) -> Gentle {
    set_flag(Some(flag));
    gently()
}

impl Gentle {
    /// Whether Ctrl-C came since the stage began.
    pub(crate) fn is_interrupted(&self) -> bool {
        PENDING.load(Ordering::SeqCst)
    }

    /// The same as a flag to hand on.
    pub(crate) fn flag(&self) -> &'static AtomicBool {
        &PENDING
    }
}

impl Drop for Gentle {
    fn drop(&mut self) {
        GENTLE.store(false, Ordering::SeqCst);
        set_flag(None);
    }
}
