//! Ranks that are processes, over an MPI library that is loaded at run time.
//!
//! MPI is called by one thread of its own (`MPI_THREAD_FUNNELED`), which also sends and watches heartbeats. Operations are
//! non-blocking there and are polled, so that no rank that hangs can block another for ever. MPI has its start, groups and its end only
//! as calls that wait: those have a limit, after which the process can only end.

mod abi;
mod beats;
mod library;
mod progress;
mod request;
mod setup;

use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use self::library::{Interface, load};
use self::progress::{Asked, Command, Division, Link, Mail, Progress};
use self::request::{Done, RawOperation};
use self::setup::{Facts, set_up};
use crate::communicator::{Communicator, Limits, Wait};
use crate::error::ClusterError;
use crate::launcher::launched;
use crate::operation::Operation;
use crate::overlap::during;
use crate::shared_memory::{Cursor, Outbox, Patience};
use crate::watch::lock;

/// The least time that ranks have for a call of MPI that waits for all of them, when they have just met.
const LEAST_WAIT: Duration = Duration::from_secs(10);
/// How long the communication thread has to tell others of an error, or to end all ranks.
const LAST_CALL: Duration = Duration::from_secs(5);

/// How to start MPI.
#[derive(Clone, Debug)]
pub struct MpiOptions {
    /// The path of the library; `None` finds the one of the launcher.
    pub library: Option<String>,
    /// Whether ranks that are all on one machine exchange data through shared memory.
    pub shared_memory: bool,
    /// How long ranks wait for each other.
    pub limits: Limits,
}

impl MpiOptions {
    /// The default, except for what the environment says: `QUADRIGA_MPI` is the path of the library, and
    /// `QUADRIGA_MPI_SHARED_MEMORY=0` sends everything through it.
    pub fn from_env() -> MpiOptions {
        MpiOptions {
            library: std::env::var("QUADRIGA_MPI").ok().filter(|path| !path.is_empty()),
            shared_memory: std::env::var("QUADRIGA_MPI_SHARED_MEMORY").map_or(true, |on| on != "0"),
            limits: Limits::default(),
        }
    }
}

impl Default for MpiOptions {
    /// The launcher's library, with shared memory.
    fn default() -> MpiOptions {
        MpiOptions { library: None, shared_memory: true, limits: Limits::default() }
    }
}

/// The communicator of all ranks that `mpirun`, or another launcher, has started.
///
/// Without [`Mpi::finish`] at the end, launchers report that the program ended unexpectedly.
pub struct Mpi {
    facts: Facts,
    /// This rank's number among all that were started, where this is a group of them.
    world_rank: usize,
    link: Arc<Link>,
    limits: Limits,
    /// Held while an operation runs, with how far this rank is in shared memory.
    order: Mutex<Cursor>,
    /// Messages that wait for room in shared memory; the communication thread delivers them.
    outbox: Arc<Mutex<Outbox>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Mpi {
    /// Loads MPI, starts it on a thread of its own and meets the other ranks.
    ///
    /// # Errors
    /// No library, one that cannot be used, or ranks that do not meet within [`Limits::start`]. After [`ClusterError::Start`], MPI's thread
    /// still waits for them: [`end_process`](crate::end_process) is the end that does not.
    pub fn start(options: &MpiOptions) -> Result<Mpi, ClusterError> {
        let launch = launched();
        let loaded = load(options.library.as_deref(), launch.map(|(family, _)| family))?;
        let (path, limits) = (loaded.path.clone(), options.limits);
        let shared_memory = options.shared_memory;
        let link = Arc::new(Link::default());
        let (sender, receiver) = channel();
        let thread_link = Arc::clone(&link);
        let body = move || {
            let answer = |facts: Result<Facts, ClusterError>| drop(sender.send(facts));
            // SAFETY: each library has the handles of its interface.
            unsafe {
                match loaded.interface {
                    Interface::Standard => {
                        run(
                            set_up(&loaded, |_, _| Ok(abi::STANDARD), shared_memory),
                            thread_link,
                            limits,
                            answer,
                        );
                    }
                    Interface::OpenMpi => {
                        run(set_up(&loaded, abi::open_mpi, shared_memory), thread_link, limits, answer);
                    }
                    Interface::Mpich => {
                        run(
                            set_up(&loaded, |_, _| Ok(abi::MPICH), shared_memory),
                            thread_link,
                            limits,
                            answer,
                        );
                    }
                }
            }
            // MPI libraries cannot be unloaded.
            std::mem::forget(loaded);
        };
        let thread = std::thread::Builder::new().name("mpi".to_owned()).spawn(body).map_err(|error| {
            ClusterError::Mpi { function: "starting the communication thread", text: error.to_string() }
        })?;
        let facts = match receiver.recv_timeout(limits.start) {
            Ok(facts) => facts?,
            Err(RecvTimeoutError::Timeout) => {
                return Err(ClusterError::Start { seconds: limits.start.as_secs(), library: path });
            }
            Err(RecvTimeoutError::Disconnected) => return Err(ClusterError::Ended),
        };
        let ranks = facts.hosts.len();
        if let Some((_, launched)) = launch.filter(|(_, launched)| *launched != ranks) {
            return Err(ClusterError::OtherLauncher { launched, library: path, ranks });
        }
        let order = Mutex::new(Cursor::new());
        let (world_rank, outbox, thread) = (facts.rank, Arc::default(), Mutex::new(Some(thread)));
        Ok(Mpi { facts, world_rank, link, limits, order, outbox, thread })
    }

    /// The library's path or name.
    pub fn library(&self) -> &str {
        &self.facts.library
    }

    /// The library's ABI: `standard`, `Open MPI` or `MPICH`.
    pub fn interface(&self) -> &'static str {
        self.facts.interface
    }

