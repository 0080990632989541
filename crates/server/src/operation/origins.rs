//! Origins of web pages that may use a server.

use axum::http::{HeaderMap, HeaderValue};

/// The origins whose pages may use a server, apart from its own.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Origins {
    /// None.
    #[default]
    None,
    /// All.
    Any,
    /// These, such as `https://example.com`.
    Listed(Vec<String>),
}

impl Origins {
    /// Reads a list separated by commas; `*` stands for all.
    pub fn parse(list: &str) -> Origins {
        let all: Vec<String> = list
            .split(',')
            .map(|origin| origin.trim().trim_end_matches('/').to_owned())
            .filter(|origin| !origin.is_empty())
            .collect();
        match all.as_slice() {
            [] => Origins::None,
            _ if all.iter().any(|origin| origin == "*") => Origins::Any,
            _ => Origins::Listed(all),
        }
    }

    /// Whether pages of a host are among them.
    pub(super) fn has_host(&self, host: &str) -> bool {
        match self {
            Origins::None => false,
            Origins::Any => true,
            Origins::Listed(all) => all.iter().any(|origin| {
                let authority = origin.split_once("://").map_or(origin.as_str(), |(_, authority)| authority);
                host_of(authority).eq_ignore_ascii_case(host)
            }),
        }
    }

    /// The value of `access-control-allow-origin` for an origin.
    pub(crate) fn allowed(&self, origin: &HeaderValue) -> Option<HeaderValue> {
        match self {
            Origins::None => None,
            Origins::Any => Some(HeaderValue::from_static("*")),
            Origins::Listed(all) => {
                let same = |own: &String| own.as_bytes().eq_ignore_ascii_case(origin.as_bytes());
                all.iter().any(same).then(|| origin.clone())
            }
        }
    }
}

/// Whether an origin is a website other than this server. Programs that show pages of their own have origins of other schemes.
pub(crate) fn is_foreign(origin: &HeaderValue, headers: &HeaderMap) -> bool {
    let Ok(origin) = origin.to_str() else { return true };
    let origin = origin.to_ascii_lowercase();
    let Some(authority) = origin.strip_prefix("http://").or(origin.strip_prefix("https://")) else {
        return origin == "null";
    };
    let named = ["host", "x-forwarded-host"].iter().filter_map(|name| headers.get(*name));
    let mut named = named.filter_map(|value| value.to_str().ok());
    // Behind a proxy the port may be another one.
    !named.any(|host| host_of(host).eq_ignore_ascii_case(host_of(authority)))
        && !matches!(host_of(authority), "localhost" | "127.0.0.1" | "[::1]")
}

/// A host without its port.
pub(super) fn host_of(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn foreign_origins_are_told_from_own_ones() {
        let foreign = |origin: &'static str, host: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("host", HeaderValue::from_static(host));
            is_foreign(&HeaderValue::from_static(origin), &headers)
        };
        for (origin, host) in [
            ("http://example.com", "example.com:8080"),
            ("https://Example.com", "example.com"),
            ("http://localhost:5173", "127.0.0.1:8080"),
            ("http://[::1]:8080", "[::1]:8080"),
            ("vscode-webview://1", "127.0.0.1:8080"),
        ] {
            assert!(!foreign(origin, host), "{origin}");
        }
        for (origin, host) in [
            ("https://evil.example", "127.0.0.1:8080"),
            ("null", "x"),
            ("http://127.0.0.1.evil.example", "x"),
        ] {
            assert!(foreign(origin, host), "{origin}");
        }
    }

    #[test]
    fn lists_are_separated_by_commas() {
        assert_eq!(Origins::parse(""), Origins::None);
        assert_eq!(Origins::parse("https://a, *"), Origins::Any);
        assert_eq!(
            Origins::parse("https://a/, http://b:1"),
            Origins::Listed(vec!["https://a".to_owned(), "http://b:1".to_owned()])
        );
    }
}
