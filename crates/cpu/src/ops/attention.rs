//! Lowering of attention: the fast kernels, and a plain kernel for the shapes they do not support.

use std::ops::Range;

use quadriga_graph::{Attention, DType, PAGE_SLOTS, Tensor};

use super::lowered::{LoweredOp, TeamOp};
use super::operand::LoweringContext;
use super::scratch::with_floats;
use crate::isa::Isa;
use crate::kernels::attention::{
    self as fast, AttentionMask, AttentionMemory, AttentionShape, HeadRows, PageTable,
};
use crate::kernels::vec;
use crate::pool::Worker;
use crate::step::{Access, Kernel, StepPart, TeamError, TeamKernel, WorkMemory};
use crate::view::TensorView;

/// Queries whose results a chunk of the check for non-finite values covers.
const LINES: usize = 16;

struct AttentionKernel {
    isa: Isa,
    scale: f32,
    soft_cap: Option<f32>,
    q: TensorView,
    k: TensorView,
    v: TensorView,
    mask: Option<TensorView>,
    spans: Option<TensorView>,
    sinks: Option<TensorView>,
    pages: Option<TensorView>,
    out: TensorView,
}

pub(super) fn attention(
    parameters: &Attention,
    [q, k, v]: [&TensorView; 3],
    rest: &[TensorView],
    out: &TensorView,
    context: &LoweringContext<'_>,
    lowered: &mut Vec<LoweredOp>,
) -> Result<(), String> {
    let mut rest = rest.iter().copied();
    let mut take = |wanted: bool| if wanted { rest.next() } else { None };
    let wanted = [parameters.mask, parameters.spans, parameters.sinks, parameters.pages];
    let optional = wanted.map(&mut take);
    if optional.each_ref().map(Option::is_some) != wanted {
        return Err("an input is missing".into());
    }
    let [mask, spans, sinks, pages] = optional;
    let [b, h, t, d] = q.dims;
    let mut accesses = vec![Access::reads(q), Access::reads(k), Access::reads(v), Access::writes(out)];
    accesses.extend(optional.iter().flatten().map(Access::reads));
    let table = pages.as_ref().map(|pages| pages.cols());
    let shape = attention_shape(parameters, q.dims, (k.dims, k.dtype), (v.dims, v.dtype), table);
    let isa = context.isa;
    let Attention { scale, soft_cap, .. } = *parameters;
    let plain =
        AttentionKernel { isa, scale, soft_cap, q: *q, k: *k, v: *v, mask, spans, sinks, pages, out: *out };
    let fits = [spans, pages].iter().flatten().all(TensorView::is_contiguous);
    let is_pool = pages.is_none() || k.dims[2] >= PAGE_SLOTS;
    if fits && is_pool && shape.slots > 0 && fast::Attention::work_bytes(isa, &shape, 1).is_ok() {
        lowered.push(LoweredOp::Team(TeamOp {
            kernel: Box::new(FastAttention { shape, plain }),
            accesses,
            work_bytes: Box::new(move |threads| fast::Attention::work_bytes(isa, &shape, threads)),
            name: 0,
            label: "",
        }));
        return Ok(());
    }
    let cost = (b * h * t).saturating_mul(k.dims[2]).saturating_mul(d + v.cols());
    lowered.push(LoweredOp::Part(StepPart::new(plain, b * h * t, cost, accesses)));
    Ok(())
}

/// The shape of an attention over these tensors, and pages.
pub(super) fn shape_of(
    parameters: &Attention,
    [q, k, v]: [&Tensor; 3],
    pages: Option<&Tensor>,
) -> AttentionShape {
    let table = pages.map(|pages| pages.dims4()[3]);
    attention_shape(parameters, q.dims4(), (k.dims4(), k.dtype()), (v.dims4(), v.dtype()), table)
}

