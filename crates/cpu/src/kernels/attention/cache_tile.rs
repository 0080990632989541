//! Tiles of keys and values in the KV cache, and the kernels for their types: in place, or widened to f32 first.

use quadriga_graph::DType;

#[cfg(target_arch = "x86_64")]
use super::decode_avx512::{self, PrefetchLines};
use super::slot_tile::{self, Bf16, F16, F32, Q8Slots, SlotTile, TILE};
use super::unit_extent::UnitExtent;
use super::{Attention, AttentionPlan, HeadRows};
use crate::kernels::vec::load_elements;
use crate::kernels::vec::simd::Simd;

/// How many slots ahead keys and values are prefetched.
pub(super) const PREFETCH_DISTANCE: usize = TILE;

/// The two halves of the KV cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CacheSide {
    Keys,
    Values,
}

impl CacheSide {
    /// Its rows, their type and their width.
    pub(super) fn rows<'a>(self, attention: &'a Attention<'_>) -> (&'a HeadRows, DType, usize) {
        let (shape, memory) = (&attention.shape, &attention.memory);
        match self {
            CacheSide::Keys => (&memory.keys, shape.key_type, shape.key_width),
            CacheSide::Values => (&memory.values, shape.value_type, shape.value_width),
        }
    }

    /// Bytes of a row.
    fn row_bytes(self, attention: &Attention<'_>) -> usize {
        match self {
            CacheSide::Keys => attention.plan.key_bytes,
            CacheSide::Values => attention.plan.value_bytes,
        }
    }
}

/// A thread's memory for converted tiles.
#[derive(Clone, Copy)]
pub(super) struct TileScratch {
    /// [`columns_width`] rows of [`TILE`] floats.
    pub(super) columns: *mut f32,
    /// [`TILE`] rows of [`widened_width`] floats.
    pub(super) widened: *mut f32,
}

/// Whether rows of a type are read in place, not widened first, by a unit of few queries.
fn is_read_in_place(direct: bool, dtype: DType) -> bool {
    direct && matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::Q8_0)
}

/// Elements of a slot in the transposed tile.
pub(super) fn columns_width(plan: &AttentionPlan) -> usize {
    plan.key_pad
}

/// Elements of a slot in the widened tile.
pub(super) fn widened_width(plan: &AttentionPlan) -> usize {
    plan.key_pad.max(plan.value_pad)
}

/// A tile of keys or values of one head, where they are in the cache.
pub(super) struct CacheTile {
    dtype: DType,
    /// Whether it is read as it is.
    direct: bool,
    tile: SlotTile,
    #[cfg(target_arch = "x86_64")]
    far: PrefetchLines,
}

impl CacheTile {
    /// The tile of `count` slots from `slot` on, of one of the heads that a unit takes.
    #[inline(always)]
    pub(super) fn new(
        attention: &Attention<'_>,
        side: CacheSide,
        extent: &UnitExtent<'_>,
        head: usize,
        slot: usize,
        count: usize,
    ) -> CacheTile {
        let (from, dtype, width) = side.rows(attention);
        let bytes = side.row_bytes(attention);
        let heads = &extent.kv_heads;
        let first_row = attention.cache_row(extent.run.table, slot);
        // The next tile may be in another page.
        let next = slot + PREFETCH_DISTANCE;
        let next = if next < extent.run.slots.end {
            attention.cache_row(extent.run.table, next)
        } else {
            first_row + PREFETCH_DISTANCE
        };
        // All heads together prefetch the next tile sequentially, which the hardware prefetcher picks up.
        let adjacent = |rows: &HeadRows| rows.head_stride == bytes && rows.stride == bytes * heads.len();
        let together = adjacent(from);
        let dense = from.row(next, heads.start).wrapping_add((head - heads.start) * TILE * bytes);
        let row = from.row(next, head);
        let tile = SlotTile {
            first: from.row(first_row, head),
            stride: from.stride,
            count,
            width,
            prefetch: if together { dense } else { row },
            prefetch_step: if together { bytes } else { from.stride },
            prefetch_bytes: bytes,
        };
        // Where the heads are adjacent in memory, they prefetch the next tile of keys and of values alternately: the first
        // half of both while keys are processed, the second half while values are. With two streams a core keeps more
        // requests in flight than with one.
        #[cfg(target_arch = "x86_64")]
        let far = if [CacheSide::Keys, CacheSide::Values]
            .into_iter()
            .all(|side| adjacent(side.rows(attention).0) && side.row_bytes(attention) == bytes)
        {
            let first = next + if side == CacheSide::Values { TILE / 2 } else { 0 };
            let skip = (head - heads.start) * TILE * (bytes / 2);
            let at = [&attention.memory.keys, &attention.memory.values]
                .map(|rows| rows.row(first, heads.start).wrapping_add(skip));
            PrefetchLines { at, step: bytes / 2 }
        } else {
            PrefetchLines { at: [row, row.wrapping_add(bytes / 2)], step: from.stride }
        };
        CacheTile {
            dtype,
            direct: extent.direct,
            tile,
            #[cfg(target_arch = "x86_64")]
            far,
        }
    }

