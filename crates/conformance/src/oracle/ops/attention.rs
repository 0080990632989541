//! Softmax, rotary embedding and attention.

use quadriga_graph::{Attention, PAGE_SLOTS, Pairing, Rope};

use crate::oracle::EvalError;
use crate::oracle::memory::{View, ViewMut};

/// Softmax with an optional sink: `e^score / (Σ e^scores + e^sink)`. If every score is `−∞`, all weights are 0; if one is NaN, all are.
fn softmax(scores: &[f64], sink: Option<f64>) -> Vec<f64> {
    let largest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY && !scores.iter().any(|score| score.is_nan()) {
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
) -> Result<(), EvalError> {
    let sinks = sinks.map(|s| s.all()).transpose()?;
    out.each_row(|i| {
        let mut scores: Vec<f64> = x.row(i)?.iter().map(|v| v * scale).collect();
        if let Some(mask) = mask {
            scores.iter_mut().zip(mask.repeated_row(i)?).for_each(|(s, m)| *s += m);
        }
        let sink = sinks.as_ref().and_then(|s| s.get(i[1]).copied());
        Ok(softmax(&scores, sink))
    })
}

pub(super) fn rope(
    rope: &Rope,
    x: &View<'_>,
    positions: &View<'_>,
    factors: Option<&View<'_>>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let positions = positions.int_row([0; 3])?;
    let factors = factors.map(|f| f.row([0; 3])).transpose()?;
    out.each_row(|i| {
        let mut row = x.row(i)?;
        let position = positions.get(i[1]).copied().ok_or(EvalError::Memory)? as i32;
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

/// `out[b, t, h] = Σ weight(n) · v[b, g, n]`, where the weights are the softmax of `q[b, h, t] · k[b, g, n]` over the
/// visible keys.
pub(super) fn attention(
    parameters: &Attention,
    [q, k, v]: [&View<'_>; 3],
    [mask, spans, sinks, pages]: [Option<&View<'_>>; 4],
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    if let (Some(spans), Some(pages)) = (spans, pages) {
        return paged(parameters, [q, k, v], [spans, pages], sinks, out);
    }
    let sinks = sinks.map(|s| s.all()).transpose()?;
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
                    let mut score = score(parameters, &query, key);
                    score += mask.as_ref().and_then(|m| m.get(n).copied()).unwrap_or(0.0);
                    if n < first || n >= end { f64::NEG_INFINITY } else { score }
                };
                let scores: Vec<f64> = key_rows.iter().enumerate().map(score).collect();
                let mut sum = vec![0.0; out.layout.cols()];
                let sink = sinks.as_ref().and_then(|s| s.get(h).copied());
                let weights = softmax(&scores, sink);
                for ((weight, value), score) in weights.into_iter().zip(&value_rows).zip(&scores) {
                    // Values of keys that are not visible may be NaN or infinite.
                    if *score == f64::NEG_INFINITY {
                        continue;
                    }
                    sum.iter_mut().zip(value).for_each(|(s, v)| *s += weight * v);
                }
                out.set_row([b, t, h], &sum)?;
            }
        }
    }
    Ok(())
}

/// The score of a key, before a mask.
fn score(parameters: &Attention, query: &[f64], key: &[f64]) -> f64 {
    let score = f64::from(parameters.scale) * query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>();
    parameters.soft_cap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
}

/// Attention through a page table: each query gathers the rows that it sees.
fn paged(
    parameters: &Attention,
    [q, k, v]: [&View<'_>; 3],
    [spans, pages]: [&View<'_>; 2],
    sinks: Option<&View<'_>>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let sinks = sinks.map(|s| s.all()).transpose()?;
    let [_, heads, queries, _] = q.dims();
    let [_, groups, rows, _] = k.dims();
    let [_, _, tables, length] = pages.dims();
    for t in 0..queries {
        let span = spans.int_row([0, 0, t])?;
        let &[first, end, table] = span.as_slice() else { return Err(EvalError::Memory) };
        let count = length * PAGE_SLOTS;
        let outside = || EvalError::Span { query: t, first, end, count };
        let bound = |n: i64| usize::try_from(n).ok().filter(|n| *n <= count).ok_or_else(outside);
        let visible = bound(first)?..bound(end)?;
        let row = usize::try_from(table).ok().filter(|row| *row < tables);
        let table = pages.int_row([0, 0, row.ok_or(EvalError::Table { query: t, table, tables })?])?;
        let mut places = Vec::new();
        for position in visible {
            let page = table.get(position / PAGE_SLOTS).copied().ok_or(EvalError::Memory)?;
            let row = usize::try_from(page).ok().and_then(|page| page.checked_mul(PAGE_SLOTS));
            let row =
                row.filter(|row| row + PAGE_SLOTS <= rows).ok_or(EvalError::Page { query: t, page, rows })?;
            places.push(row + position % PAGE_SLOTS);
        }
        for h in 0..heads {
            let group = h / (heads / groups.max(1)).max(1);
            let query = q.row([0, h, t])?;
            let of = |n: &usize| Ok::<f64, EvalError>(score(parameters, &query, &k.row([0, group, *n])?));
            let scores = places.iter().map(of).collect::<Result<Vec<f64>, _>>()?;
            let weights = softmax(&scores, sinks.as_ref().and_then(|s| s.get(h).copied()));
            let mut sum = vec![0.0; out.layout.cols()];
            for ((weight, place), score) in weights.into_iter().zip(&places).zip(&scores) {
                if *score != f64::NEG_INFINITY {
                    sum.iter_mut().zip(v.row([0, group, *place])?).for_each(|(s, v)| *s += weight * v);
                }
            }
            out.set_row([0, t, h], &sum)?;
        }
    }
    Ok(())
}

/// The visible keys of a query: none if the span ends before it starts.
fn span(spans: &View<'_>, query: usize, count: usize) -> Result<(usize, usize), EvalError> {
    let row = spans.int_row([0, 0, query])?;
    let &[first, end] = row.as_slice() else { return Err(EvalError::Memory) };
    let error = || EvalError::Span { query, first, end, count };
    let bound = |n: i64| usize::try_from(n).ok().filter(|n| *n <= count).ok_or_else(error);
    Ok((bound(first)?, bound(end)?))
}
