//! Several ranks compute what one does: as threads here, as processes of MPI in the tests of the command.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::common::judge::{Judgement, cases};
use crate::common::serving::{alone, batcher, options, random_stream_on, recipe, specs};
use crate::common::{Recipe, cpu, distance, engine, engine_on, logits_of};
use quadriga_cluster::{Communicator, InProcess, Limits, Planned, in_process};
use quadriga_conformance::Rng;
use quadriga_graph::{DType, NodeId, Op};
use quadriga_llm::evaluate::evaluate;
use quadriga_llm::placement::{CpuOptions, Devices, GpuLayers, Placement};
use quadriga_llm::serving::{Event, Request};
use quadriga_llm::{DeviceRank, Engine, EngineOptions, Error, Grid, Model, Parallelism, RankResources};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::{FaultPoint, Sim};

/// The tolerance for sums in another order, in standard deviations of the logits.
pub(crate) const SAME: f64 = 1e-4;

pub(crate) fn f32_options() -> EngineOptions {
    EngineOptions { cache_keys: DType::F32, cache_values: DType::F32, ..EngineOptions::default() }
}

/// Runs a function with the engine of the first of several ranks, which the others follow.
pub(crate) fn on_ranks<T: Send>(
    model: &Model,
    size: usize,
    parallelism: Parallelism,
    options: &EngineOptions,
    run: impl FnOnce(&mut Engine) -> T + Send,
) -> T {
    let divide = |communicator| model.clone().with_ranks(communicator, parallelism).unwrap();
    on_ranks_of(divide, size, options, run)
}

/// As [`on_ranks`], with a function that divides the model.
pub(crate) fn on_ranks_of<T: Send>(
    divide: impl Fn(Arc<dyn Communicator>) -> Model + Sync,
    size: usize,
    options: &EngineOptions,
    run: impl FnOnce(&mut Engine) -> T + Send,
) -> T {
    let mut ranks = in_process(size, Limits::default()).into_iter();
    let engine_of = |rank: InProcess| engine_on(cpu(1), divide(Arc::new(rank)), options.clone());
    let first = ranks.next().unwrap();
    std::thread::scope(|scope| {
        let engine_of = &engine_of;
        let others: Vec<_> =
            ranks.map(|rank| scope.spawn(move || engine_of(rank).follow().unwrap())).collect();
        let mut engine = engine_of(first);
        let result = run(&mut engine);
        drop(engine);
        others.into_iter().for_each(|other| other.join().unwrap());
        result
    })
}

/// A prompt in two parts, a token, a return to the middle and another token.
fn conversation(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = logits_of(engine, &tokens[..20]);
    rows.extend(logits_of(engine, &tokens[20..33]));
    rows.extend(logits_of(engine, &tokens[33..34]));
    assert_eq!(engine.truncate(0, 25), 25);
    engine.feed(&tokens[34..37]).unwrap();
    rows.push(engine.logits(0).to_vec());
    rows
}

fn divisible() -> Vec<Recipe> {
    let more = |recipe: Recipe| Recipe { layers: recipe.layers.max(3), ..recipe };
    let mut recipes = vec![Recipe::new("llama"), Recipe::new("qwen2"), Recipe::new("qwen3")];
    recipes.push(Recipe { kv_heads: 4, tied: true, output_bias: false, ..Recipe::new("llama") });
    recipes.extend(
        Recipe::families()
            .into_iter()
            .filter(|recipe| ["granite", "smollm3", "gemma"].contains(&recipe.architecture)),
    );
    let mixtures = Recipe::with_experts().into_iter().map(|(_, recipe)| recipe);
    recipes.extend(mixtures.filter(|recipe| {
        let known = ["llama", "qwen2moe", "qwen3moe", "granitemoe", "deepseek2"];
        let known = known.contains(&recipe.architecture);
        known && recipe.experts.is_some_and(|experts| experts.count > 1)
    }));
    recipes.into_iter().map(more).collect()
}

