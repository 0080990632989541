//! Operation codes that kernels take as arguments: the table of `kernels/op_codes.cuh`.

use quadriga_graph::{Binary, Gate, Unary};

/// `UNARY_SCALE`: `x · p + q`.
pub(super) const UNARY_SCALE: i32 = 100;
/// `UNARY_CLAMP`: `x` clamped to `p ..= q`.
pub(super) const UNARY_CLAMP: i32 = 101;

/// `UNARY_…`.
pub(super) const fn unary(function: Unary) -> i32 {
    match function {
        Unary::Sqr => 0,
        Unary::Sqrt => 1,
        Unary::Log => 2,
        Unary::Exp => 3,
        Unary::Sin => 4,
        Unary::Cos => 5,
        Unary::Abs => 6,
        Unary::Neg => 7,
        Unary::Sign => 8,
        Unary::Step => 9,
        Unary::Relu => 10,
        Unary::Gelu => 11,
        Unary::GeluErf => 12,
        Unary::GeluQuick => 13,
        Unary::Silu => 14,
        Unary::Sigmoid => 15,
        Unary::Tanh => 16,
        Unary::Elu => 17,
        Unary::HardSwish => 18,
        Unary::HardSigmoid => 19,
        Unary::Softplus => 20,
    }
}

/// `BINARY_…`.
pub(super) const fn binary(operation: Binary) -> i32 {
    match operation {
        Binary::Add => 0,
        Binary::Sub => 1,
        Binary::Mul => 2,
        Binary::Div => 3,
    }
}

/// `GATE_…`.
pub(super) const fn gate(gate: Gate) -> i32 {
    match gate {
        Gate::Swiglu => 0,
        Gate::Geglu => 1,
        Gate::Reglu => 2,
        Gate::SwigluOai => 3,
    }
}

/// `ROUTE_…`: what is done to a token's logits before experts are selected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub(super) enum RouteActivation {
    Plain = 0,
    Softmax = 1,
    Sigmoid = 2,
}

/// `NORM_…`: what `k_row_norm` divides a row by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub(super) enum NormMode {
    MeanVariance = 0,
    Rms = 1,
    L2 = 2,
}

/// `CONVERT_TO_…`: the element type that `k_convert_rows` writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub(super) enum ConvertTo {
    Bf16 = 0,
    F32 = 1,
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::fmt::Debug;

    use super::*;

    /// `HardSwish` as `HARD_SWISH`, after a prefix.
    fn constant(prefix: &str, name: impl Debug) -> String {
        let mut text = String::from(prefix);
        for c in format!("{name:?}").chars() {
            if c.is_ascii_uppercase() {
                text.push('_');
            }
            text.push(c.to_ascii_uppercase());
        }
        text
    }

    #[test]
    fn kernels_have_the_same_codes() {
        let header = include_str!("../../kernels/op_codes.cuh");
        let mut kernels: HashMap<String, i32> = header
            .lines()
            .filter_map(|line| line.trim().split_once(',')?.0.split_once(" = "))
            .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
            .collect();
        let mut codes = vec![("UNARY_SCALE".into(), UNARY_SCALE), ("UNARY_CLAMP".into(), UNARY_CLAMP)];
        codes.extend(Unary::ALL.map(|function| (constant("UNARY", function), unary(function))));
        let operations = [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div];
        codes.extend(operations.map(|operation| (constant("BINARY", operation), binary(operation))));
        codes.extend(Gate::ALL.map(|one| (constant("GATE", one), gate(one))));
        let norms = [NormMode::MeanVariance, NormMode::Rms, NormMode::L2];
        codes.extend(norms.map(|mode| (constant("NORM", mode), mode as i32)));
        let routes = [RouteActivation::Plain, RouteActivation::Softmax, RouteActivation::Sigmoid];
        codes.extend(routes.map(|one| (constant("ROUTE", one), one as i32)));
        let types = [ConvertTo::Bf16, ConvertTo::F32];
        codes.extend(types.map(|to| (constant("CONVERT_TO", to), to as i32)));
        for (name, code) in codes {
            assert_eq!(kernels.remove(&name), Some(code), "{name}");
        }
        assert!(kernels.is_empty(), "only kernels know {kernels:?}");
    }
}