fn attention_shape(
    parameters: &Attention,
    [_, heads, tokens, key_width]: [usize; 4],
    ([_, kv_heads, slots, _], key_type): ([usize; 4], DType),
    ([.., value_width], value_type): ([usize; 4], DType),
    table_pages: Option<usize>,
) -> AttentionShape {
    let Attention { scale, soft_cap, .. } = *parameters;
    let slots = table_pages.map_or(slots, |pages| pages.saturating_mul(PAGE_SLOTS));
    AttentionShape {
        heads,
        kv_heads,
        tokens,
        slots,
        key_width,
        value_width,
        scale,
        soft_cap,
        key_type,
        value_type,
    }
}

/// The span of visible keys of query `t`, checked.
pub(super) fn span(spans: Option<&TensorView>, t: usize, keys: usize) -> Result<Range<usize>, String> {
    let Some(spans) = spans else { return Ok(0..keys) };
    let (first, end) = (spans.index([0, 0, t], 0), spans.index([0, 0, t], 1));
    match (usize::try_from(first), usize::try_from(end)) {
        (Ok(first), Ok(end)) if end <= keys => Ok(first.min(end)..end),
        _ => Err(format!("span {first}..{end} of query {t} is outside 0..{keys}")),
    }
}

/// The positions that query `t` sees, and the row of each in keys and values.
struct PagedSpan<'a> {
    positions: Range<usize>,
    pages: &'a TensorView,
    table: usize,
    rows: usize,
}

impl<'a> PagedSpan<'a> {
    /// The span of query `t`, checked against the page table.
    fn new(
        spans: &TensorView,
        pages: &'a TensorView,
        t: usize,
        rows: usize,
    ) -> Result<PagedSpan<'a>, String> {
        let positions = span(Some(spans), t, pages.cols() * PAGE_SLOTS)?;
        let table = spans.index([0, 0, t], 2);
        match usize::try_from(table) {
            Ok(table) if table < pages.dims[2] => Ok(PagedSpan { positions, pages, table, rows }),
            _ => Err(format!("query {t} uses row {table} of a page table of {}", pages.dims[2])),
        }
    }

    /// The row of a position of the span.
    fn row(&self, position: usize) -> Result<usize, String> {
        let page = self.pages.index([0, 0, self.table], position / PAGE_SLOTS);
        let first = usize::try_from(page).ok().and_then(|page| page.checked_mul(PAGE_SLOTS));
        match first {
            Some(first) if self.rows.checked_sub(PAGE_SLOTS).is_some_and(|last| first <= last) => {
                Ok(first + position % PAGE_SLOTS)
            }
            _ => Err(format!("page {page} of table {} is outside {} rows", self.table, self.rows)),
        }
    }
}

/// Attention by the fast kernels, one batch after another.
struct FastAttention {
    shape: AttentionShape,
    /// The plain kernel, for queries whose results are not finite.
    plain: AttentionKernel,
}

/// Rows of one batch: token or slot by head.
fn rows(view: &TensorView, batch: usize, strides: [usize; 2]) -> Result<HeadRows, TeamError> {
    let pointer = view
        .row_pointer([batch, 0, 0])
        .ok_or_else(|| TeamError::Data(format!("there is no batch {batch}")))?;
    let [stride, head_stride] = strides;
    Ok(HeadRows { pointer, stride, head_stride })
}

/// Bytes from one index to the next along two axes; 0 along one that is repeated, or has no second index.
fn strides(view: &TensorView, axes: [usize; 2]) -> [usize; 2] {
    axes.map(|axis| match (view.dims.get(axis), view.strides.get(axis)) {
        (Some(extent), Some(stride)) if *extent > 1 => *stride,
        _ => 0,
    })
}

/// The numbers of a contiguous tensor.
///
/// # Safety
/// The tensor has `count` of them, aligned, which are not written while they are used.
unsafe fn numbers<'a, T>(view: &TensorView, count: usize) -> Result<&'a [T], TeamError> {
    let pointer = view.row_pointer([0, 0, 0]).ok_or_else(|| TeamError::Data("a table is empty".into()))?;
    // SAFETY: promised by the caller.
    Ok(unsafe { std::slice::from_raw_parts(pointer.cast::<T>(), count) })
}

