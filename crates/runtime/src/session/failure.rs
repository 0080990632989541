//! Failures of devices: where they happened, and what the session does about them.

use std::sync::Arc;

use quadriga_graph::TensorId;

use super::session::Session;
use crate::{BackendError, Event, RuntimeError};

impl Session {
    /// Recovers from a device's failure; the error with the split in which it happened.
    pub(super) fn fail(&mut self, error: RuntimeError) -> RuntimeError {
        let error = self.locate(error);
        self.recover();
        error
    }

    /// Adds to an error the split in which a device failed: the first of its lane that is not done.
    pub(super) fn locate(&self, error: RuntimeError) -> RuntimeError {
        let RuntimeError::Device { backend: name, .. } = &error else { return error };
        let Some(prepared) = self.in_flight.and_then(|plan| self.plans.get(plan).ok()) else { return error };
        let Some(compiled) = &prepared.compiled else { return error };
        let (graph, splits) = (prepared.plan.graph(), prepared.plan.splits());
        let lane = self.lanes.iter().position(|lane| lane.backend.name() == name).unwrap_or(usize::MAX);
        // A node that reports bad data is named. To ask events would not find it again, and could take the report of
        // another one.
        if let RuntimeError::Device { error: inner, .. } = &error
            && let BackendError::Node { node: name, .. } = &**inner
        {
            let node = graph.node_ids().find(|node| graph.node_name(*node) == *name);
            let split = node.and_then(|node| splits.split_of_node.get(node.index()));
            return match split.filter(|split| **split != u32::MAX) {
                Some(split) => error.clone().in_split(*split as usize, String::new),
                None => error,
            };
        }
        let failed = |event: &Option<Arc<dyn Event>>| event.as_ref().is_some_and(|e| e.is_done().is_err());
        let name_of = |split: usize| {
            let first = splits.nodes_of(split).first();
            first.map_or_else(String::new, |node| graph.node_name(*node))
        };
        for (copy, regions) in splits.copies.iter().zip(&compiled.copies) {
            if (copy.from == lane || copy.to == lane) && failed(&regions.done) {
                return error.in_split(copy.reader, || graph.name(TensorId::from_index(copy.tensor)));
            }
        }
        let mut of_lane = splits.lanes.get(lane).into_iter().flatten().map(|split| *split as usize);
        let failed = of_lane.clone().find(|split| compiled.done.get(*split).is_some_and(failed));
        match failed.or_else(|| of_lane.next()) {
            Some(split) => error.in_split(split, || name_of(split)),
            None => error,
        }
    }

    /// After a failure: waits for everything in flight, and forgets inputs that may not have arrived, and results.
    pub(super) fn recover(&mut self) {
        for lane in &mut self.lanes {
            // The run is given up: later failures of its work are ignored.
            let _ = lane.synchronize();
            lane.renew_start();
        }
        self.in_flight = None;
        self.queued = None;
        self.reads.forget();
        for prepared in self.plans.iter_mut() {
            prepared.lose_values();
            if let Some(compiled) = &mut prepared.compiled {
                compiled.reset_copies();
            }
        }
    }
}
