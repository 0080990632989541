//! The session: plans in memory, and the running of them.

use std::sync::Arc;

use quadriga_graph::{Graph, TensorKind};

use super::binding_table::check_readers;
use super::element::{Element, Values};
use super::lane::Lane;
use super::memory::SessionMemory;
use super::outputs::find;
use super::pending_read::{PendingRead, PendingReads};
use super::plan_cache::PlanCache;
use super::plan_key::PlanKey;
use super::prepared::PreparedPlan;
use super::slice_uploads::SliceUploads;
use super::tensor_ref::TensorRef;
use crate::allocation_lock::lock_allocation;
use crate::schedule::{IntoGraph, Plan, Scheduler};
use crate::weights::Progress;
use crate::{Backend, RuntimeError};

/// Runs plans: owns their memory, compiled splits and queues.
///
/// All graphs of one model run in one session: they share one arena per backend, states by name, and weights that have
/// the same data. Each graph is planned once and found again by the caller's [`PlanKey`] or by the graph itself; the one
/// used last is the *current* one, which [`set`](Session::set), [`run`](Session::run) and [`read`](Session::read) refer
/// to. Of many graphs the session keeps those used last (see [`PlanLimits`](crate::PlanLimits)). Inputs keep their values, and results can be read, until another graph is given inputs or run.
///
/// After an error the session can be used further: inputs must be set again, results are gone, and a state that the
/// failed run was writing may have some of the new values. If a device is lost, every later call that needs it fails.
///
/// ```
/// use quadriga_graph::{BuildError, DType, Graph, GraphBuilder};
/// use quadriga_runtime::{ModelId, PlanKey, Scheduler, Session};
///
/// fn sum(rows: usize) -> Result<Graph, BuildError> {
///     let g = GraphBuilder::new();
///     let x = g.input("x", DType::F32, [rows, 2]);
///     g.output("y", x.sum_rows());
///     g.finish()
/// }
///
/// let mut session = Session::new(&Scheduler::new(quadriga_cpu::Backend::new()?))?;
/// let model = ModelId::new();
/// for rows in [1, 3, 1] {
///     let key = PlanKey::of(&model, [rows as u64, 0, 0, 0]);
///     session.prepare(key, || sum(rows))?; // built, planned and compiled once for each key
///     session.run(&[("x", &vec![1.5f32; 2 * rows])])?;
///     assert_eq!(session.read::<f32>("y")?, vec![3.0; rows]);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Session {
    scheduler: Scheduler,
    pub(super) lanes: Vec<Lane>,
    pub(super) memory: SessionMemory,
    pub(super) plans: PlanCache,
    /// The plan that was started last, if its run may still be in flight.
    pub(super) in_flight: Option<usize>,
    /// The plan that work was queued for last, a run or not, unless everything was waited for since.
    pub(super) queued: Option<usize>,
    pub(super) reads: PendingReads,
    pub(super) uploads: SliceUploads,
}

impl Plan {
    /// A session that runs this plan: allocates, loads weights, compiles.
    pub fn session(&self) -> Result<Session, RuntimeError> {
        self.session_with(&mut |_| {})
    }

    /// As [`Plan::session`], with a callback for the progress of loading weights. It may use the scheduler,
    /// and load weights in another session.
    pub fn session_with(&self, progress: &mut dyn FnMut(Progress)) -> Result<Session, RuntimeError> {
        let mut session = Session::new(self.scheduler())?;
        let plan = session.insert(self.clone(), progress)?;
        session.select(plan)?;
        Ok(session)
    }
}

