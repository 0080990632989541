//! Attention through page tables: queries of several sequences, whose keys are in pages of one pool.

use quadriga_graph::{AttentionOptions, DType, PAGE_SLOTS, Value};

use super::CaseList;
use super::builder::CaseBuilder;
use super::fill::{Fill, UNIT};
use crate::Tolerance;

/// A batch: for each sequence the number of its queries, and of its keys.
type Batch = &'static [(usize, usize)];

/// Decodes of one and of several sequences, prompts, both together, and rows that only fill up the batch.
const BATCHES: &[Batch] = &[
    &[(1, 1)],
    &[(1, 64), (1, 65), (1, 200)],
    &[(1, 3), (0, 0), (1, 700), (1, 64), (1, 129), (1, 1), (1, 40), (1, 250), (1, 63)],
    &[(70, 70)],
    &[(33, 200), (1, 90), (1, 1), (5, 64)],
    &[(130, 300), (64, 64)],
    &[(1, 5), (3, 0), (2, 66)],
    // So many queries that backends may take those of a prompt together.
    &[(1, 80), (1, 3), (190, 260), (1, 129), (0, 0), (100, 131), (2, 0)],
];

/// Decodes with several partitions of their keys, prompts of fewer and of more than 256 queries: for the less common heads.
const FEW_BATCHES: [usize; 4] = [2, 4, 5, 7];

/// Heads of queries and of keys and values, and their elements.
#[derive(Clone, Copy)]
struct Heads {
    heads: usize,
    groups: usize,
    depth: usize,
    value_depth: usize,
    /// Whether values are the first elements of the keys.
    latent: bool,
}

const fn heads([heads, groups]: [usize; 2], [depth, value_depth]: [usize; 2]) -> Heads {
    Heads { heads, groups, depth, value_depth, latent: false }
}

const COMMON: [Heads; 5] = [
    heads([9, 3], [64, 64]),
    heads([8, 1], [128, 128]),
    heads([4, 4], [96, 96]),
    heads([16, 2], [256, 256]),
    heads([6, 1], [160, 128]),
];

/// Latent attention, keys wider than values, large groups, and widths that are of no block.
const UNCOMMON: [Heads; 6] = [
    Heads { latent: true, ..heads([16, 1], [576, 512]) },
    heads([4, 2], [192, 128]),
    heads([40, 2], [128, 128]),
    heads([71, 1], [64, 64]),
    heads([6, 2], [112, 112]),
    heads([3, 1], [50, 36]),
];

pub(super) fn list(list: &mut CaseList) {
    use DType::{BF16, F16, F32, Q4_0, Q5_1, Q8_0};
    for types in [[F16, F16], [F32, F32], [BF16, BF16], [Q8_0, Q8_0], [Q4_0, Q5_1], [F16, Q8_0]] {
        for of in COMMON {
            for batch in BATCHES {
                push(list, of, types, batch);
            }
        }
    }
    for types in [[F16, F16], [F32, F32], [BF16, BF16], [Q8_0, Q8_0]] {
        let is_whole = |of: &Heads| {
            !types[0].is_quantized() || [of.depth, of.value_depth].iter().all(|n| n.is_multiple_of(32))
        };
        for of in UNCOMMON.into_iter().filter(is_whole) {
            for batch in FEW_BATCHES.into_iter().filter_map(|at| BATCHES.get(at)) {
                push(list, of, types, batch);
            }
        }
    }
}

/// Caches of few bits with heads of 256 and of latent attention.
pub(super) fn wide_heads(list: &mut CaseList) {
    use DType::{Q4_0, Q5_1};
    let latent = Heads { latent: true, ..heads([16, 1], [576, 512]) };
    for types in [[Q4_0; 2], [Q5_1; 2]] {
        for of in [heads([8, 4], [256, 256]), heads([4, 1], [256, 256]), latent] {
            for batch in FEW_BATCHES.into_iter().filter_map(|at| BATCHES.get(at)) {
                push(list, of, types, batch);
            }
        }
    }
}

fn push(list: &mut CaseList, of: Heads, types: [DType; 2], batch: Batch) {
    let Heads { heads, groups, depth, value_depth, latent } = of;
    let index = list.len();
    let soft_cap = index.is_multiple_of(5).then_some(3.0);
    let sinks = index.is_multiple_of(4);
    let window = index.is_multiple_of(3).then_some(50);
    let tolerance = if types == [DType::F32; 2] { Tolerance::DEFAULT } else { Tolerance::QUANTIZED };
    let details = format!(
        "paged {batch:?} [{heads}, {depth}] × {} {} [{groups}, {value_depth}] cap {soft_cap:?} sinks {sinks} window {window:?}",
        types[0], types[1]
    );
    list.push("attention", details, tolerance, move |s| {
        let queries = batch.iter().map(|(queries, _)| queries).sum();
        let (spans, pages, rows) = tables(s, batch, window);
        let q = s.input(DType::F32, [1, heads, queries, depth], Fill::Range(-2.0, 2.0));
        // As in a KV cache: the rows of a slot's heads are neighbours.
        let cache = |dtype: DType, depth: usize| {
            let pool = s.input(dtype, [1, rows, groups, depth], UNIT);
            pool.permute([1, 0, 2])
        };
        let k = cache(types[0], depth);
        let v =
            if latent { k.slice(k.shape().rank() - 1, 0, value_depth) } else { cache(types[1], value_depth) };
        let sinks = sinks.then(|| s.input(DType::F32, [1, 1, 1, heads], Fill::Range(-2.0, 4.0)));
        let options = AttentionOptions {
            soft_cap,
            spans: Some(spans),
            sinks,
            pages: Some(pages),
            ..AttentionOptions::new()
        };
        s.out(q.attention(k, v, options));
    });
}

/// Spans, a page table with pages in random order, and the rows of the pool. Entries that are not used are −1.
fn tables<'g>(s: &CaseBuilder<'g>, batch: Batch, window: Option<usize>) -> (Value<'g>, Value<'g>, usize) {
    let longest = batch.iter().map(|(_, keys)| keys.div_ceil(PAGE_SLOTS)).max().unwrap_or(0) + 1;
    let used: usize = batch.iter().map(|(_, keys)| keys.div_ceil(PAGE_SLOTS)).sum();
    let mut free: Vec<i32> = s.shuffled(used + 2).into_iter().map(|page| page as i32).collect();
    let mut spans: Vec<i32> = Vec::new();
    let mut pages: Vec<i32> = Vec::new();
    for (table, (queries, keys)) in batch.iter().enumerate() {
        for query in 0..*queries {
            let end = (keys + query + 1).saturating_sub(*queries).min(*keys);
            let first = window.map_or(0, |window| end.saturating_sub(window));
            spans.extend([first as i32, end as i32, table as i32]);
        }
        let of_sequence = keys.div_ceil(PAGE_SLOTS);
        let at = free.len().saturating_sub(of_sequence);
        pages.extend(free.split_off(at));
        pages.extend(std::iter::repeat_n(-1, longest - of_sequence));
    }
    let queries = spans.len() / 3;
    let spans = s.matrix([queries, 3], spans);
    let pages = s.matrix([batch.len(), longest], pages);
    (spans, pages, (used + 2) * PAGE_SLOTS)
}
