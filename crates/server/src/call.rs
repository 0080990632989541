//! A request on its way through a handler: who asks, and what.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::{FromRequest, Request};
use axum::http::HeaderMap;

use crate::app::App;
use crate::body::{BodyRoom, JsonBody};
use crate::error::ApiError;
use crate::field_log::RouteFieldLog;
use crate::fields::Fields;
use crate::model::ServedModel;
use crate::operation::caller::Caller;

/// A request with a JSON body, as handlers take it.
pub struct Call {
    /// The server's state.
    pub app: Arc<App>,
    /// Who asks.
    pub caller: Caller,
    /// The request's identifier.
    pub id: RequestId,
    /// The request's headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: JsonBody,
    /// Notes the fields that are asked for, where that is wanted.
    log: Option<RouteFieldLog>,
    /// The memory that the body takes as long as it is there.
    room: BodyRoom,
}

/// The caller of a request whose body was parsed: its texts are held until the answer begins, and take their room as long.
pub struct ParsedCall {
    caller: Caller,
    _room: BodyRoom,
}

impl std::ops::Deref for ParsedCall {
    type Target = Caller;

    fn deref(&self) -> &Caller {
        &self.caller
    }
}

/// What identifies a request in answers and logs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RequestId(pub String);

impl Call {
    /// The fields of the body.
    pub fn fields(&self) -> Fields<'_> {
        self.body.fields().logged(self.log.as_ref())
    }

    /// The caller, without the body: all that is generated from was taken out of it.
    #[must_use]
    pub fn parsed(self) -> ParsedCall {
        let Call { caller, body, room, .. } = self;
        drop(body);
        room.note_parsed();
        ParsedCall { caller, _room: room }
    }

    /// The model that the body names.
    pub async fn model(&self) -> Result<Arc<ServedModel>, ApiError> {
        let name = self.fields().text("model")?;
        self.app.models().find(name).await
    }
}

impl FromRequest<Arc<App>> for Call {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Call, ApiError> {
        let caller = request.extensions().get::<Caller>().cloned().unwrap_or_default();
        let id = request.extensions().get::<RequestId>().cloned().unwrap_or_default();
        let headers = request.headers().clone();
        let log = app.field_log().map(|log| RouteFieldLog::new(log, request.uri().path()));
        let (body, room) = JsonBody::read(request, app).await?;
        Ok(Call { app: Arc::clone(app), caller, id, headers, body, log, room })
    }
}

/// Makes identifiers different from those of another run.
fn run_number() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    static RUN: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    *RUN.get_or_init(|| RandomState::new().hash_one(std::process::id()))
}

/// A new identifier with a prefix such as `chatcmpl-`.
pub fn new_id(prefix: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{prefix}{:016x}{number:08x}", run_number())
}

/// A random seed.
pub fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(()) >> 32
}
