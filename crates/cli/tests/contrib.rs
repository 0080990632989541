//! The files of `contrib/` are true: what they start is this command, with options that it has, and their paths exist.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::common::{Fixture, output, quadriga};
use crate::serve::Running;

/// A file of the repository; `None` where the crate was taken out of it.
fn file(path: &str) -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::fs::read_to_string(root.join(path)).ok()
}

/// The words behind a key of a unit, with lines that go on joined.
fn command_line(unit: &str, key: &str) -> Vec<String> {
    let joined = unit.replace("\\\n", " ");
    let line = joined.lines().find_map(|line| line.strip_prefix(&format!("{key}="))).unwrap();
    line.split_whitespace().map(str::to_owned).collect()
}

/// The words behind an instruction of a container file, which are a list in JSON.
fn instruction(container: &str, name: &str) -> Vec<String> {
    let line = container.lines().find_map(|line| line.strip_prefix(&format!("{name} "))).unwrap();
    serde_json::from_str(line).unwrap()
}

/// The long options that the help of a command lists.
fn options(command: &str) -> Vec<String> {
    let help = output(&mut quadriga([command, "--help"])).success().out;
    let words = help.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '-');
    words.filter(|word| word.starts_with("--")).map(str::to_owned).collect()
}

/// A folder with a model and a file with a key, which stand for those of the file.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let fixture = Fixture::new(&[]);
        std::fs::create_dir(folder.path().join("models")).unwrap();
        std::fs::copy(&fixture.model, folder.path().join("models/small.gguf")).unwrap();
        std::fs::write(folder.path().join("keys"), format!("{}\n", "a1".repeat(32))).unwrap();
        Place { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts a server with these arguments, but for its port and its paths, and ends it as systemd and containers do.
    fn serve(&self, arguments: &[String]) {
        assert_eq!(arguments[0], "serve");
        let known = options("serve");
        for option in arguments.iter().filter(|argument| argument.starts_with("--")) {
            assert!(known.contains(option), "serve has no {option}");
        }
        let mut arguments = arguments.to_vec();
        for (option, name) in [("--models-dir", "models"), ("--api-key-file", "keys")] {
            let at = arguments.iter().position(|argument| argument == option).unwrap();
            assert!(Path::new(&arguments[at + 1]).is_absolute(), "{option}");
            arguments[at + 1] = self.path(name).display().to_string();
        }
        match arguments.iter().position(|argument| argument == "--port") {
            Some(at) => arguments[at + 1] = "0".to_owned(),
            None => arguments.extend(["--port".to_owned(), "0".to_owned()]),
        }
        let server = Running::start(&mut quadriga(&arguments));
        // The model of the folder, for those with a key.
        assert_eq!(server.ask("GET", "/v1/models", "", "").0, 401);
        let key = format!("authorization: Bearer {}\r\n", "a1".repeat(32));
        let (status, text) = server.ask("GET", "/v1/models", &key, "");
        let models: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, models["data"][0]["id"].as_str()), (200, Some("small")), "{text}");
        server.signal("TERM");
        let (status, log) = server.wait();
        assert!(status.success(), "{log}");
        assert!(log.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{log}");
    }
}

#[test]
fn the_systemd_unit_starts_a_server() {
    let Some(unit) = file("contrib/quadriga.service") else { return };
    let start = command_line(&unit, "ExecStart");
    assert_eq!(start[0], "/usr/local/bin/quadriga");
    // What it stops with must not be cut by systemd.
    let seconds = |words: &[String], name: &str| {
        let at = words.iter().position(|word| word == name).unwrap();
        words[at + 1].parse::<u64>().unwrap()
    };
    let stop: u64 = command_line(&unit, "TimeoutStopSec")[0].parse().unwrap();
    assert!(stop > seconds(&start, "--drain-timeout"));
    assert_eq!(command_line(&unit, "KillSignal"), ["SIGTERM"]);
    assert_eq!(command_line(&unit, "Environment"), ["QUADRIGA_CACHE=/var/cache/quadriga"]);
    let models = start.iter().position(|word| word == "--models-dir").unwrap();
    let state = command_line(&unit, "StateDirectory");
    assert!(state.iter().any(|folder| start[models + 1] == format!("/var/lib/{folder}")), "{state:?}");
    Place::new().serve(&start[1..]);
}

#[test]
fn systemd_has_nothing_to_say_about_the_unit() {
    let Some(unit) = file("contrib/quadriga.service") else { return };
    let place = Place::new();
    let path = place.path("quadriga.service");
    std::fs::write(&path, unit.replace("/usr/local/bin/quadriga", env!("CARGO_BIN_EXE_quadriga"))).unwrap();
    let verify = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output();
    let Ok(verified) = verify else {
        println!("systemd-analyze is not installed: the unit is not verified");
        return;
    };
    let said = String::from_utf8_lossy(&verified.stderr).into_owned();
    let own: Vec<&str> = said.lines().filter(|line| line.contains("quadriga.service")).collect();
    assert!(verified.status.success() && own.is_empty(), "{said}");
}

#[test]
fn the_container_starts_a_server() {
    let Some(container) = file("contrib/Containerfile") else { return };
    let has = |text: &str| assert!(container.lines().any(|line| line.contains(text)), "{text}");
    // The binary is that of this package, and is where the entry point finds it.
    let name = Path::new(env!("CARGO_BIN_EXE_quadriga")).file_stem().unwrap().to_str().unwrap();
    has(&format!("cargo build --release --locked -p {} ", env!("CARGO_PKG_NAME")));
    has(&format!("strip target/release/{name}"));
    has(&format!("COPY --from=build /source/target/release/{name} /usr/local/bin/{name}"));
    has("WORKDIR /source");
    has("STOPSIGNAL SIGTERM");
    has("EXPOSE 8080");
    // The user of the server may write its cache, and only that.
    has("useradd --system --uid 10001 --home-dir /cache quadriga && install -d -o quadriga /cache");
    has("USER quadriga");
    has("ENV QUADRIGA_CACHE=/cache");
    let help = output(&mut quadriga(["serve", "--help"])).success().out;
    assert!(help.contains("QUADRIGA_CACHE") && help.contains("8080"), "{help}");
    let mut start = instruction(&container, "ENTRYPOINT");
    assert_eq!(start.remove(0), name);
    start.extend(instruction(&container, "CMD"));
    Place::new().serve(&start);
}

/// Commands of clusters, as far as they are this one.
#[test]
fn commands_of_clusters_have_options_that_are_known() {
    let Some(job) = file("contrib/kubernetes/mpijob.yaml") else { return };
    let script = file("contrib/slurm/quadriga.sbatch").unwrap();
    let mut found = 0;
    for line in job.lines().chain(script.lines()).filter(|line| !line.trim_start().starts_with('#')) {
        let words: Vec<&str> = line.split([' ', ',', '[', ']']).filter(|word| !word.is_empty()).collect();
        let Some(at) = words.iter().position(|word| *word == "quadriga") else { continue };
        let Some(command) = words.get(at + 1).filter(|word| ["serve", "batch"].contains(word)) else {
            continue;
        };
        let known = options(command);
        for option in words[at..].iter().filter(|word| word.starts_with("--")) {
            assert!(known.contains(&(*option).to_owned()), "{command} has no {option}");
        }
        found += 1;
    }
    assert_eq!(found, 2);
}
