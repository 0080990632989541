//! `/openapi.json`: a description of every route, which is registered together with its handler and so exists for each.

mod document;
pub mod schema;

use std::sync::Arc;

use axum::Router;
use axum::handler::Handler;
use axum::routing::{get, post};
use serde_json::Value;

use crate::app::App;

/// The description of a route.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// A name for generated clients.
    pub id: &'static str,
    /// Whose interface it belongs to.
    pub group: Group,
    /// What it does, in one sentence.
    pub summary: &'static str,
    /// The schema of the request's body, if it has one.
    pub request: Option<fn() -> Value>,
    /// The answer.
    pub answer: Answer,
}

/// The answer of a route.
#[derive(Clone, Copy, Debug)]
pub enum Answer {
    /// JSON of a schema.
    Json(fn() -> Value),
    /// JSON of a schema, or server-sent events if the request asks for a stream.
    JsonOrEvents(fn() -> Value),
    /// JSON of a schema in one or in several lines.
    JsonLines(fn() -> Value),
    /// Text of a media type.
    Text(&'static str),
}

/// Whose interface a route belongs to. The form of its errors follows from its path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Group {
    /// OpenAI's.
    OpenAi,
    /// Anthropic's.
    Anthropic,
    /// Ollama's.
    Ollama,
    /// Those of llama-server.
    LlamaServer,
    /// The server's own.
    Server,
}

/// A described route.
#[derive(Clone, Copy, Debug)]
struct Described {
    path: &'static str,
    method: &'static str,
    /// The number of the path among those of the operation.
    alias: usize,
    operation: Operation,
}

/// Routes with their descriptions.
#[derive(Default)]
pub struct DescribedRoutes {
    router: Router<Arc<App>>,
    described: Vec<Described>,
}

impl DescribedRoutes {
    /// Adds a handler for `GET` under some paths.
    #[must_use]
    pub fn get<H, T>(self, paths: &[&'static str], handler: H, operation: Operation) -> DescribedRoutes
    where
        H: Handler<T, Arc<App>>,
        T: 'static,
    {
        let mut all = self.describe("get", paths, operation);
        for path in paths {
            all.router = all.router.route(path, get(handler.clone()));
        }
        all
    }

    /// Adds a handler for `POST` under some paths.
    #[must_use]
    pub fn post<H, T>(self, paths: &[&'static str], handler: H, operation: Operation) -> DescribedRoutes
    where
        H: Handler<T, Arc<App>>,
        T: 'static,
    {
        let mut all = self.describe("post", paths, operation);
        for path in paths {
            all.router = all.router.route(path, post(handler.clone()));
        }
        all
    }

    /// Adds other routes.
    #[must_use]
    pub fn merge(mut self, other: DescribedRoutes) -> DescribedRoutes {
        self.router = self.router.merge(other.router);
        self.described.extend(other.described);
        self
    }

    /// Describes a route that is registered elsewhere.
    #[must_use]
    pub fn describe(
        mut self,
        method: &'static str,
        paths: &[&'static str],
        operation: Operation,
    ) -> DescribedRoutes {
        let each = paths.iter().enumerate();
        self.described.extend(each.map(|(alias, path)| Described { path, method, alias, operation }));
        self
    }

    /// The OpenAPI document of a server whose paths begin with a prefix; `error_schema` is the name of the schema of a path's errors.
    pub fn document(&self, prefix: &str, error_schema: fn(&str) -> &'static str) -> Value {
        document::document(&self.described, prefix, error_schema)
    }

    /// The paths to which bodies are posted, without other names of the same route.
    pub(crate) fn posted(&self) -> Vec<&'static str> {
        let posted = self.described.iter().filter(|one| one.operation.request.is_some() && one.alias == 0);
        posted.map(|one| one.path).collect()
    }

    /// The routes alone.
    pub fn into_router(self) -> Router<Arc<App>> {
        self.router
    }
}
