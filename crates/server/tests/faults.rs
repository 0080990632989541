//! Faults below the server: a lost device, too few pages, hostile templates. The answer says what happened, and nobody else is hurt.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::{Arc, Mutex};

use crate::common::gate::Gate;
use crate::common::{Setup, TestServer, hello, json, with};
use quadriga_llm::placement::{CpuOptions, Devices, GpuLayers, Placement};
use quadriga_llm::serving::{Batcher, BatcherOptions};
use quadriga_runtime::Backend;
use quadriga_server::{
    App, Keys, Limits, LoadError, ModelEntry, ModelLoader, ModelPolicy, ModelRegistry, ServedModel,
};
use quadriga_sim::{Clock, FaultPoint, Sim};

const CHAT: &str = "/v1/chat/completions";

fn endless() -> crate::common::Value {
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
    // But for whoever watches the server.
    let metrics = server.get("/metrics").text();
    assert!(metrics.contains("quadriga:failed_steps_total{model_name=\"small\"} 1\n"), "{metrics}");
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
        let last: crate::common::Value = serde_json::from_str(last).unwrap();
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

/// An error in a stream of Anthropic's names the request, as the header of the answer does.
#[test]
fn errors_within_streams_name_the_request() {
    let sim = Sim::new("sim:0").device();
    let registry = ModelRegistry::with(Setup::default().served_on("small", Arc::clone(&sim) as _));
    let server = TestServer::of(App::new(registry, Keys::default(), Limits::default()));
    let body = json!({ "model": "small", "max_tokens": 400, "stream": true, "ignore_eos": true,
        "messages": [{ "role": "user", "content": "hello" }] });
    let mut stream = server.client().header("x-request-id", "mine").stream("/v1/messages", &body);
    assert!(stream.chunk().is_some());
    sim.lose(FaultPoint::Run, 1);
    let answer = stream.answer();
    let events = answer.events();
    let (_, last) = events.last().unwrap();
    let last: crate::common::Value = serde_json::from_str(last).unwrap();
    assert_eq!((&last["type"], &last["request_id"]), (&json!("error"), &json!("mine")), "{last}");
}

/// After the first byte, an error has the form of each dialect, and nothing follows it that would make the answer look complete.
#[test]
fn errors_within_streams_have_the_form_of_their_dialect() {
    let chat = json!([{ "role": "user", "content": "hello" }]);
    let options = json!({ "num_predict": 400, "ignore_eos": true });
    let endless = json!({ "stream": true, "ignore_eos": true, "max_tokens": 400 });
    let routes = [
        ("/v1/completions", with(endless.clone(), json!({ "prompt": "hello" }))),
        ("/completion", with(endless.clone(), json!({ "prompt": "hello", "n_predict": 400 }))),
        ("/v1/responses", with(endless, json!({ "input": "hello", "max_output_tokens": 400 }))),
        ("/api/chat", json!({ "model": "small", "messages": chat, "options": options })),
        ("/api/generate", json!({ "model": "small", "prompt": "hello", "options": options })),
    ];
    for (path, body) in routes {
        let sim = Sim::new("sim:0").device();
        let registry = ModelRegistry::with(Setup::default().served_on("small", Arc::clone(&sim) as _));
        let server = TestServer::of(App::new(registry, Keys::default(), Limits::default()));
        let mut stream = server.client().stream(path, &body);
        assert!(stream.chunk().is_some());
        sim.lose(FaultPoint::Run, 1);
        let answer = stream.answer();
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        let (name, last) = match path.starts_with("/api/") {
            true => (None, answer.lines().pop().unwrap()),
            false => {
                let (name, data) = answer.events().pop().unwrap();
                (name, serde_json::from_str(&data).unwrap_or_else(|_| panic!("{path}: {}", answer.text())))
            }
        };
        let error = match path {
            "/v1/responses" => {
                assert_eq!(name.as_deref(), Some("response.failed"), "{last}");
                assert_eq!(last["type"], "response.failed");
                assert_eq!(
                    (&last["response"]["status"], &last["response"]["object"]),
                    (&json!("failed"), &json!("response"))
                );
                &last["response"]["error"]["message"]
            }
            "/v1/completions" => {
                assert_eq!(last["error"]["type"], "server_error", "{last}");
                &last["error"]["message"]
            }
            "/completion" => {
                let form = (&last["error"]["code"], &last["error"]["type"]);
                assert_eq!(form, (&json!(500), &json!("server_error")), "{last}");
                &last["error"]["message"]
            }
            _ => {
                assert_ne!(last["done"], true, "{path}: {last}");
                &last["error"]
            }
        };
        let message = error.as_str().unwrap_or_else(|| panic!("{path}: {last}"));
        assert!(message.contains("lost") && message.contains("sim:0"), "{path}: {message}");
    }
}

/// A device on which each step takes many times as long as a ping is apart from the next.
fn slow() -> Setup {
    let mut setup = Setup::default();
    setup.limits.ping = std::time::Duration::from_millis(1);
    setup
}

fn slow_server(setup: Setup) -> TestServer {
    let sim = Sim::new("sim:0").clock(Clock::Real).node_seconds(2e-3).build();
    let registry = ModelRegistry::with(setup.served_on("small", sim));
    TestServer::of(App::new(registry, setup.keys, setup.limits))
}

#[test]
fn streams_on_which_nothing_happens_are_kept_alive() {
    let server = slow_server(slow());
    let body = json!({ "model": "small", "max_tokens": 3, "stream": true, "ignore_eos": true,
        "messages": [{ "role": "user", "content": "hello" }] });
    let text = server.post(CHAT, &body).text();
    assert!(text.contains("\n\n: ping\n\n") && text.ends_with("data: [DONE]\n\n"), "{text}");
    // None, if the client wants none.
    let text = server.post(CHAT, &with(body.clone(), json!({ "sse_ping_interval": -1 }))).text();
    assert!(!text.contains("ping") && text.ends_with("data: [DONE]\n\n"), "{text}");
    // The first event of Anthropic's streams is the message: until then a ping is a comment, and an event from then on.
    let text = server.post("/v1/messages", &body).text();
    let (before, after) = text.split_once("event: message_start\n").unwrap();
    assert!(before.replace(": ping\n\n", "").is_empty() && !before.is_empty(), "{text}");
    assert!(after.contains("event: ping\ndata: {\"type\":\"ping\"}\n\n"), "{text}");
    server.assert_idle();
}

/// Tokens are counted beside the engine, however busy that is.
#[test]
fn tokens_are_counted_while_the_engine_is_busy() {
    let mut setup = slow();
    setup.batcher.engine.sequences = 1;
    let server = slow_server(setup);
    // Hundreds of steps of this device are a minute.
    let mut stream = server.client().stream(CHAT, &endless());
    assert!(stream.chunk().is_some());
    let waiting = server.client().stream(CHAT, &endless());
    let states = || {
        let status = server.get("/status").json();
        (status["running"].as_u64().unwrap(), status["waiting"].as_u64().unwrap())
    };
    // Until the one is being computed, and the other waits for its place.
    while states() != (1, 1) {}
    let body = json!({ "messages": [{ "role": "user", "content": "hello" }] });
    let counted = server.post("/v1/messages/count_tokens", &body).ok();
    assert!(counted["input_tokens"].as_u64().unwrap() > 0, "{counted}");
    assert_eq!(states(), (1, 1), "the engine is as busy as before");
    drop((stream, waiting));
    server.assert_idle();
}

/// Opens a new device each time.
struct Reopening(Arc<Mutex<Vec<Arc<Sim>>>>);

impl ModelLoader for Reopening {
    fn entries(&self) -> Vec<ModelEntry> {
        vec![ModelEntry { name: "small".to_owned(), path: "small.gguf".into(), ..ModelEntry::default() }]
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

/// A model whose layers two devices of this process divide.
fn divided(name: &str) -> (ServedModel, [Arc<Sim>; 2]) {
    let sims = ["sim:0", "sim:1"].map(|name| Sim::new(name).device());
    let cpu = Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap());
    let devices = Devices::new(sims.clone().map(|sim| sim as Arc<dyn Backend>), cpu).unwrap();
    let Setup { batcher, defaults, model, .. } = Setup::default();
    let options = batcher.for_model(&model).unwrap();
    let placement = Placement { gpu_layers: GpuLayers::All, ..Placement::default() };
    let planned = placement.plan_device_ranks(&model, &devices, CpuOptions::default(), &options.engine);
    let mut ranks = planned.unwrap().into_iter();
    let first = ranks.next().unwrap();
    ranks.for_each(|rank| rank.follow(&first.model, Some(options.clone())).unwrap());
    let options = BatcherOptions { engine: first.options, ..options };
    let batcher = Batcher::new(first.model, &first.placed.scheduler, options, &mut |_| {}).unwrap();
    (ServedModel::start(name, batcher, defaults, None).unwrap(), sims)
}

/// Divides the model anew each time.
struct Dividing(Arc<Mutex<Vec<[Arc<Sim>; 2]>>>);

impl ModelLoader for Dividing {
    fn entries(&self) -> Vec<ModelEntry> {
        vec![ModelEntry { name: "small".to_owned(), path: "small.gguf".into(), ..ModelEntry::default() }]
    }

    fn load(&self, name: &str) -> Result<ServedModel, LoadError> {
        let (served, sims) = divided(name);
        self.0.lock().unwrap().push(sims);
        Ok(served)
    }
}

#[test]
fn after_the_loss_of_a_rank_the_model_is_loaded_again() {
    let devices = Arc::new(Mutex::new(Vec::new()));
    let registry = ModelRegistry::loading(Dividing(Arc::clone(&devices)), ModelPolicy::default());
    let server = TestServer::of(App::new(registry, Keys::default(), Limits::default()));
    let wanted = server.post(CHAT, &hello()).ok()["choices"].clone();
    for lost in 0..2 {
        let sims = devices.lock().unwrap().last().unwrap().clone();
        sims[lost].lose(FaultPoint::Run, 2);
        let failed = server.post(CHAT, &hello());
        assert_eq!(failed.status, 503, "{}", failed.text());
        assert!(failed.text().contains(&format!("rank {lost}")), "{}", failed.text());
        assert_eq!(server.post(CHAT, &hello()).ok()["choices"], wanted);
        assert_eq!(server.get("/health").status, 200);
        assert_eq!(devices.lock().unwrap().len(), 2 + lost);
    }
}

/// Ranks differ from one device in the order of sums alone.
#[test]
fn embeddings_of_a_divided_model_are_those_of_the_whole() {
    let (served, _sims) = divided("small");
    let server = TestServer::of(App::new(ModelRegistry::with(served), Keys::default(), Limits::default()));
    let vector = |server: &TestServer| -> Vec<f64> {
        let answer = server.post("/v1/embeddings", &json!({ "input": "hello" })).ok();
        let numbers = answer["data"][0]["embedding"].as_array().unwrap();
        numbers.iter().map(|number| number.as_f64().unwrap()).collect()
    };
    let (found, wanted) = (vector(&server), vector(&TestServer::start()));
    let cosine: f64 = found.iter().zip(&wanted).map(|(a, b)| a * b).sum();
    assert!(found.len() == wanted.len() && cosine > 0.999, "{cosine}");
    assert_eq!(server.get("/health").status, 200);
    server.post(CHAT, &hello()).ok();
}

/// Whoever waits for an engine whose thread is gone hears of it, and the server is not healthy.
#[test]
fn an_engine_that_stops_ends_what_waits_for_it() {
    for path in [CHAT, "/v1/embeddings"] {
        let server = TestServer::start();
        let served = server.app.models().loaded().pop().unwrap();
        let gate = Gate::new(&served);
        // Of several steps each.
        let body = with(hello(), json!({ "input": "a b c ".repeat(60), "max_tokens": 400 }));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| server.post(path, &body));
            while served.in_flight().is_empty() {}
            gate.step();
            while served.state().running < 2 {
                gate.step();
            }
            gate.end_thread(&served);
            let answer = waiting.join().unwrap();
            assert_eq!(answer.status, 503, "{path}: {}", answer.text());
            assert!(answer.text().contains("engine stopped unexpectedly"), "{path}: {}", answer.text());
        });
        assert_eq!(server.get("/health").status, 503, "{path}");
        let later = server.post(path, &body);
        assert_eq!(later.status, 503, "{path}");
        assert!(later.text().contains("restart the server"), "{path}: {}", later.text());
    }
}

