//! The state that all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tokio::sync::watch;

use crate::field_log::FieldLog;
use crate::operation::auth::Keys;
use crate::operation::hosts::Hosts;
use crate::operation::limits::Limits;
use crate::operation::memory_room::{AnswerMemory, MemoryPool, MemoryRoom};
use crate::operation::origins::Origins;
use crate::operation::request_counts::RequestCounts;
use crate::operation::tls::TlsFiles;
use crate::registry::ModelRegistry;

/// Gives memory that is not used any more back to the system.
pub type MemoryRelease = Box<dyn Fn() + Send + Sync>;

/// Which routes there are, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interface {
    /// What all paths begin with, such as `/llm`; nothing by default.
    pub prefix: String,
    /// Whether browsers get a page at `/`.
    pub page: bool,
    /// Whether `/slots` tells what is being computed.
    pub slots: bool,
}

impl Default for Interface {
    fn default() -> Interface {
        Interface { prefix: String::new(), page: true, slots: true }
    }
}

impl Interface {
    /// A prefix of paths: parts of letters, digits, `-`, `_`, `.` and `~`, each behind a slash.
    ///
    /// # Errors
    /// It is none.
    pub fn parse_prefix(text: &str) -> Result<String, String> {
        let is_part = |part: &str| {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
            !part.is_empty() && part != "." && part != ".." && part.bytes().all(is_plain)
        };
        let trimmed = text.trim_end_matches('/');
        let parts = trimmed.strip_prefix('/').filter(|parts| parts.split('/').all(is_part));
        match parts.is_some() || trimmed.is_empty() {
            true => Ok(trimmed.to_owned()),
            false => Err(format!("{text:?} is no path such as /llm")),
        }
    }
}

/// The state that all requests share: models, keys and limits.
pub struct App {
    models: ModelRegistry,
    keys: Keys,
    limits: Limits,
    origins: Origins,
    hosts: Hosts,
    /// Whether only this machine reaches the server.
    local: AtomicBool,
    tls: Option<TlsFiles>,
    requests: RequestCounts,
    bodies: Arc<MemoryPool>,
    answers: AnswerMemory,
    release: Option<MemoryRelease>,
    interface: Interface,
    field_log: Option<Arc<FieldLog>>,
    started: Instant,
    /// Whether the first model is still being loaded.
    starting: AtomicBool,
    stopping: watch::Sender<bool>,
}

impl App {
    /// A server's state.
    pub fn new(models: ModelRegistry, keys: Keys, limits: Limits) -> App {
        let bodies = Arc::new(MemoryPool::new(limits.body_memory));
        let answers = AnswerMemory::new(limits.answer_memory);
        App {
            models,
            keys,
            limits,
            bodies,
            answers,
            origins: Origins::default(),
            hosts: Hosts::default(),
            local: AtomicBool::new(false),
            tls: None,
            requests: RequestCounts::default(),
            release: None,
            interface: Interface::default(),
            field_log: None,
            started: Instant::now(),
            starting: AtomicBool::new(false),
            stopping: watch::Sender::new(false),
        }
    }

    /// With pages of other origins that may use the server.
    #[must_use]
    pub fn with_origins(self, origins: Origins) -> App {
        App { origins, ..self }
    }

    /// With further names under which a server without keys may be asked on the loopback interface.
    #[must_use]
    pub fn with_hosts(self, hosts: Hosts) -> App {
        App { hosts, ..self }
    }

    /// With encrypted connections only.
    #[must_use]
    pub fn with_tls(self, tls: TlsFiles) -> App {
        App { tls: Some(tls), ..self }
    }

    /// With what gives memory back once the server has nothing to do after a time in which it took more.
    /// After 15 seconds without requests it is called again, once engines have given back what they keep for many requests
    /// at once ([`Batcher::release_memory`](quadriga_llm::serving::Batcher::release_memory)).
    #[must_use]
    pub fn with_memory_release(self, release: MemoryRelease) -> App {
        App { release: Some(release), ..self }
    }

    /// With other routes than all of them at the root.
    #[must_use]
    pub fn with_interface(self, interface: Interface) -> App {
        App { interface, ..self }
    }

    /// With a log of the fields that requests are asked for.
    #[must_use]
    pub fn with_field_log(self, log: Arc<FieldLog>) -> App {
        App { field_log: Some(log), ..self }
    }

    /// The log of fields, if there is one.
    pub(crate) fn field_log(&self) -> Option<&Arc<FieldLog>> {
        self.field_log.as_ref()
    }

    /// Which routes there are, and where.
    pub fn interface(&self) -> &Interface {
        &self.interface
    }

    /// What gives memory back.
    pub(crate) fn memory_release(&self) -> Option<&MemoryRelease> {
        self.release.as_ref()
    }

    /// The pages that may use the server.
    pub fn origins(&self) -> &Origins {
        &self.origins
    }

    /// The names under which the server may be asked.
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Whether only this machine reaches the server, so that the name under which it is asked matters.
    pub fn is_local(&self) -> bool {
        self.local.load(Ordering::Acquire)
    }

    /// Says whether only this machine reaches the server.
    pub(crate) fn set_local(&self, local: bool) {
        self.local.store(local, Ordering::Release);
    }

    /// The certificate, if connections are encrypted.
    pub fn tls(&self) -> Option<&TlsFiles> {
        self.tls.as_ref()
    }

    /// The requests so far.
    pub fn requests(&self) -> &RequestCounts {
        &self.requests
    }

    /// Room for a body, which it takes while it is read.
    pub(crate) fn body_room(&self) -> MemoryRoom {
        MemoryRoom::new(&self.bodies)
    }

    /// The memory for answers.
    pub(crate) fn answer_memory(&self) -> &AnswerMemory {
        &self.answers
    }

    /// Whether the server waits for its first model: it is not ready then, and requests wait, too.
    pub fn is_starting(&self) -> bool {
        self.starting.load(Ordering::Acquire)
    }

    /// Says whether the server waits for its first model.
    pub fn set_starting(&self, starting: bool) {
        self.starting.store(starting, Ordering::Release);
    }

    /// The models.
    pub fn models(&self) -> &ModelRegistry {
        &self.models
    }

    /// The keys.
    pub fn keys(&self) -> &Keys {
        &self.keys
    }

    /// Limits of requests and connections.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// When the server was started.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Whether the server is about to stop, and takes no more requests.
    pub fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// From now on, the server is not ready.
    pub fn stop(&self) {
        self.stopping.send_replace(true);
    }

    /// Waits until the server is about to stop.
    pub(crate) async fn stopped(&self) {
        // Who could tell is here.
        let _ = self.stopping.subscribe().wait_for(|stopping| *stopping).await;
    }
}
