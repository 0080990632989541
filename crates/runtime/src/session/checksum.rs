//! A checksum of bytes that were saved.

/// Sums up bytes, eight at a time. Every change inside one aligned group of eight bytes changes the sum; other damage
/// goes unnoticed once in 2⁶⁴ times. It does not resist deliberate changes.
#[derive(Clone, Default)]
pub(super) struct Checksum {
    sum: u64,
    length: u64,
    /// The bytes of a group that is not complete.
    rest: [u8; 8],
}

impl Checksum {
    /// Adds bytes; how they are cut into calls does not matter.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        let used = (self.length % 8) as usize;
        self.length = self.length.wrapping_add(bytes.len() as u64);
        let (start, bytes) = bytes.split_at(bytes.len().min((8 - used) % 8));
        for (at, byte) in self.rest.iter_mut().skip(used).zip(start) {
            *at = *byte;
        }
        if used > 0 && used + start.len() == 8 {
            self.mix(u64::from_le_bytes(self.rest));
        }
        let (groups, rest) = bytes.as_chunks();
        for group in groups {
            self.mix(u64::from_le_bytes(*group));
        }
        for (at, byte) in self.rest.iter_mut().zip(rest) {
            *at = *byte;
        }
    }

    /// The sum of all bytes.
    pub(super) fn finish(mut self) -> u64 {
        let used = (self.length % 8) as usize;
        self.rest.iter_mut().skip(used).for_each(|byte| *byte = 0);
        self.mix(u64::from_le_bytes(self.rest));
        self.mix(self.length);
        self.sum
    }

    /// Invertible for each group, so that different groups never give the same sum.
    fn mix(&mut self, group: u64) {
        let sum = (self.sum ^ group).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.sum = sum ^ (sum >> 32);
    }
}

#[cfg(test)]
mod tests {
    use super::Checksum;

    fn sum(parts: &[&[u8]]) -> u64 {
        let mut checksum = Checksum::default();
        parts.iter().for_each(|part| checksum.add(part));
        checksum.finish()
    }

    #[test]
    fn cuts_do_not_matter_and_every_bit_does() {
        let bytes: Vec<u8> = (0..53).map(|i| (i * 37) as u8).collect();
        let whole = sum(&[&bytes]);
        for first in 0..bytes.len() {
            for second in first..bytes.len() {
                assert_eq!(sum(&[&bytes[..first], &bytes[first..second], &bytes[second..]]), whole);
            }
        }
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(sum(&[&changed]), whole, "bit {bit}");
        }
        for length in 0..bytes.len() {
            assert_ne!(sum(&[&bytes[..length]]), whole);
        }
        assert_ne!(sum(&[&[0; 8]]), sum(&[&[0; 7]]));
    }
    /// Saved states hold it: another one would refuse all that were saved before.
    #[test]
    fn the_sum_of_some_bytes_stays_as_it_is() {
        assert_eq!(sum(&[b"QDRGSTAT and more"]), 0xb37d_52cd_bf23_325a);
    }
}
