//! Messages from rank to rank: a mailbox for each pair, in which a message is one or several letters.
//!
//! A send never waits for its receiver, which may be computing: letters that find no room wait in the sender's [`Outbox`] until
//! [`Segment::deliver`] finds some.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use super::{Cursor, ENVELOPE, LETTER, LETTERS, MAX_RANKS, Patience, Segment};
use crate::error::ClusterError;

/// The messages of this rank that found no room in a mailbox.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    /// Letters that were written for each rank.
    sent: [u64; MAX_RANKS],
    /// What follows them, in order.
    waiting: [VecDeque<Unsent>; MAX_RANKS],
}

/// A message, or the rest of one.
#[derive(Debug)]
struct Unsent {
    tag: u16,
    /// Bytes of the whole message.
    length: usize,
    rest: Vec<u8>,
    /// Bytes of `rest` that are in letters by now.
    written: usize,
}

impl Segment {
    /// Sends a message. Returns whether all of it is in the receiver's mailbox; the rest waits for [`Segment::deliver`].
    pub(crate) fn send(
        &self,
        bytes: &[u8],
        to: usize,
        tag: u16,
        outbox: &mut Outbox,
    ) -> Result<bool, ClusterError> {
        let (Some(sent), Some(waiting)) = (outbox.sent.get_mut(to), outbox.waiting.get_mut(to)) else {
            return Err(ClusterError::Ended);
        };
        let length = bytes.len();
        let rest = match waiting.is_empty() {
            true => self.write_letters(bytes, (tag, length), to, sent),
            // Messages arrive in the order of their sends.
            false => Some(bytes),
        };
        let Some(rest) = rest else { return Ok(true) };
        waiting.push_back(Unsent { tag, length, rest: rest.to_vec(), written: 0 });
        Ok(false)
    }

    /// Writes as much of what waits as there is room for. Returns whether nothing is left.
    pub(crate) fn deliver(&self, outbox: &mut Outbox) -> bool {
        for (to, (sent, waiting)) in outbox.sent.iter_mut().zip(&mut outbox.waiting).enumerate() {
            while let Some(Unsent { tag, length, rest, written }) = waiting.front_mut() {
                let unwritten = rest.get(*written..).unwrap_or_default();
                match self.write_letters(unwritten, (*tag, *length), to, sent) {
                    None => drop(waiting.pop_front()),
                    Some(left) => {
                        *written = rest.len() - left.len();
                        break;
                    }
                }
            }
        }
        outbox.waiting.iter().all(VecDeque::is_empty)
    }

    /// Writes letters as long as there is room. Returns what found none; `None` if that is nothing.
    fn write_letters<'m>(
        &self,
        mut rest: &'m [u8],
        (tag, length): (u16, usize),
        to: usize,
        sent: &mut u64,
    ) -> Option<&'m [u8]> {
        let mailbox = self.mailbox(self.rank, to);
        let read = self.word(mailbox + 64);
        loop {
            if *sent - read.load(Ordering::Acquire) >= LETTERS as u64 {
                return Some(rest);
            }
            let (here, after) = rest.split_at(rest.len().min(LETTER));
            let letter = self.letter(self.rank, to, *sent);
            self.word(letter).store(u64::from(tag), Ordering::Relaxed);
            self.word(letter + 8).store(length as u64, Ordering::Relaxed);
            // SAFETY: the letter is inside the segment. The receiver has read what was there, since it counted it, and reads
            // this only after it is counted below. One thread writes at a time, since the outbox is borrowed mutably.
            unsafe {
                let to = self.base.add(letter + ENVELOPE);
                std::ptr::copy_nonoverlapping(here.as_ptr(), to, here.len());
            }
            *sent += 1;
            self.word(mailbox).store(*sent, Ordering::Release);
            rest = after;
            if rest.is_empty() {
                return None;
            }
        }
    }

    /// Waits for the next message of a rank, which must be this one.
    pub(super) fn receive(
        &self,
        bytes: &mut [u8],
        from: usize,
        tag: u16,
        cursor: &mut Cursor,
        patience: &Patience<'_>,
    ) -> Result<(), ClusterError> {
        let Some(received) = cursor.received.get_mut(from) else { return Err(ClusterError::Ended) };
        let (mailbox, length) = (self.mailbox(from, self.rank), bytes.len());
        let mut rest = bytes;
        loop {
            let written = self.word(mailbox);
            self.wait(patience, || vec![from], || written.load(Ordering::Acquire) > *received)?;
            let letter = self.letter(from, self.rank, *received);
            let [sent_tag, sent_length] = [0, 8].map(|word| self.word(letter + word).load(Ordering::Relaxed));
            if (sent_tag, sent_length) != (u64::from(tag), length as u64) {
                return Err(ClusterError::Disagreement(format!(
                    "rank {from} sends {sent_length} bytes with tag {sent_tag}, rank {} receives {length} with tag {tag}",
                    self.rank
                )));
            }
            let (here, after) = rest.split_at_mut(rest.len().min(LETTER));
            // SAFETY: the letter is inside the segment and complete, since it was counted, and is not written again until it
            // is counted as read below.
            unsafe {
                let part = self.base.add(letter + ENVELOPE);
                std::ptr::copy_nonoverlapping(part, here.as_mut_ptr(), here.len());
            }
            *received += 1;
            self.word(mailbox + 64).store(*received, Ordering::Release);
            rest = after;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;
    use crate::communicator::Wait;
    use crate::memory_file::MemoryFile;
    use crate::watch::Failure;

    #[test]
    fn sends_wait_for_nobody_and_arrive_in_order() {
        let file = MemoryFile::create(Segment::bytes(2)).unwrap();
        let [first, second] = [0, 1].map(|rank| Segment::new(file.map(Segment::bytes(2)).unwrap(), 2, rank));
        let message = |number: usize| -> Vec<u8> {
            // Empty, short, of whole letters, and larger than a mailbox.
            let length = [0, 7, 2 * LETTER, LETTERS * LETTER + 3][number % 4];
            (0..length).map(|index| (index * 31 + number) as u8).collect()
        };
        let (mut outbox, mut delivered) = (Outbox::default(), true);
        for number in 0..12 {
            delivered = first.send(&message(number), 1, number as u16, &mut outbox).unwrap();
        }
        assert!(!delivered, "more than a mailbox holds");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !first.deliver(&mut outbox) {
                    std::thread::yield_now();
                }
            });
            let (mut cursor, failure) = (Cursor::new(), Failure::default());
            let wait = Wait { what: "receive", limit: None };
            let patience = Patience { failure: &failure, wait };
            for number in 0..12 {
                let mut bytes = vec![0; message(number).len()];
                second.receive(&mut bytes, 0, number as u16, &mut cursor, &patience).unwrap();
                assert!(bytes == message(number), "message {number}");
            }
        });
    }
}
