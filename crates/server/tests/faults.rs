//! Faults below the server: a lost device, too few pages, hostile templates. The answer says what happened, and nobody else is hurt.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use std::sync::{Arc, Mutex};

use common::{Setup, TestServer, hello, json, with};
use quadriga_server::{
    App, Keys, Limits, LoadError, ModelEntry, ModelLoader, ModelPolicy, ModelRegistry, ServedModel,
};
use quadriga_sim::{FaultPoint, Sim};

const CHAT: &str = "/v1/chat/completions";

fn endless() -> common::Value {
    with(hello(), json!({ "max_tokens": 480, "stream": true }))
}

#[test]
fn a_step_that_fails_once_is_repeated_unseen() {
    let sim = Sim::new("sim:0").device();
    let setup = Setup::default();
    let server = TestServer::of(App::new(
        ModelRegistry::with(setup.served_on("small", Arc::clone(&sim) as _)),
        Keys::default(),
        Limits::default(),
    ));
    let greedy = with(hello(), json!({ "temperature": 0, "max_tokens": 40 }));
    let wanted = server.post(CHAT, &greedy).ok()["choices"].clone();
    sim.fail(FaultPoint::Run, 5);
    assert_eq!(server.post(CHAT, &greedy).ok()["choices"], wanted);
    server.assert_idle();
}

#[test]
fn a_lost_device_ends_answers_with_an_error_that_says_so() {
    let sim = Sim::new("sim:0").device();
    let setup = Setup::default();
    let registry = ModelRegistry::with(setup.served_on("small", Arc::clone(&sim) as _));
    let server = TestServer::of(App::new(registry, Keys::default(), Limits::default()));
    let mut streams: Vec<_> = (0..3).map(|_| server.client().stream(CHAT, &endless())).collect();
    for stream in &mut streams {
        assert!(stream.chunk().is_some());
    }
    sim.lose(FaultPoint::Run, 3);
    for stream in streams {
        let answer = stream.answer();
        let events = answer.events();
        let (_, last) = events.iter().rfind(|(_, data)| data != "[DONE]").unwrap();
        let last: common::Value = serde_json::from_str(last).unwrap();
        let message = last["error"]["message"].as_str().unwrap_or_else(|| panic!("{}", answer.text()));
        assert!(message.contains("lost") && message.contains("sim:0"), "{message}");
    }
    // Nothing can be computed any more, and the server says so, to balancers, too.
    let answer = server.post(CHAT, &hello());
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert!(answer.text().contains("lost"), "{}", answer.text());
    assert_eq!(server.get("/health").status, 503);
    assert_eq!(server.get("/v1/models").status, 200);
    server.assert_idle();
}

/// Opens a new device each time.
struct Reopening(Arc<Mutex<Vec<Arc<Sim>>>>);

impl ModelLoader for Reopening {
    fn entries(&self) -> Vec<ModelEntry> {
        vec![ModelEntry { name: "small".to_owned(), path: "small.gguf".into(), bytes: 1, modified: None }]
    }

    fn load(&self, name: &str) -> Result<ServedModel, LoadError> {
        let sim = Sim::new("sim:0").device();
        self.0.lock().unwrap().push(Arc::clone(&sim));
        Ok(Setup::default().served_on(name, sim))
    }
}

#[test]
fn after_the_loss_of_a_device_the_model_is_loaded_again() {
    let devices = Arc::new(Mutex::new(Vec::new()));
    let registry = ModelRegistry::loading(Reopening(Arc::clone(&devices)), ModelPolicy::default());
    let server = TestServer::of(App::new(registry, Keys::default(), Limits::default()));
    let wanted = server.post(CHAT, &hello()).ok()["choices"].clone();
    let first = Arc::clone(&devices.lock().unwrap()[0]);
    first.lose(FaultPoint::Run, 2);
    let failed = server.post(CHAT, &hello());
    assert_eq!(failed.status, 500, "{}", failed.text());
    assert!(failed.text().contains("lost"), "{}", failed.text());
    assert_eq!(server.post(CHAT, &hello()).ok()["choices"], wanted);
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(devices.lock().unwrap().len(), 2);
}

#[test]
fn more_requests_than_pages_take_turns() {
    let mut setup = Setup::default();
    // Room for two sequences of this length.
    setup.batcher.engine.pages = 10;
    let server = setup.start();
    let body = with(hello(), json!({ "max_tokens": 250, "temperature": 0 }));
    let wanted = server.post(CHAT, &body).ok()["choices"][0]["message"].clone();
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..6).map(|_| scope.spawn(|| server.post(CHAT, &body).ok())).collect();
        for answer in all {
            assert_eq!(answer.join().unwrap()["choices"][0]["message"], wanted);
        }
    });
    server.assert_idle();
}

#[test]
fn hostile_templates_are_errors() {
    let templates = [
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ messages }}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content * 999999999 }}",
        "{{ raise_exception('not this way') }}",
    ];
    for template in templates {
        let setup = Setup { model: common::model::with_template(template), ..Setup::default() };
        let server = setup.start();
        let answer = server.post(CHAT, &hello());
        assert_eq!(answer.status, 400, "{template}: {}", answer.text());
        // Whatever does not need it still works.
        server.post("/v1/completions", &json!({ "model": "small", "prompt": "hello", "max_tokens": 4 })).ok();
        server.assert_idle();
    }
}
