//! The inputs of the graph of a step.

use quadriga_graph::PAGE_SLOTS;

use super::super::window_pages::WindowPages;
use super::part_inputs::PartRows;
use super::{PagedEngine, StepSequence, StepToken};
use crate::Result;
use crate::engine::{BatchRow, SCRAP_PAGES};
use crate::hyperparameters::{LayerCaches, QUERY_FACTORS};
use crate::models::{ExpandedParts, GraphShape, PageTable};

#[derive(Default)]
pub(super) struct StepInputs {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    query_factors: Vec<f32>,
    slots: Vec<i32>,
    spans: Vec<i32>,
    window_spans: Vec<i32>,
    pages: Vec<i32>,
    expanded_pages: Vec<i32>,
    expanded_spans: Vec<i32>,
    window_slots: Vec<i32>,
    window_pages: Vec<i32>,
    rows: Vec<i32>,
    /// Whether each row, and each row of outputs, has a token: others fill up the step.
    has_token: Vec<bool>,
    has_output: Vec<bool>,
    /// The rows of recurrent states that each sequence reads and writes.
    state_rows: Vec<[i32; 2]>,
    pieces: Vec<i32>,
    /// Where sequences of one token and parts of prompts are.
    parts: PartRows,
}

impl StepInputs {
    /// Fills the pages of the sequences of the last tokens, one sequence's after the other's, and the slots in these that each token
    /// sees.
    fn fill_expanded(
        &mut self,
        tokens: &[StepToken],
        sequences: &[StepSequence<'_>],
        rows: usize,
        parts: ExpandedParts,
    ) {
        self.expanded_pages.clear();
        self.expanded_spans.clear();
        let last = tokens.get(rows.saturating_sub(parts.tokens)..).unwrap_or_default();
        for own in last.chunk_by(|a, b| a.sequence == b.sequence) {
            let first = (self.expanded_pages.len() * PAGE_SLOTS) as i32;
            let ends = own.iter().map(|token| first + token.position as i32 + 1);
            self.expanded_spans.extend(ends.flat_map(|end| [first, end]));
            let seen = own.last().map_or(0, |token| token.position / PAGE_SLOTS + 1);
            let pages = own.first().and_then(|token| sequences.get(token.sequence));
            let pages = pages.map_or(&[][..], |sequence| sequence.pages).iter().take(seen);
            self.expanded_pages.extend(pages.map(|page| *page as i32));
        }
        self.expanded_pages.resize(parts.pages, 0);
        self.expanded_spans.resize(2 * parts.tokens, 0);
    }
}

impl PagedEngine {
    /// Notes which rows of recurrent states the next batch reads and writes: at least as many as it has sequences.
    pub(in crate::serving) fn set_pieces<'r>(&mut self, rows: impl Iterator<Item = &'r [usize; 2]>) {
        self.inputs.state_rows.clear();
        self.inputs.state_rows.extend(rows.map(|rows| rows.map(|row| row as i32)));
    }

    /// The rows of recurrent states that the next batch reads and writes.
    pub(super) fn state_rows(&self) -> &[[i32; 2]] {
        &self.inputs.state_rows
    }

