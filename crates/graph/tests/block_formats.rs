//! Block formats: dequantization is bit-exact with the Python package `gguf`, quantization no less accurate.
//!
//! The fixtures are made by `fixtures/make_block_fixtures.py`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

use quadriga_conformance::{Fixture, Rng};
use quadriga_graph::DType;
use quadriga_graph::blocks::{self, Block, BlockQ4_0, FormatError, GridBlock};

const COMPUTABLE: [DType; 26] = {
    use DType::*;
    [
        F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4,
        NVFP4, TQ1_0, TQ2_0, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S,
    ]
};
/// Those that `gguf` quantizes to as well.
const QUANTIZABLE: [DType; 7] =
    [DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0, DType::TQ1_0, DType::TQ2_0];

fn fixture(name: &str) -> Fixture {
    Fixture::open(format!("{}/tests/fixtures/{name}.bin", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// The rows in the type that the `gguf` package quantized.
fn quantized_by_gguf(dtype: DType) -> Vec<u8> {
    fixture(&format!("quantize_{dtype}")).rest().to_vec()
}

/// The rows that the quantize fixtures were made from, and the length of a row.
fn rows() -> (Vec<f32>, usize) {
    let mut fixture = fixture("quantize_rows");
    let (count, length) = (fixture.u32() as usize, fixture.u32() as usize);
    (fixture.f32s(count * length), length)
}

fn quantize(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0xaa; dtype.row_bytes(values.len()).unwrap()];
    blocks::quantize(dtype, values, &mut bytes).unwrap();
    bytes
}

fn dequantize(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![f32::NAN; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    blocks::dequantize(dtype, bytes, &mut values).unwrap();
    values
}

fn error(values: &[f32], back: &[f32]) -> f64 {
    let squares = values.iter().zip(back).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2));
    (squares.sum::<f64>() / values.len() as f64).sqrt()
}

#[test]
fn dequantize_is_bit_exact_with_gguf() {
    for dtype in COMPUTABLE {
        let mut fixture = fixture(&format!("dequantize_{dtype}"));
        let blocks = fixture.u32() as usize;
        let values = dequantize(dtype, fixture.bytes(blocks * dtype.block_bytes()));
        let expected = fixture.f32s(blocks * dtype.block_len());
        assert!(fixture.rest().is_empty());
        assert_eq!(values.len(), expected.len(), "{dtype}");
        for (i, (value, expected)) in values.iter().zip(&expected).enumerate() {
            // The payload of a NaN differs between processors.
            let same = value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan();
            assert!(same, "{dtype} element {i}: {value} is not {expected}");
        }
    }
}

#[test]
fn exactly_the_computable_types_dequantize() {
    for dtype in DType::all() {
        let bytes = vec![0; dtype.block_bytes()];
        let mut values = vec![1.0; dtype.block_len()];
        match blocks::dequantize(dtype, &bytes, &mut values) {
            Ok(()) => assert!(dtype.is_computable() && COMPUTABLE.contains(&dtype)),
            Err(error) => {
                assert_eq!(error, FormatError::NoDequantize { dtype });
                assert!(!dtype.is_computable(), "{dtype}");
                assert!(values.iter().all(|v| *v == 1.0));
            }
        }
    }
}

#[test]
fn f16_and_bf16_are_rounded_as_by_gguf() {
    let (values, _) = rows();
    for dtype in [DType::F16, DType::BF16] {
        assert_eq!(quantize(dtype, &values), quantized_by_gguf(dtype), "{dtype}");
    }
    assert_eq!(dequantize(DType::F32, &quantize(DType::F32, &values)), values);
}

#[test]
fn quantization_error_is_at_most_that_of_gguf_on_every_row() {
    let (values, row_length) = rows();
    for dtype in QUANTIZABLE {
        let ours = dequantize(dtype, &quantize(dtype, &values));
        let theirs = dequantize(dtype, &quantized_by_gguf(dtype));
        let rows = values.chunks(row_length).zip(ours.chunks(row_length)).zip(theirs.chunks(row_length));
        for (i, ((row, ours), theirs)) in rows.enumerate() {
            let (ours, theirs) = (error(row, ours), error(row, theirs));
            println!("{dtype} row {i}: error {ours:.4e}, gguf {theirs:.4e}, ratio {:.4}", ours / theirs);
            assert!(ours <= theirs, "{dtype} row {i}: error {ours:e}, gguf {theirs:e}");
        }
    }
}

/// Models, tests and caches that were quantized once stay comparable: a change of these bytes is a decision.
#[test]
fn quantization_gives_the_recorded_bytes() {
    let (mut values, _) = rows();
    // Groups whose values are all equal, of one sign, far from zero, or extreme on both sides.
    values.extend([0.75; 256]);
    values.extend((0..256).map(|i| i as f32));
    values.extend((0..256).map(|i| 1e4 - i as f32));
    values.extend((0..256).map(|i| (i % 7) as f32 - 3.0));
    let recorded = [
        (DType::Q4_0, 0x458b_68ae_ca85_ab29),
        (DType::Q4_1, 0x2cd3_63fc_b9b5_673f),
        (DType::Q5_0, 0xb202_8a46_6ec6_4565),
        (DType::Q5_1, 0x3e89_23db_140a_ccad),
        (DType::Q8_0, 0x22ae_05ee_aea8_aa01),
        (DType::Q4_K, 0xa2b2_5e45_f7fc_0568),
        (DType::Q6_K, 0xb553_23b9_b652_4b77),
    ];
    // FNV-1a.
    let hash = |bytes: &[u8]| {
        bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
        })
    };
    let found = recorded.map(|(dtype, _)| (dtype, hash(&quantize(dtype, &values))));
    assert_eq!(found, recorded, "{found:#x?}");
}

