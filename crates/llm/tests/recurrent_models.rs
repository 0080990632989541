//! Models with recurrent layers: whatever is fed, truncated, saved and restored, an engine computes what a new one does
//! that is fed the same tokens at once, and that is what the oracle computes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::experts::ExpertRecipe;
use crate::common::recurrent::parts_of;
use crate::common::reference::Reference;
use crate::common::{Parts, Recipe, all_outputs, cpu, distance, engine, logits_of};
use quadriga_conformance::{Oracle, Rng};
use quadriga_graph::DType;
use quadriga_llm::models::{GraphShape, NeuronMode, Neurons};
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::template::Message;
use quadriga_llm::{BatchToken, EngineOptions, Generator, GeneratorOptions, Model};
use quadriga_runtime::Scheduler;

const OPTIONS: EngineOptions = EngineOptions {
    pages: 0,
    context: 64,
    sequences: 1,
    batch: 7,
    output_rows: 1,
    cache_keys: DType::F32,
    cache_values: DType::F32,
    window_slots: 0,
    expert_slots: 0,
    resident_experts: quadriga_llm::models::LayerSet::EMPTY,
    upload_bytes: 0,
    neuron_counts: None,
    observed_tokens: usize::MAX,
    neurons: Neurons { mode: NeuronMode::Exact, threshold: 0, slots: 0, observe: false },
    checkpoints: 2,
    hidden: false,
    logits: true,
    greedy: false,
};

/// A small model: three layers with the delta rule, then one with attention, and again.
fn parts(seed: u64) -> Parts {
    parts_of(&Recipe { layers: 5, seed, ..Recipe::new("qwen35") })
}

fn model(seed: u64) -> Model {
    parts(seed).model().unwrap()
}

/// Models with each kind of recurrent layer.
fn kinds() -> Vec<Model> {
    let find = |architecture: &str| {
        Recipe::families().into_iter().find(|recipe| recipe.architecture == architecture).unwrap()
    };
    let (lfm2, mamba2) = (find("lfm2"), find("mamba2"));
    let windows = Recipe { window: Some(5), ..lfm2.clone() };
    vec![model(1), lfm2.model(), model(2), mamba2.model(), windows.model()]
}

/// Logits of all tokens, by the oracle, in one batch.
fn oracle(model: &Model, tokens: &[u32]) -> Vec<Vec<f64>> {
    let n = tokens.len();
    let shape = GraphShape { cache_keys: DType::F32, cache_values: DType::F32, ..GraphShape::new(n, n) };
    let graph = model.graph(shape).unwrap();
    let numbers: Vec<i32> = (0..n as i32).collect();
    let mut oracle = Oracle::new(&graph).unwrap();
    oracle.set_i32("tokens", &tokens.iter().map(|t| *t as i32).collect::<Vec<_>>()).unwrap();
    oracle.set_i32("positions", &numbers).unwrap();
    oracle.set_i32("slots", &numbers).unwrap();
    oracle.set_i32("spans", &(0..n as i32).flat_map(|t| [0, t + 1]).collect::<Vec<_>>()).unwrap();
    let shape = model.hyperparameters().recurrent.as_ref().unwrap();
    for (name, pieces) in shape.piece_inputs(0, 1) {
        oracle.set_i32(name, &pieces.collect::<Vec<_>>()).unwrap();
    }
    oracle.run().unwrap();
    oracle.read("logits").unwrap().chunks(model.hyperparameters().vocabulary).map(<[f64]>::to_vec).collect()
}

fn random_tokens(rng: &mut Rng, count: usize) -> Vec<u32> {
    (0..count).map(|_| rng.below(100) as u32).collect()
}

#[test]
fn prompts_and_steps_give_what_the_oracle_computes_at_once() {
    for seed in 1..4 {
        let model = model(seed);
        let tokens = random_tokens(&mut Rng::new(seed), 23);
        let expected = oracle(&model, &tokens);
        let whole = logits_of(&mut engine(model.clone(), EngineOptions { batch: 64, ..OPTIONS }), &tokens);
        assert!(distance(&whole, &expected) < 1e-4, "seed {seed}: {}", distance(&whole, &expected));
        let mut stepped = engine(model, OPTIONS);
        let rows: Vec<Vec<f32>> =
            tokens.iter().flat_map(|token| logits_of(&mut stepped, &[*token])).collect();
        assert!(distance(&rows, &expected) < 1e-4, "seed {seed}: {}", distance(&rows, &expected));
    }
}