/// Preparing plans.
impl Session {
    /// A session without plans, on the backends of a scheduler. The scheduler's placement rule is used for every graph
    /// that is [prepared](Session::prepare), and so are pins by name; its other pins, which are ids of one graph, are not.
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
            scheduler: scheduler.without_pins(),
            memory: SessionMemory::new(scheduler),
            lanes,
            plans: PlanCache::default(),
            in_flight: None,
            queued: None,
            reads: PendingReads::new(),
            uploads: SliceUploads::default(),
        })
    }

    /// Makes the graph with this key the current one. The first time it is built, planned and compiled; afterwards it is
    /// found by the key, and nothing is planned or compiled unless the graph was forgotten meanwhile. With a key [of a
    /// model](PlanKey::of), `build` is not called then, and nothing is allocated. Numbers alone do not say which weights the graph has:
    /// it is built each time, as it is with [`Scheduler::check_plans`], and another graph than the key's is an error.
    ///
    /// Graphs of one [`ModelId`](crate::ModelId) have the same weights: one that has a weight with other bytes is an error, too.
    pub fn prepare<E: std::fmt::Display>(
        &mut self,
        key: impl Into<PlanKey>,
        build: impl FnOnce() -> Result<Graph, E>,
    ) -> Result<(), RuntimeError> {
        self.prepare_with(key, build, &mut |_| {})
    }

    /// As [`Session::prepare`], with a callback for the progress of loading weights. It may use the scheduler,
    /// and load weights in another session.
    pub fn prepare_with<E: std::fmt::Display>(
        &mut self,
        key: impl Into<PlanKey>,
        build: impl FnOnce() -> Result<Graph, E>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), RuntimeError> {
        let key = key.into();
        let built = || build().map_err(|error| RuntimeError::Build(error.to_string()));
        if let Some(plan) = self.plans.by_key(key) {
            if key.model.is_none() || self.scheduler.checks_plans() {
                self.plans.check_key(key, plan, &built()?)?;
            }
            return self.select(plan);
        }
        let graph = built()?;
        self.plans.check_model(key, &graph)?;
        let plan = self.insert_graph(graph, progress)?;
        self.select(plan)?;
        self.plans.set_key(key, plan);
        Ok(())
    }

    /// Makes a graph the current one. An equal graph that was used before is found again: one with the same fingerprint,
    /// and the same bytes of weights and constants. (Graphs whose weights share one [`Data`](quadriga_graph::Data) are
    /// compared by address, others byte by byte.)
    pub fn use_graph(&mut self, graph: impl IntoGraph) -> Result<(), RuntimeError> {
        let plan = self.insert_graph(graph, &mut |_| {})?;
        self.select(plan)
    }

    /// Makes a plan the current one. It must come from the session's scheduler, or one with the same backends.
    pub fn use_plan(&mut self, plan: &Plan) -> Result<(), RuntimeError> {
        if !plan.scheduler().same_backends(&self.scheduler) {
            return Err(RuntimeError::ForeignPlan);
        }
        let known = self.plans.position(|prepared| prepared.plan.is_same(plan));
        let plan = match known {
            Some(known) => known,
            None => self.insert(plan.clone(), &mut |_| {})?,
        };
        self.select(plan)
    }

    /// The current plan.
    pub fn plan(&self) -> Option<&Plan> {
        let current = self.plans.current().ok()?;
        self.plans.get(current).ok().map(|prepared| &prepared.plan)
    }

    /// Sets the bytes of a weight that its graph has no data for, given as a file would have them.
    ///
    /// All graphs of this session share such a weight by name, also those that are prepared later; other sessions are not
    /// affected, even of the same plan. The session keeps a copy of the bytes, for graphs that need another layout. A
    /// weight that has data cannot be set.
    pub fn set_weight(&mut self, name: &str, bytes: &[u8]) -> Result<(), RuntimeError> {
        self.wait()?;
        let Some(expected) = self.memory.weights.bytes_to_set(name) else {
            let has_data = self.plans.iter().any(|prepared| {
                let graph = prepared.plan.graph();
                let tensor = graph.leaf(name).and_then(|id| graph.get(id));
                tensor.is_some_and(|tensor| tensor.kind() == TensorKind::Weight)
            });
            let name = name.to_owned();
            return Err(match has_data {
                true => RuntimeError::WrongKind { name, expected: "a weight without data" },
                false => RuntimeError::UnknownName { what: "weight", name, known: Vec::new() },
            });
        };
        if bytes.len() != expected {
            let (name, found) = (name.to_owned(), bytes.len());
            return Err(RuntimeError::WrongSize { name, expected, found });
        }
        self.memory.weights.set(self.scheduler.backends(), name, bytes)
    }

    /// Sets every state to zero.
    pub fn clear_state(&mut self) -> Result<(), RuntimeError> {
        self.wait()?;
        self.memory.states.clear()
    }

    /// The backends, in order of preference.
    pub fn backends(&self) -> &[Arc<dyn Backend>] {
        self.scheduler.backends()
    }

    /// Whether every plan that was used is compiled still. Memory that plans share grows for the largest one, and those from
    /// before that are compiled again when they are used next, since programs hold addresses.
    pub fn is_compiled(&self) -> bool {
        let generation = self.memory.arenas.generation;
        let current =
            |plan: &PreparedPlan| plan.compiled.as_ref().is_some_and(|c| c.generation == generation);
        self.plans.iter().all(current)
    }

    /// The session's memory, for tools that look inside.
    pub fn memory(&self) -> &SessionMemory {
        &self.memory
    }

    fn insert_graph(
        &mut self,
        graph: impl IntoGraph,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<usize, RuntimeError> {
        let graph = graph.into_graph();
        if let Some(plan) = self.plans.find(&graph) {
            return Ok(plan);
        }
        let bound = self.memory.bindings.of(&graph)?;
        let states = &self.memory.states;
        let plan =
            self.scheduler.plan_with_states(graph, |name| states.get(name).map(|s| s.backend), &bound)?;
        check_readers(&plan)?;
        self.insert(plan, progress)
    }

    fn insert(&mut self, plan: Plan, progress: &mut dyn FnMut(Progress)) -> Result<usize, RuntimeError> {
        // Before anything changes: a failure of the run in flight must not leave weights half replaced.
        self.wait()?;
        self.memory.states.check(&plan)?;
        let reads = plan.weight_reads();
        let loaded = self.memory.weights.load(plan.graph(), plan.backends(), reads, progress)?;
        let new_states = self.memory.states.add(&plan)?;
        // Nothing fails from here on.
        self.memory.weights.keep(&loaded);
        for prepared in self.plans.iter_mut() {
            if loaded.replace_in(&mut prepared.weights) {
                prepared.forget_places();
            }
        }
        Ok(self.plans.insert(PreparedPlan::new(plan, loaded.weights, new_states)))
    }

    /// Makes a plan the current one: waits for everything queued for another plan, whose memory it shares, and compiles if
    /// need be. After an error the
    /// current plan is what it was, and a new plan is dropped.
    fn select(&mut self, plan: usize) -> Result<(), RuntimeError> {
        let is_new = !self.plans.get(plan)?.proven;
        let others_done = if self.queued.is_some_and(|other| other != plan) { self.wait() } else { Ok(()) };
        let compiled = others_done.and_then(|()| self.compile(plan));
        match &compiled {
            Ok(()) => self.plans.set_current(plan),
            Err(_) if is_new => {
                let new_states = std::mem::take(&mut self.plans.get_mut(plan)?.new_states);
                self.plans.remove(plan);
                self.memory.states.remove(&new_states);
                self.memory.weights.prune();
            }
            Err(_) => {}
        }
        if is_new {
            self.plans.evict();
        }
        compiled
    }

    /// The current plan, compiled.
    pub(super) fn ready(&mut self) -> Result<usize, RuntimeError> {
        let current = self.plans.current()?;
        self.compile(current)?;
        Ok(current)
    }

    fn compile(&mut self, plan: usize) -> Result<(), RuntimeError> {
        let prepared = self.plans.get(plan)?;
        let generation = self.memory.arenas.generation;
        if prepared.compiled.as_ref().is_some_and(|compiled| compiled.generation == generation) {
            return Ok(());
        }
        self.wait()?;
        self.make_room(plan)?;
        self.plans.get_mut(plan)?.compile(&self.memory)
    }

    /// Lets the arenas grow so that a plan fits. Where the devices cannot hold the old and the new buffers side by side,
    /// the old ones are freed first, with all programs that point into them; if the new ones are refused even then, the
    /// old ones are allocated again, before another session can take the memory.
    fn make_room(&mut self, plan: usize) -> Result<(), RuntimeError> {
        let plan = self.plans.get(plan)?.plan.clone();
        let arenas = &mut self.memory.arenas;
        if arenas.fits(&plan) {
            return Ok(());
        }
        let _alone = lock_allocation();
        let grown = arenas.grow(&plan);
        let replace = grown.is_err() && arenas.may_hold(&plan);
        let generation = arenas.generation;
        for prepared in self.plans.iter_mut() {
            let is_stale = prepared.compiled.as_ref().is_some_and(|c| c.generation != generation);
            if replace || is_stale {
                prepared.forget_places();
            }
        }
        if replace { arenas.replace(&plan) } else { grown }
    }
}

