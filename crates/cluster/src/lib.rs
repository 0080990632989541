//! Collectives between ranks: processes of one program that compute one model together.
//!
//! A [`Communicator`] knows its rank and runs [operations](Operation) with the others: all-reduce, all-gather, reduce-scatter,
//! broadcast, send and receive. There are two:
//!
//! - [`in_process`]: ranks are threads of this process, for tests and for several devices of one machine.
//! - [`Mpi`]: ranks are processes that `mpirun` or Slurm has started. The MPI library is loaded at run time, so that nothing
//!   of it is needed to build or to run alone. Ranks of one machine exchange data through shared memory.
//!
//! [`Collectives`] execute the collectives of graphs with a communicator.
//!
//! An operation that waits for a rank ends with an error that names it, when that rank has sent no heartbeat for
//! [`Limits::silence`] or has reported an error of its own with [`Communicator::fail`].
//!
//! ```
//! use quadriga_cluster::{Communicator, Limits, in_process};
//!
//! std::thread::scope(|scope| {
//!     for ranks in in_process(2, Limits::default()) {
//!         scope.spawn(move || {
//!             let mut values = [1.0, ranks.rank() as f32];
//!             ranks.all_reduce(&mut values)?;
//!             assert_eq!(values, [2.0, 1.0]);
//!             Ok::<(), quadriga_cluster::ClusterError>(())
//!         });
//!     }
//! });
//! ```

mod collectives;
mod communicator;
#[cfg(unix)]
mod end;
mod error;
mod in_process;
mod launcher;
#[cfg(unix)]
mod memory_file;
#[cfg(unix)]
mod mpi;
mod operation;
mod overlap;
mod planned;
mod reduce;
#[cfg(unix)]
mod shared_memory;
#[cfg(unix)]
mod silence;
mod watch;

pub use self::collectives::Collectives;
pub use self::communicator::{Communicator, Limits, Wait};
#[cfg(unix)]
pub use self::end::end_process;
pub use self::error::ClusterError;
pub use self::in_process::{InProcess, in_process};
pub use self::launcher::{Launch, has_launcher, launched, launched_rank, unconnected_tasks};
#[cfg(unix)]
pub use self::mpi::{Mpi, MpiOptions};
pub use self::operation::{Operation, Reduction};
pub use self::planned::Planned;
#[cfg(unix)]
pub use self::silence::silence;
