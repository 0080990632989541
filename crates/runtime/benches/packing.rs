//! Packs all instances (`id,lower,upper,size` files) of the folders given, at each effort, and prints a table.
//!
//! `cargo bench -p quadriga-runtime --bench packing -- FOLDER… [--only fast|search|exact] [--match TEXT]`
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a benchmark"
)]

use quadriga_runtime::memory::packing::{Effort, Item, Packer, Problem, check};
use std::path::Path;
use std::time::Instant;

fn read(path: &Path) -> Problem {
    let text = std::fs::read_to_string(path).expect("a readable file");
    let items = text.lines().skip(1).filter(|line| !line.is_empty()).map(|line| {
        let mut fields = line.split(',').skip(1).map(|field| field.trim().parse::<u64>().expect("a number"));
        let (start, end) = (fields.next().unwrap() as u32, fields.next().unwrap() as u32);
        Item { size: fields.next().unwrap(), start, end }
    });
    Problem::new(items.collect())
}

fn main() {
    let (mut folders, mut only, mut matching) = (Vec::new(), None, String::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--bench" => {}
            "--only" => only = arguments.next(),
            "--match" => matching = arguments.next().unwrap_or_default(),
            _ => folders.push(argument),
        }
    }
    if folders.is_empty() {
        folders.push(format!("{}/tests/data/packing", env!("CARGO_MANIFEST_DIR")));
    }
    println!("| instance | n | lower bound | effort | peak | ratio | optimal | strategy | ms |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for folder in folders {
        let mut paths: Vec<_> =
            std::fs::read_dir(&folder).expect("a folder").map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        for path in paths.iter().filter(|path| path.extension().is_some_and(|extension| extension == "csv")) {
            let name = path.file_stem().unwrap().to_string_lossy();
            if !name.contains(&matching) {
                continue;
            }
            let problem = read(path);
            let capacity = name.split('.').nth(1).and_then(|part| part.parse().ok());
            let efforts = [
                ("fast", Effort::Fast),
                ("search", Effort::Search { seed: 1, steps: 50_000_000 }),
                ("exact", Effort::Exact { capacity, steps: 400_000_000 }),
            ];
            for (effort, how) in
                efforts.into_iter().filter(|(name, _)| only.as_ref().is_none_or(|only| only == name))
            {
                let mut packer = Packer::default();
                let began = Instant::now();
                let packing = packer.pack(&problem, how).expect("a problem that can be packed");
                let milliseconds = began.elapsed().as_secs_f64() * 1e3;
                check(&problem, packing).expect("a right packing");
                println!(
                    "| {name} | {} | {} | {effort} | {} | {:.4} | {} | {} | {milliseconds:.2} |",
                    problem.items.len(),
                    packing.lower_bound,
                    packing.peak,
                    packing.ratio(),
                    packing.proved_optimal,
                    packing.strategy,
                );
            }
        }
    }
}
