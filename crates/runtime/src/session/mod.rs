//! A session: memory, compiled splits and queues for the plans of one model, and the running of them.
//!
//! One tensor's way: [`inputs`] puts the caller's bytes into the arena; [`execute`] hands out copies and splits in the
//! plan's order; [`outputs`] reads results back, [`fetch`] while the next run is under way. Before the first run
//! [`weights`] and [`state`] give the lasting tensors their memory, [`arena`] the passing ones, and [`compile`] turns
//! splits into programs. [`cache`] finds the plan again.

mod arena;
mod cache;
mod compile;
mod element;
mod execute;
mod fetch;
mod inputs;
mod journey;
mod lane;
mod observe;
mod outputs;
mod state;
mod timing;
mod weights;

use std::sync::Arc;

use quadriga_graph::Fingerprint;
use rustc_hash::FxHashMap;

pub use cache::Key;
pub use element::{Element, Values};
pub use fetch::Fetched;
pub use observe::Observed;
pub(crate) use weights::lay_out;
pub use weights::{Progress, WeightStore};

use self::arena::Arenas;
use self::cache::{Entry, Results};
use self::execute::Run;
use self::fetch::Fetches;
use self::lane::Lane;
use self::state::States;
use crate::schedule::{Plan, Scheduler};
use crate::{Buffer, RuntimeError};

/// Runs plans: owns their memory, compiled splits and queues.
///
/// All graphs of one model run in one session: they share weights and state by name and one arena per backend. Each is
/// planned once and found again by the caller's [`Key`] or by its fingerprint; the one used last is the current one,
/// and [`set`](Session::set), [`run`](Session::run) and [`read`](Session::read) refer to it. Inputs keep their values,
/// and results stay, until another graph is given inputs or run.
///
/// After an error the session can be used further: inputs must be set again, results are gone, and a state that the
/// failed run was writing may hold some of the new values. If a device is lost, every later use says so.
pub struct Session {
    scheduler: Scheduler,
    lanes: Vec<Lane>,
    store: Arc<WeightStore>,
    states: States,
    arenas: Arenas,
    entries: Vec<Entry>,
    by_key: FxHashMap<Key, usize>,
    by_fingerprint: FxHashMap<Fingerprint, Vec<usize>>,
    current: Option<usize>,
    /// The plan that was started last, if its work may still be under way.
    in_flight: Option<usize>,
    /// The plan whose inputs and results are in the arenas.
    occupant: Option<usize>,
    fetches: Fetches,
}

impl Session {
    /// A session without plans, on the backends of a scheduler. The scheduler's placements by name hold for every graph
    /// that is [prepared](Session::prepare); its pins, which name tensors of one graph, do not.
    pub fn new(scheduler: &Scheduler) -> Result<Session, RuntimeError> {
        let mut lanes = Vec::new();
        for (backend, asynchronous) in scheduler.backends().iter().zip(scheduler.asynchronous()) {
            let lane = Lane::new(backend, *asynchronous);
            lanes.push(lane.map_err(RuntimeError::device)?);
        }
        if lanes.is_empty() {
            return Err(RuntimeError::NoBackends);
        }
        Ok(Session {
            store: scheduler.weight_store(),
            scheduler: scheduler.without_pins(),
            arenas: Arenas::new(scheduler.backends()),
            lanes,
            states: States::default(),
            entries: Vec::new(),
            by_key: FxHashMap::default(),
            by_fingerprint: FxHashMap::default(),
            current: None,
            in_flight: None,
            occupant: None,
            fetches: Fetches::default(),
        })
    }

    /// The current plan.
    pub fn plan(&self) -> Option<&Plan> {
        self.current.and_then(|current| self.entries.get(current)).map(|entry| &entry.plan)
    }

    /// Sets inputs, runs the current plan, and waits for the end.
    pub fn run(&mut self, inputs: &[(&str, &dyn Values)]) -> Result<(), RuntimeError> {
        for (name, values) in inputs {
            self.set(name, *values)?;
        }
        self.start()?;
        self.wait()
    }

    /// Starts the current plan. Asynchronous devices go on working when this returns: the inputs of the next run may
    /// be set meanwhile. Failures on such devices show in [`Session::wait`], or when a result is read.
    pub fn start(&mut self) -> Result<(), RuntimeError> {
        let current = self.ready()?;
        self.check_weights(current)?;
        let begun = self.begin(current);
        if begun.is_err() {
            self.recover();
        }
        begun
    }

