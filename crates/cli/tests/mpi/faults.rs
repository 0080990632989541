//! Ranks that hang, differ, or were started wrongly.

use super::*;

/// The command on two ranks with options of their own for each, and those of both.
pub(super) fn mpirun_each(family: &Path, both: &[&str], each: [&[&str]; 2]) -> Command {
    let mut command = mpirun(family, 1, both.iter().chain(each[0]).copied());
    command.args([":", "-n", "1", env!("CARGO_BIN_EXE_quadriga")]).args(both).args(each[1]).args(["-t", "1"]);
    command
}

/// A thread of another process that stands still, until this is dropped; its process goes on with the others.
pub(super) struct Held(libc::pid_t);

impl Held {
    pub(super) fn new(thread: u32) -> Held {
        let thread = thread as libc::pid_t;
        // SAFETY: these requests take no address, and act on a descendant of this process only.
        let answers = unsafe {
            [
                libc::ptrace(libc::PTRACE_SEIZE, thread, 0, 0),
                libc::ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0),
                i64::from(libc::waitpid(thread, std::ptr::null_mut(), libc::__WALL)),
            ]
        };
        assert_eq!(answers, [0, 0, i64::from(thread)], "{}", std::io::Error::last_os_error());
        Held(thread)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: as above; the thread is held by this one. One that was ended meanwhile is waited for by nobody else.
        unsafe {
            if libc::ptrace(libc::PTRACE_DETACH, self.0, 0, 0) != 0 {
                libc::waitpid(self.0, std::ptr::null_mut(), libc::__WALL);
            }
        }
    }
}

#[test]
fn a_rank_that_hangs_with_heartbeats_is_found_by_the_step_that_it_does_not_end() {
    for family in families() {
        for how in ["tensor", "pipeline"] {
            let served = Served::start(&family, &["--parallelism", how, "--rank-step-timeout", "3"]);
            let answer = served.ask("Once upon a time", 3500);
            // What computes on a rank after the first is its first thread.
            let held = Held::new(ranks_below(served.child.id())[1]);
            let text = whole(answer);
            drop(held);
            let (code, rest) = served.end();
            assert!(text.starts_with("HTTP/1.1 503") && text.contains("did not "), "{how}: {text}\n{rest}");
            assert!(rest.contains("did not end within 3 s"), "{how}: {rest}");
            assert_eq!(code, Some(75), "{how}: {rest}");
        }
    }
}

/// MPI waits in its own calls for a rank that was stopped there: nobody else waits for MPI, and the error is said before.
#[test]
fn a_rank_that_stops_inside_mpi_ends_the_command_with_an_error() {
    let fixture = Fixture::new(&["--layers", "2", "--heads", "4", "--kv-heads", "4"]);
    let model = fixture.model.to_str().unwrap();
    let folder = tempfile::tempdir().unwrap();
    for family in families() {
        let library = hold::library(&family, folder.path());
        for (held, rank, ranks, how) in
            [("MPI_Comm_split", "3", 4, "tensor=2,pipeline=2"), ("MPI_Finalize", "1", 2, "tensor")]
        {
            let arguments =
                ["run", "hello", "-m", model, "-n", "4", "-q", "--rank-timeout", "2", "--parallelism", how];
            let mut command = mpirun(&family, ranks, arguments);
            command
                .env("QUADRIGA_MPI", &library)
                .env("QUADRIGA_TEST_HOLD", held)
                .env("QUADRIGA_TEST_HOLD_RANK", rank);
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            let until = Instant::now() + Duration::from_secs(60);
            let mut ended = false;
            while !ended && Instant::now() < until {
                ended = child.try_wait().unwrap().is_some();
                std::thread::sleep(Duration::from_millis(20));
            }
            if !ended {
                ranks_below(child.id()).into_iter().for_each(|rank| send_signal("-KILL", rank));
            }
            let output = CommandOutput::from(child.wait_with_output().unwrap());
            assert!(ended, "{held}: {output:?}");
            assert_ne!(output.code, Some(0), "{held}: {output:?}");
            let wanted = format!("quadriga: {held} did not end within 10 s");
            assert_eq!(output.err.matches(&wanted).count(), 1, "{output:?}");
            // MPICH's launcher may add that it ended the others.
            let answer = output.out.split("\n=====").next().unwrap_or_default();
            assert_eq!(answer.is_empty(), held == "MPI_Comm_split", "the answer is printed: {output:?}");
        }
    }
}

