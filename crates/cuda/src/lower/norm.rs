//! Norms of rows.

use quadriga_graph::{Binary, NodeId, Op};
use quadriga_runtime::BackendError;

use super::gemv_streamed::FusedNorm;
use super::lowering::Lowering;
use super::op_codes::NormMode;
use crate::buffer::overlap;
use crate::kernels::KernelFile;
use crate::launch::{Launch, TensorArg, is_dense_f32};

/// The longest row of `k_rms_norm`, in float4s: four for each of 1024 threads.
const MAX_RMS_QUADS: u32 = 4096;

impl Lowering<'_> {
    /// A norm of each row, fused with the multiplication by its weight if that follows, and with the streamed GEMVs
    /// that read the result.
    pub(super) fn row_norm(&mut self, at: usize, node: NodeId) -> Result<(), BackendError> {
        let (mode, eps) = match self.graph[node].op() {
            Op::RmsNorm { eps } => (NormMode::Rms, *eps),
            Op::L2Norm { eps } => (NormMode::L2, *eps),
            Op::Norm { eps } => (NormMode::MeanVariance, *eps),
            _ => return Err(self.failed(node, "it is not a norm of rows")),
        };
        let (inputs, mut out) = self.operands(node)?;
        let x = inputs.first().copied().unwrap_or_default();
        let result = self.graph[node].output();
        let mut weight = TensorArg::default();
        if let Some(next) = self.only_reader(at, result)
            && matches!(self.graph[next].op(), Op::Binary(Binary::Mul))
            && let [a, b] = *self.graph.inputs(next)
            && a == result
        {
            let product = self.graph[next].output();
            let source = self.graph.inputs(node).first().copied().unwrap_or(result);
            if mode == NormMode::Rms {
                let norm = FusedNorm { x: source, weight: b, eps };
                if self.rms_norm_matmul(node, next, norm)? || self.norm_router(node, next, norm)? {
                    return Ok(());
                }
            }
            let (_, to) = self.place(node, product)?;
            let bytes = self.tensor(source).bytes();
            // A row is read completely before it is written: exactly in place is fine, partial overlap is not.
            let exact = to == x.address && self.tensor(source).same_layout(self.tensor(product));
            if exact || !overlap(to, self.tensor(product).bytes(), x.address, bytes) {
                weight = self.tensor_arg(node, b)?;
                out = self.tensor_arg(node, product)?;
                self.fuse(next);
            }
        }
        if mode == NormMode::Rms
            && weight.address != 0
            && weight.dims == [1, 1, 1, x.dims[3]]
            && let Some(quads) = [x, out, weight].iter().all(is_dense_f32).then_some(x.dims[3] as u32 / 4)
            && quads <= MAX_RMS_QUADS
        {
            let function = self.function(KernelFile::Norm, c"k_rms_norm")?;
            let threads = quads.div_ceil(4).next_multiple_of(32).clamp(128, 1024);
            let launch = Launch::new(function, [x.rows() as u32, 1, 1], threads).dependent();
            self.push(launch.arg(x.address).arg(weight.address).arg(out.address).arg(quads as i32).arg(eps));
            return Ok(());
        }
        let function = self.function(KernelFile::Norm, c"k_row_norm")?;
        let threads = (x.dims[3] as u32).div_ceil(32).clamp(1, 32) * 32;
        let launch = Launch::new(function, [x.rows() as u32, 1, 1], threads);
        self.push(launch.arg(x).arg(weight).arg(out).arg(mode as i32).arg(eps));
        Ok(())
    }

    /// Tries to fuse an RMS norm, the multiplication `times` by its weight, and the matmuls that follow; `false` if
    /// anything else reads the result.
    fn rms_norm_matmul(
        &mut self,
        node: NodeId,
        times: NodeId,
        norm: FusedNorm,
    ) -> Result<bool, BackendError> {
        let product = self.graph[times].output();
        let at = self.split.nodes.iter().position(|n| *n == times).unwrap_or(usize::MAX);
        let vector = self.tensor_arg(node, norm.weight)?;
        let cols = self.tensor(norm.x).shape().cols() as i64;
        let fits = vector.dims == [1, 1, 1, cols] && is_dense_f32(&vector);
        let Some(first) = self.later(at).next().filter(|_| fits && !(self.split.kept)(product)) else {
            return Ok(false);
        };
        let starts =
            self.readers(product).iter().find(|at| self.split.nodes.get(**at) == Some(&first)).copied();
        let Some(starts) = starts.filter(|_| matches!(self.graph[first].op(), Op::MulMat)) else {
            return Ok(false);
        };
        if !self.gemv_streamed(starts, product, Some(norm))?
            && !self.mixed_gemm(starts, product, Some(norm))?
        {
            return Ok(false);
        }
        self.fuse(times);
        Ok(true)
    }
}
