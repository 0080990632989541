//! Convolutions, pooling, upscaling and other operations for images and signals, in random graphs.

use quadriga_graph::{DType, Interpolation, Op, Order, Pooling, Value, Window};

use super::generator::{GraphGenerator, is_dense};
use crate::cases::fill;

/// The largest input of a convolution.
const MAX_ELEMENTS: usize = 3000;

impl<'g> GraphGenerator<'g> {
    /// One more operation of this file, or none if the drawn one does not fit.
    pub(super) fn window_step(&mut self, x: Value<'g>) {
        let [_, _, rows, columns] = x.shape().dims4();
        let small = x.shape().rank() == 2 && x.shape().elements() <= MAX_ELEMENTS;
        let dense = is_dense(x) && small;
        match self.rng.below(12) {
            0 | 1 => {
                let window = self.window([1, columns]);
                let window = Window { dilation: [1; 2], ..window };
                let padding = window.padding[1].min(window.kernel[1] - 1);
                let pooling = self.pooling();
                self.add(x.pool_1d(pooling, window.padding([0, padding])), true);
            }
            2 if dense => {
                let window = Window { dilation: [1; 2], ..self.window([rows, columns]) };
                let ([ph, pw], [kh, kw]) = (window.padding, window.kernel);
                let (pooling, image) = (self.pooling(), x.reshape([1, 1, rows, columns]));
                let pooled = image.pool_2d(pooling, window.padding([ph.min(kh - 1), pw.min(kw - 1)]));
                self.flat(pooled);
            }
            3 if dense => {
                // Rows are channels.
                let window = self.window([1, columns]);
                let outputs = self.rng.range(1, 7);
                let kernel = self.kernel([outputs, rows, 1, window.kernel[1]]);
                let kernel = kernel.reshape([outputs, rows, window.kernel[1]]);
                let made = x.reshape([1, rows, columns]).conv_1d(kernel, window);
                self.flat(made.scale(1.0 / ((rows * window.kernel[1]) as f32).sqrt()));
            }
            4 if dense => {
                let window = self.window([rows, columns]);
                let [kh, kw] = window.kernel;
                let outputs = self.rng.range(1, 5);
                let kernel = self.kernel([outputs, 1, kh, kw]);
                let made = x.reshape([1, 1, rows, columns]).conv_2d(kernel, window);
                self.flat(made.scale(1.0 / ((kh * kw) as f32).sqrt()));
            }
            5 if dense => {
                let window = self.window([1, columns]);
                let [kh, kw] = window.kernel;
                let kernel = self.kernel([rows, 1, kh, kw]);
                self.flat(x.reshape([1, rows, 1, columns]).conv_2d_depthwise(kernel, window));
            }
            6 if dense && columns <= 300 => {
                let (outputs, kw, stride) =
                    (self.rng.range(1, 4), self.rng.range(1, 4), self.rng.range(1, 3));
                let kernel = self.kernel([rows, outputs, 1, kw]).reshape([rows, outputs, kw]);
                let made = x.reshape([1, rows, columns]).conv_transpose_1d(kernel, stride);
                self.flat(made.scale(1.0 / ((rows * kw) as f32).sqrt()));
            }
            7 if small => {
                let to = [self.rng.range(1, 2 * rows), self.rng.range(1, 2 * columns)];
                let linear = self.rng.chance(0.5);
                let how = if linear { Interpolation::Bilinear } else { Interpolation::Nearest };
                self.add(x.upscale(to, how), true);
            }
            8 if dense => {
                let groups: Vec<usize> = (1..=rows).filter(|groups| rows.is_multiple_of(*groups)).collect();
                let groups = *self.rng.pick(&groups).unwrap_or(&1);
                let made = x.reshape([1, rows, 1, columns]).group_norm(groups, 1e-3);
                self.flat(made);
            }
            9 => {
                let step = 2.0 / columns as f32;
                let range = self.g.apply(Op::Arange { start: -1.0, step, count: columns }, &[]);
                self.add(x + range, true);
            }
            10 if small => {
                if let Some(labels) = self.partner(x) {
                    let labels = labels.value.soft_max(1.0, None, None);
                    self.add(x.cross_entropy_loss(labels), true);
                }
            }
            11 if dense => {
                // Indices depend on given numbers only: rounding cannot change their order.
                let keys = self.input([1, rows]);
                let order = if self.rng.chance(0.5) { Order::Ascending } else { Order::Descending };
                let ids = keys.argsort(order).reshape([rows]);
                self.add(x.get_rows(ids), true);
            }
            _ => {
                let window = self.window([rows, columns]);
                if small && is_dense(x) {
                    let half = self.rng.chance(0.3);
                    self.rounding = if half { self.rounding.max(1e-3) } else { self.rounding };
                    let to = if half { DType::F16 } else { DType::F32 };
                    let patches = x.reshape([1, 1, rows, columns]).im2col(window, to).cast(DType::F32);
                    self.flat(patches);
                }
            }
        }
    }

    fn pooling(&mut self) -> Pooling {
        let all = [Pooling::Max, Pooling::Average, Pooling::AverageInside];
        *self.rng.pick(&all).unwrap_or(&Pooling::Max)
    }

    /// A window that fits into an image of this size.
    fn window(&mut self, size: [usize; 2]) -> Window {
        let mut window = Window::new([1; 2]);
        for (axis, extent) in size.into_iter().enumerate() {
            if extent == 1 {
                continue;
            }
            let (kernel, dilation) = (self.rng.range(1, extent.min(5)), self.rng.range(1, 3));
            let dilation = if (kernel - 1) * dilation < extent { dilation } else { 1 };
            let (stride, padding) = (self.rng.range(1, 3), self.rng.below(3));
            let set = |values: &mut [usize; 2], value| {
                values.iter_mut().skip(axis).take(1).for_each(|v| *v = value)
            };
            set(&mut window.kernel, kernel);
            set(&mut window.dilation, dilation);
            set(&mut window.stride, stride);
            set(&mut window.padding, padding);
        }
        window
    }

    /// A convolution's kernel: an input with random values.
    fn kernel(&mut self, shape: [usize; 4]) -> Value<'g> {
        let name = format!("x{}", self.inputs.len());
        let value = self.g.input(&name, DType::F32, shape);
        let values = fill::values(fill::UNIT, shape.iter().product(), &mut self.rng);
        self.inputs.push((name, values));
        value
    }

    /// Adds a contiguous result as a matrix.
    fn flat(&mut self, value: Value<'g>) {
        let [a, b, c, columns] = value.shape().dims4();
        self.rounding = self.rounding.max(1e-6);
        self.add(value.reshape([a * b * c, columns]), true);
    }
}
