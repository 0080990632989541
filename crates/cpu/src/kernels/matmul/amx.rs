//! GEMM of `Bf16Tiles` activations with weights unpacked to bf16: AMX.
//!
//! ```text
//! C (16 rows × 16 weight rows, f32) += A (16 rows × 32 columns, bf16) · B (32 columns × 16 weight rows, bf16)
//!
//! tmm0 tmm1   two strips of 16 rows × two groups of 16 weight rows
//! tmm2 tmm3
//! tmm4 tmm5   A of the two strips
//! tmm6 tmm7   B of the two groups: byte row p holds columns 2p and 2p + 1 of the sixteen weight rows
//! ```
//!
//! The two groups are unpacked into a panel in scratch memory (36 KiB for 576 columns), which stays in the L2 cache
//! while all strips of rows pass by. BF16 weights are stored as tiles and need no panel.

use std::arch::asm;
use std::arch::x86_64::*;

use quadriga_graph::DType;

use super::Task;
use super::activations::{PANEL_COLUMNS, SCRATCH};
use super::avx512::Avx512Format;
use super::format::{BLOCK, GROUP, with_format};
use crate::isa::Amx;

const TILE: usize = 1024;
/// Tiles of one group that are unpacked at a time.
const PANEL_TILES: usize = PANEL_COLUMNS / BLOCK;

const _: () = assert!(2 * PANEL_TILES * TILE <= SCRATCH);

/// The memory that `ldtilecfg` reads: palette 1, eight tiles of 16 rows × 64 bytes.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIGURATION: Configuration = Configuration {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Runs a task.
pub(super) fn multiply(token: Amx, task: &Task<'_>) {
    // SAFETY: the token proves the instructions and the permission to use tiles; the task was checked by `multiply`.
    unsafe {
        configure(token);
        match task.layout.dtype() {
            DType::BF16 => tiles_in_place(task),
            DType::F16 => {
                unpacked(task, |group, first, count, out| half_panel(task, group, first, count, out))
            }
            dtype => with_format!(dtype, F => quantized::<F>(task), else {}),
        }
        release(token);
    }
}

/// Configures this thread's tile registers: eight tiles of 16 rows × 64 bytes.
pub(crate) fn configure(_token: Amx) {
    // SAFETY: the token proves that the instruction exists and that the process may use it.
    unsafe { asm!("ldtilecfg [{0}]", in(reg) &raw const CONFIGURATION, options(nostack, readonly)) };
}

