//! Softmax, rotary embedding and attention.

use quadriga_graph::{Attention, Pairing, Rope};

use crate::oracle::Fault;
use crate::oracle::memory::{View, ViewMut};

/// The share of each score: `e^score / (Σ e^scores + e^sink)`. Where every score is `−∞`, all shares are 0.
fn shares(scores: &[f64], sink: Option<f64>) -> Vec<f64> {
    let largest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return vec![0.0; scores.len()];
    }
    let powers: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
    let total = powers.iter().sum::<f64>() + sink.map_or(0.0, |s| (s - largest).exp());
    powers.iter().map(|p| p / total).collect()
}

pub(super) fn soft_max(
    scale: f64,
    x: &View<'_>,
    mask: Option<&View<'_>>,
    sinks: Option<&View<'_>>,
    out: &mut ViewMut<'_>,
) -> Result<(), Fault> {
    let sinks = sinks.map(|s| s.all()).transpose()?;
    out.each_row(|i| {
        let mut scores: Vec<f64> = x.row(i)?.iter().map(|v| v * scale).collect();
        if let Some(mask) = mask {
            scores.iter_mut().zip(mask.repeated_row(i)?).for_each(|(s, m)| *s += m);
        }
        let sink = sinks.as_ref().and_then(|s| s.get(i[1]).copied());
        Ok(shares(&scores, sink))
    })
}

pub(super) fn rope(
    rope: &Rope,
    x: &View<'_>,
    positions: &View<'_>,
    factors: Option<&View<'_>>,
    out: &mut ViewMut<'_>,
) -> Result<(), Fault> {
    let positions = positions.int_row([0; 3])?;
    let factors = factors.map(|f| f.row([0; 3])).transpose()?;
    out.each_row(|i| {
        let mut row = x.row(i)?;
        let position = positions.get(i[1]).copied().ok_or(Fault::Memory)? as i32;
        for pair in 0..rope.dims / 2 {
            let factor = factors.as_ref().map_or(1.0, |f| f.get(pair).copied().unwrap_or(1.0));
            let (angle, magnitude) = rope.angle(position, pair, factor);
            let (first, second) = match rope.pairing {
                Pairing::Adjacent => (2 * pair, 2 * pair + 1),
                Pairing::Half => (pair, pair + rope.dims / 2),
            };
            if let Ok([a, b]) = row.get_disjoint_mut([first, second]) {
                let (sin, cos) = angle.sin_cos();
                (*a, *b) = ((*a * cos - *b * sin) * magnitude, (*a * sin + *b * cos) * magnitude);
            }
        }
        Ok(row)
    })
}

/// `out[b, t, h] = Σ share(n) · v[b, g, n]`, with the shares of `q[b, h, t] · k[b, g, n]` over the keys seen.
pub(super) fn attention(
    parameters: &Attention,
    [q, k, v]: [&View<'_>; 3],
    mask: Option<&View<'_>>,
    spans: Option<&View<'_>>,
    out: &mut ViewMut<'_>,
) -> Result<(), Fault> {
    if out.layout.is_empty() {
        return Ok(());
    }
    let [batch, heads, queries, _] = q.dims();
    let [_, groups, keys, _] = k.dims();
    let spans: Vec<(usize, usize)> =
        (0..queries).map(|t| spans.map_or(Ok((0, keys)), |s| span(s, t, keys))).collect::<Result<_, _>>()?;
    for b in 0..batch {
        for h in 0..heads {
            let group = h / (heads / groups.max(1)).max(1);
            let read = |x: &View<'_>| (0..keys).map(|n| x.row([b, group, n])).collect::<Result<Vec<_>, _>>();
            let (key_rows, value_rows) = (read(k)?, read(v)?);
            for (t, (first, end)) in spans.iter().copied().enumerate() {
                let query = q.row([b, h, t])?;
                let mask = mask.map(|m| m.repeated_row([b, h, t])).transpose()?;
                let score = |(n, key): (usize, &Vec<f64>)| {
                    let mut score =
                        f64::from(parameters.scale) * query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>();
                    if let Some(cap) = parameters.soft_cap.map(f64::from) {
                        score = cap * (score / cap).tanh();
                    }
                    score += mask.as_ref().and_then(|m| m.get(n).copied()).unwrap_or(0.0);
                    if n < first || n >= end { f64::NEG_INFINITY } else { score }
                };
                let scores: Vec<f64> = key_rows.iter().enumerate().map(score).collect();
                let mut sum = vec![0.0; out.layout.cols()];
                for ((share, value), score) in shares(&scores, None).into_iter().zip(&value_rows).zip(&scores)
                {
                    // What is out of sight may be anything.
                    if *score == f64::NEG_INFINITY {
                        continue;
                    }
                    sum.iter_mut().zip(value).for_each(|(s, v)| *s += share * v);
                }
                out.set_row([b, t, h], &sum)?;
            }
        }
    }
    Ok(())
}

/// The keys that a query sees: nothing where the span ends before it starts.
fn span(spans: &View<'_>, query: usize, count: usize) -> Result<(usize, usize), Fault> {
    let row = spans.int_row([0, 0, query])?;
    let &[first, end] = row.as_slice() else { return Err(Fault::Memory) };
    let fault = || Fault::Span { query, first, end, count };
    let bound = |n: i64| usize::try_from(n).ok().filter(|n| *n <= count).ok_or_else(fault);
    Ok((bound(first)?, bound(end)?))
}
