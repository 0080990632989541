//! Attention on every instruction set, compared with plain f64 arithmetic.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use half::{bf16, f16};
use quadriga_conformance::Rng;
use quadriga_cpu::internals::kernels::attention::{
    Attention, AttentionMask, AttentionMemory, AttentionShape, HeadRows, PageTable,
};
use quadriga_cpu::internals::pool::Pool;
use quadriga_cpu::isa::Isa;
use quadriga_graph::{DType, blocks};

/// Rows of one type, with their exact values: `[count, heads, width]`, with an odd gap between slots.
struct Cache {
    bytes: Vec<u8>,
    values: Vec<f64>,
    stride: usize,
    head_stride: usize,
}

fn cache(rng: &mut Rng, dtype: DType, count: usize, heads: usize, width: usize) -> Cache {
    let head_stride = dtype.row_bytes(width).unwrap();
    let stride = heads * head_stride + 7;
    let mut bytes = vec![0xff; count * stride + 1];
    let mut values = Vec::new();
    for slot in 0..count {
        for head in 0..heads {
            let row: Vec<f32> = (0..width).map(|_| rng.uniform(-1.0, 1.0) as f32).collect();
            let encoded: Vec<u8> = match dtype {
                DType::F32 => row.iter().flat_map(|v| v.to_le_bytes()).collect(),
                DType::F16 => row.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
                DType::BF16 => row.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
                _ => {
                    let mut encoded = vec![0; head_stride];
                    blocks::quantize(dtype, &row, &mut encoded).unwrap();
                    encoded
                }
            };
            let mut back = vec![0.0; width];
            blocks::dequantize(dtype, &encoded, &mut back).unwrap();
            let at = 1 + slot * stride + head * head_stride;
            bytes[at..at + head_stride].copy_from_slice(&encoded);
            values.extend(back.iter().map(|v| f64::from(*v)));
        }
    }
    Cache { bytes, values, stride, head_stride }
}

impl Cache {
    fn rows(&self) -> HeadRows {
        HeadRows { pointer: self.bytes[1..].as_ptr(), stride: self.stride, head_stride: self.head_stride }
    }
}

struct Case {
    shape: AttentionShape,
    q: Cache,
    k: Cache,
    v: Cache,
    mask: Option<(DType, Vec<f32>)>,
    spans: Option<Vec<[i32; 2]>>,
    sinks: Option<Vec<f32>>,
    pages: Option<Pages>,
}

/// Spans with rows of the table, the table, and its columns.
#[derive(Clone)]
struct Pages {
    spans: Vec<[i32; 3]>,
    pages: Vec<i32>,
    columns: usize,
}

impl Case {
    /// The slots that a query sees: their numbers, or with pages those of the rows they are in.
    fn visible(&self, t: usize) -> Vec<usize> {
        if let Some(pages) = &self.pages {
            let [begin, end, table] = pages.spans[t];
            let row = |i: usize| pages.pages[table as usize * pages.columns + i / 64] as usize * 64 + i % 64;
            return (begin as usize..end as usize).map(row).collect();
        }
        let [begin, end] = self.spans.as_ref().map_or([0, self.shape.slots as i32], |s| s[t]);
        (begin as usize..end as usize).collect()
    }

    /// The attention of some queries alone.
    fn only(&self, tokens: std::ops::Range<usize>) -> Case {
        let cut =
            |cache: &Cache| Cache { bytes: cache.bytes.clone(), values: cache.values.clone(), ..*cache };
        let mut q = cut(&self.q);
        q.bytes.drain(1..1 + tokens.start * q.stride);
        let shape = AttentionShape { tokens: tokens.len(), ..self.shape };
        let pages =
            self.pages.clone().map(|pages| Pages { spans: pages.spans[tokens.clone()].to_vec(), ..pages });
        let spans = self.spans.as_ref().map(|spans| spans[tokens.clone()].to_vec());
        let sinks = self.sinks.clone();
        Case { shape, q, k: cut(&self.k), v: cut(&self.v), mask: None, spans, sinks, pages }
    }
}

