//! Sums of the rows of active neurons.

use super::*;

/// Rows whose factors are looked at before the active ones are read, so that these can be prefetched.
const LIST: usize = 1024;

/// Active rows from one that is read to the one that is prefetched.
const AHEAD: usize = 8;

/// Tokens that a unit of [`AxpyKernel`] sums for at a time, where it cannot take tiles.
const TOKENS: usize = 64;

/// Rows and columns of a tile that several tokens' sums are made of.
const TILE_ROWS: usize = MAX_TILE_ROWS;
const TILE_COLUMNS: usize = 256;

/// The most tokens of a unit.
const TOKEN_GROUP: usize = 128;

struct AxpyKernel {
    isa: Isa,
    skip: bool,
    w: TensorView,
    factors: TensorView,
    out: TensorView,
    /// Columns of a unit: whole blocks.
    columns: usize,
    /// Units with the same columns, each with other tokens.
    token_groups: usize,
}

/// The sums of one token of a large matrix are taken by groups of active rows, as many in each: a thread reads whole rows then,
/// few pages each, and not a piece of every row.
#[derive(Clone, Copy)]
struct RowGroups {
    columns: usize,
}

/// Groups of active rows.
const GROUPS: usize = 16;

/// Columns of a piece of a group.
const PIECE: usize = 2048;

/// Elements from which a matrix counts as large: for fewer, the second step takes longer than the pages cost.
const LARGE: usize = 1 << 22;

impl RowGroups {
    /// The groups of a matmul, if it is one of one token and a large matrix whose rows are read as they are.
    pub(in crate::ops) fn of(dtype: DType, [rows, columns]: [usize; 2], tokens: usize) -> Option<RowGroups> {
        let is_large = rows.saturating_mul(columns) >= LARGE;
        (tokens == 1 && is_large && vec::reads_rows_of(dtype, columns)).then_some(RowGroups { columns })
    }

    /// Bytes of the groups' sums.
    pub(in crate::ops) fn work_bytes(self) -> usize {
        GROUPS * self.columns * size_of::<f32>()
    }

    fn pieces(self) -> usize {
        self.columns.div_ceil(PIECE)
    }

    /// The group and the columns of a unit.
    fn unit(self, unit: usize) -> (usize, Range<usize>) {
        let first = unit % self.pieces() * PIECE;
        (unit / self.pieces(), first..(first + PIECE).min(self.columns))
    }

    /// The sums of some columns of a group.
    ///
    /// # Safety
    /// The work memory is that of the step that takes these sums, or of the next, and no other thread uses these sums.
    unsafe fn sums<'a>(
        self,
        work: WorkMemory,
        group: usize,
        columns: &Range<usize>,
    ) -> Option<&'a mut [f32]> {
        let fits = work.bytes >= self.work_bytes() && group < GROUPS && columns.end <= self.columns;
        let at = work.pointer.cast::<f32>().wrapping_add(group * self.columns + columns.start);
        // SAFETY: inside the work memory, which is aligned and initialized; the rest is promised by the caller.
        fits.then(|| unsafe { std::slice::from_raw_parts_mut(at, columns.len()) })
    }
}

/// What [`axpy`] needs of work memory.
pub(in crate::ops) fn axpy_work_bytes(w: &Tensor, factors: &Tensor) -> Option<usize> {
    let [.., tokens, rows] = factors.dims4();
    RowGroups::of(w.dtype(), [rows, w.shape().cols()], tokens).map(RowGroups::work_bytes)
}

