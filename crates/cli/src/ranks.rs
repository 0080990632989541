//! Several ranks: processes of this command that `mpirun` or another launcher has started together.
//!
//! The first rank has terminal and files. The others load their part of the model, compute what the first tells them, and print
//! nothing: their errors reach the first.

use std::fs::File;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use quadriga_cluster::{ClusterError, Communicator, Mpi, MpiOptions, Operation, Reduction};
use quadriga_cluster::{Launch, end_process, launched, launched_rank, silence, unconnected_tasks};
use quadriga_llm::placement::Devices;
use quadriga_llm::{Model, Parallelism};
use quadriga_runtime::{Backend, Rates};
use quadriga_view::format::plural;

use crate::failure::{FAILURE, Failure, LOST, Outcome, USAGE};
use crate::interrupt;
use crate::rank_devices::{
    RankDevices, accelerator_keys, identities, nccl_text, resources_of, sharing_of, unmeasured_text,
};
use crate::rank_threads::{RankCpus, idle, threads};

/// The communicator, where there are several ranks.
static RANKS: OnceLock<Arc<Mpi>> = OnceLock::new();

/// The CPUs of each rank.
static CPUS: OnceLock<Vec<RankCpus>> = OnceLock::new();

/// The ranks that compute on each of this one's devices, by its name.
static SHARING: Mutex<Vec<(String, usize)>> = Mutex::new(Vec::new());

/// Where a rank after the first prints what the first cannot.
static LAST_WORD: OnceLock<File> = OnceLock::new();

/// How long a rank that failed leaves the first one to print its error.
const GRACE: Duration = Duration::from_secs(20);
/// How long the first rank leaves the launcher to pass on what it has printed, before it ends all of them.
const DRAIN: Duration = Duration::from_secs(1);

/// How many seconds ranks wait for each other, where the user says so.
#[derive(Clone, Copy)]
pub(crate) struct Timeouts {
    /// Without a heartbeat.
    pub(crate) silence: Option<u64>,
    /// In one step, for a rank with heartbeats; 0 waits for ever.
    pub(crate) step: Option<u64>,
    /// For all to load their part; 0 waits for ever.
    pub(crate) load: Option<u64>,
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
    let limit = |seconds: u64| Some(Duration::from_secs(seconds)).filter(|limit| !limit.is_zero());
    if let Some(seconds) = timeouts.step {
        start.limits.operation = limit(seconds);
    }
    if let Some(seconds) = timeouts.load {
        start.limits.load = limit(seconds);
    }
    let mpi = Mpi::start(&start).map_err(|error| {
        let failure = Failure::Message(error.to_string());
        match error {
            ClusterError::Start { .. } => end_alone(failure),
            _ => failure,
        }
    })?;
    if mpi.rank() > 0
        && let Some(before) = silence()
    {
        drop(LAST_WORD.set(before));
    }
    let mpi = Arc::new(mpi);
    // The first call of this function is the only one.
    drop(RANKS.set(Arc::clone(&mpi)));
    let cpus = gather(&*mpi, &RankCpus::of_process().encode(), "meeting the ranks")?;
    drop(CPUS.set(cpus.iter().map(|cpus| RankCpus::decode(cpus)).collect()));
    Ok(())
}

/// Whether a launcher started this process as a rank after the first, whether or not they have met: what all ranks would print, the first
/// does.
pub(crate) fn was_launched_after_the_first() -> bool {
    launched_rank().is_some_and(|rank| rank > 0)
}

