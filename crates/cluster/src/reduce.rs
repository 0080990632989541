//! Elementwise reductions.

use crate::operation::Reduction;

/// Combines `from` into `into`, element by element.
pub(crate) fn combine(reduction: Reduction, into: &mut [f32], from: &[f32]) {
    match reduction {
        Reduction::Sum => into.iter_mut().zip(from).for_each(|(into, from)| *into += from),
        // A NaN stays: a result that is not finite must be seen.
        Reduction::Max => into.iter_mut().zip(from).for_each(|(into, from)| {
            if *from > *into || from.is_nan() {
                *into = *from;
            }
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_maxima_are_elementwise_and_keep_nan() {
        let mut sum = [1.0, 2.0];
        combine(Reduction::Sum, &mut sum, &[10.0, -2.0]);
        assert_eq!(sum, [11.0, 0.0]);
        let mut max = [1.0, f32::NAN, 3.0];
        combine(Reduction::Max, &mut max, &[2.0, 5.0, f32::NAN]);
        assert_eq!(max[0], 2.0);
        assert!(max[1].is_nan() && max[2].is_nan());
    }
}
