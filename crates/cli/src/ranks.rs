//! Several ranks: processes of this command that `mpirun` or another launcher has started together.
//!
//! The first rank has terminal and files. The others load their part of the model, compute what the first tells them, and print
//! nothing: their errors reach the first.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use quadriga_cluster::{Communicator, Limits, Mpi, MpiOptions, launched, silence};
use quadriga_llm::{Model, Parallelism};

use crate::failure::{Failure, Outcome};
use crate::interrupt;

/// The communicator, where there are several ranks.
static RANKS: OnceLock<Arc<Mpi>> = OnceLock::new();

/// How long a rank that failed leaves the first one to print its error.
const GRACE: Duration = Duration::from_secs(20);
/// How long the first rank leaves the launcher to pass on what it has printed, before it ends all of them.
const DRAIN: Duration = Duration::from_secs(1);

/// Meets the other ranks, if a launcher has started several. `able` says whether the command can run on several.
pub(crate) fn start(able: bool, silence_seconds: Option<u64>) -> Outcome {
    if launched().is_none() {
        return Ok(());
    }
    if !able {
        return Err(Failure::Usage(
            "this command does not run on several ranks yet; start it without mpirun (run, chat, serve, batch, bench and eval do)".into(),
        ));
    }
    let mut options = MpiOptions::from_env();
    if let Some(seconds) = silence_seconds {
        options.limits = Limits { silence: Duration::from_secs(seconds), ..options.limits };
    }
    let mpi = Mpi::start(&options).map_err(|error| Failure::Message(error.to_string()))?;
    if mpi.rank() > 0 {
        silence();
    }
    // The first call of this function is the only one.
    drop(RANKS.set(Arc::new(mpi)));
    Ok(())
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

/// This rank's part of a model.
pub(crate) fn divide(model: Model, parallelism: Parallelism, quiet: bool) -> Outcome<Model> {
    let Some(mpi) = RANKS.get() else { return Ok(model) };
    let communicator: Arc<dyn Communicator> = Arc::<Mpi>::clone(mpi);
    let model = model.with_ranks(communicator, parallelism)?;
    if let Some(share) = model.ranks().filter(|_| !quiet) {
        let through = if mpi.uses_shared_memory() { "shared memory" } else { mpi.library() };
        note!("quadriga: {} ranks through {through}; rank 0 has {}", mpi.size(), share.describe());
    }
    Ok(model)
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
    let Some(mpi) = RANKS.get() else { return outcome.unwrap_or_else(Failure::report) };
    let text = match &outcome {
        Err(failure @ (Failure::Message(_) | Failure::Usage(_) | Failure::Lost(_))) => {
            failure.text().to_owned()
        }
        _ => {
            let ended = mpi.finish().map_err(|error| Failure::Message(error.to_string()));
            return outcome.and_then(|code| ended.map(|()| code)).unwrap_or_else(Failure::report);
        }
    };
    mpi.fail(&text);
    let code = outcome.unwrap_or_else(Failure::report);
    std::thread::sleep(if mpi.rank() > 0 { GRACE } else { DRAIN });
    mpi.abort(i32::from(code));
    code
}