fn exact(case: &Case) -> Vec<f64> {
    let AttentionShape { heads, kv_heads, tokens, slots, key_width: dk, value_width: dv, .. } = case.shape;
    let mut out = vec![0.0; tokens * heads * dv];
    for t in 0..tokens {
        let visible = case.visible(t);
        for h in 0..heads {
            let g = h / (heads / kv_heads);
            let scores: Vec<f64> = visible
                .iter()
                .map(|c| {
                    let q = &case.q.values[(t * heads + h) * dk..][..dk];
                    let k = &case.k.values[(c * kv_heads + g) * dk..][..dk];
                    let mut s =
                        q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() * f64::from(case.shape.scale);
                    if let Some(cap) = case.shape.soft_cap {
                        s = f64::from(cap) * (s / f64::from(cap)).tanh();
                    }
                    if let Some((_, mask)) = &case.mask {
                        s += f64::from(mask[t * slots + c]);
                    }
                    s
                })
                .collect();
            let sink = case.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[h]));
            let most = scores.iter().copied().fold(sink, f64::max);
            if most == f64::NEG_INFINITY {
                continue;
            }
            let p: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
            let total = p.iter().sum::<f64>() + (sink - most).exp();
            for (c, p) in visible.iter().zip(&p) {
                for i in 0..dv {
                    out[(t * heads + h) * dv + i] += p / total * case.v.values[(c * kv_heads + g) * dv + i];
                }
            }
        }
    }
    out
}

fn computed(case: &Case, isa: Isa, pool: &Pool) -> Vec<f32> {
    let AttentionShape { heads, tokens, value_width: dv, .. } = case.shape;
    let gap = 3;
    let mut out = vec![777.0_f32; tokens * heads * (dv + gap)];
    let mut work = vec![0xa5_u8; Attention::work_bytes(isa, &case.shape, pool.threads()).unwrap()];
    let mask_bytes: Option<(DType, Vec<u8>)> = case.mask.as_ref().map(|(dtype, values)| {
        let bytes = match dtype {
            DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        };
        (*dtype, bytes)
    });
    let memory = AttentionMemory {
        queries: case.q.rows(),
        keys: case.k.rows(),
        values: case.v.rows(),
        mask: mask_bytes.as_ref().map(|(dtype, bytes)| AttentionMask {
            rows: HeadRows {
                pointer: bytes.as_ptr(),
                stride: case.shape.slots * dtype.block_bytes(),
                head_stride: 0,
            },
            dtype: *dtype,
        }),
        spans: case.spans.as_deref(),
        pages: case.pages.as_ref().map(|pages| PageTable {
            spans: &pages.spans,
            pages: &pages.pages,
            columns: pages.columns,
            rows: case.k.values.len() / (case.shape.kv_heads * case.shape.key_width),
        }),
        sinks: case.sinks.as_deref(),
        output: HeadRows {
            pointer: out.as_mut_ptr().cast(),
            stride: heads * (dv + gap) * 4,
            head_stride: (dv + gap) * 4,
        },
    };
    // SAFETY: all rows are those of the case; the work memory has the required length.
    let attention =
        unsafe { Attention::new(isa, case.shape, memory, pool.threads(), work.as_mut_ptr()) }.unwrap();
    // SAFETY: all workers of one run call it once.
    pool.run(&|worker| unsafe { attention.run(worker) }).unwrap();
    let mut result = Vec::new();
    for row in out.chunks_exact(dv + gap) {
        result.extend_from_slice(&row[..dv]);
        assert!(row[dv..].iter().all(|v| *v == 777.0), "written past the end of a row");
    }
    result
}

fn check(name: &str, case: &Case, pools: &[Pool]) {
    let want = exact(case);
    for isa in Isa::available() {
        let got = computed(case, isa, &pools[0]);
        let error: f64 = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
        let error = error / want.iter().map(|w| w * w).sum::<f64>().max(1e-30);
        let limit = if matches!(isa, Isa::Amx(_)) { 5e-5 } else { 1e-10 };
        assert!(error < limit, "{name} {isa} {:?}: error {error:e}", case.shape);
        for pool in &pools[1..] {
            let again = computed(case, isa, pool);
            let same = got.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{name} {isa}: depends on {} threads", pool.threads());
        }
    }
}

fn shape(
    heads: usize,
    kv_heads: usize,
    tokens: usize,
    slots: usize,
    width: usize,
    dtype: DType,
) -> AttentionShape {
    AttentionShape {
        heads,
        kv_heads,
        tokens,
        slots,
        key_width: width,
        value_width: width,
        scale: 3.0 / (width as f32).sqrt(),
        soft_cap: None,
        key_type: dtype,
        value_type: dtype,
    }
}

