//! The windows of convolutions and pooling.

use crate::error::GraphErrorKind;

/// How a window moves over the two inner dimensions of a tensor: vertical first, then horizontal.
///
/// Positions before the first and past the last element are padding. A window of one dimension has a height of 1.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Window {
    /// Elements of the window.
    pub kernel: [usize; 2],
    /// Elements from one position of the window to the next.
    pub stride: [usize; 2],
    /// Elements of padding on each side.
    pub padding: [usize; 2],
    /// Distance between the elements of the window.
    pub dilation: [usize; 2],
}

impl Window {
    /// A window over two dimensions: stride 1, no padding, dense.
    pub fn new(kernel: [usize; 2]) -> Window {
        Window { kernel, stride: [1; 2], padding: [0; 2], dilation: [1; 2] }
    }

    /// A window over one dimension: stride 1, no padding, dense.
    pub fn one_dimensional(kernel: usize) -> Window {
        Window::new([1, kernel])
    }

    /// Sets the stride; of a window over one dimension, `[1, stride]`.
    #[must_use]
    pub fn stride(mut self, stride: [usize; 2]) -> Window {
        self.stride = stride;
        self
    }

    /// Sets the padding; of a window over one dimension, `[0, padding]`.
    #[must_use]
    pub fn padding(mut self, padding: [usize; 2]) -> Window {
        self.padding = padding;
        self
    }

    /// Sets the dilation; of a window over one dimension, `[1, dilation]`.
    #[must_use]
    pub fn dilation(mut self, dilation: [usize; 2]) -> Window {
        self.dilation = dilation;
        self
    }

    /// The number of positions over an input of this size.
    pub(crate) fn positions(&self, [height, width]: [usize; 2]) -> Result<[usize; 2], GraphErrorKind> {
        let one = |axis: usize, extent: usize| {
            let at = |values: [usize; 2]| values.get(axis).copied().unwrap_or(0);
            let (kernel, stride) = (at(self.kernel), at(self.stride));
            let (padding, dilation) = (at(self.padding), at(self.dilation));
            if kernel == 0 || stride == 0 || dilation == 0 {
                return Err(GraphErrorKind::Parameter(format!(
                    "kernel {kernel}, stride {stride} and dilation {dilation} must be at least 1"
                )));
            }
            let reach = (kernel - 1).checked_mul(dilation).and_then(|reach| reach.checked_add(1));
            let padded = padding.checked_mul(2).and_then(|both| both.checked_add(extent));
            let (reach, padded) = reach.zip(padded).ok_or(GraphErrorKind::Overflow)?;
            // Kernels compute positions with signed 32-bit numbers.
            if reach > i32::MAX as usize || padded > i32::MAX as usize || stride > i32::MAX as usize {
                return Err(GraphErrorKind::Parameter(format!(
                    "a window of {reach} with stride {stride} over {padded} elements is too large"
                )));
            }
            match padded.checked_sub(reach) {
                Some(rest) => Ok(rest / stride + 1),
                None => Err(GraphErrorKind::Shape(format!(
                    "a window of {reach} elements does not fit into {extent} with padding {padding}"
                ))),
            }
        };
        Ok([one(0, height)?, one(1, width)?])
    }

    /// The input position of an element of the window, or `None` if that is padding. `axis` 0 is vertical.
    pub fn source(&self, axis: usize, position: usize, element: usize, extent: usize) -> Option<usize> {
        let at = |values: [usize; 2]| values.get(axis).copied().unwrap_or(0);
        let padded = position * at(self.stride) + element * at(self.dilation);
        padded.checked_sub(at(self.padding)).filter(|at| *at < extent)
    }
}
