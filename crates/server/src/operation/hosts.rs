//! Names under which a server may be asked: a page of another site can have its own name resolved to this machine.

use std::net::IpAddr;

use axum::http::{Request, Version, header};

use super::origins::{Origins, host_of};
use crate::error::{ApiError, ErrorKind};

/// Names, apart from `localhost` and addresses, under which a server may be asked.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Hosts {
    names: Vec<String>,
}

impl Hosts {
    /// Reads a list separated by commas; `*` stands for all.
    pub fn parse(list: &str) -> Hosts {
        let names = list.split(',').map(|name| name.trim().to_ascii_lowercase());
        Hosts { names: names.filter(|name| !name.is_empty()).collect() }
    }

    /// Whether a server without keys that only this machine reaches may be asked under this name.
    fn allows(&self, authority: &str, origins: &Origins) -> bool {
        let host = host_of(authority).trim_end_matches('.').to_ascii_lowercase();
        let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&host);
        let is_own = host == "localhost" || host.ends_with(".localhost") || address.parse::<IpAddr>().is_ok();
        is_own
            || self.names.iter().any(|name| name == "*" || host_of(name) == host)
            || origins.has_host(&host)
    }
}

/// Refuses a request without the name that HTTP/1.1 demands, and one with a name that is not this server's if `local`: if nothing but
/// the loopback interface protects it.
pub(crate) fn check<B>(
    request: &Request<B>,
    local: bool,
    hosts: &Hosts,
    origins: &Origins,
) -> Result<(), ApiError> {
    let mut named = request.headers().get_all(header::HOST).iter();
    let (first, is_repeated) = (named.next(), named.next().is_some());
    if is_repeated || (first.is_none() && request.version() == Version::HTTP_11) {
        return Err(ApiError::invalid("a request of HTTP/1.1 must have one Host header"));
    }
    let header = first.map(|value| String::from_utf8_lossy(value.as_bytes()));
    // The address of the request counts, if it names a host.
    let authority = request.uri().authority().map(|authority| authority.as_str().into());
    let Some(host) = authority.or(header).filter(|_| local) else { return Ok(()) };
    if hosts.allows(&host, origins) {
        return Ok(());
    }
    let message = format!(
        "this server may not be asked as {host:?}; use localhost or its address, or start it with --allowed-hosts {}",
        host_of(&host)
    );
    Err(ApiError::new(ErrorKind::Forbidden, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_names_are_allowed() {
        let origins = Origins::parse("https://page.example:8443");
        let hosts = Hosts::parse("own.example, Second.example:80");
        for name in [
            "localhost",
            "LOCALHOST:8080",
            "a.localhost",
            "127.0.0.1:8080",
            "[::1]:8080",
            "192.168.0.1",
            "own.example:1",
            "second.example",
            "page.example",
        ] {
            assert!(hosts.allows(name, &origins), "{name}");
        }
        for name in ["evil.example", "127.0.0.1.evil.example:8080", "localhost.evil.example", "", "x"] {
            assert!(!hosts.allows(name, &origins), "{name}");
        }
        assert!(Hosts::parse("*").allows("evil.example", &Origins::None));
        assert!(Hosts::default().allows("evil.example", &Origins::Any));
    }
}
