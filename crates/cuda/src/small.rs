//! Small writes and copies that wait to be made by one launch: what goes to the device comes with the launch's
//! arguments.

use crate::launch::Argument;
use crate::lower::overlap;

/// The most moves of a launch, and the most bytes of one.
const MOST: usize = 8;
pub(crate) const SMALL: usize = 128;
/// Bytes to be written that a launch has room for.
const ROOM: usize = 448;

/// What the kernel is told.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Moves {
    to: [u64; MOST],
    /// Where bytes are copied from; 0 where they are in `data`.
    from: [u64; MOST],
    len: [u32; MOST],
    at: [u32; MOST],
    data: [u8; ROOM],
}

// SAFETY: `struct Moves` of elementwise.cu has the same fields in the same order.
unsafe impl Argument for Moves {}

/// Moves that are to be made before anything else that is given to a queue, except waiting. They are made side by side.
pub(crate) struct SmallMoves {
    moves: Moves,
    count: usize,
    bytes: usize,
}

impl SmallMoves {
    pub(crate) fn new() -> SmallMoves {
        let moves = Moves { to: [0; MOST], from: [0; MOST], len: [0; MOST], at: [0; MOST], data: [0; ROOM] };
        SmallMoves { moves, count: 0, bytes: 0 }
    }

    /// Takes a write of bytes to an address; `false` if it is too large, there is no room, or its order matters.
    pub(crate) fn write(&mut self, to: u64, bytes: &[u8]) -> bool {
        let start = self.bytes;
        if !self.fits(to, None, bytes.len()) {
            return false;
        }
        let Some(room) = self.moves.data.get_mut(start..start + bytes.len()) else { return false };
        room.copy_from_slice(bytes);
        self.bytes += bytes.len();
        self.push(to, 0, bytes.len(), start)
    }

    /// Takes a copy from one address to another; `false` as for a write.
    pub(crate) fn copy(&mut self, to: u64, from: u64, len: usize) -> bool {
        self.fits(to, Some(from), len) && self.push(to, from, len, 0)
    }

    /// Hands out the moves that are waiting, with their number; there are none then.
    pub(crate) fn take(&mut self) -> Option<(&Moves, u32)> {
        let count = std::mem::take(&mut self.count);
        self.bytes = 0;
        (count > 0).then_some((&self.moves, count as u32))
    }

    /// Whether a move is small, and neither touches what another one writes nor writes what another one reads.
    fn fits(&self, to: u64, from: Option<u64>, len: usize) -> bool {
        let Moves { to: targets, from: sources, len: lens, .. } = &self.moves;
        let mut waiting = targets.iter().zip(sources).zip(lens).take(self.count);
        len <= SMALL
            && waiting.all(|((target, source), other)| {
                let other = *other as usize;
                !overlap(to, len, *target, other)
                    && !from.is_some_and(|from| overlap(from, len, *target, other))
                    && (*source == 0 || !overlap(to, len, *source, other))
            })
    }

    fn push(&mut self, to: u64, from: u64, len: usize, at: usize) -> bool {
        let (moves, index) = (&mut self.moves, self.count);
        let (Some(target), Some(source), Some(length), Some(start)) = (
            moves.to.get_mut(index),
            moves.from.get_mut(index),
            moves.len.get_mut(index),
            moves.at.get_mut(index),
        ) else {
            return false;
        };
        (*target, *source, *length, *start) = (to, from, len as u32, at as u32);
        self.count += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_wait_together_until_there_is_no_room() {
        let mut small = SmallMoves::new();
        for n in 0..3 {
            assert!(small.write(1000 + 100 * n, &[n as u8; 100]));
        }
        assert!(!small.write(5000, &[0; SMALL + 1]), "too large");
        assert!(small.write(5000, &[7; SMALL]));
        assert!(!small.write(6000, &[0; 100]), "no room for its bytes");
        assert!((0..4).all(|n| small.copy(7000 + 8 * n, 9000, 8)), "copies bring no bytes");
        assert!(!small.copy(8000, 9000, 8), "a ninth");
        let (moves, count) = small.take().unwrap();
        assert_eq!((count, moves.to[2], moves.len[2], moves.at[2]), (8, 1200, 100, 200));
        assert_eq!((&moves.data[200..300], moves.from[2]), (&[2u8; 100][..], 0));
        assert_eq!((moves.to[5], moves.from[5], moves.len[5]), (7008, 9000, 8));
        assert!(small.take().is_none());
        assert!(small.write(6000, &[0; 100]), "there is room again");
    }

    #[test]
    fn moves_whose_order_matters_do_not_wait_together() {
        let mut small = SmallMoves::new();
        assert!(small.write(1000, &[0; 8]));
        assert!(small.copy(2000, 3000, 8));
        assert!(!small.write(1004, &[0; 8]), "written twice");
        assert!(!small.copy(1007, 4000, 4), "written twice");
        assert!(!small.copy(4000, 1004, 8), "written, then read");
        assert!(!small.copy(4000, 2000, 1), "written, then read");
        assert!(!small.write(3007, &[0; 8]), "read, then written");
        assert!(small.copy(4000, 3000, 8), "read twice");
        assert!(small.write(1008, &[0; 8]), "beside");
    }
}
