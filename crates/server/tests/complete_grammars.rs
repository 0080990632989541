//! Answers under a grammar that is complete: they end, although the request bans the end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Setup, Value, hello, json, model, with};

const CHAT: &str = "/v1/chat/completions";

#[test]
fn a_complete_grammar_ends_an_answer_whose_end_is_banned() {
    let model = model::small();
    let end = model.tokenizer().unwrap().vocabulary().eos.unwrap();
    let server = Setup { model, ..Setup::default() }.start();
    let bans = [
        json!({ "ignore_eos": true }),
        json!({ "ignore_eos": false, "min_tokens": 30 }),
        json!({ "ignore_eos": false, "logit_bias": [[end, false]] }),
        json!({ "ignore_eos": true, "min_tokens": 30, "temperature": 0 }),
    ];
    let forms = [
        json!({ "grammar": "root ::= \"ab\" \"c\"" }),
        json!({ "guided_choice": ["abc"] }),
        json!({ "guided_regex": "abc" }),
    ];
    for ban in &bans {
        for form in &forms {
            let body = with(with(hello(), json!({ "max_tokens": 40 })), with(ban.clone(), form.clone()));
            let whole = server.post(CHAT, &body).ok();
            let choice = &whole["choices"][0];
            assert_eq!(choice["message"]["content"], "abc", "{ban} {form}: {whole}");
            assert_eq!(choice["finish_reason"], "stop", "{ban} {form}: {whole}");
            let chunks = server.post(CHAT, &with(body, json!({ "stream": true }))).chunks();
            let text: String =
                chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
            assert_eq!(text, "abc", "{ban} {form}");
            let ends = chunks.iter().any(|chunk| chunk["choices"][0]["finish_reason"] == "stop");
            assert!(ends, "{ban} {form}: {chunks:?}");
        }
    }
}

/// The ban holds as long as anything else can follow.
#[test]
fn a_grammar_that_allows_more_goes_on() {
    let model = model::small();
    let end = model.tokenizer().unwrap().vocabulary().eos.unwrap();
    let server = Setup { model, ..Setup::default() }.start();
    let body = with(hello(), json!({ "max_tokens": 30, "grammar": "root ::= \"a\"*" }));
    // The model wants to end at once.
    let wanted = json!({ "logit_bias": [[end, 100]], "temperature": 0 });
    let whole = |more: Value| server.post(CHAT, &with(with(body.clone(), wanted.clone()), more)).ok();
    let banned = whole(json!({ "ignore_eos": true }));
    assert_eq!(banned["choices"][0]["finish_reason"], "length", "{banned}");
    assert_eq!(banned["choices"][0]["message"]["content"], "a".repeat(30));
    let free = whole(json!({ "ignore_eos": false }));
    assert_eq!(free["choices"][0]["finish_reason"], "stop", "{free}");
}
