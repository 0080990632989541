//! Attention, softmax and rotary position embedding.

use quadriga::graph::{AttentionOptions, Pairing, Rope};

use crate::arguments::{Parameters, parameters};
use crate::builder::{add, qd_builder};
use crate::tensor::{QD_NO_TENSOR, qd_tensor};

/// Softmax along rows of `scale · x + mask`, with an attention sink per head; `mask` and `sinks` may be QD_NO_TENSOR.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_soft_max(
    builder: *mut qd_builder,
    x: qd_tensor,
    scale: f32,
    mask: qd_tensor,
    sinks: qd_tensor,
) -> qd_tensor {
    add(builder, "soft_max", |c| Ok(c.value(x)?.soft_max(scale, c.optional(mask)?, c.optional(sinks)?)))
}

/// −∞ where `column > past + row`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_diag_mask_inf(builder: *mut qd_builder, x: qd_tensor, past: usize) -> qd_tensor {
    add(builder, "diag_mask_inf", |c| Ok(c.value(x)?.diag_mask_inf(past)))
}

/// 0 where `column > past + row`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_diag_mask_zero(builder: *mut qd_builder, x: qd_tensor, past: usize) -> qd_tensor {
    add(builder, "diag_mask_zero", |c| Ok(c.value(x)?.diag_mask_zero(past)))
}

/// Parameters of a rotary position embedding.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qd_rope_params {
    /// The size of this structure.
    pub struct_size: usize,
    /// The number of leading elements of each row that are rotated, even.
    pub dims: usize,
    /// 0: elements `2i` and `2i + 1` are a pair (llama.cpp's "norm"); 1: `i` and `i + dims/2` ("neox").
    pub half: i32,
    /// The base of the frequencies.
    pub base: f32,
    /// The factor of positions.
    pub scale: f32,
    /// YaRN: the weight of extrapolation; 0 disables it.
    pub ext_factor: f32,
    /// The factor of the result.
    pub attn_factor: f32,
    /// YaRN: the rotation count above which a dimension extrapolates.
    pub beta_fast: f32,
    /// YaRN: the rotation count below which a dimension interpolates.
    pub beta_slow: f32,
    /// YaRN: the context length that the model was trained with.
    pub original_context: usize,
}

// SAFETY: numbers; the first field is the size.
unsafe impl Parameters for qd_rope_params {
    const NAME: &'static str = "qd_rope_params";

    fn defaults() -> qd_rope_params {
        let rope = Rope::new(128, Pairing::Adjacent, 10_000.0);
        qd_rope_params {
            struct_size: size_of::<qd_rope_params>(),
            dims: rope.dims,
            half: 0,
            base: rope.base,
            scale: rope.scale,
            ext_factor: rope.ext_factor,
            attn_factor: rope.attn_factor,
            beta_fast: rope.beta_fast,
            beta_slow: rope.beta_slow,
            original_context: rope.original_context,
        }
    }
}

/// Defaults of qd_rope: 128 elements, base 10000, no scaling.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_rope_default_params() -> qd_rope_params {
    qd_rope_params::defaults()
}

/// Rotary position embedding of `x […, t, h, d]` at `positions [t]` (I32); `factors [dims/2]` may be QD_NO_TENSOR.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_rope(
    builder: *mut qd_builder,
    x: qd_tensor,
    positions: qd_tensor,
    factors: qd_tensor,
    params: *const qd_rope_params,
) -> qd_tensor {
    add(builder, "rope", |c| {
        // SAFETY: the rules of the header for parameters.
        let params = unsafe { parameters(params) }?;
        let rope = Rope {
            dims: params.dims,
            pairing: if params.half == 0 { Pairing::Adjacent } else { Pairing::Half },
            base: params.base,
            scale: params.scale,
            ext_factor: params.ext_factor,
            attn_factor: params.attn_factor,
            beta_fast: params.beta_fast,
            beta_slow: params.beta_slow,
            original_context: params.original_context,
        };
        Ok(c.value(x)?.rope(rope, c.value(positions)?, c.optional(factors)?))
    })
}

/// What attention can be given besides queries, keys and values.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qd_attention_params {
    /// The size of this structure.
    pub struct_size: usize,
    /// The factor of the scores; 0: `1 / √d`.
    pub scale: f32,
    /// Limits scores to ± this by a tanh; 0: no limit.
    pub soft_cap: f32,
    /// `[b|1, h|1, ≥t, n]`, added to the scores, or QD_NO_TENSOR.
    pub mask: qd_tensor,
    /// `[t, 2]` (I32): for each query, the first visible key and one past the last, or QD_NO_TENSOR.
    pub spans: qd_tensor,
    /// `[h]`: a score of each head that is part of the denominator only, or QD_NO_TENSOR.
    pub sinks: qd_tensor,
    /// `[s, p]` (I32): a page table, or QD_NO_TENSOR.
    pub pages: qd_tensor,
}

// SAFETY: numbers; the first field is the size.
unsafe impl Parameters for qd_attention_params {
    const NAME: &'static str = "qd_attention_params";

    fn defaults() -> qd_attention_params {
        qd_attention_params {
            struct_size: size_of::<qd_attention_params>(),
            scale: 0.0,
            soft_cap: 0.0,
            mask: QD_NO_TENSOR,
            spans: QD_NO_TENSOR,
            sinks: QD_NO_TENSOR,
            pages: QD_NO_TENSOR,
        }
    }
}

/// Defaults of qd_attention: every query sees every key.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_attention_default_params() -> qd_attention_params {
    qd_attention_params::defaults()
}

/// Fused attention of queries `[b, h, t, d]` over keys `[b, g, n, d]` and values `[b, g, n, e]` → `[b, t, h, e]`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_attention(
    builder: *mut qd_builder,
    queries: qd_tensor,
    keys: qd_tensor,
    values: qd_tensor,
    params: *const qd_attention_params,
) -> qd_tensor {
    add(builder, "attention", |c| {
        // SAFETY: the rules of the header for parameters.
        let params = unsafe { parameters(params) }?;
        let options = AttentionOptions {
            scale: (params.scale != 0.0).then_some(params.scale),
            soft_cap: (params.soft_cap != 0.0).then_some(params.soft_cap),
            mask: c.optional(params.mask)?,
            spans: c.optional(params.spans)?,
            sinks: c.optional(params.sinks)?,
            pages: c.optional(params.pages)?,
        };
        Ok(c.value(queries)?.attention(c.value(keys)?, c.value(values)?, options))
    })
}
