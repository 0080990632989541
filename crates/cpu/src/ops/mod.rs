//! The operations: for each node, the kernels that compute it.

mod arrange;
mod attention;
mod copy;
mod elementwise;
mod experts;
mod functions;
mod norm;
mod packed;
mod product;
mod reduce;
mod rope;
mod rows;
mod scratch;
mod softmax;
mod source;

use std::ops::Range;
use std::sync::Arc;

use quadriga_graph::{Op, TensorId};

use crate::fuse::Item;
use crate::isa::Isa;
use crate::kernels::matmul;
use crate::view::View;
use crate::weights::Matrices;

pub(crate) use packed::{MOST, Multiplication, Product, is_small};
pub(crate) use rope::RopeTables;
pub(crate) use source::{Recipe, Source};

/// An input of a node in memory.
pub(crate) struct Operand {
    /// The tensor; for a packed weight only type, shape and the address of the first byte mean something.
    pub(crate) view: View,
    /// The packed matrices of a packed weight.
    pub(crate) packed: Option<Packed>,
}

impl Operand {
    /// The addresses of all its bytes.
    pub(crate) fn range(&self) -> Range<usize> {
        self.packed.map_or_else(|| self.view.range(), |packed| packed.range())
    }
}

/// Packed matrices in memory.
#[derive(Clone, Copy)]
pub(crate) struct Packed {
    pointer: *const u8,
    /// How each matrix is packed.
    pub(crate) layout: matmul::PackedLayout,
    count: usize,
}

// SAFETY: an address and numbers; `Packed::bytes` says when it may be used.
unsafe impl Send for Packed {}
// SAFETY: as above.
unsafe impl Sync for Packed {}

impl Packed {
    /// Packed matrices at an address.
    ///
    /// # Safety
    /// Their bytes are readable wherever this is used, and not written.
    pub(crate) unsafe fn new(pointer: *const u8, matrices: &Matrices) -> Packed {
        Packed { pointer, layout: matrices.layout, count: matrices.count }
    }

    /// The addresses of all matrices.
    fn range(&self) -> Range<usize> {
        let start = self.pointer.addr();
        start..start + self.count * self.layout.bytes()
    }

    /// One of the matrices.
    fn matrix(&self, index: usize) -> Result<Packed, String> {
        if index >= self.count {
            return Err(format!("there is no matrix {index} of {}", self.count));
        }
        Ok(Packed { pointer: self.pointer.wrapping_add(index * self.layout.bytes()), count: 1, ..*self })
    }

    /// The bytes of the first matrix.
    ///
    /// # Safety
    /// The program holds the buffer.
    unsafe fn bytes<'a>(&self) -> &'a [u8] {
        // SAFETY: promised by the makers of this object and of the call.
        unsafe { std::slice::from_raw_parts(self.pointer, self.layout.bytes()) }
    }
}

/// What kernels are picked by.
pub(crate) struct Context<'a> {
    pub(crate) isa: Isa,
    pub(crate) input_ids: &'a [TensorId],
    /// Whether operations may be joined.
    pub(crate) fuse: bool,
    /// Of a product: how its activations come about, if they are not in memory.
    pub(crate) source: Option<Arc<Source>>,
}

/// Whether this backend knows the operation.
pub(crate) fn is_known(op: &Op) -> bool {
    use Op::*;
    matches!(
        op,
        Binary(_)
            | Add1
            | Scale { .. }
            | Clamp { .. }
            | Unary(_)
            | Gated { .. }
            | Norm { .. }
            | RmsNorm { .. }
            | GroupNorm { .. }
            | L2Norm { .. }
            | SoftMax { .. }
            | Rope { .. }
            | DiagMaskInf { .. }
            | DiagMaskZero { .. }
            | MulMat
            | MulMatId
            | OutProd
            | GetRows
            | SetRows
            | Cast { .. }
            | CopyInto
            | Concat { .. }
            | Repeat { .. }
            | Pad { .. }
            | Sum
            | SumRows
            | Mean
            | ArgMax
            | ArgSort { .. }
            | TopK { .. }
            | Attention(_)
            | Reshape { .. }
            | View { .. }
            | Permute { .. }
            | Transpose
    )
}

