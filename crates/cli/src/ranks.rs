//! Several ranks: processes of this command that `mpirun` or another launcher has started together.
//!
//! The first rank has terminal and files. The others load their part of the model, compute what the first tells them, and print
//! nothing: their errors reach the first.

use std::fs::File;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use quadriga_cluster::{ClusterError, Communicator, Mpi, MpiOptions, Operation};
use quadriga_cluster::{launched, launched_rank, silence, unconnected_tasks};
use quadriga_llm::{Model, Parallelism};

use crate::failure::{Failure, LOST, Outcome, USAGE};
use crate::interrupt;

/// The communicator, where there are several ranks.
static RANKS: OnceLock<Arc<Mpi>> = OnceLock::new();

/// Where a rank after the first prints that the first is lost.
static LAST_WORD: OnceLock<File> = OnceLock::new();

/// How long a rank that failed leaves the first one to print its error.
const GRACE: Duration = Duration::from_secs(20);
/// Ranks of which none is this much faster than another are alike.
const SAME_SPEED: f64 = 1.25;
/// How long the first rank leaves the launcher to pass on what it has printed, before it ends all of them.
const DRAIN: Duration = Duration::from_secs(1);

/// How many seconds ranks wait for each other, where the user says so.
#[derive(Clone, Copy)]
pub(crate) struct Timeouts {
    /// Without a heartbeat.
    pub(crate) silence: Option<u64>,
    /// In one step, for a rank with heartbeats; 0 waits for ever.
    pub(crate) step: Option<u64>,
}

/// Meets the other ranks, if a launcher has started several. `timeouts` are those of a command that can run on several.
pub(crate) fn start(timeouts: Option<Timeouts>) -> Outcome {
    if launched().is_none() {
        if let Some(tasks) = unconnected_tasks() {
            note!(
                "quadriga: WARNING: srun started {tasks} processes that cannot find each other, so that each runs the whole command; ranks need srun --mpi=pmix, or mpirun"
            );
        }
        return Ok(());
    }
    let Some(timeouts) = timeouts else {
        return Err(Failure::Usage(
            "this command does not run on several ranks yet; start it without mpirun (run, chat, serve, batch, embed, bench and eval do)".into(),
        ));
    };
    let mut start = MpiOptions::from_env();
    if let Some(seconds) = timeouts.silence {
        start.limits.silence = Duration::from_secs(seconds);
    }
    if let Some(seconds) = timeouts.step {
        start.limits.operation = Some(Duration::from_secs(seconds)).filter(|limit| !limit.is_zero());
    }
    let mpi = Mpi::start(&start).map_err(|error| Failure::Message(error.to_string()))?;
    if mpi.rank() > 0
        && let Some(before) = silence()
    {
        drop(LAST_WORD.set(before));
    }
    // The first call of this function is the only one.
    drop(RANKS.set(Arc::new(mpi)));
    Ok(())
}

/// Whether a launcher started this process as a rank after the first, whether or not they have met: what all ranks would print, the first
/// does.
pub(crate) fn was_launched_after_the_first() -> bool {
    launched_rank().is_some_and(|rank| rank > 0)
}

/// Runs a command. On several ranks a panic is an error like others: the rank tells the others, instead of only being gone.
pub(crate) fn guarded(command: impl FnOnce() -> Outcome) -> Outcome {
    if are_several() { caught(command) } else { command() }
}

fn caught(command: impl FnOnce() -> Outcome) -> Outcome {
    catch_unwind(AssertUnwindSafe(command)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Failure::Message(format!("it panicked: {text}")))
    })
}

/// Whether this process is a rank after the first.
pub(crate) fn follows() -> bool {
    RANKS.get().is_some_and(|mpi| mpi.rank() > 0)
}

/// The threads of this rank, where several share a machine and none were asked for.
pub(crate) fn default_threads() -> Option<usize> {
    let mpi = RANKS.get()?;
    let here = (0..mpi.size()).filter(|rank| mpi.host(*rank) == mpi.host(mpi.rank())).count();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (here > 1).then(|| (cores / here).max(1))
}

