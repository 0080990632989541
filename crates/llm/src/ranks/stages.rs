//! Layers of the stages of a pipeline.

use std::ops::Range;

/// The bytes of a layer: those that a token reads, of experts the share that it uses, and those that are held in memory.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub(super) struct LayerBytes {
    pub(super) read: f64,
    pub(super) held: f64,
}

/// How much more than its share of the memory a stage may take, where another division exists.
pub const MOST_HELD: f64 = 1.05;

/// Divides layers among stages: no stage takes more than its share of the memory and 5 % if that can be had, and the slowest reads
/// as little as it can. Shares are in proportion to the stages' speeds, of the bytes that one rank alone would hold (`alone`). The first
/// stage holds `first` besides, the last one `last`; each has at least one layer.
pub(super) fn balanced_stages(
    layers: &[LayerBytes],
    (first, last): (LayerBytes, LayerBytes),
    alone: f64,
    speeds: &[f64],
) -> Vec<Range<usize>> {
    let (count, stages) = (layers.len(), speeds.len().max(1));
    let mean = speeds.iter().sum::<f64>() / stages as f64;
    let relative = |stage: usize| speeds.get(stage).map_or(1.0, |speed| speed / mean);
    let slowest = (0..stages).map(relative).fold(1.0, f64::min);
    let mut sums = vec![LayerBytes::default()];
    let mut sum = LayerBytes::default();
    for layer in layers {
        sum = LayerBytes { read: sum.read + layer.read, held: sum.held + layer.held };
        sums.push(sum);
    }
    let share = LayerBytes {
        read: (sum.read + first.read + last.read).max(1.0) / stages as f64,
        held: alone.max(1.0) / stages as f64,
    };
    let cost = |stage: usize, range: Range<usize>| {
        let at = |index: usize| sums.get(index).copied().unwrap_or_default();
        let (start, end) = (at(range.start), at(range.end));
        let (mut read, mut held) = (end.read - start.read, end.held - start.held);
        for (_, extra) in [(0, first), (stages - 1, last)].into_iter().filter(|(of, _)| *of == stage) {
            read += extra.read;
            held += extra.held;
        }
        let speed = relative(stage);
        let (read, held) = (read / share.read / speed, held / share.held / speed);
        // A stage that holds too much is worse than any that reads too much, which is at most the whole.
        if held > MOST_HELD { stages as f64 / slowest + held } else { read }
    };
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
    let mut end = count;
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for row in best.iter().rev() {
        let start = row.get(end).map_or(0, |(_, start)| *start);
        ranges.push(start..end);
        end = start;
    }
    ranges.reverse();
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(read: f64, held: f64) -> LayerBytes {
        LayerBytes { read, held }
    }

    /// The stages of a model in which nothing is on several of them.
    fn stages(layers: &[LayerBytes], ends: (LayerBytes, LayerBytes), speeds: &[f64]) -> Vec<Range<usize>> {
        let alone = layers.iter().chain([&ends.0, &ends.1]).map(|layer| layer.held).sum();
        balanced_stages(layers, ends, alone, speeds)
    }

    #[test]
    fn stages_read_alike_and_hold_alike() {
        let layers = [bytes(1.0, 1.0); 8];
        let none = LayerBytes::default();
        assert_eq!(stages(&layers, (none, none), &[1.0; 2]), [0..4, 4..8]);
        assert_eq!(
            stages(&layers, (none, bytes(2.0, 2.0)), &[1.0; 2]),
            [0..5, 5..8],
            "the last has the head"
        );
        assert_eq!(stages(&layers, (none, none), &[1.0; 8]).len(), 8);
        assert_eq!(stages(&layers, (none, none), &[1.0; 1]).first(), Some(&(0..8)));
        // An embedding is held and not read: memory decides.
        let embedding = bytes(0.0, 2.0);
        assert_eq!(stages(&layers, (embedding, bytes(2.0, 2.0)), &[1.0; 2]), [0..4, 4..8]);
        // A stage that is three times as fast has three times the layers.
        assert_eq!(stages(&layers, (none, none), &[3.0, 1.0]), [0..6, 6..8]);
        // A matrix that both ends have, and one rank alone would have once: no stage keeps to its share, and all hold alike.
        let (many, tied) = ([bytes(1.0, 1.0); 40], (bytes(0.0, 8.0), bytes(8.0, 8.0)));
        assert_eq!(balanced_stages(&many, tied, 48.0, &[1.0; 2]), [0..20, 20..40]);
        assert_eq!(
            stages(&many, tied, &[1.0; 2]),
            [0..21, 21..40],
            "two matrices: 5 % are allowed to read alike"
        );
        assert_eq!(stages(&layers, (none, bytes(4.0, 0.0)), &[1.0; 2]), [0..4, 4..8], "memory comes first");
        // Where no division keeps to the share, the one that exceeds it least.
        assert_eq!(stages(&layers, (bytes(0.0, 20.0), none), &[1.0; 2]), [0..1, 1..8]);
    }

    #[test]
    fn the_best_of_all_divisions_is_found() {
        let mut state = 7_u64;
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % 100 + 1) as f64
        };
        for round in 0..200 {
            let layers: Vec<LayerBytes> = (0..7).map(|_| bytes(random(), random())).collect();
            let ends = (bytes(0.0, random()), bytes(random(), random()));
            let ranges = stages(&layers, ends, &[1.0; 3]);
            let whole = |pick: fn(&LayerBytes) -> f64| {
                layers.iter().chain([&ends.0, &ends.1]).map(pick).sum::<f64>() / 3.0
            };
            let (read, held) = (whole(|of| of.read), whole(|of| of.held));
            let judge = |cuts: [usize; 4]| {
                let mut worst = 0.0_f64;
                for stage in 0..3 {
                    let mut own: Vec<LayerBytes> = layers[cuts[stage]..cuts[stage + 1]].to_vec();
                    own.extend((stage == 0).then_some(ends.0));
                    own.extend((stage == 2).then_some(ends.1));
                    let sum = |pick: fn(&LayerBytes) -> f64| own.iter().map(pick).sum::<f64>();
                    let (r, h) = (sum(|of| of.read) / read, sum(|of| of.held) / held);
                    worst = worst.max(if h > MOST_HELD { 3.0 + h } else { r });
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