#[test]
fn stages_of_several_ranks_compute_what_one_does() {
    for recipe in divisible() {
        let (model, tokens) = (recipe.model(), recipe.tokens(40));
        let wanted = conversation(&mut engine(model.clone(), f32_options()), &tokens);
        let run = |engine: &mut Engine| conversation(engine, &tokens);
        for (tensor, pipeline) in [(2, 2), (recipe.kv_heads, 3)] {
            let parallelism =
                Parallelism { tensor: Some(tensor), pipeline: Some(pipeline), ..Parallelism::AUTO };
            let found = on_ranks(&model, tensor * pipeline, parallelism, &f32_options(), run);
            let off = distance(&found, &wanted);
            assert!(off < SAME, "{} on {parallelism}: off by {off:.2e}", recipe.architecture);
        }
    }
}

#[test]
fn tensor_parallel_ranks_compute_what_one_does() {
    for recipe in divisible() {
        let (model, tokens) = (recipe.model(), recipe.tokens(40));
        let wanted = conversation(&mut engine(model.clone(), f32_options()), &tokens);
        let run = |engine: &mut Engine| conversation(engine, &tokens);
        for size in [1, 2, recipe.kv_heads] {
            let found = on_ranks(&model, size, Parallelism::TENSOR, &f32_options(), run);
            let off = distance(&found, &wanted);
            assert!(off < SAME, "{} on {size} ranks: off by {off:.2e}", recipe.architecture);
        }
    }
}

#[test]
fn the_ranks_of_a_pipeline_compute_the_same_bits_as_one() {
    let mut recipes = divisible();
    recipes.push(Recipe { layers: 4, ..Recipe::wide("llama", DType::Q4_K) });
    for recipe in recipes {
        let (model, tokens) = (recipe.model(), recipe.tokens(40));
        let options = EngineOptions { batch: 8, ..f32_options() };
        let wanted = conversation(&mut engine_on(cpu(1), model.clone(), options.clone()), &tokens);
        let run = |engine: &mut Engine| conversation(engine, &tokens);
        for size in [1, 2, 3] {
            let found = on_ranks(&model, size, Parallelism::PIPELINE, &options, run);
            assert!(found == wanted, "{} on {size} ranks", recipe.architecture);
        }
    }
}

/// Stages compute parts of a prompt at once, at least 64 tokens each: with quantized weights, other batches give other bits.
#[test]
fn a_long_prompt_has_the_bits_of_one_rank_with_the_batches_of_the_pipeline() {
    let recipe = Recipe { layers: 4, context: 1024, ..Recipe::wide("llama", DType::Q4_K) };
    let (model, tokens) = (recipe.model(), recipe.tokens(700));
    let run = |engine: &mut Engine| {
        engine.feed(&tokens).unwrap();
        let first = engine.logits(0).to_vec();
        engine.feed(&tokens[..1]).unwrap();
        [first, engine.logits(0).to_vec()]
    };
    let batch = |batch: usize| EngineOptions { batch, ..f32_options() };
    // An eighth of the prompt on two stages, and a sixteenth on four, as powers of two of at least 64.
    for (stages, given, used) in [(2, 512, 64), (4, 512, 64), (2, 32, 32), (1, 512, 512)] {
        let wanted = run(&mut engine_on(cpu(1), model.clone(), batch(used)));
        let found = on_ranks(&model, stages, Parallelism::PIPELINE, &batch(given), run);
        assert!(found == wanted, "{stages} stages with -b {given} and one with -b {used}");
    }
}