pub(in crate::ops) fn axpy(
    w: &TensorView,
    factors: &TensorView,
    out: &TensorView,
    context: &LoweringContext<'_>,
    lowered: &mut Vec<LoweredOp>,
) -> StepPart {
    let (block, tokens) = (w.dtype.block_len().max(32), out.dims[2]);
    // Enough pieces for several threads, none much shorter than what a memory access transfers; of many tokens as wide as a tile,
    // and each with some of the tokens.
    let pieces = match w.cols() {
        columns if tokens >= TOKEN_GROUP => columns.div_ceil(TILE_COLUMNS),
        0..2048 => 6,
        _ => 16,
    };
    let columns = w.cols().div_ceil(pieces.max(1)).max(64).next_multiple_of(block);
    let token_groups = tokens.div_ceil(TOKEN_GROUP).max(1);
    let accesses = vec![Access::reads(w), Access::reads(factors), Access::writes(out)];
    let cost = factors.elements().saturating_mul(w.cols()) / ACTIVE_SHARE;
    let (isa, skip) = (context.isa, context.skip);
    let kernel = AxpyKernel { isa, skip, w: *w, factors: *factors, out: *out, columns, token_groups };
    let groups = RowGroups::of(w.dtype, [w.dims[2], w.cols()], tokens);
    let is_dense = || w.is_dense() && factors.is_dense() && out.is_dense() && w.row_pointer([0; 3]).is_some();
    if let Some(groups) = groups.filter(|_| is_dense()) {
        // It says that it writes the result, so that nothing comes between it and the step that does.
        let mut part =
            StepPart::new(GroupKernel { kernel, groups }, GROUPS * groups.pieces(), cost, accesses);
        (part.grain, part.work_bytes, part.active_rows) = (groups.pieces(), groups.work_bytes(), Some(*w));
        lowered.push(LoweredOp::Part(part));
        let kernel = SumGroupsKernel { isa, groups, out: *out, columns };
        let accesses = vec![Access::writes(out)];
        let mut part = StepPart::new(kernel, w.cols().div_ceil(columns), GROUPS * w.cols(), accesses);
        (part.unit_columns, part.work_bytes) = (Some(columns), groups.work_bytes());
        return part;
    }
    let mut part = StepPart::new(kernel, w.cols().div_ceil(columns) * token_groups, cost, accesses);
    if tokens == 1 {
        part.unit_columns = Some(columns);
        part.active_rows = Some(*w);
    }
    part
}

/// Adds the rows of each group.
struct GroupKernel {
    kernel: AxpyKernel,
    groups: RowGroups,
}

/// The places of active rows among all: group `g` begins with the row that `starts[g]` says.
fn group_starts(isa: Isa, factors: &[f32]) -> [usize; GROUPS + 1] {
    let mut list = [0; LIST];
    let blocks = || (0..).step_by(LIST).zip(factors.chunks(LIST));
    let active: usize = blocks().map(|(_, factors)| vec::count_active(isa, factors)).sum();
    let mut starts = [factors.len(); GROUPS + 1];
    starts[0] = 0;
    let (mut before, mut group) = (0, 1);
    for (first, factors) in blocks() {
        let count = vec::list_active(isa, factors, &mut list);
        while group < GROUPS && active * group / GROUPS < before + count {
            let row = list.get(active * group / GROUPS - before).map_or(0, |row| first + *row as usize);
            starts.iter_mut().skip(group).take(1).for_each(|start| *start = row);
            group += 1;
        }
        before += count;
    }
    starts
}

impl Kernel for GroupKernel {
    fn run(&self, units: Range<usize>, work: WorkMemory) -> Result<(), String> {
        let AxpyKernel { isa, w, factors, .. } = &self.kernel;
        // SAFETY: the operation does not write its inputs.
        let (Some(factors), Some(base)) = (unsafe { factors.row_f32([0; 3]) }, w.row_pointer([0; 3])) else {
            return Err("the rows are not dense".to_owned());
        };
        let starts = group_starts(*isa, factors);
        let matrix = vec::RowMatrix { dtype: w.dtype, base, stride: w.strides[2] };
        for unit in units {
            let (group, columns) = self.groups.unit(unit);
            // SAFETY: this unit alone has these sums, and the next step reads them.
            let sums = unsafe { self.groups.sums(work, group, &columns) };
            let (Some(sums), Some([first, end])) =
                (sums, starts.get(group..group + 2).and_then(|pair| <[usize; 2]>::try_from(pair).ok()))
            else {
                return Err("the work memory is too small".to_owned());
            };
            self.kernel.add_rows(matrix, factors, first..end, columns.start, sums);
        }
        Ok(())
    }
}