/// Releases the tile registers, so that the system need not save them.
pub(crate) fn release(_token: Amx) {
    // SAFETY: the token proves that the instruction exists.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,gfni,f16c")]
unsafe fn quantized<F: Avx512Format>(task: &Task<'_>) {
    // SAFETY: promised by the caller.
    unsafe {
        unpacked(task, |group, first, count, out| quantized_panel::<F>(task, group, first, count, out));
    }
}

/// Goes through the groups by twos, unpacking them with `unpack(group, first tile, tiles, destination)`: some columns of
/// all groups before the next columns, so that these columns of the activations stay in the L2 cache.
unsafe fn unpacked(task: &Task<'_>, unpack: impl Fn(usize, usize, usize, *mut u8)) {
    let tiles = task.layout.columns().div_ceil(BLOCK);
    let panel_tiles = tiles.div_ceil(tiles.div_ceil(PANEL_TILES).max(1)).max(1);
    for first in (0..tiles).step_by(panel_tiles) {
        let count = panel_tiles.min(tiles - first);
        for group in task.groups.clone().step_by(2) {
            let pair = group + 1 < task.groups.end;
            let panel = [task.scratch, task.scratch.wrapping_add(count * TILE)];
            unpack(group, first, count, panel[0]);
            if pair {
                unpack(group + 1, first, count, panel[1]);
            }
            // SAFETY: the panels hold `count` tiles each.
            unsafe { strips(task, group, pair, panel.map(<*mut u8>::cast_const), first, count) };
        }
    }
}

/// BF16 weights are tiles already.
unsafe fn tiles_in_place(task: &Task<'_>) {
    let tiles = task.layout.columns().div_ceil(BLOCK);
    for group in task.groups.clone().step_by(2) {
        let pair = group + 1 < task.groups.end;
        let next = if pair { group + 1 } else { group };
        let panel = [task.group(group).as_ptr(), task.group(next).as_ptr()];
        // SAFETY: a group holds all its tiles.
        unsafe { strips(task, group, pair, panel, 0, tiles) };
    }
}

/// All strips of rows × one or two groups × `count` tiles.
unsafe fn strips(
    task: &Task<'_>,
    group: usize,
    pair: bool,
    panel: [*const u8; 2],
    first: usize,
    count: usize,
) {
    let total = task.rows.div_ceil(GROUP);
    let first_strip = task.first_row / GROUP;
    for strip in (0..total).step_by(2) {
        let two = strip + 1 < total;
        let a = task.activations.bf16_tiles(first_strip + strip).wrapping_add(first * TILE).cast_const();
        let next = task.activations.bf16_tiles(first_strip + strip + usize::from(two));
        let next = next.wrapping_add(first * TILE).cast_const();
        // SAFETY: strips and panels hold `count` tiles from here on.
        unsafe {
            if first == 0 {
                zero();
            } else {
                load::<0>(task, strip, group);
                if pair {
                    load::<1>(task, strip, group + 1);
                }
                if two {
                    load::<2>(task, strip + 1, group);
                    if pair {
                        load::<3>(task, strip + 1, group + 1);
                    }
                }
            }
            match (two, pair) {
                (true, true) => tile_2x2_more([a, next], panel, count),
                (true, false) => tile_2x1_more([a, next], panel[0], count),
                (false, true) => tile_1x2_more(a, panel, count),
                (false, false) => tile_1x1_more(a, panel[0], count),
            }
            store::<0>(task, strip, group);
            if pair {
                store::<1>(task, strip, group + 1);
            }
            if two {
                store::<2>(task, strip + 1, group);
                if pair {
                    store::<3>(task, strip + 1, group + 1);
                }
            }
        }
    }
}

/// Sets tmm0 to tmm3 to zero.
///
/// # Safety
/// Tiles are configured.
unsafe fn zero() {
    // SAFETY: promised by the caller. No other code of the process keeps state in tile registers.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
    }
}

macro_rules! tile_loop {
    ([$($line:literal),*], $($name:ident = $value:expr),* ; $count:expr) => {
        asm!(
            "2:",
            $($line,)*
            "dec {count}",
            "jnz 2b",
            $($name = inout(reg) $value => _,)*
            count = inout(reg) $count => _,
            stride = in(reg) 64_usize,
            options(nostack, readonly)
        )
    };
}

/// Two strips of A × two groups of B, into tmm0 to tmm3.
///
/// # Safety
/// Tiles are configured; each pointer has `count > 0` tiles.
pub(crate) unsafe fn tile_2x2(a: [*const u8; 2], b: [*const u8; 2], count: usize) {
    // SAFETY: promised by the caller.
    unsafe {
        zero();
        tile_2x2_more(a, b, count);
    }
}

/// As [`tile_2x2`], but accumulates into tmm0 to tmm3.
///
/// # Safety
/// As [`tile_2x2`].
pub(crate) unsafe fn tile_2x2_more(a: [*const u8; 2], b: [*const u8; 2], count: usize) {
    // SAFETY: promised by the caller. No other code of the process keeps state in tile registers.
    unsafe {
        tile_loop!(
            [
                "tileloadd tmm6, [{b0} + {stride}*1]",
                "tileloadd tmm4, [{a0} + {stride}*1]",
                "tileloadd tmm7, [{b1} + {stride}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a1} + {stride}*1]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {a0}, 1024",
                "add {b0}, 1024",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "add {a1}, 1024",
                "add {b1}, 1024",
                "tdpbf16ps tmm3, tmm5, tmm7"
            ],
            a0 = a[0], a1 = a[1], b0 = b[0], b1 = b[1]; count
        );
    }
}