#[test]
fn a_rank_reads_its_part_of_the_file_only() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let recipe = Recipe { layers: 4, vocabulary: 512, ..Recipe::wide("llama", DType::Q8_0) };
    std::fs::write(&path, recipe.parts().bytes()).unwrap();
    let (model, tokens) = (Model::open(&path).unwrap(), recipe.tokens(40));
    let run = |engine: &mut Engine| conversation(engine, &tokens);
    let whole: u64 = model.file().tensors().map(|tensor| tensor.byte_len() as u64).sum();
    for (parallelism, size) in [
        (Parallelism::TENSOR, 1),
        (Parallelism::TENSOR, 2),
        (Parallelism::PIPELINE, 2),
        (Parallelism::PIPELINE, 4),
    ] {
        let wanted = on_ranks(&model, size, parallelism, &f32_options(), run);
        let opened = std::sync::Mutex::new(Vec::new());
        let divide = |communicator: Arc<dyn Communicator>| {
            let file = quadriga_gguf::File::read_on_demand(&path).unwrap();
            let model = Model::from_file(file).unwrap();
            assert_eq!(model.file().bytes_read(), 0, "opening reads no weights");
            let model = model.with_ranks(communicator, parallelism).unwrap();
            opened.lock().unwrap().push(model.clone());
            model
        };
        let found = on_ranks_of(divide, size, &f32_options(), run);
        assert!(found == wanted, "{parallelism} on {size}");
        let read: Vec<u64> = opened.lock().unwrap().iter().map(|model| model.file().bytes_read()).collect();
        // Norms are on every rank that divides layers.
        let all = read.iter().sum::<u64>();
        assert!(all >= whole && all <= whole + whole / 50, "{parallelism}: {read:?} of {whole}");
        let most = *read.iter().max().unwrap() as f64;
        assert!(most <= 1.3 * whole as f64 / size as f64, "{parallelism}: {read:?} of {whole}");
    }
}

#[test]
fn many_requests_are_answered_by_several_ranks_as_by_one() {
    for (seed, recipe) in (80..).zip([recipe("llama"), recipe("qwen3")]) {
        let model = Recipe { layers: 3, ..recipe }.model();
        let specs = specs(&mut Rng::new(seed), 14, model.hyperparameters().vocabulary);
        let wanted = alone(&model, &specs, DType::F32);
        for (tensor, pipeline) in [(2, 1), (1, 3), (2, 2)] {
            let parallelism =
                Parallelism { tensor: Some(tensor), pipeline: Some(pipeline), ..Parallelism::AUTO };
            // Few pages, so that sequences are put back, and prefixes are copied.
            let options = options(5, 10);
            let divided = |rank: InProcess| model.clone().with_ranks(Arc::new(rank), parallelism).unwrap();
            let mut ranks = in_process(tensor * pipeline, Limits::default()).into_iter();
            let first = ranks.next().unwrap();
            std::thread::scope(|scope| {
                for rank in ranks {
                    let (divided, options) = (&divided, options.clone());
                    scope.spawn(move || batcher(&divided(rank), cpu(1), options).follow_ranks().unwrap());
                }
                drop(random_stream_on(&divided(first), cpu(1), options, seed, &specs, &wanted));
            });
        }
    }
}

#[test]
fn requests_fail_with_the_name_of_a_rank_that_has_ended() {
    let model = recipe("llama").model();
    let mut ranks = in_process(2, Limits::default()).into_iter();
    let [first, second] = [ranks.next().unwrap(), ranks.next().unwrap()];
    let divided = |rank: InProcess| model.clone().with_ranks(Arc::new(rank), Parallelism::TENSOR).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(batcher(&divided(second), cpu(1), options(4, 20))));
        let mut batcher = batcher(&divided(first), cpu(1), options(4, 20));
        batcher.submit(Request::new(vec![1, 2, 3])).unwrap();
        let mut failures = Vec::new();
        while batcher.is_busy() {
            for (_, event) in batcher.step() {
                if let Event::Failed(error) = event {
                    failures.push(error);
                }
            }
        }
        assert_eq!(failures.len(), 1);
        assert!(matches!(*failures[0], Error::Cluster(_)), "{}", failures[0]);
        assert!(failures[0].to_string().contains("rank 1"), "{}", failures[0]);
    });
}

