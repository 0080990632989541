//! The examples of contrib for several machines name options that the command has, and fields where their schedulers look for them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::path::Path;

use crate::common::{output, quadriga};

fn contrib(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib");
    std::fs::read_to_string(root.join(path)).unwrap()
}

/// The lines of a YAML file as paths of keys and what is after the last, such as `spec.slotsPerWorker = 1`; items of lists are `-`.
fn paths(text: &str) -> Vec<(String, String)> {
    let mut open: Vec<(usize, String)> = Vec::new();
    let mut found: Vec<(String, String)> = Vec::new();
    for line in text.lines() {
        let mut rest = line.trim_start();
        if rest.is_empty() || rest.starts_with('#') {
            continue;
        }
        assert!(!line.contains('\t'), "{line}");
        let mut indent = line.len() - rest.len();
        open.retain(|(at, _)| *at < indent);
        while let Some(item) = rest.strip_prefix("- ") {
            open.push((indent, "-".to_owned()));
            (indent, rest) = (indent + 2, item);
        }
        if rest.starts_with('{') {
            continue;
        }
        let (key, value) = rest.split_once(':').unwrap_or_else(|| panic!("not a key: {line}"));
        open.push((indent, key.to_owned()));
        let path: Vec<&str> = open.iter().map(|(_, key)| key.as_str()).collect();
        found.push((path.join("."), value.trim().to_owned()));
    }
    found
}

/// The command line after `quadriga`, of which every option must be one that the command has.
fn check_options(words: &[&str]) {
    let [command, options @ ..] = words else { panic!("no command: {words:?}") };
    let help = output(&mut quadriga([*command, "--help"])).success().out;
    let is_option = |word: &&&str| word.starts_with('-') && word.len() > 1;
    let known = |option: &str| {
        help.split(|c: char| c.is_whitespace() || c == ',').any(|word| word.trim_end_matches('=') == option)
    };
    let given: Vec<&&str> = options.iter().filter(is_option).collect();
    assert!(!given.is_empty(), "{words:?}");
    for option in given {
        assert!(known(option), "{command} has no {option}");
    }
    assert!(!known("--no-such-option"));
}

#[test]
fn the_job_of_the_mpi_operator_runs_as_a_user_and_starts_again() {
    let (job, image) = (contrib("kubernetes/mpijob.yaml"), contrib("kubernetes/Containerfile"));
    let paths = paths(&job);
    let value = |path: &str| {
        let found: Vec<&str> =
            paths.iter().filter(|(own, _)| own == path).map(|(_, value)| value.as_str()).collect();
        assert_eq!(found.len(), 1, "{path}: {found:?}");
        found[0]
    };
    assert_eq!(value("apiVersion"), "kubeflow.org/v2beta1");
    let home = value("spec.sshAuthMountPath").strip_suffix("/.ssh").unwrap();
    assert!(image.contains(&format!("{home}/host_key")), "{home}");
    let user = home.strip_prefix("/home/").unwrap();
    assert!(image.contains(&format!("--uid 1000 {user}")) && image.contains(&format!("USER {user}")));
    for package in ["openmpi-bin", "openssh-server", "openssh-client"] {
        assert!(image.contains(package), "{package}");
    }
    for replica in ["Launcher", "Worker"] {
        let of = |rest: &str| value(&format!("spec.mpiReplicaSpecs.{replica}.{rest}"));
        // The operator reads it here, and overwrites that of the pod.
        assert_eq!(of("restartPolicy"), "OnFailure");
        assert_eq!(of("template.spec.containers.-.securityContext"), "{ runAsUser: 1000 }");
        assert!(image.contains(&format!("-t {}", of("template.spec.containers.-.image"))));
    }
    assert!(!job.contains("restartPolicy: Never") && job.matches("restartPolicy").count() == 2);
    let worker = value("spec.mpiReplicaSpecs.Worker.template.spec.containers.-.command");
    assert!(image.contains(&format!("/usr/local/bin/{}", worker.trim_matches(['[', ']']))), "{worker}");
    let command = value("spec.mpiReplicaSpecs.Launcher.template.spec.containers.-.command");
    let words: Vec<&str> =
        command.trim_matches(['[', ']']).split(',').map(|word| word.trim().trim_matches('"')).collect();
    assert_eq!(words[..2], ["serve-ranks", "-n"]);
    assert!(image.contains("COPY contrib/kubernetes/serve-ranks /usr/local/bin/serve-ranks"));
    assert!(contrib("kubernetes/serve-ranks").contains("\nmpirun --runtime-options continuous \"$@\" &"));
    assert_eq!(words[2], value("spec.mpiReplicaSpecs.Worker.replicas"), "a rank for each worker");
    let first = words.iter().position(|word| *word == "quadriga").unwrap();
    check_options(&words[first + 1..]);
}

#[test]
fn the_job_of_slurm_names_options_that_there_are() {
    let script = contrib("slurm/quadriga.sbatch").replace("\\\n", " ");
    let line = script.lines().find(|line| line.starts_with("srun ")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    // A job that is started again must not begin with an empty file.
    assert!(!line.contains('>') && words.windows(2).any(|pair| pair == ["-o", "results.jsonl"]), "{line}");
    let first = words.iter().position(|word| *word == "quadriga").unwrap();
    assert_eq!(words[first + 1], "batch");
    check_options(&words[first + 1..]);
    for option in ["nodes", "ntasks-per-node", "cpus-per-task"] {
        assert!(script.contains(&format!("\n#SBATCH --{option}=")), "{option}");
    }
    assert!(line.contains("$SLURM_CPUS_PER_TASK") && script.contains("set -euo pipefail"));
}
