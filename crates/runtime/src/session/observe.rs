//! Runs that show intermediate results to an observer.
//!
//! The observer is asked first which nodes it wants to see. A split without such nodes runs as always, with its own
//! program. Another one is cut after each wanted node; the segments are compiled when they are first needed, and kept
//! for the next observed run.
#![expect(clippy::indexing_slicing, reason = "segments are ranges of a split's nodes")]

use std::ops::{ControlFlow, Range};

use quadriga_graph::{NodeId, TensorId};
use rustc_hash::FxHashSet;

use super::compile::{kept, program, reads_banks};
use super::debug::SessionDebug;
use super::execute::Run;
use super::issue::{Attempt, not_compiled};
use super::places::SplitPlaces;
use super::prepared::{PreparedPlan, Results, SegmentPrograms};
use super::session::Session;
use crate::schedule::{Plan, ScheduleStep};
use crate::{Program, RuntimeError};

/// The result of a node, right after it was computed.
pub struct Observed<'a> {
    /// The plan that is run.
    pub plan: &'a Plan,
    /// The node.
    pub node: NodeId,
    /// The tensor it computed.
    pub tensor: TensorId,
    /// The tensor's bytes, with its own strides.
    pub bytes: &'a [u8],
}

/// Looks at intermediate results of a run, and may end it; for [`SessionDebug::observe`].
///
/// A closure that takes [`Observed`] and returns [`ControlFlow`] is an observer that wants to see everything.
pub trait Observer {
    /// Whether the observer wants to see the result of a node. Asked once for each node that computes something, before
    /// anything runs; nodes between wanted ones stay together, and are fused as always.
    fn wants(&mut self, plan: &Plan, node: NodeId) -> bool {
        let _ = (plan, node);
        true
    }

    /// Looks at a result. [`ControlFlow::Break`] ends the run: nothing after this node is computed, except what other
    /// devices have begun already. If it panics, the run has failed: inputs must be set again.
    fn observe(&mut self, observed: Observed<'_>) -> ControlFlow<()>;
}

impl<F: FnMut(Observed<'_>) -> ControlFlow<()>> Observer for F {
    fn observe(&mut self, observed: Observed<'_>) -> ControlFlow<()> {
        self(observed)
    }
}

/// How an observed run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum ObservedRun {
    /// All nodes were computed.
    Finished,
    /// The observer ended the run. Outputs cannot be read; states may have been written by nodes before this one.
    /// Inputs keep their values.
    Stopped {
        /// The node after which the run ended.
        node: NodeId,
    },
}

impl SessionDebug<'_> {
    /// Runs the current plan with the inputs that are set, and shows an observer the results that it wants to see. Slower
    /// than [`Session::run`], because the host waits for each of them; with the same results, unless a backend computes
    /// fused nodes differently.
    pub fn observe(&mut self, observer: &mut dyn Observer) -> Result<ObservedRun, RuntimeError> {
        let session = &mut *self.session;
        let current = session.ready()?;
        session.wait()?;
        session.plans.get_mut(current)?.check_weights()?;
        let plan = session.plans.get(current)?.plan.clone();
        let wanted = wanted(&plan, observer);
        let attempt = Attempt::new(session);
        let observed = run(attempt.session, current, &wanted, observer)?;
        attempt.end();
        if let ObservedRun::Stopped { .. } = observed {
            self.session.wait()?;
            self.session.plans.get_mut(current)?.results = Results::Gone;
        }
        Ok(observed)
    }
}

