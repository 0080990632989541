//! Ranks that hang, differ, or were started wrongly.

use super::*;

/// The command on two ranks with options of their own for each, and those of both.
fn mpirun_each(family: &Path, both: &[&str], each: [&[&str]; 2]) -> Command {
    let mut command = mpirun(family, 1, both.iter().chain(each[0]).copied());
    command.args([":", "-n", "1", env!("CARGO_BIN_EXE_quadriga")]).args(both).args(each[1]).args(["-t", "1"]);
    command
}

/// A thread of another process that stands still, until this is dropped; its process goes on with the others.
struct Held(libc::pid_t);

impl Held {
    fn new(thread: u32) -> Held {
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
        // SAFETY: as above; the thread is held by this one.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, 0, 0) };
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
    }
}

#[test]
fn mistakes_on_the_command_line_are_said_once() {
    for family in families() {
        for (arguments, wanted) in [
            (&["run", "--bogus"][..], "--bogus"),
            (&["perplexity", "-f", "text"], "does not run on several ranks yet"),
            (&["serve", "--port", "0", "--models-dir", "."], "name one with -m"),
        ] {
            let output = CommandOutput::from(mpirun(&family, 2, arguments.iter().copied()).output().unwrap());
            assert_ne!(output.code, Some(0), "{output:?}");
            assert_ne!(output.code, Some(75), "nothing to start again: {output:?}");
            let lines = output.err.lines().filter(|line| line.contains(wanted)).count();
            assert_eq!(lines, 1, "{arguments:?}: {output:?}");
        }
    }
}