    fn begin(&mut self, current: usize) -> Result<(), RuntimeError> {
        let fresh_inputs = self.turn_inputs(current)?;
        let Some(entry) = self.entries.get_mut(current) else { return Err(RuntimeError::NoPlan) };
        let Some(compiled) = &mut entry.compiled else { return Err(RuntimeError::NoPlan) };
        self.in_flight = Some(current);
        entry.results = Results::There;
        let (plan, bank) = (&entry.plan, entry.inputs.bank);
        Run { plan, compiled, lanes: &mut self.lanes, bank, fresh_inputs, timing: None }.issue()
    }

    /// Waits until everything that was started is done.
    pub fn wait(&mut self) -> Result<(), RuntimeError> {
        let mut first = Ok(());
        for lane in &mut self.lanes {
            let done = lane.synchronize();
            first = first.and(done.map_err(RuntimeError::device));
        }
        let first = first.map_err(|error| self.blame(error));
        if first.is_err() {
            self.recover();
        }
        self.in_flight = None;
        first
    }

    /// Whether everything that was started is done, so that [`Session::wait`] and reading a result need not wait. A
    /// failure on a device shows here, too.
    pub fn is_done(&mut self) -> Result<bool, RuntimeError> {
        let entry = self.in_flight.and_then(|entry| self.entries.get(entry));
        let Some(compiled) = entry.and_then(|entry| entry.compiled.as_ref()) else { return Ok(true) };
        let copies = compiled.copies.iter().map(|copy| &copy.done);
        for event in compiled.done.iter().chain(copies).flatten() {
            match event.is_done() {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                // Waiting tells what failed, and puts things in order.
                Err(_) => return self.wait().map(|()| true),
            }
        }
        Ok(true)
    }

    /// Says in which split a device failed: the first of its lane that is not done.
    fn blame(&self, error: RuntimeError) -> RuntimeError {
        let RuntimeError::Device { backend: name, .. } = &error else { return error };
        let entry = self.in_flight.and_then(|entry| self.entries.get(entry));
        let Some((entry, compiled)) = entry.and_then(|e| e.compiled.as_ref().map(|c| (e, c))) else {
            return error;
        };
        let splits = entry.plan.splits();
        let lane = self.lanes.iter().position(|lane| lane.backend.name() == name).unwrap_or(usize::MAX);
        let failed =
            |event: &Option<Arc<dyn crate::Event>>| event.as_ref().is_some_and(|e| e.is_done().is_err());
        let name_of = |split: usize| {
            let first = splits.nodes_of(split).first();
            first.map_or_else(String::new, |node| entry.plan.graph().node_name(*node))
        };
        for (copy, moving) in splits.copies.iter().zip(&compiled.copies) {
            if (copy.from == lane || copy.to == lane) && failed(&moving.done) {
                let tensor = quadriga_graph::TensorId::from_index(copy.tensor);
                return error.in_split(copy.reader, || entry.plan.graph().name(tensor));
            }
        }
        let mine = splits.lanes.get(lane).into_iter().flatten().map(|split| *split as usize);
        let mut first = None;
        for split in mine {
            if compiled.done.get(split).is_some_and(failed) {
                return error.in_split(split, || name_of(split));
            }
            first.get_or_insert(split);
        }
        match first {
            Some(split) => error.in_split(split, || name_of(split)),
            None => error,
        }
    }

    /// After a failure: waits for whatever is under way, and forgets inputs that may not have arrived, and results.
    fn recover(&mut self) {
        for lane in &mut self.lanes {
            // Failures of work that is given up are of no interest.
            let _ = lane.synchronize();
        }
        self.in_flight = None;
        self.fetches.forget();
        for entry in &mut self.entries {
            entry.lose_values();
            if let Some(compiled) = &mut entry.compiled {
                compiled.forget_events();
            }
        }
    }

    /// Sets every state to zero.
    pub fn clear_state(&mut self) -> Result<(), RuntimeError> {
        self.wait()?;
        self.states.clear()
    }

    /// The buffers of a backend's arena, for tools that look inside.
    pub fn arena(&self, backend: usize) -> &[Arc<dyn Buffer>] {
        self.arenas.buffers(backend)
    }

    /// Bytes that the session holds on a backend for state and arena; weights are shared and not counted.
    pub fn bytes(&self, backend: usize) -> u64 {
        let arena: u64 = self.arena(backend).iter().map(|buffer| buffer.bytes() as u64).sum();
        arena + self.states.bytes(backend)
    }
}

impl Drop for Session {
    /// Waits for work that is under way.
    fn drop(&mut self) {
        for lane in &mut self.lanes {
            let _ = lane.synchronize();
        }
    }
}
