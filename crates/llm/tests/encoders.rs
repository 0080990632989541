//! Encoders compute what BERT written out in f64 does, which knows nothing of graphs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Parts, Recipe, all_outputs, cpu, engine};
use quadriga_conformance::Rng;
use quadriga_graph::{DType, blocks};
use quadriga_llm::{Embedder, EmbedderOptions, EngineOptions, Error, Pooling, cosine};
use quadriga_runtime::Scheduler;

/// A small encoder.
pub(crate) fn parts(architecture: &'static str, seed: u64) -> Parts {
    let small = Recipe { heads: 3, kv_heads: 3, width: 48, context: 40, ..Recipe::new(architecture) };
    parts_of(&Recipe { seed, tied: true, ..small })
}

/// The encoder of a recipe of two layers.
pub(crate) fn parts_of(recipe: &Recipe) -> Parts {
    let architecture = recipe.architecture;
    let mut parts = recipe.parts();
    parts.remove(&format!("{architecture}.attention.layer_norm_rms_epsilon"));
    parts.set(&format!("{architecture}.attention.layer_norm_epsilon"), 1e-6f32);
    parts.set(&format!("{architecture}.pooling_type"), 1u32);
    parts.remove("output_norm.weight");
    let width = recipe.width;
    parts.matrix("token_types.weight", DType::F32, [2, width], 3.0);
    norm(&mut parts, "token_embd_norm", width);
    for layer in 0..recipe.layers {
        let name = |part: &str| format!("blk.{layer}.{part}");
        parts.remove(&name("attn_norm.weight")).remove(&name("ffn_norm.weight"));
        norm(&mut parts, &name("attn_output_norm"), width);
        norm(&mut parts, &name("layer_output_norm"), width);
        if architecture == "bert" {
            parts.remove(&name("ffn_gate.weight"));
            parts.vector(&name("ffn_up.bias"), recipe.feed_forward, 0.0, 0.5);
            parts.vector(&name("ffn_down.bias"), width, 0.0, 0.5);
            for part in ["attn_q.bias", "attn_k.bias", "attn_v.bias"] {
                parts.vector(&name(part), width, 0.0, 0.5);
            }
            parts.vector(&name("attn_output.bias"), width, 0.0, 0.5);
        }
    }
    if architecture == "bert" {
        parts.matrix("position_embd.weight", DType::F32, [recipe.context as usize, width], 3.0);
    }
    parts
}

fn norm(parts: &mut Parts, name: &str, width: usize) {
    parts.vector(&format!("{name}.weight"), width, 1.0, 0.5);
    parts.vector(&format!("{name}.bias"), width, 0.0, 0.5);
}

/// Gives a model a WordPiece vocabulary of 100 tokens: five special ones, letters that begin words and letters within them.
pub(crate) fn add_word_pieces(parts: &mut Parts) {
    let mut tokens: Vec<String> = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(String::from).to_vec();
    tokens.extend(('a'..='z').map(|letter| format!("\u{2581}{letter}")));
    tokens.extend(('a'..='z').map(String::from));
    tokens.extend((tokens.len()..100).map(|number| format!("\u{2581}w{number}")));
    let types: Vec<i32> = (0..100).map(|token| if token < 5 { 3 } else { 1 }).collect();
    parts.set("tokenizer.ggml.model", "bert");
    parts.set("tokenizer.ggml.tokens", tokens.iter().map(String::as_str).collect::<Vec<_>>());
    parts.set("tokenizer.ggml.token_type", types);
    for (key, value) in [("unknown", 1u32), ("bos", 2), ("seperator", 3)] {
        parts.set(&format!("tokenizer.ggml.{key}_token_id"), value);
    }
}

/// The model written out: every tensor as f64.
pub(crate) struct Written<'p> {
    pub(crate) parts: &'p Parts,
    pub(crate) heads: usize,
}

pub(crate) type Rows = Vec<Vec<f64>>;

