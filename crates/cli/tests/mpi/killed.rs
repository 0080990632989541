//! Servers whose ranks hang or are killed, under launchers that end all others, and under launchers that let them live.

use super::*;

/// How the others go on when a rank is killed: Open MPI as the example for Kubernetes starts it; MPICH's launcher sees a shell that ends well
/// in place of the rank.
fn lets_others_live<'a>(
    family: &Path,
    ranks: usize,
    arguments: impl IntoIterator<Item = &'a str>,
) -> Command {
    if family.ends_with("openmpi") {
        let launcher = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/kubernetes/serve-ranks");
        let mpirun = mpirun(family, ranks, arguments);
        let mut command = Command::new(launcher);
        command.args(mpirun.get_args()).stdin(Stdio::null());
        for (name, value) in mpirun.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        return command;
    }
    let shell = r#""$0" "$@" || [ "$PMI_RANK" != 0 ]"#;
    mpirun_of(family, &["-disable-auto-cleanup"], ranks, &["sh", "-c", shell], arguments)
}

fn serve(how: &str) -> impl Iterator<Item = &str> {
    ["serve", "--port", "0", "-c", "4096", "--rank-timeout", "2", "--parallelism", how].into_iter()
}

/// Signals one rank of a server that answers two requests; what they get, the launcher's code, and what was printed.
fn signalled(
    served: Served,
    signal: &str,
    (rank, ranks): (usize, usize),
) -> ([String; 2], Option<i32>, String) {
    // On a pipeline, both are in flight.
    let answers = ["The capital of France is", "Once upon a time"].map(|prompt| served.ask(prompt, 3500));
    let found = ranks_below(served.child.id());
    assert_eq!(found.len(), ranks, "the processes of all ranks");
    send_signal(signal, found[rank]);
    let answers = answers.map(whole_or_cut);
    let (code, rest) = served.end();
    (answers, code, rest)
}

#[test]
fn a_server_whose_rank_hangs_answers_503_and_ends_with_a_code_to_start_it_again() {
    for family in families() {
        for how in ["tensor", "pipeline"] {
            let served = Served::of(mpirun(&family, 2, serve(how)));
            let (answers, code, rest) = signalled(served, "-STOP", (1, 2));
            for text in answers {
                assert!(text.starts_with("HTTP/1.1 503") && text.contains("rank 1 on "), "{text} {rest}");
            }
            assert!(rest.contains("rank 1 on ") && rest.contains("is lost"), "{rest}");
            assert_eq!(code, Some(75), "{rest}");
        }
    }
}

/// Nobody is left to answer.
#[test]
fn launchers_end_all_ranks_when_one_is_killed() {
    for family in families() {
        for (how, rank) in [("tensor", 1), ("pipeline", 1), ("tensor", 0)] {
            let served = Served::of(mpirun(&family, 2, serve(how)));
            let (_, code, rest) = signalled(served, "-KILL", (rank, 2));
            let wanted = if family.ends_with("openmpi") { 137 } else { 9 };
            assert_eq!(code, Some(wanted), "{how}, rank {rank}: {rest}");
        }
    }
}

#[test]
fn a_server_whose_rank_is_killed_answers_503_where_the_launcher_lets_the_others_live() {
    for family in families() {
        // Of more than two ranks under MPICH, one that waits for the killed one within MPI may stop sending heartbeats, too.
        let more = family.ends_with("openmpi").then_some(("tensor=2,pipeline=2", 3, 4));
        for (how, rank, ranks) in [("tensor", 1, 2), ("pipeline", 1, 2)].into_iter().chain(more) {
            let served = Served::of(lets_others_live(&family, ranks, serve(how)));
            let (answers, code, rest) = signalled(served, "-KILL", (rank, ranks));
            let name = format!("rank {rank} on ");
            for text in answers {
                assert!(text.starts_with("HTTP/1.1 503") && text.contains(&name), "{how}: {text} {rest}");
            }
            assert!(rest.contains(&name) && rest.contains("is lost"), "{how}: {rest}");
            assert_eq!(code, Some(75), "{how}: {rest}");
        }
    }
}

/// What ends a pod.
#[test]
fn the_launcher_of_the_example_ends_a_server_that_is_told_to() {
    for family in families().iter().filter(|family| family.ends_with("openmpi")) {
        let served = Served::of(lets_others_live(family, 2, serve("tensor")));
        let launcher = served.child.id();
        let (_, rest) = terminated(served, launcher);
        assert!(!rest.contains("is lost"), "{rest}");
    }
}

/// The rank that answered is gone: connections are cut, and the launcher's code says so.
#[test]
fn a_server_whose_first_rank_is_killed_ends_with_an_error() {
    for family in families() {
        for how in ["tensor", "pipeline"] {
            let served = Served::of(lets_others_live(&family, 2, serve(how)));
            let (answers, code, rest) = signalled(served, "-KILL", (0, 2));
            assert!(answers.iter().all(|text| !text.contains("HTTP/1.1 200 OK")), "{answers:?}");
            assert!(code.is_some_and(|code| code != 0), "{how}: {code:?} {rest}");
            if family.ends_with("openmpi") {
                assert_eq!(code, Some(75), "{how}: {rest}");
                assert!(rest.contains("rank 0 on ") && rest.contains("is lost"), "{how}: {rest}");
            }
        }
    }
}
