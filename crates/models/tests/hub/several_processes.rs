//! Several processes with one cache, of which some are killed.

use std::fs::{self, File};
use std::sync::Barrier;

use quadriga_models::hub::{HubError, HubSettings};
use sha2::Digest;

use super::fake_hub::{COMMIT, FakeHub, Faults, hexadecimal};
use super::{MODEL, bytes, name, open, pull, settings};

/// Locks and links are those of open files, so that threads with hubs of their own are as processes.
#[test]
fn a_file_is_pulled_by_several_at_once() {
    let (model, folder) = (bytes(3_000), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[
        (MODEL, "m-Q8_0.gguf", &model),
        (MODEL, "config.json", b"{}"),
        ("other/copy", "x-Q8_0.gguf", &model),
    ]);
    for round in 0..20 {
        let barrier = Barrier::new(6);
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    let hub = open(settings(&fake, folder.path()));
                    barrier.wait();
                    for repository in [MODEL, "other/copy"] {
                        let paths =
                            pull(&hub, repository).unwrap_or_else(|error| panic!("round {round}: {error}"));
                        assert_eq!(fs::read(&paths[0]).unwrap(), model, "round {round}");
                    }
                });
            }
        });
        let hub = open(settings(&fake, folder.path()));
        // Every second time the content is there, and has no name.
        if round % 2 == 0 {
            fs::remove_dir_all(folder.path().join("hub")).unwrap();
        } else {
            hub.cache().remove(&name(MODEL)).unwrap();
            hub.cache().remove(&name("other/copy")).unwrap();
        }
    }
    let left = fs::read_dir(folder.path().join("blobs")).unwrap().count();
    assert_eq!(left, 0);
}

#[test]
fn models_are_removed_while_others_are_pulled() {
    let (model, folder) = (bytes(1_000), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[(MODEL, "m-Q8_0.gguf", &model), ("other/copy", "x-Q8_0.gguf", &model)]);
    std::thread::scope(|scope| {
        let remover = scope.spawn(|| {
            let hub = open(settings(&fake, folder.path()));
            for _ in 0..40 {
                pull(&hub, "other/copy").unwrap();
                hub.cache().remove(&name("other/copy")).unwrap();
            }
        });
        let hub = open(settings(&fake, folder.path()));
        while !remover.is_finished() {
            let paths = pull(&hub, MODEL).unwrap();
            assert_eq!(fs::read(&paths[0]).unwrap(), model);
            hub.cache().remove(&name(MODEL)).unwrap();
        }
    });
}

#[test]
fn files_of_killed_runs_are_removed_and_those_of_running_ones_stay() {
    let (model, folder) = (bytes(900), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[(MODEL, "m-Q8_0.gguf", &model)]);
    let blobs = folder.path().join("blobs");
    let snapshot = folder.path().join("hub").join(MODEL).join(COMMIT);
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    let [dead, busy, kept] = ["1", "2", "3"].map(|digit| digit.repeat(64));
    let path = |id: &str, end: &str| blobs.join(format!("{id}.{end}"));
    for end in ["lock", "state", "state.tmp", "of"] {
        fs::write(path(&dead, end), "x").unwrap();
        fs::write(path(&busy, end), "x").unwrap();
    }
    // A download that can be continued.
    for end in ["partial", "state", "of", "state.tmp"] {
        fs::write(path(&kept, end), "x").unwrap();
    }
    let link = snapshot.join(".quadriga-1-0.tmp");
    fs::write(&link, "x").unwrap();
    let lock = File::open(path(&busy, "lock")).unwrap();
    lock.lock().unwrap();
    pull(&open(settings(&fake, folder.path())), MODEL).unwrap();
    let mut left: Vec<String> = fs::read_dir(&blobs)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    let id = hexadecimal(&sha2::Sha256::digest(&model));
    let mut wanted: Vec<String> =
        ["lock", "of", "state", "state.tmp"].map(|end| format!("{busy}.{end}")).into();
    wanted.extend(["of", "partial", "state"].map(|end| format!("{kept}.{end}")));
    wanted.push(id);
    wanted.sort();
    assert_eq!(left, wanted);
    assert!(!link.exists());
}

#[test]
fn incomplete_downloads_are_listed_with_what_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeHub::new(&[(MODEL, "m-Q8_0.gguf", &bytes(9_000))]);
    let hub = open(HubSettings { connections: 1, attempts: 1, ..settings(&fake, folder.path()) });
    fake.set_faults(Faults { cut: (1, 700), ..Faults::default() });
    assert!(matches!(pull(&hub, MODEL), Err(HubError::Transport { .. })));
    let found = hub.cache().partial_downloads();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].repository.as_str(), found[0].file.as_str()), (MODEL, "m-Q8_0.gguf"));
    assert_eq!((found[0].bytes, found[0].total, found[0].is_busy), (700, 9_000, false));
    // Of another revision nothing is removed.
    assert!(matches!(hub.cache().remove(&name(&format!("{MODEL}@v1"))), Err(HubError::NotCached { .. })));
    assert_eq!(hub.cache().partial_downloads().len(), 1);
    hub.cache().remove(&name(&format!("{MODEL}@main"))).unwrap();
    assert!(hub.cache().partial_downloads().is_empty());
}
