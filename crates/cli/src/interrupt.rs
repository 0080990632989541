//! Ctrl-C, and SIGTERM where files are written. By default they end the process; a stage that must clean up or keep a result catches
//! them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The exit code after Ctrl-C: 128 plus the number of SIGINT.
const INTERRUPTED: u8 = 130;

/// The exit code after SIGTERM.
const TERMINATED: u8 = 143;

/// Whether it was SIGTERM.
static IS_TERMINATED: AtomicBool = AtomicBool::new(false);

/// How many [`CtrlC`] guards are alive.
static GUARDS: AtomicUsize = AtomicUsize::new(0);

/// Whether Ctrl-C was pressed since the first of the living guards was made.
static PENDING: AtomicBool = AtomicBool::new(false);

/// A cancellation flag that the handler sets, too.
static CANCEL: Mutex<Option<Arc<AtomicBool>>> = Mutex::new(None);

fn set_cancel_flag(flag: Option<Arc<AtomicBool>>) {
    *CANCEL.lock().unwrap_or_else(PoisonError::into_inner) = flag;
}

/// The exit code after the signal that was caught.
pub(crate) fn exit_code() -> u8 {
    if IS_TERMINATED.load(Ordering::SeqCst) { TERMINATED } else { INTERRUPTED }
}

/// Installs the handler. The first Ctrl-C under a guard is recorded; any other ends the process.
pub(crate) fn install() {
    // Without the handler the signal's default action still ends the process.
    let _ = ctrlc::set_handler(|| record(false));
    // Past a limit on the size of files, writes fail like those to a full disk, instead of ending the process.
    // SAFETY: nothing is called by the signal from now on.
    #[cfg(unix)]
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN)
    };
}

/// Records a signal, or ends the process.
fn record(is_terminated: bool) {
    if is_terminated {
        IS_TERMINATED.store(true, Ordering::SeqCst);
    }
    if GUARDS.load(Ordering::SeqCst) == 0 || PENDING.swap(true, Ordering::SeqCst) {
        if !is_terminated {
            note!("");
        }
        std::process::exit(i32::from(exit_code()));
    }
    if let Some(flag) = &*CANCEL.lock().unwrap_or_else(PoisonError::into_inner) {
        flag.store(true, Ordering::Release);
    }
}

/// As [`catch`], for a stage that writes files: from now on SIGTERM counts as Ctrl-C, so that no temporary files are left.
pub(crate) fn catch_writing() -> CtrlC {
    #[cfg(unix)]
    {
        static INSTALLED: std::sync::Once = std::sync::Once::new();
        // Without the handler the signal's default action still ends the process.
        INSTALLED.call_once(|| drop(handle_termination()));
    }
    catch()
}

/// Records SIGTERM, on a thread of its own. When this returns, the handler is installed.
#[cfg(unix)]
fn handle_termination() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signals = {
        let _context = runtime.enter();
        signal(SignalKind::terminate())?
    };
    let listen = move || {
        runtime.block_on(async {
            while signals.recv().await.is_some() {
                record(true);
            }
        });
    };
    std::thread::Builder::new().name("sigterm".to_owned()).spawn(listen).map(drop)
}

/// A guard: while it lives, the first Ctrl-C is recorded instead of ending the process.
pub(crate) struct CtrlC(());

/// Catches Ctrl-C until the guard is dropped, and those that were made before it.
pub(crate) fn catch() -> CtrlC {
    if GUARDS.fetch_add(1, Ordering::SeqCst) == 0 {
        PENDING.store(false, Ordering::SeqCst);
    }
    CtrlC(())
}

/// While it lives, SIGTERM does nothing.
pub(crate) struct NoTermination {
    #[cfg(unix)]
    before: libc::sighandler_t,
}

/// Ignores SIGTERM until the guard is dropped.
pub(crate) fn ignore_termination() -> NoTermination {
    NoTermination {
        // SAFETY: nothing is called by the signal from now on.
        #[cfg(unix)]
        before: unsafe { libc::signal(libc::SIGTERM, libc::SIG_IGN) },
    }
}

impl Drop for NoTermination {
    fn drop(&mut self) {
        #[cfg(unix)]
        if self.before != libc::SIG_ERR {
            // SAFETY: what the signal did before is still there: handlers are functions of the program.
            unsafe { libc::signal(libc::SIGTERM, self.before) };
        }
    }
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
        GUARDS.fetch_sub(1, Ordering::SeqCst);
        set_cancel_flag(None);
    }
}
