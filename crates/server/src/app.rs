//! The state that all requests share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use crate::error::ApiError;
use crate::model::ServedModel;
use crate::operation::auth::Keys;
use crate::operation::limits::Limits;

/// The state that all requests share: models, keys and limits.
pub struct App {
    models: ModelRegistry,
    keys: Keys,
    limits: Limits,
    started: Instant,
    stopping: AtomicBool,
}

impl App {
    /// A server's state.
    pub fn new(models: ModelRegistry, keys: Keys, limits: Limits) -> App {
        App { models, keys, limits, started: Instant::now(), stopping: AtomicBool::new(false) }
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
        self.stopping.load(Ordering::Acquire)
    }

    /// From now on, the server is not ready.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
    }
}

/// The models of a server by name.
#[derive(Default)]
pub struct ModelRegistry {
    models: RwLock<BTreeMap<String, Arc<ServedModel>>>,
}

impl ModelRegistry {
    /// A registry with one model, which answers whatever name a client uses.
    pub fn with(model: ServedModel) -> ModelRegistry {
        let registry = ModelRegistry::default();
        registry.insert(model);
        registry
    }

    /// Adds a model, in place of one of the same name.
    pub fn insert(&self, model: ServedModel) {
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        models.insert(model.name.clone(), Arc::new(model));
    }

    /// The models that are loaded.
    pub fn loaded(&self) -> Vec<Arc<ServedModel>> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// The model that a request names. If there is only one, it answers to every name, and to none.
    ///
    /// # Errors
    /// There is no model of that name.
    pub async fn find(&self, name: Option<&str>) -> Result<Arc<ServedModel>, ApiError> {
        let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
        let named = name.and_then(|name| models.get(name));
        let only = || models.values().next().filter(|_| models.len() == 1);
        let found = named.or_else(only).cloned();
        found.ok_or_else(|| match name {
            Some(name) => ApiError::model_not_found(name),
            None => ApiError::field("model", "is required: there are several models"),
        })
    }
}
