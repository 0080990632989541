//! Several models: loaded when they are named, unloaded when they are idle or told to, refused when they do not fit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use crate::common::gate::Gate;
use crate::common::{Setup, Stream, TestServer, Value, hello, json, with};
use quadriga_llm::placement::{Devices, GpuLayers, Placement};
use quadriga_llm::serving::{Batcher, BatcherOptions};
use quadriga_llm::{EngineOptions, GeneratorOptions};
use quadriga_runtime::Backend;
use quadriga_server::{
    App, Keys, Limits, LoadError, ModelEntry, ModelLoader, ModelPolicy, ModelRegistry, PlanPictures,
    ServedModel, check_memory, device_bytes,
};
use quadriga_sim::Sim;

pub(crate) const CHAT: &str = "/v1/chat/completions";

/// Three models on one simulated device with little memory; the third cannot be loaded at all.
struct Loader {
    devices: Devices,
    pages: usize,
    loads: Arc<AtomicUsize>,
}

impl ModelLoader for Loader {
    fn entries(&self) -> Vec<ModelEntry> {
        let entry = |name: &str| ModelEntry {
            name: name.to_owned(),
            path: format!("{name}.gguf").into(),
            aliases: if name == "beta" { vec!["second".to_owned(), "alpha".to_owned()] } else { Vec::new() },
            ..ModelEntry::default()
        };
        ["alpha", "beta", "broken", "damaged", "large"].map(entry).into()
    }

    fn check(&self, name: &str) -> Result<(), LoadError> {
        match name {
            "broken" => Err(LoadError::Failed("the file is damaged".to_owned())),
            "large" => Err(LoadError::DoesNotFit("it is too large".to_owned())),
            _ => Ok(()),
        }
    }

    fn load(&self, name: &str) -> Result<ServedModel, LoadError> {
        self.loads.fetch_add(1, Ordering::SeqCst);
        if name == "broken" {
            return Err(LoadError::Failed("the file is damaged".to_owned()));
        }
        // What only shows when it is loaded.
        if name == "damaged" {
            return Err(LoadError::Failed("it has a broken tensor".to_owned()));
        }
        if name == "large" {
            return Err(LoadError::DoesNotFit("it needs more memory".to_owned()));
        }
        let failed = |error: quadriga_llm::Error| LoadError::Failed(error.to_string());
        let model = crate::common::model::small();
        let engine = EngineOptions {
            sequences: 4,
            batch: 64,
            context: 512,
            pages: self.pages,
            ..EngineOptions::default()
        };
        let options = BatcherOptions { engine, token_time: None, ..BatcherOptions::default() };
        let options = options.for_model(&model).map_err(failed)?;
        let placement = Placement { gpu_layers: GpuLayers::All, ..Placement::default() };
        let placed = placement.plan(&model, &self.devices, &options.engine).map_err(failed)?;
        check_memory(&placed.forecast, self.devices.backends()).map_err(LoadError::DoesNotFit)?;
        let batcher = Batcher::new(model, &placed.scheduler, options, &mut |_| {}).map_err(failed)?;
        let pictures = PlanPictures { svg: format!("<svg>{name}</svg>"), html: format!("<p>{name}</p>") };
        let served = ServedModel::start(name, batcher, GeneratorOptions::default(), Some(pictures));
        let bytes = device_bytes(&placed.forecast, self.devices.backends());
        Ok(served.map_err(failed)?.with_device_bytes(bytes))
    }
}

struct Several {
    server: TestServer,
    sim: Arc<Sim>,
    loads: Arc<AtomicUsize>,
}

/// A server whose device has room for so many models.
fn several(room: f64, policy: ModelPolicy) -> Several {
    several_with(room, policy, Limits::default())
}

