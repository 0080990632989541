//! Patches, convolutions, pooling, upscaling and ranges. A unit is a row of the result.

use std::ops::Range;

use quadriga_graph::{Interpolation, Pooling, Window};

use super::scratch::with_floats;
use crate::partition::Partition;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::{SEGMENT, TensorView, segments};

/// A kernel over the rows of a result, which reads any part of its inputs.
fn by_rows(kernel: impl Kernel + 'static, inputs: &[&TensorView], out: &TensorView, cost: usize) -> StepPart {
    let mut accesses: Vec<Access> = inputs.iter().map(|input| Access::reads(input)).collect();
    accesses.push(Access::writes_own(out, Partition::equal(out.rows())));
    StepPart::new(kernel, out.rows(), cost, accesses)
}

/// The positions `0..count` for which `position · stride + offset` is in `padding..padding + extent`.
fn inside(count: usize, stride: usize, offset: usize, padding: usize, extent: usize) -> Range<usize> {
    let first = padding.saturating_sub(offset).div_ceil(stride.max(1));
    let end = (padding + extent).saturating_sub(offset).div_ceil(stride.max(1)).min(count);
    first.min(end)..end
}

/// Stores a row of floats.
fn store(out: &TensorView, row: usize, values: &[f32]) {
    out.store(row, 0, values);
}

struct Im2ColKernel {
    window: Window,
    x: TensorView,
    out: TensorView,
}

pub(super) fn im2col(window: Window, x: &TensorView, out: &TensorView) -> StepPart {
    by_rows(Im2ColKernel { window, x: *x, out: *out }, &[x], out, out.elements())
}

impl Kernel for Im2ColKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let [_, channels, height, width] = self.x.dims;
        let Window { kernel: [kh, kw], stride, padding, dilation } = self.window;
        with_floats(self.out.cols(), |patch| {
            for unit in units {
                let [n, oy, ox] = self.out.place(unit);
                patch.fill(0.0);
                let elements = inside(kw, dilation[1], ox * stride[1], padding[1], width);
                let first = (ox * stride[1] + elements.start * dilation[1]).saturating_sub(padding[1]);
                // A window may see nothing but padding.
                let rows = if elements.is_empty() { 0 } else { channels * kh };
                for (row, seen) in patch.chunks_mut(kw).enumerate().take(rows) {
                    let (c, ky) = (row / kh, row % kh);
                    let Some(y) = self.window.source(0, oy, ky, height) else { continue };
                    let Some(seen) = seen.get_mut(elements.clone()) else {
                        continue;
                    };
                    if dilation[1] == 1 {
                        self.x.load_at([n, c, y], first, seen);
                        continue;
                    }
                    for (i, value) in seen.iter_mut().enumerate() {
                        self.x.load_at([n, c, y], first + i * dilation[1], std::slice::from_mut(value));
                    }
                }
                store(&self.out, unit, patch);
            }
        });
        Ok(())
    }
}

struct DepthwiseKernel {
    window: Window,
    kernel: TensorView,
    x: TensorView,
    out: TensorView,
}

pub(super) fn depthwise(window: Window, kernel: &TensorView, x: &TensorView, out: &TensorView) -> StepPart {
    let cost = out.elements().saturating_mul(kernel.dims[2] * kernel.dims[3]);
    by_rows(DepthwiseKernel { window, kernel: *kernel, x: *x, out: *out }, &[kernel, x], out, cost)
}