    /// Whether decode_avx512.rs supports the tile.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn is_known<S: Simd>(&self) -> bool {
        S::REGISTERS >= 32 && self.direct && decode_avx512::is_supported(&self.tile)
    }

    /// Widens the rows to `pad` floats each, padded with zeros; returns them as a tile.
    ///
    /// # Safety
    /// As for [`scores`](CacheTile::scores).
    #[inline(always)]
    unsafe fn widen<S: Simd>(&self, pad: usize, to: *mut f32) -> SlotTile {
        let tile = self.tile;
        for i in 0..tile.count {
            // SAFETY: promised by the caller.
            unsafe {
                tile.prefetch_after::<S>(i);
                let out = to.add(i * pad);
                load_elements::<S>(self.dtype, tile.first.wrapping_add(i * tile.stride), out, tile.width);
                std::ptr::write_bytes(out.add(tile.width), 0, pad - tile.width);
            }
        }
        SlotTile {
            first: to.cast_const().cast(),
            stride: pad * 4,
            width: pad,
            prefetch: std::ptr::null(),
            prefetch_step: 0,
            prefetch_bytes: 0,
            ..tile
        }
    }

    /// Scores of `rows` queries with the keys of the tile.
    ///
    /// # Safety
    /// All of this memory must be valid; the CPU must have the instruction set of `S`.
    #[inline(always)]
    pub(super) unsafe fn scores<S: Simd>(
        &self,
        plan: &AttentionPlan,
        scratch: TileScratch,
        queries: *const f32,
        rows: usize,
        scores: *mut f32,
    ) {
        let (tile, pad) = (self.tile, plan.key_pad);
        // SAFETY: promised by the caller.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if self.is_known::<S>() {
                let (tile, far) = (&tile, self.far);
                match self.dtype {
                    DType::F16 => return decode_avx512::scores::<F16>(tile, far, queries, pad, rows, scores),
                    DType::BF16 => {
                        return decode_avx512::scores::<Bf16>(tile, far, queries, pad, rows, scores);
                    }
                    DType::Q8_0 => {
                        return decode_avx512::scores::<Q8Slots>(tile, far, queries, pad, rows, scores);
                    }
                    _ => {}
                }
            }
            match self.dtype {
                DType::F16 if self.direct => slot_tile::scores::<S, F16>(tile, queries, pad, rows, scores),
                DType::BF16 if self.direct => slot_tile::scores::<S, Bf16>(tile, queries, pad, rows, scores),
                DType::Q8_0 if self.direct => {
                    slot_tile::scores::<S, Q8Slots>(tile, queries, pad, rows, scores);
                }
                dtype if self.direct => {
                    let in_place = is_read_in_place(self.direct, dtype);
                    let tile = if in_place { tile } else { self.widen::<S>(pad, scratch.widened) };
                    slot_tile::scores::<S, F32>(tile, queries, pad, rows, scores);
                }
                _ => {
                    self.widen::<S>(pad, scratch.widened);
                    slot_tile::to_columns::<S>(scratch.widened, pad, scratch.columns);
                    slot_tile::column_scores::<S>(scratch.columns, queries, pad, rows, scores);
                }
            }
        }
    }

    /// Adds the values of the tile, weighted, to the sums of `rows` queries.
    ///
    /// # Safety
    /// As for [`scores`](CacheTile::scores).
    #[inline(always)]
    pub(super) unsafe fn gather<S: Simd>(
        &self,
        plan: &AttentionPlan,
        scratch: TileScratch,
        weights: *const f32,
        rows: usize,
        sums: *mut f32,
    ) {
        let (tile, pad) = (self.tile, plan.value_pad);
        // SAFETY: promised by the caller.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if self.is_known::<S>() {
                let (tile, far) = (&tile, self.far);
                match self.dtype {
                    DType::F16 => return decode_avx512::gather::<F16>(tile, far, weights, rows, sums, pad),
                    DType::BF16 => return decode_avx512::gather::<Bf16>(tile, far, weights, rows, sums, pad),
                    DType::Q8_0 => {
                        return decode_avx512::gather::<Q8Slots>(tile, far, weights, rows, sums, pad);
                    }
                    _ => {}
                }
            }
            match self.dtype {
                DType::F16 if self.direct => slot_tile::gather::<S, F16>(tile, weights, rows, sums, pad),
                DType::BF16 if self.direct => slot_tile::gather::<S, Bf16>(tile, weights, rows, sums, pad),
                DType::Q8_0 if self.direct => slot_tile::gather::<S, Q8Slots>(tile, weights, rows, sums, pad),
                dtype => {
                    let in_place = is_read_in_place(self.direct, dtype);
                    let tile = if in_place { tile } else { self.widen::<S>(pad, scratch.widened) };
                    slot_tile::gather::<S, F32>(tile, weights, rows, sums, pad);
                }
            }
        }
    }
}
