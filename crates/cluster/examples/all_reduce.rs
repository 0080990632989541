//! How long an all-reduce takes: `mpirun -n 2 target/release/examples/all_reduce`, for the activations of one token and more.

use std::time::Instant;

use quadriga_cluster::{ClusterError, Communicator, Mpi, MpiOptions};

fn main() -> Result<(), ClusterError> {
    let mpi = Mpi::start(&MpiOptions::from_env())?;
    let transport = if mpi.uses_shared_memory() { "shared memory" } else { mpi.interface() };
    for floats in [576, 1024, 2048, 4096, 65_536] {
        let mut values = vec![0.0; floats];
        let mut times = Vec::new();
        for _ in 0..2000 {
            let started = Instant::now();
            mpi.all_reduce(&mut values)?;
            times.push(started.elapsed().as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        let at = |percent: usize| times.get(times.len() * percent / 100).copied().unwrap_or_default();
        if mpi.rank() == 0 {
            let (median, most) = (at(50), at(95));
            println!(
                "{} ranks, {transport}: {floats} floats, median {median:.1} µs, 95 % below {most:.1} µs",
                mpi.size()
            );
        }
    }
    mpi.finish()
}