/// Running the current plan.
impl Session {
    /// Sets an input, by name or id. It keeps its value for later runs, as long as no other plan of the session is used
    /// between. The bytes are copied before this returns.
    pub fn set<'n, V: Values + ?Sized>(
        &mut self,
        input: impl Into<TensorRef<'n>>,
        values: &V,
    ) -> Result<(), RuntimeError> {
        let current = self.ready()?;
        let prepared = self.plans.get(current)?;
        let (plan, inputs, bytes) = (&prepared.plan, &prepared.inputs, values.bytes());
        let index = inputs.find(plan, input.into())?;
        inputs.check(plan, index, bytes, values.dtype())?;
        self.plans.occupy(current);
        self.queued = Some(current);
        self.plans.get_mut(current)?.inputs.set(index, bytes, &mut self.lanes)
    }

    /// Sets inputs, runs the current plan, and waits for the end.
    pub fn run(&mut self, inputs: &[(&str, &dyn Values)]) -> Result<(), RuntimeError> {
        for (name, values) in inputs {
            self.set(*name, *values)?;
        }
        self.start()?;
        self.wait()
    }

    /// Starts the current plan. Asynchronous devices go on working when this returns: the inputs of the next run may be
    /// set meanwhile. Failures on such devices show in [`Session::wait`], or when a result is read.
    pub fn start(&mut self) -> Result<(), RuntimeError> {
        let current = self.ready()?;
        self.plans.get_mut(current)?.check_weights()?;
        self.issue(current, None).map(|_| ())
    }

    /// Waits until everything that was started is done.
    pub fn wait(&mut self) -> Result<(), RuntimeError> {
        let mut first = Ok(());
        for lane in &mut self.lanes {
            let done = lane.synchronize();
            first = first.and(done.map_err(RuntimeError::device));
        }
        let first = first.map_err(|error| self.locate(error));
        if first.is_err() {
            self.recover();
        }
        self.in_flight = None;
        self.queued = None;
        first
    }

    /// Whether everything that was started is done, so that [`Session::wait`] and reading a result return at once. A
    /// failure on a device shows here, too.
    pub fn is_done(&mut self) -> Result<bool, RuntimeError> {
        let Some(prepared) = self.in_flight.and_then(|plan| self.plans.get(plan).ok()) else {
            return Ok(true);
        };
        let Some(compiled) = &prepared.compiled else { return Ok(true) };
        let copies = compiled.copies.iter().map(|copy| &copy.done);
        let mut states = compiled.done.iter().chain(copies).flatten().map(|event| event.is_done());
        // An event may report its failure only once.
        match states.find(|state| !matches!(state, Ok(true))) {
            None => Ok(true),
            Some(Ok(_)) => Ok(false),
            Some(Err(error)) => Err(self.fail(RuntimeError::device(error))),
        }
    }

    /// Reads an output of the latest run, by name or id; waits for it.
    pub fn read<'n, T: Element>(&mut self, output: impl Into<TensorRef<'n>>) -> Result<Vec<T>, RuntimeError> {
        let output = output.into();
        let bytes = self.plans.get(self.plans.current()?)?.output(output)?.region(0).bytes;
        let mut values = vec![T::default(); bytes / size_of::<T>().max(1)];
        self.read_into(output, &mut values)?;
        Ok(values)
    }

    /// Reads an output of the latest run into memory of the caller, which must have its size; waits for it.
    pub fn read_into<'n, T: Element>(
        &mut self,
        output: impl Into<TensorRef<'n>>,
        into: &mut [T],
    ) -> Result<(), RuntimeError> {
        self.read_bytes(output.into(), T::DTYPE, None, bytemuck::cast_slice_mut(into))
    }
}