fn case(rng: &mut Rng, shape: AttentionShape) -> Case {
    Case {
        shape,
        q: cache(rng, DType::F32, shape.tokens, shape.heads, shape.key_width),
        k: cache(rng, shape.key_type, shape.slots, shape.kv_heads, shape.key_width),
        v: cache(rng, shape.value_type, shape.slots, shape.kv_heads, shape.value_width),
        mask: None,
        spans: None,
        sinks: None,
        pages: None,
    }
}

fn pools() -> Vec<Pool> {
    [1, 2, 3, 8].map(|threads| Pool::new(threads).unwrap()).into()
}

#[test]
fn every_cache_type_one_and_many_queries() {
    let mut rng = Rng::new(21);
    let pools = pools();
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q5_1, DType::Q4_0] {
        for (heads, kv_heads, tokens, slots) in
            [(1, 1, 1, 1), (9, 3, 1, 70), (4, 4, 3, 33), (6, 2, 20, 150), (3, 1, 70, 129), (8, 2, 1, 700)]
        {
            check("plain", &case(&mut rng, shape(heads, kv_heads, tokens, slots, 64, dtype)), &pools);
        }
    }
}

#[test]
fn odd_widths() {
    let mut rng = Rng::new(22);
    let pools = pools();
    for (dk, dv) in [(1, 5), (20, 33), (80, 80), (96, 128), (128, 64)] {
        for tokens in [1, 37] {
            let mut s = shape(4, 2, tokens, 90, dk, DType::F16);
            s.value_width = dv;
            check("widths", &case(&mut rng, s), &pools);
        }
    }
}

#[test]
fn causal_and_sliding_spans() {
    let mut rng = Rng::new(23);
    let pools = pools();
    for (tokens, slots, window) in
        [(40, 40, 1000), (33, 200, 1000), (50, 300, 40), (1, 600, 100), (130, 200, 64)]
    {
        let mut case = case(&mut rng, shape(6, 2, tokens, slots, 64, DType::F16));
        let past = slots - tokens;
        case.spans = Some(
            (0..tokens).map(|t| [((past + t + 1) as i32 - window).max(0), (past + t + 1) as i32]).collect(),
        );
        check("spans", &case, &pools);
    }
}

#[test]
fn a_query_without_visible_slots_yields_zeros_and_spans_are_clamped() {
    let mut rng = Rng::new(24);
    for tokens in [3, 40] {
        let mut case = case(&mut rng, shape(4, 2, tokens, 50, 64, DType::F16));
        let mut spans = vec![[0, 50]; tokens];
        spans[0] = [5, 5];
        spans[1] = [-7, 1000];
        case.spans = Some(spans);
        let pool = Pool::new(2).unwrap();
        for isa in Isa::available() {
            let got = computed(&case, isa, &pool);
            assert!(got[..4 * 64].iter().all(|v| *v == 0.0), "{isa}");
            assert!(got.iter().all(|v| v.is_finite()), "{isa}");
        }
        if let Some(spans) = &mut case.spans {
            spans[1] = [0, 50];
        }
        check("empty", &case, &pools());
    }
}

#[test]
fn masks_soft_cap_and_both_with_spans() {
    let mut rng = Rng::new(25);
    let pools = pools();
    for dtype in [DType::F32, DType::F16] {
        for (tokens, slots) in [(1, 300), (35, 140)] {
            let mut case = case(&mut rng, shape(6, 3, tokens, slots, 64, DType::F16));
            let mask = (0..tokens * slots)
                .map(|i| {
                    let slot = i % slots;
                    if (32..96).contains(&slot) || rng.chance(0.3) {
                        f32::NEG_INFINITY
                    } else {
                        f16::from_f64(rng.uniform(-1.0, 1.0)).to_f32()
                    }
                })
                .collect();
            case.mask = Some((dtype, mask));
            check("mask", &case, &pools);
            case.shape.soft_cap = Some(2.0);
            check("mask and cap", &case, &pools);
            case.spans = Some((0..tokens).map(|t| [3, (slots - t) as i32]).collect());
            check("mask, cap and spans", &case, &pools);
        }
    }
}

