//! Downloads from a server on loopback that behaves like the hub.
#![cfg(feature = "network")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[path = "hub/cancelling.rs"]
mod cancelling;
#[path = "hub/choosing.rs"]
mod choosing;
#[path = "common/fake_hub.rs"]
mod fake_hub;
#[path = "common/fake_proxy.rs"]
mod fake_proxy;
#[path = "hub/proxies.rs"]
mod proxies;
#[path = "hub/revisions.rs"]
mod revisions;
#[path = "hub/several_processes.rs"]
mod several_processes;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fake_hub::{COMMIT, FakeHub, Faults, hexadecimal};
use quadriga_models::hub::{
    Hub, HubError, HubResult, HubSettings, Listing, OtherKind, PullStage, RemoteChecksum, RepositoryName,
    choices,
};
use sha2::Digest;

const MODEL: &str = "org/model-GGUF";

/// Bytes that differ everywhere.
fn bytes(count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_u32;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..count).map(next).collect()
}

fn settings(hub: &FakeHub, cache: &Path) -> HubSettings {
    HubSettings {
        part_bytes: 1000,
        connections: 3,
        stall: Duration::from_millis(300),
        pause: |_| {},
        ..HubSettings::new(&hub.endpoint, cache)
    }
}

fn name(text: &str) -> RepositoryName {
    text.parse().unwrap()
}

/// Pulls all files of a repository.
fn pull(hub: &Hub, repository: &str) -> HubResult<Vec<PathBuf>> {
    let name = name(repository);
    let listing = hub.list(&name)?;
    hub.pull(&name, &listing, &listing.files, &mut |_| ControlFlow::Continue(()))
}

fn open(settings: HubSettings) -> Hub {
    Hub::new(settings).unwrap()
}

#[test]
fn a_repository_is_pulled_in_parts_and_kept_by_content() {
    let (model, folder) = (bytes(10_500), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[
        (MODEL, "m Q8_0.gguf", &model),
        (MODEL, "config.json", b"{}"),
        ("other/copy", "same-Q8_0.gguf", &model),
    ]);
    let hub = open(HubSettings { token: Some("hf_secret".to_owned()), ..settings(&fake, folder.path()) });
    let paths = pull(&hub, MODEL).unwrap();
    assert_eq!(fs::read(&paths[0]).unwrap(), model);
    assert_eq!(fs::read(&paths[1]).unwrap(), b"{}");
    let requests = fake.requests();
    // One part of 1,000 bytes per request, and none of them shows the token to the storage.
    let parts = requests.iter().filter(|request| request.storage && request.path.contains("gguf"));
    assert_eq!(parts.count(), 11);
    for request in &requests {
        assert_eq!(request.headers.contains_key("authorization"), !request.storage, "{request:?}");
    }
    // Contents have their SHA-256 as their names, so that the second repository needs no download.
    let blob = folder.path().join("blobs").join(hexadecimal(&sha2::Sha256::digest(&model)));
    assert_eq!(fs::canonicalize(&paths[0]).unwrap(), fs::canonicalize(blob).unwrap());
    pull(&hub, "other/copy").unwrap();
    assert!(fake.requests().iter().all(|request| !request.storage));
    // Again: only the list is asked for.
    pull(&hub, MODEL).unwrap();
    assert_eq!(fake.requests().len(), 1);
    // Nothing but contents is left.
    let left = fs::read_dir(folder.path().join("blobs")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.filter(|name| name.len() != 64).count(), 0);
}

#[test]
fn cut_connections_are_continued_where_they_ended() {
    let (model, folder) = (bytes(5_000), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &model)]);
    fake.set_faults(Faults { cut: (20, 300), ..Faults::default() });
    let hub = open(settings(&fake, folder.path()));
    let paths = pull(&hub, MODEL).unwrap();
    assert_eq!(fs::read(&paths[0]).unwrap(), model);
    // No byte was asked for twice.
    let asked: u64 = fake.requests().iter().filter(|request| request.storage).map(|_| 1).sum();
    assert!(asked >= 15, "{asked}");
}

