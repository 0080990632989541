#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use super::clocks::{Meeting, RankStep, TimeParts, run};
use super::routing::{ExpertCounts, RoutedStep};
use super::*;

const NOTHING: Link = Link { bytes_per_second: f64::INFINITY, latency: 0.0, is_memory: false };
const LINK: Link = Link { bytes_per_second: 1e3, latency: 0.5, is_memory: false };

fn compute(memory: f64) -> RankStep {
    RankStep::Compute(TimeParts { memory, ..TimeParts::default() })
}

fn sum(members: std::ops::Range<usize>, bytes: f64) -> RankStep {
    RankStep::Meet { members, meeting: Meeting::AllReduce, bytes, sent: bytes as u64 }
}

fn ends(programs: &[Vec<RankStep>], link: &Link) -> Vec<f64> {
    run(programs, link).unwrap().iter().map(|clock| clock.now.seconds()).collect()
}

fn near(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-9 * expected.abs().max(1.0), "{found} instead of {expected}");
}

#[test]
fn ranks_that_meet_wait_for_the_latest_and_for_the_link() {
    let programs = [vec![compute(1.0), sum(0..2, 1e3), compute(1.0)], vec![compute(3.0), sum(0..2, 1e3)]];
    assert_eq!(ends(&programs, &NOTHING), [4.0, 3.0]);
    // There and back: twice the latency, and half of the bytes each time.
    let clocks = run(&programs, &LINK).unwrap();
    near(clocks[0].now.seconds(), 3.0 + 2.0 * 0.5 + 1.0 + 1.0);
    let path = clocks[0].now;
    assert_eq!((path.memory, path.latency), (4.0, 1.0), "the path is that of the slower rank");
    assert_eq!((clocks[0].busy, clocks[0].sent), (2.0, 1000));
}

#[test]
fn groups_meet_on_their_own_while_messages_arrive() {
    // Rank 0 gets a message while it waits at a meeting: it is counted there once.
    let programs = [
        vec![sum(0..2, 0.0), RankStep::Receive { from: 2, tag: 1 }],
        vec![compute(5.0), sum(0..2, 0.0)],
        vec![RankStep::Send { to: 0, tag: 1, bytes: 500.0 }, sum(2..4, 0.0)],
        vec![compute(1.0), sum(2..4, 0.0)],
    ];
    assert_eq!(ends(&programs, &NOTHING), [5.0, 5.0, 1.0, 1.0]);
    let late = ends(&programs, &LINK);
    near(late[0], 6.0);
    near(late[3], 2.0);
}

#[test]
fn messages_of_a_rank_share_its_link_and_do_not_delay_it() {
    let send = |to: usize| RankStep::Send { to, tag: 0, bytes: 2e3 };
    let receive = || vec![RankStep::Receive { from: 0, tag: 0 }];
    let found = ends(&[vec![send(1), send(2), compute(1.0)], receive(), receive()], &LINK);
    assert_eq!(found, [1.0, 0.5 + 2.0, 0.5 + 4.0]);
}

#[test]
fn micro_batches_fill_a_pipeline() {
    for (stages, batches) in [(1, 1), (2, 2), (3, 7), (5, 2)] {
        let program = |stage: usize| {
            let step = || {
                let receive = (stage > 0).then(|| RankStep::Receive { from: stage - 1, tag: 0 });
                let send =
                    (stage + 1 < stages).then_some(RankStep::Send { to: stage + 1, tag: 0, bytes: 1.0 });
                receive.into_iter().chain([compute(2.0)]).chain(send)
            };
            (0..batches).flat_map(|_| step()).collect::<Vec<_>>()
        };
        let programs: Vec<_> = (0..stages).map(program).collect();
        near(ends(&programs, &NOTHING)[stages - 1], 2.0 * (batches + stages - 1) as f64);
    }
}

#[test]
fn what_never_comes_is_an_error() {
    let error = run(&[vec![compute(1.0)], vec![RankStep::Receive { from: 0, tag: 3 }]], &LINK).unwrap_err();
    assert!(error.to_string().contains("simulated rank 1 waits for ever"), "{error}");
    assert!(run(&[vec![sum(0..2, 1.0)], vec![]], &LINK).is_err());
}

#[test]
fn every_division_sees_the_same_experts() {
    let counts = ExpertCounts { all: 16, used: 3 };
    let step = |first, tokens| RoutedStep { seed: 1, round: 2, first, tokens };
    let all = step(0, 8).work(5, counts, &(0..16));
    assert_eq!(all.pairs, 24);
    assert!(all.distinct > 3 && all.distinct < 16, "{all:?}");
    let parts = [0..5, 5..6, 6..16].map(|own| step(0, 8).work(5, counts, &own));
    assert_eq!(parts.iter().map(|part| part.distinct).sum::<usize>(), all.distinct);
    assert_eq!(parts.iter().map(|part| part.pairs).sum::<usize>(), 24);
    // Each of several micro-batches uses some of them.
    let halves = [step(0, 4), step(4, 4)].map(|step| step.work(5, counts, &(0..16)).distinct);
    assert!(halves.iter().all(|half| *half <= all.distinct) && halves.iter().sum::<usize>() >= all.distinct);
    assert_ne!(step(0, 1).work(5, counts, &(0..8)), step(0, 1).work(6, counts, &(0..8)), "layers differ");
    assert_eq!(step(0, 1).work(0, ExpertCounts { all: 16, used: 16 }, &(0..16)).distinct, 16);
}

#[test]
fn stragglers_have_a_factor_and_a_rank() {
    let read = |text: &str| text.parse::<Straggler>();
    assert_eq!(read("1.2"), Ok(Straggler { factor: 1.2, rank: Some(0) }));
    assert_eq!(read("2,3"), Ok(Straggler { factor: 2.0, rank: Some(3) }));
    assert_eq!(read("2,random"), Ok(Straggler { factor: 2.0, rank: None }));
    for text in ["", "0.5", "x", "2,", "2,-1", "inf"] {
        assert!(read(text).is_err(), "{text}");
    }
}

#[test]
fn micro_batches_have_all_requests() {
    let of = |requests, batches| sequences_of(requests, batches).collect::<Vec<_>>();
    assert_eq!(of(5, 2), [(0, 2), (2, 3)]);
    assert_eq!(of(1, 1), [(0, 1)]);
    assert_eq!(of(32, 5).iter().map(|(_, count)| count).sum::<usize>(), 32);
}
