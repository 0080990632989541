//! A structural hash of a graph, the same in every run and on every machine.

use std::fmt;
use std::mem::discriminant;

use crate::{Graph, Op, Rope, Shape, Tensor, TensorKind};

/// 128 bits that tell graphs apart. See [`Graph::fingerprint`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct Fingerprint(pub u128);

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Two lanes of multiply-and-fold over 64-bit words, each word with both lanes' history.
struct Mixer(u64, u64);

impl Mixer {
    fn word(&mut self, word: u64) {
        let fold = |a: u64, b: u64| {
            let wide = u128::from(a) * u128::from(b);
            (wide as u64) ^ ((wide >> 64) as u64)
        };
        let (a, b) = (self.0, self.1);
        self.0 = fold(a ^ word, 0x9e37_79b9_7f4a_7c15).wrapping_add(b);
        self.1 = fold(b ^ word.rotate_left(32), 0xc2b2_ae3d_27d4_eb4f).wrapping_add(a.rotate_left(17));
    }

    fn size(&mut self, n: usize) {
        self.word(n as u64);
    }

    fn float(&mut self, x: f32) {
        self.word(u64::from(x.to_bits()));
    }

    fn sizes(&mut self, all: &[usize]) {
        for n in all {
            self.size(*n);
        }
    }

    fn text(&mut self, text: &str) {
        self.size(text.len());
        for chunk in text.as_bytes().chunks(8) {
            self.word(chunk.iter().fold(0, |word, byte| (word << 8) | u64::from(*byte)));
        }
    }

    fn shape(&mut self, shape: &Shape) {
        self.size(shape.rank());
        self.sizes(&shape.dims4());
    }

    fn finish(mut self) -> Fingerprint {
        for _ in 0..3 {
            self.word(0x5851_f42d_4c95_7f2d);
        }
        Fingerprint((u128::from(self.0) << 64) | u128::from(self.1))
    }
}

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
            mix.word(u64::from(a.mask) | u64::from(a.spans) << 1);
        }
        // Told apart by their names, or by type, shape, strides and offset of their result.
        Op::Binary(_)
        | Op::Add1
        | Op::Unary(_)
        | Op::MulMat
        | Op::MulMatId
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
        | Op::Transpose => {}
    }
}

pub(crate) fn fingerprint(graph: &Graph) -> Fingerprint {
    let mut mix = Mixer(0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344);
    mix.sizes(&[graph.tensors.len(), graph.nodes.len(), graph.outputs.len()]);
    for t in &graph.tensors {
        tensor(&mut mix, t);
        if discriminant(&t.kind) != discriminant(&TensorKind::Computed(crate::NodeId(0))) {
            mix.text(graph.labels.get(t.label as usize).map_or("", String::as_str));
        }
    }
    for node in &graph.nodes {
        op(&mut mix, &node.op);
        mix.size(node.input_count as usize);
        mix.size(node.output.index());
    }
    mix.sizes(&graph.edges.iter().map(|id| id.index()).collect::<Vec<_>>());
    for (name, id) in &graph.outputs {
        mix.text(name);
        mix.size(id.index());
    }
    mix.finish()
}
