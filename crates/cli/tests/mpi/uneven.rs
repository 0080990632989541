//! Ranks that are not alike: threads, rates that were measured, and GPUs on some of them.

use super::*;

/// The command on two ranks with options of their own for each.
fn two(family: &Path, both: &[&str], own: [&[&str]; 2]) -> CommandOutput {
    let mut command = Command::new(family.join("bin/mpirun"));
    if family.ends_with("openmpi") {
        command.args(["--oversubscribe", "--bind-to", "none"]);
    }
    for (number, own) in own.into_iter().enumerate() {
        command.args(if number > 0 { &[":"][..] } else { &[] });
        command.args(["-n", "1", env!("CARGO_BIN_EXE_quadriga")]).args(both).args(own);
    }
    let path = format!("{}:{}", family.join("bin").display(), std::env::var("PATH").unwrap_or_default());
    command.env("PATH", path).env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    CommandOutput::from(command.stdin(Stdio::null()).output().unwrap()).success()
}

/// A model of eight layers with eight KV heads.
fn even_model() -> Fixture {
    Fixture::new(&["--type", "f32", "--layers", "8", "--heads", "8", "--kv-heads", "8"])
}

/// What rank 0 says of the division, as far as it matches.
fn said(output: &CommandOutput) -> &str {
    let line = output.err.lines().find(|line| line.contains("; rank 0 has "));
    line.unwrap_or_else(|| panic!("{output:?}")).split_once("; ").unwrap().1
}

#[test]
fn parts_are_in_proportion_to_threads_where_nothing_was_measured() {
    let (fixture, empty) = (even_model(), tempfile::tempdir().unwrap());
    let model = [
        "run",
        "hello",
        "-n",
        "4",
        "-m",
        fixture.model.to_str().unwrap(),
        "--cache-dir",
        empty.path().to_str().unwrap(),
    ];
    for family in families() {
        for (threads, heads) in [
            (["1", "3"], "2 of 8 KV heads"),
            (["3", "1"], "6 of 8 KV heads"),
            (["2", "2"], "4 of 8 KV heads"),
        ] {
            let options = [&model[..], &["--parallelism", "tensor"]].concat();
            let output = two(&family, &options, [&["-t", threads[0]], &["-t", threads[1]]]);
            assert!(said(&output).contains(heads), "{threads:?}: {output:?}");
            let says_so = output.err.contains("so each rank counts with its threads");
            assert_eq!(says_so, threads[0] != threads[1], "{output:?}");
        }
        let options = [&model[..], &["--parallelism", "pipeline"]].concat();
        let layers = |threads: [&str; 2]| -> usize {
            let output = two(&family, &options, [&["-t", threads[0]], &["-t", threads[1]]]);
            let (_, last) = said(&output).split_once("layers 0 to ").unwrap();
            last.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
        };
        let (less, more) = (layers(["1", "3"]), layers(["3", "1"]));
        assert!(less < more, "{less} {more}");
    }
}

/// The rates of each rank's own file count, whatever the threads.
#[test]
fn parts_are_in_proportion_to_what_was_measured() {
    let fixture = even_model();
    let report =
        CommandOutput::from(quadriga(["devices", "--json", "-t", "1"]).output().unwrap()).success().out;
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let is_cpu = |device: &&serde_json::Value| device["name"] == "cpu";
    let cpu =
        report["devices"].as_array().unwrap().iter().find(is_cpu).unwrap()["description"].as_str().unwrap();
    let folders: Vec<tempfile::TempDir> = [30e9, 10e9]
        .map(|read: f64| {
            let folder = tempfile::tempdir().unwrap();
            let limits = quadriga_view::Limits {
                read,
                measured: true,
                ..quadriga_view::Limits::nominal("cpu", cpu, quadriga_runtime::DeviceKind::Cpu)
            };
            std::fs::write(folder.path().join("limits.json"), serde_json::to_string(&[limits]).unwrap())
                .unwrap();
            folder
        })
        .into();
    let [fast, slow] = [0, 1].map(|index| folders[index].path().to_str().unwrap());
    let options = [
        "run",
        "hello",
        "-n",
        "4",
        "-m",
        fixture.model.to_str().unwrap(),
        "-t",
        "1",
        "--parallelism",
        "tensor",
    ];
    for family in families() {
        for (own, heads) in [
            ([fast, slow], "6 of 8 KV heads"),
            ([slow, fast], "2 of 8 KV heads"),
            ([slow, slow], "4 of 8 KV heads"),
        ] {
            let output = two(&family, &options, [&["--cache-dir", own[0]], &["--cache-dir", own[1]]]);
            assert!(said(&output).contains(heads), "{own:?}: {output:?}");
            assert!(!output.err.contains("nothing was measured"), "{output:?}");
        }
    }
}

#[test]
fn nccl_without_gpus_is_said_to_have_no_effect() {
    let fixture = Fixture::new(&["--layers", "2", "--heads", "4", "--kv-heads", "4"]);
    let arguments = ["run", "hello", "-n", "4", "-m", fixture.model.to_str().unwrap(), "--device", "cpu"];
    for family in families() {
        let mut command = mpirun(&family, 2, arguments);
        let output = CommandOutput::from(command.env("QUADRIGA_NCCL", "1").output().unwrap()).success();
        let wanted = "QUADRIGA_NCCL has no effect: no rank has a GPU";
        assert_eq!(output.err.matches(wanted).count(), 1, "{output:?}");
    }
}
