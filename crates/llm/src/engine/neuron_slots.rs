//! Rows of neurons on a device: slots for some neurons of layers whose tensors the host has.
//!
//! The device computes the active neurons that are in its slots while the host computes the others. With counts, the most active
//! neurons are there from the beginning; without, those that turn out to be active move there while the model runs. A batch
//! never waits for a move.

use std::fmt;

use quadriga_graph::{Data, TensorKind, layer_of};
use quadriga_runtime::{Plan, Session, SliceUpload, WeightSlice};
use serde::Serialize;

use super::Engine;
use crate::models::{GraphShape, NEURON_SLOTS, NEURONS_ON_HOST, SLOTS_SUFFIX, active_output};
use crate::{Error, Model, NeuronCounts, Result};

/// Rows of one upload.
const ROWS_PER_UPLOAD: usize = 64;

/// Rows that may be in flight, whose staging memory is not part of a plan.
pub(crate) const STAGED_ROWS: u64 = 16 * ROWS_PER_UPLOAD as u64;

/// How much of a neuron's average activity a batch changes.
const SMOOTHING: f32 = 1.0 / 64.0;

/// A neuron moves into the slot of another that is active in so much fewer of the batches.
const MIN_GAIN: f32 = 0.05;

/// How the rows on devices have served since the engine was made.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct NeuronSlotUse {
    /// Neurons that devices have room for.
    pub slots: u64,
    /// Active neurons, of all batches and layers with slots; 0 unless they are observed.
    pub active: u64,
    /// How many of them were in a slot.
    pub hits: u64,
    /// Neurons that moved into a slot while running.
    pub moved: u64,
}

impl fmt::Display for NeuronSlotUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NeuronSlotUse { slots, active, hits, moved } = self;
        let share = 100.0 * *hits as f64 / (*active).max(1) as f64;
        write!(f, "neurons on devices: {slots}, with {share:.1} % of {active} active ones; {moved} moved")
    }
}

/// A matrix of which a device has some rows.
struct SlotTensor {
    name: String,
    data: Data,
    row_bytes: usize,
}

/// The neurons of a layer.
#[derive(Default)]
struct LayerSlots {
    tensors: Vec<SlotTensor>,
    /// For each neuron its slot, or −1.
    slot_of: Vec<i32>,
    /// For each slot the neuron that it has.
    in_slot: Vec<Option<usize>>,
    /// For each slot the neuron that is on its way to it.
    awaits: Vec<Option<usize>>,
    /// For each neuron the average of its activity.
    activity: Vec<f32>,
}

/// A neuron that moves into a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct RowMove {
    layer: usize,
    neuron: usize,
    slot: usize,
}

/// Slots, what they are filled from, and what is on its way.
pub(super) struct NeuronSlots {
    layers: Vec<LayerSlots>,
    /// Slots of the layer that has the most.
    width: usize,
    /// Whether activity is observed, and neurons move.
    learns: bool,
    in_flight: Vec<(SliceUpload, Vec<RowMove>)>,
    /// Neurons that arrived for the latest batch. If that fails, the device may have failed to write them.
    fresh: Vec<RowMove>,
    /// The layer whose neurons are looked at next.
    next: usize,
    usage: NeuronSlotUse,
    /// The tables and activations; kept to reuse their memory.
    ids: Vec<i32>,
    on_host: Vec<f32>,
    values: Vec<f32>,
}

impl LayerSlots {
    /// Fills empty slots with the most active neurons, the first of equal ones.
    fn fill(&self, layer: usize) -> Vec<RowMove> {
        let mut order: Vec<usize> = (0..self.slot_of.len()).collect();
        let activity = |neuron: &usize| self.activity.get(*neuron).copied().unwrap_or(0.0);
        order.sort_by(|a, b| activity(b).total_cmp(&activity(a)));
        let slots = 0..self.in_slot.len();
        order.into_iter().zip(slots).map(|(neuron, slot)| RowMove { layer, neuron, slot }).collect()
    }

