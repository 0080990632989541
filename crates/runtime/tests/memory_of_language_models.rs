//! Plans of language models reach the lower bound, and need less memory than ggml.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[path = "common/transformer.rs"]
mod transformer;

use quadriga_runtime::memory::{BackendMemory, InputPolicy, MemoryRequest, Planner, check};
use transformer::{LLAMA_7B, SMOL_135M, Sizes};

const MIB: f64 = 1024.0 * 1024.0;

fn peak(sizes: Sizes, max_buffer: Option<usize>) -> (u64, u64) {
    let graph = transformer::transformer(sizes);
    let memories = [BackendMemory::measuring("a", 64, max_buffer)];
    let request = MemoryRequest { inputs: InputPolicy::Release, ..MemoryRequest::new(&graph, &memories) };
    let plan = Planner::default().plan(&request).unwrap();
    check(&request, &plan).unwrap();
    println!("{}", plan.forecast(&graph));
    (plan.arena_bytes(0), plan.backends[0].lower_bound)
}

#[test]
fn llama_7b_prompt_batch() {
    let (peak, bound) = peak(LLAMA_7B, None);
    assert_eq!(peak, bound);
    assert!(peak as f64 <= 63.1 * MIB, "{} MiB", peak as f64 / MIB);
}

#[test]
fn smollm2_prompt_batch() {
    let (peak, bound) = peak(SMOL_135M, None);
    assert_eq!(peak, bound);
    assert!(peak as f64 <= 17.5 * MIB, "{} MiB", peak as f64 / MIB);
}

#[test]
fn all_batches_and_contexts_reach_the_lower_bound() {
    for sizes in [LLAMA_7B, SMOL_135M] {
        for tokens in [1, 32, 512] {
            for context in [512, 4096] {
                for rows in [1, tokens] {
                    let (peak, bound) = peak(Sizes { tokens, context, rows, ..sizes }, None);
                    assert_eq!(peak, bound, "{tokens} tokens, context {context}, {rows} rows");
                }
            }
        }
    }
}

#[test]
fn chunks_at_or_above_the_largest_tensor_cost_little() {
    for sizes in [LLAMA_7B, SMOL_135M] {
        let largest = sizes.tokens * sizes.feed_forward * 4;
        for limit in [largest, 2 * largest, 3 * largest] {
            let (peak, bound) = peak(sizes, Some(limit));
            assert!(peak as f64 <= 1.02 * bound as f64, "limit {limit}: {peak} of {bound}");
        }
    }
}
