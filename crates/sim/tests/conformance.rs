//! The conformance suite on two simulated devices, through the scheduler, with tensors pinned at random.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::sync::Arc;

use quadriga_conformance::{
    CASE_GROUP, Case, Outputs, RankPart, Rng, Suite, Target, TargetError, on_rank_threads, run_cases,
};
use quadriga_graph::TensorKind;
use quadriga_runtime::{Element, RankGroup, RuntimeError, Scheduler, Values};
use quadriga_sim::Sim;

/// Two devices that differ in alignment, padding, packing and queues; the generator assigns tensors to them.
struct Pair(Rng);

impl Pair {
    fn compute(
        rng: &mut Rng,
        part: RankPart<'_>,
        ranks: Option<Arc<dyn RankGroup>>,
    ) -> Result<Outputs, RuntimeError> {
        let graph = part.graph;
        let mut scheduler = Scheduler::new([
            Sim::new("a").alignment(32).packs_weights().build(),
            Sim::new("b").synchronous().alignment(256).padding(48).build(),
        ]);
        if let Some(ranks) = ranks {
            scheduler = scheduler.ranks(CASE_GROUP, ranks);
        }
        for id in graph.tensor_ids().filter(|id| graph[*id].storage() == *id) {
            if rng.chance(0.5) {
                scheduler = scheduler.pin_tensor(id, rng.below(2));
            }
        }
        let mut session = scheduler.plan(graph)?.session()?;
        for (name, bytes) in part.inputs {
            let is_state = graph.leaf(name).is_some_and(|id| graph[id].kind() == TensorKind::State);
            match is_state {
                true => session.write_state::<[u8]>(name, bytes)?,
                false => session.set::<[u8]>(name, bytes)?,
            }
        }
        session.start()?;
        session.wait()?;
        graph.outputs().iter().map(|(name, _)| session.read::<u8>(name)).collect()
    }
}

impl Target for Pair {
    fn name(&self) -> String {
        "two simulated devices".to_owned()
    }

    fn run(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        let part = RankPart { graph: &case.graph, inputs: &case.inputs };
        Pair::compute(&mut self.0, part, None).map_err(|error| TargetError::Failed(error.to_string()))
    }

    fn run_ranks(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        let seed = self.0.next_u64();
        on_rank_threads(case, |rank, part, ranks| {
            Pair::compute(&mut Rng::new(seed.wrapping_add(rank as u64)), part, Some(ranks))
                .map_err(|error| TargetError::Failed(format!("{error}, seed {seed}")))
        })
    }
}

#[test]
fn a_sample_of_the_suite_passes_on_any_assignment() {
    // Inputs of any element type are set as bytes.
    assert_eq!(<u8 as Element>::DTYPE, [0u8].dtype());
    let suite = Suite::new();
    let collectives = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "receive"];
    let all = (0..suite.len()).filter(|index| collectives.contains(&suite.operation(*index).unwrap()));
    let cases = suite.sample(1500, 11).into_iter().chain(all).filter_map(|index| suite.case(index));
    let report = run_cases(cases, &mut Pair(Rng::new(12)));
    assert!(report.is_clean(), "{report}");
}
