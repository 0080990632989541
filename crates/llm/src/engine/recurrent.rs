//! Which rows of the recurrent states hold which sequence after how many tokens.
//!
//! A batch reads the row of its sequence's length and writes another one, so that the states of earlier lengths stay: of
//! the latest steps, and of the ends of prompts and their batches, which are checkpoints. A sequence can only be truncated
//! to a length that has a row.

/// Rows of a sequence besides checkpoints: the state before a step, after it, and after the step that runs ahead of it.
const STEPS: usize = 3;

/// The rows of all sequences. Row 0 belongs to none: it is the state of an empty sequence, and never written.
pub(super) struct RecurrentRows {
    sequences: Vec<Vec<Row>>,
    checkpoints: usize,
}

/// What a row holds.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Row {
    /// The number of tokens after which this was the state; `None` if it holds nothing.
    len: Option<usize>,
    /// Whether it is kept for later, in place of the latest steps.
    checkpoint: bool,
}

impl RecurrentRows {
    /// Rows for some sequences, with at most so many checkpoints each.
    pub(super) fn new(sequences: usize, checkpoints: usize) -> RecurrentRows {
        RecurrentRows { sequences: vec![vec![Row::default(); STEPS + checkpoints]; sequences], checkpoints }
    }

    /// The number of rows that [`RecurrentRows::new`] needs.
    pub(super) fn count(sequences: usize, checkpoints: usize) -> usize {
        1 + sequences * (STEPS + checkpoints)
    }

    /// The largest length of at most `len` that the sequence can be truncated to.
    pub(super) fn retained(&self, sequence: usize, len: usize) -> usize {
        let rows = self.sequences.get(sequence).map_or(&[][..], Vec::as_slice);
        rows.iter().filter_map(|row| row.len).filter(|found| *found <= len).max().unwrap_or(0)
    }

    /// The row with the state after `len` tokens.
    pub(super) fn find(&self, sequence: usize, len: usize) -> Option<usize> {
        if len == 0 {
            return Some(0);
        }
        let rows = self.sequences.get(sequence)?;
        let place = rows.iter().position(|row| row.len == Some(len))?;
        Some(self.row(sequence, place))
    }

    /// The rows to read and to write for a batch of `tokens` after `len` tokens. What is known of longer lengths is
    /// forgotten. The state after `keep` tokens is not overwritten, so that a failure can return to it.
    pub(super) fn begin(
        &mut self,
        sequence: usize,
        len: usize,
        tokens: usize,
        keep: usize,
    ) -> Option<[usize; 2]> {
        let from = self.find(sequence, len)?;
        let rows = self.sequences.get_mut(sequence)?;
        rows.iter_mut()
            .filter(|row| row.len.is_some_and(|known| known > len))
            .for_each(|row| *row = Row::default());
        if tokens > 1 {
            rows.iter_mut().filter(|row| row.len == Some(len)).for_each(|row| row.checkpoint = true);
        }
        // A prompt's end becomes a checkpoint, too.
        thin_out(rows, self.checkpoints.saturating_sub(usize::from(tokens > 1)), [len, keep]);
        let place = victim(rows, [len, keep])?;
        if let Some(row) = rows.get_mut(place) {
            *row = Row { len: Some(len + tokens), checkpoint: tokens > 1 && self.checkpoints > 0 };
        }
        Some([from, self.row(sequence, place)])
    }

    /// Forgets everything, and returns the row for a state after `len` tokens that is restored from elsewhere.
    pub(super) fn restore(&mut self, sequence: usize, len: usize) -> Option<usize> {
        let rows = self.sequences.get_mut(sequence)?;
        rows.fill(Row::default());
        *rows.first_mut()? = Row { len: Some(len), checkpoint: self.checkpoints > 0 };
        Some(self.row(sequence, 0))
    }

    fn row(&self, sequence: usize, place: usize) -> usize {
        1 + sequence * (STEPS + self.checkpoints) + place
    }
}

