//! The gated delta rule of many tokens, in chunks: see `kernels/delta_chunks.cu`.

use std::ffi::CStr;

use quadriga_graph::{GatedDeltaRule, NodeId};
use quadriga_runtime::BackendError;

use super::lowering::Lowering;
use crate::kernels::KernelFile;
use crate::launch::{Argument, Launch, TensorArg};

/// Tokens of a chunk.
const CHUNK: usize = 64;
/// Columns of the state that a block takes.
const COLUMNS: usize = 32;
/// The fewest tokens for which chunks are faster than steps.
pub(super) const MIN_CHUNKED_TOKENS: usize = 128;
/// The compute capability that the kernels need.
const MMA_COMPUTE_CAPABILITY: (i32, i32) = (8, 0);

#[repr(C)]
#[derive(Clone, Copy)]
struct DeltaChunks {
    inputs: [TensorArg; 6],
    out: u64,
    scale: f32,
    tiled: i32,
    delta: i32,
    chunks: i32,
    rows: u64,
    pairs: u64,
    decays: u64,
}

// SAFETY: `struct DeltaChunks` of delta_chunks.cu has the same fields in the same order, the inputs one by one.
unsafe impl Argument for DeltaChunks {}

/// The kernels for keys of up to `depth` elements.
struct ChunkKernels {
    depth: usize,
    pairs: &'static CStr,
    states: &'static CStr,
}

const KERNELS: [ChunkKernels; 2] = [
    ChunkKernels { depth: 64, pairs: c"k_delta_pairs_64", states: c"k_delta_states_64" },
    ChunkKernels { depth: 128, pairs: c"k_delta_pairs_128", states: c"k_delta_states_128" },
];

impl ChunkKernels {
    fn of(depth: usize) -> Option<&'static ChunkKernels> {
        KERNELS.iter().find(|kernels| depth <= kernels.depth)
    }

    /// Bytes of a tile in shared memory.
    fn tile(rows: usize, columns: usize) -> usize {
        rows * (2 * columns + 16)
    }

    /// Dynamic shared memory of the first kernel: keys and queries, each as two tiles; then three matrices of pairs.
    fn pairs_shared_bytes(&self) -> u32 {
        (4 * Self::tile(CHUNK, self.depth)).max(3 * CHUNK * (CHUNK + 1) * 4) as u32
    }

    /// Dynamic shared memory of the second kernel: keys of two chunks, queries, two matrices of pairs, the state, and three
    /// times its columns of a chunk, each as two tiles.
    fn states_shared_bytes(&self) -> u32 {
        let tiles =
            [(3, CHUNK, self.depth), (2, CHUNK, CHUNK), (1, self.depth, COLUMNS), (3, CHUNK, COLUMNS)];
        tiles.iter().map(|(count, rows, columns)| 2 * count * Self::tile(*rows, *columns)).sum::<usize>()
            as u32
    }
}

/// Scratch memory for so many tokens, keys `[key_heads, depth]` and heads of values: rows, pairs and decays of the chunks.
/// `None` if they are not computed in chunks.
pub(super) fn chunk_bytes(tokens: usize, key_heads: usize, depth: usize, heads: usize) -> Option<[usize; 3]> {
    let kernels = ChunkKernels::of(depth).filter(|_| tokens >= MIN_CHUNKED_TOKENS)?;
    let chunks = tokens.div_ceil(CHUNK);
    let each = |heads: usize, bytes: usize| heads.saturating_mul(chunks).saturating_mul(bytes);
    Some([
        each(key_heads, 4 * CHUNK * kernels.depth * 2),
        each(heads, 4 * CHUNK * CHUNK * 2),
        each(heads, 2 * CHUNK * 4),
    ])
}

impl Lowering<'_> {
    /// Computes the rule in chunks; `false` if that is not possible or not faster, with nothing changed.
    pub(super) fn delta_chunks(
        &mut self,
        node: NodeId,
        parameters: &GatedDeltaRule,
        inputs: [TensorArg; 6],
        out: u64,
    ) -> Result<bool, BackendError> {
        let [_, keys, values, ..] = inputs;
        let [tokens, key_heads, depth] = [keys.dims[1], keys.dims[2], keys.dims[3]].map(|n| n as usize);
        let (heads, width) = (values.dims[2] as usize, values.dims[3] as usize);
        let (Some(kernels), Some(bytes)) =
            (ChunkKernels::of(depth), chunk_bytes(tokens, key_heads, depth, heads))
        else {
            return Ok(false);
        };
        let context = &self.inner.context;
        let shared = [kernels.pairs_shared_bytes(), kernels.states_shared_bytes()];
        let has_room = shared.iter().all(|bytes| bytes + 1024 <= context.shared_bytes_per_block);
        if context.compute_capability < MMA_COMPUTE_CAPABILITY || !has_room || width == 0 {
            return Ok(false);
        }
        let [rows, pairs, decays] = self.scratch(node, bytes)?;
        let chunks = tokens.div_ceil(CHUNK);
        let work = DeltaChunks {
            inputs,
            out,
            scale: parameters.scale,
            tiled: i32::from(parameters.tiled),
            delta: i32::from(parameters.delta),
            chunks: chunks as i32,
            rows,
            pairs,
            decays,
        };
        let grids = [[chunks as u32, heads as u32, 1], [width.div_ceil(COLUMNS) as u32, heads as u32, 1]];
        let steps = [(kernels.pairs, 128), (kernels.states, 256)];
        for (((name, threads), grid), shared) in steps.into_iter().zip(grids).zip(shared) {
            let kernels = &self.inner.kernels;
            let function = kernels.function_with_shared_memory(KernelFile::DeltaChunks, name, shared)?;
            self.push(Launch::new(function, grid, threads).shared_bytes(shared).dependent().arg(work));
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prompts_are_computed_in_chunks() {
        assert_eq!(chunk_bytes(127, 16, 128, 32), None, "few tokens");
        assert_eq!(chunk_bytes(512, 16, 129, 32), None, "long keys");
        // 129 tokens are three chunks.
        let bytes = chunk_bytes(129, 2, 33, 6).unwrap();
        assert_eq!(bytes, [2 * 3 * 4 * 64 * 64 * 2, 6 * 3 * 4 * 64 * 64 * 2, 6 * 3 * 512]);
    }

    #[test]
    fn kernels_fit_the_shared_memory_of_hopper() {
        for kernels in &KERNELS {
            let limit = (227 << 10) - 1024;
            assert!(kernels.pairs_shared_bytes() <= limit && kernels.states_shared_bytes() <= limit);
            let source = include_str!("../../kernels/delta_chunks.cu");
            assert!(source.contains(&format!("DELTA_CHUNKS({})", kernels.depth)));
        }
        assert_eq!(KERNELS[1].states_shared_bytes(), 192_512);
    }
}
