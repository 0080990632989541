//! The conformance suite on two simulated devices, through the scheduler, with tensors pinned at random.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use quadriga_conformance::{Case, Outputs, Rng, Suite, Target, TargetError, run_cases};
use quadriga_graph::TensorKind;
use quadriga_runtime::{Element, RuntimeError, Scheduler, Values};
use quadriga_sim::Sim;

/// Two devices that differ in alignment, padding, packing and queues; the generator assigns tensors to them.
struct Pair(Rng);

impl Pair {
    fn compute(&mut self, case: &Case) -> Result<Outputs, RuntimeError> {
        let graph = &case.graph;
        let mut scheduler = Scheduler::new([
            Sim::new("a").alignment(32).packs_weights().build(),
            Sim::new("b").synchronous().alignment(256).padding(48).build(),
        ]);
        for id in graph.tensor_ids().filter(|id| graph[*id].storage() == *id) {
            if self.0.chance(0.5) {
                scheduler = scheduler.pin_tensor(id, self.0.below(2));
            }
        }
        let mut session = scheduler.plan(graph)?.session()?;
        for (name, bytes) in &case.inputs {
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
        self.compute(case).map_err(|error| TargetError::Failed(error.to_string()))
    }
}

#[test]
fn a_sample_of_the_suite_passes_on_any_assignment() {
    // Inputs of any element type are set as bytes.
    assert_eq!(<u8 as Element>::DTYPE, [0u8].dtype());
    let suite = Suite::new();
    let cases = suite.sample(1500, 11).into_iter().filter_map(|index| suite.case(index));
    let report = run_cases(cases, &mut Pair(Rng::new(12)));
    assert!(report.is_clean(), "{report}");
}
