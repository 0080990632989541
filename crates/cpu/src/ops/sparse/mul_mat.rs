//! Products with the rows of active neurons.

use super::*;

/// Rows of a unit of [`MulMatKernel`].
const UNIT: usize = 64;

/// The most tokens for which the matmul runs as the epilogue of the gates' matmul.
const EPILOGUE_TOKENS: usize = 4;

/// Rows whose gates are looked at before the active ones are multiplied.
const GATE_LIST: usize = 64;

/// Bytes of active rows of a matrix that are prefetched for a block of gates.
const PREFETCH_BYTES: usize = 32 << 10;

/// Rows, and the most columns, of a tile that several tokens are multiplied with.
const TILE_ROWS: usize = UNIT;
const TILE_COLUMNS: usize = 640;

struct MulMatKernel {
    isa: Isa,
    skip: bool,
    w: TensorView,
    x: TensorView,
    gates: TensorView,
    ids: Option<TensorView>,
    out: TensorView,
    /// The matrix whose rows of the same neurons the next step reads.
    next: Option<TensorView>,
}

pub(in crate::ops) fn mul_mat(
    [w, x, gates]: [&TensorView; 3],
    ids: Option<&TensorView>,
    out: &TensorView,
    context: &LoweringContext<'_>,
) -> StepPart {
    let mut accesses = vec![Access::reads(w), Access::reads(x), Access::reads(gates), Access::writes(out)];
    accesses.extend(ids.map(Access::reads));
    let [_, _, tokens, rows] = out.dims;
    let cost = out.elements().saturating_mul(w.cols()) / ACTIVE_SHARE;
    let (isa, skip) = (context.isa, context.skip);
    let ids = ids.copied();
    let kernel = MulMatKernel { isa, skip, w: *w, x: *x, gates: *gates, ids, out: *out, next: None };
    let mut part = StepPart::new(kernel, rows.div_ceil(UNIT), cost, accesses);
    if ids.is_none() && gates.is_contiguous() && tokens <= EPILOGUE_TOKENS {
        // A neuron needs its own gate only: the thread that has computed some gates goes on with their rows.
        part.by_columns = Some([tokens, rows]);
        (part.large_epilogue, part.deferrable) = (true, true);
    }
    part
}

impl MulMatKernel {
    /// The neuron of a row, if it has one.
    fn neuron(&self, row: usize) -> Result<Option<usize>, String> {
        let Some(ids) = &self.ids else { return Ok(Some(row)) };
        let (id, neurons) = (ids.index([0; 3], row), self.gates.cols());
        match usize::try_from(id).ok().filter(|neuron| *neuron < neurons) {
            None if id != -1 => Err(format!("neuron {id} of row {row} is outside 0..{neurons}")),
            neuron => Ok(neuron),
        }
    }

    fn gate(&self, token: usize, neuron: Option<usize>) -> f32 {
        let mut gate = [0.0];
        if let Some(neuron) = neuron {
            self.gates.load_at([0, 0, token], neuron, &mut gate);
        }
        gate[0]
    }

    /// The results of some rows for one token, straight from the rows; `false` if types or layouts do not allow that. So many
    /// active rows are prefetched already.
    fn rows_of_one(&self, token: usize, rows: &Range<usize>, prefetched: usize) -> bool {
        let (place, columns) = ([0, 0, token], 0..self.w.cols());
        let (Some(gates), Some(out), None) = (
            self.gates.floats_at(place, rows.start, rows.len()),
            self.out.floats_at(place, rows.start, rows.len()),
            self.ids,
        ) else {
            return false;
        };
        // SAFETY: the operation does not write its input, and no other part of the step does.
        let Some(x) = (unsafe { self.x.row_f32(place) }) else { return false };
        if !self.w.is_dense() || !vec::reads_rows_of(self.w.dtype, columns.len()) {
            return false;
        }
        // SAFETY: so many elements from there on; the gates of these rows are complete, and only this unit has these results.
        let (gates, out) = unsafe {
            (std::slice::from_raw_parts(gates, rows.len()), std::slice::from_raw_parts_mut(out, rows.len()))
        };
        let pieces = gates.chunks(GATE_LIST).zip(out.chunks_mut(GATE_LIST));
        for (first, (gates, out)) in (rows.start..).step_by(GATE_LIST).zip(pieces) {
            let mut list = [0; GATE_LIST];
            let active = self.list(gates, &mut list);
            let row = |i: u32| first + i as usize;
            active
                .iter()
                .take(2)
                .skip(prefetched)
                .for_each(|i| prefetch(self.isa, &self.w, row(*i), &columns));
            out.fill(0.0);
            for (number, i) in active.iter().enumerate() {
                if let Some(next) = active.get(number + 2).filter(|_| number + 2 >= prefetched) {
                    prefetch(self.isa, &self.w, row(*next), &columns);
                }
                let (Some(from), Some(gate), Some(out)) =
                    (self.w.row_pointer([0, 0, row(*i)]), gates.get(*i as usize), out.get_mut(*i as usize))
                else {
                    continue;
                };
                // SAFETY: a dense row of as many elements as `x`, which is not written.
                let product = gate * unsafe { vec::dot_row(self.isa, self.w.dtype, from, x) };
                *out = if *gate != 0.0 { product } else { 0.0 };
            }
        }
        true
    }