fn run(
    session: &mut Session,
    current: usize,
    wanted: &FxHashSet<NodeId>,
    observer: &mut dyn Observer,
) -> Result<ObservedRun, RuntimeError> {
    let plan = session.plans.get(current)?.plan.clone();
    let uploads = session.swap_banks(current)?;
    let PreparedPlan { weights, compiled, segments, inputs, results, .. } = session.plans.get_mut(current)?;
    let compiled = compiled.as_mut().ok_or_else(not_compiled)?;
    let places = session.memory.places(&plan, weights);
    let bank = inputs.bank;
    let mut run = Run { plan: &plan, compiled, lanes: &mut session.lanes, bank, uploads, clock: None };
    let mut segments = Segments { places: &places, programs: segments, kept: kept(&plan), bank };
    *results = Results::Present;
    run.begin()?;
    let mut bytes = Vec::new();
    for step in plan.order() {
        let number = match *step {
            ScheduleStep::Copy(copy) => {
                run.copy(copy)?;
                continue;
            }
            ScheduleStep::Prefetch(copy) => {
                run.prefetch(copy)?;
                continue;
            }
            ScheduleStep::Split(split) => split,
        };
        let nodes = plan.splits().nodes_of(number);
        let shown = |node: &NodeId| {
            // A mirrored write is shown once, on the backend of the state.
            wanted.contains(node) && !plan.splits().is_mirrored_write(*node, number)
        };
        if !nodes.iter().any(shown) {
            run.split(number)?;
            continue;
        }
        let Some(split) = plan.splits().splits.get(number) else { continue };
        run.wait_for_copies(number)?;
        for segment in cut(nodes, shown) {
            let Some(last) = nodes[segment.clone()].last().copied() else { continue };
            let name = || plan.graph().node_name(last);
            let program = segments.program(number, split.backend, segment)?;
            run.run_segment(number, program).map_err(|error| error.in_split(number, name))?;
            let Some(tensor) = plan.graph().get_node(last).map(|n| n.output()).filter(|_| shown(&last))
            else {
                continue;
            };
            let Some(place) = places.place(tensor, split.backend, bank) else { continue };
            bytes.resize(place.region.bytes, 0);
            let read = run.read(number, &place.region, &mut bytes);
            read.map_err(|error| error.in_split(number, name))?;
            if observer.observe(Observed { plan: &plan, node: last, tensor, bytes: &bytes }).is_break() {
                return Ok(ObservedRun::Stopped { node: last });
            }
        }
        run.finish_split(number)?;
    }
    session.wait().map(|()| ObservedRun::Finished)
}

fn wanted(plan: &Plan, observer: &mut dyn Observer) -> FxHashSet<NodeId> {
    let mut nodes = plan.splits().nodes.clone();
    // A mirrored write is there twice.
    nodes.sort_unstable();
    nodes.dedup();
    nodes.into_iter().filter(|node| observer.wants(plan, *node)).collect()
}

/// The segments of a split: each ends with a node that is shown, but for the last.
fn cut(nodes: &[NodeId], shown: impl Fn(&NodeId) -> bool) -> Vec<Range<usize>> {
    let mut segments = Vec::new();
    let mut start = 0;
    for (at, node) in nodes.iter().enumerate() {
        if shown(node) || at + 1 == nodes.len() {
            segments.push(start..at + 1);
            start = at + 1;
        }
    }
    segments
}

/// Compiles segments, and keeps their programs.
struct Segments<'s> {
    places: &'s SplitPlaces<'s>,
    programs: &'s mut SegmentPrograms,
    /// For each storage whether it is needed after the split that computes it.
    kept: Vec<bool>,
    bank: usize,
}

impl Segments<'_> {
    fn program(
        &mut self,
        split: usize,
        backend: usize,
        segment: Range<usize>,
    ) -> Result<&mut dyn Program, RuntimeError> {
        let plan = self.places.plan;
        let (graph, nodes) = (plan.graph(), plan.splits().nodes_of(split));
        let bank = if reads_banks(plan, backend, &nodes[segment.clone()]) { self.bank } else { 0 };
        let key = (split, segment.start, segment.end, bank);
        if !self.programs.contains_key(&key) {
            // Observers may want other nodes each time: what was compiled for all of them is not kept for ever.
            if self.programs.len() > 2 * plan.splits().nodes.len() {
                self.programs.clear();
            }
            let storage = |id: TensorId| graph.get(id).map(|tensor| tensor.storage());
            let needed: FxHashSet<TensorId> = nodes[segment.end..]
                .iter()
                .flat_map(|node| graph.inputs(*node).iter().copied())
                .chain(nodes[segment.end - 1..segment.end].iter().map(|node| graph[*node].output()))
                .filter_map(storage)
                .collect();
            let kept = |tensor: TensorId| {
                storage(tensor).is_none_or(|storage| {
                    needed.contains(&storage) || self.kept.get(storage.index()).is_none_or(|kept| *kept)
                })
            };
            let nodes = &nodes[segment.clone()];
            let compiled = program(self.places, backend, nodes, (split, bank), &kept);
            let name = || nodes.last().map_or_else(String::new, |node| graph.node_name(*node));
            self.programs.insert(key, compiled.map_err(|error| error.in_split(split, name))?);
        }
        let program = self.programs.get_mut(&key);
        Ok(&mut **program.ok_or_else(|| RuntimeError::internal("a segment has no program"))?)
    }
}