fn several_with(room: f64, policy: ModelPolicy, limits: Limits) -> Several {
    let start = |capacity: u64| {
        let sim = Sim::new("sim:0").capacity(capacity).device();
        let cpu = Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap());
        let devices = Devices::new(vec![Arc::clone(&sim) as Arc<dyn Backend>], cpu).unwrap();
        let loads = Arc::new(AtomicUsize::new(0));
        let loader = Loader { devices, pages: 16, loads: Arc::clone(&loads) };
        (sim, loads, loader)
    };
    // How much one takes.
    let (sim, _, loader) = start(1 << 30);
    let one = loader.load("alpha").map_err(|error| format!("{error:?}")).unwrap();
    let bytes = sim.used_bytes();
    assert!(bytes > 0);
    drop(one);
    let (sim, loads, loader) = start((bytes as f64 * room) as u64);
    let app = App::new(ModelRegistry::loading(loader, policy), Keys::default(), limits);
    Several { server: TestServer::of(app), sim, loads }
}

pub(crate) fn named(name: &str) -> Value {
    with(hello(), json!({ "model": name }))
}

impl Several {
    fn states(&self) -> Vec<(String, &'static str)> {
        let all = self.server.app.models().list();
        all.into_iter().map(|listed| (listed.name, listed.state.name())).collect()
    }

    fn loaded(&self) -> Vec<String> {
        let all = self.server.app.models().loaded();
        all.iter().map(|served| served.name.clone()).collect()
    }
}

#[test]
fn models_are_loaded_when_they_are_named() {
    let several = several(4.0, ModelPolicy::default());
    let server = &several.server;
    assert!(several.states().iter().all(|(_, state)| *state == "unloaded"));
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.post(CHAT, &named("alpha")).ok()["model"], "alpha");
    assert_eq!(several.loaded(), ["alpha"]);
    // Ollama's clients add a tag.
    server.post(CHAT, &named("beta:latest")).ok();
    assert_eq!(several.loaded(), ["alpha", "beta"]);
    assert_eq!(server.get("/props?model=beta").ok()["model_alias"], "beta");
    assert_eq!(server.get("/props?model=gamma").status, 404);
    assert_eq!(server.post(CHAT, &named("gamma")).status, 404);
    let mut without = hello();
    without.as_object_mut().unwrap().remove("model");
    assert_eq!(server.post(CHAT, &without).status, 400);
    let broken = server.post(CHAT, &named("broken"));
    assert_eq!(broken.status, 500);
    assert!(broken.text().contains("the file is damaged"), "{}", broken.text());
    let list = server.get("/v1/models").ok();
    let states: Vec<(&str, &str)> = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| (model["id"].as_str().unwrap(), model["status"]["value"].as_str().unwrap()))
        .collect();
    let unloaded = ["broken", "damaged", "large"].map(|name| (name, "unloaded"));
    assert_eq!(states[..2], [("alpha", "loaded"), ("beta", "loaded")]);
    assert_eq!(states[2..], unloaded);
    let text = json!({ "input_modalities": ["text"], "output_modalities": ["text"] });
    for model in list["data"].as_array().unwrap() {
        assert_eq!(
            (
                &model["architecture"],
                &server.get(&format!("/v1/models/{}", model["id"].as_str().unwrap())).ok()
            ),
            (&text, model)
        );
    }
    let status = server.get("/status").ok();
    assert_eq!(status["unloaded"][0]["model"], "broken");
    // Metrics of both are in one text, each name described once.
    let metrics = server.get("/metrics").text();
    assert_eq!(metrics.matches("# TYPE vllm:num_requests_running gauge").count(), 1);
    assert_eq!(metrics.matches("vllm:num_requests_running{").count(), 2);
}

/// The next event of a stream of models; comments are left out.
fn model_event(stream: &mut Stream) -> Option<Value> {
    loop {
        let chunk = String::from_utf8(stream.chunk()?).unwrap();
        match chunk.strip_prefix("data: ") {
            Some(data) => return Some(serde_json::from_str(data).unwrap()),
            None => assert_eq!(chunk, ": ping\n\n"),
        }
    }
}

fn status_change(name: &str, data: Value) -> Value {
    json!({ "model": name, "event": "status_change", "data": data })
}