    /// Neurons that should move into slots of less active ones.
    fn moves(&self, layer: usize, most: usize) -> Vec<RowMove> {
        let activity = |neuron: usize| self.activity.get(neuron).copied().unwrap_or(0.0);
        let mut victims: Vec<(f32, usize)> = Vec::new();
        for (slot, held) in self.in_slot.iter().enumerate() {
            if self.awaits.get(slot) == Some(&None) {
                victims.push((held.map_or(-1.0, activity), slot));
            }
        }
        let Some(least) = victims.iter().map(|(activity, _)| *activity).reduce(f32::min) else {
            return Vec::new();
        };
        let absent = self.slot_of.iter().enumerate().filter(|(_, slot)| **slot < 0).map(|(neuron, _)| neuron);
        // In two slots a neuron would be added twice.
        let mut on_its_way = vec![false; self.slot_of.len()];
        for neuron in self.awaits.iter().flatten() {
            if let Some(awaited) = on_its_way.get_mut(*neuron) {
                *awaited = true;
            }
        }
        let absent = absent.filter(|neuron| on_its_way.get(*neuron) == Some(&false));
        let mut wanted: Vec<(f32, usize)> = absent.map(|neuron| (activity(neuron), neuron)).collect();
        wanted.retain(|(activity, _)| *activity > least + MIN_GAIN);
        wanted.sort_by(|a, b| b.0.total_cmp(&a.0));
        victims.sort_by(|a, b| a.0.total_cmp(&b.0));
        let pairs = wanted.into_iter().zip(victims).take(most);
        let pays = |((gain, _), (loss, _)): &((f32, usize), (f32, usize))| *gain > *loss + MIN_GAIN;
        pairs.take_while(pays).map(|((_, neuron), (_, slot))| RowMove { layer, neuron, slot }).collect()
    }

    fn begin(&mut self, step: RowMove) {
        if let Some(awaits) = self.awaits.get_mut(step.slot) {
            *awaits = Some(step.neuron);
        }
        let held = self.in_slot.get_mut(step.slot).and_then(Option::take);
        if let Some(slot) = held.and_then(|neuron| self.slot_of.get_mut(neuron)) {
            *slot = -1;
        }
    }

    fn end(&mut self, step: RowMove, arrived: bool) {
        if let Some(awaits) = self.awaits.get_mut(step.slot) {
            if *awaits != Some(step.neuron) {
                return;
            }
            *awaits = None;
        }
        if let (true, Some(held), Some(slot)) =
            (arrived, self.in_slot.get_mut(step.slot), self.slot_of.get_mut(step.neuron))
        {
            (*held, *slot) = (Some(step.neuron), step.slot as i32);
        }
    }

    /// The device may have failed to write a neuron that has arrived. A slot that awaits another one by now stays as it is.
    fn forget(&mut self, step: RowMove) {
        if let (Some(held), Some(slot)) = (self.in_slot.get_mut(step.slot), self.slot_of.get_mut(step.neuron))
            && *held == Some(step.neuron)
        {
            (*held, *slot) = (None, -1);
        }
    }
}