impl Kernel for DepthwiseKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let [_, _, height, width] = self.x.dims;
        let Window { kernel: [kh, kw], stride, padding, dilation } = self.window;
        let columns = self.out.cols();
        with_floats(columns + width + kw, |floats| {
            let (sums, rest) = floats.split_at_mut(columns);
            let (row, weights) = rest.split_at_mut(width);
            for unit in units {
                let [n, c, oy] = self.out.place(unit);
                sums.fill(0.0);
                for ky in 0..kh {
                    let Some(y) = self.window.source(0, oy, ky, height) else { continue };
                    self.x.load_at([n, c, y], 0, row);
                    self.kernel.load_at([c, 0, ky], 0, weights);
                    for (kx, weight) in weights.iter().enumerate() {
                        let at = kx * dilation[1];
                        let seen = inside(columns, stride[1], at, padding[1], width);
                        let first = (seen.start * stride[1] + at).saturating_sub(padding[1]);
                        let from = row.iter().skip(first).step_by(stride[1].max(1));
                        let to = sums.get_mut(seen).unwrap_or_default();
                        to.iter_mut().zip(from).for_each(|(sum, value)| *sum += weight * value);
                    }
                }
                store(&self.out, unit, sums);
            }
        });
        Ok(())
    }
}

struct TransposedKernel {
    stride: [usize; 2],
    kernel: TensorView,
    x: TensorView,
    out: TensorView,
}

pub(super) fn transposed(
    stride: [usize; 2],
    kernel: &TensorView,
    x: &TensorView,
    out: &TensorView,
) -> StepPart {
    let cost = x.elements().saturating_mul(kernel.elements()) / x.dims[1].max(1);
    by_rows(TransposedKernel { stride, kernel: *kernel, x: *x, out: *out }, &[kernel, x], out, cost)
}

impl Kernel for TransposedKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let [_, channels, height, width] = self.x.dims;
        let [_, _, kh, kw] = self.kernel.dims;
        let columns = self.out.cols();
        let [down, across] = self.stride.map(|stride| stride.max(1));
        with_floats(columns + width + kw, |floats| {
            let (sums, rest) = floats.split_at_mut(columns);
            let (row, weights) = rest.split_at_mut(width);
            for unit in units {
                let [n, oc, oy] = self.out.place(unit);
                sums.fill(0.0);
                let first = (oy + 1).saturating_sub(kh).div_ceil(down);
                for y in first..(oy / down + 1).min(height) {
                    for c in 0..channels {
                        self.x.load_at([n, c, y], 0, row);
                        self.kernel.load_at([c, oc, oy - y * down], 0, weights);
                        for (kx, weight) in weights.iter().enumerate() {
                            let to = sums.iter_mut().skip(kx).step_by(across);
                            to.zip(row.iter()).for_each(|(sum, value)| *sum += weight * value);
                        }
                    }
                }
                store(&self.out, unit, sums);
            }
        });
        Ok(())
    }
}

struct PoolKernel {
    pooling: Pooling,
    window: Window,
    x: TensorView,
    out: TensorView,
}

pub(super) fn pool(pooling: Pooling, window: Window, x: &TensorView, out: &TensorView) -> StepPart {
    let cost = out.elements().saturating_mul(window.kernel[0] * window.kernel[1]);
    by_rows(PoolKernel { pooling, window, x: *x, out: *out }, &[x], out, cost)
}

impl Kernel for PoolKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let [_, _, height, width] = self.x.dims;
        let Window { kernel: [kh, kw], stride, padding, .. } = self.window;
        let columns = self.out.cols();
        with_floats(columns + width, |floats| {
            let (values, row) = floats.split_at_mut(columns);
            for unit in units {
                let [n, c, oy] = self.out.place(unit);
                values.fill(if self.pooling == Pooling::Max { f32::NEG_INFINITY } else { 0.0 });
                let mut rows = 0;
                for ky in 0..kh {
                    let Some(y) = self.window.source(0, oy, ky, height) else { continue };
                    self.x.load_at([n, c, y], 0, row);
                    rows += 1;
                    for kx in 0..kw {
                        let seen = inside(columns, stride[1], kx, padding[1], width);
                        let first = (seen.start * stride[1] + kx).saturating_sub(padding[1]);
                        let from = row.iter().skip(first).step_by(stride[1].max(1));
                        let to = values.get_mut(seen).unwrap_or_default().iter_mut().zip(from);
                        match self.pooling {
                            Pooling::Max => to.for_each(|(most, value)| *most = most.max(*value)),
                            _ => to.for_each(|(sum, value)| *sum += value),
                        }
                    }
                }
                match self.pooling {
                    Pooling::Max => {}
                    Pooling::Average => values.iter_mut().for_each(|sum| *sum /= (kh * kw) as f32),
                    Pooling::AverageInside => {
                        for (ox, sum) in values.iter_mut().enumerate() {
                            let count = inside(kw, 1, ox * stride[1], padding[1], width).len() * rows;
                            *sum /= count.max(1) as f32;
                        }
                    }
                }
                store(&self.out, unit, values);
            }
        });
        Ok(())
    }
}

