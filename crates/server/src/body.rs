//! The body of a request: read up to a limit, and parsed as a JSON object.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header};
use http_body::Body as _;
use serde_json::{Map, Value};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::app::App;
use crate::error::{ApiError, ErrorKind};
use crate::fields::Fields;
use crate::operation::memory_room::MemoryRoom;

/// Where bodies are logged, with the prompts that are in them: only if that is asked for.
pub const PROMPTS: &str = "quadriga_server::prompts";

/// Bytes from which a body is parsed on a thread of its own.
const LONG_BODY: usize = 256 << 10;

/// A body that arrives steadily has so many times the time that it may stand still.
const BODY_TIMES: u32 = 10;

/// A body that stands still has as much less time as it takes more memory than this, down to a part of the time.
const SMALL_BODY: usize = 1 << 20;
const LEAST_TIME: u32 = 6;

/// A body moves while this part of what was read arrives.
const PROGRESS: usize = 256;

/// One body may take this part of the memory for all.
const SHARE: usize = 4;

/// Lists and objects within each other, of which the parser reads fewer.
const MAX_DEPTH: usize = 128;

/// The memory of a body.
#[derive(Debug)]
pub(crate) struct BodyRoom {
    room: MemoryRoom,
    /// The bytes of the body itself.
    text: usize,
}

impl BodyRoom {
    /// Its values are gone: texts are left of it, which have no more bytes than it had.
    pub(crate) fn note_parsed(&self) {
        self.room.shrink(self.room.bytes().saturating_sub(self.text));
    }
}

/// A JSON object that a request has for a body.
#[derive(Clone, Debug)]
pub struct JsonBody(pub Map<String, Value>);

impl JsonBody {
    /// Its fields.
    pub fn fields(&self) -> Fields<'_> {
        Fields::new(&self.0)
    }

    /// Parses the bytes of a body.
    pub fn parse(bytes: &[u8]) -> Result<JsonBody, ApiError> {
        // An empty body is an empty object: some clients send none where all fields are optional.
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(JsonBody(Map::new()));
        }
        JsonBody::of(parse_value(bytes)?)
    }

    fn of(value: Value) -> Result<JsonBody, ApiError> {
        match value {
            Value::Object(object) => Ok(JsonBody(object)),
            _ => Err(ApiError::invalid("the body must be a JSON object")),
        }
    }

    /// Reads and parses the body of a request, with the memory that it takes.
    pub(crate) async fn read(request: Request, app: &Arc<App>) -> Result<(JsonBody, BodyRoom), ApiError> {
        read_parsed(request, app, JsonBody::parse).await
    }
}

/// Reads and parses the body of a request that need not be an object, with the memory that it takes.
pub(crate) async fn read_value(request: Request, app: &Arc<App>) -> Result<(Value, BodyRoom), ApiError> {
    read_parsed(request, app, parse_value).await
}

pub(crate) fn parse_value(bytes: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(bytes)
        .map_err(|error| ApiError::invalid(format!("the body is not valid JSON: {error}")))
}

async fn read_parsed<T: Send + 'static>(
    request: Request,
    app: &Arc<App>,
    parse: fn(&[u8]) -> Result<T, ApiError>,
) -> Result<(T, BodyRoom), ApiError> {
    let limits = app.limits();
    check_coding(request.headers())?;
    let read = read(request.into_body(), app);
    let most = limits.body_time.saturating_mul(BODY_TIMES);
    let (bytes, room) = tokio::time::timeout(most, read).await.map_err(|_| {
        ApiError::new(ErrorKind::Timeout, format!("the body did not arrive within {most:?}"))
    })??;
    if tracing::enabled!(target: PROMPTS, tracing::Level::INFO) {
        tracing::info!(target: PROMPTS, body = %printable(&bytes), "request body");
    }
    if bytes.len() < LONG_BODY {
        return Ok((parse(&bytes)?, room));
    }
    // The threads that serve connections have others to serve meanwhile.
    let parse = move || parse(&bytes).map(|body| (body, room));
    let failed = |_| ApiError::new(ErrorKind::Internal, "the body could not be parsed");
    tokio::task::spawn_blocking(parse).await.map_err(failed)?
}