/// # Safety
/// As [`tile_2x2`].
unsafe fn tile_2x1_more(a: [*const u8; 2], b: *const u8, count: usize) {
    // SAFETY: as in `tile_2x2`.
    unsafe {
        tile_loop!(
            [
                "tileloadd tmm6, [{b0} + {stride}*1]",
                "tileloadd tmm4, [{a0} + {stride}*1]",
                "tileloadd tmm5, [{a1} + {stride}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "add {a0}, 1024",
                "add {a1}, 1024",
                "add {b0}, 1024"
            ],
            a0 = a[0], a1 = a[1], b0 = b; count
        );
    }
}

/// # Safety
/// As [`tile_2x2`].
unsafe fn tile_1x2_more(a: *const u8, b: [*const u8; 2], count: usize) {
    // SAFETY: as in `tile_2x2`.
    unsafe {
        tile_loop!(
            [
                "tileloadd tmm4, [{a0} + {stride}*1]",
                "tileloadd tmm6, [{b0} + {stride}*1]",
                "tileloadd tmm7, [{b1} + {stride}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {a0}, 1024",
                "add {b0}, 1024",
                "add {b1}, 1024"
            ],
            a0 = a, b0 = b[0], b1 = b[1]; count
        );
    }
}

/// # Safety
/// As [`tile_2x2`].
unsafe fn tile_1x1_more(a: *const u8, b: *const u8, count: usize) {
    // SAFETY: as in `tile_2x2`.
    unsafe {
        tile_loop!(
            [
                "tileloadd tmm4, [{a0} + {stride}*1]",
                "tileloadd tmm6, [{b0} + {stride}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "add {a0}, 1024",
                "add {b0}, 1024"
            ],
            a0 = a, b0 = b; count
        );
    }
}

/// # Safety
/// Tiles are configured; sixteen rows of 64 bytes, `stride` apart, are writable at the address.
unsafe fn tile_store<const TILE_REGISTER: usize>(out: *mut f32, stride: usize) {
    // SAFETY: promised by the caller.
    unsafe {
        match TILE_REGISTER {
            0 => asm!("tilestored [{0} + {1}*1], tmm0", in(reg) out, in(reg) stride, options(nostack)),
            1 => asm!("tilestored [{0} + {1}*1], tmm1", in(reg) out, in(reg) stride, options(nostack)),
            2 => asm!("tilestored [{0} + {1}*1], tmm2", in(reg) out, in(reg) stride, options(nostack)),
            _ => asm!("tilestored [{0} + {1}*1], tmm3", in(reg) out, in(reg) stride, options(nostack)),
        }
    }
}

/// Loads tmm0 to tmm3 from 32 rows of 32 numbers, `stride` numbers apart.
///
/// # Safety
/// Tiles are configured; the rows are readable.
pub(crate) unsafe fn load_2x2(from: *const f32, stride: usize) {
    // SAFETY: promised by the caller.
    unsafe {
        asm!(
            "tileloadd tmm0, [{a} + {stride}*1]",
            "tileloadd tmm1, [{a} + {stride}*1 + 64]",
            "tileloadd tmm2, [{b} + {stride}*1]",
            "tileloadd tmm3, [{b} + {stride}*1 + 64]",
            a = in(reg) from, b = in(reg) from.add(16 * stride), stride = in(reg) stride * 4,
            options(nostack, readonly)
        );
    }
}

