//! `quadriga embed`: embeddings, similarity, rankings and what it refuses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Fixture, output, output_with_input, quadriga};
use serde_json::Value;

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn bert() -> Fixture {
    Fixture::new(&["--arch", "bert", "--context", "64"])
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
fn texts_come_from_arguments_stdin_an_option_and_a_file() {
    let fixture = bert();
    let texts = |flags: &[&str], input: &[u8]| -> Vec<String> {
        let printed =
            output_with_input(fixture.command("embed", &["-q", "--json"]).args(flags), input).success();
        let list = json(&printed.out)["embeddings"].as_array().unwrap().clone();
        list.iter().map(|one| one["text"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(texts(&["a", "b"], b"c\nd\n"), ["a", "b", "c", "d"]);
    assert_eq!(texts(&["a", "-", "b"], b"c\nd\n"), ["a", "c", "d", "b"]);
    assert_eq!(texts(&["-"], b"c\n"), ["c"]);
    assert_eq!(texts(&["-p", "a\nb"], b"c\n"), ["a", "b"]);
    std::fs::write(fixture.path("texts"), "one\ntwo\n").unwrap();
    assert_eq!(texts(&["-f", fixture.path("texts").to_str().unwrap()], b"c\n"), ["one", "two"]);
    output(&mut fixture.command("embed", &["a", "-", "-q"])).failed(2, &["nothing is piped"]);
    output(&mut fixture.command("embed", &["a", "-p", "b", "-q"])).failed(2, &["-p", "one of them"]);
}

#[test]
fn a_first_text_that_is_a_gguf_file_is_the_model() {
    let fixture = bert();
    let by_option = output(&mut fixture.command("embed", &["a cat", "-q"])).success().out;
    let by_name = output(quadriga(["embed"]).arg(&fixture.model).args(["a cat", "-q"])).success().out;
    assert_eq!(by_name, by_option);
    assert_eq!(json(&by_name)["model"], "tiny");
    output(&mut quadriga(["embed", "nomic.gguf", "a cat"])).failed(1, &["nomic.gguf", "No such file"]);
}

#[test]
fn the_summary_has_speed_and_memory_and_models_for_text_are_noted() {
    let of = |fixture: &Fixture| output(&mut fixture.command("embed", &["a cat", "dog"])).success().err;
    let (encoder, decoder) = (of(&bert()), of(&Fixture::new(&[])));
    assert!(encoder.contains("2 texts, 11 tokens, ") && encoder.contains("tok/s"), "{encoder}");
    assert!(!encoder.contains("embedding model"), "{encoder}");
    assert!(decoder.contains("not an embedding model") && decoder.contains("memory: cpu"), "{decoder}");
}

/// Texts of many lengths, in several batches, get the vectors that each gets alone.
#[test]
fn many_texts_are_embedded_together() {
    let texts: Vec<String> = (1..40).map(|count| "ab ".repeat(count % 17 + 1)).collect();
    for fixture in [bert(), Fixture::new(&[]), Fixture::new(&["--arch", "gemma3", "--layers", "6"])] {
        let embed = |texts: &[String]| -> Vec<Vec<f64>> {
            let printed =
                output(fixture.command("embed", &["-q", "-b", "64", "--pooling", "mean"]).args(texts));
            let list = json(&printed.success().out)["embeddings"].as_array().unwrap().clone();
            let numbers = |one: &Value| {
                one["embedding"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
            };
            list.iter().map(numbers).collect()
        };
        let together = embed(&texts);
        for at in [0, 7, 20, 38] {
            let alone = &embed(&texts[at..=at])[0];
            let differs = alone.iter().zip(&together[at]).any(|(a, b)| (a - b).abs() > 2e-2);
            assert!(!differs, "text {at}: {alone:?} {:?}", together[at]);
        }
    }
}

#[test]
fn similarity_is_a_symmetric_matrix_with_ones() {
    let fixture = Fixture::new(&[]);
    let flags = ["one", "two", "one", "--similarity", "--pooling", "mean", "-q"];
    let printed = json(&output(&mut fixture.command("embed", &flags)).success().out);
    let at = |i: usize, j: usize| printed["similarity"][i][j].as_f64().unwrap();
    for i in 0..3 {
        assert_eq!(at(i, i), 1.0);
        for j in 0..3 {
            assert!((at(i, j) - at(j, i)).abs() < 1e-9 && at(i, j) <= 1.0);
        }
    }
    assert!((at(0, 2) - 1.0).abs() < 1e-6, "equal texts");
    assert!(at(0, 1) < 0.9999);
}

#[test]
fn a_query_ranks_texts_by_cosine_or_by_a_classification_head() {
    let ranking = |fixture: &Fixture, flags: &[&str]| -> Vec<(String, u64, f64)> {
        let flags = [&["aaa", "zzzzzz", "query", "--query", "query", "-q"], flags].concat();
        let printed = json(&output(&mut fixture.command("embed", &flags)).success().out);
        let list = printed["ranking"].as_array().unwrap().clone();
        list.iter()
            .map(|one| {
                (
                    one["text"].as_str().unwrap().to_owned(),
                    one["index"].as_u64().unwrap(),
                    one["score"].as_f64().unwrap(),
                )
            })
            .collect()
    };
    let by_cosine = ranking(&bert(), &[]);
    assert_eq!((by_cosine[0].0.as_str(), by_cosine[0].1), ("query", 2), "{by_cosine:?}");
    assert!((by_cosine[0].2 - 1.0).abs() < 1e-3 && by_cosine[1].2 >= by_cosine[2].2, "{by_cosine:?}");
    let reranker = Fixture::reranker();
    let by_head = ranking(&reranker, &[]);
    assert!(by_head.windows(2).all(|pair| pair[0].2 >= pair[1].2) && by_head.len() == 3, "{by_head:?}");
    // The head scores query and text together: as one text of both.
    assert!(by_head.iter().all(|one| (one.2 - by_cosine[0].2).abs() > 1e-6), "{by_head:?}");
    assert!((ranking(&reranker, &["--pooling", "cls"])[0].2 - 1.0).abs() < 1e-3);
}

#[test]
fn formats_of_llama_cpp_are_understood() {
    let fixture = bert();
    let embed = |flags: &[&str]| {
        json(&output(fixture.command("embed", &["a", "bc", "-q"]).args(flags)).success().out)
    };
    let plain = embed(&[]);
    let vector = |number: usize| &plain["embeddings"][number]["embedding"];
    let array = embed(&["--embd-output-format", "array"]);
    assert_eq!((&array[0], &array[1]), (vector(0), vector(1)));
    let list = embed(&["--embd-output-format", "json"]);
    assert_eq!((&list["object"], &list["data"][1]["index"]), (&"list".into(), &1.into()));
    assert_eq!(&list["data"][1]["embedding"], vector(1));
    assert_eq!(embed(&["--embd-normalize", "2"]), plain);
    assert_eq!(embed(&["--embd-normalize", "-1"]), embed(&["--no-normalize"]));
    assert_ne!(embed(&["--embd-normalize", "-1"]), plain);
    let tokens = embed(&["--pooling", "none"]);
    let rows = tokens["embeddings"][1]["embedding"].as_array().unwrap();
    // With the tokens before and after the text.
    assert_eq!((rows.len(), rows[0].as_array().unwrap().len()), (4, 64));
    // Numbers are in their shortest form.
    let text = output(&mut fixture.command("embed", &["a", "-q"])).success().out;
    let longest = text.split([',', '[', ']']).filter(|part| part.contains("0.")).map(str::len).max().unwrap();
    assert!(longest <= 15, "{text}");
}

#[test]
fn texts_that_are_too_long_are_all_named_or_cut() {
    let fixture = bert();
    let (long, longer) = ("word ".repeat(24), "more ".repeat(30));
    let texts = ["short", &long, "a", &longer, "-q"];
    let failed = output(&mut fixture.command("embed", &texts));
    let failed = failed
        .failed(1, &["text 2 (\"word word", "…\", 98 tokens)", "text 4", "context of 64", "--truncate"]);
    assert!(!failed.err.contains("text 1") && !failed.err.contains("text 3"), "{failed:?}");
    let cut = output(fixture.command("embed", &texts[..4]).arg("--truncate")).success();
    assert!(cut.err.contains("2 texts were cut to the context of 64 tokens"), "{cut:?}");
    let cut = json(&cut.out);
    assert_eq!((&cut["embeddings"][1]["tokens"], &cut["embeddings"][2]["tokens"]), (&64.into(), &3.into()));
    // Encoders have tokens before and after an empty text, too.
    output(&mut Fixture::new(&[]).command("embed", &["a", "", "-q"])).failed(2, &["text 2 is empty"]);
}

#[test]
fn the_engines_options_take_effect() {
    let fixture = Fixture::new(&[]);
    let text = "ab cd ".repeat(20);
    let embed = |flags: &[&str]| {
        let flags = [&[text.as_str(), "-q", "--no-normalize"], flags].concat();
        json(&output(&mut fixture.command("embed", &flags)).success().out)["embeddings"][0].clone()
    };
    let plain = embed(&[]);
    assert_ne!(embed(&["--cache-type", "f32"]), plain);
    assert_ne!(embed(&["-ctv", "bf16"]), plain);
}

#[test]
fn what_cannot_be_done_is_refused() {
    let fixture = Fixture::new(&[]);
    output_with_input(&mut fixture.command("embed", &["-q"]), b"").failed(2, &["there is no text"]);
    let median = output(&mut fixture.command("embed", &["a", "--pooling", "median"]));
    assert_eq!(median.code, Some(2));
    assert!(median.err.contains("--pooling") && median.err.contains("mean, cls, last"), "{median:?}");
    output(&mut fixture.command("embed", &["a", "--pooling", "rank", "-q"]))
        .failed(1, &["classification head"]);
    let long = "word ".repeat(2000);
    output(&mut fixture.command("embed", &[&long, "-c", "64", "-q"])).failed(1, &["word word", "64"]);
    output(&mut bert().command("embed", &["a", "-c", "65", "-q"])).failed(2, &["-c 65", "64 tokens"]);
}

#[test]
fn options_of_the_kv_cache_have_no_effect_on_encoders_and_that_is_said() {
    let options = ["--cache-type", "q8_0", "-ctk", "f32", "-ctv", "bf16", "--swa-full", "--checkpoints", "2"];
    let embed = |fixture: &Fixture, more: &[&str]| {
        output(&mut fixture.command("embed", &[&["a cat"], more].concat())).success()
    };
    let encoder = bert();
    let printed = embed(&encoder, &options);
    for option in ["--cache-type", "-ctk", "-ctv", "--swa-full", "--checkpoints"] {
        let note = format!("{option} has no effect: an encoder has no KV cache");
        assert!(printed.err.contains(&note), "{}", printed.err);
    }
    let without = embed(&encoder, &[]);
    assert!(!without.err.contains("has no effect"), "{}", without.err);
    assert_eq!(without.out, printed.out);
    assert!(!embed(&encoder, &[&options[..], &["-q"]].concat()).err.contains("has no effect"));
    // A model for text has a KV cache.
    let printed = embed(&Fixture::new(&[]), &options);
    assert!(!printed.err.contains("has no effect"), "{}", printed.err);
}