/// Bodies are read as they are sent: one that is compressed, or in a coding that the server does not know, would be taken for something
/// else than proxies before it take it for.
fn check_coding(headers: &HeaderMap) -> Result<(), ApiError> {
    for (name, known) in [(header::CONTENT_ENCODING, "identity"), (header::TRANSFER_ENCODING, "chunked")] {
        let values = headers.get_all(&name);
        let is_known =
            |value: &HeaderValue| value.as_bytes().trim_ascii().eq_ignore_ascii_case(known.as_bytes());
        if values.iter().count() > 1 || !values.iter().all(is_known) {
            let message =
                format!("bodies with another {name} than {known} are not read; send the body as it is");
            return Err(ApiError::invalid(message));
        }
    }
    Ok(())
}

/// The text of a body for a log that a terminal may show: control characters, and those that change the direction of text, are
/// spelled out.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut printable = String::with_capacity(text.len());
    for letter in text.chars() {
        let turns =
            matches!(letter, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        match letter.is_control() || turns {
            true => printable.extend(letter.escape_default()),
            false => printable.push(letter),
        }
    }
    printable
}

/// The whole body, if it has at most so many bytes.
///
/// While it arrives it takes the room of its bytes; that of its values once they can be parsed.
async fn read(body: Body, app: &Arc<App>) -> Result<(Vec<u8>, BodyRoom), ApiError> {
    let limit = app.limits().body_bytes;
    let too_large = || {
        ApiError::new(
            ErrorKind::TooLarge,
            format!("the body is larger than {limit} bytes, the server's limit"),
        )
    };
    let length = body.size_hint().exact();
    if body.size_hint().lower() > limit as u64 {
        return Err(too_large());
    }
    let mut body = pin!(body);
    let mut bytes = Vec::new();
    let room = app.body_room();
    let share = room.pool().most() / SHARE;
    let mut values = ValueScan::default();
    // When enough arrived the last time, and what there was then.
    let (mut last, mut before) = (Instant::now(), 0);
    loop {
        let pause = pause(app.limits().body_time, bytes.len());
        let frame = std::future::poll_fn(|context| body.as_mut().poll_frame(context));
        let Ok(frame) = tokio::time::timeout(pause.saturating_sub(last.elapsed()), frame).await else {
            let message = format!("no more of the body arrived within {pause:?}");
            return Err(ApiError::new(ErrorKind::Timeout, message));
        };
        let Some(frame) = frame else { break };
        let frame = frame.map_err(|error| unread(&error, bytes.len(), length))?;
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > limit {
            return Err(too_large());
        }
        values.read(&data);
        if values.deepest > MAX_DEPTH {
            let message = format!(
                "the body is not valid JSON: more than {MAX_DEPTH} lists and objects within each other exceed the recursion limit"
            );
            return Err(ApiError::invalid(message));
        }
        if bytes.len().saturating_add(data.len()).saturating_add(values.bytes) > share {
            let message = format!(
                "the body and its values take more than {} KiB, a quarter of the memory that there is for all bodies",
                share >> 10
            );
            return Err(ApiError::new(ErrorKind::TooLarge, message));
        }
        take_room(&room, data.len())?;
        bytes.extend_from_slice(&data);
        if bytes.len() - before > before / PROGRESS {
            (last, before) = (Instant::now(), bytes.len());
        }
    }
    take_room(&room, values.bytes)?;
    let text = bytes.len();
    Ok((bytes, BodyRoom { room, text }))
}

fn take_room(room: &MemoryRoom, bytes: usize) -> Result<(), ApiError> {
    let message = "the bodies of other requests take all the memory that there is for them";
    let full = || ApiError::new(ErrorKind::TooMany, message).retry_after(Duration::from_secs(1));
    room.grow(bytes).then_some(()).ok_or_else(full)
}

/// How long a body of which so many bytes were read may stand still.
fn pause(body_time: Duration, read: usize) -> Duration {
    let parts = u32::try_from(read / SMALL_BODY).unwrap_or(u32::MAX);
    body_time / parts.clamp(1, LEAST_TIME)
}