#[test]
fn ranks_of_different_speeds_compute_what_one_does() {
    for recipe in divisible().into_iter().filter(|recipe| recipe.kv_heads > 2) {
        let (model, tokens) = (recipe.model(), recipe.tokens(40));
        let wanted = conversation(&mut engine(model.clone(), f32_options()), &tokens);
        for (parallelism, speeds) in [
            (Parallelism::TENSOR, vec![3.0, 1.0]),
            (Parallelism::PIPELINE, vec![1.0, 2.0]),
            ("tensor=2,pipeline=2".parse().unwrap(), vec![1.0, 2.0, 4.0, 1.0]),
        ] {
            let divide =
                |communicator| model.clone().with_uneven_ranks(communicator, parallelism, &speeds).unwrap();
            let found = on_ranks_of(divide, speeds.len(), &f32_options(), |engine: &mut Engine| {
                conversation(engine, &tokens)
            });
            let off = distance(&found, &wanted);
            assert!(off < SAME, "{} on {speeds:?}: off by {off:.2e}", recipe.architecture);
        }
    }
    let model = Recipe { kv_heads: 4, heads: 4, ..Recipe::new("llama") }.model();
    let rank = || Arc::new(in_process(2, Limits::default()).into_iter().next().unwrap());
    let uneven = model.clone().with_uneven_ranks(rank(), Parallelism::TENSOR, &[3.0, 1.0]).unwrap();
    let part = uneven.ranks().unwrap().describe();
    assert!(part.contains("3 of 4 KV heads"), "three of four heads in each of two layers: {part}");
    for wrong in [&[1.0][..], &[1.0, 0.0], &[1.0, f64::NAN]] {
        assert!(model.clone().with_uneven_ranks(rank(), Parallelism::TENSOR, wrong).is_err(), "{wrong:?}");
    }
}

/// Two simulated accelerators beside the CPU.
fn two_accelerators() -> Devices {
    devices_of(&two_simulated())
}

fn two_simulated() -> [Arc<Sim>; 2] {
    ["sim:0", "sim:1"].map(|name| Sim::new(name).device())
}

fn devices_of(simulated: &[Arc<Sim>; 2]) -> Devices {
    let accelerators = simulated.clone().map(|device| device as Arc<dyn Backend>);
    let cpu = quadriga_cpu::Backend::builder().threads(2).build().unwrap();
    Devices::new(accelerators, Arc::new(cpu)).unwrap()
}

/// Bytes of weights and KV cache that each of two ranks holds.
fn held(model: &Model, parallelism: Parallelism, resources: [RankResources; 2]) -> Result<Vec<u64>, Error> {
    let of = |rank: usize| {
        let planned = Arc::new(Planned::new(rank, 2, 2));
        let part = model.clone().with_rank_resources(planned, parallelism, &resources)?;
        let options = EngineOptions { context: 64, ..f32_options() };
        let forecast = Engine::forecast(&part, &Scheduler::new(cpu(1)), options)?;
        Ok(forecast.bytes().iter().map(|bytes| bytes.weights + bytes.mapped + bytes.state).sum())
    };
    (0..2).map(of).collect()
}

#[test]
fn a_rank_with_little_memory_gets_less() {
    let recipe = Recipe { kv_heads: 4, heads: 4, layers: 8, ..Recipe::new("llama") };
    let model = recipe.model();
    for parallelism in [Parallelism::TENSOR, Parallelism::PIPELINE] {
        let cache = EngineOptions { context: 64, ..f32_options() }.cache_rows(&model).unwrap();
        let parallelism = Parallelism { cache: Some(cache), ..parallelism };
        let of = |speed, free| RankResources { free, ..RankResources::of_speed(speed) };
        let even = held(&model, parallelism, [of(1.0, None), of(1.0, None)]).unwrap();
        let room = even[1] * 3 / 4;
        // As fast as the other, or faster.
        for speed in [1.0, 3.0] {
            let found = held(&model, parallelism, [of(1.0, Some(1 << 40)), of(speed, Some(room))]).unwrap();
            assert!(found[1] <= room && found[0] > even[0], "{parallelism}: {found:?}, room for {room}");
        }
        let none = held(&model, parallelism, [of(1.0, Some(1 << 40)), of(1.0, Some(1000))]);
        let text = none.unwrap_err().to_string();
        assert!(text.contains("rank 1 needs ") && text.contains("has 1000 B free"), "{text}");
        let little = held(&model, parallelism, [of(1.0, Some(room)), of(1.0, Some(room))]);
        assert!(little.unwrap_err().to_string().contains(" free"), "both have too little");
    }
}