/// This rank's part of a model. `threads` are those that were asked for; `read` finds the bytes per second that they were measured to
/// read, if they were.
pub(crate) fn divide(
    model: Model,
    parallelism: Parallelism,
    (threads, read): (Option<usize>, &dyn Fn() -> Option<f64>),
    quiet: bool,
) -> Outcome<Model> {
    let Some(mpi) = RANKS.get() else { return Ok(model) };
    let communicator: Arc<dyn Communicator> = Arc::<Mpi>::clone(mpi);
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.or_else(default_threads).unwrap_or_else(cores);
    check_parallelism(mpi, parallelism)?;
    let own = [threads as f32, read().unwrap_or(0.0) as f32];
    let speeds = even_out(&gather(&*communicator, own)?);
    let model = model.with_uneven_ranks(communicator, parallelism, &speeds)?;
    if let Some(share) = model.ranks().filter(|_| !quiet) {
        let through = if mpi.uses_shared_memory() { "shared memory" } else { mpi.library() };
        note!("quadriga: {} ranks through {through}; rank 0 has {}", mpi.size(), share.describe());
    }
    Ok(model)
}

/// Numbers that only the first rank knows: the others get its own. Nothing happens where there is one rank.
pub(crate) fn from_first(numbers: &mut [usize]) -> Outcome {
    let Some(mpi) = RANKS.get() else { return Ok(()) };
    let mut bytes: Vec<u8> = numbers.iter().flat_map(|number| (*number as u64).to_le_bytes()).collect();
    let numbers_of_first = Operation::Broadcast { bytes: &mut bytes, root: 0 };
    mpi.run_patiently(numbers_of_first).map_err(|error| Failure::Message(error.to_string()))?;
    let (words, _) = bytes.as_chunks::<8>();
    for (number, word) in numbers.iter_mut().zip(words) {
        *number = usize::try_from(u64::from_le_bytes(*word)).unwrap_or(usize::MAX);
    }
    Ok(())
}

/// An error on all ranks if they were told to divide the model in different ways: they would wait for each other in different places.
fn check_parallelism(mpi: &Mpi, parallelism: Parallelism) -> Outcome {
    let failed = |error: ClusterError| Failure::Message(error.to_string());
    let own = format!("{parallelism:?}").into_bytes();
    // Some may still be opening their file.
    mpi.run_patiently(Operation::Broadcast { bytes: &mut [0], root: 0 }).map_err(failed)?;
    let mut first = own.clone();
    mpi.broadcast_message(&mut first, 0).map_err(failed)?;
    let mut different = [if first == own { 0.0 } else { 1.0 }];
    mpi.all_reduce(&mut different).map_err(failed)?;
    match different {
        [0.0] => Ok(()),
        _ => Err(Failure::Usage("the ranks were given different values of --parallelism".to_owned())),
    }
}

/// Two numbers of every rank.
fn gather(ranks: &dyn Communicator, own: [f32; 2]) -> Outcome<Vec<[f32; 2]>> {
    let part: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
    let (lengths, mut whole) = (vec![part.len(); ranks.size()], vec![0; part.len() * ranks.size()]);
    let all = Operation::AllGather { part: &part, lengths: &lengths, whole: &mut whole };
    ranks.run(all).map_err(|error| Failure::Message(error.to_string()))?;
    let (numbers, _) = whole.as_chunks::<4>();
    let (pairs, _) = numbers.as_chunks::<2>();
    Ok(pairs.iter().map(|pair| pair.map(f32::from_le_bytes)).collect())
}

/// The speeds of ranks with these threads and bytes per second: what was measured, if it was on all of them, else the threads.
/// Small differences are noise, and count as none.
fn even_out(ranks: &[[f32; 2]]) -> Vec<f64> {
    let measured = ranks.iter().all(|[_, read]| *read > 0.0);
    let speed = |[threads, read]: &[f32; 2]| f64::from(if measured { *read } else { threads.max(1.0) });
    let speeds: Vec<f64> = ranks.iter().map(speed).collect();
    let (least, most) =
        (speeds.iter().copied().fold(f64::MAX, f64::min), speeds.iter().copied().fold(0.0, f64::max));
    if most < least * SAME_SPEED { vec![1.0; speeds.len()] } else { speeds }
}