#[test]
fn any_history_gives_what_a_new_engine_gives() {
    let kinds = kinds();
    for seed in 0..15 {
        let mut rng = Rng::new(seed);
        let model = kinds[seed as usize % kinds.len()].clone();
        let (sequences, checkpoints) = (1 + rng.below(2), rng.below(4));
        let options = EngineOptions { sequences, checkpoints, batch: 1 + rng.below(9), ..OPTIONS };
        let mut engine = engine(model.clone(), options.clone());
        let mut texts = vec![Vec::new(); sequences];
        let mut saved: Option<(Vec<u32>, Vec<u8>)> = None;
        for step in 0..40 {
            let sequence = rng.below(sequences);
            let text: &mut Vec<u32> = &mut texts[sequence];
            match rng.below(8) {
                0 | 1 => {
                    let kept = engine.truncate(sequence, rng.below(text.len() + 2));
                    assert!(kept <= text.len());
                    text.truncate(kept);
                }
                2 => {
                    let mut bytes = Vec::new();
                    engine.save_state(sequence, &mut bytes).unwrap();
                    saved = Some((text.clone(), bytes));
                }
                3 => {
                    if let Some((tokens, bytes)) = &saved {
                        engine.load_state(sequence, &mut bytes.as_slice()).unwrap();
                        text.clone_from(tokens);
                    }
                }
                kind => {
                    let count = if kind < 6 { 1 } else { 1 + rng.below(12) };
                    if text.len() + count > options.context {
                        continue;
                    }
                    let tokens = random_tokens(&mut rng, count);
                    engine.extend(&all_outputs(sequence, &tokens)).unwrap();
                    text.extend(&tokens);
                    let found: Vec<Vec<f32>> =
                        (0..tokens.len()).map(|row| engine.logits(row).to_vec()).collect();
                    let mut new =
                        crate::common::engine(model.clone(), EngineOptions { batch: 64, ..OPTIONS });
                    let all = logits_of(&mut new, text);
                    let apart = distance(&found, &all[text.len() - count..]);
                    assert!(apart < 1e-4, "seed {seed}, step {step}: {apart}");
                }
            }
            assert_eq!(engine.tokens(sequence), texts[sequence]);
        }
    }
}

#[test]
fn a_batch_of_several_sequences_is_computed_one_after_the_other() {
    for model in kinds() {
        let options = EngineOptions { sequences: 2, batch: 5, ..OPTIONS };
        let mut engine = engine(model.clone(), options);
        let mut rng = Rng::new(9);
        let texts = [random_tokens(&mut rng, 9), random_tokens(&mut rng, 4)];
        let mut batch: Vec<BatchToken> = Vec::new();
        for (a, b) in texts[0].iter().zip(texts[1].iter().map(Some).chain(std::iter::repeat(None))) {
            batch.push(BatchToken { sequence: 0, token: *a, output: true });
            batch.extend(b.map(|token| BatchToken { sequence: 1, token: *token, output: true }));
        }
        engine.extend(&batch).unwrap();
        for (sequence, text) in texts.iter().enumerate() {
            let rows = batch.iter().enumerate().filter(|(_, token)| token.sequence == sequence);
            let found: Vec<Vec<f32>> = rows.map(|(row, _)| engine.logits(row).to_vec()).collect();
            let alone = logits_of(&mut crate::common::engine(model.clone(), OPTIONS), text);
            let architecture = model.hyperparameters().architecture;
            assert!(distance(&found, &alone) < 1e-4, "{architecture}, sequence {sequence}");
        }
    }
}

#[test]
fn regenerating_keeps_the_prompt() {
    let mut engine = engine(model(1), OPTIONS);
    let tokens = random_tokens(&mut Rng::new(3), 40);
    engine.feed(&tokens[..20]).unwrap();
    for token in &tokens[20..] {
        engine.feed(&[*token]).unwrap();
    }
    assert_eq!(engine.truncate(0, 20), 20);
    assert_eq!(engine.len(0), 20);
}