#[test]
fn shapes_without_a_kernel_are_errors() {
    let good = shape(4, 2, 1, 8, 64, DType::F16);
    assert!(Attention::work_bytes(Isa::Scalar, &good, 2).is_ok());
    let bad = [
        AttentionShape { kv_heads: 3, ..good },
        AttentionShape { kv_heads: 0, ..good },
        AttentionShape { key_type: DType::Q4_K, ..good },
        AttentionShape { key_type: DType::Q8_0, key_width: 40, ..good },
        AttentionShape { tokens: usize::MAX / 2, slots: usize::MAX / 2, ..good },
    ];
    for shape in bad {
        assert!(Attention::work_bytes(Isa::Scalar, &shape, 2).is_err(), "{shape:?}");
    }
}

#[test]
fn sinks_are_added_once() {
    let seed = 29;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let pools = pools();
    for (dtype, tokens, slots) in
        [(DType::F16, 1, 5), (DType::F16, 1, 1000), (DType::F32, 3, 200), (DType::Q8_0, 40, 130)]
    {
        let mut case = case(&mut rng, shape(6, 2, tokens, slots, 64, dtype));
        // Of one head the sink is next to nothing, of another all.
        let sink = |h: usize, rng: &mut Rng| [rng.uniform(-1.0, 2.0) as f32, -90.0, 95.0][h.min(4) % 3];
        case.sinks = Some((0..6).map(|h| sink(h, &mut rng)).collect());
        check("sinks", &case, &pools);
        case.spans = Some((0..tokens).map(|t| [slots as i32 / 2, (slots - t) as i32]).collect());
        check("sinks and spans", &case, &pools);
        case.shape.soft_cap = Some(2.0);
        check("sinks, spans and cap", &case, &pools);
    }
}

#[test]
fn keys_and_values_of_different_types_and_widths() {
    use DType::{BF16, F16, F32, Q4_0, Q5_1, Q8_0};
    let mut rng = Rng::new(30);
    let pools = pools();
    for (key_type, value_type) in [(Q8_0, Q4_0), (F16, Q5_1), (BF16, F16), (Q4_0, F32), (F16, F16)] {
        for (heads, kv_heads, dk, dv) in [(8, 1, 576, 512), (4, 4, 192, 128), (4, 2, 256, 256)] {
            for (tokens, slots) in [(1, 300), (3, 70), (20, 130)] {
                let shape = AttentionShape {
                    value_width: dv,
                    key_type,
                    value_type,
                    ..shape(heads, kv_heads, tokens, slots, dk, F16)
                };
                check("types and widths", &case(&mut rng, shape), &pools);
            }
        }
    }
}

#[test]
fn one_query_with_every_group_and_width() {
    let mut rng = Rng::new(26);
    let pools = pools();
    for (heads, kv_heads) in [(2, 2), (4, 2), (9, 3), (8, 2), (5, 1), (14, 2), (16, 2)] {
        for (width, dtype) in
            [(32, DType::F16), (64, DType::F32), (96, DType::Q8_0), (128, DType::Q8_0), (256, DType::F16)]
        {
            for (tokens, slots, window) in [(1, 300, 300), (1, 1100, 130), (3, 200, 90)] {
                let mut case = case(&mut rng, shape(heads, kv_heads, tokens, slots, width, dtype));
                let last = |t: usize| (slots - tokens + t + 1) as i32;
                case.spans = Some((0..tokens).map(|t| [(last(t) - window).max(0), last(t)]).collect());
                check("decode", &case, &pools);
            }
        }
    }
}

#[test]
fn queries_of_several_sequences_see_their_own_slots() {
    let mut rng = Rng::new(27);
    let mut case = case(&mut rng, shape(6, 2, 4, 900, 64, DType::F16));
    case.spans = Some(vec![[0, 200], [300, 310], [310, 310], [500, 900]]);
    check("sequences", &case, &pools());
}

/// Batches of sequences, each with a number of queries and of keys: decodes, prompts, and rows without any.
const BATCHES: &[&[(usize, usize)]] = &[
    &[(1, 1), (1, 700), (1, 64), (1, 129)],
    &[(1, 300), (20, 90), (1, 5), (3, 0), (2, 260), (40, 40), (7, 200)],
    &[(1, 130); 12],
];

