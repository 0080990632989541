//! Speed of the kernels: matmul and attention, in GB/s and GFLOP/s, beside a plain read of the same memory.
//!
//! `cargo bench -p quadriga-cpu --bench products -- [gemv|cached-gemv|gemm|rows|f32|attention|pack] [threads] [isa]
//! [rows, case or type]`
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a benchmark")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use quadriga_cpu::internals::kernels::attention::{Attention, AttentionMemory, AttentionShape, HeadRows};
use quadriga_cpu::internals::kernels::matmul::{Activations, Input, Matmul, Output, PackedLayout, multiply};
use quadriga_cpu::internals::kernels::{KernelError, vec};
use quadriga_cpu::internals::pool::Pool;
use quadriga_cpu::isa::Isa;
use quadriga_graph::DType;

/// With one thread, its own CPU time is measured, which leaves out the time of other programs.
static ONE_THREAD: AtomicBool = AtomicBool::new(false);

fn thread_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes the time that it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Seconds of the fastest run, after a warm-up: the speed when nothing else runs. At least `runs`, and as many as fit
/// half a second: on a shared machine only some are undisturbed.
fn best(runs: usize, mut body: impl FnMut()) -> f64 {
    let [least] = best_of(runs, [&mut body]);
    least
}

/// As [`best`], of several that alternate, so that all of them are measured under the same conditions.
fn best_of<const N: usize>(runs: usize, mut bodies: [&mut dyn FnMut(); N]) -> [f64; N] {
    bodies.iter_mut().for_each(|body| body());
    let begin = Instant::now();
    let (mut count, mut least) = (0, [f64::INFINITY; N]);
    while count < runs || begin.elapsed().as_secs_f64() < 0.5 * N as f64 {
        for (body, least) in bodies.iter_mut().zip(&mut least) {
            let (start, busy) = (Instant::now(), thread_seconds());
            body();
            let one = ONE_THREAD.load(Ordering::Relaxed);
            *least = least.min(if one { thread_seconds() - busy } else { start.elapsed().as_secs_f64() });
        }
        count += 1;
    }
    least
}

/// Bytes in huge pages, as the backend's buffers are.
fn huge_pages(bytes: usize) -> Vec<u8> {
    let mut memory = Vec::<u8>::with_capacity(bytes);
    let first = memory.as_ptr().align_offset(1 << 21);
    if first + (1 << 21) <= bytes {
        // SAFETY: advice about pages inside the block.
        unsafe { libc::madvise(memory.as_mut_ptr().add(first).cast(), bytes - first, libc::MADV_HUGEPAGE) };
    }
    memory.resize(bytes, 0x33);
    memory
}

/// Reads memory front to back on all threads: the bandwidth that a GEMV can reach.
fn read(pool: &Pool, isa: Isa, floats: &[f32]) {
    let pieces: Vec<&[f32]> = floats.chunks(1 << 18).collect();
    let total = std::sync::Mutex::new(0.0);
    pool.run(&|worker| {
        let mut sum = 0.0;
        worker.chunks(pieces.len(), |i| sum += vec::sum(isa, pieces[i]));
        *total.lock().unwrap() += sum;
        Ok::<(), KernelError>(())
    })
    .unwrap();
}

/// Seconds of a matmul of `m` rows.
fn matmul(pool: &Pool, isa: Isa, layout: &PackedLayout, packed: &[u8], m: usize, runs: usize) -> f64 {
    with_matmul(pool, isa, layout, packed, m, |run| best(runs, run))
}

/// Passes a matmul of `m` rows to `time`.
fn with_matmul<R>(
    pool: &Pool,
    isa: Isa,
    layout: &PackedLayout,
    packed: &[u8],
    m: usize,
    time: impl FnOnce(&mut dyn FnMut()) -> R,
) -> R {
    let (n, k) = (layout.rows(), layout.columns());
    let x: Vec<f32> = (0..m * k).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
    let mut y = vec![0.0; m * n];
    let input = Input::f32(&x, m, k, k).unwrap();
    let output = Output::new(&mut y, m, n, n).unwrap();
    let threads = pool.threads();
    let mut work = vec![0; Activations::work_bytes(isa, layout.dtype(), m, k, threads).unwrap()];
    let activations = Activations::new(isa, layout.dtype(), m, k, threads, &mut work).unwrap();
    time(&mut || {
        pool.run(&|worker| {
            // SAFETY: every thread of the run prepares, waits at the barrier and multiplies.
            unsafe {
                activations.prepare(worker, &input)?;
                worker.barrier()?;
                multiply(worker, &activations, &[Matmul { layout, packed, output: &output, first_row: 0 }])
            }
        })
        .unwrap();
    })
}

