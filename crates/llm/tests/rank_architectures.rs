//! Which architectures ranks can divide, and that they then compute what one rank does.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::common::every_architecture::{SmallModel, small_models};
use crate::common::experts::ExpertRecipe;
use crate::common::{Recipe, cpu, distance, engine_on, logits_of};
use crate::ranks::{SAME, f32_options, on_ranks};
use quadriga_cluster::{Communicator, Limits, Planned, in_process};
use quadriga_conformance::Rng;
use quadriga_graph::{DType, TensorKind};
use quadriga_llm::{Engine, EngineOptions, Error, Model, Parallelism};
use quadriga_runtime::Scheduler;

/// Architectures with parts that ranks do not know how to divide.
const NOT_BY_HEADS: [&str; 3] = ["bert", "gemma3n", "nomic-bert"];
/// Architectures whose layers stages of a pipeline cannot have: encoders, and layers that read those of others.
const NOT_BY_LAYERS: [&str; 3] = ["bert", "gemma3n", "nomic-bert"];

fn parallelism(tensor: usize, pipeline: usize) -> Parallelism {
    Parallelism { tensor: Some(tensor), pipeline: Some(pipeline), ..Parallelism::default() }
}

/// Windows that are shorter than a batch and a context: layers with one have a KV cache of their own.
fn options(of: &SmallModel) -> EngineOptions {
    let options = EngineOptions { context: 96, batch: 8, checkpoints: 2, ..f32_options() };
    let window_slots = of.window.map_or(0, |window| window - 1 + options.batch + 3);
    EngineOptions { window_slots, ..options }
}

/// A prompt in two parts, a token, a return as far as possible and another prompt: all logits, and how far it returned.
fn conversation(engine: &mut Engine) -> (Vec<Vec<f32>>, usize) {
    let mut rng = Rng::new(11);
    let tokens: Vec<u32> = (0..60).map(|_| rng.below(100) as u32).collect();
    let mut rows = logits_of(engine, &tokens[..20]);
    engine.checkpoint(0).unwrap();
    rows.extend(logits_of(engine, &tokens[20..33]));
    rows.extend(logits_of(engine, &tokens[33..34]));
    let kept = engine.truncate(0, 25);
    assert!(kept <= 25 && engine.len(0) == kept);
    engine.feed(&tokens[34..37]).unwrap();
    rows.push(engine.logits(0).to_vec());
    rows.extend(logits_of(engine, &tokens[40..60]));
    (rows, kept)
}

fn on_one(of: &SmallModel) -> (Vec<Vec<f32>>, usize) {
    conversation(&mut engine_on(cpu(1), of.model.clone(), options(of)))
}

fn divisible_by_heads() -> Vec<SmallModel> {
    let mut models = small_models();
    models.retain(|of| !NOT_BY_HEADS.contains(&of.architecture));
    models
}

#[test]
fn ranks_that_divide_any_architecture_by_heads_compute_what_one_does() {
    for of in divisible_by_heads() {
        let (wanted, kept) = on_one(&of);
        for size in (2..=of.most_ranks).step_by(if of.most_ranks > 2 { 2 } else { 1 }) {
            let found = on_ranks(&of.model, size, parallelism(size, 1), &options(&of), conversation);
            let off = distance(&found.0, &wanted);
            assert!(off < SAME, "{} on {size} ranks: off by {off:.2e}", of.name);
            assert_eq!(found.1, kept, "{} on {size} ranks", of.name);
        }
    }
}

#[test]
fn stages_of_any_architecture_compute_the_same_bits_as_one_rank() {
    let models = small_models().into_iter().filter(|of| !NOT_BY_LAYERS.contains(&of.architecture));
    for of in models {
        let wanted = on_one(&of);
        for size in [2, 3] {
            let found = on_ranks(&of.model, size, parallelism(1, size), &options(&of), conversation);
            assert!(found == wanted, "{} on {size} stages", of.name);
        }
    }
}

#[test]
fn stages_of_several_ranks_compute_any_architecture_as_one_rank() {
    for of in divisible_by_heads() {
        let (wanted, kept) = on_one(&of);
        let found = on_ranks(&of.model, 4, parallelism(2, 2), &options(&of), conversation);
        let off = distance(&found.0, &wanted);
        assert!(off < SAME, "{}: off by {off:.2e}", of.name);
        assert_eq!(found.1, kept, "{}", of.name);
    }
}

fn communicator(size: usize) -> Arc<dyn Communicator> {
    Arc::new(in_process(size, Limits::default()).into_iter().next().unwrap())
}

