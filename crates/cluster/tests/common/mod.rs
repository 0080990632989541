//! What every communicator must do, checked by each of its ranks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "tests")]

use quadriga_cluster::{Communicator, Operation, Reduction};

/// A small random number generator: the same on all ranks.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = self.0 ^ (self.0 >> 33);
        x.wrapping_mul(0xff51_afd7_ed55_8ccd) >> 20
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// The value of an element on a rank: small integers, whose sums are exact in any order.
fn value(round: usize, rank: usize, index: usize) -> f32 {
    ((round * 31 + rank * 7 + index * 13) % 251) as f32 - 125.0
}

fn bytes_of(round: usize, rank: usize, len: usize) -> Vec<u8> {
    (0..len).map(|index| (round * 17 + rank * 5 + index) as u8).collect()
}

/// Divides the ranks twice, and compares operations of the groups between those of all.
pub(crate) fn groups(ranks: &dyn Communicator, seed: u64) {
    let (rank, size) = (ranks.rank(), ranks.size());
    // Neighbours; and those that are in the same place of each.
    let rows = ranks.split((rank / 2) as u32).unwrap();
    let columns = ranks.split((rank % 2) as u32).unwrap();
    assert_eq!((rows.rank(), rows.size()), (rank % 2, (size - rank / 2 * 2).min(2)));
    assert_eq!((columns.rank(), columns.size()), (rank / 2, (size + 1 - rank % 2) / 2));
    for round in 0..3 {
        random_operations(&*rows, seed + round + (rank / 2) as u64 * 100, 8);
        random_operations(ranks, seed + round, 4);
        random_operations(&*columns, seed + round + (rank % 2) as u64 * 100, 8);
    }
    let within = rows.split(rows.rank() as u32).unwrap();
    assert_eq!((within.rank(), within.size()), (0, 1));
}

/// Every rank sends messages to all others before it receives any: some together fill every buffer of a transport, so that this
/// ends only if no send waits for its receiver.
pub(crate) fn crossed_messages(ranks: &dyn Communicator) {
    let (rank, size) = (ranks.rank(), ranks.size());
    let lengths = [0, 5, 1 << 20, 3000, 3 << 20, 70_000];
    let others = || (0..size).filter(move |other| *other != rank);
    for to in others() {
        for (number, len) in lengths.into_iter().enumerate() {
            let (bytes, tag) = (bytes_of(number, rank, len), number as u16);
            ranks.run(Operation::Send { bytes: &bytes, to, tag }).unwrap();
        }
    }
    // What is sent meanwhile does not overtake it, and other operations go on.
    ranks.barrier().unwrap();
    for from in others() {
        for (number, len) in lengths.into_iter().enumerate() {
            let (mut bytes, tag) = (vec![0; len], number as u16);
            ranks.run(Operation::Receive { bytes: &mut bytes, from, tag }).unwrap();
            assert!(bytes == bytes_of(number, from, len), "message {number} from {from} to {rank}");
        }
    }
}

/// Work beside an operation panics on the last rank: it is complete there all the same, and so are those that follow.
pub(crate) fn panics(ranks: &dyn Communicator) {
    let (rank, size) = (ranks.rank(), ranks.size());
    for round in 0..3 {
        let mut values = vec![(rank + round) as f32; 7];
        let operation = Operation::AllReduce { values: &mut values, reduction: Reduction::Sum };
        let mut work = || assert!(rank + 1 < size, "the work of the last rank");
        let run = std::panic::AssertUnwindSafe(|| ranks.overlapped(operation, &mut work));
        let ended = std::panic::catch_unwind(run);
        assert_eq!(ended.is_err(), rank + 1 == size);
        assert_eq!(values, vec![(0..size).map(|rank| (rank + round) as f32).sum::<f32>(); 7]);
    }
    random_operations(ranks, 5, 8);
}