/// As editors follow which models are loaded.
#[test]
fn changes_of_models_are_streamed() {
    let limits = Limits { ping: Duration::from_millis(1), ..Limits::default() };
    let mut several = several_with(1.5, ModelPolicy { most: 1, ..ModelPolicy::default() }, limits);
    let server = &several.server;
    let follow = || server.client().send("GET", "/models/sse", b"");
    let mut first = follow();
    let content = first.headers.iter().find(|(name, _)| name == "content-type").unwrap();
    assert_eq!((first.status, content.1.as_str()), (200, "text/event-stream"));
    let load = |name: &str| server.post("/models/load", &json!({ "model": name }));
    load("alpha").ok();
    let mut second = follow();
    server.post("/models/unload", &json!({ "model": "alpha" })).ok();
    while several.sim.used_bytes() > 0 {}
    // The only one that may be loaded makes room.
    load("alpha").ok();
    load("beta").ok();
    assert_eq!(load("damaged").status, 500);
    let loading = || json!({ "status": "loading" });
    let loaded = || json!({ "status": "loaded" });
    let unloaded = |code: i32| json!({ "status": "unloaded", "exit_code": code });
    let changes = [
        ("alpha", loading()),
        ("alpha", loaded()),
        ("alpha", unloaded(0)),
        ("alpha", loading()),
        ("alpha", loaded()),
        ("beta", loading()),
        ("alpha", unloaded(0)),
        ("beta", loaded()),
        ("damaged", loading()),
    ];
    for (number, (name, data)) in changes.into_iter().enumerate() {
        let wanted = Some(status_change(name, data));
        assert_eq!(model_event(&mut first), wanted, "{number}");
        if number > 1 {
            assert_eq!(model_event(&mut second), wanted, "{number}");
        }
    }
    // The model that made room in vain comes back.
    while model_event(&mut first).unwrap() != status_change("damaged", unloaded(1)) {}
    while model_event(&mut first).unwrap() != status_change("beta", loaded()) {}
    assert_eq!(server.app.models().loaded().len(), 1);
    // It ends with the server.
    several.server.stop();
    while model_event(&mut first).is_some() {}
    several.server.join();
}

/// A file that cannot be loaded pushes no model out, and one that only fails later gives it its place back.
#[test]
fn models_that_cannot_be_loaded_leave_the_others_where_they_are() {
    for most in [1, 4] {
        let keep_alive = Some(Duration::from_secs(500));
        let several = several(1.5, ModelPolicy { most, keep_alive, ..ModelPolicy::default() });
        let server = &several.server;
        server.post(CHAT, &named("alpha")).ok();
        for name in ["broken", "large"] {
            let before = several.loads.load(Ordering::SeqCst);
            let status = if name == "broken" { 500 } else { 503 };
            assert_eq!(server.post(CHAT, &named(name)).status, status, "{name}");
            assert_eq!(several.loaded(), ["alpha"], "{name}");
            assert!(several.loads.load(Ordering::SeqCst) <= before + 1, "{name}");
        }
        let answer = server.post(CHAT, &named("damaged"));
        assert_eq!(answer.status, 500);
        assert!(answer.text().contains("broken tensor"), "{}", answer.text());
        while several.loaded() != ["alpha"] {}
        server.post(CHAT, &named("alpha")).ok();
        // One that can be loaded takes the place.
        server.post(CHAT, &named("beta")).ok();
        assert_eq!(several.loaded(), ["beta"]);
    }
}

#[test]
fn models_have_aliases() {
    let several = several(4.0, ModelPolicy::default());
    let server = &several.server;
    for name in ["second", "second:latest", "beta"] {
        assert_eq!(server.post(CHAT, &named(name)).ok()["model"], "beta", "{name}");
    }
    // The name of a model is stronger than an alias of another one.
    assert_eq!(server.post(CHAT, &named("alpha")).ok()["model"], "alpha");
    assert_eq!(server.get("/v1/models/second").ok()["id"], "beta");
    assert_eq!(server.get("/v1/models").ok()["data"][1]["aliases"], json!(["second", "alpha"]));
    server.post("/models/unload", &json!({ "model": "second" })).ok();
    assert_eq!(several.loaded(), ["alpha"]);
}