/// `gguf` cannot quantize to these two, so they are compared with formats of similar size: Q4_K (4.5 bits) with Q4_1
/// (5 bits), Q6_K (6.6 bits) with Q5_1 (6 bits), on rows that are distributed around zero like weights.
#[test]
fn k_quants_are_as_accurate_as_formats_of_their_size() {
    let (values, row_length) = rows();
    for (dtype, other, bound) in [(DType::Q4_K, DType::Q4_1, 1.05), (DType::Q6_K, DType::Q5_1, 0.65)] {
        let ours = dequantize(dtype, &quantize(dtype, &values));
        let theirs = dequantize(other, &quantized_by_gguf(other));
        for i in (0..10).chain(12..20).chain(22..24) {
            let row = i * row_length..(i + 1) * row_length;
            let (ours, theirs) =
                (error(&values[row.clone()], &ours[row.clone()]), error(&values[row.clone()], &theirs[row]));
            assert!(ours <= bound * theirs, "{dtype} row {i}: error {ours:e}, {other} {theirs:e}");
        }
        let zeros = vec![0.0; 512];
        assert_eq!(dequantize(dtype, &quantize(dtype, &zeros)), zeros);
    }
}

/// `gguf` cannot quantize to NVFP4, so it is compared with Q4_0, which has as many bits, on rows whose scales are in the
/// range of an 8-bit float.
#[test]
fn nvfp4_is_about_as_accurate_as_q4_0() {
    let (values, row_length) = rows();
    let ours = dequantize(DType::NVFP4, &quantize(DType::NVFP4, &values));
    let theirs = dequantize(DType::Q4_0, &quantized_by_gguf(DType::Q4_0));
    for i in (0..10).chain(12..16) {
        let row = i * row_length..(i + 1) * row_length;
        let ours = error(&values[row.clone()], &ours[row.clone()]);
        let theirs = error(&values[row.clone()], &theirs[row]);
        assert!(ours <= 1.3 * theirs, "row {i}: error {ours:e}, Q4_0 {theirs:e}");
    }
    // Every level with every scale, in blocks of four scales.
    for scales in (0..0x7e_u8).collect::<Vec<u8>>().chunks(4) {
        let levels =
            [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 12.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];
        let scale = |i: usize| blocks::BlockNVFP4::decode_scale(scales[i % scales.len()]);
        let values: Vec<f32> = (0..64).map(|i| scale(i / 16) * levels[i % 16]).collect();
        assert_eq!(dequantize(DType::NVFP4, &quantize(DType::NVFP4, &values)), values);
    }
}

