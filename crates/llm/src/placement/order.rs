//! The order in which an accelerator's memory is filled: by time saved per byte.

use quadriga_runtime::Rates;
use serde::Serialize;

use super::parts::{ModelPart, ModelParts};
use super::rule::offloaded_index;
use super::shares::{device_at, first_used, last_used};

/// A part of a model, and what it gains on an accelerator.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct PlacementUnit {
    /// The part.
    #[serde(flatten)]
    pub part: ModelPart,
    /// Bytes of its weights and states.
    pub bytes: u64,
    /// Seconds that decoding a token takes less, by the devices' rates.
    pub gain: f64,
    /// The accelerator that it is for.
    pub accelerator: usize,
    /// Whether it is there; else it is on the CPU.
    pub placed: bool,
}

impl PlacementUnit {
    /// Seconds saved per byte.
    pub fn gain_per_byte(&self) -> f64 {
        self.gain / self.bytes.max(1) as f64
    }

    fn and(self, other: PlacementUnit, part: ModelPart) -> PlacementUnit {
        PlacementUnit { part, bytes: self.bytes + other.bytes, gain: self.gain + other.gain, ..self }
    }
}

/// Like parts of several layers, whose gains per byte differ little. Of some of them, those are on the accelerator that spread
/// evenly over the layers, so that copies overlap with work.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Tier {
    pub(super) units: Vec<PlacementUnit>,
}

/// The least gain per byte of a unit, as a share of the largest of its tier.
const ALIKE: f64 = 0.9;

/// The units of a model in order of their gain per byte, for each accelerator. `homes` are the layers' accelerators, by their
/// `shares`.
///
/// A layer's attention comes before its experts or feed-forward network; where it gains less per byte than these, both are one
/// unit. A layer of which a part is on the CPU makes both sides wait for each other twice in each token.
pub(super) fn tiers(parts: &ModelParts, shares: &[f64], homes: &[usize], rates: &[Rates]) -> Vec<Vec<Tier>> {
    let accelerators = rates.len().saturating_sub(1);
    let mut units = Vec::new();
    let unit = |part: ModelPart, accelerator: usize| {
        let cost = parts.cost(part);
        let on = |backend: usize| cost.seconds.get(backend).copied().unwrap_or(0.0);
        let gain = on(accelerators) - on(accelerator);
        PlacementUnit { part, bytes: cost.bytes, gain, accelerator, placed: false }
    };
    for layer in 0..parts.layers {
        let home = homes.get(layer).copied().unwrap_or(0);
        let attention = unit(ModelPart::Attention { layer }, home);
        let is_gates = |part: &ModelPart| matches!(part, ModelPart::Gates { .. });
        let gates = unit(ModelPart::Gates { layer }, home);
        let rest = parts.rest_of(layer).filter(|part| !is_gates(part)).map(|part| unit(part, home));
        let rest = rest.reduce(|sum, part| sum.and(part, sum.part)).filter(|rest| rest.bytes > 0);
        let crossings = 2.0 * rates.get(home).map_or(0.0, |rates| rates.rendezvous);
        let rest = rest.map(|rest| PlacementUnit { gain: rest.gain + crossings, ..rest });
        // Gates come after attention and before the rows that they select; those alone would gain nothing.
        let (gates, rest) = match rest {
            Some(rest) if gates.bytes > 0 && rest.gain_per_byte() < gates.gain_per_byte() => {
                (Some(gates), Some(rest))
            }
            Some(rest) => (None, Some(rest.and(gates, rest.part))),
            None => (Some(gates).filter(|gates| gates.bytes > 0), None),
        };
        if let Some(gates) = gates {
            let most = attention.gain_per_byte() * gates.bytes as f64;
            let gain = if attention.bytes > 0 { gates.gain.min(most) } else { gates.gain };
            let rest = rest.filter(|rest| rest.bytes > 0);
            units.extend([attention, PlacementUnit { gain, ..gates }].into_iter().chain(rest));
            continue;
        }
        match rest {
            Some(rest) if attention.bytes > 0 && rest.gain_per_byte() < attention.gain_per_byte() => {
                units.extend([attention, rest]);
            }
            Some(rest) => units.push(attention.and(rest, ModelPart::Layer { layer })),
            None => units.push(attention),
        }
    }
    units.push(unit(ModelPart::Output, last_used(shares)));
    units.push(unit(ModelPart::Embeddings, first_used(shares)));
    units.retain(|unit| unit.bytes > 0);
    (0..accelerators)
        .map(|number| into_tiers(units.iter().filter(|unit| unit.accelerator == number).copied().collect()))
        .collect()
}

