//! Where the hub is and where its files are kept: settings, and the environment variables that they come from.

use std::env;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::error::{HubError, HubResult};
use super::proxy::ProxySettings;

/// The hub that is asked where no other is named.
const ENDPOINT: &str = "https://huggingface.co";

/// The variable that names a file with certificates.
pub(super) const CERTIFICATE_FILE: &str = "SSL_CERT_FILE";

/// Settings of a hub.
///
/// | variable | setting |
/// |---|---|
/// | `HF_ENDPOINT` | the hub [default: `https://huggingface.co`] |
/// | `HF_TOKEN` (or the older `HUGGING_FACE_HUB_TOKEN`), or the file `HF_TOKEN_PATH`, or `HF_HOME/token` | the access token |
/// | `HF_HUB_OFFLINE` | 1: use the cache only |
/// | `HF_HUB_CACHE` (or the older `HUGGINGFACE_HUB_CACHE`), or `hub` in `HF_HOME`, or `~/.cache/huggingface/hub` | a cache whose files are used in place |
/// | `QUADRIGA_CACHE` | the cache [default: `~/.cache/quadriga`] |
/// | `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY`, also in lower case | the proxy ([`ProxySettings`]) |
/// | `SSL_CERT_FILE` | certificates to trust in place of the built-in ones |
#[derive(Clone)]
pub struct HubSettings {
    /// The hub's address, without a slash at its end.
    pub endpoint: String,
    /// The access token; sent to the endpoint's host only.
    pub token: Option<String>,
    /// Whether only the cache is used.
    pub offline: bool,
    /// The cache folder.
    pub cache: PathBuf,
    /// Folders in Hugging Face's cache layout, whose files are used in place and never changed.
    pub shared_caches: Vec<PathBuf>,
    /// How many parts of a file are downloaded at once.
    pub connections: usize,
    /// The size of such a part.
    pub part_bytes: u64,
    /// How often a request is tried that makes no progress.
    pub attempts: u32,
    /// The most time without a byte before a connection is given up and the rest asked for again.
    pub stall: Duration,
    /// How waiting between two attempts is done.
    pub pause: fn(Duration),
    /// Certificates to trust, in PEM form, in place of the built-in ones.
    pub certificates: Option<Vec<u8>>,
    /// A file with them, which is read before the hub is asked; `certificates` take precedence.
    pub certificate_file: Option<PathBuf>,
    /// The proxies.
    pub proxy: ProxySettings,
}

impl HubSettings {
    /// The settings for a hub and a cache folder, whatever the environment.
    pub fn new(endpoint: &str, cache: &Path) -> HubSettings {
        HubSettings {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: None,
            offline: false,
            cache: cache.to_owned(),
            shared_caches: Vec::new(),
            connections: 8,
            part_bytes: 64 << 20,
            attempts: 5,
            stall: Duration::from_secs(60),
            pause: std::thread::sleep,
            certificates: None,
            certificate_file: None,
            proxy: ProxySettings::default(),
        }
    }

    /// The settings of the environment; `cache` replaces the cache folder.
    pub fn from_environment(cache: Option<&Path>) -> HubResult<HubSettings> {
        let cache = match cache {
            Some(cache) => cache.to_owned(),
            None => quadriga_llm::default_model::cache_folder().map_err(|_| HubError::NoCacheFolder)?,
        };
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            let reason = "it must begin with https:// or http://";
            return Err(HubError::Setting { variable: "HF_ENDPOINT", value: endpoint, reason });
        }
        let home = path("HF_HOME").or_else(|| {
            let user = path("XDG_CACHE_HOME").or_else(|| path("HOME").map(|home| home.join(".cache")));
            user.map(|folder| folder.join("huggingface"))
        });
        let shared = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let shared = shared.or_else(|| home.as_ref().map(|home| home.join("hub")));
        let token_path = path("HF_TOKEN_PATH").or_else(|| home.map(|home| home.join("token")));
        let saved = || std::fs::read_to_string(token_path?).ok();
        let token = text("HF_TOKEN")
            .or_else(|| text("HUGGING_FACE_HUB_TOKEN"))
            .or_else(saved)
            .map(|token| token.trim().to_owned());
        let token = token.filter(|token| !token.is_empty());
        if token.as_ref().is_some_and(|token| !token.bytes().all(|byte| byte.is_ascii_graphic())) {
            let reason = "a token has printable ASCII characters only";
            return Err(HubError::Setting { variable: "HF_TOKEN", value: "…".to_owned(), reason });
        }
        let offline = text("HF_HUB_OFFLINE").is_some_and(|value| {
            ["1", "on", "yes", "true"].iter().any(|known| value.eq_ignore_ascii_case(known))
        });
        Ok(HubSettings {
            token,
            offline,
            shared_caches: shared.into_iter().collect(),
            certificate_file: path(CERTIFICATE_FILE),
            proxy: ProxySettings::from_environment(),
            ..HubSettings::new(&endpoint, &cache)
        })
    }
}

fn text(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn path(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}