impl NeuronSlots {
    /// Finds the slots of the session's current graph and fills them; `None` if it has none.
    pub(super) fn new(
        model: &Model,
        session: &mut Session,
        counts: Option<&NeuronCounts>,
    ) -> Result<Option<NeuronSlots>> {
        let Some(plan) = session.plan().filter(|plan| plan.graph().leaf(NEURON_SLOTS).is_some()) else {
            return Ok(None);
        };
        let graph = plan.graph();
        let mut layers: Vec<LayerSlots> = Vec::new();
        for shape in &model.hyperparameters().layers {
            // A layer without slots has a part of the tables, too.
            layers.push(LayerSlots { slot_of: vec![-1; shape.feed_forward], ..LayerSlots::default() });
        }
        for id in graph.of_kind(TensorKind::Weight) {
            let name = graph.name(id);
            let source = name.strip_suffix(SLOTS_SUFFIX).and_then(|source| graph.leaf(source));
            let (Some(source), Some(layer)) = (source, layer_of(&name)) else { continue };
            let (Some(data), Some(own)) = (graph.data(source), layers.get_mut(layer)) else { continue };
            let rows = |id| graph.get(id).map_or(0, |tensor| tensor.shape().rows());
            let (slots, neurons) = (rows(id), rows(source));
            own.slot_of = vec![-1; neurons];
            (own.in_slot, own.awaits) = (vec![None; slots], vec![None; slots]);
            let of_layer = counts.and_then(|counts| counts.layers.get(layer));
            own.activity = (0..neurons)
                .map(|neuron| {
                    of_layer.and_then(|counts| counts.get(neuron)).map_or(0.0, |count| *count as f32)
                })
                .collect();
            own.tensors.push(SlotTensor { name, data: data.clone(), row_bytes: data.len() / neurons.max(1) });
        }
        let slots: usize = layers.iter().map(|layer| layer.in_slot.len()).sum();
        let width = layers.iter().map(|layer| layer.in_slot.len()).max().unwrap_or(0);
        let mut own = NeuronSlots {
            layers,
            width,
            learns: counts.is_none(),
            in_flight: Vec::new(),
            fresh: Vec::new(),
            next: 0,
            usage: NeuronSlotUse { slots: slots as u64, ..NeuronSlotUse::default() },
            ids: Vec::new(),
            on_host: Vec::new(),
            values: Vec::new(),
        };
        let row =
            |layer: &LayerSlots| layer.tensors.iter().map(|tensor| tensor.row_bytes as u64).sum::<u64>();
        session.limit_uploads(STAGED_ROWS * own.layers.iter().map(row).max().unwrap_or(0));
        for layer in 0..own.layers.len() {
            let moves = own.layers.get(layer).map(|slots| slots.fill(layer)).unwrap_or_default();
            for rows in moves.chunks(ROWS_PER_UPLOAD) {
                while !own.upload(session, rows)? {
                    own.apply(session, true)?;
                }
            }
        }
        own.apply(session, true)?;
        // Devices may report only now that they failed to write one; the first batch would forget which neurons those are.
        session.wait()?;
        own.fresh.clear();
        Ok(Some(own))
    }

    /// Starts an upload of rows of one layer; `false` if as many as possible are in flight.
    fn upload(&mut self, session: &mut Session, moves: &[RowMove]) -> Result<bool> {
        let Some(layer) = moves.first().and_then(|step| self.layers.get_mut(step.layer)) else {
            return Ok(true);
        };
        let mut slices = Vec::with_capacity(moves.len() * layer.tensors.len());
        for step in moves {
            for tensor in &layer.tensors {
                let start = step.neuron * tensor.row_bytes;
                let Some((data, start)) = tensor.data.piece(start, tensor.row_bytes) else {
                    return Err(Error::Expert { tensor: tensor.name.clone(), expert: step.neuron });
                };
                let range = start..start + tensor.row_bytes;
                slices.push(WeightSlice { weight: &tensor.name, index: step.slot, data, range });
            }
        }
        let Some(upload) = session.upload(&slices)? else { return Ok(false) };
        moves.iter().for_each(|step| layer.begin(*step));
        self.in_flight.push((upload, moves.to_vec()));
        Ok(true)
    }

    /// Neurons that have arrived are used from the next batch on. The first error, if uploads failed.
    fn apply(&mut self, session: &mut Session, all: bool) -> Result<()> {
        let mut first = Ok(());
        for (upload, result) in session.apply_uploads(all) {
            if let Some(at) = self.in_flight.iter().position(|(id, _)| *id == upload) {
                let (_, moves) = self.in_flight.swap_remove(at);
                for step in moves {
                    if let Some(layer) = self.layers.get_mut(step.layer) {
                        layer.end(step, result.is_ok());
                    }
                    if result.is_ok() {
                        self.fresh.push(step);
                    }
                }
            }
            first = first.and(result.map_err(Error::from));
        }
        first
    }

