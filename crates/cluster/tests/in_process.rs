//! Ranks that are threads.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use std::sync::Barrier;
use std::time::Duration;

use quadriga_cluster::{ClusterError, Communicator, InProcess, Limits, Operation, in_process};

/// Runs a function on each of several ranks.
fn on_ranks<T: Send>(ranks: Vec<InProcess>, run: impl Fn(InProcess) -> T + Sync) -> Vec<T> {
    let run = &run;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn random_operations_have_the_results_of_a_sequential_program() {
    for (seed, size) in [(1, 1), (2, 2), (3, 3), (4, 4), (5, 7)] {
        on_ranks(in_process(size, Limits::default()), |ranks| common::random_operations(&ranks, seed, 60));
    }
}

#[test]
fn sends_do_not_wait_for_their_receivers() {
    for size in 1..=4 {
        on_ranks(in_process(size, Limits::default()), |ranks| common::crossed_messages(&ranks));
    }
}

#[test]
fn an_operation_is_complete_though_the_work_beside_it_panics() {
    for size in 2..=4 {
        on_ranks(in_process(size, Limits::default()), |ranks| common::panics(&ranks));
    }
}

#[test]
fn groups_have_operations_of_their_own() {
    for size in 1..=5 {
        on_ranks(in_process(size, Limits::default()), |ranks| common::groups(&ranks, 11));
    }
}

#[test]
fn a_rank_that_fails_ends_operations_of_groups_that_it_is_not_in() {
    let divided = Barrier::new(4);
    let results = on_ranks(in_process(4, Limits::default()), |ranks| {
        let group = ranks.split((ranks.rank() / 2) as u32).unwrap();
        divided.wait();
        match ranks.rank() {
            3 => ranks.fail("out of memory"),
            0 => return group.barrier().unwrap_err().to_string(),
            // It does not end before.
            _ => drop(ranks.barrier()),
        }
        String::new()
    });
    assert_eq!(results[0], "rank 3 on this machine failed: out of memory");
}

#[test]
fn an_error_of_one_rank_reaches_all_others_with_its_name() {
    let results = on_ranks(in_process(3, Limits::default()), |ranks| {
        if ranks.rank() == 1 {
            ranks.fail("out of memory");
        }
        ranks.barrier().unwrap_err().to_string()
    });
    for text in results {
        assert_eq!(text, "rank 1 on this machine failed: out of memory");
    }
}

#[test]
fn a_rank_that_has_ended_ends_the_others() {
    let results = on_ranks(in_process(2, Limits::default()), |ranks| match ranks.rank() {
        0 => Ok(()),
        _ => ranks.barrier(),
    });
    assert!(matches!(&results[1], Err(ClusterError::RankFailed { rank: 0, .. })), "{results:?}");
}

#[test]
fn a_rank_that_does_not_take_part_is_named_at_the_deadline() {
    let limits = Limits { operation: Some(Duration::from_millis(50)), ..Limits::default() };
    let ranks = in_process(3, limits);
    let error = std::thread::scope(|scope| {
        scope.spawn(|| ranks[2].barrier());
        ranks[0].barrier().unwrap_err()
    });
    assert!(error.to_string().contains("rank 1 did not take part"), "{error}");
    assert_eq!(ranks[1].barrier(), Err(error.clone()), "every later operation fails in the same way");
    assert_eq!(ranks[1].failure(), Some(error));
}

#[test]
fn operations_that_do_not_belong_together_are_an_error_with_both() {
    let results = on_ranks(in_process(2, Limits::default()), |ranks| {
        ranks.all_reduce(&mut vec![0.0; 5 + ranks.rank()])
    });
    for result in results {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("len: 5") && text.contains("len: 6"), "{text}");
    }
}

#[test]
fn arguments_that_cannot_be_right_are_refused_without_harm() {
    let ranks = in_process(1, Limits::default());
    let mut whole = [0; 3];
    let wrong = [
        Operation::Broadcast { bytes: &mut [], root: 1 },
        Operation::Send { bytes: &[], to: 0, tag: 0 },
        Operation::Receive { bytes: &mut [], from: 7, tag: 0 },
        Operation::AllGather { part: &[1], lengths: &[1, 2], whole: &mut whole },
        Operation::ReduceScatter { values: &[1.0], lengths: &[2], part: &mut [0.0] },
    ];
    for operation in wrong {
        assert!(matches!(ranks[0].run(operation), Err(ClusterError::Invalid { .. })));
    }
    assert_eq!(ranks[0].barrier(), Ok(()));
}