    /// The positions of the gates whose rows are read, of as many gates as the list has room for.
    fn list<'a>(&self, gates: &[f32], list: &'a mut [u32]) -> &'a [u32] {
        list_active(self.isa, self.skip, gates, list)
    }

    /// The results of some rows for several tokens, by tiles; `false` if types or layouts do not allow that.
    fn rows_of_many(&self, tokens: &Range<usize>, rows: &Range<usize>) -> bool {
        if self.ids.is_some() {
            return false;
        }
        for first in rows.clone().step_by(TILE_ROWS) {
            if !self.tile_of_many(tokens, &(first..(first + TILE_ROWS).min(rows.end))) {
                return false;
            }
        }
        true
    }

    /// As [`rows_of_many`](MulMatKernel::rows_of_many), for the rows of a tile.
    fn tile_of_many(&self, tokens: &Range<usize>, rows: &Range<usize>) -> bool {
        let floats = |view: &TensorView, token: usize| view.floats_at([0, 0, token], rows.start, rows.len());
        // SAFETY: the gates of these rows are complete, and the operation does not write its inputs.
        let gates = |token| unsafe {
            Some(std::slice::from_raw_parts(floats(&self.gates, token)?.cast_const(), rows.len()))
        };
        // SAFETY: as above.
        let x = |token| unsafe { self.x.row_f32([0, 0, token]) };
        if tokens
            .clone()
            .any(|token| gates(token).is_none() || x(token).is_none() || floats(&self.out, token).is_none())
        {
            return false;
        }
        let columns = self.w.cols();
        if columns == 0 {
            return false;
        }
        let step = columns
            .div_ceil(columns.div_ceil(TILE_COLUMNS).max(1))
            .next_multiple_of(self.w.dtype.block_len().max(32));
        with_tile(TILE_ROWS, step, |elements| {
            for first in (0..columns).step_by(step.max(1)) {
                let part = first..(first + step).min(columns);
                let mut tile = Tile { rows: rows.clone(), columns: part.clone(), elements };
                tile.fill(self.isa, self.skip, &self.w, tokens.clone().filter_map(gates));
                for token in tokens.clone() {
                    let (Some(gates), Some(x), Some(out)) =
                        (gates(token), x(token), floats(&self.out, token))
                    else {
                        continue;
                    };
                    // SAFETY: so many elements from there on, which this unit alone has.
                    let out = unsafe { std::slice::from_raw_parts_mut(out, rows.len()) };
                    if part.start == 0 {
                        out.fill(0.0);
                    }
                    let (mut list, x) = ([0; TILE_ROWS], x.get(part.clone()).unwrap_or_default());
                    let list = self.list(gates, &mut list);
                    vec::add_tile_products(self.isa, tile.elements, x, list, out);
                    if part.end == columns {
                        for (out, gate) in out.iter_mut().zip(gates) {
                            *out = if *gate != 0.0 { gate * *out } else { 0.0 };
                        }
                    }
                }
            }
        });
        true
    }

    /// How many active rows of a block of gates are prefetched.
    fn prefetched(&self) -> usize {
        PREFETCH_BYTES / self.w.strides[2].max(1)
    }

    /// The results of some rows for some tokens.
    fn rows(&self, tokens: Range<usize>, rows: Range<usize>, prefetched: usize) -> Result<(), String> {
        let columns = 0..self.w.cols();
        if tokens.len() == 1 && self.rows_of_one(tokens.start, &rows, prefetched) {
            return Ok(());
        }
        if tokens.len() > 1 && self.rows_of_many(&tokens, &rows) {
            return Ok(());
        }
        if tokens.len() == 1 {
            for row in rows.clone() {
                if self.gate(tokens.start, self.neuron(row)?) != 0.0 {
                    prefetch(self.isa, &self.w, row, &columns);
                }
            }
        }
        with_floats(columns.len(), |weights| {
            for row in rows {
                let neuron = self.neuron(row)?;
                let mut loaded = false;
                for token in tokens.clone() {
                    let gate = self.gate(token, neuron);
                    let is_active = gate != 0.0;
                    let mut result = 0.0;
                    if is_active || !self.skip {
                        if !loaded {
                            load(self.isa, &self.w, row, 0, weights);
                            loaded = true;
                        }
                        // SAFETY: the operation does not write its inputs, and no other part of the step does.
                        let x = unsafe { self.x.row_f32([0, 0, token]) }.unwrap_or_default();
                        let product = gate * vec::dot(self.isa, weights, x);
                        result = if is_active { product } else { 0.0 };
                    }
                    self.out.store_at([0, 0, token], row, &[result]);
                }
            }
            Ok(())
        })
    }
}

impl Kernel for MulMatKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let [_, _, tokens, rows] = self.out.dims;
        if tokens == 1 {
            return self.rows(0..1, units.start * UNIT..(units.end * UNIT).min(rows), 0);
        }
        for unit in units {
            self.rows(0..tokens, unit * UNIT..((unit + 1) * UNIT).min(rows), 0)?;
        }
        Ok(())
    }

    fn run_block(&self, rows: Range<usize>, columns: Range<usize>) -> Result<(), String> {
        self.rows(rows, columns, self.prefetched())
    }

    fn prefetch_block(&self, tokens: Range<usize>, rows: Range<usize>) {
        let gates = self.gates.floats_at([0, 0, tokens.start], rows.start, rows.len());
        let (Some(gates), None, 1) = (gates, self.ids, tokens.len()) else { return };
        // SAFETY: so many elements from there on, which are complete, as for `run_block`.
        let gates = unsafe { std::slice::from_raw_parts(gates, rows.len()) };
        let mut list = [0; GATE_LIST];
        let gates = gates.get(..GATE_LIST).unwrap_or(gates);
        for i in self.list(gates, &mut list).iter().take(self.prefetched()) {
            for matrix in std::iter::once(&self.w).chain(&self.next) {
                prefetch(self.isa, matrix, rows.start + *i as usize, &(0..matrix.cols()));
            }
        }
    }

    fn read_next(&mut self, matrix: &TensorView) {
        self.next = Some(*matrix);
    }
}
