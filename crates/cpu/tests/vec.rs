//! SIMD row functions on every instruction set, compared with f64.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use half::{bf16, f16};
use quadriga_conformance::Rng;
use quadriga_cpu::internals::kernels::vec::{self, Map, Zip};
use quadriga_cpu::isa::Isa;
use quadriga_graph::{DType, blocks};

fn row(rng: &mut Rng, count: usize, reach: f64) -> Vec<f32> {
    (0..count).map(|_| rng.uniform(-reach, reach) as f32).collect()
}

const LENGTHS: [usize; 9] = [0, 1, 3, 7, 8, 16, 31, 64, 577];

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// Numbers of both signs, evenly spaced in exponent up to `reach`: a few thousand for each power of two, and both ends.
fn sweep(reach: f32) -> Vec<f32> {
    let (first, last) = (1e-30_f32.to_bits(), reach.to_bits());
    let sizes = (first..last).step_by(4093).chain([last]);
    let mut all: Vec<f32> = sizes.flat_map(|bits| [f32::from_bits(bits), -f32::from_bits(bits)]).collect();
    all.push(0.0);
    all
}

#[test]
fn functions_keep_their_error_bounds() {
    let p = |n: i32| 2.0_f64.powi(n);
    // Function, exact function, largest |x|, relative bound, absolute bound in units of max(1, |x|).
    type Case = (Map, fn(f64) -> f64, f32, f64, f64);
    let cases: [Case; 8] = [
        (Map::Exp, f64::exp, 87.3, p(-22), 0.0),
        (Map::Sigmoid, sigmoid, 87.0, p(-21), 0.0),
        (Map::Silu, |x| x * sigmoid(x), 87.0, p(-20), 0.0),
        (Map::Tanh, f64::tanh, 100.0, p(-20), 0.0),
        (Map::Gelu, gelu, 100.0, 0.0, p(-20)),
        (Map::GeluQuick, |x| x * sigmoid(1.702 * x), 100.0, 0.0, p(-20)),
        (Map::Relu, |x| x.max(0.0), 1e30, 0.0, 0.0),
        (Map::Square, |x| x * x, 1e18, p(-24), 0.0),
    ];
    for isa in Isa::available() {
        for (function, exact, reach, relative, absolute) in cases {
            let x = sweep(reach);
            let mut y = vec![0.0; x.len()];
            vec::map(isa, function, &x, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let want = exact(f64::from(*x));
                // Results below the smallest normal number may have any error of that size.
                let bound = relative * want.abs() + absolute * f64::from(x.abs()).max(1.0) + 1.2e-38;
                let error = (f64::from(*y) - want).abs();
                assert!(error <= bound, "{isa} {function:?}({x}) = {y}, not {want}: error {error:e}");
            }
            let mut z = x.clone();
            vec::map_in_place(isa, function, &mut z);
            assert_eq!(y, z);
        }
    }
}

#[test]
fn gated_functions_keep_the_bounds_of_their_factors() {
    let mut rng = Rng::new(4);
    type Case = (Zip, fn(f64) -> f64, f64, f64);
    let p = |n: i32| 2.0_f64.powi(n);
    let cases: [Case; 3] = [
        (Zip::Swiglu, |x| x * sigmoid(x), p(-19), 0.0),
        (Zip::Geglu, gelu, 0.0, p(-19)),
        (Zip::Reglu, |x| x.max(0.0), p(-24), 0.0),
    ];
    for isa in Isa::available() {
        for (function, exact, relative, absolute) in cases {
            let a = sweep(80.0);
            let b = row(&mut rng, a.len(), 3.0);
            let mut y = vec![0.0; a.len()];
            vec::zip(isa, function, &a, &b, &mut y);
            for ((a, b), y) in a.iter().zip(&b).zip(&y) {
                let (a, b) = (f64::from(*a), f64::from(*b));
                let want = exact(a) * b;
                let bound = relative * want.abs() + absolute * a.abs().max(1.0) * b.abs() + 1.2e-38;
                let error = (f64::from(*y) - want).abs();
                assert!(error <= bound, "{isa} {function:?}({a}, {b}) = {y}, not {want}: error {error:e}");
            }
        }
    }
}

