//! The conformance suite on every instruction set that this CPU has: a fixed sample of the cases, in guarded memory
//! and at odd addresses, with 1 to 8 threads, weights plain and packed, steps fused and not.
//!
//! All cases on all instruction sets:
//! `cargo test --release -p quadriga-cpu --test conformance -- --ignored --nocapture`
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use common::Placed;
use quadriga_conformance::{
    CASE_GROUP, Case, Outputs, RankPart, Suite, Target, TargetError, on_rank_threads, run_cases,
};
use quadriga_cpu::Backend;
use quadriga_cpu::isa::Isa;
use quadriga_runtime::{BackendError, RankGroups};

/// Takes cases through several backends in turn.
struct Cpu {
    isa: Isa,
    /// Backends, and whether their weights are packed.
    backends: Vec<(Backend, bool)>,
    turn: usize,
}

impl Cpu {
    fn new(isa: Isa) -> Cpu {
        let kinds = [(1, true, true), (2, true, true), (3, false, true), (8, true, true), (2, true, false)];
        let backends = kinds.map(|(threads, fuse, packed)| {
            (Backend::builder().isa(isa).threads(threads).fuse(fuse).build().unwrap(), packed)
        });
        Cpu { isa, backends: backends.into(), turn: 0 }
    }
}

fn compute(
    (backend, packed): &(Backend, bool),
    part: RankPart<'_>,
    ranks: &RankGroups,
) -> Result<Outputs, TargetError> {
    let failed = |error: BackendError| match error {
        BackendError::Unsupported { .. } => TargetError::Unsupported(error.to_string()),
        error => TargetError::Failed(error.to_string()),
    };
    let mut placed = Placed::with_ranks(part.graph, backend, *packed, ranks).map_err(failed)?;
    for (name, bytes) in part.inputs {
        placed.set(name, bytes).map_err(failed)?;
    }
    placed.run().map_err(failed)?;
    Ok(part.graph.outputs().iter().map(|(_, id)| placed.read(*id)).collect())
}

impl Target for Cpu {
    fn name(&self) -> String {
        format!("cpu, {}", self.isa)
    }

    fn run(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        self.turn += 1;
        let backend = &self.backends[self.turn % self.backends.len()];
        compute(backend, RankPart { graph: &case.graph, inputs: &case.inputs }, RankGroups::NONE)
    }

    fn run_ranks(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        self.turn += 1;
        on_rank_threads(case, |rank, part, group| {
            let mut ranks = RankGroups::default();
            ranks.insert(CASE_GROUP, group);
            // Ranks wait for each other, so each has a backend of its own.
            compute(&self.backends[(self.turn + rank) % self.backends.len()], part, &ranks)
        })
    }

    fn command(&self, case: &str) -> String {
        format!(
            "QUADRIGA_ISA={} QUADRIGA_CASE='{case}' cargo test -p quadriga-cpu --test conformance -- --ignored one",
            self.isa
        )
    }
}

fn pass(isa: &str, cases: usize) {
    let Ok(isa) = Isa::named(isa) else { return };
    let suite = Suite::new();
    let sample = suite.sample(cases, 11);
    let report = run_cases(sample.into_iter().filter_map(|i| suite.case(i)), &mut Cpu::new(isa));
    assert!(report.is_clean() && report.reasons.is_empty(), "{report}");
}

/// Says which instruction sets this CPU has, and so which of them the tests have run on: `cargo test -- --nocapture the_instruction`.
#[test]
fn the_instruction_sets_that_are_tested() {
    let (tested, absent): (Vec<&str>, Vec<&str>) =
        ["scalar", "avx2", "avxvnni", "avx512", "amx"].into_iter().partition(|name| Isa::named(name).is_ok());
    println!("instruction sets tested here: {}", tested.join(", "));
    if !absent.is_empty() {
        println!("not tested, because this CPU lacks them: {}", absent.join(", "));
    }
    assert!(tested.contains(&"scalar") && tested.len() == Isa::available().len());
}

#[test]
fn a_sample_is_right_in_plain_rust() {
    pass("scalar", 6000);
}

#[test]
fn a_sample_is_right_with_avx2() {
    pass("avx2", 6000);
}

#[test]
fn a_sample_is_right_with_avx_vnni() {
    pass("avxvnni", 6000);
}

#[test]
fn a_sample_is_right_with_avx512() {
    pass("avx512", 6000);
}

#[test]
fn a_sample_is_right_with_amx() {
    pass("amx", 6000);
}

#[test]
#[ignore = "takes minutes: all cases on every instruction set"]
fn all_cases_are_right_on_every_instruction_set() {
    let suite = Suite::new();
    let mut clean = true;
    for isa in Isa::available() {
        let report = run_cases((0..suite.len()).filter_map(|i| suite.case(i)), &mut Cpu::new(isa));
        println!("{report}");
        clean &= report.is_clean() && report.reasons.is_empty();
    }
    assert!(clean);
}

#[test]
#[ignore = "runs the case that QUADRIGA_CASE names on the instruction set that QUADRIGA_ISA names"]
fn one_case() {
    let suite = Suite::new();
    let Ok(name) = std::env::var("QUADRIGA_CASE") else { return };
    let isa = Isa::from_environment().unwrap();
    let case = suite.find(&name).expect("there is no such case");
    let mut cpu = Cpu::new(isa);
    for _ in 0..cpu.backends.len() {
        let report = run_cases(std::iter::once(suite.case(case).unwrap()), &mut cpu);
        println!("{report}");
        assert!(report.is_clean());
    }
}