/// Every type of weights but F32.
fn types() -> impl Iterator<Item = DType> {
    DType::all().filter(|dtype| dtype.is_computable() && *dtype != DType::F32)
}

fn gemv(pool: &Pool, isa: Isa) {
    let bytes = 600 << 20;
    // Aligned, and in huge pages if the system has them, as the backend holds weights. The plain read is of the same
    // memory.
    let mut memory = vec![0_u8; bytes + (4 << 20)];
    let start = memory.as_ptr().align_offset(2 << 20);
    let memory = &mut memory[start..start + bytes];
    // SAFETY: advice on memory that is ours.
    unsafe { libc::madvise(memory.as_mut_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
    memory.fill(0x33);
    let memory = &*memory;
    let floats: &[f32] = bytemuck::cast_slice(memory);
    println!("GEMV, weights of {} MiB (larger than the last-level cache), {isa}:", bytes >> 20);
    for dtype in types() {
        let k = 4096;
        let n = bytes / dtype.row_bytes(k).unwrap() / 16 * 16;
        let layout = PackedLayout::new(dtype, n, k).unwrap();
        let packed = &memory[..layout.bytes()];
        let [plain, seconds] = with_matmul(pool, isa, &layout, packed, 1, |run| {
            best_of(10, [&mut || read(pool, isa, floats), run])
        });
        let plain = bytes as f64 / plain / 1e9;
        let speed = layout.bytes() as f64 / seconds / 1e9;
        println!(
            "  {dtype:<7} {speed:6.2} GB/s = {:5.1} % of a plain read ({plain:.2})",
            speed / plain * 100.0
        );
    }
}

/// Cycles of one thread for 16 rows × 32 columns of weights in the L2 cache: the cost of computing when memory is no
/// bottleneck. A dependency chain of multiplications measures the length of a cycle.
fn cached_gemv(isa: Isa, only: Option<&str>) {
    let pool = Pool::new(1).unwrap();
    let (n, k) = (512, 4096);
    println!("GEMV, one thread, weights in the L2 cache, {isa}:");
    for dtype in types().filter(|dtype| only.is_none_or(|name| dtype.to_string() == name)) {
        let n = if dtype.is_quantized() { n } else { n / 4 };
        let layout = PackedLayout::new(dtype, n, k).unwrap();
        let packed = huge_pages(layout.bytes() + 64);
        let packed = &packed[packed.as_ptr().align_offset(64)..][..layout.bytes()];
        let steps = 20_000_u64;
        let mut multiplications = || {
            let mut sum = std::hint::black_box(0_u64);
            for _ in 0..steps {
                // SAFETY: multiplies a register, in three cycles.
                unsafe { std::arch::asm!("imul {0}, {0}", inout(reg) sum) };
            }
            std::hint::black_box(sum);
        };
        let [cycles, seconds] =
            with_matmul(&pool, isa, &layout, packed, 1, |run| best_of(50, [&mut multiplications, run]));
        let cycle = cycles / (3 * steps) as f64;
        let blocks = (n / 16 * k / 32) as f64;
        println!(
            "  {dtype:<7} {:6.1} cycles for {:3.0} bytes, {:5.3} a byte; {:6.2} GB/s at {:.2} GHz",
            seconds / cycle / blocks,
            layout.bytes() as f64 / blocks,
            seconds / cycle / layout.bytes() as f64,
            layout.bytes() as f64 / seconds / 1e9,
            1e-9 / cycle
        );
    }
}

fn gemm(pool: &Pool, isa: Isa, rows: Option<usize>) {
    for m in [512, 64, 16, 8, 4, 2, 1].into_iter().filter(|m| rows.is_none_or(|rows| rows == *m)) {
        println!("{m} rows, {isa}:");
        for (dtype, n, k) in [
            (DType::Q4_1, 576, 576),
            (DType::Q4_1, 3072, 576),
            (DType::Q4_1, 576, 1536),
            (DType::Q8_0, 4096, 576),
            (DType::Q4_K, 1024, 4096),
            (DType::F16, 1024, 2048),
        ] {
            let layout = PackedLayout::new(dtype, n, k).unwrap();
            let packed = vec![0x33_u8; layout.bytes()];
            let seconds = matmul(pool, isa, &layout, &packed, m, 15);
            let work = 2.0 * (n * k * m) as f64;
            let (gflops, speed) = (work / seconds / 1e9, layout.bytes() as f64 / seconds / 1e9);
            println!(
                "  {dtype:<5} {n:>5} × {k:<4} {:9.1} µs {gflops:8.1} GFLOP/s {speed:6.2} GB/s",
                seconds * 1e6
            );
        }
    }
}

/// How the time of a matmul grows with the rows of activations: few rows should cost hardly more than one.
fn rows(pool: &Pool, isa: Isa, only: Option<&str>) {
    const ROWS: [usize; 12] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];
    let (n, k) = (4096, 1536);
    println!("µs of a matmul with {n} × {k} weights, {isa}, rows {ROWS:?}:");
    for dtype in
        types().filter(|dtype| only.is_none_or(|names| names.split(',').any(|n| dtype.to_string() == n)))
    {
        let layout = PackedLayout::new(dtype, n, k).unwrap();
        let packed = huge_pages(layout.bytes() + 64);
        let packed = &packed[packed.as_ptr().align_offset(64)..][..layout.bytes()];
        let times = ROWS.map(|m| 1e6 * matmul(pool, isa, &layout, packed, m, 15));
        let line: Vec<String> = times.iter().map(|time| format!("{time:7.0}")).collect();
        println!("  {dtype:<7} {}", line.join(" "));
    }
}

fn f32_cube(pool: &Pool, isa: Isa) {
    let size = 1024;
    let layout = PackedLayout::new(DType::F32, size, size).unwrap();
    let packed = vec![0x33_u8; layout.bytes()];
    let seconds = matmul(pool, isa, &layout, &packed, size, 7);
    println!("f32 {size}³, {isa}: {:.1} GFLOP/s", 2.0 * (size as f64).powi(3) / seconds / 1e9);
}

fn attention(pool: &Pool, isa: Isa, only: Option<usize>) {
    // One layer stays in the cache; thirty read as much memory as a model does; a hundred and fifty are larger than the
    // last-level cache.
    let (half, byte) = (DType::F16, DType::Q8_0);
    for (tokens, slots, layers, dtype, runs) in [
        (1, 512, 1, half, 500),
        (1, 512, 1, byte, 500),
        (1, 512, 30, half, 50),
        (1, 4096, 30, half, 20),
        (1, 4096, 150, half, 5),
        (1, 4096, 150, byte, 5),
        (512, 512, 1, half, 20),
        (1, 4096, 150, DType::BF16, 5),
        (1, 4096, 150, DType::Q5_1, 5),
        (1, 4096, 150, DType::Q4_0, 5),
    ]
    .into_iter()
    .enumerate()
    .filter(|(i, _)| only.is_none_or(|only| only == *i))
    .map(|(_, case)| case)
    {
        let shape = AttentionShape {
            heads: 9,
            kv_heads: 3,
            tokens,
            slots,
            key_width: 64,
            value_width: 64,
            scale: 0.125,
            soft_cap: None,
            key_type: dtype,
            value_type: dtype,
        };
        let head = dtype.row_bytes(64).unwrap();
        let row = 3 * head;
        let cache = huge_pages(2 * layers * slots * row + 64);
        let cache = &cache[cache.as_ptr().align_offset(64)..][..2 * layers * slots * row];
        let q = vec![0.1_f32; tokens * 9 * 64];
        let mut out = vec![0.0_f32; tokens * 9 * 64];
        let spans: Vec<[i32; 2]> = (0..tokens).map(|t| [0, (slots - tokens + t + 1) as i32]).collect();
        let mut work = vec![0; Attention::work_bytes(isa, &shape, pool.threads()).unwrap()];
        let floats = 9 * 64 * 4;
        let mut run = || {
            for layer in 0..layers {
                let rows = |i: usize| HeadRows {
                    pointer: cache[(2 * layer + i) * slots * row..].as_ptr(),
                    stride: row,
                    head_stride: head,
                };
                let memory = AttentionMemory {
                    queries: HeadRows { pointer: q.as_ptr().cast(), stride: floats, head_stride: 256 },
                    keys: rows(0),
                    values: rows(1),
                    mask: None,
                    spans: Some(&spans),
                    pages: None,
                    sinks: None,
                    output: HeadRows { pointer: out.as_mut_ptr().cast(), stride: floats, head_stride: 256 },
                };
                // SAFETY: the rows are inside the vectors above; the work memory has the requested length.
                let attention =
                    unsafe { Attention::new(isa, shape, memory, pool.threads(), work.as_mut_ptr()) }.unwrap();
                // SAFETY: all workers of one run call it once.
                pool.run(&|worker| unsafe { attention.run(worker) }).unwrap();
            }
        };
        // SAFETY: any bits are numbers; the memory is aligned for them.
        let (_, all, _) = unsafe { cache.align_to::<f32>() };
        let [seconds, plain] = best_of(runs, [&mut run, &mut || read(pool, isa, all)]);
        let plain = cache.len() as f64 / plain / 1e9;
        let pairs: f64 = spans.iter().map(|s| f64::from(s[1])).sum();
        let (speed, work) = (cache.len() as f64 / seconds / 1e9, layers as f64 * 9.0 * pairs * 64.0 * 4.0);
        println!(
            "attention, {tokens:>3} tokens over {slots:>4} {dtype} slots, {layers:>3} layers: {:9.1} µs {speed:6.2} GB/s ({:3.0} % of a plain read's {plain:.2}) {:7.1} GFLOP/s",
            seconds * 1e6,
            speed / plain * 100.0,
            work / seconds / 1e9
        );
    }
}

fn pack(pool: &Pool) {
    for (dtype, n, k) in [(DType::Q4_1, 49152, 576), (DType::Q8_0, 49152, 576), (DType::Q4_K, 8192, 4096)] {
        let layout = PackedLayout::new(dtype, n, k).unwrap();
        let file = vec![0x33_u8; dtype.row_bytes(k).unwrap() * n];
        let mut packed = vec![0; layout.bytes()];
        let groups: Vec<_> =
            packed.chunks_exact_mut(layout.group_bytes()).map(std::sync::Mutex::new).collect();
        let seconds = best(5, || {
            pool.run(&|worker| {
                worker
                    .try_chunks(groups.len(), |i| layout.pack_group(i, &file, &mut groups[i].lock().unwrap()))
            })
            .unwrap();
        });
        println!("pack {dtype:<5} {:6.2} GB/s", file.len() as f64 / seconds / 1e9);
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let what = arguments.first().map_or("all", String::as_str);
    let threads = arguments.get(1).and_then(|t| t.parse().ok()).unwrap_or(2);
    let isa = arguments.get(2).map_or(Isa::detect(), |name| Isa::named(name).unwrap());
    let pool = Pool::new(threads).unwrap();
    ONE_THREAD.store(threads == 1, Ordering::Relaxed);
    println!("{threads} threads, {isa}");
    let wants = |name: &str| what == "all" || what == name;
    if wants("f32") {
        f32_cube(&Pool::new(1).unwrap(), isa);
    }
    if wants("gemm") {
        gemm(&pool, isa, arguments.get(3).and_then(|rows| rows.parse().ok()));
    }
    if wants("rows") {
        rows(&pool, isa, arguments.get(3).map(String::as_str));
    }
    if wants("attention") {
        attention(&pool, isa, arguments.get(3).and_then(|case| case.parse().ok()));
    }
    if wants("pack") {
        pack(&pool);
    }
    if wants("cached-gemv") {
        // Short runs: some of them are undisturbed, and the resolution of a thread's clock is too low for them.
        ONE_THREAD.store(false, Ordering::Relaxed);
        cached_gemv(isa, arguments.get(3).map(String::as_str));
        ONE_THREAD.store(threads == 1, Ordering::Relaxed);
    }
    if wants("gemv") {
        gemv(&pool, isa);
    }
}
