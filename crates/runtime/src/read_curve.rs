//! How fast weights are read, by how much is read in turn: caches keep a part of it from one run to the next.

use serde::{Deserialize, Serialize};

/// The most points of a curve.
const MAX_POINTS: usize = 8;

/// A measured point of a [`ReadCurve`].
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct ReadPoint {
    /// Bytes of weights that every run reads once.
    pub working_set: f64,
    /// Bytes of them per second.
    pub rate: f64,
}

/// Bytes per second of matmuls with one row, by the bytes that every run reads once. Without points it is unknown.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(from = "Vec<ReadPoint>", into = "Vec<ReadPoint>")]
pub struct ReadCurve {
    /// By working set; those after the last have a rate of 0.
    points: [ReadPoint; MAX_POINTS],
}

impl ReadCurve {
    /// A curve without points.
    pub const UNKNOWN: ReadCurve =
        ReadCurve { points: [ReadPoint { working_set: 0.0, rate: 0.0 }; MAX_POINTS] };

    /// A curve through points; of more than eight, the smallest working sets. Points that are not positive are left out.
    pub fn new(points: &[ReadPoint]) -> ReadCurve {
        let is_positive = |value: f64| value.is_finite() && value > 0.0;
        let known = points.iter().filter(|point| is_positive(point.working_set) && is_positive(point.rate));
        let mut known: Vec<ReadPoint> = known.copied().collect();
        known.sort_by(|a, b| a.working_set.total_cmp(&b.working_set));
        known.dedup_by(|a, b| a.working_set == b.working_set);
        let mut curve = ReadCurve::UNKNOWN;
        curve.points.iter_mut().zip(known).for_each(|(place, point)| *place = point);
        curve
    }

    /// The points, by working set.
    pub fn points(&self) -> &[ReadPoint] {
        let count = self.points.iter().take_while(|point| point.rate > 0.0).count();
        self.points.get(..count).unwrap_or_default()
    }

    /// The rate for a working set: that of the nearest point outside of the measured range, and between two points seconds per byte
    /// in proportion to the logarithm of the working set. `None` if the curve has no points.
    pub fn rate(&self, working_set: f64) -> Option<f64> {
        let points = self.points();
        let after = points.partition_point(|point| point.working_set < working_set);
        let (before, after) =
            match (after.checked_sub(1).and_then(|index| points.get(index)), points.get(after)) {
                (Some(before), Some(after)) => (before, after),
                (Some(only), None) | (None, Some(only)) => return Some(only.rate),
                (None, None) => return None,
            };
        let share = (working_set / before.working_set).ln() / (after.working_set / before.working_set).ln();
        Some(1.0 / ((1.0 - share) / before.rate + share / after.rate))
    }

    /// The curve of one of so many sets of weights that are read in turn and share the caches.
    pub fn in_turn(&self, sets: usize) -> ReadCurve {
        let sets = sets.max(1) as f64;
        let of = |point: &ReadPoint| ReadPoint { working_set: point.working_set / sets, rate: point.rate };
        ReadCurve::new(&self.points().iter().map(of).collect::<Vec<_>>())
    }

    /// The curve of one of several equal ranks that read at once, where this one is of all of them.
    pub fn share_of(&self, ranks: usize) -> ReadCurve {
        let ranks = ranks.max(1) as f64;
        let of = |point: &ReadPoint| ReadPoint {
            working_set: point.working_set / ranks,
            rate: point.rate / ranks,
        };
        ReadCurve::new(&self.points().iter().map(of).collect::<Vec<_>>())
    }
}

impl From<Vec<ReadPoint>> for ReadCurve {
    fn from(points: Vec<ReadPoint>) -> ReadCurve {
        ReadCurve::new(&points)
    }
}

impl From<ReadCurve> for Vec<ReadPoint> {
    fn from(curve: ReadCurve) -> Vec<ReadPoint> {
        curve.points().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(f64, f64)]) -> ReadCurve {
        let points =
            points.iter().map(|(working_set, rate)| ReadPoint { working_set: *working_set, rate: *rate });
        ReadCurve::new(&points.collect::<Vec<_>>())
    }

    #[test]
    fn rates_between_points_are_between_theirs() {
        assert_eq!(ReadCurve::UNKNOWN.rate(5.0), None);
        let found = curve(&[(64.0, 40.0), (4.0, 120.0), (16.0, 60.0), (0.0, 9.0), (8.0, f64::NAN)]);
        assert_eq!(found.points().len(), 3, "{found:?}");
        for (working_set, rate) in [(1.0, 120.0), (4.0, 120.0), (16.0, 60.0), (64.0, 40.0), (1e9, 40.0)] {
            let at = found.rate(working_set).unwrap();
            assert!((at - rate).abs() < 1e-9, "{working_set}: {at}");
        }
        // Half way between 4 and 16 on a logarithmic scale: the mean of 1/120 and 1/60.
        assert!((found.rate(8.0).unwrap() - 80.0).abs() < 1e-9);
        let one = curve(&[(10.0, 3.0)]);
        assert_eq!([one.rate(1.0), one.rate(100.0)], [Some(3.0); 2]);
    }

    #[test]
    fn ranks_share_rates_and_caches() {
        let two = curve(&[(8.0, 120.0), (32.0, 60.0)]).share_of(2);
        assert_eq!(two, curve(&[(4.0, 60.0), (16.0, 30.0)]));
        assert_eq!(two.in_turn(2), curve(&[(2.0, 60.0), (8.0, 30.0)]));
    }

    #[test]
    fn curves_are_stored_as_their_points() {
        let found = curve(&[(4.0, 2.0), (8.0, 1.0)]);
        let text = serde_json::to_string(&found).unwrap();
        assert_eq!(text, r#"[{"working_set":4.0,"rate":2.0},{"working_set":8.0,"rate":1.0}]"#);
        assert_eq!(serde_json::from_str::<ReadCurve>(&text).unwrap(), found);
    }
}
