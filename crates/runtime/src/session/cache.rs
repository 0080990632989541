//! The plans of a session, found by the caller's key or by the graph's fingerprint.

use std::sync::Arc;

use quadriga_graph::{Graph, TensorId, TensorKind};

use super::compile::{Compiled, Site};
use super::inputs::Inputs;
use super::outputs::{OutputPlace, outputs};
use super::weights::{Weights, missing};
use super::{Progress, Session};
use crate::RuntimeError;
use crate::schedule::{IntoGraph, Plan};

/// The caller's name for a graph: a few numbers, such as tokens in the batch and the bucket of the cache's length.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Key(pub [u64; 4]);

impl From<u64> for Key {
    fn from(a: u64) -> Key {
        Key([a, 0, 0, 0])
    }
}

impl From<(usize, usize)> for Key {
    fn from((a, b): (usize, usize)) -> Key {
        Key([a as u64, b as u64, 0, 0])
    }
}

impl From<(usize, usize, usize)> for Key {
    fn from((a, b, c): (usize, usize, usize)) -> Key {
        Key([a as u64, b as u64, c as u64, 0])
    }
}

/// A plan of a session.
pub(crate) struct Entry {
    pub(crate) plan: Plan,
    pub(crate) weights: Weights,
    pub(crate) inputs: Inputs,
    pub(crate) outputs: Vec<OutputPlace>,
    pub(crate) compiled: Option<Compiled>,
    /// One program for each node, made when somebody watches.
    pub(crate) singles: Option<super::observe::Singles>,
    /// Whether all weights have their bytes.
    pub(crate) complete: bool,
    pub(crate) results: Results,
}

/// What became of the results of an entry's latest run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Results {
    /// There was none.
    None,
    /// They are in the arenas, or will be when the run is done.
    There,
    /// Something else has their memory, or the run failed.
    Gone,
}

impl Session {
    /// Makes the graph with this key the current one. The first time it is built, planned and compiled; afterwards it
    /// is found again, and nothing is allocated or asked of a backend.
    pub fn prepare<E: std::fmt::Display>(
        &mut self,
        key: impl Into<Key>,
        build: impl FnOnce() -> Result<Graph, E>,
    ) -> Result<(), RuntimeError> {
        self.prepare_with(key, build, &mut |_| {})
    }

    /// As [`Session::prepare`], telling of the bytes of weights that are loaded.
    pub fn prepare_with<E: std::fmt::Display>(
        &mut self,
        key: impl Into<Key>,
        build: impl FnOnce() -> Result<Graph, E>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), RuntimeError> {
        let key = key.into();
        let entry = match self.by_key.get(&key) {
            Some(entry) => *entry,
            None => {
                let graph = build().map_err(|error| RuntimeError::Build(error.to_string()))?;
                let entry = self.enter_graph(graph, progress)?;
                self.by_key.insert(key, entry);
                entry
            }
        };
        self.select(entry)
    }

    /// Makes a graph the current one. One with the same fingerprint that was seen before is found again.
    pub fn use_graph(&mut self, graph: impl IntoGraph) -> Result<(), RuntimeError> {
        let entry = self.enter_graph(graph, &mut |_| {})?;
        self.select(entry)
    }

    /// Adds a plan made by the session's scheduler, or one with the same backends, and makes it the current one.
    pub fn add(&mut self, plan: &Plan, progress: &mut dyn FnMut(Progress)) -> Result<(), RuntimeError> {
        if !plan.scheduler().same_backends(&self.scheduler) {
            return Err(RuntimeError::ForeignPlan);
        }
        let entry = self.enter_plan(plan.clone(), progress)?;
        self.select(entry)
    }

