//! Small numbers, one per byte, packed as the formats store them.

#![expect(clippy::indexing_slicing, reason = "indices are below the lengths of arrays")]

/// 32 numbers of four bits: byte `i` holds number `i`, and number `i + 16` in its high bits.
#[inline(always)]
pub(super) fn nibbles(codes: &[u8; 32]) -> [u8; 16] {
    let mut packed = [0; 16];
    for i in 0..16 {
        packed[i] = (codes[i] & 15) | (codes[i + 16] << 4);
    }
    packed
}

/// The fifth bits of 32 numbers: bit `i` is that of number `i`.
#[inline(always)]
pub(super) fn fifth_bits(codes: &[u8; 32]) -> [u8; 4] {
    let mut bits = 0u32;
    for (i, code) in codes.iter().enumerate() {
        bits |= u32::from(code >> 4 & 1) << i;
    }
    bits.to_le_bytes()
}

/// 256 numbers, `BITS` bits of each from bit `SHIFT`, as the formats of 256 elements store them: in each `LEN` bytes, the
/// first `LEN` numbers are in the lowest bits, the next ones above them.
#[inline(always)]
pub(super) fn planes<const BITS: usize, const SHIFT: usize, const LEN: usize, const BYTES: usize>(
    codes: &[u8; 256],
) -> [u8; BYTES] {
    let mut packed = [0; BYTES];
    let per_byte = 8 / BITS;
    let (chunks, _) = packed.as_chunks_mut::<LEN>();
    for (c, chunk) in chunks.iter_mut().enumerate() {
        for plane in 0..per_byte {
            let first = (c * per_byte + plane) * LEN;
            for (i, byte) in chunk.iter_mut().enumerate() {
                let bits = codes[(first + i) % 256] >> SHIFT & ((1 << BITS) - 1) as u8;
                *byte |= bits << (BITS * plane);
            }
        }
    }
    packed
}