/// Whether standard input may never end: some launchers of ranks leave it open, so it is read where nothing else is given.
pub(crate) fn may_never_end_input() -> bool {
    quadriga_cluster::has_launcher()
}

/// Whether there are several ranks.
pub(crate) fn are_several() -> bool {
    RANKS.get().is_some()
}

/// Why ranks can no longer exchange data, once they cannot.
pub(crate) fn lost() -> Option<String> {
    RANKS.get()?.failure().map(|error| error.to_string())
}

/// On ranks after the first, computes until the first has ended; an error otherwise returns at once.
pub(crate) fn follow(compute: impl FnOnce() -> Outcome) -> Failure {
    // The first rank decides what Ctrl-C ends.
    let _caught = interrupt::catch();
    match compute() {
        Ok(()) => Failure::Followed,
        Err(failure) => failure,
    }
}

/// Ends MPI, or all ranks after an error, and returns the exit code.
pub(crate) fn end(outcome: Outcome<u8>) -> u8 {
    let Some(mpi) = RANKS.get() else {
        let is_repeated = was_launched_after_the_first() && matches!(outcome, Err(Failure::Usage(_)));
        return if is_repeated { USAGE } else { outcome.unwrap_or_else(Failure::report) };
    };
    let text = match &outcome {
        Err(failure @ (Failure::Message(_) | Failure::Usage(_) | Failure::Lost(_))) => {
            failure.text().to_owned()
        }
        _ => {
            let ended = mpi.finish().map_err(|error| Failure::Message(error.to_string()));
            return outcome.and_then(|code| ended.map(|()| code)).unwrap_or_else(Failure::report);
        }
    };
    // Nobody else says so, and nobody waits for the first rank's last words.
    let outcome = match mpi.failure() {
        Some(error @ ClusterError::RankLost { rank: 0, .. }) => {
            say_last(mpi, &error.to_string());
            mpi.abort(i32::from(LOST));
            return LOST;
        }
        _ => outcome,
    };
    mpi.fail(&text);
    let code = outcome.unwrap_or_else(Failure::report);
    std::thread::sleep(if mpi.rank() > 0 { GRACE } else { DRAIN });
    mpi.abort(i32::from(code));
    code
}

/// Prints on the second rank that the first is lost. Others say nothing: one line is enough.
fn say_last(mpi: &Mpi, text: &str) {
    if mpi.rank() == 1
        && let Some(mut stderr) = LAST_WORD.get()
    {
        let _ = writeln!(stderr, "quadriga: {}", crate::terminal::escaped(text));
        std::thread::sleep(DRAIN);
    } else {
        std::thread::sleep(2 * DRAIN);
    }
}

#[cfg(test)]
#[allow(clippy::panic, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_text() {
        let text = |outcome: Outcome| outcome.map_err(|failure| failure.text().to_owned());
        assert_eq!(text(caught(|| panic!("no room"))), Err("it panicked: no room".to_owned()));
        assert_eq!(text(caught(|| panic!("{} of 3", 4))), Err("it panicked: 4 of 3".to_owned()));
        assert_eq!(text(caught(|| Err(Failure::Usage("-x".to_owned())))), Err("-x".to_owned()));
    }

    #[test]
    fn speeds_are_measured_on_all_ranks_or_counted_in_threads() {
        assert_eq!(even_out(&[[8.0, 20e9], [8.0, 22e9]]), [1.0, 1.0], "noise");
        let uneven = even_out(&[[8.0, 40e9], [8.0, 10e9]]);
        assert_eq!(uneven[0] / uneven[1], 4.0);
        assert_eq!(even_out(&[[8.0, 40e9], [2.0, 0.0]]), [8.0, 2.0], "one was not measured");
        assert_eq!(even_out(&[[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]]), [1.0; 3]);
    }
}
