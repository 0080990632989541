//! Convolutions, pooling and upscaling of `[batch, channels, height, width]`, and `[batch, channels, width]` in one dimension.

use quadriga::graph::{Interpolation, Pooling, Window};

use crate::arguments::required;
use crate::builder::{add, qd_builder, shape};
use crate::dtype::{self, qd_dtype};
use crate::status::{Failure, Outcome};
use crate::tensor::qd_tensor;

/// How a window moves over the two inner dimensions: vertical first, then horizontal. In one dimension the first numbers are
/// those of a height of 1: kernel 1, stride 1, padding 0, dilation 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qd_window {
    /// Elements of the window.
    pub kernel: [usize; 2],
    /// Elements from one position to the next.
    pub stride: [usize; 2],
    /// Elements of padding on each side.
    pub padding: [usize; 2],
    /// Distance between the elements of the window.
    pub dilation: [usize; 2],
}

/// A dense window of this size with stride 1 and no padding.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_window_default_params(height: usize, width: usize) -> qd_window {
    let Window { kernel, stride, padding, dilation } = Window::new([height, width]);
    qd_window { kernel, stride, padding, dilation }
}

fn window(window: Option<&qd_window>) -> Outcome<Window> {
    let qd_window { kernel, stride, padding, dilation } = *required(window, "window")?;
    Ok(Window { kernel, stride, padding, dilation })
}

/// The largest element.
pub const QD_POOL_MAX: i32 = 0;
/// The sum divided by the size of the window.
pub const QD_POOL_AVERAGE: i32 = 1;
/// The mean of the elements that are not padding.
pub const QD_POOL_AVERAGE_INSIDE: i32 = 2;

fn pooling(pooling: i32) -> Outcome<Pooling> {
    match pooling {
        QD_POOL_MAX => Ok(Pooling::Max),
        QD_POOL_AVERAGE => Ok(Pooling::Average),
        QD_POOL_AVERAGE_INSIDE => Ok(Pooling::AverageInside),
        other => Err(Failure::argument(format!("there is no pooling QD_POOL_… {other}"))),
    }
}

/// The patches that a window sees, as rows: `[n, c, h, w]` → `[n, oh, ow, c · kh · kw]`, F32 or F16.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_im2col(
    builder: *mut qd_builder,
    x: qd_tensor,
    window: Option<&qd_window>,
    dtype: qd_dtype,
) -> qd_tensor {
    add(builder, "im2col", |c| Ok(c.value(x)?.im2col(self::window(window)?, dtype::from_id(dtype)?)))
}

/// Convolution: kernel `[oc, ic, kw]`, `x [n, ic, w]` → `[n, oc, ow]`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_conv_1d(
    builder: *mut qd_builder,
    x: qd_tensor,
    kernel: qd_tensor,
    window: Option<&qd_window>,
) -> qd_tensor {
    add(builder, "conv_1d", |c| Ok(c.value(x)?.conv_1d(c.value(kernel)?, self::window(window)?)))
}

/// Convolution: kernel `[oc, ic, kh, kw]`, `x [n, ic, h, w]` → `[n, oc, oh, ow]`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_conv_2d(
    builder: *mut qd_builder,
    x: qd_tensor,
    kernel: qd_tensor,
    window: Option<&qd_window>,
) -> qd_tensor {
    add(builder, "conv_2d", |c| Ok(c.value(x)?.conv_2d(c.value(kernel)?, self::window(window)?)))
}

/// Depthwise convolution: kernel `[c, 1, kh, kw]`, `x [n, c, h, w]` → `[n, c, oh, ow]`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_conv_2d_depthwise(
    builder: *mut qd_builder,
    x: qd_tensor,
    kernel: qd_tensor,
    window: Option<&qd_window>,
) -> qd_tensor {
    add(builder, "conv_2d_depthwise", |c| {
        Ok(c.value(x)?.conv_2d_depthwise(c.value(kernel)?, self::window(window)?))
    })
}

/// Transposed convolution: kernel `[ic, oc, kw]`, `x [n, ic, w]`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_conv_transpose_1d(
    builder: *mut qd_builder,
    x: qd_tensor,
    kernel: qd_tensor,
    stride: usize,
) -> qd_tensor {
    add(builder, "conv_transpose_1d", |c| Ok(c.value(x)?.conv_transpose_1d(c.value(kernel)?, stride)))
}

/// Transposed convolution: kernel `[ic, oc, kh, kw]`, `x [n, ic, h, w]`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_conv_transpose_2d(
    builder: *mut qd_builder,
    x: qd_tensor,
    kernel: qd_tensor,
    stride_height: usize,
    stride_width: usize,
) -> qd_tensor {
    add(builder, "conv_transpose_2d", |c| {
        Ok(c.value(x)?.conv_transpose_2d(c.value(kernel)?, [stride_height, stride_width]))
    })
}

/// Pooling along rows: `[…, w]` → `[…, ow]`; QD_POOL_….
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_pool_1d(
    builder: *mut qd_builder,
    x: qd_tensor,
    pool: i32,
    window: Option<&qd_window>,
) -> qd_tensor {
    add(builder, "pool_1d", |c| Ok(c.value(x)?.pool_1d(pooling(pool)?, self::window(window)?)))
}

/// Pooling of windows: `[n, c, h, w]` → `[n, c, oh, ow]`; QD_POOL_….
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_pool_2d(
    builder: *mut qd_builder,
    x: qd_tensor,
    pool: i32,
    window: Option<&qd_window>,
) -> qd_tensor {
    add(builder, "pool_2d", |c| Ok(c.value(x)?.pool_2d(pooling(pool)?, self::window(window)?)))
}

/// The tensor resized to a shape: nearest elements, or with `bilinear` interpolated.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_upscale(
    builder: *mut qd_builder,
    x: qd_tensor,
    dims: *const usize,
    rank: usize,
    bilinear: i32,
) -> qd_tensor {
    add(builder, "upscale", |c| {
        let how = if bilinear == 0 { Interpolation::Nearest } else { Interpolation::Bilinear };
        // SAFETY: the rules of the header for arrays.
        Ok(c.value(x)?.upscale(unsafe { shape(dims, rank) }?, how))
    })
}