/// Removes checkpoints until no more than `limit` are left. Of several, the one goes whose loss costs the fewest tokens in relation to its
/// distance from the end: so they become sparser towards the beginning.
fn thin_out(rows: &mut [Row], limit: usize, [len, keep]: [usize; 2]) {
    loop {
        let mut known: Vec<(usize, usize)> = Vec::new();
        for (place, row) in rows.iter().enumerate().filter(|(_, row)| row.checkpoint) {
            known.extend(row.len.map(|len| (len, place)));
        }
        if known.len() <= limit {
            return;
        }
        known.sort_unstable();
        let lens: Vec<usize> = known.iter().map(|(len, _)| *len).collect();
        let cost = |index: usize| {
            let at = lens.get(index).copied().unwrap_or(0);
            let before = index.checked_sub(1).and_then(|i| lens.get(i).copied()).unwrap_or(0);
            (at - before) as f64 / (len.saturating_sub(at) + 1) as f64
        };
        let losing = (0..known.len())
            .filter(|index| lens.get(*index).is_some_and(|at| *at != len && *at != keep))
            .min_by(|a, b| cost(*a).total_cmp(&cost(*b)));
        // Those that are needed are not removed: they become ordinary rows.
        let Some((_, place)) = losing.or(Some(0)).and_then(|index| known.get(index)).copied() else { return };
        if let Some(row) = rows.get_mut(place) {
            row.checkpoint = false;
            if losing.is_some() {
                row.len = None;
            }
        }
    }
}

