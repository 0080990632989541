//! Convolutions, pooling and upscaling as methods of a value.

use std::panic::Location;

use crate::dtype::DType;
use crate::error::GraphErrorKind;
use crate::ops::{Interpolation, Op, Pooling, Window};
use crate::shape::{MAX_DIMS, Shape};
use crate::value::Value;

/// Methods for tensors `[batch, channels, height, width]`, and `[batch, channels, width]` in one dimension.
impl<'g> Value<'g> {
    /// The patches that a window sees, as rows: `[n, c, h, w]` → `[n, oh, ow, c · kh · kw]`, in F32 or F16.
    #[track_caller]
    pub fn im2col(self, window: Window, to: DType) -> Value<'g> {
        self.op(Op::Im2Col { window, to }, &[self])
    }

    /// The patches of one dimension: `[n, c, w]` → `[n, ow, c · kw]`, in F32 or F16.
    #[track_caller]
    pub fn im2col_1d(self, window: Window, to: DType) -> Value<'g> {
        let patches = self.with_height().im2col(window, to);
        let [n, _, ow, columns] = patches.shape().dims4();
        patches.reshape([n, ow, columns])
    }

    /// Convolution: kernel `[oc, ic, kh, kw]` in F32 or F16, this tensor `[n, ic, h, w]` → `[n, oc, oh, ow]`. The window's
    /// size is the kernel's. It is computed as a matmul of patches.
    #[track_caller]
    pub fn conv_2d(self, kernel: Value<'g>, window: Window) -> Value<'g> {
        let [oc, ic, kh, kw] = kernel.shape().dims4();
        if ic != self.shape().dims4()[1] || window.kernel != [kh, kw] {
            return self.kernel_error(kernel, window, Location::caller());
        }
        let patches = self.im2col(Window { kernel: [kh, kw], ..window }, DType::F32);
        let [n, oh, ow, columns] = patches.shape().dims4();
        let patches = patches.reshape([n, 1, oh.saturating_mul(ow), columns]);
        // Patches are the matrix of the product, so that the result has one row per output channel; a view with stride 0
        // repeats the kernel for each image.
        let kernel = if kernel.dtype() == DType::F16 { kernel.cast(DType::F32) } else { kernel.contiguous() };
        let row = columns.saturating_mul(4);
        let rows = kernel.view([n, 1, oc, columns], [0, 0, row, 4], 0);
        patches.mul_mat(rows).reshape([n, oc, oh, ow])
    }

    /// Convolution in one dimension: kernel `[oc, ic, kw]`, this tensor `[n, ic, w]` → `[n, oc, ow]`.
    #[track_caller]
    pub fn conv_1d(self, kernel: Value<'g>, window: Window) -> Value<'g> {
        let result = self.with_height().conv_2d(kernel.with_height(), window);
        let [n, oc, _, ow] = result.shape().dims4();
        result.reshape([n, oc, ow])
    }

    /// Depthwise convolution, one kernel per channel: kernel `[c, 1, kh, kw]`, this tensor `[n, c, h, w]` →
    /// `[n, c, oh, ow]`.
    #[track_caller]
    pub fn conv_2d_depthwise(self, kernel: Value<'g>, window: Window) -> Value<'g> {
        self.op(Op::ConvDepthwise { window }, &[kernel, self])
    }

    /// Transposed convolution without padding: kernel `[ic, oc, kh, kw]`, this tensor `[n, ic, h, w]` →
    /// `[n, oc, (h − 1) · stride + kh, (w − 1) · stride + kw]`.
    #[track_caller]
    pub fn conv_transpose_2d(self, kernel: Value<'g>, stride: [usize; 2]) -> Value<'g> {
        self.op(Op::ConvTranspose { stride }, &[kernel, self])
    }

    /// Transposed convolution in one dimension: kernel `[ic, oc, kw]`, this tensor `[n, ic, w]` →
    /// `[n, oc, (w − 1) · stride + kw]`.
    #[track_caller]
    pub fn conv_transpose_1d(self, kernel: Value<'g>, stride: usize) -> Value<'g> {
        let result = self.with_height().conv_transpose_2d(kernel.with_height(), [1, stride]);
        let [n, oc, _, ow] = result.shape().dims4();
        result.reshape([n, oc, ow])
    }

    /// Pooling of windows: `[n, c, h, w]` → `[n, c, oh, ow]`.
    #[track_caller]
    pub fn pool_2d(self, pooling: Pooling, window: Window) -> Value<'g> {
        self.op(Op::Pool { pooling, window }, &[self])
    }

    /// Pooling along rows: `[…, w]` → `[…, ow]`.
    #[track_caller]
    pub fn pool_1d(self, pooling: Pooling, window: Window) -> Value<'g> {
        if window.kernel[0] != 1 {
            let text = format!("a window of height {} along rows", window.kernel[0]);
            return self.fail("pool_1d", GraphErrorKind::Parameter(text), &[self], Location::caller());
        }
        let window = Window { stride: [1, window.stride[1]], padding: [0, window.padding[1]], ..window };
        self.op(Op::Pool { pooling, window }, &[self])
    }

    /// Resizes the tensor to a shape by interpolation.
    #[track_caller]
    pub fn upscale(self, shape: impl Into<Shape>, interpolation: Interpolation) -> Value<'g> {
        self.op(Op::Upscale { shape: shape.into(), interpolation }, &[self])
    }

    /// The cross-entropy loss of these logits and `labels`, probabilities of the same shape: one number.
    #[track_caller]
    pub fn cross_entropy_loss(self, labels: Value<'g>) -> Value<'g> {
        self.op(Op::CrossEntropyLoss, &[self, labels])
    }

    /// `[…, c, w]` as `[…, c, 1, w]`: a view.
    #[track_caller]
    fn with_height(self) -> Value<'g> {
        let ([_, n, c, w], [_, sn, sc, sw]) = (self.shape().dims4(), self.strides());
        if self.shape().rank() > MAX_DIMS - 1 {
            let text = format!("{} has more than three dimensions", self.shape());
            return self.fail(
                "one-dimensional window",
                GraphErrorKind::Shape(text),
                &[self],
                Location::caller(),
            );
        }
        self.view([n, c, 1, w], [sn, sc, sc, sw], 0)
    }

    /// The tensor, copied if it has gaps.
    #[track_caller]
    fn contiguous(self) -> Value<'g> {
        let contiguous = self.shape().contiguous(self.dtype()).map(|(strides, _)| strides.0);
        if contiguous == Some(self.strides()) { self } else { self.cont() }
    }

    fn kernel_error(
        self,
        kernel: Value<'g>,
        window: Window,
        location: &'static Location<'static>,
    ) -> Value<'g> {
        let [kh, kw] = window.kernel;
        let text = format!(
            "a kernel {} does not match {} and a window of {kh} × {kw}",
            kernel.shape(),
            self.shape()
        );
        self.fail("conv_2d", GraphErrorKind::Shape(text), &[self, kernel], location)
    }
}