#[test]
fn a_cancelled_pull_is_resumed_by_another_process() {
    let (model, folder) = (bytes(9_000), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &model)]);
    let hub = open(HubSettings { connections: 1, attempts: 1, ..settings(&fake, folder.path()) });
    // The connection ends in the third part.
    fake.set_faults(Faults { cut: (1, 700), ..Faults::default() });
    assert!(matches!(pull(&hub, MODEL), Err(HubError::Transport { .. })));
    fake.requests();
    let paths = pull(&open(settings(&fake, folder.path())), MODEL).unwrap();
    assert_eq!(fs::read(&paths[0]).unwrap(), model);
    let first = fake.requests().iter().filter_map(|request| request.headers.get("range").cloned()).min();
    assert_eq!(first.as_deref(), Some("bytes=1000-1999"), "a part of which 700 bytes are there is continued");
}

#[test]
fn a_changed_file_is_not_mixed_with_its_old_version() {
    let (model, folder) = (bytes(4_000), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &model)]);
    let hub = open(HubSettings { connections: 1, attempts: 1, ..settings(&fake, folder.path()) });
    fake.set_faults(Faults { cut: (1, 500), corrupt: true, ..Faults::default() });
    assert!(pull(&hub, MODEL).is_err());
    fake.set_faults(Faults { etag: Some("\"new\""), ..Faults::default() });
    let paths = pull(&hub, MODEL).unwrap();
    assert_eq!(fs::read(&paths[0]).unwrap(), model);
}

#[test]
fn a_wrong_checksum_removes_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &bytes(3_000)), ("a/b", "config.json", b"{\"x\":1}")]);
    fake.set_faults(Faults { corrupt: true, ..Faults::default() });
    let hub = open(settings(&fake, folder.path()));
    for repository in [MODEL, "a/b"] {
        assert!(matches!(pull(&hub, repository), Err(HubError::Checksum { .. })));
    }
    let left: Vec<_> =
        fs::read_dir(folder.path().join("blobs")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name.to_string_lossy().ends_with(".lock")), "{left:?}");
    fake.set_faults(Faults::default());
    assert!(pull(&hub, MODEL).is_ok());
}

#[test]
fn denied_missing_and_offline_repositories_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &bytes(100))]);
    fake.set_faults(Faults { token: Some("right"), ..Faults::default() });
    let denied = pull(&open(settings(&fake, folder.path())), MODEL).unwrap_err();
    assert!(denied.to_string().contains("set HF_TOKEN"), "{denied}");
    let wrong = HubSettings { token: Some("wrong".to_owned()), ..settings(&fake, folder.path()) };
    let denied = pull(&open(wrong), MODEL).unwrap_err();
    assert!(denied.to_string().contains("no access"), "{denied}");
    let right = HubSettings { token: Some("right".to_owned()), ..settings(&fake, folder.path()) };
    let hub = open(right.clone());
    assert!(matches!(pull(&hub, "org/none"), Err(HubError::NotFound { .. })));
    let offline = open(HubSettings { offline: true, ..right });
    assert!(matches!(pull(&offline, MODEL), Err(HubError::Offline { .. })));
    assert!(offline.cache().find(&name(MODEL)).unwrap().is_none());
    // What was pulled before is found offline.
    pull(&hub, MODEL).unwrap();
    assert_eq!(offline.cache().find(&name(MODEL)).unwrap().unwrap().commit, COMMIT);
}

#[test]
fn a_busy_server_is_given_the_time_it_asks_for() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeHub::new(&[(MODEL, "config.json", b"{}")]);
    static WAITED: std::sync::Mutex<Vec<Duration>> = std::sync::Mutex::new(Vec::new());
    let own =
        HubSettings { pause: |wait| WAITED.lock().unwrap().push(wait), ..settings(&fake, folder.path()) };
    let hub = open(own);
    fake.set_faults(Faults { status: (2, 429, "7"), ..Faults::default() });
    pull(&hub, MODEL).unwrap();
    assert_eq!(std::mem::take(&mut *WAITED.lock().unwrap()), [Duration::from_secs(7); 2]);
    let folder = tempfile::tempdir().unwrap();
    let hub = open(HubSettings { cache: folder.path().to_owned(), ..settings(&fake, folder.path()) });
    fake.set_faults(Faults { status: (99, 429, ""), ..Faults::default() });
    assert!(matches!(pull(&hub, MODEL), Err(HubError::RateLimited { attempts: 5, .. })));
    fake.set_faults(Faults { status: (3, 503, ""), ..Faults::default() });
    assert!(pull(&hub, MODEL).is_ok());
}