struct UpscaleKernel {
    interpolation: Interpolation,
    x: TensorView,
    out: TensorView,
}

pub(super) fn upscale(interpolation: Interpolation, x: &TensorView, out: &TensorView) -> StepPart {
    by_rows(UpscaleKernel { interpolation, x: *x, out: *out }, &[x], out, 4 * out.elements())
}

/// The two neighbours of pixel centre `i` of `to` in `from` pixels, and the weight of the second.
fn between(i: usize, from: usize, to: usize) -> (usize, usize, f32) {
    let centre = ((i as f64 + 0.5) * from as f64 / to.max(1) as f64 - 0.5).max(0.0);
    let last = from.saturating_sub(1);
    let first = (centre.floor() as usize).min(last);
    (first, (first + 1).min(last), (centre - first as f64).clamp(0.0, 1.0) as f32)
}

impl Kernel for UpscaleKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let ([d0, d1, height, width], [t0, t1, t2, columns]) = (self.x.dims, self.out.dims);
        let nearest = |i: usize, from: usize, to: usize| i * from / to.max(1);
        with_floats(columns + 2 * width, |floats| {
            let (values, rows) = floats.split_at_mut(columns);
            let (upper, lower) = rows.split_at_mut(width);
            let at = |row: &[f32], x: usize| row.get(x).copied().unwrap_or(0.0);
            for unit in units {
                let [i0, i1, oy] = self.out.place(unit);
                let (n, c) = (nearest(i0, d0, t0), nearest(i1, d1, t1));
                if self.interpolation == Interpolation::Nearest {
                    self.x.load_at([n, c, nearest(oy, height, t2)], 0, upper);
                    for (ox, value) in values.iter_mut().enumerate() {
                        *value = at(upper, nearest(ox, width, columns));
                    }
                } else {
                    let (y0, y1, dy) = between(oy, height, t2);
                    self.x.load_at([n, c, y0], 0, upper);
                    self.x.load_at([n, c, y1], 0, lower);
                    for (ox, value) in values.iter_mut().enumerate() {
                        let (x0, x1, dx) = between(ox, width, columns);
                        let across = |row: &[f32]| (1.0 - dx) * at(row, x0) + dx * at(row, x1);
                        *value = (1.0 - dy) * across(upper) + dy * across(lower);
                    }
                }
                store(&self.out, unit, values);
            }
        });
        Ok(())
    }
}

struct ArangeKernel {
    start: f32,
    step: f32,
    partition: Partition,
    out: TensorView,
}

pub(super) fn arange(start: f32, step: f32, out: &TensorView) -> StepPart {
    let partition = Partition::by_pieces(out);
    let kernel = ArangeKernel { start, step, partition, out: *out };
    StepPart::new(kernel, partition.units(), out.elements(), vec![Access::writes_own(out, partition)])
}

impl Kernel for ArangeKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let mut values = [0.0; SEGMENT];
        for unit in units {
            let (row, columns) = self.partition.unit(unit);
            for part in segments(columns.len()) {
                let first = columns.start + part.start;
                let Some(values) = values.get_mut(..part.len()) else { continue };
                for (i, value) in values.iter_mut().enumerate() {
                    *value = (f64::from(self.start) + (first + i) as f64 * f64::from(self.step)) as f32;
                }
                self.out.store(row, first, values);
            }
        }
        Ok(())
    }
}
