//! Which division of a model is expected to answer fastest, before anything is planned.

use quadriga_gguf::{File, Tensor};
use quadriga_runtime::Rates;

use super::parallelism::MicroBatches;
use super::stages::MOST_HELD;
use super::step_load::SLOTS;
use super::whole_model::head_tensor;
use super::{Grid, Link, RequestLoad};
use crate::hyperparameters::Hyperparameters;

/// What a stage does for a token.
#[derive(Clone, Copy, Debug)]
pub(super) struct StageWork {
    pub(super) layers: usize,
    /// Bytes that a rank of the stage's mean speed reads in the time of its layers, for one token.
    pub(super) bytes: f64,
    /// How many times as many it reads for all tokens of a step, with the fewest and the most requests: of more experts.
    pub(super) growth: [f64; 2],
    /// How many times as much its operations cost for each of these tokens: experts have few rows each.
    pub(super) slowness: [f64; 2],
    /// Bytes of each slot of the KV cache that it reads in the time of its attention.
    pub(super) slot: f64,
    /// The mean speed of its ranks, of that of all ranks.
    pub(super) speed: f64,
}

/// What a token costs, whatever the division.
#[derive(Debug)]
pub(super) struct TokenWork {
    /// Bytes of the output matrix, and operations for each of them.
    head: f64,
    head_density: f64,
    /// Bytes of a token's activations.
    activations: f64,
    /// Operations for each byte of the layers' weights.
    density: f64,
    link: Link,
    rates: Rates,
}

impl TokenWork {
    /// `rates` are those of a rank of mean speed.
    pub(super) fn new(file: &File, hyper: &Hyperparameters, link: Link, rates: Rates) -> TokenWork {
        let add = |(elements, bytes): (f64, f64), tensor: Tensor<'_>| {
            (elements + tensor.element_count() as f64, bytes + tensor.byte_len() as f64)
        };
        let density = |(elements, bytes): (f64, f64)| 2.0 * elements / f64::max(bytes, 1.0);
        let layers = file.tensors().filter(|tensor| tensor.name().starts_with("blk."));
        let head = head_tensor(file);
        TokenWork {
            head: head.as_ref().map_or(0.0, |head| head.byte_len() as f64),
            head_density: density(head.into_iter().fold((0.0, 0.0), add)),
            activations: (hyper.width * size_of::<f32>()) as f64,
            density: density(layers.fold((0.0, 0.0), add)),
            link,
            rates,
        }
    }

    /// Seconds for a token of each request, with the fewest and the most requests of a load.
    pub(super) fn seconds(&self, grid: Grid, stages: &[StageWork], load: RequestLoad) -> [f64; 2] {
        [(0, load.fewest), (1, load.most)].map(|(case, requests)| {
            let round = MicroBatches::new(requests, grid.pipeline);
            let tokens = round.requests as f64;
            let times = stages.iter().enumerate().map(|(index, stage)| {
                let is_last = index + 1 == stages.len();
                let head = if is_last { self.head / grid.tensor.max(1) as f64 } else { 0.0 };
                // Weights are read once for all tokens of a step.
                let seconds = |bytes: f64, growth: f64, density: f64| {
                    (growth * bytes / self.rates.read).max(tokens * density * bytes / self.rates.int8)
                };
                let of = |cases: [f64; 2]| cases.get(case).copied().unwrap_or(1.0);
                let density = of(stage.slowness) * self.density;
                let weights =
                    seconds(stage.bytes, of(stage.growth), density) + seconds(head, 1.0, self.head_density);
                // Each request reads keys and values of its own.
                let cache = tokens * SLOTS * stage.slot / self.rates.read;
                let compute = (weights + cache) / stage.speed;
                // Two sums a layer, after attention and after the feed-forward network.
                let sums =
                    2.0 * stage.layers as f64 * self.link.all_reduce(grid.tensor, tokens * self.activations);
                compute + sums + if is_last { 0.0 } else { self.link.send(tokens * self.activations) }
            });
            round.seconds(times) / requests.max(1) as f64
        })
    }
}

/// The factors by which the seconds of choices exceed the least of all, in the worse of two cases.
pub(super) fn regrets(choices: &[[f64; 2]]) -> Vec<f64> {
    let least = |case: fn(&[f64; 2]) -> f64| choices.iter().map(case).fold(f64::INFINITY, f64::min);
    let [few, many] = [least(|[few, _]| *few), least(|[_, many]| *many)];
    choices.iter().map(|[own_few, own_many]| (own_few / few).max(own_many / many)).collect()
}

/// Choices that take at most this many times as long as the fastest are nearly as fast.
const NEARLY: f64 = 1.1;

