//! Random numbers that are the same on every machine.

/// SplitMix64, for which every seed is equally good.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Random {
    pub(crate) state: u64,
}

impl Random {
    /// A random number in `[0, 1)`.
    pub(crate) fn unit(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        (bits >> 11) as f64 / (1u64 << 53) as f64
    }
}