/// Overlapping runs: the next run starts before the results of the latest one are at the host. Useful where
/// [`Plan::is_asynchronous`].
impl Session {
    /// Makes an output of the latest run an input of the next one, without waiting for it: the bytes stay on their
    /// device. `false`, and nothing has happened, if the two are not on one device.
    pub fn chain<'o, 'i>(
        &mut self,
        output: impl Into<TensorRef<'o>>,
        input: impl Into<TensorRef<'i>>,
    ) -> Result<bool, RuntimeError> {
        let current = self.plans.current()?;
        let PreparedPlan { plan, inputs, outputs, results, .. } = self.plans.get_mut(current)?;
        let output = find(plan, outputs, output.into())?;
        let input = inputs.find(plan, input.into())?;
        results.check(output)?;
        self.queued = Some(current);
        inputs.chain(plan, input, output, &mut self.lanes)
    }

    /// Starts to read outputs of the latest run, without waiting: they are copied to the host when the run is done, and
    /// runs that are started meanwhile do not change them. [`Session::finish_read`] waits for the bytes. Two reads may be
    /// pending; a third takes the place of the older one.
    pub fn read_async(&mut self, outputs: &[&str]) -> Result<PendingRead, RuntimeError> {
        let current = self.plans.current()?;
        let prepared = self.plans.get(current)?;
        self.queued = Some(current);
        let started = self.reads.start(prepared, outputs, &mut self.lanes);
        if matches!(started, Err(RuntimeError::Device { .. })) {
            self.recover();
        }
        started
    }

    /// Waits for outputs that are being read, and copies their bytes, one output after the other, into `into`. The read must be
    /// one of this session.
    pub fn finish_read(&mut self, read: PendingRead, into: &mut [u8]) -> Result<(), RuntimeError> {
        let finished = self.reads.finish(&read, into);
        match finished {
            Err(error @ RuntimeError::Device { .. }) => Err(self.fail(error)),
            finished => finished,
        }
    }
}

impl Drop for Session {
    /// Waits for work that is in flight.
    fn drop(&mut self) {
        self.uploads.finish();
        for lane in &mut self.lanes {
            let _ = lane.synchronize();
        }
    }
}
