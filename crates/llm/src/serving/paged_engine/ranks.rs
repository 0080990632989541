//! Steps on several ranks: the first describes each step in one message, and the others compute the same.

use std::sync::Arc;
use std::time::Duration;

use super::super::page_pool::PageId;
use super::super::window_pages::WindowPages;
use super::{PagedEngine, StepSequence, StepToken, Wanted};
use crate::engine::{END, Leader};
use crate::ranks::CommandChannel;
use crate::{Error, RankShare, Result};

/// What every rank does.
#[derive(Clone, PartialEq, Debug)]
enum StepCommand {
    Step {
        tokens: Vec<StepToken>,
        sequences: Vec<SequencePages>,
        /// The rows of recurrent states that sequences read and write, in models that have some.
        state_rows: Vec<[usize; 2]>,
        wanted: Wanted,
    },
    Copy {
        from: PageId,
        to: PageId,
    },
    /// Copies a page of layers with a window, where those have pages of their own.
    CopyWindow {
        from: PageId,
        to: PageId,
    },
    /// Sends this rank's part of a page to the first.
    Read {
        page: PageId,
    },
    /// Receives this rank's part of a page.
    Write {
        page: PageId,
    },
    /// Whether the first rank sends commands regularly from now on, also where there is nothing to compute.
    Regular(bool),
    End,
}

/// The pages of a sequence.
#[derive(Clone, PartialEq, Debug)]
struct SequencePages {
    pages: Vec<PageId>,
    /// Those of layers with a window, where they have some of their own.
    windows: WindowPages,
}

const STEP: u8 = 10;
const COPY: u8 = 11;
const READ: u8 = 12;
const WRITE: u8 = 13;
const COPY_WINDOW: u8 = 14;
const REGULAR: u8 = 15;

/// Flags of a token.
const OUTPUT: u32 = 1;
const LOGITS: u32 = 2;
const HIDDEN: u32 = 4;

impl StepCommand {
    fn encode(&self) -> Vec<u8> {
        let mut message = Vec::new();
        let mut words = |kind: u8, words: &[u32]| {
            if message.is_empty() {
                message.push(kind);
            }
            message.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        };
        match self {
            StepCommand::Step { tokens, sequences, state_rows, wanted } => {
                let greedy = u32::from(*wanted == Wanted::Argmax);
                let counts = [tokens.len(), sequences.len(), state_rows.len()].map(|count| count as u32);
                words(STEP, &[greedy]);
                words(STEP, &counts);
                for StepToken { token, position, sequence, output, hidden, logits } in tokens {
                    let sequence = u32::try_from(*sequence).unwrap_or(u32::MAX);
                    let flags = [(*output, OUTPUT), (*logits, LOGITS), (*hidden, HIDDEN)];
                    let flags = flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).sum();
                    words(STEP, &[*token, *position as u32, sequence, flags]);
                }
                for SequencePages { pages, windows } in sequences {
                    let (first, window_pages) = windows.parts();
                    words(STEP, &[pages.len() as u32, first as u32, window_pages.len() as u32]);
                    words(STEP, pages);
                    words(STEP, window_pages);
                }
                state_rows.iter().for_each(|rows| words(STEP, &rows.map(|row| row as u32)));
            }
            StepCommand::Copy { from, to } => words(COPY, &[*from, *to]),
            StepCommand::CopyWindow { from, to } => words(COPY_WINDOW, &[*from, *to]),
            StepCommand::Read { page } => words(READ, &[*page]),
            StepCommand::Write { page } => words(WRITE, &[*page]),
            StepCommand::Regular(regular) => words(REGULAR, &[u32::from(*regular)]),
            StepCommand::End => words(END, &[]),
        }
        message
    }

    fn decode(message: &[u8]) -> Option<StepCommand> {
        let (kind, rest) = message.split_first()?;
        let (words, []) = rest.as_chunks::<4>() else { return None };
        let mut words = words.iter().map(|word| u32::from_le_bytes(*word));
        let command = match *kind {
            END => StepCommand::End,
            COPY => StepCommand::Copy { from: words.next()?, to: words.next()? },
            COPY_WINDOW => StepCommand::CopyWindow { from: words.next()?, to: words.next()? },
            READ => StepCommand::Read { page: words.next()? },
            WRITE => StepCommand::Write { page: words.next()? },
            REGULAR => StepCommand::Regular(words.next()? != 0),
            STEP => {
                let wanted = if words.next()? == 1 { Wanted::Argmax } else { Wanted::Logits };
                let [token_count, sequence_count, row_count] = [words.next()?, words.next()?, words.next()?];
                let mut tokens = Vec::new();
                for _ in 0..token_count {
                    let (token, position) = (words.next()?, words.next()? as usize);
                    let sequence = match words.next()? {
                        u32::MAX => usize::MAX,
                        sequence => sequence as usize,
                    };
                    let flags = words.next()?;
                    let [output, logits, hidden] = [OUTPUT, LOGITS, HIDDEN].map(|flag| flags & flag != 0);
                    tokens.push(StepToken { token, position, sequence, output, hidden, logits });
                }
                let mut sequences = Vec::new();
                for _ in 0..sequence_count {
                    let [count, first, window_count] = [words.next()?, words.next()?, words.next()?];
                    let mut take = |count: u32| {
                        let pages: Vec<PageId> = words.by_ref().take(count as usize).collect();
                        (pages.len() == count as usize).then_some(pages)
                    };
                    let pages = take(count)?;
                    let windows = WindowPages::new(first as usize, take(window_count)?);
                    sequences.push(SequencePages { pages, windows });
                }
                let mut state_rows = Vec::new();
                for _ in 0..row_count {
                    state_rows.push([words.next()? as usize, words.next()? as usize]);
                }
                StepCommand::Step { tokens, sequences, state_rows, wanted }
            }
            _ => return None,
        };
        words.next().is_none().then_some(command)
    }
}

