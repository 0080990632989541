//! The page at `/`: files that are part of the program.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::app::App;
use crate::error::{ApiError, ErrorKind};

/// A file of the page.
struct Asset {
    path: &'static str,
    content: &'static [u8],
}

impl Asset {
    fn content_type(&self) -> &'static str {
        match self.path.rsplit('.').next() {
            Some("html") => "text/html; charset=utf-8",
            Some("css") => "text/css; charset=utf-8",
            Some("js") => "text/javascript; charset=utf-8",
            _ => "image/svg+xml",
        }
    }
}

/// The files of `web` with these names.
macro_rules! assets {
    ($($name:literal),* $(,)?) => {
        &[$(Asset { path: concat!("/", $name), content: include_bytes!(concat!("../web/", $name)) }),*]
    };
}

/// All files of the page. The first is the page itself.
const ASSETS: &[Asset] = assets![
    "index.html",
    "api.js",
    "app.js",
    "blocks.js",
    "charts.js",
    "chat.js",
    "composer.js",
    "dom.js",
    "drawer.js",
    "format.js",
    "generate.js",
    "highlight.js",
    "icon.svg",
    "icons.js",
    "inline.js",
    "languages.js",
    "library.js",
    "markdown.js",
    "message.js",
    "messages.css",
    "settings-panel.js",
    "settings.js",
    "shortcuts.js",
    "sidebar.js",
    "sse.js",
    "status.css",
    "status.js",
    "store.js",
    "style.css",
    "theme.js",
    "toasts.js",
    "transfer.js",
    "tree.js",
];

/// Only what comes from the server itself is loaded, and nothing runs that is written in the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The routes of the page.
pub(crate) fn routes() -> Router<Arc<App>> {
    let router = Router::new().route("/", get(index));
    ASSETS.iter().fold(router, |router, asset| router.route(asset.path, get(file)))
}

/// Whether a path is a file of the page.
pub(crate) fn is_asset(path: &str) -> bool {
    ASSETS.iter().any(|asset| asset.path == path)
}

/// The page for browsers; others learn, as from Ollama, that a server is there.
async fn index(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let accepts = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match ASSETS.first() {
        Some(page) if accepts.contains("text/html") && app.interface().page => serve(page, &headers),
        _ => "Ollama is running".into_response(),
    }
}

async fn file(State(app): State<Arc<App>>, uri: Uri, headers: HeaderMap) -> Result<Response, ApiError> {
    let found = ASSETS.iter().find(|asset| asset.path == uri.path()).filter(|_| app.interface().page);
    let asset = found.ok_or_else(|| ApiError::new(ErrorKind::NotFound, "File Not Found"))?;
    Ok(serve(asset, &headers))
}

fn serve(asset: &Asset, request: &HeaderMap) -> Response {
    let tag = format!("\"{:016x}\"", hash(asset.content));
    let is_known = request.get(header::IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
    let mut response = match is_known {
        true => StatusCode::NOT_MODIFIED.into_response(),
        false => asset.content.into_response(),
    };
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(asset.content_type()));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        headers.insert(header::ETAG, tag);
    }
    response
}

/// FNV-1a: changes when the content does.
fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::collections::BTreeSet;

    use super::ASSETS;

    #[test]
    fn every_file_of_the_page_is_served() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/web");
        let files: BTreeSet<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| format!("/{}", entry.unwrap().file_name().into_string().unwrap()))
            .collect();
        let served: BTreeSet<String> = ASSETS.iter().map(|asset| asset.path.to_owned()).collect();
        assert_eq!(files, served);
        assert_eq!(ASSETS.first().map(|asset| asset.path), Some("/index.html"));
    }
}