/// Adds the kernels of a node to `items`. The graph's rules have checked types and shapes.
pub(crate) fn prepare(
    op: &Op,
    inputs: &[Operand],
    out: &View,
    context: &Context<'_>,
    tables: &mut RopeTables,
    items: &mut Vec<Item>,
) -> Result<(), String> {
    let views: Vec<View> = inputs.iter().map(|operand| operand.view).collect();
    let may_be_packed = matches!(op, Op::MulMat | Op::MulMatId | Op::GetRows);
    if inputs.iter().enumerate().any(|(i, x)| x.packed.is_some() && !(may_be_packed && i == 0)) {
        return Err("it cannot read a packed weight".into());
    }
    let part = match (op, views.as_slice()) {
        (Op::Binary(binary), [a, b]) => elementwise::binary(*binary, a, b, out, context.isa),
        (Op::Add1, [a, b]) => elementwise::binary(quadriga_graph::Binary::Add, a, b, out, context.isa),
        (Op::Scale { scale, bias }, [x]) => elementwise::scale(*scale, *bias, x, out),
        (Op::Clamp { min, max }, [x]) => elementwise::clamp(*min, *max, x, out),
        (Op::Unary(unary), [x]) => elementwise::unary(*unary, x, out, context.isa),
        (Op::Gated { gate, swapped }, [_] | [_, _]) => {
            elementwise::gated(*gate, *swapped, &views, out, context.isa)
        }
        (Op::Norm { eps }, [x]) => norm::norm(norm::Kind::Norm, *eps, x, out, context.isa),
        (Op::RmsNorm { eps }, [x]) => norm::norm(norm::Kind::Rms, *eps, x, out, context.isa),
        (Op::L2Norm { eps }, [x]) => norm::norm(norm::Kind::L2, *eps, x, out, context.isa),
        (Op::GroupNorm { groups, eps }, [x]) => norm::group_norm(*groups, *eps, x, out),
        (Op::SoftMax { scale, mask, sinks }, [x, rest @ ..]) => {
            softmax::soft_max(*scale, *mask, *sinks, x, rest, out, context.isa)?
        }
        (Op::Rope { rope, .. }, [x, positions, factors @ ..]) => {
            rope::rope(rope, x, positions, factors.first(), out, context, tables, items)?
        }
        (Op::DiagMaskInf { past }, [x]) => arrange::diag_mask(*past, f32::NEG_INFINITY, x, out),
        (Op::DiagMaskZero { past }, [x]) => arrange::diag_mask(*past, 0.0, x, out),
        (Op::MulMat, [_, x]) => return product::mul_mat(inputs.first(), x, out, context, items),
        (Op::MulMatId, [_, x, ids]) => {
            return product::mul_mat_id(inputs.first(), x, ids, out, context, items);
        }
        (Op::OutProd, [a, b]) => product::out_prod(a, b, out, context.isa),
        (Op::GetRows, [_, ids]) => rows::get_rows(inputs.first(), ids, out)?,
        (Op::SetRows, [_, x, ids]) => rows::set_rows(x, ids, out, context.isa),
        (Op::Cast { .. }, [x]) | (Op::CopyInto, [_, x]) => copy::copy(x, out),
        (Op::Concat { axis4 }, all) => arrange::concat(*axis4, all, out),
        (Op::Repeat { .. }, [x]) => arrange::repeat(x, out),
        (Op::Pad { before, .. }, [x]) => arrange::pad(*before, x, out),
        (Op::Sum, [x]) => reduce::sum(x, out),
        (Op::SumRows, [x]) => reduce::sum_rows(false, x, out),
        (Op::Mean, [x]) => reduce::sum_rows(true, x, out),
        (Op::ArgMax, [x]) => reduce::argmax(x, out),
        (Op::ArgSort { order }, [x]) => reduce::argsort(*order, x, out),
        (Op::TopK { k }, [x]) => reduce::top_k(*k, x, out),
        (Op::Attention(parameters), [q, k, v, rest @ ..]) => {
            return attention::attention(parameters, [q, k, v], rest, out, context, items);
        }
        _ => return Err(format!("there is no kernel for {} of {} inputs", op.name(), views.len())),
    };
    items.push(Item::Part(part));
    Ok(())
}