#[test]
fn accelerators_of_one_process_divide_every_layer() {
    let recipe = Recipe { kv_heads: 4, heads: 4, layers: 3, ..Recipe::new("llama") };
    let (model, tokens) = (recipe.model(), recipe.tokens(40));
    let wanted = conversation(&mut engine(model.clone(), f32_options()), &tokens);
    for (gpu_layers, tensor_split, heads) in [
        (GpuLayers::All, vec![], "2 of 4 KV heads"),
        (GpuLayers::All, vec![3.0, 1.0], "3 of 4 KV heads"),
        (GpuLayers::Count(2), vec![1.0, 1.0], "2 of 4 KV heads"),
    ] {
        let placement = Placement { gpu_layers, tensor_split, ..Placement::default() };
        let devices = two_simulated();
        let planned = placement.plan_device_ranks(
            &model,
            &devices_of(&devices),
            CpuOptions::default(),
            &EngineOptions { context: 64, ..f32_options() },
        );
        let mut ranks = planned.unwrap().into_iter();
        let first = ranks.next().unwrap();
        assert!(first.describe().starts_with("sim:0 has "), "{}", first.describe());
        assert!(first.describe().contains(heads), "{}", first.describe());
        assert!(first.placed.forecast.bytes()[0].weights > 0);
        ranks.for_each(|rank| rank.follow(&first.model, None).unwrap());
        let mut engine =
            Engine::new(first.model, &first.placed.scheduler, first.options, &mut |_| {}).unwrap();
        let found = conversation(&mut engine, &tokens);
        let off = distance(&found, &wanted);
        assert!(off < SAME, "{gpu_layers:?}: off by {off:.2e}");
        // The memory of all is free as soon as the first has ended.
        drop(engine);
        assert!(devices.iter().all(|device| device.used_bytes() == 0), "{gpu_layers:?}");
    }
    let one = Placement { tensor_split: vec![1.0, 0.0], ..Placement::default() };
    let refused =
        one.plan_device_ranks(&model, &two_accelerators(), CpuOptions::default(), &EngineOptions::default());
    assert!(matches!(refused, Err(Error::Ranks { .. })), "one accelerator divides nothing");
    // A rank of several processes has its part already.
    let rank = in_process(2, Limits::default()).into_iter().next().unwrap();
    let part = model.with_ranks(Arc::new(rank), Parallelism::TENSOR).unwrap();
    let refused = Placement::default().plan_device_ranks(
        &part,
        &two_accelerators(),
        CpuOptions::default(),
        &EngineOptions::default(),
    );
    let text = refused.err().unwrap().to_string();
    assert!(text.contains("cannot be divided among several GPUs of a rank"), "{text}");
}

#[test]
fn an_accelerator_that_is_lost_ends_the_others_with_its_reason() {
    let recipe = Recipe { kv_heads: 4, heads: 4, ..Recipe::new("llama") };
    let (model, tokens) = (recipe.model(), recipe.tokens(8));
    let placement = Placement { gpu_layers: GpuLayers::All, ..Placement::default() };
    let options = EngineOptions { context: 64, ..f32_options() };
    for lost in 0..2 {
        let simulated = two_simulated();
        let devices = devices_of(&simulated);
        let planned = placement.plan_device_ranks(&model, &devices, CpuOptions::default(), &options);
        let mut ranks = planned.unwrap().into_iter();
        let first = ranks.next().unwrap();
        ranks.for_each(|rank| rank.follow(&first.model, None).unwrap());
        let mut engine =
            Engine::new(first.model, &first.placed.scheduler, first.options, &mut |_| {}).unwrap();
        engine.feed(&tokens[..4]).unwrap();
        simulated[lost].lose(FaultPoint::Run, 0);
        let text = engine.feed(&tokens[4..]).unwrap_err().to_string();
        assert!(text.contains(&format!("rank {lost}")), "{text}");
        // Nothing waits for the other.
        drop(engine);
    }
}