    /// Whether ranks exchange data through shared memory.
    pub fn uses_shared_memory(&self) -> bool {
        self.facts.segment.is_some()
    }

    /// Waits for all ranks and ends MPI. Nothing is done after a failure.
    ///
    /// # Errors
    /// The failure, or that of a rank that does not come. [`Mpi::abort`] is what is left then.
    pub fn finish(&self) -> Result<(), ClusterError> {
        self.barrier()?;
        let done = Arc::new(Done::default());
        self.link.push(Command::Finish(Arc::clone(&done)));
        self.link.wait(&done, "MPI_Finalize", self.meeting())?;
        if let Some(thread) = lock(&self.thread).take() {
            // A panic of the thread has been reported as a failure.
            drop(thread.join());
        }
        Ok(())
    }

    /// Ends this process and, through the launcher, all ranks, also those that hang: for use after a failure. Where MPI does not do
    /// that, the process [ends itself](crate::end_process), upon which launchers end the others. Returns only if MPI has ended already.
    pub fn abort(&self, code: i32) {
        if !self.link.is_stuck() {
            let done = Arc::new(Done::default());
            self.link.push(Command::Abort(code, Arc::clone(&done)));
            if let Some(Err(_)) = done.wait_for(LAST_CALL) {
                return;
            }
        }
        crate::end_process(code);
    }

    /// How long ranks that have just met wait for each other in a call of MPI. They send no heartbeats there.
    fn meeting(&self) -> Duration {
        (self.limits.silence * 3).max(LEAST_WAIT)
    }

    /// Sends a message, and does not wait for its receiver.
    fn send(&self, operation: Operation<'_>) -> Result<(), ClusterError> {
        match (&self.facts.segment, operation) {
            (Some(segment), Operation::Send { bytes, to, tag }) => {
                if !segment.send(bytes, to, tag, &mut lock(&self.outbox))? {
                    let mail = Mail { segment: Arc::clone(segment), outbox: Arc::clone(&self.outbox) };
                    self.link.push(Command::Deliver(mail));
                }
            }
            (_, operation) => {
                let raw = RawOperation::new(operation)?;
                // A message may wait for as long as its receiver computes something else.
                let wait = Wait { what: "send", limit: None };
                let asked = Asked { operation: raw, communicator: self.facts.communicator, wait };
                self.link.push(Command::Run(asked, Arc::default()));
            }
        }
        Ok(())
    }

    fn execute(
        &self,
        operation: Operation<'_>,
        work: &mut dyn FnMut(),
        wait: Wait,
    ) -> Result<(), ClusterError> {
        operation.check(self.rank(), self.size())?;
        let mut cursor = lock(&self.order);
        self.link.failure.check()?;
        if self.size() == 1 {
            work();
            operation.alone();
            return Ok(());
        }
        if matches!(operation, Operation::Send { .. }) {
            self.send(operation)?;
            work();
            return Ok(());
        }
        match &self.facts.segment {
            Some(segment) => {
                segment.start(&operation, &mut cursor);
                let patience = Patience { failure: &self.link.failure, wait };
                during(work, || self.remember(segment.finish(operation, &mut cursor, &patience)))
            }
            None => {
                let raw = RawOperation::new(operation)?;
                let done = Arc::new(Done::default());
                let asked = Asked { operation: raw, communicator: self.facts.communicator, wait };
                self.link.push(Command::Run(asked, Arc::clone(&done)));
                // The memory is borrowed by this call: it must not end before the operation, not even by a panic.
                let waits = WaitOnDrop(&done);
                work();
                drop(waits);
                self.remember(done.wait())
            }
        }
    }