/// A batch of sequences whose keys are in pages in any order, or one sequence after another.
fn sequences(rng: &mut Rng, batch: &[(usize, usize)], dtype: DType, width: usize, paged: bool) -> Case {
    let used: usize = batch.iter().map(|(_, keys)| keys.div_ceil(64)).sum();
    let columns = batch.iter().map(|(_, keys)| keys.div_ceil(64)).max().unwrap_or(0) + 1;
    let tokens = batch.iter().map(|(queries, _)| queries).sum();
    let mut case = case(rng, shape(6, 2, tokens, 64 * (used + 1), width, dtype));
    let mut free: Vec<i32> = (0..used as i32 + 1).collect();
    let (mut spans, mut pages, mut first) = (Vec::new(), Vec::new(), 0);
    for (table, (queries, keys)) in batch.iter().enumerate() {
        let end = |query: usize| (keys + query + 1).saturating_sub(*queries).min(*keys) as i32;
        spans.extend((0..*queries).map(|query| [first, first + end(query), table as i32]));
        let of_sequence = keys.div_ceil(64);
        for _ in 0..of_sequence {
            pages.push(free.swap_remove(rng.below(free.len())));
        }
        pages.extend(std::iter::repeat_n(if rng.chance(0.5) { -1 } else { i32::MAX }, columns - of_sequence));
        first += if paged { 0 } else { 64 * of_sequence as i32 };
    }
    case.sinks = rng.chance(0.3).then(|| (0..6).map(|_| rng.uniform(-1.0, 2.0) as f32).collect());
    if paged {
        case.shape.slots = 64 * columns;
        case.pages = Some(Pages { spans, pages, columns });
    } else {
        case.spans = Some(spans.into_iter().map(|[first, end, _]| [first, end]).collect());
    }
    case
}

#[test]
fn sequences_have_their_own_keys_in_pages_or_not() {
    let seed = 31;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let pools = pools();
    for dtype in [DType::F16, DType::BF16, DType::Q8_0, DType::F32, DType::Q4_0] {
        for (batch, width) in BATCHES.iter().zip([64, 96, 128]) {
            for paged in [true, false] {
                check("sequences", &sequences(&mut rng, batch, dtype, width, paged), &pools);
            }
        }
    }
}

#[test]
fn a_sequence_beside_others_has_the_same_results_as_alone() {
    let seed = 32;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let pool = Pool::new(2).unwrap();
    for (batch, dtype) in BATCHES.iter().zip([DType::F16, DType::Q8_0, DType::F16]) {
        for (paged, isa) in
            [true, false].into_iter().flat_map(|p| Isa::available().into_iter().map(move |i| (p, i)))
        {
            let case = sequences(&mut rng, batch, dtype, 64, paged);
            let together = computed(&case, isa, &pool);
            let mut first = 0;
            for (queries, _) in *batch {
                let alone = computed(&case.only(first..first + queries), isa, &pool);
                let row = 6 * 64;
                let own = &together[first * row..(first + queries) * row];
                let same = own.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{isa}, paged {paged}, {queries} queries from {first} of {batch:?}");
                first += queries;
            }
        }
    }
}

#[test]
fn pages_out_of_range_are_not_read() {
    let mut rng = Rng::new(33);
    let pool = Pool::new(2).unwrap();
    for isa in Isa::available() {
        let mut case = sequences(&mut rng, &[(1, 200), (20, 100)], DType::F16, 64, true);
        let pages = case.pages.as_mut().unwrap();
        pages.pages = vec![i32::MAX, -1, i32::MIN, 1 << 20, 77, 5];
        pages.spans[1][2] = 1 << 30;
        pages.spans[2][2] = -1;
        computed(&case, isa, &pool);
    }
}

#[test]
fn scores_that_are_far_apart() {
    let seed = 28;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let pool = Pool::new(2).unwrap();
    for (tokens, dtype) in [1, 3, 16, 40].into_iter().flat_map(|t| [DType::F16, DType::F32].map(|d| (t, d))) {
        let mut shape = shape(6, 2, tokens, 300, 64, dtype);
        // Some scores are a hundred and more; the largest comes anywhere.
        shape.scale = 6.0;
        let case = case(&mut rng, shape);
        let want = exact(&case);
        // AMX rounds such scores too coarsely to compare, unless the cache is f32.
        for isa in Isa::available().into_iter().filter(|i| dtype == DType::F32 || !matches!(i, Isa::Amx(_))) {
            let got = computed(&case, isa, &pool);
            let error: f64 = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
            let error = error / want.iter().map(|w| w * w).sum::<f64>();
            assert!(error < 1e-9, "{tokens} tokens, {dtype}, {isa}: error {error:e}");
        }
    }
}
