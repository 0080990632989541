//! Inference rules of softmax, rotary embedding and attention.

use super::checks::{Inferred, need, need_dense, need_f32, need_f32_or_f16, need_i32, shape_error, take};
use super::parameters::Attention;
use super::rope::Rope;
use crate::dtype::DType;
use crate::error::GraphErrorKind;
use crate::shape::{MAX_DIMS, Shape};
use crate::tensor::Tensor;

/// A mask must cover `[b, h, t, n]`: leading dimensions 1 or equal, rows at least `t`, columns `n`.
fn check_mask(input: usize, mask: &Tensor, [b, h, t, n]: [usize; MAX_DIMS]) -> Result<(), GraphErrorKind> {
    need_f32_or_f16(input, mask)?;
    need_dense(input, mask)?;
    let [mb, mh, mt, mn] = mask.dims4();
    if (mb != 1 && mb != b) || (mh != 1 && mh != h) || mt < t || mn != n {
        return shape_error(format!("a mask {} does not cover scores {:?}", mask.shape, [b, h, t, n]));
    }
    Ok(())
}

/// Sinks are one number for each head.
fn check_sinks(input: usize, sinks: &Tensor, heads: usize) -> Result<(), GraphErrorKind> {
    need_f32(input, sinks)?;
    need_dense(input, sinks)?;
    if sinks.shape.dims() != [heads] {
        return shape_error(format!("sinks {} for {heads} heads", sinks.shape));
    }
    Ok(())
}

pub(super) fn soft_max(
    scale: f32,
    mask: bool,
    sinks: bool,
    inputs: &[&Tensor],
) -> Result<Inferred, GraphErrorKind> {
    let expected = 1 + usize::from(mask) + usize::from(sinks);
    let (Some(x), true) = (inputs.first(), inputs.len() == expected) else {
        return Err(GraphErrorKind::Arity { expected: "1 plus the enabled optional", found: inputs.len() });
    };
    need_f32(0, x)?;
    if !scale.is_finite() {
        return Err(GraphErrorKind::Parameter(format!("scale {scale} is not finite")));
    }
    let mut rest = inputs.iter().enumerate().skip(1);
    if mask && let Some((i, m)) = rest.next() {
        check_mask(i, m, x.dims4())?;
    }
    if sinks && let Some((i, s)) = rest.next() {
        check_sinks(i, s, x.dims4()[1])?;
    }
    Ok(Inferred::like(x))
}

pub(super) fn rope(rope: &Rope, factors: bool, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let (x, positions) = match inputs {
        [x, positions] if !factors => (x, positions),
        [x, positions, per_dim] if factors => {
            need_f32(2, per_dim)?;
            if per_dim.shape.dims4() != [1, 1, 1, rope.dims / 2] {
                return shape_error(format!(
                    "{} frequency factors for {} rotated dimensions",
                    per_dim.shape, rope.dims
                ));
            }
            (x, positions)
        }
        _ => return Err(GraphErrorKind::Arity { expected: "2, or 3 with factors", found: inputs.len() }),
    };
    need_f32_or_f16(0, x)?;
    need_i32(1, positions)?;
    let [_, tokens, _, cols] = x.dims4();
    if positions.shape.dims4() != [1, 1, 1, tokens] {
        return shape_error(format!("{} positions for {tokens} tokens", positions.shape));
    }
    if rope.dims == 0 || !rope.dims.is_multiple_of(2) || rope.dims > cols {
        return Err(GraphErrorKind::Parameter(format!(
            "{} rotated dimensions of {cols}: an even number of at most the row length is needed",
            rope.dims
        )));
    }
    let numbers = [rope.base, rope.scale, rope.ext_factor, rope.attn_factor, rope.beta_fast, rope.beta_slow];
    if numbers.iter().any(|n| !n.is_finite()) || rope.base <= 0.0 || rope.scale <= 0.0 {
        return Err(GraphErrorKind::Parameter(format!("rotary parameters out of range: {rope:?}")));
    }
    if rope.ext_factor != 0.0
        && (rope.original_context == 0 || rope.base == 1.0 || rope.beta_fast <= 0.0 || rope.beta_slow <= 0.0)
    {
        return Err(GraphErrorKind::Parameter(
            "YaRN needs the original context length and positive betas".into(),
        ));
    }
    Ok(Inferred::like(x))
}

pub(super) fn attention(parameters: &Attention, inputs: &[&Tensor]) -> Result<Inferred, GraphErrorKind> {
    let Attention { scale, soft_cap, mask, spans, sinks, pages } = parameters;
    let expected = 3 + [mask, spans, sinks, pages].into_iter().filter(|given| **given).count();
    if inputs.len() != expected {
        return Err(GraphErrorKind::Arity { expected: "3 plus the enabled optional", found: inputs.len() });
    }
    let (given, rest) = inputs.split_at(3);
    let [q, k, v] = take(given, "3")?;
    need_f32(0, q)?;
    for (i, t) in [(1, k), (2, v)] {
        need(i, t, "F32, F16, BF16, Q8_0, Q5_1 or Q4_0", DType::is_cache_type)?;
    }
    for (i, t) in [q, k, v].into_iter().enumerate() {
        need_dense(i, t)?;
    }
    if !scale.is_finite() || soft_cap.is_some_and(|c| !c.is_finite() || c <= 0.0) {
        return Err(GraphErrorKind::Parameter(format!(
            "scale {scale} or soft cap {soft_cap:?} is out of range"
        )));
    }
    let [b, h, t, d] = q.dims4();
    let [kb, g, n, kd] = k.dims4();
    let [vb, vg, vn, e] = v.dims4();
    if kb != b || vb != b || kd != d || vg != g || vn != n || g == 0 || h % g != 0 {
        return shape_error(format!(
            "queries {}, keys {} and values {} do not match",
            q.shape, k.shape, v.shape
        ));
    }
    let mut rest = rest.iter().enumerate();
    if *mask && let Some((i, m)) = rest.next() {
        check_mask(3 + i, m, [b, h, t, n])?;
    }
    if *spans && let Some((i, s)) = rest.next() {
        need_i32(3 + i, s)?;
        need_dense(3 + i, s)?;
        let wanted = [1, 1, t, if *pages { 3 } else { 2 }];
        if s.shape.dims4() != wanted {
            return shape_error(format!("spans {} for {t} queries, {wanted:?} needed", s.shape));
        }
    }
    if *sinks && let Some((i, s)) = rest.next() {
        check_sinks(3 + i, s, h)?;
    }
    if *pages {
        if *mask || !*spans || b != 1 {
            return Err(GraphErrorKind::Parameter("a page table needs spans, one batch and no mask".into()));
        }
        if let Some((i, table)) = rest.next() {
            need_i32(3 + i, table)?;
            need_dense(3 + i, table)?;
            if table.dims4()[..2] != [1, 1] {
                return shape_error(format!(
                    "a page table {}, at most two dimensions are possible",
                    table.shape
                ));
            }
        }
    }
    Ok(Inferred::fresh(DType::F32, Shape::from([b, t, h, e])))
}
