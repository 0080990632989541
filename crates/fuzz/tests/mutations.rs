//! Every target over its seeds, and over random mutations of them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::path::{Path, PathBuf};

use quadriga_conformance::Rng;
use quadriga_fuzz::{Target, targets};

/// Mutated inputs of each target.
const MUTATIONS: u64 = 400;
/// Inputs do not grow past so many bytes.
const LONGEST: usize = 4096;

fn folder(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz").join(kind)
}

/// The seeds of a target, in the order of their names.
fn seeds(name: &str) -> Vec<Vec<u8>> {
    let folder = folder("corpus").join(name);
    let mut files: Vec<PathBuf> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.iter().map(|file| std::fs::read(file).unwrap()).collect()
}

/// The words of a target's dictionary.
fn words(name: &str) -> Vec<Vec<u8>> {
    let text = std::fs::read_to_string(folder("dictionaries").join(name)).unwrap_or_default();
    let quoted = text.lines().filter_map(|line| line.strip_prefix('"')?.strip_suffix('"'));
    quoted.map(|word| word.replace("\\\"", "\"").into_bytes()).collect()
}

/// A few random changes to a seed: bytes, words, pieces that are removed, repeated, or taken from another seed.
fn mutated(seeds: &[Vec<u8>], words: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
    let mut bytes = rng.pick(seeds).unwrap().clone();
    for _ in 0..rng.range(1, 8) {
        let piece = |of: &[u8], rng: &mut Rng| {
            let start = rng.below(of.len() + 1);
            of[start..start + rng.below((of.len() - start).min(64) + 1)].to_vec()
        };
        let at = rng.below(bytes.len() + 1);
        match rng.below(7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << rng.below(8),
            1 if at < bytes.len() => {
                bytes[at] = *rng.pick(b"\0\x01\x7f\x80\xff09aZ{}[]\",:.-e\\ \n").unwrap()
            }
            2 => drop(bytes.drain(at..at + rng.below((bytes.len() - at).min(64) + 1))),
            3 => drop(bytes.splice(at..at, piece(&bytes.clone(), rng))),
            4 => drop(bytes.splice(at..at, piece(rng.pick(seeds).unwrap(), rng))),
            5 => {
                let numbers: [&[u8]; 6] =
                    [b"-1", b"1e999", b"18446744073709551616", b"null", b"{}", b"\"\\ud800\""];
                drop(bytes.splice(at..at, rng.pick(&numbers).unwrap().iter().copied()));
            }
            _ => drop(bytes.splice(at..at, rng.pick(words).cloned().unwrap_or_default())),
        }
        bytes.truncate(LONGEST);
    }
    bytes
}

/// Runs a target; prints the input it panics on.
fn run(name: &str, target: Target, input: &[u8], seed: u64) {
    let ended = std::panic::catch_unwind(|| target(input));
    assert!(ended.is_ok(), "{name}, seed {seed}: {:?}", String::from_utf8_lossy(input));
}

fn check(names: impl Fn(&str) -> bool) {
    for (name, target) in targets().into_iter().filter(|(name, _)| names(name)) {
        let (seeds, words) = (seeds(name), words(name));
        assert!(!seeds.is_empty(), "{name} has no seeds");
        seeds.iter().for_each(|input| run(name, target, input, 0));
        for seed in 0..MUTATIONS {
            let mut rng = Rng::new(seed);
            run(name, target, &mutated(&seeds, &words, &mut rng), seed);
        }
    }
}

#[test]
fn mutated_files_are_read_or_refused() {
    check(|name| !name.starts_with("request") && name != "template" && name != "tokenizer");
}

#[test]
fn mutated_requests_are_parsed_or_refused() {
    check(|name| name.starts_with("request"));
}

#[test]
fn mutated_templates_are_rendered_or_refused() {
    check(|name| name == "template");
}

#[test]
fn mutated_vocabularies_are_used_or_refused() {
    check(|name| name == "tokenizer");
}

#[test]
fn every_route_with_a_body_has_a_target() {
    let mut fuzzed = quadriga_fuzz::request::PATHS.to_vec();
    let mut paths = quadriga_server::requests::paths();
    fuzzed.sort_unstable();
    paths.sort_unstable();
    assert_eq!(fuzzed, paths);
}

#[test]
fn every_target_has_a_program_for_the_fuzzer() {
    let manifest = std::fs::read_to_string(folder("Cargo.toml")).unwrap();
    for (name, _) in targets() {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name} is not in fuzz/Cargo.toml");
        assert!(folder("fuzz_targets").join(name).with_extension("rs").exists(), "{name} has no program");
    }
}
