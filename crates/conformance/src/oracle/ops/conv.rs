//! Convolutions, pooling, upscaling and ranges.

use quadriga_graph::{Interpolation, Pooling, Window};

use crate::oracle::EvalError;
use crate::oracle::memory::{View, ViewMut};

/// All values of a tensor, by index.
struct Values {
    dims: [usize; 4],
    values: Vec<f64>,
}

impl Values {
    fn of(x: &View<'_>) -> Result<Values, EvalError> {
        Ok(Values { dims: x.dims(), values: x.all()? })
    }

    fn at(&self, [a, b, c, d]: [usize; 4]) -> f64 {
        let [_, d1, d2, d3] = self.dims;
        self.values.get(((a * d1 + b) * d2 + c) * d3 + d).copied().unwrap_or(f64::NAN)
    }

    /// The element of a window's position, `None` for padding.
    fn seen(&self, window: &Window, [n, c]: [usize; 2], at: [usize; 2], element: [usize; 2]) -> Option<f64> {
        let y = window.source(0, at[0], element[0], self.dims[2])?;
        let x = window.source(1, at[1], element[1], self.dims[3])?;
        Some(self.at([n, c, y, x]))
    }
}

/// The elements of a window, row by row.
fn elements(window: &Window) -> impl Iterator<Item = [usize; 2]> + use<> {
    let [height, width] = window.kernel;
    (0..height).flat_map(move |y| (0..width).map(move |x| [y, x]))
}

pub(super) fn im2col(window: &Window, x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    let x = Values::of(x)?;
    out.each_row(|[n, oy, ox]| {
        let row = (0..x.dims[1]).flat_map(|c| elements(window).map(move |element| (c, element)));
        Ok(row.map(|(c, element)| x.seen(window, [n, c], [oy, ox], element).unwrap_or(0.0)).collect())
    })
}

pub(super) fn depthwise(
    window: &Window,
    kernel: &View<'_>,
    x: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let (kernel, x, columns) = (Values::of(kernel)?, Values::of(x)?, out.layout.cols());
    out.each_row(|[n, c, oy]| {
        let sum = |ox| {
            let products = elements(window).map(|[ky, kx]| {
                kernel.at([c, 0, ky, kx]) * x.seen(window, [n, c], [oy, ox], [ky, kx]).unwrap_or(0.0)
            });
            products.sum::<f64>()
        };
        Ok((0..columns).map(sum).collect())
    })
}

pub(super) fn transposed(
    stride: [usize; 2],
    kernel: &View<'_>,
    x: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let (kernel, x, columns) = (Values::of(kernel)?, Values::of(x)?, out.layout.cols());
    let [_, channels, height, width] = x.dims;
    let [_, _, kh, kw] = kernel.dims;
    out.each_row(|[n, oc, oy]| {
        let mut row = vec![0.0; columns];
        for y in (0..height).filter(|y| (y * stride[0]..y * stride[0] + kh).contains(&oy)) {
            let ky = oy - y * stride[0];
            for (c, ix, kx) in
                (0..channels).flat_map(|c| (0..width).flat_map(move |ix| (0..kw).map(move |kx| (c, ix, kx))))
            {
                if let Some(sum) = row.get_mut(ix * stride[1] + kx) {
                    *sum += x.at([n, c, y, ix]) * kernel.at([c, oc, ky, kx]);
                }
            }
        }
        Ok(row)
    })
}

pub(super) fn pool(
    pooling: Pooling,
    window: &Window,
    x: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let (x, columns) = (Values::of(x)?, out.layout.cols());
    let area = window.kernel.iter().product::<usize>() as f64;
    out.each_row(|[n, c, oy]| {
        let value = |ox| {
            let seen: Vec<f64> =
                elements(window).filter_map(|element| x.seen(window, [n, c], [oy, ox], element)).collect();
            let sum: f64 = seen.iter().sum();
            match pooling {
                Pooling::Max => seen.iter().copied().fold(f64::NEG_INFINITY, f64::max),
                Pooling::Average => sum / area,
                Pooling::AverageInside => sum / seen.len() as f64,
            }
        };
        Ok((0..columns).map(value).collect())
    })
}

pub(super) fn upscale(
    interpolation: Interpolation,
    x: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let (x, to) = (Values::of(x)?, out.dims());
    let [d0, d1, height, width] = x.dims;
    let nearest = |i: usize, from: usize, to: usize| i * from / to.max(1);
    // The two neighbours of a pixel centre, and the weight of the second.
    let between = |i: usize, from: usize, to: usize| {
        let centre = ((i as f64 + 0.5) * from as f64 / to as f64 - 0.5).max(0.0);
        let first = (centre.floor() as usize).min(from.saturating_sub(1));
        (first, (first + 1).min(from.saturating_sub(1)), (centre - first as f64).clamp(0.0, 1.0))
    };
    out.each_row(|[i0, i1, oy]| {
        let (n, c) = (nearest(i0, d0, to[0]), nearest(i1, d1, to[1]));
        let value = |ox| match interpolation {
            Interpolation::Nearest => x.at([n, c, nearest(oy, height, to[2]), nearest(ox, width, to[3])]),
            Interpolation::Bilinear => {
                let ((y0, y1, dy), (x0, x1, dx)) = (between(oy, height, to[2]), between(ox, width, to[3]));
                let row = |y| (1.0 - dx) * x.at([n, c, y, x0]) + dx * x.at([n, c, y, x1]);
                (1.0 - dy) * row(y0) + dy * row(y1)
            }
        };
        Ok((0..to[3]).map(value).collect())
    })
}

pub(super) fn arange(start: f64, step: f64, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    let columns = out.layout.cols();
    out.each_row(|_| Ok((0..columns).map(|i| start + i as f64 * step).collect()))
}