#[test]
fn a_connection_that_stalls_is_given_up_and_the_rest_asked_for_again() {
    let (model, folder) = (bytes(2_500), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &model)]);
    fake.set_faults(Faults { stall: (1, 100), ..Faults::default() });
    let paths = pull(&open(settings(&fake, folder.path())), MODEL).unwrap();
    assert_eq!(fs::read(&paths[0]).unwrap(), model);
}

#[test]
fn a_server_that_lies_about_the_length_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &bytes(2_500))]);
    for no_ranges in [false, true] {
        fake.set_faults(Faults { lie: 5, no_ranges, ..Faults::default() });
        let error = pull(&open(settings(&fake, folder.path())), MODEL).unwrap_err();
        assert!(matches!(error, HubError::Length { expected: 2_500, found: 2_505, .. }), "{error}");
    }
}

#[test]
fn a_server_without_ranges_sends_the_whole_file_once() {
    let (model, folder) = (bytes(3_333), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &model)]);
    fake.set_faults(Faults { no_ranges: true, cut: (1, 2_000), ..Faults::default() });
    let paths = pull(&open(settings(&fake, folder.path())), MODEL).unwrap();
    assert_eq!(fs::read(&paths[0]).unwrap(), model);
}

#[test]
fn hostile_names_and_redirects_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for hostile in ["../../evil.gguf", "/etc/evil.gguf", "a/../../b.gguf", "a\\b.gguf"] {
        let fake = FakeHub::new(&[(MODEL, hostile, b"x")]);
        let error = pull(&open(settings(&fake, folder.path())), MODEL).unwrap_err();
        assert!(matches!(error, HubError::FileName { .. }), "{hostile}: {error}");
        assert!(fake.requests().iter().all(|request| !request.storage));
    }
    let fake = FakeHub::new(&[(MODEL, "m.gguf", b"x")]);
    for location in ["file:///etc/passwd", "", "ftp://127.0.0.1/x"] {
        fake.set_faults(Faults { redirect: Some(location.to_owned()), ..Faults::default() });
        let error = pull(&open(settings(&fake, folder.path())), MODEL).unwrap_err();
        assert!(matches!(error, HubError::Redirect { .. }), "{location}: {error}");
    }
    // A redirect to itself ends.
    let circle = format!("{}/{MODEL}/resolve/{COMMIT}/m.gguf", fake.endpoint);
    fake.set_faults(Faults { redirect: Some(circle), ..Faults::default() });
    assert!(matches!(pull(&open(settings(&fake, folder.path())), MODEL), Err(HubError::Redirect { .. })));
}

#[test]
fn split_models_are_one_choice_and_removal_frees_what_nothing_uses() {
    let (first, second, small) = (bytes(2_000), bytes(1_500), bytes(500));
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeHub::new(&[
        (MODEL, "Q8_0/m-Q8_0-00001-of-00002.gguf", &first),
        (MODEL, "Q8_0/m-Q8_0-00002-of-00002.gguf", &second),
        (MODEL, "m-Q4_0.gguf", &small),
        ("other/copy", "x-Q4_0.gguf", &small),
    ]);
    let hub = open(settings(&fake, folder.path()));
    let listing: Listing = hub.list(&name(MODEL)).unwrap();
    let found = choices(&listing.files, |file| &file.name, |file| file.bytes);
    let quants: Vec<_> = found.iter().map(|choice| (choice.quant.as_str(), choice.bytes)).collect();
    assert_eq!(quants, [("Q8_0", 3_500), ("Q4_0", 500)]);
    pull(&hub, MODEL).unwrap();
    pull(&hub, "other/copy").unwrap();
    let cache = hub.cache();
    let model = cache.find(&name("org/model-GGUF:q8_0")).unwrap().unwrap();
    assert_eq!(model.files.len(), 2);
    assert!(model.files[0].path.ends_with("Q8_0/m-Q8_0-00001-of-00002.gguf"));
    assert!(matches!(cache.find(&name("org/model-GGUF:Q6_K")), Err(HubError::QuantNotCached { .. })));
    assert_eq!(cache.models().unwrap().len(), 3);
    // The other repository still has the content.
    assert_eq!(cache.remove(&name("org/model-GGUF:Q4_0")).unwrap(), 0);
    assert_eq!(cache.remove(&name(MODEL)).unwrap(), 3_500);
    assert_eq!(cache.remove(&name("other/copy")).unwrap(), 500);
    assert!(cache.models().unwrap().is_empty());
    assert!(matches!(cache.remove(&name(MODEL)), Err(HubError::NotCached { .. })));
}

