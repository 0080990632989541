//! The sizes that steps come in, so that few plans serve all of them.

use quadriga_graph::PAGE_SLOTS;

use crate::engine::SCRAP_PAGES;

/// The sizes of steps with parts of prompts: powers of two, and three quarters of them.
pub(in crate::serving) fn coarse_bucket(count: usize) -> usize {
    let power = count.next_power_of_two();
    match power / 4 * 3 {
        most if power >= 8 && count > 0 && count <= most => most,
        _ if count == 0 => 0,
        _ => power,
    }
}

/// Steps come in these sizes, so that few plans serve all of them: 1, 2, 4, multiples of 8 up to 256, and larger steps in an
/// eighth of their size.
pub(in crate::serving) fn bucket(count: usize) -> usize {
    match count {
        0..=2 => count,
        3..=4 => 4,
        5..=256 => count.next_multiple_of(8),
        _ => count.next_multiple_of((count.next_power_of_two() / 8).min(SCRAP_PAGES * PAGE_SLOTS)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_padded_to_few_sizes_of_which_none_is_much_too_large() {
        for (bucket, sizes, waste) in
            [(bucket as fn(usize) -> usize, 64, 8), (coarse_bucket as fn(usize) -> usize, 24, 4)]
        {
            let mut seen = std::collections::BTreeSet::new();
            for count in 0..=2048 {
                let size = bucket(count);
                assert!(size >= count && bucket(size) == size, "{count}: {size}");
                assert!(size - count <= (count / 2).max(waste), "{count}: {size}");
                seen.insert(size);
            }
            assert!(seen.len() <= sizes, "{seen:?}");
        }
    }
}