#[test]
fn a_request_that_finds_no_engine_has_the_model_loaded_again() {
    for path in [CHAT, "/v1/embeddings"] {
        let devices = Arc::new(Mutex::new(Vec::new()));
        let registry = ModelRegistry::loading(Reopening(Arc::clone(&devices)), ModelPolicy::default());
        let server = TestServer::of(App::new(registry, Keys::default(), Limits::default()));
        let body = with(hello(), json!({ "input": "hello" }));
        server.post(path, &body).ok();
        let served = server.app.models().loaded().pop().unwrap();
        Gate::new(&served).end_thread(&served);
        drop(served);
        // The first one to ask finds out.
        let failed = server.post(path, &body);
        assert_eq!(failed.status, 503, "{path}: {}", failed.text());
        server.post(path, &body).ok();
        assert_eq!(devices.lock().unwrap().len(), 2, "{path}");
        assert_eq!(server.get("/health").status, 200);
    }
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
        let setup = Setup { model: crate::common::model::with_template(template), ..Setup::default() };
        let server = setup.start();
        let answer = server.post(CHAT, &hello());
        assert_eq!(answer.status, 400, "{template}: {}", answer.text());
        // Whatever does not need it still works.
        server.post("/v1/completions", &json!({ "model": "small", "prompt": "hello", "max_tokens": 4 })).ok();
        server.assert_idle();
    }
}

/// What is generated from has no more of the body: its room is for others while the answer is computed.
#[test]
fn bodies_take_room_until_their_answer_begins() {
    let mut setup = Setup::default();
    setup.limits.body_memory = 280_000;
    let server = setup.start();
    let served = server.app.models().loaded().pop().unwrap();
    let more = json!({ "metadata": { "a": "x".repeat(60_000) }, "max_tokens": 100, "ignore_eos": true });
    let large = with(hello(), more);
    // The room of those before may be given back a moment later.
    let status = || {
        let all = (0..1000).map(|_| server.post("/v1/chat/completions", &large).status);
        all.into_iter().find(|status| *status != 429)
    };
    let gate = Gate::new(&served);
    std::thread::scope(|scope| {
        let all: Vec<_> = (1..10)
            .map(|count| {
                let answer = scope.spawn(status);
                while served.in_flight().len() < count {
                    assert!(!answer.is_finished(), "{:?}", answer.join());
                }
                // The engine accepts it.
                gate.step();
                answer
            })
            .collect();
        drop(gate);
        assert!(all.into_iter().all(|answer| answer.join().unwrap() == Some(200)));
    });
    server.post("/v1/chat/completions", &large).ok();
}
