//! Loaders that take long: what the server does meanwhile.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Mutex};

use crate::common::{Setup, TestServer, hello, json};
use crate::models::{CHAT, named};
use quadriga_server::{
    App, Keys, Limits, LoadError, ModelEntry, ModelLoader, ModelPolicy, ModelRegistry, ServedModel,
};

/// A folder that takes long to read.
struct SlowFolder(Mutex<Receiver<()>>, Sender<()>);

impl ModelLoader for SlowFolder {
    fn entries(&self) -> Vec<ModelEntry> {
        let _ = self.1.send(());
        let _ = self.0.lock().unwrap().recv();
        vec![ModelEntry {
            name: "small".to_owned(),
            aliases: vec!["other".to_owned()],
            ..ModelEntry::default()
        }]
    }

    fn load(&self, _: &str) -> Result<ServedModel, LoadError> {
        Ok(Setup::default().served())
    }
}

#[test]
fn folders_are_read_beside_the_connections() {
    let ((release, held), (sender, reads)) = (channel(), channel());
    let registry = ModelRegistry::loading(SlowFolder(Mutex::new(held), sender), ModelPolicy::default());
    let server = TestServer::with_one_thread(App::new(registry, Keys::default(), Limits::default()));
    let ask = |request: &(dyn Fn() -> u16 + Sync)| {
        std::thread::scope(|scope| {
            let asked = scope.spawn(request);
            // One that has just been read is not read again.
            while !asked.is_finished() {
                if reads.try_recv().is_ok() {
                    assert_eq!(server.get("/health").status, 200);
                    release.send(()).unwrap();
                }
            }
            assert_eq!(asked.join().unwrap(), 200);
        });
    };
    let paths = ["/v1/models", "/v1/models/other", "/models", "/status", "/api/tags", "/api/ps"];
    paths.iter().for_each(|path| ask(&|| server.get(path).status));
    ask(&|| server.post(CHAT, &named("other")).status);
    ask(&|| server.post(CHAT, &named("none")).status);
    ask(&|| server.post("/models/unload", &json!({ "model": "other" })).status);
    drop(release);
}

/// Loads one model when it is let.
struct Held(Arc<Barrier>, Setup);

impl ModelLoader for Held {
    fn entries(&self) -> Vec<ModelEntry> {
        vec![ModelEntry { name: "small".to_owned(), path: "small.gguf".into(), ..ModelEntry::default() }]
    }

    fn load(&self, _: &str) -> Result<ServedModel, LoadError> {
        self.0.wait();
        self.0.wait();
        Ok(self.1.served())
    }
}

#[test]
fn a_model_that_is_unloaded_while_it_is_loaded_does_not_stay() {
    let barrier = Arc::new(Barrier::new(2));
    let registry =
        ModelRegistry::loading(Held(Arc::clone(&barrier), Setup::default()), ModelPolicy::default());
    let server = TestServer::of(App::new(registry, Keys::default(), Limits::default()));
    let ask = |unloads: bool| {
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| server.post(CHAT, &hello()).status);
            barrier.wait();
            if unloads {
                server.app.models().unload("small").unwrap();
            }
            barrier.wait();
            // Whoever waits for it has its answer.
            assert_eq!(asked.join().unwrap(), 200);
        });
        server.app.models().loaded().len()
    };
    assert_eq!(ask(true), 0);
    assert_eq!(ask(false), 1);
}