/// Sorts units by gain per byte and joins those that are alike.
fn into_tiers(mut units: Vec<PlacementUnit>) -> Vec<Tier> {
    units.sort_by(|a, b| b.gain_per_byte().total_cmp(&a.gain_per_byte()));
    let mut tiers: Vec<Tier> = Vec::new();
    for unit in units {
        let fits = |tier: &&mut Tier| {
            tier.units.first().is_some_and(|first| {
                let least = first.gain_per_byte() * if first.gain > 0.0 { ALIKE } else { 1.0 / ALIKE };
                first.part.is_alike(unit.part) && unit.gain_per_byte() >= least
            })
        };
        match tiers.iter_mut().find(fits) {
            Some(tier) => tier.units.push(unit),
            None => tiers.push(Tier { units: vec![unit] }),
        }
    }
    for tier in &mut tiers {
        tier.units.sort_by_key(|unit| unit.part);
    }
    tiers
}

/// All units of some tiers; of each tier as many are placed as `counts` says.
pub(super) fn chosen(tiers: &[Tier], counts: &[usize]) -> Vec<PlacementUnit> {
    let mut all = Vec::new();
    for (Tier { units }, count) in tiers.iter().zip(counts) {
        let is_placed = |index: usize| offloaded_index(units.len(), count + 1, index).is_some();
        let marked = units.iter().enumerate();
        all.extend(marked.map(|(index, unit)| PlacementUnit { placed: is_placed(index), ..*unit }));
    }
    all
}

