//! Errors of the hub: each names the repository or file, and the way out.

use std::io;
use std::path::PathBuf;

/// The result of functions of the hub.
pub type HubResult<T> = Result<T, HubError>;

/// Why a model could not be got from a hub or found in the cache.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum HubError {
    #[error("{text:?} is not the name of a repository ({reason}); it is spelled ORG/REPO or ORG/REPO:QUANT")]
    Name { text: String, reason: &'static str },
    #[error("{variable} is {value:?}: {reason}")]
    Setting { variable: &'static str, value: String, reason: &'static str },
    #[error(
        "{repository} is not in the cache, and the hub is not asked in offline mode (--offline, HF_HUB_OFFLINE)"
    )]
    Offline { repository: String },
    #[error(
        "{repository} is not in the cache, and this build has no networking; build it with the feature `network`"
    )]
    NoNetwork { repository: String },
    #[error(
        "{repository}: access denied (HTTP {status}); the repository is private, gated or misspelled: {advice}"
    )]
    Denied { repository: String, status: u16, advice: &'static str },
    #[error("{what} was not found (HTTP 404); check the spelling of ORG/REPO, and that it is public")]
    NotFound { what: String },
    #[error(
        "{repository} has no revision {revision:?} (HTTP 404); a branch, a tag, a commit or refs/pr/N is spelled \
         {repository}@REVISION, or --revision REVISION"
    )]
    RevisionNotFound { repository: String, revision: String },
    #[error("the hub has no file {file} at this revision (HTTP 404); it may have been removed, try again")]
    FileNotFound { file: String },
    #[error(
        "{url}: too many requests (HTTP 429), also after {attempts} attempts; try again later, or set HF_TOKEN"
    )]
    RateLimited { url: String, attempts: u32 },
    #[error(
        "{url}: the server is busy and asks to wait {seconds} s (HTTP {status}), longer than the {most} s that are waited; \
         try again then, or set HF_TOKEN"
    )]
    Busy { url: String, status: u16, seconds: u64, most: u64 },
    #[error("{url}: HTTP {status}")]
    Status { url: String, status: u16 },
    #[error(
        "{url}: the proxy {proxy} refuses the connection ({reason}); HTTPS_PROXY, HTTP_PROXY and ALL_PROXY name a proxy, NO_PROXY \
         hosts without one"
    )]
    Proxy { url: String, proxy: String, reason: String },
    #[error("{url}: {reason}; a proxy is named by HTTPS_PROXY, another hub by HF_ENDPOINT")]
    Transport { url: String, reason: String },
    #[error("{url} answered with something else than the hub's interface does: {reason}")]
    Answer { url: String, reason: String },
    #[error("{url} redirects to {location:?}, which is refused: {reason}")]
    Redirect { url: String, location: String, reason: &'static str },
    #[error(
        "{repository} has a file named {name:?}, which is refused: it could be written outside of the cache"
    )]
    FileName { repository: String, name: String },
    #[error("{repository} has no GGUF file{}; `quadriga convert` makes one from safetensors", found(files))]
    NoModel { repository: String, files: Vec<String> },
    #[error(
        "{repository} in the cache has no {quant}, only {}; `quadriga pull` asks the hub, unless HF_HUB_OFFLINE is set",
        known.join(", ")
    )]
    QuantNotCached { repository: String, quant: String, known: Vec<String> },
    #[error(
        "no model of {repository} fits in the memory of this machine; the smallest is {smallest}, which -hf {repository}:{smallest} gets all the same"
    )]
    NothingFits { repository: String, smallest: String },
    #[error("{file}: the hub gives no checksum for it")]
    NoChecksum { file: String },
    #[error("{file} has the wrong checksum: {found} instead of {expected}; it was removed, try again")]
    Checksum { file: String, expected: String, found: String },
    #[error("{file} has {found} bytes by its server, but {expected} by the hub")]
    Length { file: String, expected: u64, found: u64 },
    #[error("{file} changed on the server while it was downloaded; try again")]
    Changed { file: String },
    #[error("no model {name} in the cache; `quadriga list` shows those that are there")]
    NotCached { name: String },
    #[error(
        "{name} is in a cache of Hugging Face's libraries ({}), which is not changed; `hf cache rm` removes it there",
        path.display()
    )]
    Shared { name: String, path: PathBuf },
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("no cache folder: neither QUADRIGA_CACHE nor HOME is set")]
    NoCacheFolder,
    #[error("cancelled")]
    Cancelled,
}

fn found(files: &[String]) -> String {
    match files {
        [] => String::new(),
        [first, ..] => format!(" ({first} and others)"),
    }
}

/// An error of the file system.
pub(super) fn io_error(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> HubError {
    let path = path.into();
    move |source| HubError::Io { action, path, source }
}
