//! The error of each type: against brute force, against plain rounding, and the same bits with all instructions.

use quadriga_graph::{DType, blocks};
use quadriga_models::quantize::{Instructions, is_target, quantize_rows, quantize_rows_with};

use crate::random::Random;

/// Σ w (a − b)².
fn squared(a: &[f32], b: &[f32], w: &[f32]) -> f64 {
    let terms = a
        .iter()
        .zip(b)
        .enumerate()
        .map(|(i, (a, b))| f64::from(w[i % w.len()]) * (f64::from(*a) - f64::from(*b)).powi(2));
    terms.sum()
}

/// The error of quantizing rows of `row_len` values.
fn error(dtype: DType, values: &[f32], row_len: usize, importance: Option<&[f32]>) -> f64 {
    let mut bytes = vec![0; dtype.row_bytes(values.len()).unwrap()];
    quantize_rows(dtype, values, row_len, importance, &mut bytes).unwrap();
    let mut back = vec![0.0; values.len()];
    blocks::dequantize(dtype, &bytes, &mut back).unwrap();
    squared(values, &back, importance.unwrap_or(&[1.0]))
}

/// The least error of one block over a fine grid of scales, both signs, with levels as floats.
fn brute_force(values: &[f32], w: &[f32], levels: &[f32]) -> f64 {
    let extreme = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let largest = levels.iter().fold(0.0f32, |most, level| most.max(level.abs()));
    let mut least = f64::INFINITY;
    for i in 0..600 {
        let scale = extreme / largest * (0.5 + i as f32 / 600.0);
        for scale in [scale, -scale] {
            let nearest = |value: &f32| {
                let misses = levels.iter().map(|level| (value - scale * level).abs());
                misses.fold(f32::INFINITY, f32::min)
            };
            let error: f64 = values
                .iter()
                .zip(w)
                .map(|(value, w)| f64::from(*w) * f64::from(nearest(value)).powi(2))
                .sum();
            least = least.min(error);
        }
    }
    least
}

#[test]
fn one_scale_is_nearly_as_good_as_brute_force() {
    let seed = 7;
    println!("seed {seed}");
    let mut random = Random(seed);
    let range = |low: i32, high: i32| (low..=high).map(|level| level as f32).collect::<Vec<_>>();
    let iq4 = blocks::IQ4_LEVELS.map(f32::from).to_vec();
    // The search tries some scales and fits each to its quants; brute force tries 1,200. The more levels, the more of these lead to
    // other quants, and the more the best of them gains by chance. The bounds are a little above what was measured with this seed.
    let mut past = Vec::new();
    for (dtype, levels, room, weighted_room) in [
        (DType::Q4_0, range(-8, 7), 1.01, 1.02),
        (DType::Q5_0, range(-16, 15), 1.02, 1.02),
        (DType::Q8_0, range(-127, 127), 1.12, 1.25),
        (DType::IQ4_NL, iq4, 1.01, 1.02),
    ] {
        for weighted in [false, true] {
            let (mut ours, mut best) = (0.0, 0.0);
            for _ in 0..100 {
                let values = random.weights(1, 32);
                let w = if weighted { random.importance(32) } else { vec![1.0; 32] };
                ours += error(dtype, &values, 32, weighted.then_some(w.as_slice()));
                best += brute_force(&values, &w, &levels);
            }
            let (ratio, room) = (ours / best, if weighted { weighted_room } else { room });
            println!("{dtype} weighted {weighted}: {ratio:.4} of at most {room}");
            if ratio > room {
                past.push((dtype, weighted, ratio));
            }
        }
    }
    assert!(past.is_empty(), "{past:?}");
}

#[test]
fn a_line_is_nearly_as_good_as_brute_force() {
    let seed = 11;
    println!("seed {seed}");
    let mut random = Random(seed);
    let mut past = Vec::new();
    for (dtype, highest, room) in [(DType::Q4_1, 15.0f32, 1.04), (DType::Q5_1, 31.0, 1.07)] {
        let (mut ours, mut best) = (0.0, 0.0);
        for _ in 0..40 {
            let values = random.weights(1, 32);
            ours += error(dtype, &values, 32, None);
            let low = values.iter().copied().fold(f32::INFINITY, f32::min);
            let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut least = f64::INFINITY;
            for i in 0..160 {
                for j in 0..160 {
                    let minimum = low + (high - low) * (i as f32 / 160.0 * 0.3 - 0.05);
                    let top = high - (high - low) * (j as f32 / 160.0 * 0.3 - 0.05);
                    let scale = (top - minimum) / highest;
                    let back: Vec<f32> = values
                        .iter()
                        .map(|x| scale * ((x - minimum) / scale).round().clamp(0.0, highest) + minimum)
                        .collect();
                    least = least.min(squared(&values, &back, &[1.0]));
                }
            }
            best += least;
        }
        println!("{dtype}: {:.4} of at most {room}", ours / best);
        if ours > best * room {
            past.push((dtype, ours / best));
        }
    }
    assert!(past.is_empty(), "{past:?}");
}

