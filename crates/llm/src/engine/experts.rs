//! The expert cache of an engine, with slots of its own or in pages: slots on devices for experts whose tensors the host has.
//!
//! An expert in a slot is computed by the slot's device while the host computes the others. What is used is observed after
//! each batch, and experts are uploaded in the background: a batch never waits for one, the host computes it meanwhile.

use quadriga_graph::{Data, TensorKind, layer_of};
use quadriga_runtime::{DEFAULT_UPLOAD_BYTES, Plan, Session, SliceUpload, WeightSlice};

use super::Engine;
use super::expert_cache::{ExpertCacheUse, ExpertResidency, Move};
use crate::models::{EXPERT_SLOTS, EXPERTS_NOT_IN_SLOTS, EXPERTS_ON_HOST, GraphShape, SLOTS_SUFFIX};
use crate::{Error, Model, Result};

/// Slots, what they are filled from, and what is on its way.
pub(crate) struct ExpertSlots {
    cache: ExpertResidency,
    /// For each layer, the tensors that have a slice for each expert.
    layers: Vec<Vec<SlotTensor>>,
    in_flight: Vec<(SliceUpload, Move)>,
    /// As many experts as the bytes that are uploaded in a step have room for.
    moves_per_step: usize,
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
    /// At most `upload_bytes` are on their way to a device at a time, or one expert; 0 for [`DEFAULT_UPLOAD_BYTES`].
    pub(crate) fn new(
        model: &Model,
        session: &mut Session,
        upload_bytes: u64,
    ) -> Result<Option<ExpertSlots>> {
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
        let limit = if upload_bytes > 0 { upload_bytes } else { DEFAULT_UPLOAD_BYTES };
        session.limit_uploads(limit);
        let bytes = |layer: &Vec<SlotTensor>| layer.iter().map(|tensor| tensor.bytes as u64).sum::<u64>();
        let smallest = tensors.iter().map(bytes).filter(|bytes| *bytes > 0).min().unwrap_or(1);
        let mut own = ExpertSlots {
            moves_per_step: usize::try_from(limit / smallest).unwrap_or(usize::MAX).max(1),
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
                own.apply(session, true)?;
            }
        }
        own.apply(session, true)?;
        // Devices may report only now that they failed to write one; the first batch would forget which experts those are.
        session.wait()?;
        own.fresh.clear();
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

    /// Experts that have arrived are used from the next batch on. The first error, if uploads failed.
    fn apply(&mut self, session: &mut Session, all: bool) -> Result<()> {
        let mut first = Ok(());
        for (upload, result) in session.apply_uploads(all) {
            if let Some(at) = self.in_flight.iter().position(|(id, _)| *id == upload) {
                let (_, step) = self.in_flight.swap_remove(at);
                // A failed one changed nothing that a table refers to; if the device is lost, the next batch says so.
                self.cache.end(step, result.is_ok());
                if result.is_ok() {
                    self.fresh.push(step);
                }
            }
            first = first.and(result.map_err(Error::from));
        }
        first
    }

    /// The latest batch has failed.
    pub(crate) fn fail(&mut self) {
        for step in std::mem::take(&mut self.fresh) {
            self.cache.forget(step);
        }
    }

    /// How the slots have served.
    pub(crate) fn usage(&self) -> ExpertCacheUse {
        self.cache.usage
    }

    /// Sets the tables of a batch whose experts are divided between slots and host. Its graph is prepared.
    pub(crate) fn set_tables(&mut self, session: &mut Session, shape: &GraphShape) -> Result<()> {
        if shape.expert_slots == 0 {
            return Ok(());
        }
        self.fresh.clear();
        // One that failed is uploaded again when it is used.
        let _ = self.apply(session, false);
        // Where only the last layer has slots, and no token is an output, the graph has none.
        let divides = |plan: &Plan| plan.graph().leaf(EXPERT_SLOTS).is_some();
        if !session.plan().is_some_and(divides) {
            return Ok(());
        }
        let [slots, absent] = &mut self.tables;
        self.cache.tables(slots, absent);
        session.set(EXPERT_SLOTS, slots.as_slice())?;
        let name = if shape.observe_experts { EXPERTS_ON_HOST } else { EXPERTS_NOT_IN_SLOTS };
        session.set(name, absent.as_slice())?;
        Ok(())
    }

    /// Notes which experts the rows of a batch use that hold a token, and starts to upload those that should be in a slot. The
    /// batch has been started.
    pub(crate) fn observe(
        &mut self,
        model: &Model,
        session: &mut Session,
        shape: &GraphShape,
        holds_token: impl Fn(BatchRow) -> bool,
    ) -> Result<()> {
        if shape.expert_slots == 0 || !shape.observe_experts {
            return Ok(());
        }
        self.cache.begin_step();
        let layers = &model.hyperparameters().layers;
        for (number, layer) in layers.iter().enumerate() {
            let has_slots = self.layers.get(number).is_some_and(|tensors| !tensors.is_empty());
            let Some(of_layer) = layer.experts.filter(|_| has_slots) else { continue };
            // The last layer computes the output rows only.
            let last = number + 1 == layers.len();
            let rows = if last { shape.rows } else { shape.tokens };
            if rows == 0 {
                continue;
            }
            self.used.resize(rows * of_layer.used, 0);
            let Some(output) = self.outputs.get(number) else { continue };
            session.read_into(output.as_str(), &mut self.used)?;
            for (row, experts) in self.used.chunks(of_layer.used.max(1)).enumerate() {
                if holds_token(if last { BatchRow::Output(row) } else { BatchRow::Token(row) }) {
                    self.cache.observe(number, experts);
                }
            }
        }
        for step in self.cache.moves(self.moves_per_step) {
            // The batch is computed, and does not depend on an upload: what cannot be started is not moved. If the device is
            // lost, the next batch says so.
            if !matches!(self.upload(session, step), Ok(true)) {
                break;
            }
        }
        Ok(())
    }
}

/// A row of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BatchRow {
    /// In all layers before the last.
    Token(usize),
    /// In the last layer, which computes the outputs only.
    Output(usize),
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
        self.experts.as_ref().map(ExpertSlots::usage)
    }

    /// Sets the tables of a batch whose experts are divided between slots and host.
    pub(super) fn set_expert_tables(&mut self, shape: &GraphShape) -> Result<()> {
        self.experts.as_mut().map_or(Ok(()), |experts| experts.set_tables(&mut self.session, shape))
    }

    /// Notes which experts the batch uses, and starts to upload those that should be in a slot.
    pub(super) fn observe_experts(&mut self, shape: &GraphShape) -> Result<()> {
        let Some(experts) = &mut self.experts else { return Ok(()) };
        experts.observe(&self.model, &mut self.session, shape, |_| true)
    }
}