#[test]
fn wrong_shapes_of_recurrent_layers_are_refused_by_name() {
    for (key, value, named) in [
        ("ssm.conv_kernel", 0, "ssm.conv_kernel"),
        ("ssm.conv_kernel", 1, "ssm.conv_kernel"),
        ("ssm.conv_kernel", 3, "ssm_conv1d.weight"),
        ("ssm.group_count", 0, "ssm.group_count"),
        ("ssm.group_count", 4, "ssm.time_step_rank"),
        ("ssm.group_count", 3, "attn_qkv.weight"),
        ("ssm.time_step_rank", 7, "ssm.time_step_rank"),
        ("ssm.time_step_rank", 4, "ssm_beta.weight"),
        ("ssm.inner_size", 71, "ssm.inner_size"),
        ("ssm.state_size", 1 << 29, "ssm.state_size"),
        ("full_attention_interval", 0, "full_attention_interval"),
        ("full_attention_interval", 2, "attn_q.weight"),
        ("expert_count", 4, "expert_count"),
    ] {
        let mut parts = parts(1);
        parts.set(&format!("qwen35.{key}"), value as u32);
        let error = parts.model().err().unwrap_or_else(|| panic!("{key} = {value} is accepted")).to_string();
        assert!(error.contains(named), "{key} = {value}: {error}");
    }
    let mut short = parts(1);
    short.set("qwen35.attention.recurrent_layers", vec![true, false]);
    let error = short.model().err().unwrap().to_string();
    assert!(error.contains("attention.recurrent_layers"), "{error}");
    for tensor in ["blk.0.ssm_a", "blk.1.ssm_dt.bias", "blk.2.ssm_norm.weight", "blk.0.attn_gate.weight"] {
        let error = parts(1).remove(tensor).model().err().unwrap().to_string();
        assert!(error.contains(tensor), "{error}");
    }
}

#[test]
fn a_turn_is_not_computed_again_when_the_template_opens_the_reasoning() {
    let recipe = Recipe { layers: 5, text: true, context: 2000, ..Recipe::new("qwen35") };
    let mut parts = parts_of(&recipe);
    // The beginning of an answer is another one in the next prompt.
    let template = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}\
         {% if add_generation_prompt %}<|start|>assistant <think>{% else %}{% endif %}{% if false %}</think>{% endif %}";
    parts.set("tokenizer.chat_template", template);
    let sampling = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
    let engine = EngineOptions { context: 2000, batch: 512, checkpoints: 4, ..OPTIONS };
    let options = GeneratorOptions { engine, sampling, max_tokens: Some(5), ..GeneratorOptions::default() };
    let scheduler = Scheduler::new([cpu(1)]);
    let mut generator = Generator::on(parts.model().unwrap(), &scheduler, options, &mut |_| {}).unwrap();
    let mut messages = Vec::new();
    for turn in 0..8 {
        let text: String = (0..50u32).filter_map(|i| char::from_u32(97 + (i * 7 + turn) % 26)).collect();
        messages.push(Message::new("user", text));
        let answer = generator.chat(&messages).unwrap();
        let (computed, _) = answer.prompt_speed();
        let completion = answer.complete().unwrap();
        // The header, the answer and the new message; not the message before.
        assert!(computed < 100, "turn {turn}: {computed} of {} tokens", completion.counts.prompt);
        messages.push(Message::new("assistant", "so"));
    }
}

/// The rows of an F32 tensor, which is taken out of the file.
fn take_rows(parts: &mut Parts, name: &str) -> Vec<Vec<u8>> {
    let (_, dims, bytes) = parts.take(name);
    bytes.chunks(bytes.len() / dims[0]).map(<[u8]>::to_vec).collect()
}

fn put_rows(parts: &mut Parts, name: &str, rows: &[Vec<u8>]) {
    let cols = rows[0].len() / 4;
    let dims =
        if cols == 1 && !name.ends_with(".weight") { vec![rows.len()] } else { vec![rows.len(), cols] };
    parts.tensors.push((name.to_owned(), DType::F32, dims, rows.concat()));
}

/// The model as one of another architecture in which every expert is its dense network.
fn with_experts(mut parts: Parts, architecture: &str) -> Parts {
    parts.clone_experts(5, 3, 7);
    for (key, _) in &mut parts.keys {
        *key = key.replace("qwen35.", &format!("{architecture}."));
    }
    parts.set("general.architecture", architecture);
    for (key, value) in [("count", 3u32), ("used_count", 2), ("shared_feed_forward_length", 0)] {
        parts.set(&format!("{architecture}.expert_{key}"), value);
    }
    let width = parts.tensors.iter().find(|(name, ..)| name == "blk.0.ffn_up_exps.weight").unwrap().2[1];
    parts.set(&format!("{architecture}.expert_feed_forward_length"), width as u32);
    parts
}