impl TeamKernel for FastAttention {
    fn run(&self, worker: &Worker<'_>, work: WorkMemory) -> Result<(), TeamError> {
        let AttentionKernel { isa, q, k, v, mask, sinks, out, .. } = &self.plain;
        let tokens = self.shape.tokens;
        // The kernel clamps spans to the keys, and pages to their pool; what is out of range is an error, found here.
        worker.try_chunks(1, |_| self.plain.check_spans()).map_err(TeamError::Data)?;
        let (mut spans, mut pages) = (None, None);
        // SAFETY: contiguous tensors of i32, aligned, which this node does not write; for each query there are two
        // numbers, or three with pages.
        unsafe {
            match (&self.plain.spans, &self.plain.pages) {
                (Some(view), None) => spans = Some(numbers::<[i32; 2]>(view, tokens)?),
                (Some(view), Some(table)) => {
                    pages = Some(PageTable {
                        spans: numbers(view, tokens)?,
                        pages: numbers(table, table.elements())?,
                        columns: table.cols(),
                        rows: k.dims[2],
                    });
                }
                (None, _) => {}
            }
        }
        let sinks = match sinks {
            None => None,
            // SAFETY: an input of the operation, which it does not write.
            Some(sinks) => Some(
                unsafe { sinks.row_f32([0; 3]) }
                    .ok_or_else(|| TeamError::Data("its sinks are not dense".into()))?,
            ),
        };
        let needs = fast::Attention::work_bytes(*isa, &self.shape, work.threads)?;
        if work.bytes < needs {
            return Err(TeamError::Data(format!("{} bytes of work memory, {needs} needed", work.bytes)));
        }
        // Of a mask that does not exist nothing is read, here or, ahead of time, by a compiler that moves code out of the loop.
        let mask = mask.as_ref().map(|mask| (mask, strides(mask, [2, 1])));
        let [of_q, of_k, of_v] = [q, k, v].map(|view| strides(view, [2, 1]));
        let of_out = strides(out, [1, 2]);
        let mut is_separate = true;
        for batch in 0..q.dims[0] {
            if batch > 0 {
                worker.barrier()?;
            }
            let mask = match mask {
                None => None,
                Some((mask, strides)) => {
                    let rows = rows(mask, batch % mask.dims[0].max(1), strides)?;
                    Some(AttentionMask { rows, dtype: mask.dtype })
                }
            };
            let memory = AttentionMemory {
                queries: rows(q, batch, of_q)?,
                keys: rows(k, batch, of_k)?,
                values: rows(v, batch, of_v)?,
                mask,
                spans,
                pages,
                sinks,
                output: rows(out, batch, of_out)?,
            };
            // SAFETY: the tensors have these shapes and strides, in buffers that the program holds; the result is
            // contiguous and overlaps no input; the work memory is long enough and this step's alone.
            let attention =
                unsafe { fast::Attention::new(*isa, self.shape, memory, work.threads, work.pointer)? };
            is_separate &= attention.is_separate();
            // SAFETY: every thread of the run calls this kernel once, and a barrier separates batches.
            unsafe { attention.run(worker)? };
        }
        // The fast kernels multiply all values that any query of a block sees, some with weight 0. A NaN or infinite
        // value still makes such a sum NaN, so queries with non-finite results are recomputed from their own span.
        if is_separate {
            return Ok(());
        }
        worker.barrier()?;
        let [batches, _, heads, width] = out.dims;
        let lines = batches * tokens;
        let result = worker.try_chunks(lines.div_ceil(LINES), |chunk| {
            for line in chunk * LINES..lines.min((chunk + 1) * LINES) {
                let (batch, token) = (line / tokens, line % tokens);
                for head in 0..heads {
                    let finite = with_floats(width, |row| {
                        out.load_at([batch, token, head], 0, row);
                        row.iter().fold(true, |all, value| all & value.is_finite())
                    });
                    if !finite {
                        let unit = (batch * heads + head) * tokens + token;
                        self.plain.run(unit..unit + 1, work)?;
                    }
                }
            }
            Ok(())
        });
        result.map_err(TeamError::Data)
    }
}