/// Runs `rounds` random operations, which are the same on all ranks, and compares every result.
pub(crate) fn random_operations(ranks: &dyn Communicator, seed: u64, rounds: usize) {
    let (rank, size) = (ranks.rank(), ranks.size());
    let mut random = Random(seed);
    for round in 0..rounds {
        // Now and then longer than any buffer of a transport.
        let longest = if random.below(8) == 0 { 200_000 } else { 3000 };
        let len = random.below(longest);
        let context = format!("seed {seed}, round {round}, {len} elements, rank {rank} of {size}");
        match random.below(6) {
            0 => {
                let mut values: Vec<f32> = (0..len).map(|i| value(round, rank, i)).collect();
                let mut worked = false;
                let operation = Operation::AllReduce { values: &mut values, reduction: Reduction::Sum };
                ranks.overlapped(operation, &mut || worked = true).expect(&context);
                assert!(worked);
                for (i, sum) in values.iter().enumerate() {
                    let wanted: f32 = (0..size).map(|rank| value(round, rank, i)).sum();
                    assert_eq!(*sum, wanted, "all-reduce, element {i}, {context}");
                }
            }
            1 => {
                let mut values: Vec<f32> = (0..len).map(|i| value(round, rank, i)).collect();
                let operation = Operation::AllReduce { values: &mut values, reduction: Reduction::Max };
                ranks.run(operation).expect(&context);
                for (i, max) in values.iter().enumerate() {
                    let wanted = (0..size).map(|rank| value(round, rank, i)).fold(f32::MIN, f32::max);
                    assert_eq!(*max, wanted, "maximum, element {i}, {context}");
                }
            }
            2 => {
                let lengths: Vec<usize> = (0..size).map(|_| random.below(longest)).collect();
                let part = bytes_of(round, rank, lengths[rank]);
                let mut whole = vec![0; lengths.iter().sum()];
                let operation = Operation::AllGather { part: &part, lengths: &lengths, whole: &mut whole };
                ranks.run(operation).expect(&context);
                let wanted: Vec<u8> =
                    (0..size).flat_map(|rank| bytes_of(round, rank, lengths[rank])).collect();
                assert!(whole == wanted, "all-gather of {lengths:?}, {context}");
            }
            3 => {
                let lengths: Vec<usize> = (0..size).map(|_| random.below(longest)).collect();
                let values: Vec<f32> = (0..lengths.iter().sum()).map(|i| value(round, rank, i)).collect();
                let mut part = vec![0.0; lengths[rank]];
                let operation =
                    Operation::ReduceScatter { values: &values, lengths: &lengths, part: &mut part };
                ranks.run(operation).expect(&context);
                let start: usize = lengths[..rank].iter().sum();
                for (i, sum) in part.iter().enumerate() {
                    let wanted: f32 = (0..size).map(|rank| value(round, rank, start + i)).sum();
                    assert_eq!(*sum, wanted, "reduce-scatter of {lengths:?}, element {i}, {context}");
                }
            }
            4 => {
                let root = random.below(size);
                let mut message = if rank == root { bytes_of(round, root, len) } else { vec![1, 2, 3] };
                ranks.broadcast_message(&mut message, root).expect(&context);
                assert!(message == bytes_of(round, root, len), "broadcast from {root}, {context}");
            }
            _ if size > 1 => {
                let from = random.below(size);
                let to = (from + 1 + random.below(size - 1)) % size;
                let tag = random.below(1000) as u16;
                if rank == from {
                    let bytes = bytes_of(round, from, len);
                    ranks.run(Operation::Send { bytes: &bytes, to, tag }).expect(&context);
                } else if rank == to {
                    let mut bytes = vec![0; len];
                    ranks.run(Operation::Receive { bytes: &mut bytes, from, tag }).expect(&context);
                    assert!(bytes == bytes_of(round, from, len), "message from {from} to {to}, {context}");
                }
            }
            _ => {}
        }
    }
}