/// Stores tmm0 to tmm3 as 32 rows of 32 numbers, `stride` numbers apart.
///
/// # Safety
/// Tiles are configured; the rows are writable.
pub(crate) unsafe fn store_2x2(to: *mut f32, stride: usize) {
    // SAFETY: promised by the caller.
    unsafe {
        tile_store::<0>(to, stride * 4);
        tile_store::<1>(to.add(16), stride * 4);
        tile_store::<2>(to.add(16 * stride), stride * 4);
        tile_store::<3>(to.add(16 * stride + 16), stride * 4);
    }
}

/// # Safety
/// Tiles are configured; sixteen rows of 64 bytes, `stride` apart, are readable at the address.
unsafe fn tile_load<const TILE_REGISTER: usize>(from: *const f32, stride: usize) {
    // SAFETY: promised by the caller.
    unsafe {
        match TILE_REGISTER {
            0 => {
                asm!("tileloadd tmm0, [{0} + {1}*1]", in(reg) from, in(reg) stride, options(nostack, readonly))
            }
            1 => {
                asm!("tileloadd tmm1, [{0} + {1}*1]", in(reg) from, in(reg) stride, options(nostack, readonly))
            }
            2 => {
                asm!("tileloadd tmm2, [{0} + {1}*1]", in(reg) from, in(reg) stride, options(nostack, readonly))
            }
            _ => {
                asm!("tileloadd tmm3, [{0} + {1}*1]", in(reg) from, in(reg) stride, options(nostack, readonly))
            }
        }
    }
}

/// The output of one tile and the distance of its rows in bytes, if the tile is whole and its rows are not scattered.
fn whole_tile(task: &Task<'_>, strip: usize, group: usize) -> Option<(*mut f32, usize)> {
    let (row, column) = (strip * GROUP, group * GROUP);
    let is_whole = row + GROUP <= task.rows && column + GROUP <= task.layout.rows();
    let stride = task.output.plain_stride().filter(|_| is_whole)?;
    Some((task.output.row(row)?.wrapping_add(column), stride * 4))
}

/// Calls `each(output row, sums of its columns)` for the rows of a tile that are not whole.
fn partial_rows<'a>(
    task: &Task<'_>,
    strip: usize,
    group: usize,
    sums: &'a mut [[f32; GROUP]; GROUP],
    each: impl Fn(*mut f32, &'a mut [f32]),
) {
    let (row, column) = (strip * GROUP, group * GROUP);
    let (rows, columns) = (GROUP.min(task.rows - row), GROUP.min(task.layout.rows() - column));
    for (lane, sums) in sums.iter_mut().take(rows).enumerate() {
        if let (Some(out), Some(sums)) = (task.output.row(row + lane), sums.get_mut(..columns)) {
            each(out.wrapping_add(column), sums);
        }
    }
}

/// Loads one tile of sums from the output, to add to them.
unsafe fn load<const TILE_REGISTER: usize>(task: &Task<'_>, strip: usize, group: usize) {
    if let Some((out, stride)) = whole_tile(task, strip, group) {
        // SAFETY: sixteen whole rows of the output are there, a stride apart.
        unsafe { tile_load::<TILE_REGISTER>(out, stride) };
        return;
    }
    let mut sums = [[0.0_f32; GROUP]; GROUP];
    partial_rows(task, strip, group, &mut sums, |out, sums| {
        // SAFETY: the columns are below the rows of the weights.
        unsafe { sums.as_mut_ptr().copy_from_nonoverlapping(out, sums.len()) };
    });
    // SAFETY: the array is a whole tile.
    unsafe { tile_load::<TILE_REGISTER>(sums.as_ptr().cast(), 64) };
}