#[test]
fn the_documentation_says_which_architectures_can_be_divided() {
    let mut models: Vec<(&str, Model)> =
        small_models().into_iter().map(|of| (of.architecture, of.model)).collect();
    for encoder in ["bert", "nomic-bert"] {
        models.push((encoder, crate::encoders::parts(encoder, 1).model().unwrap()));
    }
    let mut known: BTreeMap<&str, [bool; 2]> = BTreeMap::new();
    for (architecture, model) in models {
        let divides = [parallelism(2, 1), parallelism(1, 2)].map(|parallelism| {
            match model.clone().with_ranks(communicator(2), parallelism) {
                Ok(_) => true,
                Err(Error::Ranks { .. }) => false,
                Err(error) => panic!("{architecture}: {error}"),
            }
        });
        let before = known.insert(architecture, divides);
        assert!(before.is_none_or(|before| before == divides), "{architecture}: {before:?} and {divides:?}");
    }
    let all: BTreeSet<&str> = quadriga_llm::models::architectures().collect();
    assert_eq!(known.keys().copied().collect::<BTreeSet<_>>(), all, "a small model of each is needed");
    for (architecture, divides) in &known {
        let wanted = [!NOT_BY_HEADS.contains(architecture), !NOT_BY_LAYERS.contains(architecture)];
        assert_eq!(*divides, wanted, "{architecture}");
    }
    // The table: names in backquotes, then whether `tensor` and `pipeline` divide them.
    let mut documented: BTreeMap<&str, [bool; 2]> = BTreeMap::new();
    let text = include_str!("../../../docs/cluster.md");
    let table = text.split("| architectures | `tensor` | `pipeline` |").nth(1).expect("the table is there");
    for row in table.lines().skip(2).take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let divides = [cells[1], cells[2]].map(|cell| cell.starts_with("yes"));
        let names = cells[0].split('`').skip(1).step_by(2);
        names.for_each(|name| assert!(documented.insert(name, divides).is_none(), "{name} twice"));
    }
    assert_eq!(documented, known);
}

/// What a rank holds, as a share of all weights, and the number of bytes that all ranks hold of them.
fn weights(model: &Model, size: usize) -> (f64, u64) {
    let held = |rank: usize| {
        let part = model.clone().with_ranks(Arc::new(Planned::new(rank, size, size)), parallelism(size, 1));
        let plan = Engine::forecast(&part.unwrap(), &Scheduler::new([cpu(1)]), f32_options()).unwrap();
        let graph = plan.graph();
        graph.of_kind(TensorKind::Weight).map(|weight| graph[weight].bytes() as u64).sum::<u64>()
    };
    let parts: Vec<u64> = (0..size).map(held).collect();
    let (all, most) = (parts.iter().sum::<u64>(), parts.iter().max().copied().unwrap());
    (most as f64 * size as f64 / all as f64, all)
}

/// Matrices, of which all but a few small ones are divided: of real widths, so that norms and routers hardly count.
#[test]
fn each_rank_holds_its_share_of_the_file() {
    let wide = |recipe: Recipe| Recipe {
        width: 256,
        key_length: 64,
        value_length: 64,
        rope_dims: recipe.rope_dims.min(64),
        feed_forward: 512,
        vocabulary: 1000,
        heads: 4,
        kv_heads: 4,
        ..recipe
    };
    let families = Recipe::families().into_iter().filter(|recipe| {
        ["phi3", "gemma2", "gemma3", "olmo2", "command-r", "glm4", "lfm2"].contains(&recipe.architecture)
    });
    for recipe in families.map(wide) {
        let model = recipe.model();
        let whole: u64 = model.file().tensors().map(|tensor| tensor.data().len() as u64).sum();
        for size in [2, 4] {
            let (most, all) = weights(&model, size);
            assert!(most <= 1.05, "{} on {size} ranks: {most}", recipe.architecture);
            assert!(all as f64 <= 1.05 * whole as f64, "{}: {all} of {whole}", recipe.architecture);
        }
    }
}

#[test]
fn blocks_of_fused_matrices_and_convolutions_are_never_cut() {
    let refused = |recipe: Recipe, size: usize| {
        let error = recipe.model().with_ranks(communicator(size), parallelism(size, 1)).err();
        error.unwrap_or_else(|| panic!("{} was divided", recipe.architecture)).to_string()
    };
    let wide = |architecture: &'static str, dtype: DType| {
        let family = Recipe::families().into_iter().find(|recipe| recipe.architecture == architecture);
        let wide = Recipe::wide(architecture, dtype);
        Recipe {
            width: wide.width,
            key_length: wide.key_length,
            value_length: wide.value_length,
            rope_dims: wide.rope_dims,
            feed_forward: wide.feed_forward,
            dtype,
            ..family.unwrap()
        }
    };
    // 512 columns, of which a rank has whole blocks of 256.
    let phi3 = Recipe { heads: 12, kv_heads: 3, ..wide("phi3", DType::Q4_K) };
    let text = refused(phi3.clone(), 3);
    assert!(text.contains("512 feed-forward columns in blocks of 256: 2 parts for 3 ranks"), "{text}");
    assert!(phi3.model().with_ranks(communicator(2), parallelism(2, 1)).is_ok());
    // The convolution is as wide as the residual stream.
    let text = refused(wide("lfm2", DType::Q4_K), 2);
    assert!(text.contains("256 channels of convolutions of 1 columns in blocks of 256: 1 parts"), "{text}");
    let smaller = wide("lfm2", DType::Q8_0);
    let (model, tokens) = (smaller.model(), smaller.tokens(20));
    let wanted = logits_of(&mut engine_on(cpu(1), model.clone(), f32_options()), &tokens);
    let found = on_ranks(&model, 2, parallelism(2, 1), &f32_options(), |engine| logits_of(engine, &tokens));
    // Activations are quantized by blocks, which each rank has whole.
    let off = distance(&found, &wanted);
    assert!(off < 0.05, "off by {off:.2e}");
}

