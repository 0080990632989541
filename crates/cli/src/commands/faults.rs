//! `quadriga check --faults`: exhausted memory and a lost device, on real hardware.

use std::io::{self, Write};
use std::sync::Arc;

use quadriga_graph::{DType, Data, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Backend, BackendError, Buffer, RuntimeError, Scheduler, Usage};

use crate::backends;
use crate::failure::{Failure, Outcome};

/// Free bytes that remain while memory is exhausted.
const LEFT: u64 = 64 << 20;
/// Bytes that may be missing afterwards: the driver's own allocations.
const KEPT: u64 = 256 << 20;

/// Prints a line per fault, and fails at the first that is not handled as it should be.
pub(crate) fn check(device: &str, threads: Option<usize>) -> Outcome {
    let backend = backends::open_one(device, threads)?;
    memory(&backend)?;
    drop(backend);
    if device.to_ascii_lowercase().starts_with("cuda") {
        let number = device.split_once(':').and_then(|(_, number)| number.parse().ok()).unwrap_or(0);
        let backend =
            quadriga_cuda::Backend::new(number).map_err(|error| Failure::Message(error.to_string()))?;
        loss(&Arc::new(backend))?;
    }
    Ok(())
}

fn print(line: String) -> Outcome {
    Ok(writeln!(io::stdout(), "{line}")?)
}

fn wrong(what: &str, found: impl std::fmt::Display) -> Failure {
    Failure::Message(format!("{what}: {found}"))
}

/// A matmul of `rows` rows with an f32 matrix of this many megabytes.
fn graph(megabytes: usize, rows: usize) -> Outcome<Graph> {
    let g = GraphBuilder::new();
    let n = megabytes << 8;
    let w = g.weight("w", Weight::with_data(DType::F32, [n, 1024], Data::from(vec![0u8; n * 4096])));
    g.output("y", g.mul_mat(w, g.input("x", DType::F32, [rows, 1024])));
    g.finish().map_err(|error| wrong("building a graph", error))
}

fn runs(backend: &Arc<dyn Backend>, when: &str) -> Outcome {
    let plan = Scheduler::new([Arc::clone(backend)]).plan(graph(16, 4)?);
    let ran = plan.and_then(|plan| plan.session()?.run(&[("x", &vec![1.0f32; 4096])]));
    ran.map_err(|error| wrong(when, error))?;
    print(format!("ok: a graph runs {when}"))?;
    Ok(())
}

/// Allocates all free memory but [`LEFT`] bytes.
fn fill(backend: &Arc<dyn Backend>) -> Vec<Arc<dyn Buffer>> {
    let mut buffers = Vec::new();
    let mut size = 1u64 << 34;
    while size >= 1 << 20 {
        match backend.device().free_bytes {
            Some(free) if free >= LEFT + size => match backend.allocate(size as usize, Usage::Weights) {
                Ok(buffer) => buffers.push(buffer),
                Err(_) => size /= 2,
            },
            _ => size /= 2,
        }
    }
    buffers
}

/// Expects that creating a session fails with an out-of-memory error of at least this many bytes.
fn expect_out_of_memory(backend: &Arc<dyn Backend>, graph: Graph, min_bytes: u64, when: &str) -> Outcome {
    let plan = Scheduler::new([Arc::clone(backend)]).plan(graph).map_err(|error| wrong(when, error))?;
    match plan.session() {
        Ok(_) => Err(wrong(when, "the session was created")),
        Err(error) => match &error {
            RuntimeError::Device { error: device, .. } if matches!(**device, BackendError::OutOfMemory { requested, .. } if requested >= min_bytes) =>
            {
                print(format!("ok: {when}: {error}"))?;
                Ok(())
            }
            other => Err(wrong(when, other)),
        },
    }
}

fn memory(backend: &Arc<dyn Backend>) -> Outcome {
    runs(backend, "initially")?;
    let before = backend.device().free_bytes;
    let over = Scheduler::new([Arc::clone(backend)]).budget(0, 1 << 20).plan(graph(16, 4)?);
    match over {
        Err(error @ RuntimeError::OverBudget(_)) => print(format!("ok: planning over budget: {error}"))?,
        Err(error) => return Err(wrong("planning over budget", error)),
        Ok(_) => return Err(wrong("planning over budget", "the budget was ignored")),
    }
    if before.is_none() || backend.memory().host {
        print("skipped: exhausting host memory".to_owned())?;
        return Ok(());
    }
    let buffers = fill(backend);
    expect_out_of_memory(backend, graph(512, 4)?, 512 << 20, "loading weights")?;
    expect_out_of_memory(backend, graph(16, 1 << 15)?, 256 << 20, "allocating the arena")?;
    drop(buffers);
    runs(backend, "after memory was exhausted")?;
    let after = backend.device().free_bytes;
    match (before, after) {
        (Some(before), Some(after)) if before > after + KEPT => {
            Err(wrong("memory was not freed", format!("{before} bytes were free, now {after}")))
        }
        _ => Ok(()),
    }
}

fn loss(backend: &Arc<quadriga_cuda::Backend>) -> Outcome {
    let g = GraphBuilder::new();
    g.output("y", g.input("x", DType::F32, [256]).tanh());
    let graph = g.finish().map_err(|error| wrong("building a graph", error))?;
    let failed = |error: RuntimeError| wrong("before the device was lost", error);
    let all = [Arc::clone(backend) as Arc<dyn Backend>];
    let mut session = Scheduler::new(all).plan(&graph).and_then(|plan| plan.session()).map_err(failed)?;
    session.run(&[("x", &vec![0.5f32; 256])]).map_err(failed)?;
    match backend.lose() {
        error @ BackendError::Lost { .. } => print(format!("ok: {error}"))?,
        other => return Err(wrong("a trapping kernel", other)),
    }
    match session.run(&[("x", &vec![0.5f32; 256])]) {
        Err(error) if matches!(&error, RuntimeError::Device { error, .. } if matches!(**error, BackendError::Lost { .. })) =>
        {
            print(format!("ok: {error}"))?;
            Ok(())
        }
        Err(other) => Err(wrong("a run on a lost device", other)),
        Ok(()) => Err(wrong("a run on a lost device", "it succeeded")),
    }
}
