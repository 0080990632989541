//! What a step computes: tokens that are due, guesses at those that follow, and parts of prompts.

use super::super::draft::DraftInput;
use super::super::pace::LEAST as LEAST_PROMPT;
use super::super::paged_engine::{StepSequence, StepToken, Wanted};
use super::super::request::RequestId;
use super::super::sequence::Sequence;
use super::{Batcher, StepPart};
use crate::Result;

impl Batcher {
    /// Chooses what the step computes: first a token of every sequence that is being generated, then parts of prompts, the most
    /// urgent first. Pages for all of it are taken.
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
        let mut prompts = ids(&self.running, false);
        // The memory of a step is planned for so many outputs. Guesses take no room from tokens that are due, nor from all prompts.
        let mut outputs = self.options.engine.output_rows;
        let due = decoding.len() + if prompts.is_empty() { 0 } else { LEAST_PROMPT };
        self.guess(&decoding, left.min(outputs).saturating_sub(due));
        for (index, id) in decoding {
            if left > 0
                && self.ensure_pages(id, index, 1)
                && let Some(sequence) = self.index_near(id, index).and_then(|index| self.running.get(index))
            {
                let tokens = 1 + sequence.draft.len();
                left -= tokens;
                outputs = outputs.saturating_sub(tokens);
                let restarts = sequence.restarts;
                chosen.push(StepPart { id, index, restarts, tokens, outputs: tokens, prompt: false });
            }
        }
        let mut left = self.pace.prompt_tokens(batch - left, batch).min(left).min(self.prompt_part());
        let mut has_prompt = false;
        self.sort_prompts(&mut prompts);
        for (index, id) in prompts {
            let Some(index) = self.index_near(id, index).filter(|_| left > 0) else { continue };
            self.share_ahead(index);
            let keeps = self.is_recurrent() && self.options.engine.kept_states() > 0;
            let Some(sequence) = self.running.get(index) else { continue };
            // Beside too many others, a prompt is cut anywhere, rather than not computed at all.
            let part = |most: usize| sequence.next_part(most, keeps, has_prompt).filter(|tokens| *tokens > 0);
            let fits = |tokens: &usize| sequence.outputs_of(*tokens) <= outputs;
            let Some(tokens) = part(left).filter(fits).or_else(|| part(left.min(outputs)).filter(fits))
            else {
                continue;
            };
            let own = sequence.outputs_of(tokens);
            let (restarts, client) = (sequence.restarts, sequence.client);
            if self.ensure_pages(id, index, tokens) {
                left -= tokens;
                outputs -= own;
                if !has_prompt {
                    self.note_turn(id, client);
                }
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
        self.draft_prompts = 0;
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
        // Sequences that are being generated wait for the draft model, too.
        let batch = self.options.engine.batch;
        let guesses = draft.guess(&inputs, self.pace.prompt_tokens(decoding.len(), batch));
        let guessed: Vec<(RequestId, Vec<u32>)> = inputs.iter().map(|input| input.id).zip(guesses).collect();
        for (id, guesses) in guessed {
            if let Some(sequence) = self.index_of(id).and_then(|index| self.running.get_mut(index)) {
                sequence.draft = guesses;
            }
        }
        self.draft_prompts = draft.prompt_tokens();
        self.state.failed_guesses += u64::from(draft.has_failed());
        self.state.drafted_prompts += self.draft_prompts as u64;
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

    /// Reads the logits that samplers need beside the largest, before a token is sampled: if that fails, the step has failed, and is
    /// computed again.
    pub(super) fn read_missing_logits(&mut self, parts: &[StepPart]) -> Result<()> {
        if !self.engine.has_only_top() {
            return Ok(());
        }
        let (mut missing, mut output) = (Vec::new(), 0);
        for part in parts {
            let index = self.index_of_part(part);
            if let Some(sequence) = index.and_then(|index| self.running.get_mut(index)) {
                let known = part.tokens - sequence.draft.len();
                sequence.add_missing_logits(&self.engine, known, output, &mut missing);
            }
            output += part.outputs;
        }
        match missing.is_empty() {
            true => Ok(()),
            false => self.engine.read_logits(&missing),
        }
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
