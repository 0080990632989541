//! Attention, and what it can be given besides queries, keys and values.

use crate::ops::{Attention, Op};
use crate::value::Value;

/// Options of [`Value::attention`]. The default is full attention with scale `1 / √d`.
///
/// ```
/// use quadriga_graph::{AttentionOptions, DType, GraphBuilder};
///
/// let g = GraphBuilder::new();
/// let q = g.input("q", DType::F32, [1, 8, 5, 64]);
/// let k = g.state("k", DType::F16, [1, 2, 256, 64]);
/// let v = g.state("v", DType::F16, [1, 2, 256, 64]);
/// // For each query, the first visible key and one past the last.
/// let spans = g.input("spans", DType::I32, [5, 2]);
/// let attended = q.attention(k, v, AttentionOptions::new().spans(spans));
/// assert_eq!(attended.shape().dims(), [1, 5, 8, 64]);
/// ```
#[derive(Clone, Copy, Default)]
pub struct AttentionOptions<'g> {
    /// The factor of the scores `q · kᵀ`; `1 / √d` if `None`, where `d` is the row length of the queries.
    pub scale: Option<f32>,
    /// Replaces each score by `cap · tanh(score / cap)`, before the mask is added.
    pub soft_cap: Option<f32>,
    /// A tensor `[b|1, h|1, ≥t, n]` that is added to the scores.
    pub mask: Option<Value<'g>>,
    /// A tensor `[t, 2]` of I32: for each query, the first visible key and one past the last. With `pages` it is `[t, 3]`: the third
    /// number is the query's row of the page table.
    pub spans: Option<Value<'g>>,
    /// A tensor `[h]`: for each head, a score that is part of the softmax's denominator only.
    pub sinks: Option<Value<'g>>,
    /// A page table `[s, p]` of I32: the pages of [`PAGE_SLOTS`](crate::PAGE_SLOTS) rows in which the keys and values of each sequence are.
    pub pages: Option<Value<'g>>,
}

impl<'g> AttentionOptions<'g> {
    /// The default: every query sees every key, with scale `1 / √d`.
    pub fn new() -> AttentionOptions<'g> {
        AttentionOptions::default()
    }

    /// Sets the factor of the scores.
    pub fn scale(self, scale: f32) -> AttentionOptions<'g> {
        AttentionOptions { scale: Some(scale), ..self }
    }

    /// Limits scores to `±cap` by a tanh.
    pub fn soft_cap(self, cap: f32) -> AttentionOptions<'g> {
        AttentionOptions { soft_cap: Some(cap), ..self }
    }

    /// Adds a mask to the scores.
    pub fn mask(self, mask: Value<'g>) -> AttentionOptions<'g> {
        AttentionOptions { mask: Some(mask), ..self }
    }

    /// Limits each query to a span of keys.
    pub fn spans(self, spans: Value<'g>) -> AttentionOptions<'g> {
        AttentionOptions { spans: Some(spans), ..self }
    }

    /// Adds an attention sink to each head.
    pub fn sinks(self, sinks: Value<'g>) -> AttentionOptions<'g> {
        AttentionOptions { sinks: Some(sinks), ..self }
    }

    /// Finds keys and values through a page table; needs [spans](AttentionOptions::spans) with a row of the table.
    pub fn pages(self, pages: Value<'g>) -> AttentionOptions<'g> {
        AttentionOptions { pages: Some(pages), ..self }
    }
}

impl<'g> Value<'g> {
    /// Attention of these queries `[b, h, t, d]` over `keys` and `values`; see [`Op::Attention`].
    #[track_caller]
    pub fn attention(self, keys: Value<'g>, values: Value<'g>, options: AttentionOptions<'g>) -> Value<'g> {
        let AttentionOptions { scale, soft_cap, mask, spans, sinks, pages } = options;
        let parameters = Attention {
            scale: scale.unwrap_or_else(|| 1.0 / (self.shape().cols() as f32).sqrt()),
            soft_cap,
            mask: mask.is_some(),
            spans: spans.is_some(),
            sinks: sinks.is_some(),
            pages: pages.is_some(),
        };
        let optional = [mask, spans, sinks, pages].into_iter().flatten();
        let inputs: Vec<_> = [self, keys, values].into_iter().chain(optional).collect();
        self.op(Op::Attention(parameters), &inputs)
    }
}