/// The accelerator of each layer: ranges of the layers whose bytes are in proportion to the accelerators' shares.
pub(super) fn homes(parts: &ModelParts, shares: &[f64]) -> Vec<usize> {
    let bytes: Vec<f64> = (0..parts.layers)
        .map(|layer| {
            let attention = parts.cost(ModelPart::Attention { layer }).bytes;
            let rest: u64 = parts.rest_of(layer).map(|part| parts.cost(part).bytes).sum();
            (attention + rest) as f64
        })
        .collect();
    let all: f64 = bytes.iter().sum::<f64>().max(1.0);
    let mut before = 0.0;
    let mut homes = Vec::new();
    for bytes in bytes {
        // The accelerator that the middle of the layer falls to.
        homes.push(device_at(shares, (before + bytes / 2.0) / all));
        before += bytes;
    }
    homes
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use super::super::parts::PartCost;
    use super::*;

    fn rates(rendezvous: f64) -> Rates {
        Rates {
            read: 1.0,
            read_curve: quadriga_runtime::ReadCurve::UNKNOWN,
            int8: 1.0,
            bf16: 1.0,
            f32: 1.0,
            link: 1.0,
            rendezvous,
            launch: 0.0,
            measured: true,
        }
    }

    /// Parts with bytes, and seconds that one accelerator saves.
    fn parts(layers: usize, costs: &[(ModelPart, u64, f64)]) -> ModelParts {
        let cost = |bytes, gain: f64| PartCost { bytes, seconds: vec![1.0, 1.0 + gain] };
        let costs: BTreeMap<_, _> =
            costs.iter().map(|(part, bytes, gain)| (*part, cost(*bytes, *gain))).collect();
        ModelParts { costs, layers, embeddings: HashSet::new(), tied: false, gates: HashSet::new() }
    }

    fn order(parts: &ModelParts, rendezvous: f64) -> Vec<ModelPart> {
        let tiers = tiers(parts, &[1.0], &vec![0; parts.layers], &[rates(rendezvous), rates(0.0)]);
        tiers[0].iter().flat_map(|tier| tier.units.iter().map(|unit| unit.part)).collect()
    }

    fn mixture(layers: usize) -> ModelParts {
        let mut costs = vec![(ModelPart::Output, 40, 3.9), (ModelPart::Embeddings, 40, 0.001)];
        for layer in 0..layers {
            costs.push((ModelPart::Attention { layer }, 10, 1.0 + 1e-3 * layer as f64));
            costs.push((ModelPart::Experts { layer, count: 8 }, 1000, 10.0 - 1e-3 * layer as f64));
        }
        parts(layers, &costs)
    }

    #[test]
    fn units_are_in_order_of_gain_per_byte() {
        let attention = (0..4).map(|layer| ModelPart::Attention { layer });
        let experts = (0..4).map(|layer| ModelPart::Experts { layer, count: 8 });
        let expected: Vec<ModelPart> =
            attention.chain([ModelPart::Output]).chain(experts).chain([ModelPart::Embeddings]).collect();
        assert_eq!(order(&mixture(4), 0.0), expected);
        // The first layers are dense: their networks are worth as much per byte as attention.
        let mut dense = mixture(4);
        dense.costs.remove(&ModelPart::Experts { layer: 0, count: 8 });
        let seconds = vec![1.0, 3.9];
        dense.costs.insert(ModelPart::FeedForward { layer: 0 }, PartCost { bytes: 30, seconds });
        let found = order(&dense, 0.0);
        let at = |part: ModelPart| found.iter().position(|found| *found == part).unwrap();
        assert!(at(ModelPart::FeedForward { layer: 0 }) < at(ModelPart::Experts { layer: 1, count: 8 }));
        assert!(at(ModelPart::Attention { layer: 3 }) < at(ModelPart::FeedForward { layer: 0 }));
    }

    #[test]
    fn gates_come_after_attention_and_before_the_rows_that_they_select() {
        let mut costs = vec![(ModelPart::Output, 40, 3.9)];
        for layer in 0..3 {
            costs.push((ModelPart::Attention { layer }, 10, 1.0));
            // A little more per byte than attention, and much more than the rows of up and down.
            costs.push((ModelPart::Gates { layer }, 20, 2.2));
            costs.push((ModelPart::FeedForward { layer }, 40, 0.4));
        }
        let found = order(&parts(3, &costs), 0.0);
        let at = |part: ModelPart| found.iter().position(|found| *found == part).unwrap();
        for layer in 0..3 {
            let [attention, gates, rest] = [
                ModelPart::Attention { layer },
                ModelPart::Gates { layer },
                ModelPart::FeedForward { layer },
            ]
            .map(at);
            assert!(attention < gates && gates < rest, "{found:?}");
        }
        // Where the rendezvous cost more than the rows save, a layer stays whole.
        let whole = order(&parts(3, &costs), 1e4);
        assert_eq!(whole[0], ModelPart::Layer { layer: 0 });
    }

    #[test]
    fn a_layer_is_one_unit_where_splitting_it_costs_more_than_it_saves() {
        let found = order(&mixture(3), 1e4);
        let layers: Vec<ModelPart> = (0..3).map(|layer| ModelPart::Layer { layer }).collect();
        assert_eq!(found[..3], layers[..]);
        assert_eq!(found[3..], [ModelPart::Output, ModelPart::Embeddings]);
    }

    #[test]
    fn units_of_a_tier_spread_over_the_layers() {
        let tiers = tiers(&mixture(8), &[1.0], &[0; 8], &[rates(0.0), rates(0.0)]);
        let placed = |counts: &[usize]| -> Vec<ModelPart> {
            chosen(&tiers[0], counts).iter().filter(|unit| unit.placed).map(|unit| unit.part).collect()
        };
        assert_eq!(tiers[0].len(), 4);
        let layers: Vec<Option<usize>> = placed(&[8, 1, 2, 0])[9..].iter().map(|part| part.layer()).collect();
        assert_eq!(layers, [Some(3), Some(7)]);
        assert_eq!(placed(&[8, 1, 8, 1]).len(), 18);
        assert_eq!(placed(&[0, 0, 0, 0]), []);
    }

    #[test]
    fn accelerators_have_ranges_of_the_layers_in_proportion_to_their_shares() {
        let parts = mixture(8);
        assert_eq!(homes(&parts, &[300.0, 100.0]), [0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(homes(&parts, &[1.0, 1.0]), [0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(homes(&parts, &[0.0, 100.0]), [1; 8]);
        assert_eq!(homes(&parts, &[7.0]), [0; 8]);
    }
}