/// The bounds that `kernels::vec` states for whole rows, over lengths and sizes of numbers.
#[test]
fn rows_keep_their_error_bounds() {
    let mut rng = Rng::new(7);
    let unit = 2.0_f64.powi(-24);
    for isa in Isa::available() {
        let lanes = match isa {
            Isa::Scalar => 1.0,
            Isa::Avx2(_) | Isa::AvxVnni(_) => 8.0,
            Isa::Avx512(_) | Isa::Amx(_) => 16.0,
        };
        for n in [1, 2, 15, 64, 577, 4096, 20_001] {
            for reach in [1e-3, 1.0, 30.0, 1e4] {
                let (x, w) = (row(&mut rng, n, reach), row(&mut rng, n, 2.0));
                let wide: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
                let mut out = vec![0.0; n];
                vec::rms_norm(isa, &x, Some(&w), 1e-6, &mut out);
                let mean = wide.iter().map(|v| v * v).sum::<f64>() / n as f64;
                let factor = 1.0 / (mean + f64::from(1e-6_f32)).sqrt();
                let sums = n as f64 / lanes;
                for ((x, w), y) in wide.iter().zip(&w).zip(&out) {
                    let want = x * factor * f64::from(*w);
                    let error = (f64::from(*y) - want).abs();
                    assert!(
                        error <= (8.0 + sums / 2.0) * unit * want.abs(),
                        "{isa} norm of {n}: {y}, not {want}"
                    );
                }
                // Differences of large numbers are rounded before the exponential is taken.
                let spread = row(&mut rng, n, reach.min(30.0));
                let most = spread.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let exact: Vec<f64> =
                    spread.iter().map(|v| (f64::from(*v) - f64::from(most)).exp()).collect();
                let total: f64 = exact.iter().sum();
                let mut soft = spread.clone();
                vec::softmax(isa, &mut soft);
                for ((x, e), y) in spread.iter().zip(&exact).zip(&soft) {
                    let (want, distance) = (e / total, f64::from(most) - f64::from(*x));
                    let bound = (16.0 + sums + distance) * unit * want;
                    let error = (f64::from(*y) - want).abs();
                    assert!(error <= bound, "{isa} softmax of {n}: {y}, not {want}");
                }
            }
        }
        for pairs in [1, 5, 32, 64] {
            for reach in [1e-3, 1.0, 1e4] {
                let x = row(&mut rng, 2 * pairs, reach);
                let angles: Vec<f64> = (0..pairs).map(|_| rng.uniform(-3000.0, 3000.0)).collect();
                let cos: Vec<f32> = angles.iter().map(|a| a.cos() as f32).collect();
                let sin: Vec<f32> = angles.iter().map(|a| a.sin() as f32).collect();
                for adjacent in [true, false] {
                    let mut y = x.clone();
                    vec::rope(isa, &mut y, &cos, &sin, adjacent);
                    for (p, angle) in angles.iter().enumerate() {
                        let (i, j) = if adjacent { (2 * p, 2 * p + 1) } else { (p, p + pairs) };
                        let (a, b) = (f64::from(x[i]), f64::from(x[j]));
                        let bound = 3.0 * unit * a.hypot(b);
                        let [c, s] = [angle.cos(), angle.sin()];
                        for (got, want) in [(y[i], a * c - b * s), (y[j], a * s + b * c)] {
                            let error = (f64::from(got) - want).abs();
                            assert!(error <= bound, "{isa} rope: {got}, not {want}: {error:e} > {bound:e}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn exponentials_at_the_ends_of_the_range() {
    for isa in Isa::available() {
        let x = [f32::NEG_INFINITY, -1e30, -90.0, 0.0, 88.0, 89.5, f32::INFINITY, f32::NAN];
        let mut y = [7.0; 8];
        vec::map(isa, Map::Exp, &x, &mut y);
        assert_eq!(&y[..4], [0.0, 0.0, 0.0, 1.0], "{isa}");
        assert!((y[4] / 88.0_f32.exp() - 1.0).abs() < 1e-6, "{isa} {}", y[4]);
        assert_eq!(&y[5..7], [f32::INFINITY; 2], "{isa}");
        assert!(y[7].is_nan(), "{isa}");
    }
}

#[test]
fn tails_are_exact_and_nothing_else_is_written() {
    let mut rng = Rng::new(5);
    for isa in Isa::available() {
        for n in LENGTHS {
            let (a, b) = (row(&mut rng, n, 2.0), row(&mut rng, n, 2.0));
            let mut out = vec![99.0; n + 3];
            vec::zip(isa, Zip::Mul, &a, &b, &mut out[1..=n]);
            assert!(out[1..=n].iter().zip(a.iter().zip(&b)).all(|(o, (a, b))| *o == a * b));
            assert!(out[0] == 99.0 && out[n + 1] == 99.0 && out[n + 2] == 99.0);
            vec::map(isa, Map::Silu, &a, &mut out[1..=n]);
            assert!(out[0] == 99.0 && out[n + 1] == 99.0);
            let want: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            assert!((f64::from(vec::dot(isa, &a, &b)) - want).abs() < 1e-4);
            let total: f64 = a.iter().map(|a| f64::from(*a)).sum();
            assert!((f64::from(vec::sum(isa, &a)) - total).abs() < 1e-4);
            assert_eq!(vec::largest(isa, &a), a.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let mut y = b.clone();
            vec::axpy(isa, 0.5, &a, &mut y);
            assert!(y.iter().zip(a.iter().zip(&b)).all(|(y, (a, b))| (y - (b + 0.5 * a)).abs() < 1e-6));
        }
    }
}

#[test]
fn norms_and_softmax() {
    let mut rng = Rng::new(6);
    for isa in Isa::available() {
        for n in LENGTHS.into_iter().filter(|n| *n > 0) {
            let (x, w, a) = (row(&mut rng, n, 3.0), row(&mut rng, n, 1.0), row(&mut rng, n, 3.0));
            let norm = |v: &[f64]| {
                let mean = v.iter().map(|v| v * v).sum::<f64>() / n as f64;
                v.iter().map(|v| v / (mean + 1e-5).sqrt()).collect::<Vec<_>>()
            };
            let wide: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
            let mut out = vec![0.0; n];
            vec::rms_norm(isa, &x, Some(&w), 1e-5, &mut out);
            for (i, want) in norm(&wide).into_iter().enumerate() {
                assert!((f64::from(out[i]) - want * f64::from(w[i])).abs() < 1e-5, "{isa} {n}");
            }
            let both: Vec<f64> = x.iter().zip(&a).map(|(x, a)| f64::from(x + a)).collect();
            let mut sum = a.clone();
            // SAFETY: all rows have n elements; the sum is written over its first term.
            unsafe {
                let pointer = sum.as_mut_ptr();
                vec::rms_norm_add(
                    isa,
                    pointer,
                    x.as_ptr(),
                    pointer,
                    std::ptr::null(),
                    1e-5,
                    out.as_mut_ptr(),
                    n,
                );
            }
            for (i, want) in norm(&both).into_iter().enumerate() {
                assert!((f64::from(out[i]) - want).abs() < 1e-5, "{isa} {n}");
                assert_eq!(sum[i], x[i] + a[i]);
            }
            let mut soft = x.clone();
            vec::softmax(isa, &mut soft);
            let total: f64 = wide.iter().map(|v| v.exp()).sum();
            for (i, v) in wide.iter().enumerate() {
                assert!((f64::from(soft[i]) - v.exp() / total).abs() < 1e-6, "{isa} {n}");
            }
        }
        let mut masked = [f32::NEG_INFINITY; 5];
        vec::softmax(isa, &mut masked);
        assert_eq!(masked, [0.0; 5]);
    }
}

#[test]
fn rope_rotates_pairs() {
    let mut rng = Rng::new(8);
    for isa in Isa::available() {
        for pairs in [1, 4, 16, 19, 32] {
            let (cos, sin) = (row(&mut rng, pairs, 1.0), row(&mut rng, pairs, 1.0));
            let x = row(&mut rng, 2 * pairs + 3, 2.0);
            for adjacent in [true, false] {
                let mut y = x.clone();
                vec::rope(isa, &mut y, &cos, &sin, adjacent);
                for p in 0..pairs {
                    let (i, j) = if adjacent { (2 * p, 2 * p + 1) } else { (p, p + pairs) };
                    assert!((y[i] - (x[i] * cos[p] - x[j] * sin[p])).abs() < 1e-6);
                    assert!((y[j] - (x[i] * sin[p] + x[j] * cos[p])).abs() < 1e-6);
                }
                assert_eq!(y[2 * pairs..], x[2 * pairs..]);
            }
        }
    }
}

#[test]
fn conversions_are_exact() {
    let mut rng = Rng::new(10);
    for isa in Isa::available() {
        for n in LENGTHS {
            let x = row(&mut rng, n, 100.0);
            let mut halves = vec![f16::ZERO; n];
            vec::f32_to_f16(isa, &x, &mut halves);
            assert!(halves.iter().zip(&x).all(|(h, x)| *h == f16::from_f32(*x)));
            let mut back = vec![0.0; n];
            vec::f16_to_f32(isa, &halves, &mut back);
            assert!(back.iter().zip(&halves).all(|(b, h)| *b == h.to_f32()));
            let brains: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
            vec::bf16_to_f32(isa, &brains, &mut back);
            assert!(back.iter().zip(&brains).all(|(b, h)| *b == h.to_f32()));
        }
        for dtype in [DType::Q8_0, DType::Q5_1, DType::Q4_0] {
            let x = row(&mut rng, 96, 4.0);
            let mut bytes = vec![0; dtype.row_bytes(96).unwrap()];
            blocks::quantize(dtype, &x, &mut bytes).unwrap();
            let (mut got, mut want) = (vec![0.0; 96], vec![0.0; 96]);
            blocks::dequantize(dtype, &bytes, &mut want).unwrap();
            // SAFETY: the bytes are those of 96 elements.
            assert!(unsafe { vec::load_row(isa, dtype, bytes.as_ptr(), &mut got) });
            assert_eq!(got, want, "{dtype}, {isa}");
        }
        let special =
            [0.0, -0.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::MAX, f32::MIN, 1e-40, 1.0 + 1.0 / 256.0];
        let special: Vec<f32> =
            special.into_iter().chain([f32::from_bits(0x7f80_0001)]).cycle().take(40).collect();
        let mut brains = vec![bf16::ZERO; 40];
        vec::f32_to_bf16(isa, &special, &mut brains);
        assert!(
            brains.iter().zip(&special).all(|(b, x)| b.to_bits() == bf16::from_f32(*x).to_bits()),
            "{isa}"
        );
    }
}

/// The squared error of a row as it was quantized.
fn squared_error(dtype: DType, x: &[f32], bytes: &[u8]) -> f64 {
    let mut back = vec![0.0; x.len()];
    blocks::dequantize(dtype, bytes, &mut back).unwrap();
    x.iter().zip(&back).map(|(x, b)| (f64::from(*x) - f64::from(*b)).powi(2)).sum()
}

#[test]
fn rows_are_quantized_as_well_as_by_the_plain_code() {
    let seed = 12;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    for (isa, dtype) in Isa::available().into_iter().flat_map(|i| [DType::Q4_0, DType::Q5_1].map(|d| (i, d)))
    {
        let (mut same, mut errors) = (0, [0.0; 2]);
        for block in 0..500 {
            let size = [1.0, 1e-3, 40.0, 1e-6][block % 4];
            let offset = if block % 5 == 0 { 3.0 * size } else { 0.0 };
            let mut x: Vec<f32> = row(&mut rng, 64, size).iter().map(|x| x + offset as f32).collect();
            if block % 7 == 0 {
                x[..32].fill([0.0, 1.0, -2.5][block % 3]);
            }
            let mut want = vec![0; dtype.row_bytes(64).unwrap()];
            let mut got = want.clone();
            blocks::quantize(dtype, &x, &mut want).unwrap();
            assert!(vec::quantize_row(isa, dtype, &x, &mut got));
            same += usize::from(got == want);
            let (plain, fast) = (squared_error(dtype, &x, &want), squared_error(dtype, &x, &got));
            // A scale halfway between two f16 numbers may be rounded either way.
            let limit = plain * 1.05 + 1e-9 * size * size;
            assert!(fast <= limit, "{isa} {dtype}, block {block}: {fast} instead of {plain}");
            let relative = |error: f64| error / (size * size);
            errors = [errors[0] + relative(plain), errors[1] + relative(fast)];
        }
        assert!(errors[1] <= 1.001 * errors[0], "{isa} {dtype}: {errors:?}");
        assert!(same >= 450, "{isa} {dtype}: only {same} of 500 rows are the same");
        // Blocks that need care are left to the plain code.
        for value in [f32::NAN, f32::INFINITY, f32::MIN, 1e-30] {
            let mut x = row(&mut rng, 32, if value == 1e-30 { 1e-30 } else { 1.0 });
            x[5] = value;
            let mut want = vec![0; dtype.row_bytes(32).unwrap()];
            let mut got = want.clone();
            blocks::quantize(dtype, &x, &mut want).unwrap();
            assert!(vec::quantize_row(isa, dtype, &x, &mut got));
            assert_eq!(got, want, "{isa} {dtype} {value}");
        }
        assert!(!vec::quantize_row(isa, dtype, &[0.0; 33], &mut [0; 18]));
        assert!(!vec::quantize_row(isa, dtype, &[0.0; 64], &mut [0; 18]));
    }
}
