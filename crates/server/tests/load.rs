//! Many clients at once, 30 % of which go away at random: nothing but 429, and nothing is left behind. `bench/server-load` has the large
//! version of this.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;
#[path = "common/load.rs"]
mod load;

use common::{Setup, TestServer, hello, json, with};
use load::{Storm, Workers};
use quadriga_server::operation::process::open_descriptors;

#[test]
fn clients_that_go_away_leave_nothing_behind() {
    let mut setup = Setup::default();
    setup.batcher.queue = 40;
    setup.batcher.engine.pages = 24;
    let server = setup.start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        // Other tests of this program have threads, too: those are counted where the server is a process of its own.
        let workers = Workers { threads: f64::INFINITY, ..Workers::of(server.address).await.unwrap() };
        assert!(workers.tasks >= 1.0, "{workers:?}");
        assert_eq!(load::settle(server.address, &workers).await.unwrap(), None);
        let before = fewest_descriptors(0);
        for seed in 0..4 {
            println!("seed {seed}");
            let storm = Storm { clients: 120, leaving: 0.3, tokens: 60, seed };
            let report = storm.run(server.address).await;
            assert_eq!(report.errors, Vec::<String>::new());
            assert!(report.complete > 0, "{report:?}");
            // One that reads may have its whole answer with the event that it waits for.
            assert!((34..=36).contains(&report.left), "{report:?}");
            assert_eq!(report.complete + report.refused + report.left, 120, "{report:?}");
            assert_eq!(load::settle(server.address, &workers).await.unwrap(), None);
            let after = fewest_descriptors(before.unwrap_or_default());
            assert!(after <= before, "{before:?} descriptors became {after:?}");
        }
    });
    server.assert_idle();
}

/// A load is no success if one of its clients was not served.
#[test]
fn a_client_that_fails_is_not_overlooked() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut clients = tokio::task::JoinSet::new();
        clients.spawn(async {});
        assert_eq!(load::all_ended(clients).await, Ok(()));
        let mut clients = tokio::task::JoinSet::new();
        clients.spawn(async {});
        clients.spawn(async { panic!("the stream was cut") });
        let failed = load::all_ended(clients).await.unwrap_err();
        assert!(failed.starts_with("1 tasks failed"), "{failed}");
    });
}

/// The number of answers that ended because their client went away.
fn cancelled(server: &TestServer) -> f64 {
    let text = server.get("/metrics").text();
    let line =
        text.lines().find(|line| line.starts_with("vllm:request_success_total") && line.contains("abort"));
    line.unwrap().rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_client_that_leaves_before_its_request_is_accepted_is_counted() {
    let server = TestServer::start();
    let served = server.app.models().loaded().remove(0);
    // The engine's thread hears of nothing else while it waits for this request's listener.
    let (release, gate) = std::sync::mpsc::channel::<()>();
    let (entered, waits) = std::sync::mpsc::channel();
    let listener = Box::new(move |_| {
        let _ = entered.send(());
        let _ = gate.recv();
        false
    });
    let first = quadriga_llm::serving::Request::new(vec![1, 2, 3]);
    served.service().unwrap().submit_to(vec![(first, listener)], |ids| ids.is_ok()).unwrap();
    waits.recv().unwrap();
    let body = with(hello(), json!({ "n": 3, "stream": true })).to_string();
    let mut stream = server.client().connect();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    std::io::Write::write_all(&mut stream, (head + &body).as_bytes()).unwrap();
    while served.in_flight().len() < 3 {}
    drop(stream);
    while !served.in_flight().is_empty() {}
    assert_eq!(cancelled(&server), 3.0);
    drop(release);
    server.assert_idle();
    assert_eq!(cancelled(&server), 3.0);
    assert_eq!(served.state().steps, 1, "nothing was computed for it");
}

/// The fewest descriptors that many looks find, or the first count of at most `enough`: the server closes its end of a connection some
/// time after the client has read the last byte of an answer.
fn fewest_descriptors(enough: usize) -> Option<usize> {
    let mut fewest = open_descriptors();
    for _ in 0..20_000 {
        if fewest.is_none_or(|count| count <= enough) {
            break;
        }
        std::thread::yield_now();
        fewest = fewest.min(open_descriptors());
    }
    fewest
}