/// The largest relative error of each type on normal numbers, a little above what the search reaches.
#[test]
fn every_type_has_a_small_error_and_importance_lowers_the_weighted_one() {
    use DType::*;
    let seed = 3;
    println!("seed {seed}");
    let mut random = Random(seed);
    let values = random.weights(8, 512);
    let importance = random.importance(512);
    let bounds = [
        (F32, 0.0),
        (F16, 1e-3),
        (BF16, 5e-3),
        (Q8_0, 0.012),
        (Q6_K, 0.025),
        (Q5_K, 0.05),
        (Q5_1, 0.055),
        (Q5_0, 0.06),
        (Q4_K, 0.09),
        (Q4_1, 0.11),
        (Q4_0, 0.12),
        (IQ4_NL, 0.11),
        (IQ4_XS, 0.11),
        (NVFP4, 0.15),
        (MXFP4, 0.17),
        (Q3_K, 0.21),
        (IQ3_S, 0.22),
        (IQ3_XXS, 0.26),
        (Q2_K, 0.38),
        (IQ2_S, 0.36),
        (IQ2_XS, 0.40),
        (IQ2_XXS, 0.45),
        (IQ1_M, 0.60),
        (IQ1_S, 0.62),
        (TQ2_0, 0.75),
        (TQ1_0, 0.75),
    ];
    let square = squared(&values, &vec![0.0; values.len()], &[1.0]);
    for (dtype, bound) in bounds {
        let relative = (error(dtype, &values, 512, None) / square).sqrt();
        assert!(relative <= bound, "{dtype}: {relative:.4} > {bound}");
        if !dtype.is_quantized() || matches!(dtype, NVFP4 | TQ1_0 | TQ2_0) {
            continue;
        }
        let mut bytes = vec![0; dtype.row_bytes(values.len()).unwrap()];
        let mut back = vec![0.0; values.len()];
        quantize_rows(dtype, &values, 512, None, &mut bytes).unwrap();
        blocks::dequantize(dtype, &bytes, &mut back).unwrap();
        let without = squared(&values, &back, &importance);
        let with = error(dtype, &values, 512, Some(&importance));
        assert!(with <= without * 1.001, "{dtype}: importance {with} without {without}");
    }
    let targets = DType::all().filter(|dtype| is_target(*dtype)).count();
    assert_eq!(targets, bounds.len());
}

#[test]
fn the_search_beats_plain_rounding() {
    let mut random = Random(5);
    let values = random.weights(16, 256);
    for dtype in [DType::Q4_0, DType::Q5_0, DType::Q8_0, DType::Q4_K, DType::Q6_K] {
        let mut bytes = vec![0; dtype.row_bytes(values.len()).unwrap()];
        blocks::quantize(dtype, &values, &mut bytes).unwrap();
        let mut back = vec![0.0; values.len()];
        blocks::dequantize(dtype, &bytes, &mut back).unwrap();
        let plain = squared(&values, &back, &[1.0]);
        let ours = error(dtype, &values, 256, None);
        assert!(ours <= plain * 1.02, "{dtype}: {:.4}", ours / plain);
    }
}

#[test]
fn all_instructions_compute_the_same_bits() {
    let seed = 19;
    println!("seed {seed}");
    let mut random = Random(seed);
    for dtype in DType::all().filter(|dtype| is_target(*dtype)) {
        // Three blocks of 32 in a row, so that eights are not whole; two rows of 512 for the larger ones.
        let (rows, row_len) = if dtype.block_len() <= 32 { (3, 96) } else { (2, 512) };
        let values = random.weights(rows, row_len);
        let importance = random.importance(row_len);
        for importance in [None, Some(importance.as_slice())] {
            let size = dtype.row_bytes(values.len()).unwrap();
            let (mut best, mut portable) = (vec![0; size], vec![1; size]);
            quantize_rows_with(Instructions::Best, dtype, &values, row_len, importance, &mut best).unwrap();
            quantize_rows_with(Instructions::Portable, dtype, &values, row_len, importance, &mut portable)
                .unwrap();
            assert_eq!(best, portable, "{dtype}, importance {}", importance.is_some());
        }
    }
}

#[test]
fn extreme_values_stay_finite() {
    for dtype in DType::all().filter(|dtype| is_target(*dtype)) {
        for values in [vec![0.0; 256], vec![-3.5; 256], vec![1e-30; 256], vec![3e38; 256], {
            let mut one = vec![0.0; 256];
            one[77] = 1000.0;
            one
        }] {
            let mut bytes = vec![0; dtype.row_bytes(256).unwrap()];
            quantize_rows(dtype, &values, 256, None, &mut bytes).unwrap();
            let mut back = vec![f32::NAN; 256];
            blocks::dequantize(dtype, &bytes, &mut back).unwrap();
            let plain = matches!(dtype, DType::F16 | DType::BF16 | DType::F32);
            assert!(plain || back.iter().all(|value| value.is_finite()), "{dtype} {values:?}");
            if values[0] == -3.5 && !plain && !matches!(dtype, DType::IQ1_S | DType::IQ1_M) {
                // Half a step of the coarsest of them, MXFP4, whose scales are powers of two.
                let limit = 0.51;
                let worst = back.iter().map(|value| (value + 3.5).abs()).fold(0.0, f32::max);
                assert!(worst <= limit, "{dtype}: {worst}");
            }
        }
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let values = vec![0.0; 256];
    let mut bytes = vec![0; 144];
    assert!(quantize_rows(DType::Q4_K, &values, 256, None, &mut bytes[..143]).is_err());
    assert!(quantize_rows(DType::Q4_K, &values, 100, None, &mut bytes).is_err());
    assert!(quantize_rows(DType::Q4_K, &values, 256, Some(&[1.0; 7]), &mut bytes).is_err());
    assert!(quantize_rows(DType::Q4_K, &values, 0, None, &mut bytes).is_err());
    assert!(quantize_rows(DType::Q8_K, &values, 256, None, &mut vec![0; 292]).is_err());
}