    /// For each neuron of a layer its slot, or −1.
    pub(super) fn held(&self, layer: usize) -> &[i32] {
        self.layers.get(layer).map(|layer| layer.slot_of.as_slice()).unwrap_or_default()
    }

    /// The latest batch has failed.
    pub(super) fn fail(&mut self) {
        for step in std::mem::take(&mut self.fresh) {
            if let Some(layer) = self.layers.get_mut(step.layer) {
                layer.forget(step);
            }
        }
    }

    /// Writes the tables: for each layer and slot its neuron, or −1; for each layer and neuron 1 if it is in no slot, else 0.
    fn tables(&mut self) {
        self.ids.clear();
        self.on_host.clear();
        for layer in &self.layers {
            let id =
                |slot: usize| layer.in_slot.get(slot).copied().flatten().map_or(-1, |neuron| neuron as i32);
            self.ids.extend((0..self.width).map(id));
            self.on_host.extend(layer.slot_of.iter().map(|slot| if *slot < 0 { 1.0 } else { 0.0 }));
        }
    }
}

impl Engine {
    /// How the rows of neurons on devices have served; `None` if there are none.
    pub fn neuron_slots(&self) -> Option<NeuronSlotUse> {
        self.neuron_slots.as_ref().map(|slots| slots.usage)
    }

    /// Sets the tables of a batch whose neurons are divided between slots and host.
    pub(super) fn set_neuron_tables(&mut self, shape: &GraphShape) -> Result<()> {
        let Some(slots) = self.neuron_slots.as_mut().filter(|_| shape.neurons.slots > 0) else {
            return Ok(());
        };
        slots.fresh.clear();
        // Those that failed are uploaded again while they are among the most active.
        let _ = slots.apply(&mut self.session, false);
        let divides = |plan: &Plan| plan.graph().leaf(NEURON_SLOTS).is_some();
        if !self.session.plan().is_some_and(divides) {
            return Ok(());
        }
        slots.tables();
        self.session.set(NEURON_SLOTS, slots.ids.as_slice())?;
        self.session.set(NEURONS_ON_HOST, slots.on_host.as_slice())?;
        Ok(())
    }

