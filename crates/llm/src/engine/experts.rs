//! The engine's expert cache: slots on devices for experts whose tensors the host has.
//!
//! An expert in a slot is computed by the slot's device while the host computes the others. What is used is observed after
//! each batch, and experts are uploaded in the background: a batch never waits for one, the host computes it meanwhile.

use quadriga_graph::{Data, TensorKind, layer_of};
use quadriga_runtime::{MAX_UPLOADS, Plan, Session, SliceUpload, WeightSlice};

use super::Engine;
use super::expert_cache::{ExpertCacheUse, ExpertResidency, Move};
use crate::models::{EXPERT_SLOTS, EXPERTS_NOT_IN_SLOTS, EXPERTS_ON_HOST, GraphShape, SLOTS_SUFFIX};
use crate::{Error, Model, Result};

/// The most experts that are uploaded in one step.
const MOVES_PER_STEP: usize = MAX_UPLOADS;

/// Slots, what they are filled from, and what is on its way.
pub(super) struct ExpertSlots {
    cache: ExpertResidency,
    /// For each layer, the tensors that have a slice for each expert.
    layers: Vec<Vec<SlotTensor>>,
    in_flight: Vec<(SliceUpload, Move)>,
    /// Experts that arrived for the latest batch. If that fails, the device may have failed to write them.
    fresh: Vec<Move>,
    /// For each layer, the output that has the experts it used.
    outputs: Vec<String>,
    /// The tables and the experts that a layer used; kept to reuse their memory.
    tables: [Vec<i32>; 2],
    used: Vec<i32>,
}

/// A weight whose slices hold experts.
struct SlotTensor {
    name: String,
    /// All experts, as the file has them.
    data: Data,
    bytes: usize,
}

impl ExpertSlots {
    /// Finds the slots of the session's current graph and fills them; `None` if it has none.
    pub(super) fn new(model: &Model, session: &mut Session) -> Result<Option<ExpertSlots>> {
        let Some(plan) = session.plan() else { return Ok(None) };
        let (graph, layers) = (plan.graph(), &model.hyperparameters().layers);
        let experts = layers.iter().filter_map(|layer| layer.experts).map(|experts| experts.count).max();
        let mut tensors: Vec<Vec<SlotTensor>> = layers.iter().map(|_| Vec::new()).collect();
        let mut slots = vec![0; layers.len()];
        for id in graph.of_kind(TensorKind::Weight) {
            let name = graph.name(id);
            let source = name.strip_suffix(SLOTS_SUFFIX).and_then(|source| graph.leaf(source));
            let (Some(source), Some(layer)) = (source, layer_of(&name)) else { continue };
            let (Some(data), Some(own), Some(count)) =
                (graph.data(source), tensors.get_mut(layer), slots.get_mut(layer))
            else {
                continue;
            };
            *count = graph.get(id).and_then(|slots| slots.shape().dims().first().copied()).unwrap_or(0);
            let all = graph.get(source).and_then(|all| all.shape().dims().first().copied()).unwrap_or(0);
            own.push(SlotTensor { name, data: data.clone(), bytes: data.len() / all.max(1) });
        }
        let Some(experts) = experts.filter(|_| slots.iter().any(|count| *count > 0)) else { return Ok(None) };
        let mut own = ExpertSlots {
            cache: ExpertResidency::new(&slots, experts),
            layers: tensors,
            in_flight: Vec::new(),
            fresh: Vec::new(),
            outputs: (0..layers.len()).map(|layer| format!("experts.{layer}")).collect(),
            tables: [Vec::new(), Vec::new()],
            used: Vec::new(),
        };
        for step in own.cache.initial_moves() {
            while !own.upload(session, step)? {
                own.apply(session, true);
            }
        }
        own.apply(session, true);
        own.cache.usage = ExpertCacheUse { slots: own.cache.usage.slots, ..ExpertCacheUse::default() };
        Ok(Some(own))
    }