/// The layout of Hugging Face's libraries.
#[test]
#[cfg(unix)]
fn the_cache_of_hugging_face_is_used_in_place() {
    let (model, folder) = (bytes(2_000), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[(MODEL, "m-Q8_0.gguf", &model)]);
    let shared = folder.path().join("hub");
    let repository = shared.join("models--org--model-GGUF");
    let blob = repository.join("blobs").join(hexadecimal(&sha2::Sha256::digest(&model)));
    let snapshot = repository.join("snapshots").join(COMMIT);
    fs::create_dir_all(blob.parent().unwrap()).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repository.join("refs")).unwrap();
    fs::write(repository.join("refs/main"), COMMIT).unwrap();
    fs::write(&blob, &model).unwrap();
    std::os::unix::fs::symlink(&blob, snapshot.join("m-Q8_0.gguf")).unwrap();
    let own = HubSettings { shared_caches: vec![shared], ..settings(&fake, &folder.path().join("own")) };
    // Offline, and without anything in the own cache.
    let offline = open(HubSettings { offline: true, ..own.clone() });
    let found = offline.cache().find(&name("org/model-GGUF:Q8_0")).unwrap().unwrap();
    assert_eq!(found.files[0].path, snapshot.join("m-Q8_0.gguf"));
    // It is not ours to remove.
    let refused = offline.cache().remove(&name(MODEL)).unwrap_err();
    assert!(
        matches!(refused, HubError::Shared { .. }) && refused.to_string().contains("hf cache"),
        "{refused}"
    );
    // Online, a pull links to the content that is there.
    let hub = open(own);
    let paths = pull(&hub, MODEL).unwrap();
    assert_eq!(fs::canonicalize(&paths[0]).unwrap(), fs::canonicalize(&blob).unwrap());
    assert!(fake.requests().iter().all(|request| !request.storage));
    assert!(hub.cache().models().unwrap()[0].files[0].is_shared);
    // Removing the link leaves the content.
    assert_eq!(hub.cache().remove(&name(MODEL)).unwrap(), 0);
    assert!(blob.exists());
}

#[test]
fn progress_is_reported_and_can_cancel() {
    let (model, folder) = (bytes(4_000), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &model)]);
    let hub = open(settings(&fake, folder.path()));
    let name = name(MODEL);
    let listing = hub.list(&name).unwrap();
    let cancelled = hub.pull(&name, &listing, &listing.files, &mut |_| ControlFlow::Break(()));
    assert!(matches!(cancelled, Err(HubError::Cancelled)));
    let mut last = None;
    hub.pull(&name, &listing, &listing.files, &mut |progress| {
        assert!(progress.bytes <= progress.total && progress.total == 4_000);
        last = Some((progress.stage, progress.bytes));
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(last, Some((PullStage::Verifying, 4_000)));
}

#[test]
fn the_header_of_a_model_is_enough_to_plan_it() {
    let weights = vec![1; 4 << 20];
    let mut writer = quadriga_gguf::Writer::new();
    writer.set("general.architecture", "llama").unwrap();
    let tokens: Vec<String> = (0..200_000).map(|number| format!("token {number}")).collect();
    writer.set("tokenizer.ggml.tokens", tokens).unwrap();
    writer.tensor_bytes("output_norm.weight", quadriga_graph::DType::F32, [1 << 20], &weights).unwrap();
    let mut model = Vec::new();
    writer.write_to(&mut model).unwrap();
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &model)]);
    let folder = tempfile::tempdir().unwrap();
    let hub = open(settings(&fake, &folder.path().join("cache")));
    let listing = hub.list(&name(MODEL)).unwrap();
    let found = choices(&listing.files, |file| &file.name, |file| file.bytes);
    let path = hub.outline(&listing, &found[0], folder.path()).unwrap();
    let file = quadriga_gguf::File::open(path).unwrap();
    assert_eq!(file.tensor("output_norm.weight").unwrap().byte_len(), 4 << 20);
    assert_eq!(file.byte_len(), model.len() as u64);
}

