//! `quadriga embed`: embeddings, similarity and what it refuses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use common::{Fixture, output, output_with_input};
use serde_json::Value;

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn texts_become_vectors_of_length_one() {
    let fixture = Fixture::new(&[]);
    let printed = output(&mut fixture.command("embed", &["a cat", "a dog", "-q"])).success();
    let printed = json(&printed.out);
    let list = printed["embeddings"].as_array().unwrap();
    assert_eq!(printed["pooling"], "last");
    assert_eq!((list.len(), &list[0]["text"], &list[1]["text"]), (2, &"a cat".into(), &"a dog".into()));
    for one in list {
        let vector: Vec<f64> =
            one["embedding"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
        assert_eq!(vector.len(), 64);
        assert!((vector.iter().map(|v| v * v).sum::<f64>() - 1.0).abs() < 1e-5);
        assert!(one["tokens"].as_u64().unwrap() >= 5);
    }
    // Lines of stdin are texts, too; empty ones are not.
    let piped = output_with_input(&mut fixture.command("embed", &["-q"]), b"a cat\n\na dog\n").success();
    assert_eq!(json(&piped.out)["embeddings"], printed["embeddings"]);
}

#[test]
fn similarity_is_a_symmetric_matrix_with_ones() {
    let fixture = Fixture::new(&[]);
    let flags = ["one", "two", "one", "--similarity", "--pooling", "mean", "-q"];
    let printed = json(&output(&mut fixture.command("embed", &flags)).success().out);
    let at = |i: usize, j: usize| printed["similarity"][i][j].as_f64().unwrap();
    for i in 0..3 {
        assert!((at(i, i) - 1.0).abs() < 1e-6);
        for j in 0..3 {
            assert!((at(i, j) - at(j, i)).abs() < 1e-9);
        }
    }
    assert!((at(0, 2) - 1.0).abs() < 1e-6, "equal texts");
    assert!(at(0, 1) < 0.9999);
}

#[test]
fn what_cannot_be_done_is_refused() {
    let fixture = Fixture::new(&[]);
    output_with_input(&mut fixture.command("embed", &["-q"]), b"").failed(2, &["there is no text"]);
    let median = output(&mut fixture.command("embed", &["a", "--pooling", "median"]));
    assert_eq!(median.code, Some(2));
    assert!(median.err.contains("--pooling") && median.err.contains("mean, cls, last"), "{median:?}");
    output(&mut fixture.command("embed", &["a", "--query", "b", "-q"])).failed(1, &["classification head"]);
    let long = "word ".repeat(2000);
    output(&mut fixture.command("embed", &[&long, "-c", "64", "-q"])).failed(1, &["word word", "64"]);
}