/// Adds the sums of all groups, in their order.
struct SumGroupsKernel {
    isa: Isa,
    groups: RowGroups,
    out: TensorView,
    /// Columns of a unit.
    columns: usize,
}

impl Kernel for SumGroupsKernel {
    fn run(&self, units: Range<usize>, work: WorkMemory) -> Result<(), String> {
        let columns = units.start * self.columns..(units.end * self.columns).min(self.groups.columns);
        let Some(out) = self.out.floats_at([0; 3], columns.start, columns.len()) else {
            return Err("the result is not dense".to_owned());
        };
        // SAFETY: so many elements from there on, which only these units have.
        let out = unsafe { std::slice::from_raw_parts_mut(out, columns.len()) };
        for group in 0..GROUPS {
            // SAFETY: the previous step has written them; other units read other columns.
            let sums = unsafe { self.groups.sums(work, group, &columns) };
            let sums = sums.ok_or_else(|| "the work memory is too small".to_owned())?;
            if group == 0 {
                out.copy_from_slice(sums);
            } else {
                vec::axpy(self.isa, 1.0, sums, out);
            }
        }
        Ok(())
    }
}

impl AxpyKernel {
    /// Whether a row adds anything to the sums of some tokens.
    fn is_active(&self, tokens: &Range<usize>, row: usize) -> bool {
        !self.skip || tokens.clone().any(|token| self.factor(token, row) != 0.0)
    }

    fn factor(&self, token: usize, row: usize) -> f32 {
        let mut factor = [0.0];
        self.factors.load_at([0, 0, token], row, &mut factor);
        factor[0]
    }

    /// Some columns of the sums of one token, straight from the rows; `false` if types or layouts do not allow that.
    fn sum_of_one(&self, token: usize, columns: &Range<usize>, sums: &mut [f32]) -> bool {
        // SAFETY: the operation does not write its inputs.
        let factors = unsafe { self.factors.row_f32([0, 0, token]) };
        let (Some(factors), Some(base)) = (factors, self.w.row_pointer([0; 3])) else { return false };
        if !self.w.is_dense() || !vec::reads_rows_of(self.w.dtype, columns.len()) {
            return false;
        }
        let matrix = vec::RowMatrix { dtype: self.w.dtype, base, stride: self.w.strides[2] };
        self.add_rows(matrix, factors, 0..factors.len(), columns.start, sums);
        true
    }

    /// Sets sums to those of some columns, from one on, of some rows.
    fn add_rows(
        &self,
        matrix: vec::RowMatrix,
        factors: &[f32],
        range: Range<usize>,
        column: usize,
        sums: &mut [f32],
    ) {
        let (mut rows, mut values) = ([0; LIST], [0.0; LIST]);
        sums.fill(0.0);
        let start = range.start;
        let factors = factors.get(range).unwrap_or_default();
        for (first, factors) in (start..).step_by(LIST).zip(factors.chunks(LIST)) {
            let len = list_active(self.isa, self.skip, factors, &mut rows).len();
            for (row, value) in rows.iter_mut().zip(&mut values).take(len) {
                *value = factors.get(*row as usize).copied().unwrap_or(0.0);
                *row += first as u32;
            }
            let (rows, values) = (rows.get(..len).unwrap_or_default(), values.get(..len).unwrap_or_default());
            // SAFETY: rows and columns of the matrix, dense and not written; columns begin at whole blocks.
            unsafe { vec::axpy_rows(self.isa, matrix, rows, values, column, sums) };
        }
    }