/// A counter that starts again looks like a restart of the server.
#[test]
fn counters_go_on_when_a_model_is_loaded_again() {
    let several = several(4.0, ModelPolicy::default());
    let server = &several.server;
    let counted = |name: &str| {
        let text = server.get("/metrics").text();
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{model_name=\"alpha\"}} ")));
        line.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
    };
    const NAMES: [&str; 3] =
        ["llamacpp:tokens_predicted_total", "llamacpp:n_decode_total", "vllm:prompt_tokens_total"];
    assert_eq!(counted(NAMES[0]), None);
    let mut before = [0.0; 3];
    for round in 1..4 {
        server.post(CHAT, &named("alpha")).ok();
        let now = NAMES.map(|name| counted(name).unwrap());
        assert!(now.iter().zip(&before).all(|(now, before)| now > before), "{round}: {now:?} {before:?}");
        assert_eq!(now[0], 8.0 * f64::from(round));
        server.post("/models/unload", &json!({ "model": "alpha" })).ok();
        while several.sim.used_bytes() > 0 {}
        before = NAMES.map(|name| counted(name).unwrap());
        assert!(before.iter().zip(&now).all(|(after, now)| after >= now), "{round}: {before:?} {now:?}");
        assert_eq!(counted("vllm:num_requests_running"), Some(0.0));
    }
}

#[test]
fn requests_for_one_model_wait_for_one_load() {
    let several = several(4.0, ModelPolicy::default());
    let barrier = Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                barrier.wait();
                several.server.post(CHAT, &named("alpha")).ok();
            });
        }
    });
    assert_eq!(several.loads.load(Ordering::SeqCst), 1);
}

#[test]
fn models_are_loaded_and_unloaded_by_hand() {
    let several = several(4.0, ModelPolicy::default());
    let server = &several.server;
    assert_eq!(server.post("/models/load", &json!({ "model": "alpha" })).ok()["success"], true);
    assert!(several.sim.used_bytes() > 0);
    // An answer that is being generated is finished.
    let mut stream =
        server.client().stream(CHAT, &with(named("alpha"), json!({ "max_tokens": 400, "stream": true })));
    assert!(stream.chunk().is_some());
    assert_eq!(server.post("/models/unload", &json!({ "model": "alpha" })).ok()["success"], true);
    assert_eq!(several.loaded(), Vec::<String>::new());
    assert!(stream.answer().text().ends_with("data: [DONE]\n\n"));
    while several.sim.used_bytes() > 0 {}
    server.post("/models/unload", &json!({ "model": "alpha" })).ok();
    assert_eq!(server.post("/models/unload", &json!({ "model": "gamma" })).status, 404);
    assert_eq!(server.post("/models/load", &json!({})).status, 400);
    assert_eq!(server.post("/models/load", &json!({ "model": "broken" })).status, 500);
    server.post(CHAT, &named("alpha")).ok();
    assert_eq!(several.loads.load(Ordering::SeqCst), 3);
}

#[test]
fn a_model_that_does_not_fit_waits_for_an_idle_one_and_hurts_no_other() {
    let several = several(1.5, ModelPolicy::default());
    let server = &several.server;
    let mut stream =
        server.client().stream(CHAT, &with(named("alpha"), json!({ "max_tokens": 480, "stream": true })));
    assert!(stream.chunk().is_some());
    let refused = server.post(CHAT, &named("beta"));
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert!(refused.text().contains("MiB on sim:0"), "{}", refused.text());
    assert!(refused.header("retry-after").is_some());
    assert!(stream.answer().text().ends_with("data: [DONE]\n\n"));
    // Now alpha is idle, and makes room.
    while server.post(CHAT, &named("beta")).status == 503 {}
    assert_eq!(several.loaded(), ["beta"]);
    server.post(CHAT, &named("alpha")).ok();
}

#[test]
fn no_more_models_are_loaded_than_allowed() {
    let several = several(4.0, ModelPolicy { most: 1, ..ModelPolicy::default() });
    several.server.post(CHAT, &named("alpha")).ok();
    // The connection of the answer may still hold it.
    while several.server.post(CHAT, &named("beta")).status == 503 {}
    assert_eq!(several.loaded(), ["beta"]);
}