    fn enter_graph(
        &mut self,
        graph: impl IntoGraph,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<usize, RuntimeError> {
        let graph = graph.into_graph();
        if let Some(entry) = self.known(&graph) {
            return Ok(entry);
        }
        let plan =
            self.scheduler.plan_fixed(graph, |state| self.states.get(state).map(|state| state.backend))?;
        self.enter_plan(plan, progress)
    }

    /// An entry for an equal graph: the same fingerprint, and constants with the same bytes.
    fn known(&self, graph: &Graph) -> Option<usize> {
        let entries = self.by_fingerprint.get(&graph.fingerprint())?;
        entries.iter().copied().find(|entry| {
            let Some(entry) = self.entries.get(*entry) else { return false };
            graph.of_kind(TensorKind::Constant).all(|id| {
                match (graph.data(id), entry.plan.graph().data(id)) {
                    (Some(a), Some(b)) => a.same(b) || a.bytes() == b.bytes(),
                    _ => false,
                }
            })
        })
    }

    fn enter_plan(&mut self, plan: Plan, progress: &mut dyn FnMut(Progress)) -> Result<usize, RuntimeError> {
        let (weights, moved) = self.store.load(&plan, progress)?;
        if moved {
            self.wait()?;
            for entry in &mut self.entries {
                if self.store.refresh(&entry.plan, &mut entry.weights) {
                    entry.forget_places();
                }
            }
        }
        self.states.add(&plan)?;
        let index = self.entries.len();
        self.by_fingerprint.entry(plan.graph().fingerprint()).or_default().push(index);
        self.entries.push(Entry {
            plan,
            complete: missing(&weights).is_none(),
            weights,
            inputs: Inputs::default(),
            outputs: Vec::new(),
            compiled: None,
            singles: None,
            results: Results::None,
        });
        Ok(index)
    }

    /// Makes an entry the current one: waits for another plan's work, and compiles if need be.
    fn select(&mut self, entry: usize) -> Result<(), RuntimeError> {
        if self.in_flight.is_some_and(|other| other != entry) {
            self.wait()?;
        }
        self.current = Some(entry);
        self.compile(entry)
    }

    /// The current entry, compiled.
    pub(super) fn ready(&mut self) -> Result<usize, RuntimeError> {
        let current = self.current.ok_or(RuntimeError::NoPlan)?;
        self.compile(current)?;
        Ok(current)
    }

    fn compile(&mut self, index: usize) -> Result<(), RuntimeError> {
        let Some(entry) = self.entries.get(index) else { return Err(RuntimeError::NoPlan) };
        let generation = self.arenas.generation;
        if entry.compiled.as_ref().is_some_and(|compiled| compiled.generation == generation) {
            return Ok(());
        }
        self.wait()?;
        self.make_room(index)?;
        let Some(entry) = self.entries.get_mut(index) else { return Err(RuntimeError::NoPlan) };
        let (arenas, states, weights) = (&self.arenas, &self.states, &entry.weights);
        let site = Site { plan: &entry.plan, arenas, states, weights };
        let places = outputs(&site)?;
        let inputs = Inputs::new(&entry.plan, |tensor, backend, bank| {
            site.place(tensor, backend, bank).map(|place| place.region)
        });
        let compiled = Compiled::new(&site)?;
        entry.compiled = Some(compiled);
        entry.outputs = places;
        entry.inputs = inputs;
        entry.results = Results::None;
        Ok(())
    }

    /// Sees to it that a plan fits the arenas. Where the old and the new cannot be held side by side, the old one goes
    /// first, with all that was compiled for it.
    fn make_room(&mut self, index: usize) -> Result<(), RuntimeError> {
        let Some(plan) = self.entries.get(index).map(|entry| entry.plan.clone()) else { return Ok(()) };
        if self.arenas.fits(&plan) {
            return Ok(());
        }
        let grown = self.arenas.grow(&plan);
        let stale = self.arenas.generation;
        for entry in &mut self.entries {
            if grown.is_err() || entry.compiled.as_ref().is_some_and(|c| c.generation != stale) {
                entry.forget_places();
            }
        }
        if grown.is_ok() {
            return Ok(());
        }
        self.arenas.release();
        self.arenas.grow(&plan)
    }

    /// Gives the bytes of a weight that its graph did not carry.
    pub fn set_weight(&mut self, name: &str, data: &[u8]) -> Result<(), RuntimeError> {
        self.wait()?;
        let found = self.entries.iter().find_map(|entry| {
            let graph = entry.plan.graph();
            let id = graph
                .leaf(name)
                .filter(|id| graph.get(*id).is_some_and(|t| t.kind() == TensorKind::Weight))?;
            Some((Arc::clone(graph), id))
        });
        let Some((graph, id)) = found else {
            let name = name.to_owned();
            return Err(RuntimeError::UnknownName { what: "weight", name, known: Vec::new() });
        };
        let Some(tensor) = graph.get(id) else { return Err(RuntimeError::NoPlan) };
        if data.len() != tensor.bytes() {
            let (name, expected, found) = (name.to_owned(), tensor.bytes(), data.len());
            return Err(RuntimeError::WrongSize { name, expected, found });
        }
        self.store.set(self.scheduler.backends(), name, tensor, data)
    }

    /// Before bytes of an entry go into the arenas, which all entries share: what others have there is lost.
    pub(super) fn occupy(&mut self, index: usize) {
        if self.occupant != Some(index) {
            let others = self.entries.iter_mut().enumerate().filter(|(other, _)| *other != index);
            others.for_each(|(_, entry)| entry.lose_values());
            self.occupant = Some(index);
        }
    }

    /// An error if a weight of an entry has no bytes yet.
    pub(super) fn check_weights(&mut self, index: usize) -> Result<(), RuntimeError> {
        let Some(entry) = self.entries.get_mut(index).filter(|entry| !entry.complete) else { return Ok(()) };
        let bare: Option<TensorId> = missing(&entry.weights);
        entry.complete = bare.is_none();
        match bare {
            Some(id) => Err(RuntimeError::NotSet { what: "weight", name: entry.plan.graph().name(id) }),
            None => Ok(()),
        }
    }
}

impl Entry {
    /// Forgets everything that points into the arenas.
    fn forget_places(&mut self) {
        self.compiled = None;
        self.singles = None;
        self.outputs.clear();
        self.inputs = Inputs::default();
        self.results = Results::None;
    }

    /// What the entry had in the arenas is no longer there: inputs must be set again, and results are gone.
    pub(super) fn lose_values(&mut self) {
        self.inputs.forget();
        if self.results == Results::There {
            self.results = Results::Gone;
        }
    }
}
