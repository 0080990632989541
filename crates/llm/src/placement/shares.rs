//! The shares of a model's layers that several accelerators get.

use quadriga_runtime::Rates;

/// Shares of layers for accelerators, of which `given` are the caller's, if there are any; those that are not named get none.
///
/// Otherwise each gets layers in proportion to its rate, so that all take equally long, up to its `capacity` in bytes; what is too much
/// for one is divided among the others. `bytes` is the size of what they share.
pub(super) fn shares(given: &[f32], rates: &[Rates], capacities: &[Option<u64>], bytes: u64) -> Vec<f64> {
    let count = capacities.len();
    if !given.is_empty() {
        let named = given.iter().map(|share| f64::from(*share));
        return named.chain(std::iter::repeat(0.0)).take(count).collect();
    }
    let rate = |device: usize| rates.get(device).map_or(1.0, |rates| rates.read.max(1.0));
    let room =
        |device: usize| capacities.get(device).copied().flatten().map_or(f64::INFINITY, |room| room as f64);
    let mut shares = vec![0.0; count];
    let (mut left, mut open): (f64, Vec<usize>) = (bytes.max(1) as f64, (0..count).collect());
    // Each round fills at least one accelerator, or is the last.
    while !open.is_empty() {
        let all: f64 = open.iter().map(|device| rate(*device)).sum();
        let is_full = |device: &usize| left * rate(*device) / all >= room(*device);
        let (full, more): (Vec<usize>, Vec<usize>) = open.iter().copied().partition(is_full);
        let last = full.is_empty();
        for device in if last { &more } else { &full } {
            if let Some(share) = shares.get_mut(*device) {
                *share = if last { left * rate(*device) / all } else { room(*device) };
            }
        }
        left -= full.iter().map(|device| room(*device)).sum::<f64>();
        open = if last { Vec::new() } else { more };
    }
    shares
}

/// The accelerator in whose share a place between 0 and 1 is.
pub(super) fn device_at(shares: &[f64], place: f64) -> usize {
    let sum: f64 = shares.iter().sum();
    let ends = shares.iter().scan(0.0, |end, share| {
        *end += share;
        Some(*end)
    });
    ends.take_while(|end| *end <= place * sum).count().min(last_used(shares))
}

/// The first accelerator that has a share.
pub(super) fn first_used(shares: &[f64]) -> usize {
    shares.iter().position(|share| *share > 0.0).unwrap_or(0)
}

/// The last accelerator that has a share.
pub(super) fn last_used(shares: &[f64]) -> usize {
    shares.iter().rposition(|share| *share > 0.0).unwrap_or(shares.len().saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use quadriga_runtime::DeviceKind;

    use super::*;

    fn rates(read: f64) -> Rates {
        Rates { read, ..Rates::assumed(DeviceKind::Gpu) }
    }

    #[test]
    fn faster_accelerators_get_more_as_far_as_it_fits() {
        let (slow, fast) = (rates(1e12), rates(3e12));
        assert_eq!(shares(&[], &[slow, slow], &[None, None], 100), [50.0, 50.0]);
        assert_eq!(shares(&[], &[slow, fast], &[Some(90), Some(90)], 100), [25.0, 75.0]);
        // The fast one is full; the other has the rest.
        assert_eq!(shares(&[], &[slow, fast], &[Some(90), Some(60)], 100), [40.0, 60.0]);
        // Nothing fits: each has what it can hold.
        assert_eq!(shares(&[], &[slow, fast, slow], &[Some(10), Some(20), Some(0)], 100), [10.0, 20.0, 0.0]);
        assert_eq!(shares(&[], &[], &[], 100), [0.0; 0]);
    }

    #[test]
    fn given_shares_are_taken_as_they_are() {
        assert_eq!(shares(&[3.0, 1.0], &[], &[Some(0), None], 100), [3.0, 1.0]);
        assert_eq!(shares(&[3.0], &[], &[None, None], 100), [3.0, 0.0], "the second gets none");
    }

    #[test]
    fn places_fall_to_the_accelerator_whose_share_they_are_in() {
        let places = |shares: &[f64]| -> Vec<usize> {
            (0..4).map(|place| device_at(shares, f64::from(place) / 4.0)).collect()
        };
        assert_eq!(places(&[1.0, 1.0]), [0, 0, 1, 1]);
        assert_eq!(places(&[3.0, 1.0]), [0, 0, 0, 1]);
        assert_eq!(places(&[0.0, 1.0, 0.0]), [1; 4]);
        assert_eq!((first_used(&[0.0, 1.0, 0.0]), last_used(&[0.0, 1.0, 0.0])), (1, 1));
        assert_eq!(device_at(&[1.0, 0.0], 1.0), 0);
    }
}