/// Metrics and lists look at models; that is no use.
#[test]
fn a_model_that_is_looked_at_makes_room() {
    let several = several(4.0, ModelPolicy { most: 1, ..ModelPolicy::default() });
    several.server.post(CHAT, &named("alpha")).ok();
    let models = several.server.app.models();
    let (loaded, listed) = (models.loaded(), models.list());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let described = runtime.block_on(models.describe(Some("alpha"))).unwrap();
    assert!(loaded[0].name == "alpha" && described.served.is_some() && !listed.is_empty());
    // The connection of the answer may still use it, but no observer does.
    assert!((0..10_000).any(|_| several.server.post(CHAT, &named("beta")).status == 200), "it is kept");
    assert_eq!(several.loaded(), ["beta"]);
    // A user keeps it.
    let used = models.loaded()[0].to_used();
    assert_eq!(several.server.post(CHAT, &named("alpha")).status, 503);
    drop(used);
    drop((loaded, listed, described));
    while several.server.post(CHAT, &named("alpha")).status == 503 {}
}

/// The device has room for one of them.
#[test]
fn the_memory_of_a_model_that_is_looked_at_is_given_back() {
    let several = several(1.5, ModelPolicy::default());
    several.server.post(CHAT, &named("alpha")).ok();
    let looked_at = several.server.app.models().loaded();
    // The connection of the answer may still use it, but no observer does.
    assert!((0..100).any(|_| several.server.post(CHAT, &named("beta")).status == 200), "its memory is kept");
    assert_eq!(several.loaded(), ["beta"]);
    assert_eq!(looked_at[0].name, "alpha");
}

#[test]
fn idle_models_are_unloaded_after_their_time() {
    let policy = ModelPolicy { keep_alive: Some(Duration::ZERO), ..ModelPolicy::default() };
    let several = several(4.0, policy);
    several.server.post(CHAT, &named("alpha")).ok();
    while !several.loaded().is_empty() {}
    while several.sim.used_bytes() > 0 {}
}

#[test]
fn a_client_can_say_how_long_a_model_is_kept() {
    let several = several(4.0, ModelPolicy::default());
    let registry = several.server.app.models();
    for name in ["alpha", "beta"] {
        several.server.post(CHAT, &named(name)).ok();
    }
    let expires = |name: &str| {
        let all = registry.list();
        all.into_iter().find(|listed| listed.name == name).and_then(|listed| listed.expires)
    };
    assert_eq!(expires("alpha"), None);
    registry.keep_alive("alpha", Some(Duration::from_secs(300)));
    assert!(expires("alpha").unwrap() > std::time::SystemTime::now());
    registry.keep_alive("beta", Some(Duration::ZERO));
    while several.loaded() != ["alpha"] {}
}

#[test]
fn clients_of_ollama_load_keep_and_unload_models() {
    let several = several(4.0, ModelPolicy::default());
    let server = &several.server;
    let names = |path: &str| -> Vec<String> {
        let list = server.get(path).ok()["models"].as_array().unwrap().clone();
        list.iter().map(|model| model["name"].as_str().unwrap().to_owned()).collect()
    };
    let reason =
        |path: &str, body: Value| server.post(path, &body).ok()["done_reason"].as_str().unwrap().to_owned();
    let expires = || server.get("/api/ps").ok()["models"][0]["expires_at"].as_str().unwrap().to_owned();
    // Models are listed though none is loaded, and one that is not loaded need not be to be unloaded.
    assert_eq!(names("/api/tags"), ["alpha", "beta", "broken", "damaged", "large"]);
    assert_eq!(names("/api/ps"), Vec::<String>::new());
    assert_eq!(reason("/api/generate", json!({ "model": "alpha", "keep_alive": 0 })), "unload");
    assert_eq!(several.loads.load(Ordering::SeqCst), 0);
    let minutes = json!({ "model": "alpha:latest", "messages": [], "keep_alive": "5m" });
    assert_eq!(reason("/api/chat", minutes), "load");
    assert_eq!((names("/api/ps"), names("/api/tags").len()), (vec!["alpha".to_owned()], 5));
    assert!(expires().starts_with("20"), "{}", expires());
    assert_eq!(reason("/api/generate", json!({ "model": "alpha", "keep_alive": -1 })), "load");
    assert!(expires().starts_with("9999"), "{}", expires());
    // What is wrong is said, and changes nothing.
    let wrong = json!({ "model": "alpha", "keep_alive": 0, "options": { "temperature": "hot" } });
    assert_eq!(server.post("/api/generate", &wrong).status, 400);
    assert_eq!(several.loaded(), ["alpha"]);
    // An answer comes first.
    let last = json!({ "model": "alpha", "prompt": "hello", "stream": false, "keep_alive": 0,
        "options": { "num_predict": 4, "ignore_eos": true } });
    assert_eq!(reason("/api/generate", last), "length");
    while !several.loaded().is_empty() {}
    assert_eq!(reason("/api/chat", json!({ "model": "beta", "messages": [] })), "load");
    assert_eq!(reason("/api/chat", json!({ "model": "beta", "messages": [], "keep_alive": "0s" })), "unload");
    assert_eq!(several.loaded(), Vec::<String>::new());
    while several.sim.used_bytes() > 0 {}
    assert_eq!(server.post("/api/generate", &json!({ "model": "gamma", "keep_alive": 0 })).status, 404);
}

