//! A server in this process with a small random model, and a client that speaks plain HTTP.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

pub mod client;
pub mod gate;
pub mod model;

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;

use quadriga_llm::serving::{Batcher, BatcherOptions};
use quadriga_llm::{EngineOptions, GeneratorOptions, Model};
use quadriga_runtime::Scheduler;
use quadriga_server::{App, Keys, Limits, ListenAddress, ModelRegistry, ServedModel, Server, StopHandle};

#[allow(unused_imports, reason = "each test uses a part")]
pub use client::{Answer, Client, Stream};
pub use serde_json::{Value, json};

/// Tokens of a prompt and its answer.
pub const CONTEXT: usize = 512;

/// A server on a free port, which ends when it is dropped.
pub struct TestServer {
    pub address: SocketAddr,
    pub app: Arc<App>,
    stop: StopHandle,
    thread: Option<JoinHandle<()>>,
}

/// How a server is set up.
pub struct Setup {
    pub keys: Keys,
    pub limits: Limits,
    pub batcher: BatcherOptions,
    pub defaults: GeneratorOptions,
    pub model: Model,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            keys: Keys::default(),
            limits: Limits::default(),
            batcher: BatcherOptions {
                engine: EngineOptions {
                    sequences: 4,
                    batch: 64,
                    context: CONTEXT,
                    ..EngineOptions::default()
                },
                token_time: None,
                ..BatcherOptions::default()
            },
            defaults: GeneratorOptions::default(),
            model: model::small(),
        }
    }
}

impl Setup {
    /// Starts to serve the model as `small`.
    pub fn served(&self) -> ServedModel {
        self.served_on("small", Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap()))
    }

    /// Starts to serve the model on a device.
    pub fn served_on(&self, name: &str, backend: Arc<dyn quadriga_runtime::Backend>) -> ServedModel {
        let scheduler = Scheduler::new([backend]);
        let batcher =
            Batcher::new(self.model.clone(), &scheduler, self.batcher.clone(), &mut |_| {}).unwrap();
        ServedModel::start(name, batcher, self.defaults.clone(), None).unwrap()
    }

    pub fn app(self) -> App {
        App::new(ModelRegistry::with(self.served()), self.keys, self.limits)
    }

    pub fn start(self) -> TestServer {
        TestServer::of(self.app())
    }
}

impl TestServer {
    pub fn start() -> TestServer {
        Setup::default().start()
    }

    pub fn of(app: App) -> TestServer {
        TestServer::at(app, SocketAddr::from(([127, 0, 0, 1], 0)).into())
    }

    /// At an address; that of a Unix socket cannot be asked for.
    pub fn at(app: App, address: ListenAddress) -> TestServer {
        TestServer::with_threads(app, address, 512)
    }

    /// With so many threads for what blocks.
    pub fn with_threads(app: App, address: ListenAddress, blocking: usize) -> TestServer {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        TestServer::on(builder.worker_threads(2).max_blocking_threads(blocking), app, address)
    }

    /// With one thread for all connections: whatever stops it stops all of them.
    pub fn with_one_thread(app: App) -> TestServer {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        TestServer::on(builder.worker_threads(1), app, SocketAddr::from(([127, 0, 0, 1], 0)).into())
    }

    fn on(builder: &mut tokio::runtime::Builder, app: App, address: ListenAddress) -> TestServer {
        let runtime = builder.enable_all().build().unwrap();
        let server = runtime.block_on(Server::bind(app, address)).unwrap();
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let (address, app) = (server.address().unwrap_or(nowhere), Arc::clone(server.app()));
        let (stop, stopped) = Server::stop_handle();
        let thread = std::thread::spawn(move || runtime.block_on(server.run(stopped)));
        TestServer { address, app, stop, thread: Some(thread) }
    }

    pub fn client(&self) -> Client {
        Client::new(self.address)
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.client().post(path, body)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.client().get(path)
    }

    pub fn stop(&self) {
        self.stop.stop();
    }

    /// Waits until the server has ended.
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    /// Asks for the status until nothing is being computed, and asserts that no page is in use then.
    #[track_caller]
    pub fn assert_idle(&self) {
        let mut status = Value::Null;
        for _ in 0..2000 {
            status = self.get("/status").json();
            if status["running"] == 0 && status["waiting"] == 0 && status["requests"] == json!([]) {
                assert_eq!(status["pages"]["used"], 0, "{status}");
                return;
            }
        }
        panic!("still busy: {status}");
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stop.stop();
        self.join();
    }
}

/// A conversation of one message.
pub fn hello() -> Value {
    let messages = json!([{ "role": "user", "content": "hello there" }]);
    json!({ "model": "small", "messages": messages, "max_tokens": 8, "seed": 1, "ignore_eos": true })
}

/// An object with fields added or replaced.
pub fn with(mut value: Value, more: Value) -> Value {
    for (name, field) in more.as_object().unwrap() {
        value[name] = field.clone();
    }
    value
}