#[test]
fn an_engine_whose_followers_were_forgotten_or_have_another_is_an_error() {
    let recipe = Recipe { kv_heads: 4, heads: 4, ..Recipe::new("llama") };
    let (model, devices) = (recipe.model(), two_accelerators());
    let placement = Placement { gpu_layers: GpuLayers::All, ..Placement::default() };
    let options = EngineOptions { context: 64, ..f32_options() };
    let planned = placement.plan_device_ranks(&model, &devices, CpuOptions::default(), &options).unwrap();
    let mut ranks = planned.into_iter();
    let first = ranks.next().unwrap();
    let engine =
        || Engine::new(first.model.clone(), &first.placed.scheduler, first.options.clone(), &mut |_| {});
    let text = engine().err().unwrap().to_string();
    assert!(text.contains("0 of 1 further devices follow the first one"), "{text}");
    ranks.for_each(|rank| rank.follow(&first.model, None).unwrap());
    let kept = engine().unwrap();
    let text = engine().err().unwrap().to_string();
    assert!(text.contains("ranks follow one engine"), "{text}");
    drop(kept);
}

#[test]
fn an_accelerator_that_fails_ends_the_first_with_its_reason() {
    let recipe = Recipe { kv_heads: 4, heads: 4, ..Recipe::new("llama") };
    let (model, devices) = (recipe.model(), two_accelerators());
    let placement = Placement { gpu_layers: GpuLayers::All, ..Placement::default() };
    let options = EngineOptions { context: 64, ..f32_options() };
    let planned = placement.plan_device_ranks(&model, &devices, CpuOptions::default(), &options).unwrap();
    let mut ranks = planned.into_iter();
    let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
    // The second has other options, and so fails before it has loaded anything.
    let options = EngineOptions { context: 32, ..second.options.clone() };
    DeviceRank { options, ..second }.follow(&first.model, None).unwrap();
    let failed = Engine::new(first.model, &first.placed.scheduler, first.options, &mut |_| {});
    let text = failed.err().unwrap().to_string();
    assert!(text.contains("a context of 64"), "{text}");
}

/// Why a CPU does not compute beside its own collectives: in these models everything after a sum needs it, and everything before it
/// is needed for it.
#[test]
fn no_work_of_a_divided_model_is_independent_of_a_collective() {
    for recipe in [Recipe::new("llama"), Recipe::new("qwen3")] {
        let rank = Arc::new(Planned::new(0, 2, 2));
        let model = recipe.model().with_ranks(rank, Parallelism::TENSOR).unwrap();
        let layers = model.hyperparameters().layers.len();
        for tokens in [1, 16] {
            let options = EngineOptions { batch: tokens, context: 32, ..f32_options() };
            let plan = Engine::forecast(&model, &Scheduler::new([cpu(1)]), options).unwrap();
            let graph = plan.graph();
            let computes = |node: &NodeId| !graph[*node].op().is_view();
            let all: Vec<NodeId> = graph.node_ids().filter(computes).collect();
            let is_collective = |node: &NodeId| matches!(graph[*node].op(), Op::Collective(_));
            let collectives: Vec<NodeId> = all.iter().copied().filter(is_collective).collect();
            // Two sums a layer, that of the embedding, and the gathering of the logits.
            assert_eq!(collectives.len(), 2 * layers + 2, "{plan:#}");
            let reads = |reader: NodeId, of: NodeId| {
                let storage = graph[graph[of].output()].storage();
                graph.inputs(reader).iter().any(|input| graph[*input].storage() == storage)
            };
            for collective in collectives {
                let mut after = vec![collective];
                let mut before = vec![collective];
                for node in all.iter().copied().filter(|node| *node > collective) {
                    if after.iter().any(|earlier| reads(node, *earlier)) {
                        after.push(node);
                    }
                }
                for node in all.iter().copied().filter(|node| *node < collective).rev() {
                    if before.iter().any(|later| reads(*later, node)) {
                        before.push(node);
                    }
                }
                let mut beside = all.iter().filter(|node| !after.contains(node) && !before.contains(node));
                // The rows of the residual stream that are output, copied out of it.
                let small = |node: &&NodeId| matches!(graph[**node].op(), Op::GetRows);
                assert!(beside.clone().count() <= 1 && beside.all(|node| small(&node)), "{plan:#}");
            }
        }
    }
}

