//! Layers of the stages of a pipeline.

use std::ops::Range;

/// What a layer costs, or the matrices before the first and after the last.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub(super) struct LayerCost {
    /// The time of a step, in any unit.
    pub(super) time: f64,
    /// Bytes in memory.
    pub(super) held: f64,
}

/// How much more than its share of the memory a stage may take, where another division exists.
pub const MOST_HELD: f64 = 1.05;
/// How much more than the least possible a stage may take where both ends hold the same matrix. With it, SmolLM2 135M is divided into 17
/// and 13 layers in place of 15 and 15 for 32 requests, which two ranks answer 1.71 to 1.74 times as fast as one in place of 1.48 to 1.71 times.
const MOST_HELD_TWICE: f64 = 1.15;

/// Divides layers among stages: no stage takes more than its share of the memory and 5 % if that can be had, and the slowest takes
/// as little time as it can. Shares are in proportion to the stages' speeds, of the bytes that one rank alone would hold (`alone`). The first
/// stage holds `first` besides, the last one `last`; each has at least one layer. Where both are the same matrix, which one rank alone would
/// hold once, no stage can keep to its share: 15 % more than the least are allowed then, as the last stage computes with that matrix, and the
/// first does not.
pub(super) fn balanced_stages(
    layers: &[LayerCost],
    (first, last): (LayerCost, LayerCost),
    alone: f64,
    speeds: &[f64],
) -> Vec<Range<usize>> {
    let (count, stages) = (layers.len(), speeds.len().max(1));
    let mean = speeds.iter().sum::<f64>() / stages as f64;
    let relative = |stage: usize| speeds.get(stage).map_or(1.0, |speed| speed / mean);
    let slowest = (0..stages).map(relative).fold(1.0, f64::min);
    let mut sums = vec![LayerCost::default()];
    let mut sum = LayerCost::default();
    for layer in layers {
        sum = LayerCost { time: sum.time + layer.time, held: sum.held + layer.held };
        sums.push(sum);
    }
    let share = LayerCost {
        time: (sum.time + first.time + last.time).max(f64::MIN_POSITIVE) / stages as f64,
        held: alone.max(1.0) / stages as f64,
    };
    let work = |stage: usize, range: Range<usize>| {
        let at = |index: usize| sums.get(index).copied().unwrap_or_default();
        let (start, end) = (at(range.start), at(range.end));
        let (mut time, mut held) = (end.time - start.time, end.held - start.held);
        for (_, extra) in [(0, first), (stages - 1, last)].into_iter().filter(|(of, _)| *of == stage) {
            time += extra.time;
            held += extra.held;
        }
        let speed = relative(stage);
        (time / share.time / speed, held / share.held / speed)
    };
    let everything = sum.held + first.held + last.held;
    let mut limit = MOST_HELD;
    if everything > alone * (1.0 + 1e-6) {
        let (_, least) = least_cost(count, stages, |stage, range| work(stage, range).1);
        limit = if least > MOST_HELD { MOST_HELD_TWICE * least } else { MOST_HELD };
    }
    let (ranges, _) = least_cost(count, stages, |stage, range| {
        let (time, held) = work(stage, range);
        // A stage that holds too much is worse than any that takes too long, which is at most the whole.
        if held > limit { stages as f64 / slowest + held } else { time }
    });
    ranges
}

