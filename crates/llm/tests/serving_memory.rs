//! The memory of many requests at once is that of the plan, and of the reads in flight: a device that has exactly so much serves any stream of them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::Recipe;
use crate::common::serving::{CONTEXT, options, random_stream_with, recipe};
use quadriga_graph::DType;
use quadriga_llm::serving::BatcherOptions;
use quadriga_llm::{Engine, Model};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::Sim;

/// A model of each way to keep a sequence: all tokens, windows, recurrent states.
fn models() -> [Model; 3] {
    let windows = Recipe::families().into_iter().find(|recipe| recipe.architecture == "gemma2").unwrap();
    let windows = Recipe { text: true, context: CONTEXT as u32, window: Some(30), ..windows };
    let recurrent = crate::common::recurrent::parts_of(&Recipe { layers: 5, ..recipe("qwen35") });
    [recipe("llama").model(), windows.model(), recurrent.model().unwrap()]
}

#[test]
fn a_device_with_the_memory_of_the_plan_serves_any_stream() {
    for (seed, model) in (400..).zip(models()) {
        for (sequences, pages) in [(12, 60), (5, 20)] {
            let options = BatcherOptions { lookup: 3, ..options(sequences, pages) };
            let options = options.for_model(&model).unwrap();
            let unlimited: Arc<dyn Backend> = Sim::new("sim:0").build();
            let plan =
                Engine::forecast(&model, &Scheduler::new([unlimited]), options.engine.clone()).unwrap();
            let planned: u64 = plan.bytes().iter().map(|bytes| bytes.total()).sum();
            // Reads that do not wait take memory of their own: of two steps, 128 logits and their tokens for each output, and a sum.
            let planned = planned + 2 * (options.engine.output_rows as u64 * 128 * 8 + 64);
            let sim = Sim::new("sim:0").capacity(planned).device();
            random_stream_with(&model, Arc::clone(&sim) as _, options, DType::F32, seed, 20, &mut |_| {
                assert!(sim.used_bytes() <= planned);
            });
        }
    }
}
