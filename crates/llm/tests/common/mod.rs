//! Small random models as GGUF files, and helpers for tests of engines.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

pub mod every_architecture;
pub mod experts;
mod families;
pub mod judge;
pub mod latent;
mod parts;
mod recipe;
pub mod recorded_rank;
pub mod recurrent;
pub mod reference;
pub mod serving;
pub mod streams;

use std::sync::Arc;

use quadriga_llm::{BatchToken, Engine, EngineOptions, Model};
use quadriga_runtime::{Backend, Scheduler};

pub use self::parts::Parts;
pub use self::recipe::{QueryNorms, Recipe, Scaling};

/// A CPU with this many threads and the best instruction set.
pub fn cpu(threads: usize) -> Arc<dyn Backend> {
    Arc::new(quadriga_cpu::Backend::builder().threads(threads).build().unwrap())
}

/// An engine on one thread.
pub fn engine(model: Model, options: EngineOptions) -> Engine {
    engine_on(cpu(1), model, options)
}

pub fn engine_on(backend: Arc<dyn Backend>, model: Model, options: EngineOptions) -> Engine {
    Engine::new(model, &Scheduler::new([backend]), options, &mut |_| {}).unwrap()
}

/// A batch of one sequence with outputs for all tokens.
pub fn all_outputs(sequence: usize, tokens: &[u32]) -> Vec<BatchToken> {
    tokens.iter().map(|token| BatchToken { sequence, token: *token, output: true }).collect()
}

/// Every row of logits after feeding tokens to sequence 0.
pub fn logits_of(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    engine.extend(&all_outputs(0, tokens)).unwrap();
    (0..tokens.len()).map(|row| engine.logits(row).to_vec()).collect()
}

/// The largest difference of two sets of rows, in standard deviations of the second.
pub fn distance<A, B>(found: &[Vec<A>], wanted: &[Vec<B>]) -> f64
where
    A: Copy + Into<f64>,
    B: Copy + Into<f64>,
{
    distances(found, wanted).0
}

/// The largest and the root mean square difference, in standard deviations of the second.
pub fn distances<A, B>(found: &[Vec<A>], wanted: &[Vec<B>]) -> (f64, f64)
where
    A: Copy + Into<f64>,
    B: Copy + Into<f64>,
{
    assert_eq!(found.len(), wanted.len());
    let (mut worst, mut error, mut sum, mut square, mut count) = (0f64, 0f64, 0f64, 0f64, 0f64);
    for (found, wanted) in found.iter().zip(wanted) {
        assert_eq!(found.len(), wanted.len());
        for (a, b) in found.iter().zip(wanted) {
            let (a, b): (f64, f64) = ((*a).into(), (*b).into());
            assert!(a.is_finite(), "{a} in place of {b}");
            worst = worst.max((a - b).abs());
            error += (a - b).powi(2);
            sum += b;
            square += b * b;
            count += 1.0;
        }
    }
    let deviation = (square / count - (sum / count).powi(2)).sqrt();
    (worst / deviation, (error / count).sqrt() / deviation)
}