    fn remember(&self, result: Result<(), ClusterError>) -> Result<(), ClusterError> {
        result.map_err(|error| self.link.failure.set(error))
    }
}

/// Answers with what is known of the ranks, then serves commands until the end.
fn run<H: abi::Handle>(
    set_up: Result<(setup::Started<H>, Facts), ClusterError>,
    link: Arc<Link>,
    limits: Limits,
    answer: impl FnOnce(Result<Facts, ClusterError>),
) {
    match set_up {
        Ok((started, facts)) => match Progress::new(started, &facts, link, limits) {
            Ok(mut progress) => {
                answer(Ok(facts));
                progress.serve();
            }
            Err(error) => answer(Err(error)),
        },
        Err(error) => answer(Err(error)),
    }
}

impl Communicator for Mpi {
    fn rank(&self) -> usize {
        self.facts.rank
    }

    fn size(&self) -> usize {
        self.facts.hosts.len()
    }

    fn overlapped(&self, operation: Operation<'_>, work: &mut dyn FnMut()) -> Result<(), ClusterError> {
        let wait = Wait { what: operation.name(), limit: self.limits.operation };
        self.execute(operation, work, wait)
    }

    fn run_within(&self, operation: Operation<'_>, wait: Wait) -> Result<(), ClusterError> {
        self.execute(operation, &mut || {}, wait)
    }

    fn fail(&self, message: &str) {
        let (rank, host) = (self.world_rank, self.host(self.rank()).to_owned());
        self.link.failure.set(ClusterError::RankFailed { rank, host, message: message.to_owned() });
        // The memory of a group is watched by nobody: that of all ranks is written with the command.
        if self.facts.communicator == 0
            && let Some(segment) = &self.facts.segment
        {
            segment.publish_failure(message);
        }
        if !self.link.is_stuck() {
            let done = Arc::new(Done::default());
            self.link.push(Command::Fail(message.to_owned(), Arc::clone(&done)));
            drop(done.wait_for(LAST_CALL));
        }
    }

    fn failure(&self) -> Option<ClusterError> {
        self.link.failure.get()
    }

    fn split(&self, group: u32) -> Result<Arc<dyn Communicator>, ClusterError> {
        // MPI waits in this call, without heartbeats: so ranks meet before.
        self.barrier()?;
        let order = lock(&self.order);
        let (made, done) = (Arc::new(Mutex::new(None)), Arc::new(Done::default()));
        let division = Division {
            parent: self.facts.clone(),
            group: i32::try_from(group).unwrap_or(i32::MAX),
            made: Arc::clone(&made),
        };
        self.link.push(Command::Split(Box::new(division), Arc::clone(&done)));
        self.link.wait(&done, "MPI_Comm_split", self.meeting())?;
        drop(order);
        let facts = lock(&made).take().ok_or(ClusterError::Ended)?;
        Ok(Arc::new(Mpi {
            facts,
            world_rank: self.world_rank,
            link: Arc::clone(&self.link),
            limits: self.limits,
            order: Mutex::new(Cursor::new()),
            outbox: Arc::default(),
            thread: Mutex::new(None),
        }))
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn host(&self, rank: usize) -> &str {
        self.facts.hosts.get(rank).map_or("an unknown machine", String::as_str)
    }
}

struct WaitOnDrop<'a>(&'a Done);

impl Drop for WaitOnDrop<'_> {
    fn drop(&mut self) {
        drop(self.0.wait());
    }
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mpi(rank {} of {}, {})", self.rank(), self.size(), self.facts.library)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A communicator whose thread never comes back from MPI.
    #[test]
    fn no_call_waits_for_a_thread_that_mpi_does_not_return_to() {
        let facts = Facts {
            library: "libmpi.so".to_owned(),
            interface: "standard",
            rank: 0,
            hosts: vec!["here".to_owned()],
            shares: false,
            segment: None,
            communicator: 0,
        };
        let limits = Limits { silence: Duration::from_millis(1), ..Limits::default() };
        let mpi = Mpi {
            facts,
            world_rank: 0,
            link: Arc::default(),
            limits,
            order: Mutex::new(Cursor::new()),
            outbox: Arc::default(),
            thread: Mutex::new(None),
        };
        let error = mpi.finish().unwrap_err();
        assert_eq!(error.to_string(), "MPI_Finalize did not end within 10 s: a rank is stopped, or gone");
        assert_eq!(mpi.failure(), Some(error.clone()));
        mpi.fail("the end");
        assert_eq!(mpi.split(0).unwrap_err(), error);
    }
}