/// The index of a choice, of which each has a time and the most that a rank holds as a multiple of its share: of those that are nearly
/// as fast as the fastest, the fastest that holds at most a share and 5 %, or else the one that holds least; of equals the first.
pub fn within_share(choices: &[(f64, f64)]) -> Option<usize> {
    let fastest = choices.iter().map(|(time, _)| *time).fold(f64::INFINITY, f64::min);
    let mut best: Option<(usize, [f64; 2])> = None;
    for (index, (time, held)) in choices.iter().enumerate().filter(|(_, (time, _))| *time <= NEARLY * fastest)
    {
        let cost = if *held <= MOST_HELD { [0.0, *time] } else { [*held, *time] };
        if best.is_none_or(|(_, least)| cost < least) {
            best = Some((index, cost));
        }
    }
    best.map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use quadriga_runtime::DeviceKind;

    use super::*;

    const GRIDS: [Grid; 2] = [Grid { tensor: 2, pipeline: 1 }, Grid { tensor: 1, pipeline: 2 }];

    /// Seconds of two ranks as one stage and as two, of a model of 32 layers that can be divided evenly.
    fn seconds(link: Link, load: RequestLoad) -> Vec<[f64; 2]> {
        let work = TokenWork {
            head: 1e6,
            head_density: 2.0,
            activations: 16e3,
            density: 3.5,
            link,
            rates: Rates::assumed(DeviceKind::Cpu),
        };
        let stages = |grid: Grid| {
            let layers = 32 / grid.pipeline;
            let stage =
                StageWork { layers, bytes: 2e9, growth: [1.0; 2], slowness: [1.0; 2], slot: 0.0, speed: 1.0 };
            vec![stage; grid.pipeline]
        };
        GRIDS.iter().map(|grid| work.seconds(*grid, &stages(*grid), load)).collect()
    }

    #[test]
    fn a_pipeline_is_for_many_requests_and_divided_layers_are_for_one() {
        let chosen = |link: Link, load: RequestLoad| {
            let choices: Vec<(f64, f64)> =
                regrets(&seconds(link, load)).into_iter().map(|regret| (regret, 1.0)).collect();
            GRIDS[within_share(&choices).unwrap()].pipeline
        };
        assert_eq!(chosen(Link::MEMORY, RequestLoad::ONE), 1);
        assert_eq!(
            chosen(Link::NETWORK, RequestLoad::constant(64)),
            2,
            "sums of 64 tokens go over the network"
        );
        // A single request would take twice as long in a pipeline, and many hardly longer in divided layers.
        assert_eq!(chosen(Link::MEMORY, RequestLoad::up_to(64)), 1);
        let slow = Link { latency: 5e-3, ..Link::NETWORK };
        assert_eq!(chosen(slow, RequestLoad::up_to(64)), 2);
    }

    #[test]
    fn stages_take_turns_for_one_request_and_compute_at_once_for_many() {
        let fast = Link { bytes_per_second: 1e18, latency: 0.0, is_memory: true };
        let [one, many] = seconds(fast, RequestLoad::up_to(64))[1];
        assert!((one / 0.2 - 1.0).abs() < 1e-3, "2 times 2 GB at 20 GB/s: {one}");
        // 64 tokens are bound by arithmetic: 2 stages with half of it each.
        let [_, alone] = seconds(fast, RequestLoad::up_to(64))[0];
        assert!((many / alone - 1.0).abs() < 1e-3, "{many} {alone}");
    }

    #[test]
    fn attention_that_cannot_be_divided_evenly_counts_for_every_request() {
        let one = |slot: f64| {
            let fast = Link { bytes_per_second: 1e18, latency: 0.0, is_memory: true };
            let rates = Rates::assumed(DeviceKind::Cpu);
            let work =
                TokenWork { head: 0.0, head_density: 0.0, activations: 0.0, density: 0.0, link: fast, rates };
            let stage =
                StageWork { layers: 1, bytes: 20e9, growth: [1.0; 2], slowness: [1.0; 2], slot, speed: 1.0 };
            work.seconds(GRIDS[0], &[stage], RequestLoad::up_to(10))
        };
        // A second for the weights, which all requests share, and one for the cache of each.
        assert_eq!(one(0.0), [1.0, 0.1]);
        assert_eq!(one(20e9 / SLOTS), [2.0, 1.1]);
    }

    #[test]
    fn more_requests_read_more_experts() {
        let rates = Rates::assumed(DeviceKind::Cpu);
        let fast = Link { bytes_per_second: 1e18, latency: 0.0, is_memory: true };
        let work =
            TokenWork { head: 0.0, head_density: 0.0, activations: 0.0, density: 0.0, link: fast, rates };
        let stage = StageWork {
            layers: 1,
            bytes: 20e9,
            growth: [1.0, 8.0],
            slowness: [1.0; 2],
            slot: 0.0,
            speed: 1.0,
        };
        assert_eq!(work.seconds(GRIDS[0], &[stage], RequestLoad::up_to(10)), [1.0, 0.8]);
    }

    #[test]
    fn of_nearly_equal_times_memory_decides() {
        assert_eq!(within_share(&[(1.0, 1.3), (1.09, 1.04), (1.05, 1.05), (1.2, 1.0)]), Some(2));
        assert_eq!(within_share(&[(1.0, 1.3), (1.09, 1.2), (1.2, 1.0)]), Some(1), "none holds a share only");
        assert_eq!(within_share(&[(2.0, 1.0), (2.0, 1.0)]), Some(0));
        assert_eq!(within_share(&[(1.0, 3.0), (1.2, 1.0)]), Some(0), "that is not nearly as fast");
        assert_eq!(within_share(&[]), None);
    }

    #[test]
    fn the_worse_case_decides() {
        let found = regrets(&[[1.0, 4.0], [1.5, 2.0], [9.0, 1.9]]);
        assert_eq!(found, [4.0 / 1.9, 1.5, 9.0]);
        assert!(regrets(&[]).is_empty());
    }
}