#[test]
fn zeros_and_representable_values_are_exact() {
    // For each type the lowest and the highest quant, both used, and quants between them.
    for (dtype, lowest, highest) in [
        (DType::Q4_0, -8, 7),
        (DType::Q4_1, 0, 15),
        (DType::Q5_0, -16, 15),
        (DType::Q5_1, 0, 31),
        (DType::Q8_0, -127, 127),
        (DType::TQ1_0, -1, 1),
        (DType::TQ2_0, -1, 1),
    ] {
        let zeros = vec![0.0; 2 * dtype.block_len()];
        assert_eq!(dequantize(dtype, &quantize(dtype, &zeros)), zeros, "{dtype}");
        let length = dtype.block_len() as i32;
        let quants =
            [lowest, highest].into_iter().chain((2..length).map(|i| lowest + i * 9 % (highest - lowest + 1)));
        let values: Vec<f32> = quants.map(|quant| quant as f32 * 0.25).collect();
        assert_eq!(dequantize(dtype, &quantize(dtype, &values)), values, "{dtype}");
    }
}

#[test]
fn any_input_quantizes_to_finite_values() {
    let special = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN,
        f32::MIN_POSITIVE,
        1e-45,
        -0.0,
        65504.0,
        1e9,
    ];
    let seed = 7;
    println!("seed {seed}");
    let mut random = Rng::new(seed);
    for dtype in QUANTIZABLE.into_iter().chain([DType::Q4_K, DType::Q6_K, DType::NVFP4]) {
        for value in special {
            let back = dequantize(dtype, &quantize(dtype, &[value; 256]));
            assert!(back.iter().all(|v| v.is_finite()), "{dtype} of {value}: {back:?}");
        }
        for _ in 0..200 {
            let values: [f32; 256] = std::array::from_fn(|_| match random.chance(0.2) {
                true => *random.pick(&special).unwrap(),
                false => f32::from_bits(random.next_u64() as u32),
            });
            let back = dequantize(dtype, &quantize(dtype, &values));
            assert!(back.iter().all(|v| v.is_finite()), "{dtype} of {values:?}: {back:?}");
        }
    }
}

#[test]
fn a_scale_that_is_set_scales_the_values_and_centres_them() {
    let seed = 11;
    println!("seed {seed}");
    let mut random = Rng::new(seed);
    for dtype in COMPUTABLE.into_iter().filter(|dtype| dtype.is_quantized()) {
        let mut bytes: Vec<u8> = (0..64 * dtype.block_bytes()).map(|_| random.next_u64() as u8).collect();
        let mut scaled = |scale: f32| {
            bytes.chunks_mut(dtype.block_bytes()).for_each(|block| blocks::set_scale(dtype, block, scale));
            dequantize(dtype, &bytes)
        };
        let (small, large) = (scaled(0.25), scaled(1.0));
        assert!(small.iter().zip(&large).all(|(a, b)| 4.0 * a == *b), "{dtype}");
        if dtype == DType::TQ2_0 {
            // One of the four quants is 2, which no quantizer uses.
            continue;
        }
        let mean = large.iter().sum::<f32>() / large.len() as f32;
        assert!(mean.abs() < 0.2 * error(&large, &vec![0.0; large.len()]) as f32, "{dtype}: mean {mean}");
    }
}