impl AttentionKernel {
    /// Checks all spans, and the pages that they cover.
    fn check_spans(&self) -> Result<(), String> {
        let (tokens, keys) = (self.q.dims[2], self.k.dims[2]);
        let (Some(spans), Some(pages)) = (&self.spans, &self.pages) else {
            return (0..tokens).try_for_each(|t| span(self.spans.as_ref(), t, keys).map(drop));
        };
        let covered =
            |span: &PagedSpan<'_>| span.positions.start / PAGE_SLOTS..span.positions.end.div_ceil(PAGE_SLOTS);
        // Queries of one sequence follow each other, and see much the same pages.
        let mut checked = (usize::MAX, 0..0);
        for t in 0..tokens {
            let span = PagedSpan::new(spans, pages, t, keys)?;
            if span.positions.is_empty() {
                continue;
            }
            let own = covered(&span);
            for page in own.clone() {
                if checked.0 != span.table || !checked.1.contains(&page) {
                    span.row(page * PAGE_SLOTS)?;
                }
            }
            checked = (span.table, own);
        }
        Ok(())
    }
}

impl Kernel for AttentionKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let [_, h, t, d] = self.q.dims;
        let (groups, keys, e) = (self.k.dims[1], self.k.dims[2], self.v.cols());
        with_floats(2 * d.max(e) + d + e, |floats| {
            let (row, rest) = floats.split_at_mut(d.max(e));
            let (query, rest) = rest.split_at_mut(d);
            let sums = rest.get_mut(..e).unwrap_or_default();
            for unit in units {
                let (i, outer) = (unit % t, unit / t);
                let (head, batch) = (outer % h, outer / h);
                let group = head / (h / groups.max(1)).max(1);
                self.q.load_at([batch, head, i], 0, query);
                sums.fill(0.0);
                // A sink is a score without a value.
                let (mut largest, mut total) = match &self.sinks {
                    None => (f32::NEG_INFINITY, 0.0_f32),
                    Some(sinks) => {
                        let mut sink = [0.0];
                        sinks.load(0, head, &mut sink);
                        (sink[0], 1.0)
                    }
                };
                let paged = match (&self.spans, &self.pages) {
                    (Some(spans), Some(pages)) => Some(PagedSpan::new(spans, pages, i, keys)?),
                    _ => None,
                };
                let visible = match &paged {
                    Some(paged) => paged.positions.clone(),
                    None => span(self.spans.as_ref(), i, keys)?,
                };
                for key in visible {
                    let key = paged.as_ref().map_or(Ok(key), |paged| paged.row(key))?;
                    let Some(k) = row.get_mut(..d) else { continue };
                    self.k.load_at([batch, group, key], 0, k);
                    let mut score = self.scale * vec::dot(self.isa, query, k);
                    if let Some(cap) = self.soft_cap {
                        score = cap * (score / cap).tanh();
                    }
                    if let Some(mask) = &self.mask {
                        let mut one = [0.0];
                        let place = [batch % mask.dims[0].max(1), head % mask.dims[1].max(1), i];
                        mask.load_at(place, key, &mut one);
                        score += one[0];
                    }
                    if score == f32::NEG_INFINITY {
                        continue;
                    }
                    if score > largest {
                        let factor = (largest - score).exp();
                        sums.iter_mut().for_each(|sum| *sum *= factor);
                        total *= factor;
                        largest = score;
                    }
                    let weight = (score - largest).exp();
                    total += weight;
                    let Some(v) = row.get_mut(..e) else { continue };
                    self.v.load_at([batch, group, key], 0, v);
                    for (sum, value) in sums.iter_mut().zip(v) {
                        *sum += weight * *value;
                    }
                }
                if total != 0.0 {
                    sums.iter_mut().for_each(|sum| *sum /= total);
                }
                self.out.store_at([batch, i, head], 0, sums);
            }
            Ok(())
        })
    }
}
