//! Which requests go through a proxy, by the variables that most programs know.

use std::net::IpAddr;

/// The proxies of requests.
///
/// Addresses of proxies are `http://[USER:PASSWORD@]HOST[:PORT]`, also `https://`. Requests go through a tunnel (`CONNECT`),
/// so that the proxy sees no content of those by https.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ProxySettings {
    /// For addresses that begin with `http://`: `HTTP_PROXY`, else `ALL_PROXY`.
    pub http: Option<String>,
    /// For addresses that begin with `https://`: `HTTPS_PROXY`, else `ALL_PROXY`.
    pub https: Option<String>,
    /// Hosts that are reached without a proxy (`NO_PROXY`), separated by commas: a host and all below it (`example.com`,
    /// `.example.com`, `*.example.com`), perhaps with a port, an address, addresses that begin alike (`10.0.0.0/8`), or `*` for all.
    pub exceptions: String,
}

impl ProxySettings {
    /// The proxies of the environment. Of a variable in both cases, the one in lower case counts, as for most programs.
    pub fn from_environment() -> ProxySettings {
        ProxySettings::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> ProxySettings {
        let find = |name: &str| {
            let either = [name.to_ascii_lowercase(), name.to_owned()];
            let mut found = either.iter().filter_map(|name| variable(name));
            found.find(|value| !value.trim().is_empty()).map(|value| value.trim().to_owned())
        };
        let all = find("ALL_PROXY");
        ProxySettings {
            http: find("HTTP_PROXY").or_else(|| all.clone()),
            https: find("HTTPS_PROXY").or(all),
            exceptions: find("NO_PROXY").unwrap_or_default(),
        }
    }

    /// Whether a host is reached without a proxy.
    pub fn is_exception(&self, host: &str, port: u16) -> bool {
        let host = bare(host).to_ascii_lowercase();
        let entries = self.exceptions.split([',', ' ', '\t']).filter(|entry| !entry.is_empty());
        entries.map(str::to_ascii_lowercase).any(|entry| matches(&entry, &host, port))
    }
}

/// Without the brackets of an IPv6 address, and without the dot of a complete name.
fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']').trim_end_matches('.')
}

fn matches(entry: &str, host: &str, port: u16) -> bool {
    if entry == "*" {
        return true;
    }
    let address: Option<IpAddr> = host.parse().ok();
    if let Some((network, bits)) = entry.split_once('/') {
        let (network, bits) = (bare(network).parse(), bits.parse());
        return matches!((address, network, bits), (Some(address), Ok(network), Ok(bits)) if is_in(address, network, bits));
    }
    // A last colon is that of a port, unless the entry is an address with several.
    let (name, only_port) = match entry.rsplit_once(':') {
        Some((name, digits)) if bare(entry).parse::<IpAddr>().is_err() => (name, digits.parse::<u16>().ok()),
        _ => (entry, None),
    };
    if only_port.is_some_and(|only| only != port) {
        return false;
    }
    let name = bare(name.trim_start_matches('*').trim_start_matches('.'));
    if name.is_empty() || address.is_some() {
        return address.is_some_and(|address| name.parse() == Ok(address));
    }
    host.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Whether an address begins with the same bits as that of a network.
fn is_in(address: IpAddr, network: IpAddr, bits: u32) -> bool {
    match (address, network) {
        (IpAddr::V4(address), IpAddr::V4(network)) => {
            let different = address.to_bits() ^ network.to_bits();
            bits <= 32 && different.checked_shr(32 - bits).unwrap_or(0) == 0
        }
        (IpAddr::V6(address), IpAddr::V6(network)) => {
            let different = address.to_bits() ^ network.to_bits();
            bits <= 128 && different.checked_shr(128 - bits).unwrap_or(0) == 0
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_in_lower_case_and_of_a_scheme_come_first() {
        let of = |variables: &[(&str, &str)]| {
            let found = ProxySettings::from_variables(|name| {
                variables.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned())
            });
            (found.http, found.https, found.exceptions)
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(of(&[]), (None, None, String::new()));
        assert_eq!(of(&[("ALL_PROXY", "a")]), (some("a"), some("a"), String::new()));
        assert_eq!(of(&[("all_proxy", "a"), ("HTTPS_PROXY", "b")]), (some("a"), some("b"), String::new()));
        assert_eq!(of(&[("HTTP_PROXY", "a"), ("http_proxy", "b")]), (some("b"), None, String::new()));
        assert_eq!(of(&[("http_proxy", ""), ("HTTP_PROXY", "a")]), (some("a"), None, String::new()));
        assert_eq!(of(&[("https_proxy", " b "), ("no_proxy", "x, y")]), (None, some("b"), "x, y".to_owned()));
    }

    #[test]
    fn exceptions_are_hosts_and_all_below_them() {
        let is = |entries: &str, host: &str| {
            ProxySettings { exceptions: entries.to_owned(), ..ProxySettings::default() }
                .is_exception(host, 443)
        };
        for (entries, host) in [
            ("huggingface.co", "huggingface.co"),
            ("huggingface.co", "cdn.HuggingFace.co"),
            (".huggingface.co", "cdn.huggingface.co"),
            ("*.huggingface.co", "cdn.huggingface.co"),
            ("a, huggingface.co ,b", "huggingface.co"),
            ("huggingface.co:443", "huggingface.co"),
            ("127.0.0.1", "127.0.0.1"),
            ("10.0.0.0/8", "10.200.3.4"),
            ("0.0.0.0/0", "8.8.8.8"),
            ("::1", "[::1]"),
            ("fd00::/8", "[fd12::1]"),
            ("*", "huggingface.co"),
        ] {
            assert!(is(entries, host), "{entries} {host}");
        }
        for (entries, host) in [
            ("", "huggingface.co"),
            ("face.co", "huggingface.co"),
            ("huggingface.co:80", "huggingface.co"),
            ("127.0.0.1", "127.0.0.11"),
            ("0.0.1", "127.0.0.1"),
            ("10.0.0.0/8", "11.0.0.1"),
            ("10.0.0.0/33", "10.0.0.0"),
            ("10.0.0.0/8", "10.example.com"),
            (".", "huggingface.co"),
        ] {
            assert!(!is(entries, host), "{entries} {host}");
        }
    }
}
