//! Attention: pieces of the keys side by side, then a merge.

use quadriga_graph::{Attention, DType, NodeId};
use quadriga_runtime::BackendError;

use super::Lowering;
use crate::kernels::File;
use crate::launch::{Argument, Described, Launch};

const WARPS: u32 = 4;
/// Fewest keys in a piece: as many as the warps of a block take at once.
const LEAST_PIECE: i64 = 128;

#[repr(C)]
#[derive(Clone, Copy)]
struct Parameters {
    scale: f32,
    soft_cap: f32,
    piece: i64,
    pieces: i64,
}

// SAFETY: `struct Attention` of attention.cu has the same fields in the same order.
unsafe impl Argument for Parameters {}

impl Lowering<'_> {
    pub(super) fn attention(&mut self, node: NodeId, parameters: &Attention) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let mut given = inputs.into_iter();
        let (Some(q), Some(k), Some(v)) = (given.next(), given.next(), given.next()) else {
            return Err(self.failed(node, "three inputs are needed"));
        };
        let mut optional = |present: bool| present.then(|| given.next()).flatten().unwrap_or_default();
        let mask = optional(parameters.mask);
        let spans: Described = optional(parameters.spans);
        let [b, h, t, _] = q.dims;
        let [_, _, keys, e] = v.dims;
        // Enough blocks to fill the device twice; a piece's result costs memory, so not many more.
        let wanted =
            (2 * i64::from(self.shared.context.multiprocessors)).div_euclid((b * h * t).max(1)).max(1);
        let piece = (keys.max(1) as u64).div_ceil(wanted as u64).next_multiple_of(LEAST_PIECE as u64) as i64;
        let pieces = (keys as u64).div_ceil(piece as u64).max(1) as i64;
        let [partial] = self.scratch([(b * h * t * pieces * (e + 2)) as usize * 4]);
        let (faults, fault) = self.fault(node, "a span of visible keys is out of range");
        let grid = |n: i64| u32::try_from(n).unwrap_or(u32::MAX);
        let shared = (2 * WARPS + WARPS * grid(e)) * 4;
        let all = Parameters {
            scale: parameters.scale,
            soft_cap: parameters.soft_cap.unwrap_or(0.0),
            piece,
            pieces,
        };
        let name = half_rows(&k, &v).unwrap_or(c"k_attention");
        let function = self.function(File::Attention, name)?;
        self.push(
            Launch::new(function, [grid(pieces), grid(h), grid(b * t)], WARPS * 32)
                .shared(shared)
                .arg(q)
                .arg(k)
                .arg(v)
                .arg(mask)
                .arg(spans)
                .arg(partial)
                .arg(all)
                .arg(faults)
                .arg(fault),
        );
        let merge = self.function(File::Attention, c"k_attention_merge")?;
        self.push(Launch::new(merge, [grid(h), grid(b * t), 1], 128).arg(partial).arg(out).arg(pieces));
        Ok(())
    }
}

/// The kernel for f16 keys and values whose rows can be loaded whole, where there is one for their length.
fn half_rows(k: &Described, v: &Described) -> Option<&'static std::ffi::CStr> {
    let name = match k.dims[3] {
        64 => c"k_attention_64",
        128 => c"k_attention_128",
        256 => c"k_attention_256",
        _ => return None,
    };
    let aligned = |t: &Described| {
        t.address.is_multiple_of(16) && t.strides.iter().take(3).all(|stride| stride % 16 == 0)
    };
    let half = |t: &Described| t.dtype == DType::F16.id() && t.dims[3] == k.dims[3] && aligned(t);
    (half(k) && half(v)).then_some(name)
}