impl Written<'_> {
    fn find(&self, name: &str) -> Option<Rows> {
        let (_, dtype, dims, bytes) = self.parts.tensors.iter().find(|(known, ..)| known == name)?;
        let mut values = vec![0f32; dims.iter().product()];
        blocks::dequantize(*dtype, bytes, &mut values).unwrap();
        let columns = *dims.last().unwrap();
        Some(values.chunks(columns).map(|row| row.iter().map(|v| f64::from(*v)).collect()).collect())
    }

    fn get(&self, name: &str) -> Rows {
        self.find(name).unwrap_or_else(|| panic!("no {name}"))
    }

    fn linear(&self, name: &str, x: &Rows) -> Rows {
        let weight = self.get(&format!("{name}.weight"));
        let bias = self.find(&format!("{name}.bias"));
        let one = |row: &Vec<f64>| -> Vec<f64> {
            let product = |w: &Vec<f64>| w.iter().zip(row).map(|(a, b)| a * b).sum::<f64>();
            weight
                .iter()
                .enumerate()
                .map(|(i, w)| product(w) + bias.as_ref().map_or(0.0, |b| b[0][i]))
                .collect()
        };
        x.iter().map(one).collect()
    }

    fn norm(&self, name: &str, x: &Rows) -> Rows {
        let (weight, bias) = (self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")));
        let one = |row: &Vec<f64>| -> Vec<f64> {
            let count = row.len() as f64;
            let mean = row.iter().sum::<f64>() / count;
            let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count;
            let scaled =
                |(i, v): (usize, &f64)| (v - mean) / (variance + 1e-6).sqrt() * weight[0][i] + bias[0][i];
            row.iter().enumerate().map(scaled).collect()
        };
        x.iter().map(one).collect()
    }

    /// Rotates pairs of a head's first and second half by the position.
    fn rotate(&self, x: &mut Rows) {
        for (position, row) in x.iter_mut().enumerate() {
            let d = row.len() / self.heads;
            for head in row.chunks_mut(d) {
                for i in 0..d / 2 {
                    let angle = position as f64 * 10_000f64.powf(-2.0 * i as f64 / d as f64);
                    let (a, b) = (head[i], head[i + d / 2]);
                    head[i] = a * angle.cos() - b * angle.sin();
                    head[i + d / 2] = a * angle.sin() + b * angle.cos();
                }
            }
        }
    }

    fn attend(&self, q: &Rows, k: &Rows, v: &Rows) -> Rows {
        let d = q[0].len() / self.heads;
        let mut out = vec![vec![0.0; q[0].len()]; q.len()];
        for head in 0..self.heads {
            let part = head * d..(head + 1) * d;
            for (i, query) in q.iter().enumerate() {
                let score = |key: &Vec<f64>| {
                    let product = query[part.clone()].iter().zip(&key[part.clone()]);
                    product.map(|(a, b)| a * b).sum::<f64>() / (d as f64).sqrt()
                };
                let scores: Vec<f64> = k.iter().map(score).map(f64::exp).collect();
                let total: f64 = scores.iter().sum();
                for (weight, value) in scores.iter().zip(v) {
                    for c in part.clone() {
                        out[i][c] += weight / total * value[c];
                    }
                }
            }
        }
        out
    }

    pub(crate) fn run(&self, tokens: &[u32], nomic: bool) -> Rows {
        self.run_typed(tokens, &vec![0; tokens.len()], nomic)
    }

    /// The vectors of tokens that have these types.
    fn run_typed(&self, tokens: &[u32], types: &[usize], nomic: bool) -> Rows {
        let (embedding, vectors) = (self.get("token_embd.weight"), self.get("token_types.weight"));
        let typed = tokens.iter().zip(types);
        let mut x: Rows = typed.map(|(t, kind)| add(&embedding[*t as usize], &vectors[*kind])).collect();
        if !nomic {
            let positions = self.get("position_embd.weight");
            x = x.iter().zip(&positions).map(|(a, b)| add(a, b)).collect();
        }
        x = self.norm("token_embd_norm", &x);
        for layer in 0..2 {
            let name = |part: &str| format!("blk.{layer}.{part}");
            let [mut q, mut k, v] = ["attn_q", "attn_k", "attn_v"].map(|part| self.linear(&name(part), &x));
            if nomic {
                self.rotate(&mut q);
                self.rotate(&mut k);
            }
            let attended = self.linear(&name("attn_output"), &self.attend(&q, &k, &v));
            x = self.norm(&name("attn_output_norm"), &add_rows(&x, &attended));
            let mut up = self.linear(&name("ffn_up"), &x);
            if nomic {
                let gate = self.linear(&name("ffn_gate"), &x);
                for (up, gate) in up.iter_mut().flatten().zip(gate.iter().flatten()) {
                    *up *= gate / (1.0 + (-gate).exp());
                }
            } else {
                up.iter_mut().flatten().for_each(|u| *u *= 0.5 * (1.0 + erf(*u / 2f64.sqrt())));
            }
            let down = self.linear(&name("ffn_down"), &up);
            x = self.norm(&name("layer_output_norm"), &add_rows(&x, &down));
        }
        x
    }
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn add_rows(a: &Rows, b: &Rows) -> Rows {
    a.iter().zip(b).map(|(a, b)| add(a, b)).collect()
}

/// The error function, by its Taylor series: exact enough for the few units that occur here.
fn erf(x: f64) -> f64 {
    if x.abs() > 5.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

fn embedder(parts: &Parts, options: EmbedderOptions) -> Result<Embedder, Error> {
    Embedder::new(parts.model().unwrap(), &Scheduler::new([cpu(2)]), options, &mut |_| {})
}

fn tokens(seed: u64, count: usize) -> Vec<u32> {
    let mut rng = Rng::new(seed);
    (0..count).map(|_| rng.below(100) as u32).collect()
}

#[test]
fn embeddings_are_those_of_the_model_written_out() {
    for architecture in ["bert", "nomic-bert"] {
        for seed in 1..4 {
            let parts = parts(architecture, seed);
            let written = Written { parts: &parts, heads: 3 };
            for count in [1, 2, 17, 40] {
                let tokens = tokens(seed, count);
                let rows = written.run(&tokens, architecture == "nomic-bert");
                let mean: Vec<f32> = (0..48)
                    .map(|c| (rows.iter().map(|row| row[c]).sum::<f64>() / rows.len() as f64) as f32)
                    .collect();
                let row = |i: usize| rows[i].iter().map(|v| *v as f32).collect::<Vec<f32>>();
                for (pooling, expected) in
                    [(Pooling::Mean, mean), (Pooling::Cls, row(0)), (Pooling::Last, row(count - 1))]
                {
                    let options = EmbedderOptions {
                        pooling: Some(pooling),
                        normalize: false,
                        ..EmbedderOptions::default()
                    };
                    let found = embedder(&parts, options).unwrap().embed_tokens(&tokens).unwrap();
                    for (found, expected) in found.iter().zip(&expected) {
                        assert!(
                            (found - expected).abs() < 1e-4,
                            "{architecture}, seed {seed}, {count} tokens, {pooling:?}: {found} is not {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn the_pooling_of_the_file_is_the_default_and_vectors_have_length_one() {
    let parts = parts("bert", 5);
    let mut by_file = embedder(&parts, EmbedderOptions::default()).unwrap();
    assert_eq!(by_file.pooling(), Pooling::Mean);
    let tokens = tokens(7, 9);
    let unit = by_file.embed_tokens(&tokens).unwrap();
    let length: f64 = unit.iter().map(|v| f64::from(*v).powi(2)).sum();
    assert!((length - 1.0).abs() < 1e-6);
    let raw = EmbedderOptions { normalize: false, ..EmbedderOptions::default() };
    let raw = embedder(&parts, raw).unwrap().embed_tokens(&tokens).unwrap();
    assert!((cosine(&unit, &raw) - 1.0).abs() < 1e-6);
    let mut silent = parts;
    silent.remove("bert.pooling_type");
    assert_eq!(embedder(&silent, EmbedderOptions::default()).unwrap().pooling(), Pooling::Mean);
    // The same text again, after another one.
    by_file.embed_tokens(&tokens[..3]).unwrap();
    assert_eq!(by_file.embed_tokens(&tokens).unwrap(), unit);
}

#[test]
fn a_classification_head_scores_the_first_token() {
    let mut parts = parts("bert", 3);
    parts.matrix("cls.weight", DType::F32, [48, 48], 1.0);
    parts.vector("cls.bias", 48, 0.0, 0.5);
    parts.matrix("cls.output.weight", DType::F32, [1, 48], 1.0);
    parts.vector("cls.output.bias", 1, 0.0, 0.5);
    let tokens = tokens(2, 11);
    let written = Written { parts: &parts, heads: 3 };
    let first = vec![written.run(&tokens, false)[0].clone()];
    let pooled: Rows =
        written.linear("cls", &first).iter().map(|r| r.iter().map(|v| v.tanh()).collect()).collect();
    let expected = written.linear("cls.output", &pooled)[0][0];
    let options = EmbedderOptions { pooling: Some(Pooling::Rank), ..EmbedderOptions::default() };
    let found = embedder(&parts, options).unwrap().embed_tokens(&tokens).unwrap();
    assert_eq!(found.len(), 1);
    assert!((f64::from(found[0]) - expected).abs() < 1e-4, "{found:?} is not {expected}");
}

/// The second text of a pair has the second type of tokens, with its separator; so do many pairs of one batch.
#[test]
fn rerankers_tell_query_and_document_apart_by_their_types() {
    let mut parts = parts("bert", 6);
    add_word_pieces(&mut parts);
    parts.matrix("cls.weight", DType::F32, [48, 48], 1.0);
    parts.vector("cls.bias", 48, 0.0, 0.5);
    parts.matrix("cls.output.weight", DType::F32, [1, 48], 1.0);
    let written = Written { parts: &parts, heads: 3 };
    let score = |tokens: &[u32], types: &[usize]| {
        let first = vec![written.run_typed(tokens, types, false)[0].clone()];
        let pooled: Rows =
            written.linear("cls", &first).iter().map(|r| r.iter().map(|v| v.tanh()).collect()).collect();
        written.linear("cls.output", &pooled)[0][0]
    };
    // [CLS] a ##b [SEP] c d ##e [SEP]
    let (tokens, types) = ([2, 5, 32, 3, 7, 8, 35, 3], [0, 0, 0, 0, 1, 1, 1, 1]);
    let (expected, untyped) = (score(&tokens, &types), score(&tokens, &[0; 8]));
    assert!((expected - untyped).abs() > 0.01, "the types make no difference");
    let options = EmbedderOptions { pooling: Some(Pooling::Rank), ..EmbedderOptions::default() };
    let mut ranker = embedder(&parts, options).unwrap();
    let close =
        |found: f32, expected: f64| assert!((f64::from(found) - expected).abs() < 1e-4, "{found} {expected}");
    close(ranker.rank("ab", "c de").unwrap(), expected);
    let other = [2, 9, 3, 10, 3];
    let pairs: [&[u32]; 3] = [&other, &tokens, &tokens[..4]];
    let found = ranker.rank_batch(&pairs).unwrap();
    close(found[0], score(&other, &[0, 0, 0, 1, 1]));
    close(found[1], expected);
    // One text alone has the first type, and so has a text to embed.
    close(found[2], score(&tokens[..4], &[0; 4]));
    let options =
        EmbedderOptions { pooling: Some(Pooling::Cls), normalize: false, ..EmbedderOptions::default() };
    let found = embedder(&parts, options).unwrap().embed_tokens(&tokens).unwrap();
    found.iter().zip(&written.run(&tokens, false)[0]).for_each(|(found, expected)| close(*found, *expected));
}

#[test]
fn other_models_embed_with_their_hidden_states() {
    let recipe = Recipe::new("llama");
    let tokens = recipe.tokens(20);
    let options = EngineOptions { hidden: true, ..EngineOptions::default() }.cache(DType::F32);
    let mut plain = engine(recipe.model(), options);
    plain.feed(&tokens).unwrap();
    let scheduler = Scheduler::new([cpu(1)]);
    let mut embedder =
        Embedder::new(recipe.model(), &scheduler, EmbedderOptions::default(), &mut |_| {}).unwrap();
    assert_eq!(embedder.pooling(), Pooling::Last);
    let found = embedder.embed_tokens(&tokens).unwrap();
    assert!(cosine(&found, plain.hidden(0)) > 0.9999);
}

/// Texts that are computed together get the vectors that each gets alone.
#[test]
fn texts_of_a_batch_do_not_see_each_other() {
    let texts: Vec<Vec<u32>> =
        [3, 1, 40, 7, 7, 12, 2].iter().enumerate().map(|(seed, count)| tokens(seed as u64, *count)).collect();
    let mut head = parts("bert", 3);
    head.matrix("cls.output.weight", DType::F32, [2, 48], 1.0);
    for (parts, pooling) in [
        (parts("bert", 4), Pooling::Mean),
        (parts("nomic-bert", 4), Pooling::Last),
        (parts("bert", 5), Pooling::None),
        (head, Pooling::Rank),
    ] {
        for batch in [512, 16] {
            let engine = EngineOptions { batch, ..EngineOptions::default() };
            let options = EmbedderOptions { pooling: Some(pooling), engine, ..EmbedderOptions::default() };
            let together = embedder(&parts, options.clone()).unwrap().embed_batch(&texts).unwrap();
            let mut alone = embedder(&parts, options).unwrap();
            for (text, found) in texts.iter().zip(&together) {
                let expected = alone.embed_tokens(text).unwrap();
                assert_eq!(found.len(), expected.len());
                let differs = found.iter().zip(&expected).any(|(a, b)| (a - b).abs() > 1e-4);
                assert!(
                    !differs,
                    "{pooling:?}, batch {batch}, {} tokens: {found:?} {expected:?}",
                    text.len()
                );
            }
        }
    }
}

#[test]
fn sequences_embed_several_texts_at_once() {
    let recipe = Recipe::new("llama");
    let texts: Vec<Vec<u32>> = [4, 9, 1, 20, 6, 6].iter().map(|count| recipe.tokens(*count)).collect();
    for pooling in [Pooling::Last, Pooling::Mean, Pooling::Cls] {
        let embed = |sequences: usize| {
            let engine = EngineOptions { context: 20, batch: 16, sequences, ..EngineOptions::default() };
            let options = EmbedderOptions { pooling: Some(pooling), engine, ..EmbedderOptions::default() };
            let scheduler = Scheduler::new([cpu(1)]);
            let mut embedder = Embedder::new(recipe.model(), &scheduler, options, &mut |_| {}).unwrap();
            embedder.embed_batch(&texts).unwrap()
        };
        for (together, alone) in embed(3).iter().zip(embed(1)) {
            assert!(cosine(together, &alone) > 0.9999, "{pooling:?}");
        }
    }
}

#[test]
fn other_models_embed_without_logits_in_batches() {
    let recipe = Recipe::new("llama");
    let tokens = recipe.tokens(20);
    let exact = EngineOptions { batch: 7, ..EngineOptions::default() }.cache(DType::F32);
    let mut plain = engine(recipe.model(), EngineOptions { hidden: true, ..exact.clone() });
    plain.extend(&all_outputs(0, &tokens)).unwrap();
    let rows: Vec<Vec<f32>> = (0..20).map(|row| plain.hidden(row).to_vec()).collect();
    let mean: Vec<f32> = (0..rows[0].len()).map(|c| rows.iter().map(|r| r[c]).sum::<f32>() / 20.0).collect();
    for (pooling, wanted) in [(Pooling::Mean, &mean), (Pooling::Cls, &rows[0]), (Pooling::Last, &rows[19])] {
        let options = EmbedderOptions { pooling: Some(pooling), normalize: false, engine: exact.clone() };
        let wants = options.engine(&recipe.model());
        assert_eq!((wants.batch, wants.cache_keys, wants.logits), (7, DType::F32, false));
        let scheduler = Scheduler::new([cpu(1)]);
        let mut embedder = Embedder::new(recipe.model(), &scheduler, options, &mut |_| {}).unwrap();
        let found = embedder.embed_tokens(&tokens).unwrap();
        for (found, wanted) in found.iter().zip(wanted) {
            assert!((found - wanted).abs() < 1e-4, "{pooling:?}: {found} is not {wanted}");
        }
    }
    // Without logits, neither the graph nor the engine has anything of the vocabulary's size.
    let mut hidden = engine(recipe.model(), EngineOptions { hidden: true, logits: false, ..exact });
    hidden.extend(&all_outputs(0, &tokens)).unwrap();
    assert_eq!(hidden.hidden(19), rows[19]);
    assert!(hidden.logits(0).is_empty());
    let graph = hidden.session().plan().unwrap().graph();
    assert_eq!(graph.outputs().iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["hidden"]);
    let neither = EngineOptions { logits: false, ..EngineOptions::default() };
    assert!(neither.resolve(&recipe.model()).unwrap_err().to_string().contains("logits"));
}

#[test]
fn embeddings_and_scores_that_are_not_finite_are_errors() {
    for (value, printed) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let mut parts = parts("bert", 3);
        parts.matrix("cls.output.weight", DType::F32, [1, 48], 1.0);
        let last =
            parts.tensors.iter_mut().find(|(name, ..)| name == "blk.1.layer_output_norm.bias").unwrap();
        last.3[..4].copy_from_slice(&value.to_le_bytes());
        for (pooling, normalize) in
            [(Pooling::Mean, true), (Pooling::Cls, false), (Pooling::Last, true), (Pooling::Rank, true)]
        {
            let pooling = Some(pooling);
            let options = EmbedderOptions { pooling, normalize, ..EmbedderOptions::default() };
            let texts = [[1, 2, 3], [4, 5, 6]];
            let error = embedder(&parts, options).unwrap().embed_batch(&texts).unwrap_err().to_string();
            // An infinite length makes an infinite element NaN.
            let printed = if normalize && pooling != Some(Pooling::Rank) { "NaN" } else { printed };
            assert!(error.contains("text 1 ") && error.contains(printed), "{pooling:?}: {error}");
        }
    }
}

#[test]
fn what_cannot_be_embedded_is_refused() {
    let parts = parts("bert", 1);
    let mut embedder_ = embedder(&parts, EmbedderOptions::default()).unwrap();
    assert!(matches!(embedder_.embed_tokens(&[]), Err(Error::EmptyPrompt)));
    assert!(matches!(
        embedder_.embed_tokens(&[1; 41]),
        Err(Error::ContextFull { wanted: 41, context: 40, .. })
    ));
    assert!(matches!(embedder_.embed_tokens(&[100]), Err(Error::Token { token: 100, .. })));
    let rank = EmbedderOptions { pooling: Some(Pooling::Rank), ..EmbedderOptions::default() };
    assert!(embedder(&parts, rank).err().unwrap().to_string().contains("classification head"));
    let engine = EngineOptions { context: 41, ..EngineOptions::default() };
    let long = EmbedderOptions { engine, ..EmbedderOptions::default() };
    assert!(embedder(&parts, long).err().unwrap().to_string().contains("context"));
    // An encoder does not generate.
    let scheduler = Scheduler::new([cpu(1)]);
    let error =
        quadriga_llm::Engine::new(parts.model().unwrap(), &scheduler, EngineOptions::default(), &mut |_| {});
    assert!(error.err().unwrap().to_string().contains("encoder"));
}

#[test]
fn broken_encoders_are_refused_by_name() {
    for (key, value, named) in [
        ("bert.pooling_type", 9u32, "pooling_type"),
        ("bert.context_length", 41, "position_embd.weight"),
        ("bert.attention.head_count", 0, "attention.head_count"),
        ("bert.feed_forward_length", 7, "ffn_up.weight"),
        ("bert.expert_count", 2, "expert_count"),
        ("bert.nextn_predict_layers", 1, "nextn_predict_layers"),
    ] {
        let mut parts = parts("bert", 1);
        let error =
            parts.set(key, value).model().err().unwrap_or_else(|| panic!("{key} {value}")).to_string();
        assert!(error.contains(named), "{key} = {value}: {error}");
    }
    // As many types of tokens as the tokenizer counts have a vector; a single one may have none, and files that count none may
    // have any.
    for architecture in ["bert", "nomic-bert"] {
        let (count, name) = ("tokenizer.ggml.token_type_count", "token_types.weight");
        let made = |types: Option<u32>, tensor: bool| {
            let mut parts = parts(architecture, 1);
            if let Some(types) = types {
                parts.set(count, types);
            }
            if !tensor {
                parts.remove(name);
            }
            parts.model()
        };
        for (types, tensor) in [(2, false), (1, true), (3, true), (u32::MAX, true)] {
            let error = made(Some(types), tensor).err();
            let error = error.unwrap_or_else(|| panic!("{architecture}: {types} {tensor}")).to_string();
            assert!(error.contains(name), "{architecture}, {types} types: {error}");
        }
        for (types, tensor) in
            [(None, false), (None, true), (Some(0), false), (Some(1), false), (Some(2), true)]
        {
            assert!(made(types, tensor).is_ok(), "{architecture}: {types:?} {tensor}");
        }
    }
    for (architecture, tensor) in [
        ("bert", "position_embd.weight"),
        ("bert", "token_embd_norm.bias"),
        ("bert", "blk.1.attn_output_norm.weight"),
        ("bert", "blk.1.attn_output_norm.bias"),
        ("bert", "blk.0.attn_k.bias"),
        ("bert", "blk.0.attn_output.bias"),
        ("bert", "blk.1.ffn_down.bias"),
        ("nomic-bert", "token_embd_norm.bias"),
        ("nomic-bert", "blk.0.layer_output_norm.bias"),
    ] {
        let error = parts(architecture, 1).remove(tensor).model().err();
        let error = error.unwrap_or_else(|| panic!("{architecture} without {tensor}")).to_string();
        assert!(error.contains(tensor), "{error}");
    }
}

#[test]
fn a_single_type_of_tokens_may_have_no_vector() {
    for architecture in ["bert", "nomic-bert"] {
        let embed = |parts: &Parts| {
            embedder(parts, EmbedderOptions::default()).unwrap().embed_tokens(&[1, 2, 3]).unwrap()
        };
        let mut zero = parts(architecture, 1);
        for (name, .., bytes) in &mut zero.tensors {
            if name == "token_types.weight" {
                bytes.fill(0);
            }
        }
        let mut without = parts(architecture, 1);
        without.set("tokenizer.ggml.token_type_count", 1u32).remove("token_types.weight");
        assert_eq!(embed(&without), embed(&zero), "{architecture}");
        assert_ne!(embed(&without), embed(&parts(architecture, 1)), "{architecture}");
    }
}

#[test]
fn a_reranker_reads_query_and_document_as_its_vocabulary_says() {
    let mut parts = parts("bert", 3);
    parts.matrix("cls.output.weight", DType::F32, [1, 48], 1.0);
    let mut tokens: Vec<String> = ('a'..='z').map(String::from).collect();
    tokens.extend(["<s>", "</s>"].map(String::from));
    tokens.extend((tokens.len()..100).map(|i| format!("unused {i}")));
    let mut types = vec![1; 100];
    (types[26], types[27]) = (3, 3);
    parts.set("tokenizer.ggml.model", "gpt2").set("tokenizer.ggml.pre", "gpt-2");
    parts.set("tokenizer.ggml.tokens", tokens.iter().map(String::as_str).collect::<Vec<_>>());
    parts.set("tokenizer.ggml.token_type", types).set("tokenizer.ggml.merges", Vec::<&str>::new());
    for (key, value) in [("bos", 26u32), ("eos", 27), ("seperator", 27)] {
        parts.set(&format!("tokenizer.ggml.{key}_token_id"), value);
    }
    for key in ["bos", "eos", "sep"] {
        parts.set(&format!("tokenizer.ggml.add_{key}_token"), true);
    }
    let options = EmbedderOptions { pooling: Some(Pooling::Rank), ..EmbedderOptions::default() };
    let mut ranker = embedder(&parts, options.clone()).unwrap();
    // <s> query </s></s> document </s>
    let expected = ranker.embed_tokens(&[26, 0, 1, 27, 27, 2, 3, 27]).unwrap()[0];
    assert_eq!(ranker.rank("ab", "cd").unwrap(), expected);
    parts.set("tokenizer.ggml.add_sep_token", false);
    let mut without = embedder(&parts, options).unwrap();
    let expected = without.embed_tokens(&[26, 0, 1, 27, 2, 3, 27]).unwrap()[0];
    assert_eq!(without.rank("ab", "cd").unwrap(), expected);
}

#[test]
fn vectors_of_length_zero_have_no_direction() {
    let zero = [0.0f32; 3];
    assert_eq!([cosine(&zero, &[1.0, 2.0, 3.0]), cosine(&[1.0, 2.0, 3.0], &zero)], [0.0; 2]);
    assert!((cosine(&[1.0, 2.0, 2.0], &[2.0, 4.0, 4.0]) - 1.0).abs() < 1e-12);
    assert!((cosine(&[1.0, 0.0, 0.0], &[-3.0, 0.0, 0.0]) + 1.0).abs() < 1e-12);
}
