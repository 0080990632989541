//! A cancelled download ends at once, whatever its threads wait for, and is continued later.

use std::fs;
use std::ops::ControlFlow;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use quadriga_models::hub::{HubError, HubSettings};

use super::fake_hub::{FakeHub, Faults};
use super::{MODEL, bytes, name, open, pull, settings};

/// Whether a thread is in the pause that the server asked for, and whether the test has ended it.
static PAUSE: (Mutex<(bool, bool)>, Condvar) = (Mutex::new((false, false)), Condvar::new());

fn pause(_: Duration) {
    let mut state = PAUSE.0.lock().unwrap();
    state.0 = true;
    // Not for ever, so that a download that waits for it fails the test.
    let (mut state, _) =
        PAUSE.1.wait_timeout_while(state, Duration::from_secs(60), |state| !state.1).unwrap();
    state.0 = false;
}

#[test]
fn a_pause_is_not_waited_for() {
    let (model, folder) = (bytes(5_000), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &model)]);
    let own = HubSettings { connections: 1, pause, ..settings(&fake, folder.path()) };
    let hub = open(own.clone());
    let name = name(MODEL);
    let listing = hub.list(&name).unwrap();
    fake.set_faults(Faults { status: (1, 429, "60"), ..Faults::default() });
    let cancelled = hub.pull(&name, &listing, &listing.files, &mut |_| {
        if PAUSE.0.lock().unwrap().0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(cancelled, Err(HubError::Cancelled)), "{cancelled:?}");
    assert!(PAUSE.0.lock().unwrap().0, "the pull waited for the end of the pause");
    // Another one goes on meanwhile.
    fake.requests();
    let paths = pull(&open(HubSettings { pause: |_| {}, ..own }), MODEL).unwrap();
    assert_eq!(fs::read(&paths[0]).unwrap(), model);
    PAUSE.0.lock().unwrap().1 = true;
    PAUSE.1.notify_all();
}

#[test]
fn a_server_that_sends_nothing_is_not_waited_for() {
    let (model, folder) = (bytes(5_000), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &model)]);
    fake.set_faults(Faults { stall: (1, 300), ..Faults::default() });
    let own =
        HubSettings { connections: 1, stall: Duration::from_secs(60), ..settings(&fake, folder.path()) };
    let hub = open(own);
    let name = name(MODEL);
    let listing = hub.list(&name).unwrap();
    let cancelled = hub.pull(&name, &listing, &listing.files, &mut |progress| {
        if progress.bytes == 300 && fake.stalled() > 0 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    assert!(matches!(cancelled, Err(HubError::Cancelled)), "{cancelled:?}");
    // The connection is still open: nobody has ended it.
    assert!(fake.stalled() > 0, "the pull waited for the server");
    assert_eq!(hub.cache().partial_downloads()[0].bytes, 300);
    fake.set_faults(Faults { release: true, ..Faults::default() });
    fake.requests();
    let paths = pull(&open(settings(&fake, folder.path())), MODEL).unwrap();
    assert_eq!(fs::read(&paths[0]).unwrap(), model);
    let requests = fake.requests();
    let mut ranges = requests.iter().filter_map(|request| request.headers.get("range"));
    assert!(ranges.any(|range| range == "bytes=300-999"), "{requests:?}");
    assert!(hub.cache().partial_downloads().is_empty());
}
