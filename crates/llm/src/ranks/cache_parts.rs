//! Parts of the KV cache on their way to the first rank and back: what is kept of it elsewhere is kept there as a whole.

use quadriga_cluster::Operation;

use super::{CACHE, LOADING, RankShare};
use crate::Result;

/// The most bytes of a message: MPI counts with 32 bits.
const LONGEST: usize = 1 << 26;

impl RankShare {
    /// Sends bytes whose number only this rank knows.
    pub(crate) fn send_saved(&self, bytes: &[u8], to: usize) -> Result<()> {
        let length = (bytes.len() as u64).to_le_bytes();
        let messages = std::iter::once(&length[..]).chain(bytes.chunks(LONGEST));
        for bytes in messages {
            self.communicator().run(Operation::Send { bytes, to, tag: CACHE })?;
        }
        Ok(())
    }

    /// Receives what another rank [sends](RankShare::send_saved).
    pub(crate) fn receive_saved(&self, from: usize) -> Result<Vec<u8>> {
        let mut length = [0; 8];
        self.communicator().run(Operation::Receive { bytes: &mut length, from, tag: CACHE })?;
        let mut whole = vec![0; u64::from_le_bytes(length) as usize];
        for bytes in whole.chunks_mut(LONGEST) {
            self.communicator().run(Operation::Receive { bytes, from, tag: CACHE })?;
        }
        Ok(whole)
    }

    /// A number of every rank, once it has loaded its weights: all of them call this.
    pub(crate) fn gather(&self, own: usize) -> Result<Vec<usize>> {
        let ranks = self.communicator();
        let (lengths, mut whole) = (vec![8; ranks.size()], vec![0; 8 * ranks.size()]);
        let part = (own as u64).to_le_bytes();
        let all = Operation::AllGather { part: &part, lengths: &lengths, whole: &mut whole };
        ranks.run_loading(all, LOADING)?;
        let (numbers, _) = whole.as_chunks::<8>();
        Ok(numbers.iter().map(|number| u64::from_le_bytes(*number) as usize).collect())
    }

    /// The bytes of all ranks, one after the other: each calls this with its own, of these lengths. Only the first gets the others'.
    pub(crate) fn collect_parts(&self, own: Vec<u8>, lengths: &[usize]) -> Result<Vec<u8>> {
        if !self.leads() {
            self.communicator().run(Operation::Send { bytes: &own, to: 0, tag: CACHE })?;
            return Ok(own);
        }
        let mut whole = own;
        for (from, length) in lengths.iter().enumerate().skip(1) {
            let start = whole.len();
            whole.resize(start + length, 0);
            let bytes = whole.get_mut(start..).unwrap_or_default();
            self.communicator().run(Operation::Receive { bytes, from, tag: CACHE })?;
        }
        Ok(whole)
    }

    /// This rank's part of what [`RankShare::collect_parts`] has returned on the first rank, which has `whole`.
    pub(crate) fn distribute_parts(&self, whole: &[u8], lengths: &[usize]) -> Result<Vec<u8>> {
        let own = lengths.get(self.rank()).copied().unwrap_or(0);
        if !self.leads() {
            let mut bytes = vec![0; own];
            self.communicator().run(Operation::Receive { bytes: &mut bytes, from: 0, tag: CACHE })?;
            return Ok(bytes);
        }
        let (first, mut rest) = whole.split_at_checked(own).unwrap_or((whole, &[]));
        for (to, length) in lengths.iter().enumerate().skip(1) {
            let (bytes, after) = rest.split_at_checked(*length).unwrap_or((rest, &[]));
            self.communicator().run(Operation::Send { bytes, to, tag: CACHE })?;
            rest = after;
        }
        Ok(first.to_vec())
    }
}
