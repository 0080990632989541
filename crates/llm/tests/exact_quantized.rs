//! Quantized Gemma 3, BERT and Nomic Embed with the engine's own settings, an F16 KV cache and quantized activations, stay within
//! limits of exact results: float64 activations with the same weights.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::reference::Reference;
use crate::common::{Parts, Recipe, cpu, engine_on};
use crate::encoders::{Written, add_word_pieces, parts_of};
use quadriga_graph::DType;
use quadriga_llm::evaluate::{CaseKind, EvalCase, ResultFields, evaluate};
use quadriga_llm::{Embedder, EmbedderOptions, Engine, EngineOptions, Pooling};
use quadriga_runtime::Scheduler;

/// Nats: the largest mean difference of the best token's log-probability.
const DRIFT: f64 = 0.03;
/// The largest relative difference of the mean negative log-likelihood.
const LIKELIHOOD: f64 = 0.0005;
/// The least cosine of an embedding and the exact one.
const COSINE: f64 = 0.9999;

/// Blocks of 32 and of 256 elements, of 4 to 8 bits.
const TYPES: [DType; 4] = [DType::Q8_0, DType::Q4_0, DType::Q6_K, DType::Q4_K];

const TEXT: &str = "When a model is quantized, each block of its weights has a scale, and each weight a few bits. The \
    activations are quantized, too, for the integer products of a CPU; that is where the error of an engine comes \
    from, as the weights of the file are what they are. A reference that computes in double precision, with the same \
    weights, tells how large it is. Windows, norms of queries and keys, and a scaled embedding must not add to it.";

/// Gemma 3 with a layer without window, of whose tokens some are far more probable than others, as in a trained model. With the
/// embedding as output matrix a random model repeats its input, so that it has one of its own.
fn gemma3(dtype: DType) -> (Recipe, Parts) {
    let family = Recipe::families().into_iter().find(|recipe| recipe.architecture == "gemma3").unwrap();
    let recipe = Recipe {
        width: 256,
        key_length: 64,
        value_length: 64,
        rope_dims: 64,
        feed_forward: 512,
        embedding_scale: 16.0,
        window: Some(24),
        context: 256,
        text: true,
        tied: false,
        dtype,
        ..family
    };
    let mut parts = recipe.parts();
    let (.., bytes) = parts.tensors.iter_mut().find(|(name, ..)| name == "output_norm.weight").unwrap();
    for value in bytes.as_chunks_mut::<4>().0 {
        *value = (2.0 * f32::from_le_bytes(*value)).to_le_bytes();
    }
    (recipe, parts)
}

/// The log-probabilities after each token.
fn exact(reference: &Reference, tokens: &[u32]) -> Vec<Vec<f64>> {
    let normalized = |row: Vec<f64>| -> Vec<f64> {
        let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum = row.iter().map(|logit| (logit - most).exp()).sum::<f64>().ln() + most;
        row.into_iter().map(|logit| logit - sum).collect()
    };
    reference.run(tokens).1.into_iter().map(normalized).collect()
}

fn case(kind: CaseKind, text: &str) -> EvalCase {
    EvalCase { name: "case".to_owned(), kind, text: text.to_owned(), special: false, n: 16, ctx: 96 }
}

/// The relative difference of the mean negative log-likelihood.
fn likelihood_error(engine: &mut Engine, reference: &Reference) -> f64 {
    let ResultFields::Nll { nll, count, .. } = evaluate(engine, &case(CaseKind::Nll, TEXT)).unwrap().result
    else {
        panic!("no likelihood")
    };
    let tokens = engine.model().tokenizer().unwrap().encode(TEXT, false);
    let (mut sum, mut counted) = (0.0, 0);
    for chunk in tokens.chunks_exact(96) {
        let rows = exact(reference, &chunk[..95]);
        sum -= rows.iter().zip(&chunk[1..]).map(|(row, next)| row[*next as usize]).sum::<f64>();
        counted += 95;
    }
    assert_eq!(count, counted);
    (nll / (sum / counted as f64) - 1.0).abs()
}