/// Before a rank after the first ends because of a mistake on the command line, which the first says: launchers but MPICH's end all
/// ranks when one ends with an error, so the first gets the time to say it, and to end this one, too.
pub(crate) fn wait_for_the_first() {
    if !matches!(launched(), None | Some((Launch::Mpich, _))) {
        std::thread::sleep(GRACE);
    }
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

/// The threads of this rank, where it shares CPUs with others and none were asked for.
pub(crate) fn default_threads() -> Option<usize> {
    let (mpi, cpus) = (RANKS.get()?, CPUS.get()?);
    let here: Vec<&RankCpus> = ranks_of_host(mpi, mpi.rank()).filter_map(|rank| cpus.get(rank)).collect();
    threads(cpus.get(mpi.rank())?, &here)
}

/// Devices, with the rates that were measured on some of them, by name.
pub(crate) type MeasuredDevices = (Devices, Vec<(String, Rates)>);

/// This rank's part of a model; `devices` finds what it has to compute with, and the rates that were measured there.
pub(crate) fn divide(
    model: Model,
    parallelism: Parallelism,
    devices: &dyn Fn() -> Outcome<MeasuredDevices>,
    quiet: bool,
) -> Outcome<Model> {
    let Some(mpi) = RANKS.get() else { return Ok(model) };
    let communicator: Arc<dyn Communicator> = Arc::<Mpi>::clone(mpi);
    check_same(mpi, parallelism, &model)?;
    let (devices, measured) = devices()?;
    let (accelerators, host) = (identities(&devices), mpi.host(mpi.rank()));
    let keys = gather(&**mpi, &accelerator_keys(host, &accelerators), "opening the devices")?;
    let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let mut sharing = sharing_of(&accelerators, host, &keys);
    sharing.push((devices.cpu().name().to_owned(), ranks_of_host(mpi, mpi.rank()).count()));
    let own = RankDevices::of(&devices, &measured, &sharing);
    let all: Vec<RankDevices> = gather(&**mpi, &own.encode(), "measuring the devices")?
        .iter()
        .map(|rank| RankDevices::decode(rank))
        .collect();
    *SHARING.lock().unwrap_or_else(PoisonError::into_inner) = sharing;
    let model = model.with_rank_resources(communicator, parallelism, &resources_of(&all))?;
    if let Some(share) = model.ranks().filter(|_| !quiet) {
        let through = if mpi.uses_shared_memory() { "shared memory" } else { mpi.library() };
        note!(
            "quadriga: {} ranks through {through}, with {}; rank 0 has {}",
            mpi.size(),
            threads_text(&all),
            share.describe()
        );
        let hosts: Vec<&str> = (0..mpi.size()).map(|rank| mpi.host(rank)).collect();
        if let Some(text) = unmeasured_text(&all, &hosts) {
            note!("quadriga: {text}");
        }
        if quadriga_cuda::nccl_is_enabled() {
            note!("quadriga: {}", nccl_text(&all, &hosts));
        }
        explain_binding(mpi);
    }
    Ok(model)
}

/// The threads of all ranks in words.
fn threads_text(ranks: &[RankDevices]) -> String {
    let threads = ranks.iter().map(|rank| rank.threads as usize);
    let (least, most) = (threads.clone().min().unwrap_or(0), threads.max().unwrap_or(0));
    match least == most {
        true => format!("{} each", plural(most, "thread", "threads")),
        false => format!("{least} to {most} threads"),
    }
}

/// Says so where the launcher has bound the ranks of a machine to few of its CPUs, as Open MPI's does with one or two by default.
fn explain_binding(mpi: &Mpi) {
    let Some(cpus) = CPUS.get().filter(|_| matches!(launched(), Some((Launch::OpenMpi, _)))) else { return };
    let idle = (0..mpi.size()).find_map(|rank| {
        let here: Vec<&RankCpus> = ranks_of_host(mpi, rank).filter_map(|rank| cpus.get(rank)).collect();
        idle(&here).map(|idle| (mpi.host(rank), idle))
    });
    if let Some((host, (used, all))) = idle {
        note!(
            "quadriga: mpirun has bound the ranks on {host} to {used} of its {all} CPUs: with --bind-to none they use all"
        );
    }
}

/// The ranks on a rank's machine.
fn ranks_of_host(mpi: &Mpi, rank: usize) -> impl Iterator<Item = usize> {
    (0..mpi.size()).filter(move |other| mpi.host(*other) == mpi.host(rank))
}

/// The number of this process among those of its machine.
pub(crate) fn number_on_host() -> usize {
    RANKS.get().map_or(0, |mpi| ranks_of_host(mpi, mpi.rank()).take_while(|rank| *rank < mpi.rank()).count())
}

/// The number of ranks.
pub(crate) fn count() -> usize {
    RANKS.get().map_or(1, |mpi| mpi.size())
}

/// The ranks that compute on each of this one's devices, once a model is divided.
pub(crate) fn sharing() -> Vec<(String, usize)> {
    SHARING.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The least of each number over all ranks: what all have room for.
pub(crate) fn least(numbers: &mut [usize]) -> Outcome {
    let Some(mpi) = RANKS.get() else { return Ok(()) };
    let own: Vec<u8> = numbers.iter().flat_map(|number| (*number as u64).to_le_bytes()).collect();
    for rank in gather(&**mpi, &own, "planning the model")? {
        let (words, _) = rank.as_chunks::<8>();
        for (number, word) in numbers.iter_mut().zip(words) {
            *number = usize::try_from(u64::from_le_bytes(*word)).unwrap_or(usize::MAX).min(*number);
        }
    }
    Ok(())
}

/// Numbers that only the first rank knows: the others get its own. Nothing happens where there is one rank.
pub(crate) fn from_first(numbers: &mut [usize]) -> Outcome {
    let Some(mpi) = RANKS.get() else { return Ok(()) };
    let mut bytes: Vec<u8> = numbers.iter().flat_map(|number| (*number as u64).to_le_bytes()).collect();
    let numbers_of_first = Operation::Broadcast { bytes: &mut bytes, root: 0 };
    mpi.run_loading(numbers_of_first, "reading the input")
        .map_err(|error| Failure::Message(error.to_string()))?;
    let (words, _) = bytes.as_chunks::<8>();
    for (number, word) in numbers.iter_mut().zip(words) {
        *number = usize::try_from(u64::from_le_bytes(*word)).unwrap_or(usize::MAX);
    }
    Ok(())
}

/// An error on all ranks if they have different models or programs, or were told to divide the model in different ways: they would wait
/// for each other in different places.
fn check_same(mpi: &Mpi, parallelism: Parallelism, model: &Model) -> Outcome {
    let failed = |error: ClusterError| Failure::Message(error.to_string());
    // Some may still be opening their file, which may be on a file system that does not answer.
    mpi.run_loading(
        Operation::AllReduce { values: &mut [0.0], reduction: Reduction::Sum },
        "opening the model",
    )
    .map_err(failed)?;
    // What is held beside the weights decides about the division, too.
    let Parallelism { load, cache, link, .. } = parallelism;
    let version = env!("CARGO_PKG_VERSION").to_owned();
    let files = "the model files differ: copy that of rank 0 to the machines of the others, or give all of them one path";
    let all = [
        (version, "the ranks run different versions of quadriga: install one on all machines"),
        (format!("{:?}", model.quick_identity()), files),
        (parallelism.to_string(), "the ranks were given different values of --parallelism"),
        (format!("{link:?}"), "the ranks were given different values of --link"),
        (format!("{load:?}"), "the ranks were given different numbers of requests (--parallel)"),
        (
            format!("{cache:?}"),
            "the ranks were given different contexts (-c) or types of the KV cache (-ctk, -ctv)",
        ),
    ];
    for (own, reason) in all {
        let mut first = own.clone().into_bytes();
        mpi.broadcast_message(&mut first, 0).map_err(failed)?;
        let mut different = [if first == own.as_bytes() { 0.0 } else { 1.0 }];
        mpi.all_reduce(&mut different).map_err(failed)?;
        if different != [0.0] {
            return Err(Failure::Usage(reason.to_owned()));
        }
    }
    Ok(())
}

/// The bytes of every rank, of which each has as many. Some may still be doing `what`, which takes any time.
fn gather(ranks: &dyn Communicator, own: &[u8], what: &'static str) -> Outcome<Vec<Vec<u8>>> {
    let (lengths, mut whole) = (vec![own.len(); ranks.size()], vec![0; own.len() * ranks.size()]);
    let all = Operation::AllGather { part: own, lengths: &lengths, whole: &mut whole };
    ranks.run_loading(all, what).map_err(|error| Failure::Message(error.to_string()))?;
    Ok(whole.chunks(own.len().max(1)).map(<[u8]>::to_vec).collect())
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
    // The first rank decides what Ctrl-C ends, and SIGTERM, which some launchers and systemd send to all processes of a service: it
    // finishes its answers before.
    let _caught = interrupt::catch();
    let _ignored = interrupt::ignore_termination();
    match compute() {
        Ok(()) => Failure::Followed,
        Err(failure) => failure,
    }
}

/// Ends this process although MPI waits for other ranks. The first rank says why; others do if it does not.
fn end_alone(failure: Failure) -> ! {
    let rank = launched_rank().unwrap_or(0);
    std::thread::sleep(2 * DRAIN * rank.min(2) as u32);
    let code = if rank < 2 { failure.report() } else { FAILURE };
    std::thread::sleep(DRAIN);
    end_process(i32::from(code));
}

/// Ends MPI, or all ranks after an error, and returns the exit code.
pub(crate) fn end(outcome: Outcome<u8>) -> u8 {
    let Some(mpi) = RANKS.get() else {
        let follows = was_launched_after_the_first();
        return match outcome {
            Err(Failure::Usage(_)) if follows => {
                wait_for_the_first();
                USAGE
            }
            Err(failure) => {
                if follows {
                    // Some launchers end all ranks when one ends: the first has its say before.
                    std::thread::sleep(DRAIN);
                }
                failure.report()
            }
            Ok(code) => code,
        };
    };
    let failure = match outcome {
        Err(failure @ (Failure::Message(_) | Failure::Usage(_) | Failure::Lost(_))) => failure,
        outcome => match mpi.finish() {
            Ok(()) => return outcome.unwrap_or_else(Failure::report),
            Err(error) => {
                // What was printed is complete, and the process will not end in the usual way.
                let _ = std::io::stdout().flush();
                match outcome {
                    Err(interrupted @ Failure::Interrupted) => interrupted,
                    _ => Failure::Message(error.to_string()),
                }
            }
        },
    };
    // Nobody else says so, and nobody waits for the first rank's last words.
    if let Some(error @ ClusterError::RankLost { rank: 0, .. }) = mpi.failure() {
        say_last(mpi, &error.to_string());
        mpi.abort(i32::from(LOST));
        return LOST;
    }
    // It is said before MPI is called again, which may not come back.
    let text = failure.text().to_owned();
    let code = failure.report();
    mpi.fail(&text);
    if mpi.rank() == 0 {
        std::thread::sleep(DRAIN);
    } else {
        std::thread::sleep(GRACE);
        // The first rank would have ended all of them.
        say_last(mpi, &text);
    }
    mpi.abort(i32::from(code));
    code
}

/// Prints on the second rank what the first cannot say. Others say nothing: one line is enough.
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
#[allow(clippy::panic, clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_text() {
        let text = |outcome: Outcome| outcome.map_err(|failure| failure.text().to_owned());
        assert_eq!(text(caught(|| panic!("no room"))), Err("it panicked: no room".to_owned()));
        assert_eq!(text(caught(|| panic!("{} of 3", 4))), Err("it panicked: 4 of 3".to_owned()));
        assert_eq!(text(caught(|| Err(Failure::Usage("-x".to_owned())))), Err("-x".to_owned()));
    }
}
