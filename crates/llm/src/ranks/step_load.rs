//! What stages of a pipeline compute at once, and the time that it takes.

use quadriga_graph::DType;
use quadriga_runtime::{DeviceKind, Rates, host_slowness};

use super::RankResources;
use super::parallelism::{MicroBatches, RequestLoad};
use crate::hyperparameters::LayerShape;

/// Slots of the KV cache that a request is taken to use.
pub(super) const SLOTS: f64 = 512.0;

/// Tokens of the parts of a prompt that stages compute at once, at least.
const PROMPT_PART: f64 = 64.0;

/// The steps by which stages are balanced. Those that decode have a token of each of some requests. For a single request, stages take
/// turns, however they are divided, and only the parts of its prompt are computed at once, of which the last token has results.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepLoad {
    tokens: f64,
    decodes: bool,
    rates: Rates,
}

/// What a step does with some weights.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct WeightWork {
    /// Bytes that every token reads.
    pub(super) dense: f64,
    /// Bytes of experts, and the share of them that a token reads.
    pub(super) experts: f64,
    pub(super) used: f64,
    /// Operations for each token.
    pub(super) operations: f64,
}

impl WeightWork {
    /// Bytes that are read for so many tokens at once: of experts those that not all of them miss.
    pub(super) fn read(&self, tokens: f64) -> f64 {
        self.dense + self.experts * self.share_of_experts(tokens)
    }

    /// Operations for each of so many tokens at once, as much as they cost: those with experts of few rows each take longer.
    pub(super) fn arithmetic(&self, tokens: f64) -> f64 {
        let of_experts = self.experts * self.used;
        let share = of_experts / (self.dense + of_experts).max(f64::MIN_POSITIVE);
        let rows = tokens * self.used / self.share_of_experts(tokens).max(f64::MIN_POSITIVE);
        self.operations * (1.0 + share * (host_slowness(rows) - 1.0))
    }

    /// The share of the experts that any of so many tokens uses.
    fn share_of_experts(&self, tokens: f64) -> f64 {
        1.0 - (1.0 - self.used).max(0.0).powf(tokens)
    }
}

impl StepLoad {
    /// The load of so many stages, whose ranks have these rates on average.
    pub(super) fn new(load: RequestLoad, stages: usize, rates: Rates) -> StepLoad {
        let round = MicroBatches::new(load.most, stages);
        match round.count {
            1 => StepLoad { tokens: PROMPT_PART, decodes: false, rates },
            _ => StepLoad { tokens: round.requests as f64, decodes: true, rates },
        }
    }

    /// Seconds that a rank of mean speed takes for weights, which are read once for all tokens, or for arithmetic with them.
    pub(super) fn weights(&self, work: &WeightWork) -> f64 {
        (work.read(self.tokens) / self.rates.read.max(1.0))
            .max(self.tokens * work.arithmetic(self.tokens) / self.rates.int8.max(1.0))
    }

    /// Seconds for the KV cache, of which each request reads its own; `slot` is what a layer has in a slot.
    pub(super) fn cache(&self, slot: f64) -> f64 {
        if self.decodes { self.tokens * SLOTS * slot / self.rates.read.max(1.0) } else { 0.0 }
    }

    /// Seconds for the output matrix.
    pub(super) fn results(&self, work: &WeightWork) -> f64 {
        if self.decodes { self.weights(work) } else { 0.0 }
    }
}

/// Bytes of a slot of a layer's KV cache, as F16.
pub(super) fn slot_bytes(layer: &LayerShape) -> f64 {
    let elements = if layer.attention { layer.key_width() + layer.value_width() } else { 0 };
    (elements * DType::F16.block_bytes()) as f64
}

/// The rates of a rank of mean speed, where they are known of all ranks; else those that are assumed for a CPU.
pub(super) fn mean_rates(ranks: &[RankResources]) -> Rates {
    let assumed = Rates::assumed(DeviceKind::Cpu);
    let known: Option<Vec<Rates>> = ranks.iter().map(|rank| rank.rates).collect();
    let Some(known) = known.filter(|known| !known.is_empty()) else { return assumed };
    let mean = |of: fn(&Rates) -> f64| known.iter().map(of).sum::<f64>() / known.len() as f64;
    Rates { read: mean(|rates| rates.read), int8: mean(|rates| rates.int8), ..assumed }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: fn() -> Rates = || Rates { read: 10.0, int8: 100.0, ..Rates::assumed(DeviceKind::Cpu) };

    #[test]
    fn weights_are_read_once_for_all_tokens_or_bound_by_arithmetic() {
        let work = WeightWork { dense: 100.0, operations: 200.0, ..WeightWork::default() };
        let of = |requests| StepLoad::new(RequestLoad::constant(requests), 2, RATES());
        // Two requests are a token for each of two stages.
        assert_eq!((of(2).weights(&work), of(10).weights(&work), of(12).weights(&work)), (10.0, 10.0, 12.0));
        assert_eq!((of(12).results(&work), of(12).cache(1.0)), (12.0, 6.0 * SLOTS / 10.0));
        // A single request has no results in all but one part of its prompt.
        assert_eq!((of(1).weights(&work), of(1).results(&work), of(1).cache(1.0)), (128.0, 0.0, 0.0));
        assert_eq!(StepLoad::new(RequestLoad::up_to(12), 2, RATES()).weights(&work), 12.0, "the most count");
    }

    #[test]
    fn more_tokens_use_more_experts() {
        let work = WeightWork { dense: 10.0, experts: 800.0, used: 0.25, operations: 0.0 };
        let of = |tokens: usize| StepLoad::new(RequestLoad::constant(2 * tokens), 2, RATES()).weights(&work);
        assert_eq!((of(1), of(2)), (21.0, 1.0 + 80.0 * (1.0 - 0.75 * 0.75)));
        assert!((of(1000) - 81.0).abs() < 1e-9);
    }

    #[test]
    fn experts_of_few_rows_take_longer() {
        let work = WeightWork { dense: 100.0, experts: 800.0, used: 0.125, operations: 10.0 };
        assert_eq!(work.arithmetic(1.0), 10.0);
        // Half of the operations are those of experts, and 16 tokens have 2.3 rows for each that is used.
        assert_eq!(work.arithmetic(16.0), 25.0);
        assert!((work.arithmetic(1e9) - 10.0).abs() < 1e-4);
        let dense = WeightWork { experts: 0.0, used: 0.0, ..work };
        assert_eq!(dense.arithmetic(16.0), 10.0);
    }

    #[test]
    fn rates_are_those_of_a_mean_rank_or_assumed() {
        let rank = |read: f64| RankResources {
            rates: Some(Rates { read, int8: 4.0 * read, ..RATES() }),
            ..RankResources::of_speed(read)
        };
        let mean = mean_rates(&[rank(10.0), rank(30.0)]);
        assert_eq!((mean.read, mean.int8), (20.0, 80.0));
        let assumed = Rates::assumed(DeviceKind::Cpu);
        assert_eq!(
            mean_rates(&[rank(10.0), RankResources::of_speed(1.0)]).read,
            assumed.read,
            "one is unknown"
        );
        assert_eq!(mean_rates(&[]).int8, assumed.int8);
    }
}