#[test]
fn blocks_are_read_from_any_address() {
    let values: Vec<f32> = (0..96).map(|i| (i as f32 * 0.7).sin()).collect();
    let packed = quantize(DType::Q4_0, &values);
    let mut shifted = vec![0; packed.len() + 1];
    shifted[1..].copy_from_slice(&packed);
    assert_eq!(dequantize(DType::Q4_0, &shifted[1..]), dequantize(DType::Q4_0, &packed));
    let blocks = blocks::as_blocks::<BlockQ4_0>(&shifted[1..]).unwrap();
    assert_eq!(blocks.len(), 3);
    let mut one = [0.0; 32];
    Block::dequantize(&blocks[2], &mut one);
    assert_eq!(one[..], dequantize(DType::Q4_0, &packed)[64..]);
}

#[test]
fn length_errors_name_the_numbers() {
    let error = blocks::dequantize(DType::Q4_0, &[0; 35], &mut [0.0; 64]).unwrap_err();
    assert_eq!(error.to_string(), "35 bytes are not a whole number of Q4_0 blocks of 18 bytes");
    let error = blocks::dequantize(DType::Q4_0, &[0; 36], &mut [0.0; 32]).unwrap_err();
    assert_eq!(error.to_string(), "36 bytes of Q4_0 hold 64 elements, not 32");
    let error = blocks::quantize(DType::Q8_0, &[0.0; 33], &mut [0; 34]).unwrap_err();
    assert_eq!(error.to_string(), "34 bytes of Q8_0 hold 32 elements, not 33");
    let error = blocks::quantize(DType::IQ4_NL, &[0.0; 32], &mut [0; 18]).unwrap_err();
    assert_eq!(error, FormatError::NoQuantize { dtype: DType::IQ4_NL });
    assert!(blocks::as_blocks::<BlockQ4_0>(&[0; 17]).is_err());
    blocks::dequantize(DType::Q4_K, &[], &mut []).unwrap();
    blocks::quantize(DType::F16, &[], &mut []).unwrap();
}

#[test]
fn element_and_group_indices_wrap_around_the_block() {
    let bytes: Vec<u8> = (0..=255).collect();
    macro_rules! check {
        ($($block:ident . $method:ident % $length:literal),*) => {$({
            let block = blocks::as_blocks::<blocks::$block>(&bytes[..size_of::<blocks::$block>()]).unwrap()[0];
            for i in 0..$length {
                let expected = block.$method(i);
                assert_eq!(block.$method(i + $length), expected);
                assert_eq!(block.$method(usize::MAX - ($length - 1) + i), expected);
            }
        })*};
    }
    check!(
        BlockQ4_0.quant % 32,
        BlockQ4_1.quant % 32,
        BlockQ5_0.quant % 32,
        BlockQ5_1.quant % 32,
        BlockIQ4_NL.level % 32,
        BlockMXFP4.level % 32,
        BlockNVFP4.level % 64,
        BlockTQ1_0.quant % 256,
        BlockTQ2_0.quant % 256,
        BlockIQ1_S.level % 256,
        BlockIQ1_S.group_scale % 16,
        BlockIQ1_M.level % 256,
        BlockIQ1_M.group_scale % 16,
        BlockIQ2_XXS.level % 256,
        BlockIQ2_XXS.group_scale % 16,
        BlockIQ2_XS.level % 256,
        BlockIQ2_XS.group_scale % 16,
        BlockIQ2_S.level % 256,
        BlockIQ2_S.group_scale % 16,
        BlockIQ3_XXS.level % 256,
        BlockIQ3_XXS.group_scale % 16,
        BlockIQ3_S.level % 256,
        BlockIQ3_S.group_scale % 16,
        BlockQ2_K.quant % 256,
        BlockQ3_K.quant % 256,
        BlockQ4_K.quant % 256,
        BlockQ5_K.quant % 256,
        BlockQ6_K.quant % 256,
        BlockIQ4_XS.level % 256,
        BlockQ2_K.group_scale_and_minimum % 16,
        BlockQ3_K.group_scale % 16,
        BlockIQ4_XS.group_scale % 8
    );
}
