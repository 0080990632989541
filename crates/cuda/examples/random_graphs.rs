//! Computes random graphs on a CUDA device beside the CPU: `random_graphs [ordinal] [first seed] [count]`.
use std::process::ExitCode;
use std::sync::Arc;

use quadriga_conformance::{RandomGraph, compare};
use quadriga_runtime::{Backend, Scheduler};

fn one(seed: u64, scheduler: &Scheduler) -> Result<(), String> {
    let random = RandomGraph::new(seed).map_err(|error| error.to_string())?;
    let expected = random.expected().map_err(|error| error.to_string())?;
    let found = random.run(scheduler).map_err(|error| error.to_string())?;
    compare(&expected, &found).map_err(|difference| difference.to_string())
}

fn main() -> ExitCode {
    let mut numbers = std::env::args().skip(1).map(|a| a.parse::<u64>().unwrap_or(0));
    let (ordinal, first) = (numbers.next().unwrap_or(0) as u32, numbers.next().unwrap_or(1));
    let count = numbers.next().unwrap_or(100);
    let cuda = match quadriga_cuda::Backend::new(ordinal) {
        Ok(backend) => Arc::new(backend) as Arc<dyn Backend>,
        Err(error) => {
            eprintln!("no device to check: {error}");
            return ExitCode::FAILURE;
        }
    };
    let cpu = match quadriga_cpu::Backend::builder().threads(2).build() {
        Ok(backend) => Arc::new(backend) as Arc<dyn Backend>,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let scheduler = Scheduler::new([cuda, cpu]);
    let failed = (first..first + count).filter(|seed| match one(*seed, &scheduler) {
        Ok(()) => false,
        Err(reason) => {
            println!("FAILED seed {seed}: {reason}");
            true
        }
    });
    let failed = failed.count();
    println!("{failed} of {count} random graphs from seed {first} differ");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