/// The row to overwrite: an empty one, or else the oldest step.
fn victim(rows: &[Row], needed: [usize; 2]) -> Option<usize> {
    let free = |row: &Row| row.len.is_none();
    let old = |row: &Row| !row.checkpoint && row.len.is_some_and(|len| !needed.contains(&len));
    rows.iter().position(free).or_else(|| {
        let steps = rows.iter().enumerate().filter(|(_, row)| old(row));
        steps.min_by_key(|(_, row)| row.len).map(|(place, _)| place)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;

    /// A model of the device: what each row contains, as the list of its sequence's tokens.
    struct Device {
        rows: RecurrentRows,
        contents: Vec<Vec<u32>>,
        tokens: Vec<Vec<u32>>,
    }

    impl Device {
        fn extend(&mut self, sequence: usize, tokens: &[u32], keep: usize) {
            let len = self.tokens[sequence].len();
            let [from, to] = self.rows.begin(sequence, len, tokens.len(), keep).unwrap();
            assert_ne!(to, 0, "the empty state is never written");
            assert_ne!(from, to);
            assert_eq!(self.contents[from], self.tokens[sequence], "the state before the batch");
            self.tokens[sequence].extend(tokens);
            self.contents[to] = self.tokens[sequence].clone();
        }

        fn truncate(&mut self, sequence: usize, len: usize) -> usize {
            let kept = self.rows.retained(sequence, len.min(self.tokens[sequence].len()));
            self.tokens[sequence].truncate(kept);
            kept
        }
    }

    #[test]
    fn rows_hold_what_they_say_whatever_happens() {
        for seed in 0..300_u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut below = |n: usize| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state % n as u64) as usize
            };
            let (sequences, checkpoints) = (1 + below(3), below(5));
            let rows = RecurrentRows::new(sequences, checkpoints);
            let contents = vec![Vec::new(); RecurrentRows::count(sequences, checkpoints)];
            let mut device = Device { rows, contents, tokens: vec![Vec::new(); sequences] };
            let mut next = 0;
            for _ in 0..200 {
                let sequence = below(sequences);
                let len = device.tokens[sequence].len();
                match below(6) {
                    0 => {
                        device.truncate(sequence, below(len + 2));
                    }
                    // Several batches that fail at the end: the state before them must still be there.
                    1 => {
                        for _ in 0..1 + below(4) {
                            let tokens: Vec<u32> = (next..next + 1 + below(40) as u32).collect();
                            next += tokens.len() as u32;
                            device.extend(sequence, &tokens, len);
                        }
                        assert_eq!(device.truncate(sequence, len), len, "seed {seed}");
                    }
                    2 => {
                        let tokens: Vec<u32> = (next..next + 1 + below(40) as u32).collect();
                        next += tokens.len() as u32;
                        device.extend(sequence, &tokens, len);
                    }
                    // A step that runs ahead and is discarded.
                    3 => {
                        device.extend(sequence, &[next], len);
                        device.extend(sequence, &[next + 1], len);
                        assert_eq!(device.truncate(sequence, len + 1), len + 1, "seed {seed}");
                        next += 2;
                    }
                    _ => {
                        device.extend(sequence, &[next], len);
                        next += 1;
                    }
                }
            }
        }
    }

    #[test]
    fn the_ends_of_a_prompt_and_of_the_turn_before_it_are_kept() {
        let mut rows = RecurrentRows::new(1, 4);
        rows.begin(0, 0, 500, 0).unwrap(); // the first prompt
        for len in 500..700 {
            rows.begin(0, len, 1, len).unwrap(); // its answer
        }
        for batch in 0..10 {
            rows.begin(0, 700 + 512 * batch, 512, 700).unwrap(); // a long second prompt
        }
        let end = 700 + 5120;
        for len in end..end + 50 {
            rows.begin(0, len, 1, len).unwrap();
        }
        assert_eq!(rows.retained(0, end), end, "to regenerate the answer");
        // Of the turn before it one of the two is left: they differ by little.
        assert!(rows.retained(0, 3000) >= 500, "to edit the last message");
    }

    #[test]
    fn a_restored_state_is_the_only_one() {
        let mut rows = RecurrentRows::new(2, 1);
        rows.begin(1, 0, 10, 0).unwrap();
        let row = rows.restore(1, 7).unwrap();
        assert_eq!((rows.find(1, 7), rows.find(1, 10), rows.retained(1, 10)), (Some(row), None, 7));
        assert_eq!(rows.find(0, 7), None);
    }

    /// The lengths that a sequence can return to, shortest first.
    fn lengths(rows: &RecurrentRows) -> Vec<usize> {
        let mut found: Vec<usize> = (1..10_000).filter(|len| rows.retained(0, *len) == *len).collect();
        found.sort_unstable();
        found
    }

    #[test]
    fn checkpoints_become_sparser_towards_the_beginning() {
        let mut rows = RecurrentRows::new(1, 4);
        let mut kept = Vec::new();
        for batch in 0..8 {
            rows.begin(0, 100 * batch, 100, 0).unwrap();
            kept.push(lengths(&rows));
        }
        let expected: [&[usize]; 8] = [
            &[100],
            &[100, 200],
            &[100, 200, 300],
            &[100, 200, 300, 400],
            &[200, 300, 400, 500],
            &[200, 400, 500, 600],
            &[400, 500, 600, 700],
            &[400, 600, 700, 800],
        ];
        assert_eq!(kept, expected);
    }

    #[test]
    fn the_rows_of_the_latest_steps_are_used_in_turn() {
        let mut rows = RecurrentRows::new(2, 0);
        let mut used = Vec::new();
        for len in 0..6 {
            used.push(rows.begin(1, len, 1, len).unwrap());
            assert_eq!(lengths(&rows), [0; 0]);
        }
        assert_eq!(used, [[0, 4], [4, 5], [5, 6], [6, 4], [4, 5], [5, 6]]);
        assert_eq!([3, 4, 5, 6].map(|len| rows.retained(1, len)), [0, 4, 5, 6]);
        // A step that starts again forgets what came later.
        assert_eq!(rows.begin(1, 4, 1, 4), Some([4, 5]));
        assert_eq!([4, 5, 6].map(|len| rows.find(1, len)), [Some(4), Some(5), None]);
        assert_eq!(rows.begin(1, 3, 1, 3), None, "its state is gone");
        assert_eq!(rows.begin(2, 0, 1, 0), None, "there is no such sequence");
        assert_eq!(RecurrentRows::count(2, 0), 7);
        assert_eq!(RecurrentRows::count(3, 4), 22);
    }
}