#[test]
fn the_loss_of_the_first_rank_is_said_by_the_second() {
    for family in families() {
        let arguments =
            QUESTION.into_iter().chain(["4000", "-c", "8192", "--ignore-eos", "--rank-timeout", "2"]);
        let mut child =
            mpirun(&family, 2, arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        assert!(out.fill_buf().is_ok_and(|bytes| !bytes.is_empty()));
        send_signal("-STOP", ranks_below(child.id())[0]);
        std::io::copy(&mut out, &mut std::io::sink()).unwrap();
        let output = CommandOutput::from(child.wait_with_output().unwrap());
        assert_ne!(output.code, Some(0), "{output:?}");
        assert!(output.err.contains("rank 0 on ") && output.err.contains("is lost"), "{output:?}");
    }
}

#[test]
fn ranks_with_different_files_or_options_are_refused() {
    let (one, other) = (Fixture::new(&["--seed", "1"]), Fixture::new(&["--seed", "2"]));
    let [one, other] = [&one, &other].map(|fixture| fixture.model.to_str().unwrap());
    let hello = ["run", "hello", "-n", "4", "-q"];
    for family in families() {
        let output = |command: &mut Command| CommandOutput::from(command.output().unwrap());
        let same = mpirun_each(&family, &hello, [&["-m", one], &["-m", one]]).output().unwrap();
        CommandOutput::from(same).success();
        let refused = output(&mut mpirun_each(&family, &hello, [&["-m", one], &["-m", other]]));
        assert_ne!(refused.code, Some(0), "{refused:?}");
        assert!(refused.out.is_empty() && refused.err.contains("the model files differ"), "{refused:?}");
        let ways: [&[&str]; 2] =
            [&["-m", one, "--parallelism", "tensor"], &["-m", one, "--parallelism", "pipeline"]];
        let refused = output(&mut mpirun_each(&family, &hello, ways));
        assert_ne!(refused.code, Some(0), "{refused:?}");
        assert!(refused.err.contains("different values of --parallelism"), "{refused:?}");
        let others: [[&[&str]; 2]; 2] =
            [[&["-c", "64"], &["-c", "128"]], [&["-c", "64"], &["-c", "64", "-ctk", "f32"]]];
        let small = [&hello[..], &["-m", one]].concat();
        for each in others {
            let refused = output(&mut mpirun_each(&family, &small, each));
            assert_ne!(refused.code, Some(0), "{refused:?}");
            let named = "different contexts (-c) or types of the KV cache (-ctk, -ctv)";
            assert!(refused.err.contains(named), "{refused:?}");
            assert!(!refused.err.contains("--parallelism"), "{refused:?}");
        }
    }
}

/// Different layers would be divided in different ways, and groups of ranks be made of some of them: files are compared before.
#[test]
fn ranks_with_models_of_different_shapes_are_refused_before_they_divide_them() {
    let of = |layers: &str, heads: &str| {
        Fixture::new(&["--layers", layers, "--heads", "4", "--kv-heads", heads, "--seed", "1"])
    };
    let (one, other) = (of("4", "4"), of("2", "1"));
    let [one, other] = [&one, &other].map(|fixture| fixture.model.to_str().unwrap());
    let hello = ["run", "hello", "-n", "4", "-q"];
    for family in families() {
        let mut command = mpirun(&family, 2, hello.into_iter().chain(["-m", one]));
        let more = [":", "-n", "2", env!("CARGO_BIN_EXE_quadriga")];
        let output = command.args(more).args(hello).args(["-m", other, "-t", "1"]).output().unwrap();
        let refused = CommandOutput::from(output);
        assert_ne!(refused.code, Some(0), "{refused:?}");
        assert!(refused.err.contains("the model files differ"), "{refused:?}");
        assert!(!refused.err.contains("did not end"), "{refused:?}");
    }
}

/// A launcher that sends variables to its own machine only leaves ranks with and without shared memory: all do as the one without.
#[test]
fn ranks_with_different_variables_agree_or_say_so() {
    let fixture = Fixture::new(&["--layers", "2", "--heads", "4", "--kv-heads", "4"]);
    let hello = ["run", "hello", "-m", fixture.model.to_str().unwrap(), "-n", "4", "-t", "1"];
    for family in families() {
        let run = |variable: &str| {
            let mut command = mpirun(&family, 1, hello);
            let second = [":", "-n", "1", "env", variable, env!("CARGO_BIN_EXE_quadriga")];
            CommandOutput::from(command.args(second).args(hello).output().unwrap())
        };
        let without = run("QUADRIGA_MPI_SHARED_MEMORY=0").success();
        assert!(!without.err.contains("through shared memory"), "{without:?}");
        let refused = run("QUADRIGA_NCCL=1");
        assert_ne!(refused.code, Some(0), "{refused:?}");
        assert!(refused.err.contains("QUADRIGA_NCCL is set on 1 of 2 ranks"), "{refused:?}");
    }
}

/// Each rank chooses a context by its own memory, where none is given, and a batch: all take the least.
#[test]
fn ranks_of_uneven_machines_agree_on_context_and_batch() {
    let fixture = Fixture::new(&["--layers", "4", "--heads", "4", "--kv-heads", "4", "--context", "131072"]);
    let hello = ["run", "hello", "-m", fixture.model.to_str().unwrap(), "-n", "4", "-q", "-t", "1"];
    // A machine with little free memory.
    let (little, script) = (fixture.path("meminfo"), fixture.path("rank"));
    let real = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = |line: &str| match line.starts_with("MemAvailable:") {
        true => "MemAvailable: 100000 kB\n".to_owned(),
        false => format!("{line}\n"),
    };
    std::fs::write(&little, real.lines().map(line).collect::<String>()).unwrap();
    let text = format!("mount --bind {} /proc/meminfo && exec \"$@\"\n", little.display());
    std::fs::write(&script, text).unwrap();
    let in_namespace = ["unshare", "-m", "sh", script.to_str().unwrap()];
    let works = Command::new("unshare").args(&in_namespace[1..]).arg("true").output();
    let works = works.is_ok_and(|output| output.status.success());
    if !works {
        eprintln!("a rank with little memory was not run: no mount namespaces");
    }
    for family in families() {
        let run = |before: &[&str], options: &[&str]| {
            let mut command = mpirun(&family, 1, hello);
            let second = [&[":", "-n", "1"], before, &[env!("CARGO_BIN_EXE_quadriga")]].concat();
            CommandOutput::from(command.args(second).args(hello).args(options).output().unwrap())
        };
        run(&[], &["-b", "32"]).success();
        if works {
            run(&in_namespace, &[]).success();
        }
    }
}

#[test]
fn mistakes_on_the_command_line_are_said_once() {
    let fixture = Fixture::new(&["--heads", "4", "--kv-heads", "4"]);
    let model = fixture.model.to_str().unwrap();
    for family in families() {
        for (arguments, wanted) in [
            (&["run", "--bogus"][..], "--bogus"),
            (&["perplexity", "-f", "text"], "does not run on several ranks yet"),
            (&["serve", "--port", "0", "--models-dir", "."], "ranks serve one model"),
            (&["serve", "--port", "0", "-m", model, "--models-dir", "."], "ranks serve one model"),
        ] {
            let output = CommandOutput::from(mpirun(&family, 2, arguments.iter().copied()).output().unwrap());
            assert_ne!(output.code, Some(0), "{output:?}");
            assert_ne!(output.code, Some(75), "nothing to start again: {output:?}");
            let lines = output.err.lines().filter(|line| line.contains(wanted)).count();
            assert_eq!(lines, 1, "{arguments:?}: {output:?}");
        }
        // Ranks divide the model already.
        for command in [&["run", "hello", "-n", "4"][..], &["serve", "--port", "0"]] {
            let rows = ["-m", model, "--device", "sim:0,sim:1", "-sm", "row", "-c", "64"];
            let arguments = command.iter().chain(&rows).copied();
            let output = CommandOutput::from(mpirun(&family, 2, arguments).output().unwrap());
            assert_eq!(output.code, Some(2), "{command:?}: {output:?}");
            let lines: Vec<&str> = output.err.lines().filter(|line| line.starts_with("quadriga: ")).collect();
            assert!(matches!(lines[..], [line] if line.contains("--split-mode row")), "{output:?}");
        }
    }
}
