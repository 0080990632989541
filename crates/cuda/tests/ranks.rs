//! Collectives on a GPU: staged through the host, and through NCCL with one rank; and one GPU that is opened twice. Each says so and
//! passes where there is no device, or no NCCL.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "tests"
)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{cpu, device, device_with_own_context};
use quadriga_cluster::{Collectives, Limits, in_process};
use quadriga_conformance::{
    CASE_GROUP, Case, Outputs, RankPart, Suite, Target, TargetError, on_rank_threads, run_cases,
};
use quadriga_cuda::{Backend as Cuda, NcclError};
use quadriga_graph::{DType, Data, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Backend, RankGroup, Region, RuntimeError, Scheduler, Usage};

/// The cases of collectives with up to so many ranks.
fn cases(suite: &Suite, ranks: usize) -> Vec<usize> {
    let collectives = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "receive"];
    let is_one = |index: &usize| {
        collectives.contains(&suite.operation(*index).unwrap()) && suite.ranks(*index).unwrap() <= ranks
    };
    (0..suite.len()).filter(is_one).collect()
}

fn compute(scheduler: &Scheduler, part: RankPart<'_>) -> Result<Outputs, TargetError> {
    let run = || -> Result<Outputs, RuntimeError> {
        let mut session = scheduler.plan(part.graph)?.session()?;
        for (name, bytes) in part.inputs {
            session.set::<[u8]>(name, bytes)?;
        }
        session.run(&[])?;
        part.graph.outputs().iter().map(|(name, _)| session.read::<u8>(name)).collect()
    };
    run().map_err(|error| TargetError::Failed(error.to_string()))
}

/// Ranks that have the same GPU, and exchange data through the host.
struct Staged(Vec<[Arc<dyn Backend>; 2]>);

impl Target for Staged {
    fn name(&self) -> String {
        "a GPU, through the host".to_owned()
    }

    fn run(&mut self, _: &Case) -> Result<Outputs, TargetError> {
        Err(TargetError::Unsupported("only collectives are run".to_owned()))
    }

    fn run_ranks(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        on_rank_threads(case, |rank, part, group| {
            compute(&Scheduler::new(self.0[rank].clone()).ranks(CASE_GROUP, group), part)
        })
    }
}

#[test]
fn collectives_are_right_through_the_host() {
    let Some(first) = device() else { return };
    let mut ranks = vec![[first, cpu()]];
    ranks.extend((1..4).filter_map(|_| Some([device()?, cpu()])));
    let suite = Suite::new();
    // `quadriga check` runs all of them, in several processes at once: each has a session for each rank.
    let chosen: Vec<usize> = cases(&suite, ranks.len()).into_iter().step_by(7).collect();
    println!("{} cases", chosen.len());
    let report = run_cases(chosen.into_iter().filter_map(|index| suite.case(index)), &mut Staged(ranks));
    assert!(report.is_clean() && report.reasons.is_empty(), "{report}");
}

/// One rank whose GPU is connected by NCCL.
struct Alone(Arc<dyn Backend>, Arc<dyn RankGroup>);

impl Target for Alone {
    fn name(&self) -> String {
        "a GPU, through NCCL".to_owned()
    }

    fn run(&mut self, _: &Case) -> Result<Outputs, TargetError> {
        Err(TargetError::Unsupported("only collectives are run".to_owned()))
    }

    fn run_ranks(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        let scheduler = Scheduler::new([Arc::clone(&self.0)]).ranks(CASE_GROUP, Arc::clone(&self.1));
        compute(&scheduler, RankPart { graph: &case.graph, inputs: &case.inputs })
    }
}

#[test]
fn collectives_of_one_rank_are_right_through_nccl() {
    let backend = match Cuda::new(0) {
        Ok(backend) => backend,
        Err(reason) => return println!("skipped, there is no GPU: {reason}"),
    };
    let communicator = in_process(1, Limits::default()).remove(0);
    let host: Arc<dyn RankGroup> = Arc::new(Collectives::new(Arc::new(communicator)));
    let ranks = match backend.connect_ranks(&host, Duration::from_secs(60)) {
        Err(NcclError::NoLibrary { tried }) => return println!("skipped, NCCL is not installed: {tried}"),
        connected => Arc::new(connected.unwrap()),
    };
    let suite = Suite::new();
    let chosen = cases(&suite, 1);
    let mut target = Alone(Arc::new(backend), ranks);
    let report = run_cases(chosen.into_iter().filter_map(|index| suite.case(index)), &mut target);
    assert!(report.is_clean() && report.reasons.is_empty(), "{report}");
}