    /// Fills the graph's inputs, and returns the row of each output. Rows without a token see nothing, and write to slots that
    /// nobody reads.
    pub(super) fn fill(
        &mut self,
        tokens: &[StepToken],
        sequences: &[StepSequence<'_>],
        shape: &GraphShape,
    ) -> Vec<usize> {
        let hyper = self.model.hyperparameters();
        let window = hyper.window_span();
        let inputs = &mut self.inputs;
        for list in [
            &mut inputs.tokens,
            &mut inputs.positions,
            &mut inputs.slots,
            &mut inputs.spans,
            &mut inputs.window_spans,
            &mut inputs.pages,
            &mut inputs.window_slots,
            &mut inputs.window_pages,
            &mut inputs.rows,
        ] {
            list.clear();
        }
        let (mut output_rows, mut unused) = (Vec::new(), 0);
        inputs.rows.resize(shape.rows, 0);
        inputs.has_token.clear();
        inputs.has_output.clear();
        inputs.has_output.resize(shape.rows, false);
        let (mut outputs, mut hidden_outputs) = (0, shape.logit_rows.min(shape.rows));
        for row in 0..shape.tokens.max(tokens.len()) {
            let token = tokens.get(row).copied();
            if let Some(token) = token.filter(|token| token.output) {
                let next = if token.hidden { &mut hidden_outputs } else { &mut outputs };
                if let Some(into) = inputs.rows.get_mut(*next) {
                    *into = row as i32;
                }
                output_rows.push(if shape.selects_rows() { *next } else { row });
                *next += 1;
            }
            let used = token.and_then(|token| Some((token, sequences.get(token.sequence)?)));
            inputs.has_token.push(used.is_some());
            if let (Some(_), Some(output)) = (used.filter(|(token, _)| token.output), output_rows.last())
                && let Some(has_output) = inputs.has_output.get_mut(*output)
            {
                *has_output = true;
            }
            let Some((StepToken { token, position, sequence, .. }, StepSequence { pages, window_pages, .. })) =
                used
            else {
                inputs.tokens.push(0);
                inputs.positions.push(0);
                inputs.slots.push((unused % (SCRAP_PAGES * PAGE_SLOTS)) as i32);
                inputs.window_slots.push((unused % (SCRAP_PAGES * PAGE_SLOTS)) as i32);
                inputs.spans.extend([0; 3]);
                inputs.window_spans.extend([0; 3]);
                unused += 1;
                continue;
            };
            let page = pages.get(position / PAGE_SLOTS).copied().unwrap_or(0) as usize;
            let end = position as i32 + 1;
            let first = window.map_or(0, |window| window.first(position));
            inputs.tokens.push(token as i32);
            inputs.positions.push(position as i32);
            inputs.slots.push((page * PAGE_SLOTS + position % PAGE_SLOTS) as i32);
            let page = window_pages.and_then(|own| own.get(position / PAGE_SLOTS)).unwrap_or(0) as usize;
            inputs.window_slots.push((page * PAGE_SLOTS + position % PAGE_SLOTS) as i32);
            inputs.spans.extend([0, end, sequence as i32]);
            inputs.window_spans.extend([first as i32, end, sequence as i32]);
        }
        let table = shape.page_table.unwrap_or(PageTable { rows: 0, pages: 0 });
        for row in 0..table.rows {
            let pages = sequences.get(row).map_or(&[][..], |sequence| sequence.pages);
            inputs.pages.extend(pages.iter().map(|page| *page as i32));
            inputs.pages.resize((row + 1) * table.pages, 0);
            let own = sequences.get(row).and_then(|sequence| sequence.window_pages);
            let (first, pages) = own.map_or((0, &[][..]), WindowPages::parts);
            // Nobody looks at those before the window.
            inputs.window_pages.resize(row * table.pages + first.min(table.pages), 0);
            inputs.window_pages.extend(pages.iter().map(|page| *page as i32));
            inputs.window_pages.resize((row + 1) * table.pages, 0);
        }
        if let Some(parts) = shape.expanded {
            self.inputs.fill_expanded(tokens, sequences, shape.tokens, parts);
        }
        if let Some(parts) = shape.parts {
            let before = self.model.part().recurrent.as_ref().map_or(0, |shape| shape.conv_kernel - 1);
            self.inputs.parts.fill(tokens, shape.tokens, parts, before);
        }
        output_rows
    }

    /// Notes which experts a step uses, and starts to upload those that should be in a slot.
    pub(super) fn observe_experts(&mut self, shape: &GraphShape) -> Result<()> {
        let Some(experts) = &mut self.experts else { return Ok(()) };
        let StepInputs { has_token, has_output, .. } = &self.inputs;
        let holds_token = |row: BatchRow| match row {
            BatchRow::Token(row) => has_token.get(row) == Some(&true),
            BatchRow::Output(row) => has_output.get(row) == Some(&true),
        };
        experts.observe(&self.model, &mut self.session, shape, holds_token)
    }

    /// Sets the graph's inputs; with `chained`, its tokens are the results of the step before.
    pub(super) fn set_inputs(&mut self, shape: &GraphShape, chained: bool) -> Result<()> {
        let StepInputs {
            tokens,
            positions,
            query_factors,
            slots,
            spans,
            window_slots,
            window_spans,
            pages,
            expanded_pages,
            expanded_spans,
            window_pages,
            rows,
            state_rows,
            pieces,
            parts,
            ..
        } = &mut self.inputs;
        let LayerCaches { full, windows, recurrent } = self.model.caches();
        if let Some(temperature) = self.model.temperature() {
            temperature.fill(query_factors, positions);
            self.session.set(QUERY_FACTORS, query_factors.as_slice())?;
        }
        let apart = shape.window_cache.is_some();
        for (name, values, has) in [
            ("tokens", tokens, !chained),
            ("positions", positions, true),
            ("slots", slots, full || windows && !apart),
            ("spans", spans, full),
            ("window_slots", window_slots, windows && apart),
            ("window_spans", window_spans, windows),
            ("pages", pages, full || windows && !apart),
            ("expanded_pages", expanded_pages, full && shape.expanded.is_some()),
            ("expanded_spans", expanded_spans, full && shape.expanded.is_some()),
            ("window_pages", window_pages, windows && apart),
            ("rows", rows, shape.selects_rows()),
        ] {
            if has {
                self.session.set(name, values.as_slice())?;
            }
        }
        if let Some(recurrent) = self.model.part().recurrent.as_ref().filter(|_| recurrent) {
            for (input, (name, _)) in recurrent.piece_inputs(0, 0).enumerate() {
                pieces.clear();
                let order = 0..shape.sequences;
                let order = order.map(|at| if shape.parts.is_some() { parts.state(at) } else { at });
                for [from, to] in order.filter_map(|at| state_rows.get(at)) {
                    let of_sequence = recurrent.piece_inputs(*from, *to).nth(input);
                    pieces.extend(of_sequence.into_iter().flat_map(|(_, pieces)| pieces));
                }
                self.session.set(name, pieces.as_slice())?;
            }
            if let Some(shape) = shape.parts {
                for (name, values) in parts.inputs(shape) {
                    self.session.set(name, values)?;
                }
            }
        }
        Ok(())
    }
}