    /// Notes which neurons the batch used, and starts to upload some that should be in a slot.
    pub(super) fn observe_neuron_slots(&mut self, shape: &GraphShape) -> Result<()> {
        let has_slots = shape.neurons.slots > 0 && shape.neurons.observe;
        let Some(slots) = self.neuron_slots.as_mut().filter(|_| has_slots) else { return Ok(()) };
        let count = slots.layers.len();
        for (number, layer) in slots.layers.iter_mut().enumerate() {
            // The last layer computes the output rows only.
            let tokens = if number + 1 == count { shape.rows } else { shape.tokens };
            let neurons = layer.slot_of.len();
            if tokens * neurons == 0 || layer.in_slot.is_empty() {
                continue;
            }
            slots.values.resize(tokens * neurons, 0.0);
            self.session.read_into(active_output(number).as_str(), &mut slots.values)?;
            for row in slots.values.chunks(neurons) {
                for ((value, slot), activity) in row.iter().zip(&layer.slot_of).zip(&mut layer.activity) {
                    let is_active = *value != 0.0;
                    slots.usage.active += u64::from(is_active);
                    slots.usage.hits += u64::from(is_active && *slot >= 0);
                    if slots.learns {
                        *activity += SMOOTHING * (f32::from(u8::from(is_active)) - *activity);
                    }
                }
            }
        }
        if slots.learns && count > 0 {
            slots.next = (slots.next + 1) % count;
            let moves = slots.layers.get(slots.next).map(|layer| layer.moves(slots.next, ROWS_PER_UPLOAD));
            let moves = moves.unwrap_or_default();
            // The batch is computed, and does not depend on an upload: what cannot be started is not moved. If the device is
            // lost, the next batch says so.
            if !moves.is_empty() && matches!(slots.upload(&mut self.session, &moves), Ok(true)) {
                slots.usage.moved += moves.len() as u64;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(neurons: usize, slots: usize) -> LayerSlots {
        LayerSlots {
            tensors: Vec::new(),
            slot_of: vec![-1; neurons],
            in_slot: vec![None; slots],
            awaits: vec![None; slots],
            activity: vec![0.0; neurons],
        }
    }

    fn carry_out(layer: &mut LayerSlots, moves: &[RowMove]) {
        for step in moves {
            layer.begin(*step);
            layer.end(*step, true);
        }
        for (neuron, slot) in layer.slot_of.iter().enumerate() {
            let holders = layer.in_slot.iter().filter(|held| **held == Some(neuron)).count();
            assert_eq!(holders, usize::from(*slot >= 0));
        }
    }

    #[test]
    fn the_most_active_neurons_are_in_slots_and_move_there() {
        let mut own = layer(10, 3);
        own.activity = (0..10).map(|neuron| neuron as f32 / 10.0).collect();
        let first = own.fill(0);
        carry_out(&mut own, &first);
        assert_eq!(own.in_slot, [Some(9), Some(8), Some(7)]);
        assert_eq!(own.moves(0, 8), []);
        own.activity = (0..10).map(|neuron| 1.0 - neuron as f32 / 10.0).collect();
        let moves = own.moves(0, 2);
        assert_eq!(moves.iter().map(|step| step.neuron).collect::<Vec<_>>(), [0, 1]);
        carry_out(&mut own, &moves);
        let moves = own.moves(0, 8);
        carry_out(&mut own, &moves);
        let mut held: Vec<_> = own.in_slot.iter().flatten().copied().collect();
        held.sort_unstable();
        assert_eq!(held, [0, 1, 2]);
        assert_eq!(own.moves(0, 8), []);
    }

    #[test]
    fn a_neuron_on_its_way_to_a_slot_does_not_move_to_another() {
        let mut own = layer(4, 2);
        own.activity = vec![0.0, 1.0, 0.5, 0.0];
        let first = own.moves(0, 1);
        assert_eq!(first, [RowMove { layer: 0, neuron: 1, slot: 0 }]);
        own.begin(first[0]);
        assert_eq!(own.moves(0, 1), [RowMove { layer: 0, neuron: 2, slot: 1 }]);
    }

    #[test]
    fn a_failed_batch_gives_no_slot_away_that_awaits_a_neuron() {
        let mut own = layer(4, 1);
        let [first, second, third] = [1, 2, 3].map(|neuron| RowMove { layer: 0, neuron, slot: 0 });
        carry_out(&mut own, &[first]);
        own.begin(second);
        own.forget(first);
        own.activity = vec![1.0; 4];
        assert_eq!(own.moves(0, 8), [], "the slot awaits a neuron");
        own.end(second, true);
        // What nobody awaits is not used.
        own.end(third, true);
        carry_out(&mut own, &[]);
        assert_eq!(own.in_slot, [Some(2)]);
        own.forget(second);
        carry_out(&mut own, &[]);
        assert_eq!(own.in_slot, [None]);
    }

    #[test]
    fn a_slot_that_awaits_a_neuron_has_none_and_is_not_given_away() {
        let mut own = layer(4, 1);
        own.activity = vec![0.0, 1.0, 0.5, 0.0];
        let first = own.fill(0);
        assert_eq!(first, [RowMove { layer: 0, neuron: 1, slot: 0 }]);
        own.begin(first[0]);
        assert_eq!((own.slot_of[1], own.moves(0, 8)), (-1, Vec::new()));
        own.end(first[0], false);
        assert_eq!((own.slot_of[1], own.in_slot[0]), (-1, None));
        assert_eq!(own.moves(0, 8), first, "a failed upload is started again");
    }
}
