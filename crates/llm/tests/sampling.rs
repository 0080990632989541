//! The effect of sampling options.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::BTreeSet;

use quadriga_conformance::Rng;
use quadriga_llm::Error;
use quadriga_llm::sampling::{
    Sampler, SamplingOptions, argmax, log_probabilities, log_probability, top_log_probabilities,
};

fn plain() -> SamplingOptions {
    SamplingOptions { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, ..SamplingOptions::default() }
}

fn logits(random: &mut Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| (random.uniform(-6.0, 6.0) * 4.0).round() as f32 / 4.0).collect()
}

/// All tokens that occur in many draws.
fn drawn(options: SamplingOptions, logits: &[f32], draws: usize) -> BTreeSet<u32> {
    let mut sampler = Sampler::new(options).unwrap();
    (0..draws).map(|_| sampler.sample(logits).unwrap()).collect()
}

/// The tokens that the options allow, found by sorting all of them.
fn allowed(options: &SamplingOptions, logits: &[f32]) -> Vec<u32> {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut all: Vec<(u32, f32)> =
        (0..).zip(logits.iter().copied()).filter(|one| one.1 != f32::NEG_INFINITY).collect();
    all.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
    if options.top_k > 0 {
        all.truncate(options.top_k);
    }
    let weight = |logit: f32| f64::from(logit - best).exp();
    let total: f64 = all.iter().map(|one| weight(one.1)).sum();
    let mut reached = 0.0;
    let needed = all.iter().position(|one| {
        reached += weight(one.1);
        reached >= f64::from(options.top_p) * total
    });
    if options.top_p < 1.0 {
        all.truncate(needed.map_or(usize::MAX, |at| at + 1));
    }
    all.retain(|one| weight(one.1) >= f64::from(options.min_p));
    all.into_iter().map(|one| one.0).collect()
}

#[test]
fn exactly_the_allowed_tokens_are_sampled() {
    let seed = 21;
    let mut random = Rng::new(seed);
    for round in 0..40 {
        let count = 1 + random.below(40);
        let logits = logits(&mut random, count);
        let options = SamplingOptions {
            top_k: random.below(12),
            top_p: *random.pick(&[0.3, 0.7, 0.93, 1.0]).unwrap(),
            min_p: *random.pick(&[0.0, 0.02, 0.3]).unwrap(),
            temperature: 8.0, // so flat that everything left comes up
            seed: round,
            ..plain()
        };
        let expected: BTreeSet<u32> = allowed(&options, &logits).into_iter().collect();
        assert_eq!(
            drawn(options.clone(), &logits, 4000),
            expected,
            "seed {seed}, round {round}: {options:?}"
        );
    }
}

#[test]
fn partial_sorting_of_a_large_vocabulary_gives_the_same_tokens() {
    let mut random = Rng::new(4);
    let logits = logits(&mut random, 20_000);
    let options = SamplingOptions { top_p: 0.2, ..plain() };
    let expected: BTreeSet<u32> = allowed(&options, &logits).into_iter().collect();
    let seen = drawn(options, &logits, 300);
    assert!(expected.len() > 300 && seen.is_subset(&expected), "{} of {}", seen.len(), expected.len());
}

#[test]
fn frequencies_follow_the_probabilities() {
    let logits = [0.0f32, 1.0, 2.0, f32::NEG_INFINITY, -1.0];
    let expected: Vec<f64> = log_probabilities(&logits).unwrap().into_iter().map(f64::exp).collect();
    let mut sampler = Sampler::new(plain()).unwrap();
    let mut counts = [0u32; 5];
    for _ in 0..40_000 {
        counts[sampler.sample(&logits).unwrap() as usize] += 1;
    }
    for (count, expected) in counts.iter().zip(&expected) {
        assert!((f64::from(*count) / 40_000.0 - expected).abs() < 0.01, "{counts:?} {expected:?}");
    }
    assert_eq!(counts[3], 0, "an excluded token never comes");
}