/// The same model as Qwen3-Next has it: value heads of a key head are consecutive, beta and alpha are one matrix by key
/// head, and so are all projections if they are `fused`.
fn grouped(parts: Parts, fused: bool) -> Parts {
    let mut parts = with_experts(parts, "qwen3next");
    let (key_heads, each, d, length) = (2, 3, 8, 12);
    let keys = 2 * key_heads * d;
    // For each value head its place in Qwen 3.5.
    let order: Vec<usize> = (0..key_heads).flat_map(|k| (0..each).map(move |j| j * key_heads + k)).collect();
    let heads = |rows: &[Vec<u8>], length: usize| -> Vec<Vec<u8>> {
        order.iter().flat_map(|head| rows[head * length..][..length].to_vec()).collect()
    };
    for layer in [0, 1, 2, 4] {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let mut take = |part: &str| take_rows(&mut parts, &name(part));
        let (qkv, gate, conv) =
            (take("attn_qkv.weight"), take("attn_gate.weight"), take("ssm_conv1d.weight"));
        let (values, gate) = (heads(&qkv[keys..], length), heads(&gate, length));
        let conv = [conv[..keys].to_vec(), heads(&conv[keys..], length)].concat();
        let out: Vec<Vec<u8>> = take("ssm_out.weight")
            .iter()
            .map(|row| {
                order.iter().flat_map(|head| row[head * length * 4..][..length * 4].to_vec()).collect()
            })
            .collect();
        let [beta, alpha, bias, decay] =
            ["ssm_beta.weight", "ssm_alpha.weight", "ssm_dt.bias", "ssm_a"].map(|part| heads(&take(part), 1));
        let of = |rows: &[Vec<u8>], k: usize, length: usize| rows[k * length..][..length].to_vec();
        let both = (0..key_heads).flat_map(|k| [of(&beta, k, each), of(&alpha, k, each)].concat());
        put_rows(&mut parts, &name("ssm_ba.weight"), &both.collect::<Vec<_>>());
        put_rows(&mut parts, &name("ssm_conv1d.weight"), &conv);
        put_rows(&mut parts, &name("ssm_out.weight"), &out);
        put_rows(&mut parts, &name("ssm_dt.bias"), &bias);
        put_rows(&mut parts, &name("ssm_a"), &decay);
        if fused {
            let group = |k: usize| {
                let (query, key) = (of(&qkv, k, d), of(&qkv[keys / 2..], k, d));
                [query, key, of(&values, k, each * length), of(&gate, k, each * length)].concat()
            };
            let all: Vec<Vec<u8>> = (0..key_heads).flat_map(group).collect();
            put_rows(&mut parts, &name("ssm_in.weight"), &all);
        } else {
            put_rows(&mut parts, &name("attn_qkv.weight"), &[qkv[..keys].to_vec(), values].concat());
            put_rows(&mut parts, &name("attn_gate.weight"), &gate);
        }
    }
    parts
}

#[test]
fn heads_in_groups_and_fused_projections_are_the_same_model() {
    let tokens = random_tokens(&mut Rng::new(5), 12);
    let logits = |parts: Parts| {
        let model = parts.model().unwrap();
        logits_of(&mut engine(model, EngineOptions { batch: 64, ..OPTIONS }), &tokens)
    };
    let dense = logits(parts(5));
    for (name, other) in [
        ("experts", with_experts(parts(5), "qwen35moe")),
        ("groups", grouped(parts(5), false)),
        ("fused groups", grouped(parts(5), true)),
    ] {
        let found = distance(&logits(other), &dense);
        assert!(found < 1e-4, "{name}: off by {found:.2e}");
    }
}

/// The family of the gated delta rule: dense, and with experts and a gated shared expert, in both orders of heads.
pub(crate) fn delta_recipes() -> Vec<Recipe> {
    let experts = ExpertRecipe { width: 40, shared: 56, shared_gate: true, ..ExpertRecipe::new(6, 2) };
    let of = |architecture: &'static str, experts: Option<ExpertRecipe>| Recipe {
        layers: 5,
        experts,
        ..Recipe::new(architecture)
    };
    vec![of("qwen35", None), of("qwen35moe", Some(experts)), of("qwen3next", Some(experts))]
}

#[test]
fn the_gated_delta_rule_is_what_was_published() {
    for recipe in delta_recipes() {
        for seed in 1..3 {
            let recipe = Recipe { seed, ..recipe.clone() };
            let tokens = recipe.tokens(19);
            let expected = Reference::with_delta_rule(&recipe).run_delta(&tokens);
            let model = parts_of(&recipe).model().unwrap();
            let context = format!("{} with seed {seed}", recipe.architecture);
            let whole =
                logits_of(&mut engine(model.clone(), EngineOptions { batch: 64, ..OPTIONS }), &tokens);
            let off = distance(&whole, &expected);
            assert!(off < 1e-4, "{context}: off by {off:.2e}");
            let mut stepped = engine(model, OPTIONS);
            let rows: Vec<Vec<f32>> =
                tokens.iter().flat_map(|token| logits_of(&mut stepped, &[*token])).collect();
            let off = distance(&rows, &expected);
            assert!(off < 1e-4, "{context}, token by token: off by {off:.2e}");
        }
    }
}