/// Two layers with weights of three kinds.
fn layers(rows: usize) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [rows, 64]);
    let weight = |name: &str, seed: usize| {
        let value = |at: usize| ((at * 37 + seed) % 101) as f32 / 101.0 - 0.5;
        let bytes: Vec<u8> = (0..64 * 64).flat_map(|at| value(at).to_le_bytes()).collect();
        g.weight(name, Weight::with_data(DType::F32, [64, 64], Data::from(bytes)))
    };
    let hidden = weight("a", 3).mul_mat(x.rms_norm(1e-5)).silu();
    g.output("y", weight("b", 7).mul_mat(hidden).add(x).soft_max(1.0, None, None));
    g.finish().unwrap()
}

#[test]
fn one_gpu_opened_twice_as_two_backends_gives_the_same_bits() {
    let (Some(one), Some(two)) = (device(), device()) else { return };
    gives_the_same_bits(&one, &two);
}

#[test]
fn two_contexts_of_one_gpu_give_the_same_bits() {
    let (Some(one), Some(two)) = (device_with_own_context(), device_with_own_context()) else { return };
    gives_the_same_bits(&one, &two);
    let Some(primary) = device() else { return };
    gives_the_same_bits(&primary, &two);
}

#[test]
fn contexts_copy_between_each_other_without_the_host() {
    let (Some(one), Some(two)) = (device_with_own_context(), device_with_own_context()) else { return };
    // Of both sizes: below and above those that are batched in one launch.
    for bytes in [1, 512, 4096, 5 << 20] {
        let data: Vec<u8> = (0..bytes).map(|at| (at * 31 % 251) as u8).collect();
        let region = |backend: &Arc<dyn Backend>| {
            Region::new(backend.allocate(bytes, Usage::Compute).unwrap(), 0, bytes).unwrap()
        };
        let (from, to, back) = (region(&one), region(&two), region(&one));
        let (mut first, mut second) = (one.queue().unwrap(), two.queue().unwrap());
        first.write(&from, &data).unwrap();
        let written = one.event(false).unwrap();
        first.record(&*written).unwrap();
        second.wait(&*written).unwrap();
        assert!(second.copy(&from, &to).unwrap(), "{bytes} bytes are copied by the receiving queue");
        let copied = two.event(false).unwrap();
        second.record(&*copied).unwrap();
        first.wait(&*copied).unwrap();
        assert!(first.copy(&to, &back).unwrap(), "{bytes} bytes are copied back");
        let mut found = vec![0u8; bytes];
        first.read(&back, &mut found).unwrap();
        assert!(found == data, "{bytes} bytes");
        assert!(second.copy(&to, &from).unwrap(), "{bytes} bytes are copied by the sending queue");
        second.synchronize().unwrap();
    }
}

/// Each alone, and both as the devices of one scheduler.
fn gives_the_same_bits(one: &Arc<dyn Backend>, two: &Arc<dyn Backend>) {
    for rows in [1, 5, 70] {
        let x: Vec<f32> = (0..rows * 64).map(|at| (at % 23) as f32 / 23.0 - 0.4).collect();
        let session = |backend: &Arc<dyn Backend>| {
            Scheduler::new([Arc::clone(backend)]).plan(layers(rows)).unwrap().session().unwrap()
        };
        let (mut first, mut second) = (session(one), session(two));
        // Alternately, so that each finds the other's programs on the device.
        for _ in 0..3 {
            first.run(&[("x", &x)]).unwrap();
            second.run(&[("x", &x)]).unwrap();
            assert_eq!(first.read::<f32>("y").unwrap(), second.read::<f32>("y").unwrap(), "{rows} rows");
        }
        // And as two devices of one scheduler, which copy between each other.
        let both = |backends: [&Arc<dyn Backend>; 2]| {
            let scheduler = Scheduler::new(backends.map(Arc::clone)).place(|name| (name == "b").then_some(1));
            let mut session = scheduler.plan(layers(rows)).unwrap().session().unwrap();
            session.run(&[("x", &x)]).unwrap();
            session.read::<f32>("y").unwrap()
        };
        let split = both([one, two]);
        assert_eq!(split, both([two, one]), "{rows} rows");
        assert_eq!(split, first.read::<f32>("y").unwrap(), "{rows} rows on one device");
    }
}
