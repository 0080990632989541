//! What a step computes: tokens that are due, guesses at those that follow, and parts of prompts.

use super::super::draft::DraftInput;
use super::super::paged_engine::{StepSequence, StepToken, Wanted};
use super::super::request::RequestId;
use super::super::sequence::Sequence;
use super::{Batcher, StepPart};
use crate::Result;

impl Batcher {
    /// Chooses what the step computes: first a token of every sequence that is being generated, then parts of prompts. Pages
    /// for all of it are taken.
    pub(super) fn choose(&mut self) -> Vec<StepPart> {
        let batch = self.options.engine.batch;
        let mut left = batch;
        let turn = self.micro_batch();
        let ids = |running: &[Sequence], decoding: bool| -> Vec<(usize, RequestId)> {
            let wanted = running.iter().enumerate().filter(|(_, one)| one.is_decoding() == decoding);
            let wanted = wanted.filter(|(_, one)| turn.as_ref().is_none_or(|turn| turn.contains(&one.id)));
            wanted.map(|(index, sequence)| (index, sequence.id)).collect()
        };
        let mut chosen: Vec<StepPart> = Vec::new();
        let decoding = ids(&self.running, true);
        // Guesses take no room from tokens that are due.
        self.guess(&decoding, left.saturating_sub(decoding.len()));
        for (index, id) in decoding {
            if left > 0
                && self.ensure_pages(id, index, 1)
                && let Some(sequence) = self.index_near(id, index).and_then(|index| self.running.get(index))
            {
                let tokens = 1 + sequence.draft.len();
                left -= tokens;
                let restarts = sequence.restarts;
                chosen.push(StepPart { id, index, restarts, tokens, outputs: tokens, prompt: false });
            }
        }
        let mut left = self.pace.prompt_tokens(batch - left, batch).min(left).min(self.prompt_part());
        let mut has_prompt = false;
        for (index, id) in ids(&self.running, false) {
            let Some(index) = self.index_near(id, index).filter(|_| left > 0) else { continue };
            self.share_ahead(index);
            let keeps = self.options.engine.checkpoints > 0;
            let Some(sequence) = self.running.get(index) else { continue };
            // Beside too many others, a prompt is cut anywhere, rather than not computed at all.
            let Some(tokens) = sequence.next_part(left, keeps, has_prompt) else { continue };
            let restarts = sequence.restarts;
            if self.ensure_pages(id, index, tokens) {
                left -= tokens;
                has_prompt = true;
                chosen.push(StepPart { id, index, restarts, tokens, outputs: 0, prompt: true });
            }
        }
        // Some may have been put back for others.
        let placed = |part: StepPart| {
            let index = self.index_near(part.id, part.index)?;
            Some(StepPart { index, ..part })
        };
        chosen.into_iter().filter_map(placed).collect()
    }

    /// Guesses at the tokens after those that are due, up to `room` for all sequences together: by look-up, else by the draft model.
    pub(super) fn guess(&mut self, decoding: &[(usize, RequestId)], room: usize) {
        if !self.payoff.guesses() || self.options.lookup == 0 && self.draft.is_none() {
            return;
        }
        let context = self.options.engine.context;
        let mut room = room;
        let mut others = Vec::new();
        for (index, id) in decoding {
            let Some(sequence) = self.index_near(*id, *index).and_then(|index| self.running.get_mut(index))
            else {
                continue;
            };
            let own = room.min(context.saturating_sub(sequence.tokens.len() + 1));
            if let Some(lookup) = &mut sequence.lookup {
                lookup.accept(&sequence.tokens);
                sequence.draft = lookup.guess(&sequence.tokens, own);
                room -= sequence.draft.len();
            }
            if sequence.draft.is_empty() {
                others.push(*id);
            }
        }
        let Some(mut draft) = self.draft.take() else { return };
        let share = room / others.len().max(1);
        let sequences: Vec<&Sequence> =
            self.running.iter().filter(|sequence| others.contains(&sequence.id)).collect();
        let inputs: Vec<DraftInput<'_>> = sequences
            .iter()
            .map(|sequence| DraftInput {
                id: sequence.id,
                tokens: &sequence.tokens,
                room: share.min(context.saturating_sub(sequence.tokens.len() + 1)),
            })
            .collect();
        let guesses = draft.guess(&inputs);
        let guessed: Vec<(RequestId, Vec<u32>)> = inputs.iter().map(|input| input.id).zip(guesses).collect();
        for (id, guesses) in guessed {
            if let Some(sequence) = self.index_of(id).and_then(|index| self.running.get_mut(index)) {
                sequence.draft = guesses;
            }
        }
        self.draft = Some(draft);
    }

    /// The tokens of a step's parts.
    pub(super) fn tokens_of(&self, parts: &[StepPart]) -> Vec<StepToken> {
        let mut tokens = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            let Some(sequence) = self.running.get(part.index) else { continue };
            let (first, logits) = (sequence.next_position(), sequence.needs_logits());
            let known = sequence.tokens.iter().chain(&sequence.draft).skip(first).take(part.tokens);
            tokens.extend(known.zip(first..).map(|(token, position)| StepToken {
                token: *token,
                position,
                sequence: number,
                output: sequence.wants_output(position),
                hidden: sequence.is_embedded(),
                logits,
            }));
        }
        tokens
    }

    /// Starts a step, and notes how many outputs each of its parts has.
    pub(super) fn start(&mut self, parts: &mut [StepPart]) -> Result<()> {
        let tokens = self.tokens_of(parts);
        let mut first = 0;
        for (number, part) in parts.iter_mut().enumerate() {
            part.outputs = 0;
            let own = tokens.iter().skip(first).take_while(|token| token.sequence == number);
            for token in own {
                first += 1;
                part.outputs += usize::from(token.output);
            }
        }
        let mut wanted = Wanted::Argmax;
        for part in &*parts {
            let Some(sequence) = self.running.get_mut(part.index) else { continue };
            sequence.note_start();
            if !sequence.is_greedy() {
                wanted = Wanted::Logits;
            }
        }
        let table = |part: &StepPart| match self.running.get(part.index) {
            Some(sequence) => StepSequence {
                pages: &sequence.pages,
                window_pages: Some(&sequence.window_pages),
                lane: sequence.lane,
                checkpoint: sequence.keeps_state_after(part.tokens),
            },
            None => StepSequence::NONE,
        };
        let tables: Vec<StepSequence<'_>> = parts.iter().map(table).collect();
        self.engine.start(&tokens, &tables, wanted)
    }
}