#[test]
fn the_list_may_name_a_checksum_twice_and_no_impossible_size() {
    let (folder, sum) = (tempfile::tempdir().unwrap(), "ab".repeat(32));
    let text = format!(
        r#"{{"sha":"{COMMIT}","siblings":[{{"rfilename":"m.gguf","lfs":{{"oid":"{sum}","sha256":"{sum}","size":9}}}}]}}"#
    );
    let listing = Listing::from_json("a/b", "url", text.as_bytes()).unwrap();
    assert_eq!(listing.files[0].checksum, Some(RemoteChecksum::Sha256(sum)));
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &bytes(100))]);
    fake.set_faults(Faults { size: Some(1_000_000_000_000_000_000), ..Faults::default() });
    let error = pull(&open(settings(&fake, folder.path())), MODEL).unwrap_err().to_string();
    assert!(error.contains("m.gguf") && error.contains("1000000000000000000"), "{error}");
}

#[test]
fn a_server_that_asks_for_hours_is_an_error_with_the_time() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeHub::new(&[(MODEL, "config.json", b"{}")]);
    let own = HubSettings { pause: |_| panic!("waited"), ..settings(&fake, folder.path()) };
    for status in [429, 503] {
        fake.set_faults(Faults { status: (99, status, "86400"), ..Faults::default() });
        let error = pull(&open(own.clone()), MODEL).unwrap_err();
        assert!(matches!(error, HubError::Busy { seconds: 86_400, most: 60, .. }), "{error}");
    }
}

/// What is on the disk while a download runs is what a process that is killed leaves.
#[test]
fn a_download_that_is_killed_is_continued() {
    let (model, folder) = (bytes(5_000), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &model)]);
    // One part stops after 100 bytes, and the other four arrive meanwhile.
    fake.set_faults(Faults { stall: (1, 100), ..Faults::default() });
    let (first, killed) = (folder.path().join("first"), folder.path().join("killed"));
    let own = HubSettings { connections: 2, attempts: 1, ..settings(&fake, &first) };
    let hub = open(HubSettings { stall: Duration::from_secs(60), ..own });
    let name = name(MODEL);
    let listing = hub.list(&name).unwrap();
    let stopped = hub.pull(&name, &listing, &listing.files, &mut |progress| {
        if progress.bytes < 4_100 {
            return ControlFlow::Continue(());
        }
        fs::create_dir_all(killed.join("blobs")).unwrap();
        // The state first: it may be older than the data, never newer.
        for end in [".state", ".partial"] {
            for entry in fs::read_dir(first.join("blobs")).unwrap().flatten() {
                if entry.file_name().to_string_lossy().ends_with(end) {
                    fs::copy(entry.path(), killed.join("blobs").join(entry.file_name())).unwrap();
                }
            }
        }
        fake.set_faults(Faults { release: true, ..Faults::default() });
        ControlFlow::Break(())
    });
    assert!(matches!(stopped, Err(HubError::Cancelled)), "{stopped:?}");
    fake.set_faults(Faults::default());
    fake.requests();
    let paths = pull(&open(settings(&fake, &killed)), MODEL).unwrap();
    assert_eq!(fs::read(&paths[0]).unwrap(), model);
    let requests = fake.requests();
    let ranges = requests.iter().filter(|request| request.storage).map(|request| &request.headers["range"]);
    let asked: u64 = ranges
        .map(|range| {
            let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            last.parse::<u64>().unwrap() + 1 - first.parse::<u64>().unwrap()
        })
        .sum();
    // What was not saved yet is less than a part per thread.
    assert!(asked > 0 && asked <= 3_000, "{asked} bytes again");
}

#[test]
fn an_incomplete_download_is_removed_with_its_model() {
    let (model, folder) = (bytes(9_000), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[(MODEL, "m-Q8_0.gguf", &model)]);
    let hub = open(HubSettings { connections: 1, attempts: 1, ..settings(&fake, folder.path()) });
    let blobs = || fs::read_dir(folder.path().join("blobs")).unwrap().count();
    for removed in [MODEL, "org/model-GGUF:q8_0"] {
        fake.set_faults(Faults { cut: (1, 700), ..Faults::default() });
        assert!(matches!(pull(&hub, MODEL), Err(HubError::Transport { .. })));
        assert!(blobs() > 0);
        let cache = hub.cache();
        assert!(matches!(cache.remove(&name("org/model-GGUF:Q4_0")), Err(HubError::NotCached { .. })));
        assert!(matches!(cache.remove(&name("org/other")), Err(HubError::NotCached { .. })));
        assert!(blobs() > 0);
        cache.remove(&name(removed)).unwrap();
        assert_eq!(blobs(), 0, "{removed}");
    }
}

