//! The elementwise functions.

use quadriga_graph::Unary;

/// A function of one number.
pub(super) fn unary(unary: Unary) -> fn(f32) -> f32 {
    match unary {
        Unary::Sqr => |x| x * x,
        Unary::Sqrt => f32::sqrt,
        Unary::Log => f32::ln,
        Unary::Exp => f32::exp,
        Unary::Sin => f32::sin,
        Unary::Cos => f32::cos,
        Unary::Abs => f32::abs,
        Unary::Neg => |x| -x,
        Unary::Sign => |x| {
            if x > 0.0 {
                1.0
            } else if x < 0.0 {
                -1.0
            } else {
                0.0
            }
        },
        Unary::Step => |x| if x > 0.0 { 1.0 } else { 0.0 },
        Unary::Relu => |x| x.max(0.0),
        Unary::Gelu => gelu,
        Unary::GeluErf => {
            |x| (0.5 * f64::from(x) * (1.0 + erf(f64::from(x) * std::f64::consts::FRAC_1_SQRT_2))) as f32
        }
        Unary::GeluQuick => |x| x * sigmoid(1.702 * x),
        Unary::Silu => silu,
        Unary::Sigmoid => sigmoid,
        Unary::Tanh => f32::tanh,
        Unary::Elu => |x| if x > 0.0 { x } else { x.exp_m1() },
        Unary::HardSwish => |x| x * hard_sigmoid(x),
        Unary::HardSigmoid => hard_sigmoid,
        Unary::Softplus => |x| x.max(0.0) + (-x.abs()).exp().ln_1p(),
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

fn hard_sigmoid(x: f32) -> f32 {
    ((x + 3.0) / 6.0).clamp(0.0, 1.0)
}

/// By the tanh approximation: `x/2 (1 + tanh u) = x · sigmoid(2u)`.
fn gelu(x: f32) -> f32 {
    let u = 0.797_884_6 * x * (1.0 + 0.044_715 * x * x);
    x * sigmoid(2.0 * u)
}

/// The error function, to about 1e-15: its series near 0, a continued fraction further out.
fn erf(x: f64) -> f64 {
    let a = x.abs();
    if a < 2.5 {
        // erf(x) = 2/√π e^{-x²} Σ 2ⁿ x^{2n+1} / (1·3·…·(2n+1)): all terms positive, no cancellation.
        let mut term = x;
        let mut sum = x;
        let mut n = 0.0;
        while term.abs() > 1e-17 * sum.abs() && n < 200.0 {
            n += 1.0;
            term *= 2.0 * x * x / (2.0 * n + 1.0);
            sum += term;
        }
        return std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum;
    }
    if a > 6.0 {
        return x.signum();
    }
    // erfc(a) = e^{-a²}/√π · 1/(a + (1/2)/(a + 1/(a + (3/2)/(a + …))))
    let mut tail = a;
    for k in (1..=60).rev() {
        tail = a + 0.5 * f64::from(k) / tail;
    }
    x.signum() * (1.0 - 0.5 * std::f64::consts::FRAC_2_SQRT_PI * (-a * a).exp() / tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_function_matches_known_values() {
        let known = [
            (0.0, 0.0),
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.4, 0.999_311_486_103_354_9),
            (2.6, 0.999_763_965_583_470_7),
            (3.5, 0.999_999_256_901_627_7),
        ];
        for (x, y) in known {
            assert!((erf(x) - y).abs() < 1e-14, "{x}: {} {y}", erf(x));
            assert!((erf(-x) + y).abs() < 1e-14);
        }
        assert!(erf(f64::NAN).is_nan());
    }
}