/// The layers of each stage with which the stage of the highest cost has the least, and that cost.
fn least_cost(
    count: usize,
    stages: usize,
    cost: impl Fn(usize, Range<usize>) -> f64,
) -> (Vec<Range<usize>>, f64) {
    // The least cost of the slowest of the first stages up to a layer, and where the last of them begins.
    let mut best: Vec<Vec<(f64, usize)>> = Vec::new();
    for stage in 0..stages {
        let row = (0..=count).map(|end| match best.last() {
            None if end == 0 => (f64::INFINITY, 0),
            None => (cost(stage, 0..end), 0),
            Some(before) => {
                let from = (stage..end).map(|start| {
                    let earlier = before.get(start).map_or(f64::INFINITY, |(cost, _)| *cost);
                    (earlier.max(cost(stage, start..end)), start)
                });
                from.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::INFINITY, end))
            }
        });
        best.push(row.collect());
    }
    let least = best.last().and_then(|row| row.get(count)).map_or(f64::INFINITY, |(cost, _)| *cost);
    let mut end = count;
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for row in best.iter().rev() {
        let start = row.get(end).map_or(0, |(_, start)| *start);
        ranges.push(start..end);
        end = start;
    }
    ranges.reverse();
    (ranges, least)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(time: f64, held: f64) -> LayerCost {
        LayerCost { time, held }
    }

    /// The stages of a model in which nothing is on several of them.
    fn stages(layers: &[LayerCost], ends: (LayerCost, LayerCost), speeds: &[f64]) -> Vec<Range<usize>> {
        let alone = layers.iter().chain([&ends.0, &ends.1]).map(|layer| layer.held).sum();
        balanced_stages(layers, ends, alone, speeds)
    }

    #[test]
    fn stages_take_as_long_and_hold_alike() {
        let layers = [cost(1.0, 1.0); 8];
        let none = LayerCost::default();
        assert_eq!(stages(&layers, (none, none), &[1.0; 2]), [0..4, 4..8]);
        assert_eq!(stages(&layers, (none, cost(2.0, 2.0)), &[1.0; 2]), [0..5, 5..8], "the last has the head");
        assert_eq!(stages(&layers, (none, none), &[1.0; 8]).len(), 8);
        assert_eq!(stages(&layers, (none, none), &[1.0; 1]).first(), Some(&(0..8)));
        // An embedding is held and takes no time: memory decides.
        let embedding = cost(0.0, 2.0);
        assert_eq!(stages(&layers, (embedding, cost(2.0, 2.0)), &[1.0; 2]), [0..4, 4..8]);
        // A stage that is three times as fast has three times the layers.
        assert_eq!(stages(&layers, (none, none), &[3.0, 1.0]), [0..6, 6..8]);
        // A matrix that both ends have, and one rank alone would have once: no stage keeps to its share, and the first, which only
        // reads a row of it, has more layers than if all held alike.
        let (many, tied) = ([cost(1.0, 1.0); 40], (cost(0.0, 8.0), cost(8.0, 8.0)));
        assert_eq!(balanced_stages(&many, tied, 48.0, &[1.0; 2]), [0..24, 24..40]);
        assert_eq!(
            stages(&many, tied, &[1.0; 2]),
            [0..21, 21..40],
            "two matrices: 5 % are allowed to take as long"
        );
        assert_eq!(stages(&layers, (none, cost(4.0, 0.0)), &[1.0; 2]), [0..4, 4..8], "memory comes first");
        // Where no division keeps to the share, the one that exceeds it least.
        assert_eq!(stages(&layers, (cost(0.0, 20.0), none), &[1.0; 2]), [0..1, 1..8]);
    }

    #[test]
    fn the_best_of_all_divisions_is_found() {
        let mut state = 7_u64;
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % 100 + 1) as f64
        };
        for round in 0..200 {
            let layers: Vec<LayerCost> = (0..7).map(|_| cost(random(), random())).collect();
            let ends = (cost(0.0, random()), cost(random(), random()));
            let ranges = stages(&layers, ends, &[1.0; 3]);
            let whole = |pick: fn(&LayerCost) -> f64| {
                layers.iter().chain([&ends.0, &ends.1]).map(pick).sum::<f64>() / 3.0
            };
            let (time, held) = (whole(|of| of.time), whole(|of| of.held));
            let judge = |cuts: [usize; 4]| {
                let mut worst = 0.0_f64;
                for stage in 0..3 {
                    let mut own: Vec<LayerCost> = layers[cuts[stage]..cuts[stage + 1]].to_vec();
                    own.extend((stage == 0).then_some(ends.0));
                    own.extend((stage == 2).then_some(ends.1));
                    let sum = |pick: fn(&LayerCost) -> f64| own.iter().map(pick).sum::<f64>();
                    let (t, h) = (sum(|of| of.time) / time, sum(|of| of.held) / held);
                    worst = worst.max(if h > MOST_HELD { 3.0 + h } else { t });
                }
                worst
            };
            let found = judge([0, ranges[1].start, ranges[2].start, 7]);
            for a in 1..6 {
                for b in a + 1..7 {
                    assert!(found <= judge([0, a, b, 7]) + 1e-9, "round {round}: {ranges:?}, {a}, {b}");
                }
            }
        }
    }
}