#[test]
fn models_of_a_shared_cache_are_listed_once() {
    let (model, folder, shared) = (bytes(900), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let snapshot = shared.path().join("models--org--model-GGUF/snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(snapshot.join("m-Q8_0.gguf"), &model).unwrap();
    let fake = FakeHub::new(&[(MODEL, "m-Q8_0.gguf", &model)]);
    let caches = vec![shared.path().to_owned()];
    let hub = open(HubSettings { shared_caches: caches, ..settings(&fake, folder.path()) });
    let listed = || {
        let models = hub.cache().models().unwrap().into_iter();
        models.map(|model| (model.repository, model.quant, model.files[0].is_shared)).collect::<Vec<_>>()
    };
    let entry = |is_shared| (MODEL.to_owned(), "Q8_0".to_owned(), is_shared);
    assert_eq!(listed(), [entry(true)]);
    pull(&hub, MODEL).unwrap();
    assert_eq!(listed(), [entry(false)]);
}

#[test]
fn removing_a_model_leaves_those_of_similar_names() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["x-Q2_K_XL.gguf", "x-UD-Q2_K_XL.gguf", "y-Q4_0.gguf", "y-small.gguf", "y-Q4_0-small.gguf"];
    let fake = FakeHub::new(&names.map(|name| (MODEL, name, name.as_bytes())));
    let hub = open(settings(&fake, folder.path()));
    pull(&hub, MODEL).unwrap();
    let cache = hub.cache();
    let left = || {
        let models = cache.models().unwrap().into_iter();
        let mut files: Vec<String> = models.flat_map(|model| model.files).map(|file| file.name).collect();
        files.sort();
        files
    };
    cache.remove(&name("org/model-GGUF:q2_k_xl")).unwrap();
    assert_eq!(left(), ["x-UD-Q2_K_XL.gguf", "y-Q4_0-small.gguf", "y-Q4_0.gguf", "y-small.gguf"]);
    // It is the only one that the name can stand for now.
    cache.remove(&name("org/model-GGUF:q2_k_xl")).unwrap();
    assert_eq!(left(), ["y-Q4_0-small.gguf", "y-Q4_0.gguf", "y-small.gguf"]);
    cache.remove(&name("org/model-GGUF:y-small")).unwrap();
    assert_eq!(left(), ["y-Q4_0-small.gguf", "y-Q4_0.gguf"]);
}

#[test]
fn parts_without_the_others_are_listed_and_removed_by_their_label() {
    let (part, other, folder) = (bytes(2_000), bytes(900), tempfile::tempdir().unwrap());
    let fake = FakeHub::new(&[
        (MODEL, "m-Q8_0-00001-of-00002.gguf", &part),
        (MODEL, "m-Q8_0-00002-of-00002.gguf", &part),
        (MODEL, "m-Q4_0.gguf", &other),
        (MODEL, "model.safetensors", &other),
    ]);
    let hub = open(settings(&fake, folder.path()));
    let listing = hub.list(&name(MODEL)).unwrap();
    let kept = listing.files.iter().filter(|file| !file.name.contains("-00002-of")).cloned();
    let kept: Vec<_> = kept.collect();
    hub.pull(&name(MODEL), &listing, &kept, &mut |_| ControlFlow::Continue(())).unwrap();
    let cache = hub.cache();
    let others = cache.other_files().unwrap();
    let found: Vec<_> = others.iter().map(|other| (&other.kind, other.files.len(), other.bytes)).collect();
    let parts = OtherKind::Parts { quant: "Q8_0".to_owned(), count: 2 };
    assert_eq!(found, [(&parts, 1, 2_000), (&OtherKind::Safetensors, 1, 900)]);
    assert!(others.iter().all(|other| other.repository == MODEL && other.commit == COMMIT));
    assert_eq!(cache.models().unwrap().len(), 1);

    assert_eq!(cache.remove(&name(&format!("{MODEL}:q8_0"))).unwrap(), 2_000);
    assert_eq!(cache.other_files().unwrap().len(), 1);
    let again = cache.remove(&name(&format!("{MODEL}:Q8_0")));
    assert!(matches!(again, Err(HubError::NotCached { .. })), "{again:?}");
    assert_eq!(cache.models().unwrap().len(), 1, "the model of another label stays");
    cache.remove(&name(MODEL)).unwrap();
    assert_eq!(cache.other_files().unwrap(), []);
}