#[test]
fn blocks_of_quantized_weights_are_never_cut() {
    // Two KV heads of 64 columns each, with two query heads: 128 columns of a block of 256.
    let model = Recipe { heads: 4, kv_heads: 2, ..Recipe::wide("llama", DType::Q4_K) }.model();
    let communicator = || -> Arc<dyn Communicator> {
        Arc::new(in_process(2, Limits::default()).into_iter().next().unwrap())
    };
    let refused = model.clone().with_ranks(communicator(), Parallelism::TENSOR);
    let Err(error @ Error::Ranks { .. }) = refused else { panic!("it was divided") };
    let text = error.to_string();
    assert!(text.contains("2 KV heads of 128 columns in blocks of 256: 1 parts for 2 ranks"), "{text}");
    let divided = model.with_ranks(communicator(), Parallelism::AUTO).unwrap();
    assert_eq!(divided.ranks().unwrap().grid(), Grid { tensor: 1, pipeline: 2 });
}

#[test]
fn more_ranks_than_layers_or_heads_are_refused_with_the_numbers() {
    let model = Recipe::new("llama").model();
    for (parallelism, wanted) in
        [(Parallelism::TENSOR, "2 KV heads"), (Parallelism::PIPELINE, "2 layers for 3 stages")]
    {
        let first = Arc::new(in_process(3, Limits::default()).into_iter().next().unwrap());
        let text = model.clone().with_ranks(first, parallelism).err().unwrap().to_string();
        assert!(text.contains(wanted), "{text}");
    }
}

#[test]
fn ranks_with_other_options_are_told_so_before_they_wait_for_each_other() {
    let model = Recipe::new("llama").model();
    let ranks = in_process(2, Limits::default());
    let results: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .zip([32, 64])
            .map(|(rank, context)| {
                let model = model.clone();
                scope.spawn(move || {
                    let model = model.with_ranks(Arc::new(rank), Parallelism::TENSOR).unwrap();
                    let scheduler = Scheduler::new([cpu(1)]);
                    let options = EngineOptions { context, ..f32_options() };
                    Engine::new(model, &scheduler, options, &mut |_| {}).err().unwrap().to_string()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for text in results {
        assert!(text.contains("rank 0 has a context of 32"), "{text}");
    }
}

#[test]
fn exact_cases_of_the_default_model_hold_on_several_ranks() {
    let path = quadriga_llm::default_model::fetch(None, &mut |_| ControlFlow::Continue(())).unwrap();
    let model = Model::open(path).unwrap();
    let options = EngineOptions { context: 2048, ..EngineOptions::default() };
    let short = ["math", "capital"];
    let cases: Vec<_> = cases(quadriga_llm::judge::DEFAULT_MODEL_CASES)
        .into_iter()
        .filter(|exact| short.contains(&exact.case.name.as_str()))
        .collect();
    for (parallelism, size, tensor) in
        [(Parallelism::TENSOR, 2, 2), (Parallelism::PIPELINE, 2, 1), (Parallelism::AUTO, 4, 2)]
    {
        let verdict = on_ranks(&model, size, parallelism, &options, |engine| {
            assert_eq!(engine.model().ranks().unwrap().grid().tensor, tensor);
            let mut verdict = Judgement::default();
            for exact in &cases {
                verdict.add(exact, &evaluate(engine, &exact.case).unwrap());
            }
            verdict
        });
        verdict.assert_holds(&format!("{parallelism:?} on {size} ranks"), false);
    }
}