impl PagedEngine {
    /// This rank's part, where there are several ranks.
    pub(super) fn ranks(&self) -> Option<&Arc<RankShare>> {
        self.model.ranks()
    }

    /// Whether results are read on another rank.
    pub(super) fn follows(&self) -> bool {
        self.ranks().is_some_and(|ranks| !ranks.leads())
    }

    /// Tells the other ranks of a step, if there are any.
    pub(super) fn tell_step(
        &self,
        tokens: &[StepToken],
        sequences: &[StepSequence<'_>],
        wanted: Wanted,
    ) -> Result<()> {
        let Some(leader) = &self.leader else { return Ok(()) };
        let pages = |sequence: &StepSequence<'_>| SequencePages {
            pages: sequence.pages.to_vec(),
            windows: sequence.window_pages.cloned().unwrap_or_default(),
        };
        let sequences = sequences.iter().map(pages).collect();
        let state_rows = self.state_rows().iter().map(|rows| rows.map(|row| row as usize)).collect();
        leader.send(StepCommand::Step { tokens: tokens.to_vec(), sequences, state_rows, wanted }.encode())
    }

    /// Tells the other ranks to copy a page, if there are any.
    pub(super) fn tell_copy(&self, from: PageId, to: PageId) -> Result<()> {
        let copy = StepCommand::Copy { from, to };
        self.leader.as_ref().map_or(Ok(()), |leader| leader.send(copy.encode()))
    }

    /// The same of a page of layers with a window.
    pub(super) fn tell_copy_window(&self, from: PageId, to: PageId) -> Result<()> {
        let copy = StepCommand::CopyWindow { from, to };
        self.leader.as_ref().map_or(Ok(()), |leader| leader.send(copy.encode()))
    }

    /// Tells the other ranks that a page is read, if there are any: each sends its part.
    pub(super) fn tell_read(&self, page: PageId) -> Result<()> {
        self.leader.as_ref().map_or(Ok(()), |leader| leader.send(StepCommand::Read { page }.encode()))
    }