#[test]
fn a_model_without_a_loader_can_be_unloaded_but_not_come_back() {
    let server = Setup::default().start();
    server.post(CHAT, &hello()).ok();
    server.post("/models/unload", &json!({ "model": "small" })).ok();
    let answer = server.post(CHAT, &hello());
    assert_eq!(answer.status, 404, "{}", answer.text());
}

/// Models that other processes compute, too, are there until the server ends: a client can neither take them away nor limit their time.
#[test]
fn a_model_that_stays_is_unloaded_by_nobody() {
    let policy = ModelPolicy {
        most: 1,
        keep_alive: Some(Duration::ZERO),
        stays: Some("ranks follow the engine that they started with"),
    };
    let several = several(1.5, policy);
    let server = &several.server;
    let stays = || {
        let registry = server.app.models();
        registry.keep_alive("alpha", Some(Duration::ZERO));
        let expires = registry.list().into_iter().find_map(|listed| listed.expires);
        assert_eq!((several.loaded(), expires), (vec!["alpha".to_owned()], None));
        assert_eq!(several.loads.load(Ordering::SeqCst), 1);
    };
    server.post(CHAT, &named("alpha")).ok();
    stays();
    let unloads = [
        ("/models/unload", json!({ "model": "alpha" })),
        ("/api/generate", json!({ "model": "alpha", "keep_alive": 0 })),
        ("/api/chat", json!({ "model": "alpha", "messages": [], "keep_alive": "0s" })),
    ];
    for (path, body) in unloads {
        let refused = server.post(path, &body);
        assert_eq!(refused.status, 501, "{path}: {}", refused.text());
        assert!(refused.text().contains("ranks follow the engine"), "{path}: {}", refused.text());
        stays();
    }
    for keep in [json!(0), json!("1ms"), json!("5m")] {
        let answer = json!({ "num_predict": 4, "ignore_eos": true });
        let body = json!({ "model": "alpha", "prompt": "hello", "stream": false, "keep_alive": keep, "options": answer });
        server.post("/api/generate", &body).ok();
        stays();
    }
    // Another one does not take its place.
    let refused = server.post(CHAT, &named("beta"));
    assert_eq!(refused.status, 503, "{}", refused.text());
    stays();
}

/// The only model answers to every name, but nobody unloads it by another one's.
#[test]
fn a_model_is_loaded_and_unloaded_by_its_own_name_only() {
    let server = Setup::default().start();
    let loaded = || server.app.models().loaded().len();
    server.post(CHAT, &named("other")).ok();
    let answer = json!({ "num_predict": 4, "ignore_eos": true });
    for path in ["/models/load", "/models/unload"] {
        let refused = server.post(path, &json!({ "model": "other" }));
        assert_eq!((refused.status, loaded()), (404, 1), "{path}: {}", refused.text());
        assert!(refused.text().contains("other"), "{path}: {}", refused.text());
    }
    let chat = json!({ "model": "other", "messages": [], "keep_alive": 0 });
    let wrong = [
        ("/api/generate", json!({ "model": "other", "keep_alive": 0 })),
        ("/api/chat", chat.clone()),
        ("/api/chat", with(chat, json!({ "options": answer }))),
    ];
    for (path, body) in wrong {
        let refused = server.post(path, &body);
        assert_eq!((refused.status, loaded()), (404, 1), "{path} {body}: {}", refused.text());
    }
    // It answers, and stays.
    let body =
        json!({ "model": "other", "prompt": "hello", "stream": false, "keep_alive": 0, "options": answer });
    server.post("/api/generate", &body).ok();
    let expires = || server.app.models().list().pop().unwrap().expires;
    assert_eq!((loaded(), expires()), (1, None));
    for name in ["small:latest", "small.gguf"] {
        server.post("/models/load", &json!({ "model": name })).ok();
    }
    assert_eq!(server.post("/models/unload", &json!({ "model": "small.gguf" })).ok()["success"], true);
    assert_eq!(loaded(), 0);
}

