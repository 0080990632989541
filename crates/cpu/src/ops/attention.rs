//! Attention in one pass over the keys, with a running softmax.

use std::ops::Range;

use quadriga_graph::Attention;

use super::Context;
use super::scratch::with_floats;
use crate::fuse::Item;
use crate::step::{Access, Kernel, Part, Work};
use crate::view::View;

struct AttentionKernel {
    scale: f32,
    soft_cap: Option<f32>,
    q: View,
    k: View,
    v: View,
    mask: Option<View>,
    spans: Option<View>,
    out: View,
}

pub(super) fn attention(
    parameters: &Attention,
    [q, k, v]: [&View; 3],
    rest: &[View],
    out: &View,
    _context: &Context<'_>,
    items: &mut Vec<Item>,
) -> Result<(), String> {
    let mut rest = rest.iter().copied();
    let mut take = |wanted: bool| if wanted { rest.next() } else { None };
    let (mask, spans) = (take(parameters.mask), take(parameters.spans));
    if mask.is_some() != parameters.mask || spans.is_some() != parameters.spans {
        return Err("an input is missing".into());
    }
    let [b, h, t, d] = q.dims;
    let mut accesses = vec![Access::reads(q), Access::reads(k), Access::reads(v), Access::writes(out)];
    accesses.extend(mask.iter().chain(&spans).map(Access::reads));
    let cost = (b * h * t).saturating_mul(k.dims[2]).saturating_mul(d + v.cols());
    let Attention { scale, soft_cap, .. } = *parameters;
    let kernel = AttentionKernel { scale, soft_cap, q: *q, k: *k, v: *v, mask, spans, out: *out };
    items.push(Item::Part(Part::new(kernel, b * h * t, cost, accesses)));
    Ok(())
}

/// The keys that query `t` sees, checked.
pub(super) fn span(spans: Option<&View>, t: usize, keys: usize) -> Result<Range<usize>, String> {
    let Some(spans) = spans else { return Ok(0..keys) };
    let (first, end) = (spans.index([0, 0, t], 0), spans.index([0, 0, t], 1));
    match (usize::try_from(first), usize::try_from(end)) {
        (Ok(first), Ok(end)) if end <= keys => Ok(first.min(end)..end),
        _ => Err(format!("span {first}..{end} of query {t} is outside 0..{keys}")),
    }
}

impl Kernel for AttentionKernel {
    fn run(&self, units: Range<usize>, _work: Work) -> Result<(), String> {
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
                let (mut largest, mut total) = (f32::NEG_INFINITY, 0.0_f32);
                for key in span(self.spans.as_ref(), i, keys)? {
                    let Some(k) = row.get_mut(..d) else { continue };
                    self.k.load_at([batch, group, key], 0, k);
                    let mut score = self.scale * super::product::dot(query, k);
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
                if total > 0.0 {
                    sums.iter_mut().for_each(|sum| *sum /= total);
                }
                self.out.store_at([batch, i, head], 0, sums);
            }
            Ok(())
        })
    }
}