    /// Starts an upload; `false` if as many as possible are in flight.
    fn upload(&mut self, session: &mut Session, step: Move) -> Result<bool> {
        let tensors = self.layers.get(step.layer).map(Vec::as_slice).unwrap_or_default();
        let mut slices = Vec::with_capacity(tensors.len());
        let mut bytes = 0;
        for tensor in tensors {
            let start = step.expert * tensor.bytes;
            let Some((data, start)) = tensor.data.piece(start, tensor.bytes) else {
                return Err(Error::Expert { tensor: tensor.name.clone(), expert: step.expert });
            };
            let range = start..start + tensor.bytes;
            slices.push(WeightSlice { weight: &tensor.name, index: step.slot, data, range });
            bytes += tensor.bytes as u64;
        }
        let Some(upload) = session.upload(&slices)? else { return Ok(false) };
        self.cache.begin(step);
        self.cache.usage.uploads += 1;
        self.cache.usage.bytes += bytes;
        self.in_flight.push((upload, step));
        Ok(true)
    }

    /// Experts that have arrived are used from the next batch on.
    fn apply(&mut self, session: &mut Session, all: bool) {
        for (upload, result) in session.apply_uploads(all) {
            if let Some(at) = self.in_flight.iter().position(|(id, _)| *id == upload) {
                let (_, step) = self.in_flight.swap_remove(at);
                // A failed one changed nothing that a table refers to; if the device is lost, the next batch says so.
                self.cache.end(step, result.is_ok());
                if result.is_ok() {
                    self.fresh.push(step);
                }
            }
        }
    }

    /// The latest batch has failed.
    pub(super) fn fail(&mut self) {
        for step in std::mem::take(&mut self.fresh) {
            self.cache.begin(step);
            self.cache.end(step, false);
        }
    }
}

/// The bytes of the slots of a plan on each backend.
pub(crate) fn slot_bytes(plan: &Plan) -> Vec<u64> {
    let explained = plan.explain();
    let mut bytes = vec![0u64; explained.backends.len()];
    for storage in explained.storages.iter().filter(|storage| storage.name.ends_with(SLOTS_SUFFIX)) {
        if let Some(bytes) = bytes.get_mut(storage.backend) {
            *bytes = bytes.saturating_add(storage.bytes);
        }
    }
    bytes
}

impl Engine {
    /// How the expert cache has served; `None` if there is none.
    pub fn expert_cache(&self) -> Option<ExpertCacheUse> {
        self.experts.as_ref().map(|experts| experts.cache.usage)
    }

    /// Sets the tables of a batch whose experts are divided between slots and host.
    pub(super) fn set_expert_tables(&mut self, shape: &GraphShape) -> Result<()> {
        let Some(experts) = self.experts.as_mut().filter(|_| shape.expert_slots > 0) else { return Ok(()) };
        experts.fresh.clear();
        experts.apply(&mut self.session, false);
        // Where only the last layer has slots, and no token is an output, the graph has none.
        let divides = |plan: &Plan| plan.graph().leaf(EXPERT_SLOTS).is_some();
        if !self.session.plan().is_some_and(divides) {
            return Ok(());
        }
        let [slots, absent] = &mut experts.tables;
        experts.cache.tables(slots, absent);
        self.session.set(EXPERT_SLOTS, slots.as_slice())?;
        let name = if shape.observe_experts { EXPERTS_ON_HOST } else { EXPERTS_NOT_IN_SLOTS };
        self.session.set(name, absent.as_slice())?;
        Ok(())
    }

    /// Notes which experts the batch uses, and starts to upload those that should be in a slot.
    pub(super) fn observe_experts(&mut self, shape: &GraphShape) -> Result<()> {
        let observes = shape.expert_slots > 0 && shape.observe_experts;
        let Some(experts) = self.experts.as_mut().filter(|_| observes) else { return Ok(()) };
        experts.cache.begin_step();
        for (number, layer) in self.model.hyperparameters().layers.iter().enumerate() {
            let has_slots = experts.layers.get(number).is_some_and(|tensors| !tensors.is_empty());
            let Some(of_layer) = layer.experts.filter(|_| has_slots) else { continue };
            // The last layer computes the output rows only.
            let last = number + 1 == self.model.hyperparameters().layers.len();
            let tokens = if last { shape.rows } else { shape.tokens };
            if tokens == 0 {
                continue;
            }
            experts.used.resize(tokens * of_layer.used, 0);
            let Some(output) = experts.outputs.get(number) else { continue };
            self.session.read_into(output.as_str(), &mut experts.used)?;
            experts.cache.observe(number, &experts.used);
        }
        for step in experts.cache.moves(MOVES_PER_STEP) {
            // The batch is computed, and does not depend on an upload: what cannot be started is not moved. If the device is
            // lost, the next batch says so.
            if !matches!(experts.upload(&mut self.session, step), Ok(true)) {
                break;
            }
        }
        Ok(())
    }
}