    /// Some columns of the sums of several tokens, by tiles; `false` if types or layouts do not allow that.
    fn sums_of_many(&self, tokens: &Range<usize>, columns: &Range<usize>) -> bool {
        let count = self.w.dims[2];
        // SAFETY: the operation does not write its inputs.
        let factors = |token: usize| unsafe { self.factors.row_f32([0, 0, token]) };
        let sums = |token: usize| self.out.floats_at([0, 0, token], columns.start, columns.len());
        if tokens.clone().any(|token| factors(token).is_none() || sums(token).is_none()) {
            return false;
        }
        // Units begin at whole blocks, and so do tiles.
        let step = TILE_COLUMNS.next_multiple_of(self.w.dtype.block_len().max(1));
        with_tile(TILE_ROWS, step, |elements| {
            for first in columns.clone().step_by(step) {
                let part = first..(first + step).min(columns.end);
                let sums = |token: usize| {
                    let at = sums(token)?.wrapping_add(first - columns.start);
                    // SAFETY: so many elements from there on, which this unit alone has.
                    Some(unsafe { std::slice::from_raw_parts_mut(at, part.len()) })
                };
                tokens.clone().filter_map(sums).for_each(|sums| sums.fill(0.0));
                for first in (0..count).step_by(TILE_ROWS) {
                    let rows = first..(first + TILE_ROWS).min(count);
                    let factors = |token: usize| factors(token)?.get(rows.clone());
                    let mut tile = Tile { rows: rows.clone(), columns: part.clone(), elements };
                    tile.fill(self.isa, self.skip, &self.w, tokens.clone().filter_map(factors));
                    for token in tokens.clone() {
                        let (Some(factors), Some(sums)) = (factors(token), sums(token)) else { continue };
                        let mut list = [0; TILE_ROWS];
                        let list = list_active(self.isa, self.skip, factors, &mut list);
                        vec::add_tile_rows(self.isa, tile.elements, list, factors, sums);
                    }
                }
            }
        });
        true
    }

    /// Some columns of the sums of some tokens.
    fn sum(&self, tokens: &Range<usize>, columns: &Range<usize>, sums: &mut [f32], values: &mut [f32]) {
        sums.fill(0.0);
        let (count, width) = (self.w.dims[2], columns.len());
        let mut list = [0; LIST];
        for first in (0..count).step_by(LIST) {
            let active = (first..(first + LIST).min(count)).filter(|row| self.is_active(tokens, *row));
            let len = list.iter_mut().zip(active).map(|(to, row)| *to = row).count();
            let rows = list.get(..len).unwrap_or_default();
            rows.iter().take(AHEAD).for_each(|row| prefetch(self.isa, &self.w, *row, columns));
            for (i, &row) in rows.iter().enumerate() {
                if let Some(next) = rows.get(i + AHEAD) {
                    prefetch(self.isa, &self.w, *next, columns);
                }
                load(self.isa, &self.w, row, columns.start, values);
                for (token, sums) in tokens.clone().zip(sums.chunks_mut(width.max(1))) {
                    let factor = self.factor(token, row);
                    if factor != 0.0 || !self.skip {
                        vec::axpy(self.isa, factor, values, sums);
                    }
                }
            }
        }
    }
}

impl Kernel for AxpyKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let [_, _, all, width] = self.out.dims;
        // The list of active rows of one token is made once for all columns.
        let units_at_once = if all == 1 { units.len() } else { 1 };
        for unit in units.clone().step_by(units_at_once.max(1)) {
            let (piece, group) = (unit / self.token_groups, unit % self.token_groups);
            let columns = piece * self.columns..((piece + units_at_once) * self.columns).min(width);
            let group = group * TOKEN_GROUP..((group + 1) * TOKEN_GROUP).min(all);
            if all > 1 && self.sums_of_many(&group, &columns) {
                continue;
            }
            for first in group.clone().step_by(TOKENS) {
                let tokens = first..(first + TOKENS).min(group.end);
                with_floats((tokens.len() + 1) * columns.len(), |floats| {
                    let (values, sums) = floats.split_at_mut(columns.len());
                    if tokens.len() != 1 || !self.sum_of_one(first, &columns, sums) {
                        self.sum(&tokens, &columns, sums, values);
                    }
                    for (token, sums) in tokens.clone().zip(sums.chunks(columns.len().max(1))) {
                        self.out.store_at([0, 0, token], columns.start, sums);
                    }
                });
            }
        }
        Ok(())
    }
}
