//! Packs all instances (`id,lower,upper,size` files) of the given folders at each effort, and prints a table; with
//! `--scale`, the time by number of items.
//!
//! `cargo bench -p quadriga-runtime --bench packing -- [FOLDER…] [--only fast|search|exact] [--match TEXT] [--scale]`
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a benchmark"
)]

use quadriga_runtime::memory::packing::{Effort, Packer, PackingItem, PackingProblem, check, parse_csv};
use std::path::Path;
use std::time::Instant;

fn read(path: &Path) -> PackingProblem {
    let text = std::fs::read_to_string(path).expect("a readable file");
    PackingProblem::new(parse_csv(&text).expect("a packing instance"))
}

/// A transformer's prefill: sizes and lifetimes as in a real layer, repeated for each layer.
fn transformer(layers: u32) -> PackingProblem {
    let layer: [(u32, u32, u64); 12] = [
        (0, 20, 8192), // the residual stream
        (1, 8, 8192),
        (3, 6, 8192),
        (5, 13, 8192),
        (6, 11, 2048),
        (7, 10, 2048),
        (12, 15, 8192),
        (14, 16, 8192),
        (15, 27, 8192),
        (17, 21, 8192),
        (20, 24, 22016),
        (22, 25, 22016),
    ];
    let period = 26;
    let last = layers * period + 4;
    let mut items =
        vec![PackingItem { size: 4, start: 0, end: last }, PackingItem { size: 2, start: 0, end: last - 9 }];
    for index in 0..layers {
        let begin = index * period;
        items.extend(layer.iter().map(|&(start, end, size)| PackingItem {
            size: size << 10,
            start: begin + start,
            end: (begin + end).min(last),
        }));
    }
    items.push(PackingItem { size: 8192 << 10, start: last - 4, end: last });
    items.push(PackingItem { size: 32000 << 2, start: last - 2, end: last });
    PackingProblem { alignment: 32, ..PackingProblem::new(items) }
}

/// How packing time grows with the number of items: a first packing, and a second one with the same packer.
fn scale() {
    println!("| items | peak / lower bound | strategy | first ms | again ms | again ns/item |");
    println!("|---|---|---|---|---|---|");
    for layers in [100, 833, 8_333, 27_777, 83_333] {
        let problem = transformer(layers);
        let mut packer = Packer::default();
        let mut times = [0.0; 2];
        for time in &mut times {
            let began = Instant::now();
            packer.pack(&problem, Effort::Fast).expect("a problem that can be packed");
            *time = began.elapsed().as_secs_f64() * 1e3;
        }
        let packing = packer.pack(&problem, Effort::Fast).expect("a problem that can be packed");
        println!(
            "| {} | {:.4} | {} | {:.2} | {:.2} | {:.0} |",
            problem.items.len(),
            packing.ratio(),
            packing.strategy,
            times[0],
            times[1],
            times[1] * 1e6 / problem.items.len() as f64
        );
    }
}

fn main() {
    let (mut folders, mut only, mut matching) = (Vec::new(), None, String::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--bench" => {}
            "--scale" => return scale(),
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
                check(&problem, packing).expect("a valid packing");
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
