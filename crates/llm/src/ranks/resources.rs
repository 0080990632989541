//! What ranks have: how fast each is, and the memory that it has for its part.

use quadriga_runtime::{Rates, byte_text};

use super::layer_parts::refused;
use crate::Result;

/// The speed and the memory of a rank.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RankResources {
    /// How fast it is, as a multiple of any unit that all ranks share: bytes that its device reads in a second, or its threads.
    pub speed: f64,
    /// Bytes that are free on its devices; `None` if that is not known.
    pub free: Option<u64>,
    /// How fast its device reads memory and multiplies matrices, where that is known: divisions are compared by it, and by those of
    /// all ranks, how long the output matrix takes beside the layers.
    pub rates: Option<Rates>,
}

impl RankResources {
    /// A rank whose memory is not limited, and whose rates are not known.
    pub fn of_speed(speed: f64) -> RankResources {
        RankResources { speed, free: None, rates: None }
    }
}

/// The share of the free memory that weights and KV cache may take: results and work memory come besides.
const USABLE: f64 = 0.95;
/// How often shares are reduced until all fit.
const ATTEMPTS: usize = 24;

/// A division in which no rank holds more than it has room for, and the speeds by which it is made: where a rank in proportion to its
/// speed would hold too much, the others take more. `divide` makes one for some speeds, with the bytes that each rank holds.
pub(super) fn within_memory<T>(
    resources: &[RankResources],
    divide: impl Fn(&[f64]) -> Result<(T, Vec<f64>)>,
) -> Result<(T, Vec<f64>)> {
    let mut speeds: Vec<f64> = resources.iter().map(|rank| rank.speed).collect();
    let room = |rank: &RankResources| rank.free.map_or(f64::INFINITY, |free| USABLE * free as f64);
    let mut attempts = 0;
    loop {
        let (found, held) = divide(&speeds)?;
        let exceeds = |(held, rank): (&f64, &RankResources)| *held > room(rank);
        if !held.iter().zip(resources).any(exceeds) {
            return Ok((found, speeds));
        }
        attempts += 1;
        if attempts == ATTEMPTS {
            return Err(refused(shortage(resources, &held)));
        }
        for ((speed, held), rank) in speeds.iter_mut().zip(&held).zip(resources) {
            if *held > room(rank) {
                // A little less than there is room for, since the others' shares grow, too.
                *speed *= (0.97 * room(rank) / held).clamp(0.05, 0.99);
            }
        }
    }
}

/// Which rank has too little memory, with the numbers.
fn shortage(resources: &[RankResources], held: &[f64]) -> String {
    let missing = |(_, (held, rank)): &(usize, (&f64, &RankResources))| {
        rank.free.map_or(f64::NEG_INFINITY, |free| **held - USABLE * free as f64)
    };
    let ranks = held.iter().zip(resources).enumerate();
    let worst = ranks.max_by(|a, b| missing(a).total_cmp(&missing(b)));
    worst.map_or_else(String::new, |(number, (held, rank))| {
        let free = rank.free.unwrap_or(0);
        format!(
            "rank {number} needs {} for weights and KV cache, and has {} free; the others have no room for more",
            byte_text(*held as u64),
            byte_text(free)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1000 bytes, divided in proportion.
    fn divide(speeds: &[f64]) -> Result<((), Vec<f64>)> {
        let all: f64 = speeds.iter().sum();
        Ok(((), speeds.iter().map(|speed| 1000.0 * speed / all).collect()))
    }

    fn held(resources: &[RankResources]) -> Result<Vec<f64>> {
        let (_, speeds) = within_memory(resources, divide)?;
        divide(&speeds).map(|(_, held)| held)
    }

    fn rank(speed: f64, free: u64) -> RankResources {
        RankResources { free: Some(free), ..RankResources::of_speed(speed) }
    }

    #[test]
    fn a_rank_with_little_memory_holds_less_and_the_others_share_the_rest() {
        let plenty = [RankResources::of_speed(1.0), rank(3.0, 10_000)];
        assert_eq!(held(&plenty).unwrap(), [250.0, 750.0]);
        let found = held(&[rank(3.0, 200), rank(1.0, 10_000), rank(2.0, 10_000)]).unwrap();
        assert!(found[0] <= 190.0 && found[0] > 120.0, "{found:?}");
        assert!((found[2] / found[1] - 2.0).abs() < 1e-9, "in proportion to their speeds: {found:?}");
        // The rank that takes more may come to its own limit.
        let found = held(&[rank(1.0, 100), rank(1.0, 400), rank(1.0, 10_000)]).unwrap();
        assert!(found[0] <= 95.0 && found[1] <= 380.0, "{found:?}");
    }

    #[test]
    fn what_does_not_fit_is_an_error_with_rank_and_bytes() {
        let error = held(&[rank(1.0, 500), rank(1.0, 400)]).unwrap_err().to_string();
        assert!(error.contains("rank ") && error.contains("needs ") && error.contains(" free"), "{error}");
        let error = held(&[rank(1.0, 2000), rank(1.0, 0)]).unwrap_err().to_string();
        assert!(error.contains("rank 1 needs"), "{error}");
    }
}
