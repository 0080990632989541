//! Matmuls of every weight type on every instruction set, compared with f64 arithmetic.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use half::f16;
use quadriga_conformance::Rng;
use quadriga_cpu::internals::kernels::KernelError;
use quadriga_cpu::internals::kernels::matmul::{
    ActivationFormat, Activations, Input, InputType, Matmul, NO_ROW, Output, PackedLayout, multiply,
};
use quadriga_cpu::internals::pool::Pool;
use quadriga_cpu::isa::Isa;
use quadriga_graph::{DType, blocks};

/// Every type of weights.
fn types() -> impl Iterator<Item = DType> {
    DType::all().filter(|dtype| dtype.is_computable())
}

/// Blocks with every bit pattern in quants and sub-scales, and scales of a size found in models.
fn random_weights(rng: &mut Rng, dtype: DType, rows: usize, columns: usize) -> Vec<u8> {
    let mut bytes = vec![0; rows * dtype.row_bytes(columns).unwrap()];
    match dtype {
        DType::F32 => bytes
            .chunks_exact_mut(4)
            .for_each(|b| b.copy_from_slice(&(rng.uniform(-1.0, 1.0) as f32).to_le_bytes())),
        DType::F16 => bytes
            .chunks_exact_mut(2)
            .for_each(|b| b.copy_from_slice(&f16::from_f64(rng.uniform(-1.0, 1.0)).to_le_bytes())),
        DType::BF16 => bytes
            .chunks_exact_mut(2)
            .for_each(|b| b.copy_from_slice(&half::bf16::from_f64(rng.uniform(-1.0, 1.0)).to_le_bytes())),
        _ => {
            for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                block.iter_mut().for_each(|b| *b = rng.next_u64() as u8);
                blocks::set_scale(dtype, block, rng.uniform(-0.01, 0.01) as f32);
                if dtype == DType::NVFP4 {
                    block[..4].iter_mut().for_each(|scale| *scale = rng.below(0x40) as u8);
                }
            }
        }
    }
    bytes
}

fn values(dtype: DType, bytes: &[u8], count: usize) -> Vec<f32> {
    let mut out = vec![0.0; count];
    blocks::dequantize(dtype, bytes, &mut out).unwrap();
    out
}

fn random_rows(rng: &mut Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| (rng.uniform(-1.0, 1.0) + rng.uniform(-1.0, 1.0)) as f32).collect()
}

/// The matmul in f64, `[m, n]`, each element with the sum of the squares of its terms.
fn exact(w: &[f32], x: &[f32], n: usize, k: usize) -> Vec<(f64, f64)> {
    let dot = |w: &[f32], x: &[f32]| {
        let terms = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
        terms.fold((0.0, 0.0), |(sum, squares), term| (sum + term, squares + term * term))
    };
    x.chunks_exact(k).flat_map(|x| (0..n).map(move |i| dot(&w[i * k..(i + 1) * k], x))).collect()
}

/// The mean squared error over the mean square; a sum that happens to cancel counts as much as its terms.
fn normalised_error(got: &[f32], want: &[(f64, f64)]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w.0).powi(2)).sum();
    error / want.iter().map(|(sum, squares)| (sum * sum).max(*squares)).sum::<f64>().max(1e-30)
}

const GUARD: f32 = 12345.0;