/// Web pages of other origins can have a browser ask for something, though not read it: that loads no model, for which another one
/// might have to go.
#[test]
fn questions_about_models_load_none() {
    let several = several(4.0, ModelPolicy { most: 1, ..ModelPolicy::default() });
    let server = &several.server;
    let looks = |name: &str| {
        let query = if name.is_empty() { String::new() } else { format!("?model={name}") };
        let paths = ["/props", "/tokenizer_info", "/slots", "/plan", "/plan.svg"];
        let ask = |path: &&str| {
            server.client().header("sec-fetch-site", "cross-site").get(&format!("{path}{query}")).status
        };
        paths.iter().map(ask).collect::<Vec<u16>>()
    };
    assert_eq!(looks("alpha"), [503, 503, 200, 404, 404]);
    assert_eq!(several.loads.load(Ordering::SeqCst), 0);
    server.post(CHAT, &named("alpha")).ok();
    for (name, wanted) in [("beta", [503, 503, 200, 404, 404]), ("alpha", [200; 5]), ("", [200; 5])] {
        assert_eq!(looks(name), wanted, "{name}");
    }
    assert!(server.get("/props?model=beta").text().contains("/models/load"));
    assert_eq!((several.loaded(), several.loads.load(Ordering::SeqCst)), (vec!["alpha".to_owned()], 1));
}

/// The client that leaves last has the last reference of a model that was unloaded. Its engine, which is in a step, is not waited for
/// where connections are served.
#[test]
fn a_model_is_freed_beside_the_connections() {
    let server = TestServer::with_one_thread(Setup::default().app());
    let served = server.app.models().loaded().pop().unwrap().to_used();
    let gate = Gate::new(&served);
    let mut stream = server.client().connect();
    let body = with(hello(), json!({ "stream": true })).to_string();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).unwrap();
    while served.in_flight().is_empty() {}
    while served.state().running == 1 {
        gate.step();
    }
    server.app.models().unload("small").unwrap();
    let weak = Arc::downgrade(&served);
    drop((served, stream));
    while weak.strong_count() > 0 {}
    // The engine's step has not ended.
    for _ in 0..3 {
        assert_eq!(server.get("/health").status, 200);
    }
    drop(gate);
}

#[test]
fn each_model_has_a_plan_of_its_own() {
    let Several { server, .. } = several(2.5, ModelPolicy::default());
    assert_eq!(server.get("/plan.svg").status, 404);
    for name in ["beta", "alpha"] {
        server.post(CHAT, &named(name)).ok();
    }
    for (query, wanted) in [("?model=beta", "beta"), ("?model=alpha", "alpha"), ("", "alpha")] {
        assert_eq!(server.get(&format!("/plan.svg{query}")).text(), format!("<svg>{wanted}</svg>"));
        assert_eq!(server.get(&format!("/plan{query}")).text(), format!("<p>{wanted}</p>"));
    }
    // Those that are not loaded have none.
    assert_eq!(server.get("/plan.svg?model=large").status, 404);
    assert_eq!(server.get("/plan.svg?model=nothing").status, 404);
}

#[test]
fn memory_of_devices_is_told_apart() {
    let Several { server, sim, .. } = several(2.5, ModelPolicy::default());
    server.post(CHAT, &named("alpha")).ok();
    let running = server.get("/api/ps").ok()["models"][0].clone();
    let bytes = running["size_vram"].as_u64().unwrap();
    assert!(bytes > 0 && sim.used_bytes() > 0, "{running}");
    assert!(running["size"].as_u64().unwrap() >= bytes, "{running}");
}