    /// Tells the other ranks that a page is written, if there are any: each gets its part.
    pub(super) fn tell_write(&self, page: PageId) -> Result<()> {
        self.leader.as_ref().map_or(Ok(()), |leader| leader.send(StepCommand::Write { page }.encode()))
    }

    /// How often other ranks are to hear of this one, where there are any that hold a limit.
    pub(in crate::serving) fn command_interval(&self) -> Option<Duration> {
        self.leader.as_ref().and_then(Leader::interval)
    }

    /// Tells the other ranks, if there are any, whether they hear of this one regularly from now on.
    pub(in crate::serving) fn tell_regular(&self, regular: bool) -> Result<()> {
        let command = StepCommand::Regular(regular);
        self.leader.as_ref().map_or(Ok(()), |leader| leader.send(command.encode()))
    }

    /// The result of a step.
    pub(super) fn together<T>(&self, result: Result<T>) -> Result<T> {
        match self.ranks() {
            None => result,
            Some(ranks) => ranks.together(result),
        }
    }

    /// Computes what the first rank computes, until its engine is dropped.
    pub(in crate::serving) fn follow_first(&mut self) -> Result<()> {
        let Some(ranks) = self.ranks().filter(|ranks| !ranks.leads()).cloned() else {
            return Err(Error::Ranks { reason: "only ranks after the first follow".to_owned() });
        };
        let commands = ranks.commands();
        loop {
            match StepCommand::decode(&commands.next()?).ok_or_else(CommandChannel::unreadable)? {
                StepCommand::Step { tokens, sequences, state_rows, wanted } => {
                    let sequences: Vec<StepSequence<'_>> = sequences
                        .iter()
                        .map(|SequencePages { pages, windows }| StepSequence {
                            pages,
                            window_pages: Some(windows),
                            ..StepSequence::NONE
                        })
                        .collect();
                    self.model.file().check_mapped()?;
                    self.set_pieces(state_rows.iter());
                    self.start_together(&tokens, &sequences, wanted)?;
                }
                StepCommand::Copy { from, to } => self.copy_page(from, to)?,
                StepCommand::CopyWindow { from, to } => self.copy_window_page(from, to)?,
                StepCommand::Read { page } => drop(self.read_page(page)?),
                StepCommand::Write { page } => self.write_page(page, &[])?,
                StepCommand::Regular(regular) => commands.expect_regularly(regular),
                StepCommand::End => return Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_read_as_it_was_written() {
        let token = |i: u32| StepToken {
            token: i * 7,
            position: i as usize * 3,
            sequence: if i == 2 { usize::MAX } else { i as usize },
            output: i.is_multiple_of(2),
            hidden: i == 3,
            logits: i == 4,
        };
        let commands = [
            StepCommand::Step {
                tokens: (0..5).map(token).collect(),
                sequences: vec![
                    SequencePages { pages: vec![1, 2, 3], windows: WindowPages::new(2, vec![7]) },
                    SequencePages { pages: Vec::new(), windows: WindowPages::default() },
                    SequencePages { pages: vec![9], windows: WindowPages::new(0, vec![1, 2]) },
                ],
                state_rows: vec![[0, 5], [3, 4]],
                wanted: Wanted::Logits,
            },
            StepCommand::Step {
                tokens: Vec::new(),
                sequences: Vec::new(),
                state_rows: Vec::new(),
                wanted: Wanted::Argmax,
            },
            StepCommand::Copy { from: 3, to: 4 },
            StepCommand::CopyWindow { from: 5, to: 6 },
            StepCommand::Read { page: 7 },
            StepCommand::Write { page: 8 },
            StepCommand::Regular(true),
            StepCommand::Regular(false),
            StepCommand::End,
        ];
        for command in commands {
            let message = command.encode();
            assert_eq!(StepCommand::decode(&message), Some(command.clone()));
            assert_eq!(StepCommand::decode(&message[..message.len() - 1]), None, "{command:?}");
            let longer = [message, vec![0; 4]].concat();
            assert_eq!(StepCommand::decode(&longer), None, "{command:?}");
        }
    }
}
