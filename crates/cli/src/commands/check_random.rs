//! `quadriga check --random N`: random graphs on a device, in planned memory, against the oracle.

use std::io::{self, Write};
use std::sync::Arc;

use indicatif::{ProgressBar, ProgressStyle};
use quadriga_conformance::{RandomGraph, compare};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_view::format::plural;

use crate::backends;
use crate::failure::{Failure, Outcome};

/// Computes `count` graphs from `seed` on: on the CPU with several numbers of threads, with and without fusion; on other
/// devices beside the CPU, which computes what the device does not support.
pub(crate) fn check(device: &str, threads: Option<usize>, count: usize, seed: u64) -> Outcome {
    let backend = backends::open_one(device, threads)?;
    let cpu = |threads: usize, fuse: bool| -> Outcome<Arc<dyn Backend>> {
        let built = quadriga_cpu::Backend::builder().threads(threads).fuse(fuse).build();
        Ok(Arc::new(built.map_err(|error| Failure::Message(error.to_string()))?))
    };
    let mut schedulers: Vec<(String, Scheduler)> = Vec::new();
    if backend.name() == quadriga_cpu::NAME {
        for (threads, fuse) in [(1, false), (1, true), (2, true), (3, true), (8, true), (4, false)] {
            let how = if fuse { "with" } else { "without" };
            let name = format!("{}, {how} fusion", plural(threads, "thread", "threads"));
            schedulers.push((name, Scheduler::new([cpu(threads, fuse)?])));
        }
    } else {
        let name = backend.name().to_owned();
        schedulers.push((name, Scheduler::new([Arc::clone(&backend), cpu(threads.unwrap_or(2), true)?])));
    }
    let bar = ProgressBar::new(count as u64);
    let style = ProgressStyle::with_template("checking [{wide_bar}] {pos}/{len} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut failures = 0;
    let mut out = io::stdout().lock();
    for number in 0..count as u64 {
        let seed = seed.wrapping_add(number);
        bar.inc(1);
        let picked = schedulers.get((seed % schedulers.len().max(1) as u64) as usize);
        let Some((name, scheduler)) = picked else { continue };
        if let Err(reason) = one(seed, scheduler) {
            failures += 1;
            bar.suspend(|| writeln!(out, "FAILED seed {seed} on {name}: {reason}"))?;
        }
    }
    bar.finish_and_clear();
    let graphs = plural(count, "random graph", "random graphs");
    if failures > 0 {
        return Err(Failure::Message(format!("{failures} of {graphs} failed on {}", backend.name())));
    }
    Ok(writeln!(out, "{graphs} from seed {seed} agree with the oracle on {}", backend.name())?)
}

/// Computes the graph of a seed.
fn one(seed: u64, scheduler: &Scheduler) -> Result<(), String> {
    let random = RandomGraph::new(seed).map_err(|error| error.to_string())?;
    let expected = random.expected().map_err(|error| error.to_string())?;
    let found = random.run(scheduler).map_err(|error| error.to_string())?;
    compare(&expected, &found).map_err(|difference| difference.to_string())
}
