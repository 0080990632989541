//! Patches, convolutions, pooling, upscaling, ranges and the cross-entropy loss: one launch each.

use quadriga_graph::{Interpolation, NodeId, Op, Pooling, Window};
use quadriga_runtime::BackendError;

use super::lowering::Lowering;
use crate::kernels::KernelFile;
use crate::launch::{Argument, Launch};

/// `struct Window` of conv.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct WindowArg {
    kernel: [i32; 2],
    stride: [i32; 2],
    padding: [i32; 2],
    dilation: [i32; 2],
}

// SAFETY: `struct Window` of conv.cu has the same fields in the same order.
unsafe impl Argument for WindowArg {}

/// A number of elements. The graph's rules limit all but strides and dilations that are never used.
fn narrow(value: usize) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

impl WindowArg {
    fn new(window: &Window) -> WindowArg {
        WindowArg {
            kernel: window.kernel.map(narrow),
            stride: window.stride.map(narrow),
            padding: window.padding.map(narrow),
            dilation: window.dilation.map(narrow),
        }
    }
}

/// Whether an operation is lowered here.
pub(super) fn is_here(op: &Op) -> bool {
    matches!(
        op,
        Op::Im2Col { .. }
            | Op::ConvDepthwise { .. }
            | Op::ConvTranspose { .. }
            | Op::Pool { .. }
            | Op::Upscale { .. }
            | Op::Arange { .. }
            | Op::CrossEntropyLoss
    )
}

impl Lowering<'_> {
    /// The launch of one of these operations.
    pub(super) fn window_op(&mut self, node: NodeId) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let first = inputs.first().copied().unwrap_or_default();
        let second = inputs.get(1).copied().unwrap_or_default();
        let over = |lowering: &Self, name| {
            Ok::<_, BackendError>(Launch::over(lowering.function(KernelFile::Conv, name)?, out.elements()))
        };
        let launch = match self.graph[node].op() {
            Op::Im2Col { window, .. } => {
                over(self, c"k_im2col")?.arg(first).arg(out).arg(WindowArg::new(window))
            }
            Op::ConvDepthwise { window } => {
                over(self, c"k_conv_depthwise")?.arg(first).arg(second).arg(out).arg(WindowArg::new(window))
            }
            Op::ConvTranspose { stride: [down, across] } => {
                let launch = over(self, c"k_conv_transpose")?.arg(first).arg(second).arg(out);
                launch.arg(narrow(*down)).arg(narrow(*across))
            }
            Op::Pool { pooling, window } => {
                let mode = match pooling {
                    Pooling::Max => 0,
                    Pooling::Average => 1,
                    Pooling::AverageInside => 2i32,
                };
                over(self, c"k_pool")?.arg(first).arg(out).arg(WindowArg::new(window)).arg(mode)
            }
            Op::Upscale { interpolation, .. } => {
                let bilinear = i32::from(*interpolation == Interpolation::Bilinear);
                over(self, c"k_upscale")?.arg(first).arg(out).arg(bilinear)
            }
            Op::Arange { start, step, .. } => over(self, c"k_arange")?.arg(out).arg(*start).arg(*step),
            Op::CrossEntropyLoss => {
                let function = self.function(KernelFile::Conv, c"k_cross_entropy")?;
                Launch::new(function, [1, 1, 1], 1024).arg(first).arg(second).arg(out)
            }
            _ => return Err(self.failed(node, "there is no kernel for it")),
        };
        self.push(launch);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_passed_as_32_bit_numbers() {
        let window = Window::new([2, 3]).stride([4, 5]).padding([6, 7]).dilation([8, usize::MAX]);
        let arg = WindowArg::new(&window);
        assert_eq!((arg.kernel, arg.stride), ([2, 3], [4, 5]));
        assert_eq!((arg.padding, arg.dilation), ([6, 7], [8, i32::MAX]), "a stride that is never used");
    }

    #[test]
    fn windows_and_ranges_are_lowered_here() {
        assert!(is_here(&Op::CrossEntropyLoss) && is_here(&Op::Arange { start: 0.0, step: 1.0, count: 3 }));
        assert!(is_here(&Op::Pool { pooling: Pooling::Max, window: Window::new([1, 2]) }));
        assert!(!is_here(&Op::MulMat) && !is_here(&Op::Sum));
    }
}