#[test]
fn a_seed_gives_these_tokens_on_every_machine() {
    let logits: Vec<f32> =
        (0..1000u32).map(|token| (token.wrapping_mul(2_654_435_761) >> 20) as f32 / 512.0).collect();
    let choose = |seed| {
        let mut sampler = Sampler::new(SamplingOptions { seed, ..SamplingOptions::default() }).unwrap();
        (0..8).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(choose(42), choose(42));
    assert_ne!(choose(42), choose(43));
    assert_eq!(choose(42), EXPECTED);
}

/// Computed by an independent program: a change here changes the results of every seed.
const EXPECTED: [u32; 8] = [754, 165, 288, 364, 55, 898, 220, 809];

#[test]
fn greedy_takes_the_argmax_and_of_equals_the_first() {
    let mut sampler = Sampler::new(SamplingOptions { temperature: 0.0, ..plain() }).unwrap();
    assert_eq!(sampler.sample(&[1.0, 3.0, 3.0, f32::NEG_INFINITY]).unwrap(), 1);
}

#[test]
fn recent_tokens_are_penalized_until_they_are_no_longer_recent() {
    let options = SamplingOptions { temperature: 0.0, repeat_penalty: 2.0, repeat_last_n: 2, ..plain() };
    let mut sampler = Sampler::new(options).unwrap();
    let logits = [4.0, 3.0, -1.0];
    assert_eq!(sampler.sample(&logits).unwrap(), 0);
    sampler.accept(0);
    sampler.accept(7_000_000); // beyond the vocabulary: nothing to penalize
    assert_eq!(sampler.sample(&logits).unwrap(), 1);
    sampler.accept(1);
    assert_eq!(sampler.sample(&logits).unwrap(), 0, "token 0 has left the window");
    let mut negative =
        Sampler::new(SamplingOptions { temperature: 0.0, repeat_penalty: 3.0, ..plain() }).unwrap();
    negative.accept(0);
    assert_eq!(negative.sample(&[-1.0, -2.0]).unwrap(), 1, "a negative logit is made smaller, not larger");
}

#[test]
fn unusable_logits_are_an_error() {
    for temperature in [0.0, 1.0] {
        let mut sampler = Sampler::new(SamplingOptions { temperature, ..plain() }).unwrap();
        let bad: [&[f32]; 4] =
            [&[], &[1.0, f32::NAN], &[f32::INFINITY, 0.0], &[f32::NEG_INFINITY, f32::NEG_INFINITY]];
        for logits in bad {
            assert!(matches!(sampler.sample(logits), Err(Error::Logits { .. })), "{logits:?}");
            assert!(log_probabilities(logits).is_err() && top_log_probabilities(logits, 1).is_err());
        }
        let message = sampler.sample(&[0.0, f32::NAN]).unwrap_err().to_string();
        assert!(message.contains("token 1 is NaN"), "{message}");
        assert_eq!(sampler.sample(&[f32::NEG_INFINITY, f32::MIN]).unwrap(), 1);
        assert!(sampler.sample(&[f32::MAX, f32::MIN]).is_ok());
    }
}

#[test]
fn options_out_of_range_are_named() {
    let wrong = [
        ("temperature", SamplingOptions { temperature: -1.0, ..plain() }),
        ("temperature", SamplingOptions { temperature: f32::NAN, ..plain() }),
        ("top-p", SamplingOptions { top_p: -0.1, ..plain() }),
        ("top-p", SamplingOptions { top_p: 1.5, ..plain() }),
        ("min-p", SamplingOptions { min_p: -0.1, ..plain() }),
        ("repeat-penalty", SamplingOptions { repeat_penalty: 0.0, ..plain() }),
    ];
    for (name, options) in wrong {
        let message = Sampler::new(options).unwrap_err().to_string();
        assert!(message.starts_with(name), "{message}");
    }
    let tiny = SamplingOptions { temperature: f32::MIN_POSITIVE, ..plain() };
    assert_eq!(Sampler::new(tiny).unwrap().sample(&[1.0, 2.0]).unwrap(), 1);
}

#[test]
fn log_probabilities_are_natural_and_over_the_whole_vocabulary() {
    let logits = [1000.0f32, 1001.0, 999.0, 1001.0];
    let total = (1.0f64 + 1.0 + (-1.0f64).exp() + (-2.0f64).exp()).ln();
    let top = top_log_probabilities(&logits, 3).unwrap();
    assert_eq!(top.iter().map(|one| one.0).collect::<Vec<_>>(), [1, 3, 0]);
    assert!((top[0].1 + total).abs() < 1e-12 && (top[2].1 + 1.0 + total).abs() < 1e-12);
    assert!((log_probability(&logits, 2).unwrap() + 2.0 + total).abs() < 1e-12);
    assert!(matches!(log_probability(&logits, 4), Err(Error::Token { token: 4, count: 4 })));
    assert_eq!(top_log_probabilities(&logits, 99).unwrap().len(), 4);
}

#[test]
fn of_equally_probable_tokens_the_smallest_is_taken_and_both_zeros_are_equal() {
    let rows: [&[f32]; 4] =
        [&[-1.0, 2.0, 2.0], &[-1.0, -0.0, 0.0], &[0.0, -0.0], &[f32::NEG_INFINITY, -9.0, -9.0]];
    for row in rows {
        let wanted = argmax(row).unwrap();
        assert_eq!(wanted, u32::from(row[0] < 0.0), "{row:?}");
        for options in [
            SamplingOptions { temperature: 0.0, ..plain() },
            SamplingOptions { top_k: 1, ..plain() },
            // Nothing is recent, so the penalty changes nothing; but this is another way.
            SamplingOptions { temperature: 0.0, repeat_penalty: 2.0, ..plain() },
        ] {
            assert_eq!(options.is_greedy(), options.repeat_penalty == 1.0);
            assert_eq!(Sampler::new(options).unwrap().sample(row).unwrap(), wanted, "{row:?}");
        }
        assert_eq!(top_log_probabilities(row, 1).unwrap()[0].0, wanted);
    }
    assert!(!plain().is_greedy());
}
