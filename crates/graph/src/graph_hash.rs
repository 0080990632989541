//! The structural hash of a graph.

use std::mem::discriminant;

use crate::fingerprint::{Fingerprint, Mixer};
use crate::graph::Graph;
use crate::ops::{Op, Rope, Window};
use crate::tensor::{NodeId, Tensor, TensorKind};

fn tensor(mix: &mut Mixer, t: &Tensor) {
    mix.word(u64::from(t.dtype.id()));
    mix.shape(&t.shape);
    mix.sizes(&t.strides.0);
    mix.size(t.storage.index());
    mix.size(t.offset);
    mix.word(match t.kind {
        TensorKind::Input => 1,
        TensorKind::Weight => 2,
        TensorKind::Constant => 3,
        TensorKind::State => 4,
        TensorKind::Computed(node) => 5 + u64::from(node.0),
    });
}

fn rope(mix: &mut Mixer, r: &Rope) {
    mix.sizes(&[r.dims, r.original_context, r.pairing as usize]);
    for x in [r.base, r.scale, r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow] {
        mix.float(x);
    }
}

fn window(mix: &mut Mixer, window: &Window) {
    for sizes in [window.kernel, window.stride, window.padding, window.dilation] {
        mix.sizes(&sizes);
    }
}

fn op(mix: &mut Mixer, op: &Op) {
    mix.text(op.name());
    match op {
        Op::Scale { scale: a, bias: b } | Op::Clamp { min: a, max: b } => {
            mix.float(*a);
            mix.float(*b);
        }
        Op::Gated { swapped, .. } => mix.word((*swapped).into()),
        Op::Norm { eps } | Op::RmsNorm { eps } | Op::L2Norm { eps } => mix.float(*eps),
        Op::GroupNorm { groups, eps } => {
            mix.size(*groups);
            mix.float(*eps);
        }
        Op::SoftMax { scale, mask, sinks } => {
            mix.float(*scale);
            mix.word(u64::from(*mask) | u64::from(*sinks) << 1);
        }
        Op::Rope { rope: r, factors } => {
            rope(mix, r);
            mix.word((*factors).into());
        }
        Op::DiagMaskInf { past } | Op::DiagMaskZero { past } => mix.size(*past),
        Op::Concat { axis4 } => mix.size(*axis4),
        Op::Pad { before, after } => {
            mix.sizes(before);
            mix.sizes(after);
        }
        Op::ArgSort { order } => mix.size(*order as usize),
        Op::Attention(a) => {
            mix.float(a.scale);
            mix.float(a.soft_cap.unwrap_or(0.0));
            mix.word(
                u64::from(a.mask)
                    | (u64::from(a.spans) << 1)
                    | (u64::from(a.sinks) << 2)
                    | (u64::from(a.pages) << 3),
            );
        }
        Op::MulMatSparse { ids } => mix.word((*ids).into()),
        Op::SelectExperts(select) => {
            mix.sizes(&[select.groups, select.groups_used, select.group_score.summed()]);
        }
        Op::ExpertWeights(weights) => {
            mix.word(u64::from(weights.softmax) | u64::from(weights.normalize) << 1);
            mix.float(weights.scale);
        }
        Op::GatedDeltaRule(rule) => {
            mix.word(u64::from(rule.tiled) | u64::from(rule.delta) << 1);
            mix.float(rule.scale);
        }
        Op::Im2Col { window: w, .. } | Op::ConvDepthwise { window: w } => window(mix, w),
        Op::Pool { pooling, window: w } => {
            mix.size(*pooling as usize);
            window(mix, w);
        }
        Op::ConvTranspose { stride } => mix.sizes(stride),
        Op::Upscale { interpolation, .. } => mix.size(*interpolation as usize),
        Op::Arange { start, step, .. } => {
            mix.float(*start);
            mix.float(*step);
        }
        Op::Collective(collective) => collective.mix(mix),
        Op::Custom(custom) => custom.mix(mix),
        // The name, or the type, shape, strides and offset of the result, distinguish these.
        Op::Binary(_)
        | Op::Add1
        | Op::Unary(_)
        | Op::MulMat
        | Op::MulMatId
        | Op::AxpySparse
        | Op::AddId
        | Op::SumExperts
        | Op::SsmConv
        | Op::OutProd
        | Op::GetRows
        | Op::SetRows
        | Op::Cast { .. }
        | Op::CopyInto
        | Op::Repeat { .. }
        | Op::Sum
        | Op::SumRows
        | Op::Mean
        | Op::ArgMax
        | Op::TopK { .. }
        | Op::Reshape { .. }
        | Op::View { .. }
        | Op::Permute { .. }
        | Op::Transpose
        | Op::CrossEntropyLoss => {}
    }
}

/// The structural hash of a graph, the same in every run and on every machine unless it has custom operations.
pub(crate) fn fingerprint(graph: &Graph) -> Fingerprint {
    let mut mix = Mixer::new();
    mix.sizes(&[graph.tensors.len(), graph.nodes.len(), graph.outputs.len()]);
    for t in &graph.tensors {
        tensor(&mut mix, t);
        if discriminant(&t.kind) != discriminant(&TensorKind::Computed(NodeId(0))) {
            mix.text(graph.labels.get(t.label as usize).map_or("", String::as_str));
        }
    }
    for node in &graph.nodes {
        op(&mut mix, &node.op);
        mix.size(node.input_count as usize);
        mix.size(node.output.index());
    }
    mix.sizes(&graph.edges.iter().map(|id| id.index()).collect::<Vec<_>>());
    // A graph without barriers keeps the hash that it always had.
    for barrier in &graph.barriers {
        mix.text("barrier");
        mix.size(barrier.index());
    }
    for (name, id) in &graph.outputs {
        mix.text(name);
        mix.size(id.index());
    }
    mix.finish()
}