/// A model of a family with other heads.
fn with_heads(architecture: &str, heads: usize, kv_heads: usize) -> Recipe {
    let experts = Recipe::with_experts().into_iter().map(|(_, recipe)| recipe);
    let mut all = Recipe::families().into_iter().chain(experts);
    let recipe = all.find(|recipe| recipe.architecture == architecture).unwrap();
    Recipe { heads, kv_heads, layers: recipe.layers.max(2), ..recipe }
}

#[test]
fn ranks_that_share_kv_heads_compute_what_one_does() {
    for (architecture, heads, kv_heads, size) in [
        ("gemma3", 4, 1, 2),
        ("gemma3", 4, 1, 4),
        ("phi3", 8, 2, 4),
        ("gpt-oss", 8, 2, 4),
        ("command-r", 6, 1, 3),
    ] {
        let recipe = with_heads(architecture, heads, kv_heads);
        let model = recipe.model();
        let wanted = conversation(&mut engine_on(cpu(1), model.clone(), f32_options()));
        let found = on_ranks(&model, size, parallelism(size, 1), &f32_options(), conversation);
        let off = distance(&found.0, &wanted.0);
        assert!(off < SAME, "{architecture} with {kv_heads} of {heads} on {size}: off by {off:.2e}");
        // Each has one of the KV heads; what needs no more than a share is preferred.
        let divided = |parallelism: Parallelism| {
            let model = model.clone().with_ranks(communicator(size), parallelism).unwrap();
            Arc::clone(model.ranks().unwrap())
        };
        let part = divided(parallelism(size, 1));
        let holds = format!("1 of {kv_heads} KV heads");
        assert!(part.shares_keys() && part.describe().contains(&holds), "{}", part.describe());
        if recipe.layers >= size {
            assert!(!divided(Parallelism::AUTO).shares_keys(), "{architecture} on {size}");
        }
    }
    // Squares of keys that several have would count several times; and queries are not divided.
    for (architecture, heads, kv_heads, size) in
        [("olmo2", 4, 1, 2), ("gemma3", 3, 1, 2), ("gemma3", 6, 2, 3)]
    {
        let model = with_heads(architecture, heads, kv_heads).model();
        let error = model.with_ranks(communicator(size), parallelism(size, 1)).err().unwrap().to_string();
        assert!(error.contains(&format!("has {kv_heads} KV heads")), "{error}");
        // Where that is the reason, it says which numbers could be divided.
        let queries = format!("the {} queries of each divide evenly", heads / kv_heads);
        assert_eq!(error.contains(&queries), architecture != "olmo2", "{error}");
    }
}

/// Activations are quantized by blocks, which ranks have whole: results differ in the order of sums only.
#[test]
fn quantized_matrices_are_divided_at_their_blocks() {
    for (architecture, dtype) in [
        ("phi3", DType::Q4_K),
        ("phi3", DType::Q8_0),
        ("gemma3", DType::Q4_K),
        ("gpt-oss", DType::MXFP4),
        ("lfm2", DType::Q4_0),
        ("glm4moe", DType::Q8_0),
    ] {
        let recipe = with_heads(architecture, 8, 4);
        let wide = Recipe::wide(architecture, dtype);
        let recipe = Recipe {
            width: wide.width,
            key_length: wide.key_length,
            value_length: wide.value_length,
            rope_dims: recipe.rope_dims.max(32),
            feed_forward: wide.feed_forward,
            experts: recipe.experts.map(|experts| ExpertRecipe {
                width: 256,
                shared: experts.shared.min(1) * 512,
                ..experts
            }),
            dtype,
            ..recipe
        };
        let (model, tokens) = (recipe.model(), recipe.tokens(12));
        let one = logits_of(&mut engine_on(cpu(1), model.clone(), f32_options()), &tokens);
        let run = |engine: &mut Engine| logits_of(engine, &tokens);
        let found = on_ranks(&model, 2, parallelism(2, 1), &f32_options(), run);
        let off = distance(&found, &one);
        assert!(off < 0.05, "{architecture} as {dtype}: off by {off:.2e}");
    }
}

#[test]
fn a_shared_expert_of_fewer_blocks_than_ranks_is_on_some_of_them() {
    for (architecture, shared) in [("qwen2moe", 2), ("glm4moe", 1), ("granitemoe", 3)] {
        let recipe = with_heads(architecture, 8, 4);
        let experts = recipe.experts.map(|experts| ExpertRecipe { shared, ..experts });
        let recipe = Recipe { experts, ..recipe };
        let model = recipe.model();
        let wanted = conversation(&mut engine_on(cpu(1), model.clone(), f32_options()));
        let found = on_ranks(&model, 4, parallelism(4, 1), &f32_options(), conversation);
        let off = distance(&found.0, &wanted.0);
        assert!(off < SAME, "{architecture}: off by {off:.2e}");
    }
}
