//! Copies rows of the window layers' KV cache on the devices that have them: to make room, and to and from checkpoints.

use quadriga_graph::{DType, Graph, GraphBuilder};
use quadriga_runtime::{PlanKey, StateInfo};

use super::lead::RankCommand;
use super::windows::RowCopy;
use super::{BatchToken, Engine};
use crate::models::StateKind;
use crate::{Error, Result};

/// The numbers of the key of the graph that copies rows: no batch is this large.
const KEY: [u64; 4] = [u64::MAX; 4];

/// The fewest rows that are copied at once, however small batches are.
const MIN_ROWS: usize = 64;

impl Engine {
    /// Keeps a copy of what layers with a sliding window need to continue from here, so that [`Engine::truncate`] can return
    /// to this length. A sequence has [`EngineOptions::checkpoints`](super::EngineOptions) of them; a new one replaces the
    /// one whose loss costs the fewest tokens to compute again. Nothing happens where such layers keep everything.
    /// Recurrent layers make theirs by themselves, at the end of each batch of several tokens.
    pub fn checkpoint(&mut self, sequence: usize) -> Result<()> {
        if self.options.checkpoints == 0 {
            return Ok(());
        }
        self.wait()?;
        self.decode.discard_run_ahead();
        self.tell(|| RankCommand::Checkpoint { sequence })?;
        let kept = self.keep_window(sequence);
        match self.model.ranks() {
            None => kept,
            Some(ranks) => ranks.together(kept),
        }
    }

    /// Copies this rank's rows of a sequence's windows to a checkpoint.
    fn keep_window(&mut self, sequence: usize) -> Result<()> {
        self.restore_rows()?;
        let len = self.len(sequence);
        let Some(copy) = self.windows.checkpoint(sequence, len) else { return Ok(()) };
        let copied = self.copy_rows(copy);
        if copied.is_err() {
            self.windows.forget(sequence, len);
        }
        copied
    }

    /// Copies what truncated sequences need to continue.
    pub(super) fn restore_rows(&mut self) -> Result<()> {
        for sequence in 0..self.options.sequences {
            if let Some(copy) = self.windows.restoring(sequence) {
                self.copy_rows(copy)?;
                self.windows.restored(sequence);
            }
        }
        Ok(())
    }

    /// Makes room for a batch in the windows of its sequences.
    pub(super) fn make_room(&mut self, batch: &[BatchToken]) -> Result<()> {
        for sequence in 0..self.options.sequences {
            let added = batch.iter().filter(|token| token.sequence == sequence).count();
            let len = self.len(sequence);
            if added == 0 || self.windows.fits(sequence, len, added) {
                continue;
            }
            if let Some(copy) = self.windows.compact(sequence, len) {
                let copied = self.copy_rows(copy);
                if copied.is_err() {
                    self.windows.damage(sequence);
                }
                copied?;
            }
        }
        Ok(())
    }

    /// Copies rows, a batch of them at a time: the graph then needs less memory than that of the largest batch, which the
    /// plan is made for. Rows are copied in ascending order and to the front, so that ranges may overlap.
    fn copy_rows(&mut self, RowCopy { from, to, count }: RowCopy) -> Result<()> {
        let at_once = self.windows.needed().min(self.options.batch.max(MIN_ROWS));
        let states = self.window_states();
        // A stage of a pipeline may have none of these layers.
        if states.is_empty() {
            return Ok(());
        }
        for done in (0..count).step_by(at_once.max(1)) {
            self.session.prepare_with(
                PlanKey::of(self.model.id(), KEY),
                || row_copies(&states, at_once),
                &mut |_| {},
            )?;
            // The graph copies a fixed number of rows: missing ones repeat the last.
            let last = count - 1;
            let at = |first: usize| -> Vec<i32> {
                (done..done + at_once).map(|row| (first + row.min(last)) as i32).collect()
            };
            self.session.set("from", at(from).as_slice())?;
            self.session.set("to", at(to).as_slice())?;
            self.session.start()?;
            self.session.wait()?;
        }
        Ok(())
    }

    /// The states of layers with a KV cache of their own.
    fn window_states(&self) -> Vec<StateInfo> {
        let mut states = self.session.states();
        states.retain(|state| self.state_kind(&state.name) == StateKind::Window);
        states
    }

    /// What a state of the model's graphs is.
    pub(super) fn state_kind(&self, name: &str) -> StateKind {
        let apart = self.options.window_slots < self.options.context;
        StateKind::of(name, self.model.hyperparameters(), apart)
    }
}

/// The graph that copies rows of each of the states.
pub(crate) fn row_copies(states: &[StateInfo], rows: usize) -> Result<Graph> {
    let g = GraphBuilder::new();
    let (from, to) = (g.input("from", DType::I32, [rows]), g.input("to", DType::I32, [rows]));
    for state in states {
        let tensor = g.state(&state.name, state.dtype, state.shape);
        tensor.set_rows(tensor.get_rows(from), to);
    }
    g.finish().map_err(Error::from)
}