/// Writes one tile of sums: directly to the output where it is whole, else row by row.
unsafe fn store<const TILE_REGISTER: usize>(task: &Task<'_>, strip: usize, group: usize) {
    if let Some((out, stride)) = whole_tile(task, strip, group) {
        // SAFETY: sixteen whole rows of the output are there, a stride apart.
        unsafe { tile_store::<TILE_REGISTER>(out, stride) };
        return;
    }
    let mut sums = [[0.0_f32; GROUP]; GROUP];
    // SAFETY: the array is a whole tile.
    unsafe { tile_store::<TILE_REGISTER>(sums.as_mut_ptr().cast(), 64) };
    partial_rows(task, strip, group, &mut sums, |out, sums| {
        // SAFETY: the columns are below the rows of the weights.
        unsafe { out.copy_from_nonoverlapping(sums.as_ptr(), sums.len()) };
    });
}

/// The permutation that interleaves sixteen even and sixteen odd columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn pair_order() -> __m512i {
    let low: [i16; 32] = std::array::from_fn(|i| (i / 2 + 16 * (i % 2)) as i16);
    // SAFETY: an array of 64 bytes.
    unsafe { _mm512_loadu_si512(low.as_ptr().cast()) }
}

/// Unpacks `count` blocks of a group, from block `first`, to bf16 tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,gfni,f16c")]
unsafe fn quantized_panel<F: Avx512Format>(
    task: &Task<'_>,
    group: usize,
    first: usize,
    count: usize,
    out: *mut u8,
) {
    let packed = task.group(group).as_ptr();
    let order = pair_order();
    let byte = _mm512_set1_epi32(255);
    for i in 0..count {
        let (superblock, block) = ((first + i) / F::BLOCKS, (first + i) % F::BLOCKS);
        // SAFETY: the superblock is inside the group; the panel has room for `count` tiles.
        unsafe {
            let superblock = packed.add(superblock * F::BYTES);
            let (quants, affine) = (F::quants(superblock, block), F::scales(superblock, block));
            let tile = out.add(i * TILE).cast::<__m512i>();
            for (v, q) in quants.into_iter().enumerate() {
                let half = v / 4;
                let (d, m) = if half == 0 { (affine.d[0], affine.m[0]) } else { (affine.d[1], affine.m[1]) };
                let value = |q: __m512i| _mm512_fmadd_ps(_mm512_cvtepi32_ps(q), d, m);
                let c0 = value(_mm512_and_si512(q, byte));
                let c1 = value(_mm512_and_si512(_mm512_srli_epi32::<8>(q), byte));
                let c2 = value(_mm512_and_si512(_mm512_srli_epi32::<16>(q), byte));
                let c3 = value(_mm512_srli_epi32::<24>(q));
                let pair = |even, odd| {
                    let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(odd, even));
                    _mm512_permutexvar_epi16(order, both)
                };
                _mm512_storeu_si512(tile.add(2 * v), pair(c0, c1));
                _mm512_storeu_si512(tile.add(2 * v + 1), pair(c2, c3));
            }
        }
    }
}

/// Converts f16 columns of a group, `count` times 32 from tile `first`, to bf16 tiles; zeros past the last column.
unsafe fn half_panel(task: &Task<'_>, group: usize, first: usize, count: usize, out: *mut u8) {
    // SAFETY: promised by the caller.
    unsafe { half_panel_inner(task, group, first, count, out) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,gfni,f16c")]
unsafe fn half_panel_inner(task: &Task<'_>, group: usize, first: usize, count: usize, out: *mut u8) {
    let packed = task.group(group).as_ptr();
    let order = pair_order();
    let columns = task.layout.columns();
    for pair in 0..count * BLOCK / 2 {
        let column = first * BLOCK + 2 * pair;
        // SAFETY: columns below the last are inside the group; the panel has room for `count` tiles.
        unsafe {
            let load = |column: usize| {
                if column < columns {
                    _mm512_cvtph_ps(_mm256_loadu_si256(packed.add(column * 2 * GROUP).cast()))
                } else {
                    _mm512_setzero_ps()
                }
            };
            let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(load(column + 1), load(column)));
            _mm512_storeu_si512(out.add(pair * 64).cast(), _mm512_permutexvar_epi16(order, both));
        }
    }
}