/// Bytes that a list or an object takes as a value, beside what is in it.
const LIST_BYTES: usize = 512;

/// Bytes that a further value of a list or an object takes, with its name.
const VALUE_BYTES: usize = 160;

/// Finds the values of a body as it arrives: small ones take many times their bytes once they are parsed.
#[derive(Default)]
struct ValueScan {
    in_text: bool,
    escaped: bool,
    /// The bytes that its values take, beside their texts.
    bytes: usize,
    /// Lists and objects that are open, and the most that ever were.
    open: usize,
    deepest: usize,
}

impl ValueScan {
    /// Reads the next part of the body.
    fn read(&mut self, part: &[u8]) {
        for byte in part {
            match byte {
                _ if std::mem::take(&mut self.escaped) => {}
                b'\\' => self.escaped = self.in_text,
                b'"' => self.in_text = !self.in_text,
                b',' if !self.in_text => self.bytes += VALUE_BYTES,
                b'[' | b'{' if !self.in_text => {
                    self.bytes += LIST_BYTES;
                    self.open += 1;
                    self.deepest = self.deepest.max(self.open);
                }
                b']' | b'}' if !self.in_text => self.open = self.open.saturating_sub(1),
                _ => {}
            }
        }
    }
}

/// Why the rest of a body could not be read.
fn unread(error: &axum::Error, read: usize, length: Option<u64>) -> ApiError {
    let first: &(dyn std::error::Error + 'static) = error;
    let mut causes = std::iter::successors(Some(first), |error| error.source());
    let is_end = |cause: &std::io::Error| cause.kind() == std::io::ErrorKind::UnexpectedEof;
    ApiError::invalid(match causes.any(|cause| cause.downcast_ref().is_some_and(is_end)) {
        true => {
            let of = length.map(|length| format!(" of {length}")).unwrap_or_default();
            format!("the connection ended after {read}{of} bytes of the body")
        }
        false => format!("the body could not be read: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_of_bodies_have_no_control_characters() {
        let text = printable("{\"a\":\"\u{1b}[2J\u{9b}é\u{202e}\"}\r\n\u{7f}".as_bytes());
        assert_eq!(text, r#"{"a":"\u{1b}[2J\u{9b}é\u{202e}"}\r\n\u{7f}"#);
    }

    #[test]
    fn values_are_found_outside_of_texts_also_in_parts() {
        let body = r#"{"a,[":"x\\\",{[","b":[1,{"c":"\\"},2]}"#;
        assert!(parse_value(body.as_bytes()).is_ok());
        let wanted = 3 * LIST_BYTES + 3 * VALUE_BYTES;
        for split in 0..=body.len() {
            let (first, second) = body.as_bytes().split_at(split);
            let mut scan = ValueScan::default();
            scan.read(first);
            scan.read(second);
            assert_eq!((scan.bytes, scan.open, scan.deepest), (wanted, 0, 3), "{split}");
        }
    }

    #[test]
    fn large_bodies_stand_still_for_less_time() {
        let time = Duration::from_secs(60);
        let pauses = [0, SMALL_BODY, 4 * SMALL_BODY, usize::MAX].map(|read| pause(time, read).as_secs());
        assert_eq!(pauses, [60, 60, 15, 10]);
    }

    /// The scan refuses no body that the parser would read.
    #[test]
    fn what_the_parser_reads_is_no_deeper_than_the_limit() {
        let deep = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(parse_value(deep(MAX_DEPTH - 1).as_bytes()).is_ok());
        assert!(parse_value(deep(MAX_DEPTH + 1).as_bytes()).is_err());
    }

    #[test]
    fn deep_json_is_an_error() {
        let deep = "[".repeat(100_000);
        let error = JsonBody::parse(format!("{{\"a\":{deep}").as_bytes()).map(|_| ()).unwrap_err();
        assert!(error.message.contains("recursion limit"), "{error}");
        assert!(JsonBody::parse(b"[]").is_err());
        assert!(JsonBody::parse(b" ").is_ok_and(|body| body.0.is_empty()));
    }
}
