//! How much memory ranks take.

use super::*;

/// What each rank has besides its share: results and work memory, which do not shrink with the number of ranks, and pages of the file
/// around what is read in place, of which systems map up to half a megabyte for each layer.
const BESIDES: u64 = 12 << 20;

/// Bytes of a process that are in memory: its own, and pages of files that it has mapped.
fn resident(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let of = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    };
    of("RssAnon:") + of("RssFile:")
}

/// The memory of each rank of a server that has answered and waits.
fn after_an_answer(family: &Path, model: &Path, ranks: usize, how: &str) -> Vec<u64> {
    let model = ["-m", model.to_str().unwrap(), "-c", "512", "--parallel", "1", "--parallelism", how];
    let served = Served::start_with(family, &[], ranks, &model);
    let answer = whole(served.ask("hello", 8));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let processes = ranks_below(served.child.id());
    assert_eq!(processes.len(), ranks);
    let found = processes.iter().map(|rank| resident(*rank)).collect();
    let (code, rest) = terminated(served, processes[0]);
    assert_eq!(code, Some(0), "{rest}");
    found
}

/// One process packs what it reads, and so does each rank: no page of the file stays in memory that was packed.
#[test]
fn no_rank_takes_more_than_its_share_of_memory() {
    let heads = ["--heads", "8", "--kv-heads", "8"];
    let shape = ["--type", "q8_0", "--layers", "12", "--width", "768", "--ffn", "3072", "--vocab", "4000"];
    let large = Fixture::new(&[&heads[..], &shape].concat());
    let small = Fixture::new(&heads);
    for family in families() {
        let memory =
            |fixture: &Fixture, ranks: usize, how: &str| after_an_answer(&family, &fixture.model, ranks, how);
        let alone = memory(&large, 1, "auto")[0] - memory(&small, 1, "auto")[0];
        let file = std::fs::metadata(&large.model).unwrap().len();
        assert!(
            alone < file * 3 / 2,
            "one process: {alone} bytes more than for a small model, for {file} of weights"
        );
        for how in ["tensor", "pipeline"] {
            let base = memory(&small, 2, how);
            for (rank, (bytes, base)) in memory(&large, 2, how).into_iter().zip(base).enumerate() {
                let (own, share) = (bytes - base, alone / 2);
                assert!(
                    own <= share * 21 / 20 + BESIDES,
                    "{}, {how}: rank {rank} has {own} bytes of {share} and {BESIDES}, besides {base}",
                    family.display()
                );
            }
        }
    }
}