/// A matmul with everything at odd offsets and guard values around the output rows, on `pool`.
fn product(pool: &Pool, isa: Isa, layout: &PackedLayout, packed: &[u8], x: &[f32], m: usize) -> Vec<f32> {
    let (n, k) = (layout.rows(), layout.columns());
    let mut shifted_weights = vec![0_u8; packed.len() + 1];
    shifted_weights[1..].copy_from_slice(packed);
    let stride = k + 3;
    let mut shifted_x = vec![0xff_u8; (m * stride) * 4 + 1];
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (i, value) in x.iter().enumerate() {
            let at = 1 + (row * stride + i) * 4;
            shifted_x[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
    }
    // SAFETY: the rows are inside the vector, one byte off; any alignment is good.
    let input = unsafe { Input::from_raw(shifted_x.as_ptr().add(1), InputType::F32, m, k, stride * 4) };
    let out_stride = n + 5;
    let mut out = vec![GUARD; (m + 2) * out_stride];
    let output = Output::new(&mut out[out_stride..], m, n, out_stride).unwrap();
    let threads = pool.threads();
    let bytes = Activations::work_bytes(isa, layout.dtype(), m, k, threads).unwrap();
    let mut work = vec![0xa5_u8; bytes];
    let activations = Activations::new(isa, layout.dtype(), m, k, threads, &mut work).unwrap();
    pool.run(&|worker| {
        // SAFETY: every thread of the run prepares, waits at the barrier and multiplies.
        unsafe {
            activations.prepare(worker, &input)?;
            worker.barrier()?;
            let product = Matmul { layout, packed: &shifted_weights[1..], output: &output, first_row: 0 };
            multiply(worker, &activations, &[product])
        }
    })
    .unwrap();
    let mut result = Vec::with_capacity(m * n);
    for (row, values) in out.chunks_exact(out_stride).enumerate() {
        let inside = (1..=m).contains(&row);
        let written = if inside { n } else { 0 };
        result.extend_from_slice(&values[..written]);
        assert!(values[written..].iter().all(|v| *v == GUARD), "guard of row {row} overwritten");
    }
    result
}

#[test]
fn packed_rows_read_back_exactly() {
    let mut rng = Rng::new(7);
    for dtype in types() {
        let k = if dtype.is_quantized() { 512 } else { 45 };
        for n in [1, 16, 35] {
            let file = random_weights(&mut rng, dtype, n, k);
            let want = values(dtype, &file, n * k);
            let layout = PackedLayout::new(dtype, n, k).unwrap();
            let mut packed = vec![0xee; layout.bytes()];
            layout.pack(&file, &mut packed).unwrap();
            let mut row = vec![0.0; k];
            for i in 0..n {
                layout.read_row(&packed, i, &mut row).unwrap();
                assert_eq!(row, want[i * k..(i + 1) * k], "{dtype} row {i} of {n}");
            }
            assert_eq!(layout.read_row(&packed, n, &mut row), Err(KernelError::Row { row: n, rows: n }));
        }
    }
}

/// The sums of integers are the same, and everything after them is.
#[test]
fn avx_vnni_gives_the_bits_of_avx2() {
    let (Ok(avx2), Ok(vnni)) = (Isa::named("avx2"), Isa::named("avxvnni")) else { return };
    let (mut rng, pool) = (Rng::new(19), Pool::new(2).unwrap());
    for dtype in types() {
        let (n, k) = (37, 512);
        let file = random_weights(&mut rng, dtype, n, k);
        let layout = PackedLayout::new(dtype, n, k).unwrap();
        let mut packed = vec![0; layout.bytes()];
        layout.pack(&file, &mut packed).unwrap();
        // GEMV, GEMM of few rows, GEMM of many.
        for m in [1, 2, 7, 20] {
            let x = random_rows(&mut rng, m * k);
            let of = |isa| product(&pool, isa, &layout, &packed, &x, m);
            assert_eq!(of(vnni), of(avx2), "{dtype}, {m} rows, seed 19");
        }
    }
}

#[test]
fn every_type_matches_f64_on_every_instruction_set() {
    let seed = 42;
    let mut rng = Rng::new(seed);
    let pools: Vec<Pool> = [1, 2, 3, 8].map(|t| Pool::new(t).unwrap()).into();
    for dtype in types() {
        let widths: &[usize] = match dtype.block_len() {
            1 => &[1, 2, 7, 33, 100, 576],
            32 => &[32, 96, 576],
            64 => &[64, 192, 576],
            _ => &[256, 768],
        };
        for &k in widths {
            for (n, m) in [(1, 1), (7, 3), (16, 1), (33, 2), (50, 5), (64, 8), (48, 17), (100, 33), (35, 70)]
            {
                let file = random_weights(&mut rng, dtype, n, k);
                let w = values(dtype, &file, n * k);
                let x = random_rows(&mut rng, m * k);
                let want = exact(&w, &x, n, k);
                let layout = PackedLayout::new(dtype, n, k).unwrap();
                let mut packed = vec![0; layout.bytes()];
                layout.pack(&file, &mut packed).unwrap();
                for isa in Isa::available() {
                    let got = product(&pools[0], isa, &layout, &packed, &x, m);
                    let error = normalised_error(&got, &want);
                    // Rounding averages out over many columns and outputs; one of them has the error of one number.
                    let limit = match ActivationFormat::choose(isa, dtype, m).unwrap() {
                        ActivationFormat::F32Panels(_) => 1e-12,
                        _ if k < 32 => 5e-5,
                        ActivationFormat::Int8x2(_) if n * m == 1 => 1e-7,
                        ActivationFormat::Int8x2(_) => 1e-8,
                        ActivationFormat::Int16 => 2e-6,
                        ActivationFormat::Bf16Tiles => 2e-5,
                    };
                    assert!(error < limit, "{dtype} {isa} n {n} k {k} m {m} seed {seed}: error {error:e}");
                    for pool in &pools[1..] {
                        let again = product(pool, isa, &layout, &packed, &x, m);
                        let same = got.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(
                            same,
                            "{dtype} {isa} n {n} k {k} m {m}: depends on {} threads",
                            pool.threads()
                        );
                    }
                }
            }
        }
    }
}

/// A damaged file may have any bits: rows with NaN or infinite weights give NaN or infinite sums, all others numbers.
#[test]
fn any_bits_are_weights() {
    let seed = 77;
    let mut rng = Rng::new(seed);
    let pool = Pool::new(2).unwrap();
    for dtype in types().filter(|dtype| dtype.is_quantized()) {
        let (n, k) = (40, 512);
        let mut file: Vec<u8> = (0..n * dtype.row_bytes(k).unwrap()).map(|_| rng.next_u64() as u8).collect();
        for (number, block) in file.chunks_exact_mut(dtype.block_bytes()).enumerate() {
            // Every seventh block keeps whatever scale its bits are.
            if !number.is_multiple_of(7) {
                blocks::set_scale(dtype, block, 0.01);
            }
        }
        let w = values(dtype, &file, n * k);
        let layout = PackedLayout::new(dtype, n, k).unwrap();
        let mut packed = vec![0; layout.bytes()];
        layout.pack(&file, &mut packed).unwrap();
        for m in [1, 3, 20] {
            let x = random_rows(&mut rng, m * k);
            for isa in Isa::available() {
                let got = product(&pool, isa, &layout, &packed, &x, m);
                for (i, sum) in got.iter().enumerate() {
                    let weights = &w[i % n * k..][..k];
                    let finite = weights.iter().all(|w| w.is_finite());
                    let small = weights.iter().all(|w| w.abs() < 1e30);
                    assert!(finite || !sum.is_finite(), "{dtype} {isa} m {m} sum {i} seed {seed}: {sum}");
                    assert!(!small || sum.is_finite(), "{dtype} {isa} m {m} sum {i} seed {seed}: {sum}");
                }
            }
        }
    }
}

#[test]
fn rows_longer_than_a_panel_are_summed_in_parts() {
    let mut rng = Rng::new(9);
    let pool = Pool::new(2).unwrap();
    let (n, k, m) = (40, 7168, 18);
    for dtype in [DType::Q4_0, DType::Q6_K, DType::F16, DType::F32, DType::BF16] {
        let file = random_weights(&mut rng, dtype, n, k);
        let x = random_rows(&mut rng, m * k);
        let want = exact(&values(dtype, &file, n * k), &x, n, k);
        let layout = PackedLayout::new(dtype, n, k).unwrap();
        let mut packed = vec![0; layout.bytes()];
        layout.pack(&file, &mut packed).unwrap();
        for isa in Isa::available() {
            let error = normalised_error(&product(&pool, isa, &layout, &packed, &x, m), &want);
            assert!(error < 1e-4, "{dtype} {isa}: error {error:e}");
        }
    }
}

/// Long rows are summed in parts, which are added up in the output. Whether a tile of it is whole, or its rows and columns
/// end inside it, must not change the sum.
#[test]
fn long_rows_have_the_same_result_in_every_batch_and_on_any_number_of_threads() {
    let seed = 91;
    let mut rng = Rng::new(seed);
    let (n, k) = (16 * 12 + 5, 3072 + 512);
    for isa in Isa::available().into_iter().filter(|isa| *isa != Isa::Scalar) {
        for dtype in [DType::Q4_0, DType::F16] {
            let bytes = random_weights(&mut rng, dtype, n, k);
            let layout = PackedLayout::new(dtype, n, k).unwrap();
            let mut packed = vec![0; layout.bytes()];
            layout.pack(&bytes, &mut packed).unwrap();
            let x = random_rows(&mut rng, 64 * k);
            let whole = product(&Pool::new(3).unwrap(), isa, &layout, &packed, &x, 64);
            for (rows, threads) in [(64, 1), (33, 2), (47, 3), (16, 2)] {
                let pool = Pool::new(threads).unwrap();
                let some = product(&pool, isa, &layout, &packed, &x[..rows * k], rows);
                assert!(
                    some == whole[..rows * n],
                    "seed {seed}, {isa}, {dtype}, {rows} rows, {threads} threads"
                );
            }
        }
    }
}

/// A sequence that is decoded beside others has the same results as alone: up to some number of rows, each row's result is the
/// same bits as that of a matmul of the row alone.
#[test]
fn a_row_among_few_has_the_same_result_as_alone() {
    let seed = 93;
    let mut rng = Rng::new(seed);
    let pool = Pool::new(2).unwrap();
    for isa in Isa::available() {
        for dtype in types() {
            // Unquantized weights may have any number of columns.
            let odd = [(33, 1), (40, 191), (16, 385), (19, 3 * 192 + 77)];
            let sizes = odd.into_iter().filter(|_| !dtype.is_quantized());
            for (n, k) in [(40, 768), (19, 3072 + 256)].into_iter().chain(sizes) {
                let bytes = random_weights(&mut rng, dtype, n, k);
                let layout = PackedLayout::new(dtype, n, k).unwrap();
                let mut packed = vec![0; layout.bytes()];
                layout.pack(&bytes, &mut packed).unwrap();
                let most = ActivationFormat::few_rows(isa, dtype).min(64);
                let x = random_rows(&mut rng, most * k);
                let alone: Vec<f32> =
                    x.chunks_exact(k).flat_map(|x| product(&pool, isa, &layout, &packed, x, 1)).collect();
                for rows in (2..18).chain([24, 31, 33, 48, 64]).filter(|rows| *rows <= most) {
                    let got = product(&pool, isa, &layout, &packed, &x[..rows * k], rows);
                    let same = got.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{dtype} {isa} n {n} k {k}, {rows} rows, seed {seed}");
                }
            }
        }
    }
}

#[test]
fn experts_gather_and_scatter_rows() {
    let mut rng = Rng::new(11);
    let pool = Pool::new(3).unwrap();
    let (n, k, tokens) = (40, 256, 20);
    let x: Vec<f16> = random_rows(&mut rng, tokens * k).into_iter().map(f16::from_f32).collect();
    let wide: Vec<f32> = x.iter().map(|v| v.to_f32()).collect();
    for dtype in [DType::Q4_K, DType::F16, DType::F32] {
        let layout = PackedLayout::new(dtype, n, k).unwrap();
        let experts: Vec<Vec<u8>> = (0..2).map(|_| random_weights(&mut rng, dtype, n, k)).collect();
        let packed: Vec<Vec<u8>> = experts
            .iter()
            .map(|file| {
                let mut packed = vec![0; layout.bytes()];
                layout.pack(file, &mut packed).unwrap();
                packed
            })
            .collect();
        // Expert 0 has the even tokens, expert 1 the odd ones; each list is filled up to a multiple of 48.
        let list = |e: usize| (0..tokens as u32).filter(move |t| *t as usize % 2 == e).collect::<Vec<_>>();
        let mut gather = Vec::new();
        for e in 0..2 {
            gather.extend(list(e));
            gather.resize(48 * (e + 1), NO_ROW);
        }
        for isa in Isa::available() {
            let input = Input::f16(&x, tokens, k, k).unwrap().gather(&gather).unwrap();
            let mut out = vec![0.0; tokens * n];
            let pointer = out.as_mut_ptr();
            let lists = [list(0), list(1)];
            // SAFETY: the rows are inside the vector; the two lists name different ones.
            let outputs = [0, 1]
                .map(|e| unsafe { Output::from_raw(pointer, tokens, n, n).scatter(&lists[e]).unwrap() });
            let bytes = Activations::work_bytes(isa, dtype, gather.len(), k, 3).unwrap();
            let mut work = vec![0; bytes];
            let activations = Activations::new(isa, dtype, gather.len(), k, 3, &mut work).unwrap();
            pool.run(&|worker| {
                // SAFETY: every thread of the run prepares, waits at the barrier and multiplies.
                unsafe {
                    activations.prepare(worker, &input)?;
                    worker.barrier()?;
                    let products = [0, 1].map(|e| Matmul {
                        layout: &layout,
                        packed: &packed[e],
                        output: &outputs[e],
                        first_row: 48 * e,
                    });
                    multiply(worker, &activations, &products)
                }
            })
            .unwrap();
            for e in 0..2 {
                let w = values(dtype, &experts[e], n * k);
                for &t in &lists[e] {
                    let t = t as usize;
                    let want = exact(&w, &wide[t * k..(t + 1) * k], n, k);
                    let error = normalised_error(&out[t * n..(t + 1) * n], &want);
                    assert!(error < 2e-4, "{dtype} {isa} token {t}: {error:e}");
                }
            }
        }
    }
}

#[test]
fn shape_mismatches_are_errors() {
    assert!(matches!(PackedLayout::new(DType::I32, 4, 4), Err(KernelError::Type { .. })));
    assert!(matches!(PackedLayout::new(DType::Q4_K, 4, 300), Err(KernelError::Blocks { .. })));
    assert!(matches!(PackedLayout::new(DType::F32, usize::MAX, 4), Err(KernelError::TooLarge { .. })));
    let layout = PackedLayout::new(DType::F32, 4, 8).unwrap();
    assert!(matches!(layout.pack(&[0; 100], &mut [0; 512]), Err(KernelError::Short { .. })));
    let x = [0.0; 16];
    assert!(Input::f32(&x, 2, 9, 9).is_err());
    assert!(Input::f32(&x, 2, 8, 8).unwrap().gather(&[2]).is_err());
    let mut y = [0.0; 8];
    assert!(Output::new(&mut y, 2, 4, 3).is_err());
    assert!(Output::new(&mut y, 2, 4, 4).unwrap().scatter(&[0, 5]).is_err());
    let pool = Pool::new(1).unwrap();
    let mut work = vec![0; Activations::work_bytes(Isa::Scalar, DType::F32, 2, 9, 1).unwrap()];
    let activations = Activations::new(Isa::Scalar, DType::F32, 2, 9, 1, &mut work).unwrap();
    let mut y = [0.0; 8];
    let output = Output::new(&mut y, 2, 4, 4).unwrap();
    let packed = vec![0; layout.bytes()];
    let result = pool.run(&|worker| {
        // SAFETY: every thread of the run prepares, waits at the barrier and multiplies.
        unsafe {
            multiply(
                worker,
                &activations,
                &[Matmul { layout: &layout, packed: &packed, output: &output, first_row: 0 }],
            )
        }
    });
    assert!(matches!(result, Err(KernelError::Differ { .. })));
}

#[test]
fn activations_in_the_format_of_other_weights_are_an_error() {
    let pool = Pool::new(1).unwrap();
    let (n, k) = (16, 256);
    let x = vec![1.0; k];
    for isa in Isa::available() {
        for (prepared, multiplied) in [(DType::Q4_0, DType::Q4_K), (DType::Q2_K, DType::Q8_0)] {
            let layout = PackedLayout::new(multiplied, n, k).unwrap();
            let packed = vec![0; layout.bytes()];
            let mut y = vec![1.0; n];
            let input = Input::f32(&x, 1, k, k).unwrap();
            let output = Output::new(&mut y, 1, n, n).unwrap();
            let mut work = vec![0; Activations::work_bytes(isa, prepared, 1, k, 1).unwrap()];
            let activations = Activations::new(isa, prepared, 1, k, 1, &mut work).unwrap();
            let result = pool.run(&|worker| {
                // SAFETY: every thread of the run prepares, waits at the barrier and multiplies.
                unsafe {
                    activations.prepare(worker, &input)?;
                    worker.barrier()?;
                    let product = Matmul { layout: &layout, packed: &packed, output: &output, first_row: 0 };
                    multiply(worker, &activations, &[product])
                }
            });
            let same =
                ActivationFormat::choose(isa, prepared, 1) == ActivationFormat::choose(isa, multiplied, 1);
            assert_eq!(result.is_ok(), same, "{isa}: {prepared} and {multiplied}");
            assert_eq!(y == vec![0.0; n], same, "{isa}: nothing is written on error");
        }
    }
}

#[test]
fn one_row_out_of_several_prepared_ones() {
    let mut rng = Rng::new(13);
    let pool = Pool::new(1).unwrap();
    let (n, k, m) = (20, 64, 29);
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q4_0] {
        let file = random_weights(&mut rng, dtype, n, k);
        let x = random_rows(&mut rng, m * k);
        let layout = PackedLayout::new(dtype, n, k).unwrap();
        let mut packed = vec![0; layout.bytes()];
        layout.pack(&file, &mut packed).unwrap();
        let want = exact(&values(dtype, &file, n * k), &x, n, k);
        for isa in Isa::available() {
            let step = ActivationFormat::choose(isa, dtype, m).unwrap().row_granularity();
            let mut work = vec![0; Activations::work_bytes(isa, dtype, m, k, 1).unwrap()];
            let activations = Activations::new(isa, dtype, m, k, 1, &mut work).unwrap();
            for first_row in (0..m).step_by(step) {
                let mut y = vec![0.0; n];
                let input = Input::f32(&x, m, k, k).unwrap();
                let output = Output::new(&mut y, 1, n, n).unwrap();
                pool.run(&|worker| {
                    // SAFETY: one thread prepares and then multiplies.
                    unsafe {
                        activations.prepare(worker, &input)?;
                        let matmul = Matmul { layout: &layout, packed: &packed, output: &output, first_row };
                        multiply(worker, &activations, &[matmul])
                    }
                })
                .unwrap();
                let error = normalised_error(&y, &want[first_row * n..(first_row + 1) * n]);
                assert!(error < 1e-4, "{dtype} {isa} row {first_row}: error {error:e}");
            }
        }
    }
}