/// The mean difference of the best token's log-probability, over greedy continuations.
fn drift(engine: &mut Engine, reference: &Reference) -> f64 {
    let mut differences = Vec::new();
    for start in [0, 60, 150, 240, 330] {
        let ResultFields::Greedy { tokens, greedy, top5 } =
            evaluate(engine, &case(CaseKind::Greedy, &TEXT[start..start + 40])).unwrap().result
        else {
            panic!("no continuation")
        };
        let all = [&tokens[..], &greedy[..greedy.len() - 1]].concat();
        for (row, found) in exact(reference, &all)[tokens.len() - 1..].iter().zip(&top5) {
            let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
            let found = found.iter().find(|(token, _)| *token as usize == best);
            let (_, found) = found.unwrap_or_else(|| panic!("{best} is not among {top5:?}"));
            differences.push((found - row[best]).abs());
        }
    }
    differences.iter().sum::<f64>() / differences.len() as f64
}

#[test]
fn quantized_gemma_3_keeps_to_its_limits() {
    for dtype in TYPES {
        let (recipe, parts) = gemma3(dtype);
        let options = EngineOptions { context: 256, ..EngineOptions::default() };
        let mut engine = engine_on(cpu(2), parts.model().unwrap(), options);
        let reference = Reference::of(&recipe, parts);
        let (likelihood, drift) = (likelihood_error(&mut engine, &reference), drift(&mut engine, &reference));
        println!("{dtype}: drift {drift:.4} nats, likelihood error {:.4} %", likelihood * 100.0);
        assert!(likelihood <= LIKELIHOOD, "{dtype}: likelihood off by {:.4} %", likelihood * 100.0);
        assert!(drift <= DRIFT, "{dtype}: drift of {drift:.4} nats");
    }
}

fn exact_cosine(found: &[f32], wanted: &[f64]) -> f64 {
    let found: Vec<f64> = found.iter().map(|value| f64::from(*value)).collect();
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    product(&found, wanted) / (product(&found, &found) * product(wanted, wanted)).sqrt()
}

#[test]
fn quantized_encoders_keep_to_their_limits() {
    for architecture in ["bert", "nomic-bert"] {
        for dtype in TYPES {
            let recipe =
                Recipe { kv_heads: 4, context: 256, tied: true, ..Recipe::wide(architecture, dtype) };
            let mut parts = parts_of(&recipe);
            add_word_pieces(&mut parts);
            let written = Written { parts: &parts, heads: 4 };
            let mut worst: f64 = 1.0;
            for pooling in [Pooling::Mean, Pooling::Cls, Pooling::Last] {
                let options = EmbedderOptions { pooling: Some(pooling), ..EmbedderOptions::default() };
                let scheduler = Scheduler::new([cpu(2)]);
                let mut embedder =
                    Embedder::new(parts.model().unwrap(), &scheduler, options, &mut |_| {}).unwrap();
                for text in ["a cat sat on the mat", "x", &TEXT[..200]] {
                    let tokens = embedder.tokenize(text).unwrap();
                    let rows = written.run(&tokens, architecture == "nomic-bert");
                    let wanted: Vec<f64> = match pooling {
                        Pooling::Mean => {
                            let sum = |column: usize| rows.iter().map(|row| row[column]).sum::<f64>();
                            (0..recipe.width).map(sum).collect()
                        }
                        Pooling::Cls => rows[0].clone(),
                        _ => rows[rows.len() - 1].clone(),
                    };
                    worst = worst.min(exact_cosine(&embedder.embed(text).unwrap(), &wanted));
                }
            }
            println!("{architecture} in {dtype}: cosine of at least {worst:.6}");
            assert!(worst >= COSINE, "{architecture} in {dtype}: {worst}");
        }
    }
}
