//! Requests to the hub: redirects, the token, retries, and what each status means.

use std::borrow::Cow;
use std::io::Read;
use std::time::{Duration, SystemTime};

use ureq::http::{HeaderMap, Uri};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Proxy, ProxyProtocol};

use super::error::{HubError, HubResult};
use super::settings::{CERTIFICATE_FILE, HubSettings};

/// The most redirects of one request.
const MAX_REDIRECTS: usize = 8;
/// The longest wait that a server can ask for; one that asks for more is asked again by the user.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// The time to establish a connection.
const CONNECT: Duration = Duration::from_secs(20);
/// The longest answer that is read into memory.
const MAX_ANSWER: u64 = 64 << 20;

/// A client of the hub.
pub(super) struct Http {
    direct: ureq::Agent,
    /// Through the proxies for http and for https.
    proxied: [Option<ProxyAgent>; 2],
    settings: HubSettings,
}

/// An agent whose connections are those of a proxy.
struct ProxyAgent {
    agent: ureq::Agent,
    /// Host and port, for messages: the address may have a password.
    name: String,
}

/// The head of an answer, and its body to read.
pub(super) struct HttpAnswer {
    /// The address that answered, after redirects.
    pub(super) url: String,
    pub(super) status: u16,
    headers: HeaderMap,
    pub(super) body: Box<dyn Read + Send>,
}

impl HttpAnswer {
    /// A header as text.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// First byte, last byte and total of `Content-Range: bytes FIRST-LAST/TOTAL`.
    pub(super) fn content_range(&self) -> Option<(u64, u64, u64)> {
        let range = self.header("content-range")?.strip_prefix("bytes ")?;
        let (range, total) = range.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        Some((first.trim().parse().ok()?, last.trim().parse().ok()?, total.trim().parse().ok()?))
    }
}

/// Why one attempt failed.
pub(super) enum AttemptError {
    /// Another attempt may succeed, after a wait that the server may have asked for.
    Retry { error: HubError, wait: Option<Duration> },
    /// No attempt can.
    Final(HubError),
}

impl From<HubError> for AttemptError {
    fn from(error: HubError) -> AttemptError {
        AttemptError::Final(error)
    }
}

/// The certificates to trust in place of the built-in ones. A file that cannot be read is an error: without it, others would be
/// trusted than the user wants.
fn certificates(settings: &HubSettings) -> HubResult<Option<Cow<'_, [u8]>>> {
    match (&settings.certificates, &settings.certificate_file) {
        (Some(pem), _) => Ok(Some(Cow::Borrowed(pem))),
        (None, Some(path)) if !settings.offline => match std::fs::read(path) {
            Ok(pem) => Ok(Some(Cow::Owned(pem))),
            Err(_) => Err(HubError::Setting {
                variable: CERTIFICATE_FILE,
                value: path.display().to_string(),
                reason: "the file cannot be read; without the variable, the built-in certificates are used",
            }),
        },
        _ => Ok(None),
    }
}

impl Http {
    /// A client with these settings.
    pub(super) fn new(settings: &HubSettings) -> HubResult<Http> {
        let mut tls = TlsConfig::builder();
        if let Some(pem) = certificates(settings)? {
            let own = parse_pem(&pem).filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            });
            let own: Vec<_> = own.collect();
            if own.is_empty() {
                let file = settings.certificate_file.as_ref();
                let value = file.map_or_else(|| "…".to_owned(), |path| path.display().to_string());
                let reason = "the file has no certificate in PEM form";
                return Err(HubError::Setting { variable: CERTIFICATE_FILE, value, reason });
            }
            tls = tls.root_certs(RootCerts::new_with_certs(&own));
        }
        let tls = tls.build();
        let agent = |proxy: Option<Proxy>| Http::agent(settings, &tls, proxy);
        let proxied = |variable: &'static str, address: &Option<String>| -> HubResult<Option<ProxyAgent>> {
            let Some(proxy) = address.as_ref().map(|address| parse_proxy(variable, address)).transpose()?
            else {
                return Ok(None);
            };
            let name = format!("{}:{}", proxy.host(), proxy.port());
            Ok(Some(ProxyAgent { agent: agent(Some(proxy)), name }))
        };
        let proxied = [
            proxied("HTTP_PROXY (or ALL_PROXY)", &settings.proxy.http)?,
            proxied("HTTPS_PROXY (or ALL_PROXY)", &settings.proxy.https)?,
        ];
        Ok(Http { direct: agent(None), proxied, settings: settings.clone() })
    }

    fn agent(settings: &HubSettings, tls: &TlsConfig, proxy: Option<Proxy>) -> ureq::Agent {
        ureq::Agent::config_builder()
            .tls_config(tls.clone())
            .proxy(proxy)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT))
            .timeout_recv_response(Some(settings.stall))
            .timeout_per_read(Some(settings.stall))
            .max_idle_connections_per_host(settings.connections.max(1))
            .user_agent(concat!("quadriga/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent()
    }

    /// The proxy of an address, if there is one.
    fn proxy_of(&self, url: &str) -> Option<&ProxyAgent> {
        let (scheme, host, port) = origin(url)?;
        let [http, https] = &self.proxied;
        let proxy = if scheme == "https" { https.as_ref() } else { http.as_ref() };
        proxy.filter(|_| !self.settings.proxy.is_exception(&host, port))
    }

    /// The body of an answer that fits in memory, such as the list of files. `what` names it in errors.
    pub(super) fn get_small(&self, url: &str, what: &str) -> HubResult<Vec<u8>> {
        self.retrying(|| {
            let answer = self.get(url, None, what)?;
            let mut bytes = Vec::new();
            let read = answer.body.take(MAX_ANSWER + 1).read_to_end(&mut bytes);
            match read {
                Ok(_) if bytes.len() as u64 > MAX_ANSWER => {
                    let reason = format!("more than {MAX_ANSWER} bytes");
                    Err(HubError::Answer { url: url.to_owned(), reason }.into())
                }
                Ok(_) => Ok(bytes),
                Err(error) => Err(cut(url, &error)),
            }
        })
    }

    /// Calls `attempt` until it succeeds, fails for good, or has failed as often as the settings allow.
    pub(super) fn retrying<T>(&self, mut attempt: impl FnMut() -> Result<T, AttemptError>) -> HubResult<T> {
        let mut failures = 0;
        loop {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(AttemptError::Final(error)) => return Err(error),
                Err(AttemptError::Retry { error, wait }) => {
                    failures += 1;
                    self.pause(failures, wait, error)?;
                }
            }
        }
    }

    /// Waits after a failure; the error if there were too many.
    pub(super) fn pause(&self, failures: u32, wait: Option<Duration>, error: HubError) -> HubResult<()> {
        if failures >= self.settings.attempts {
            return Err(error);
        }
        let doubling = Duration::from_millis(500).saturating_mul(1 << failures.min(7));
        (self.settings.pause)(wait.unwrap_or(doubling).min(MAX_WAIT));
        Ok(())
    }

    /// One request, with its redirects. Answers other than 200 and 206 are errors.
    pub(super) fn get(
        &self,
        url: &str,
        range: Option<(u64, u64)>,
        what: &str,
    ) -> Result<HttpAnswer, AttemptError> {
        let mut url = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let proxy = self.proxy_of(&url);
            let mut request = proxy.map_or(&self.direct, |proxy| &proxy.agent).get(&url);
            // Compressed ranges would be ranges of something else.
            request = request.header("accept-encoding", "identity");
            if let Some((first, last)) = range {
                request = request.header("range", format!("bytes={first}-{last}"));
            }
            if let Some(token) = self.settings.token.as_ref().filter(|_| self.is_endpoint(&url)) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let response = request.call().map_err(|error| transport_error(&url, proxy, &error))?;
            let (head, body) = response.into_parts();
            let status = head.status.as_u16();
            if (300..400).contains(&status) && status != 304 {
                let location = head.headers.get("location").and_then(|value| value.to_str().ok());
                url = redirected(&url, location.unwrap_or_default())?;
                continue;
            }
            let answer =
                HttpAnswer { url, status, headers: head.headers, body: Box::new(body.into_reader()) };
            return match status {
                200 | 206 => Ok(answer),
                _ => Err(self.failed(&answer, what)),
            };
        }
        let (location, reason) = (plain(&url), "there are too many redirects");
        Err(HubError::Redirect { url: plain(&url), location, reason }.into())
    }

    /// Whether an address is on the endpoint's host, which alone gets the token.
    fn is_endpoint(&self, url: &str) -> bool {
        origin(url).is_some_and(|own| Some(own) == origin(&self.settings.endpoint))
    }

    /// What an error status means.
    fn failed(&self, answer: &HttpAnswer, what: &str) -> AttemptError {
        let url = plain(&answer.url);
        let has_token = self.settings.token.is_some();
        match answer.status {
            status @ (401 | 403) => {
                let advice = match has_token {
                    true => {
                        "the token of HF_TOKEN has no access; accept the model's conditions on its page, or use another token"
                    }
                    false => "set HF_TOKEN to an access token, and accept the model's conditions on its page",
                };
                HubError::Denied { repository: what.to_owned(), status, advice }.into()
            }
            404 | 410 => not_found(answer.header("x-error-code").unwrap_or_default(), &url, what).into(),
            status if retry_after(answer).is_some_and(|wait| wait > MAX_WAIT) => {
                let seconds = retry_after(answer).unwrap_or_default().as_secs();
                HubError::Busy { url, status, seconds, most: MAX_WAIT.as_secs() }.into()
            }
            429 => AttemptError::Retry {
                error: HubError::RateLimited { url, attempts: self.settings.attempts },
                wait: retry_after(answer),
            },
            status @ (408 | 500..=599) => {
                AttemptError::Retry { error: HubError::Status { url, status }, wait: retry_after(answer) }
            }
            status => HubError::Status { url, status }.into(),
        }
    }
}

/// What is missing, by the hub's code for it.
fn not_found(code: &str, url: &str, what: &str) -> HubError {
    let what = what.to_owned();
    match (code, url.split_once("/revision/")) {
        ("RevisionNotFound", Some((_, revision))) => {
            HubError::RevisionNotFound { repository: what, revision: revision.replace("%2F", "/") }
        }
        ("EntryNotFound", _) => HubError::FileNotFound { file: what },
        _ => HubError::NotFound { what },
    }
}

/// Why there is no answer. What a proxy refuses once it refuses again, so that it is not asked for a second time.
fn transport_error(url: &str, proxy: Option<&ProxyAgent>, error: &ureq::Error) -> AttemptError {
    let (url, reason) = (plain(url), error.to_string());
    let Some(proxy) = proxy else {
        return AttemptError::Retry { error: HubError::Transport { url, reason }, wait: None };
    };
    match error {
        ureq::Error::ConnectProxyFailed(reason) => {
            HubError::Proxy { url, proxy: proxy.name.clone(), reason: reason.clone() }.into()
        }
        _ => {
            let reason = format!("{reason} (through the proxy {})", proxy.name);
            AttemptError::Retry { error: HubError::Transport { url, reason }, wait: None }
        }
    }
}

/// The proxy of an address, which is not shown where it is wrong: it may have a password.
fn parse_proxy(variable: &'static str, address: &str) -> HubResult<Proxy> {
    let wrong = |reason| HubError::Setting { variable, value: "…".to_owned(), reason };
    let proxy =
        Proxy::new(address).map_err(|_| wrong("it is not the address of a proxy, http://HOST:PORT"))?;
    match proxy.protocol() {
        ProxyProtocol::Http | ProxyProtocol::Https => Ok(proxy),
        _ => Err(wrong("proxies of SOCKS are not supported; use one of http or https")),
    }
}

/// The body of an answer ended too early.
pub(super) fn cut(url: &str, error: &std::io::Error) -> AttemptError {
    let reason = format!("the connection was cut: {error}");
    AttemptError::Retry { error: HubError::Transport { url: plain(url), reason }, wait: None }
}

/// The wait that a server asks for, in seconds or until a date.
fn retry_after(answer: &HttpAnswer) -> Option<Duration> {
    let text = answer.header("retry-after")?.trim();
    match text.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => {
            let until = http_date(text)?;
            Some(until.duration_since(SystemTime::now()).unwrap_or_default())
        }
    }
}

/// A date such as `Sun, 06 Nov 1994 08:49:37 GMT`.
fn http_date(text: &str) -> Option<SystemTime> {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    let [_, day, month, year, time, "GMT"] = words.as_slice() else { return None };
    let month = MONTHS.iter().position(|name| name == month)? as u64 + 1;
    let (day, year): (u64, u64) = (day.parse().ok()?, year.parse().ok()?);
    let mut clock = time.split(':').map(|part| part.parse::<u64>().ok());
    let (hours, minutes, seconds) = (clock.next()??, clock.next()??, clock.next()??);
    if !(1970..10_000).contains(&year)
        || !(1..=31).contains(&day)
        || hours > 23
        || minutes > 59
        || seconds > 60
    {
        return None;
    }
    // Days since 1970 by counting years from March, whose lengths follow a rule.
    let (year, month) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1;
    let days = days.checked_sub(719_468)?;
    Some(SystemTime::UNIX_EPOCH + Duration::from_secs(days * 86_400 + hours * 3600 + minutes * 60 + seconds))
}

/// Scheme, host and port.
fn origin(url: &str) -> Option<(String, String, u16)> {
    let uri: Uri = url.parse().ok()?;
    let scheme = uri.scheme_str()?.to_owned();
    let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    Some((scheme, uri.host()?.to_ascii_lowercase(), port))
}

/// The address that a redirect leads to.
fn redirected(url: &str, location: &str) -> HubResult<String> {
    let refused = |reason| HubError::Redirect { url: plain(url), location: plain(location), reason };
    let (from, to) = match location {
        "" => return Err(refused("it names no address")),
        _ if location.starts_with("//") => {
            (url, format!("{}:{location}", url.split(':').next().unwrap_or("https")))
        }
        _ if location.starts_with('/') => {
            let end = url.find("://").and_then(|at| url.get(at + 3..)?.find('/').map(|slash| at + 3 + slash));
            (url, format!("{}{location}", url.get(..end.unwrap_or(url.len())).unwrap_or(url)))
        }
        _ => (url, location.to_owned()),
    };
    match (origin(from), origin(&to)) {
        (_, None) => Err(refused("it is not an address")),
        (Some((from, ..)), Some((to, ..))) if from == "https" && to != "https" => {
            Err(refused("it leads from https to http"))
        }
        (_, Some((scheme, ..))) if scheme != "https" && scheme != "http" => {
            Err(refused("it is neither https nor http"))
        }
        _ => Ok(to),
    }
}

/// An address without its query, which may hold a signature.
pub(super) fn plain(url: &str) -> String {
    url.split('?').next().unwrap_or(url).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_stay_on_https_and_relative_ones_on_their_host() {
        let to = |url: &str, location: &str| redirected(url, location).ok();
        assert_eq!(to("https://a/x/y", "/z?k=1").as_deref(), Some("https://a/z?k=1"));
        assert_eq!(to("https://a/x", "https://b/y").as_deref(), Some("https://b/y"));
        assert_eq!(to("https://a", "/y").as_deref(), Some("https://a/y"));
        for location in ["http://b/y", "", "ftp://b/y", "file:///etc/passwd"] {
            assert_eq!(to("https://a/x", location), None, "{location}");
        }
    }

    #[test]
    fn dates_are_read() {
        let seconds =
            |text| http_date(text).map(|time| time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs());
        assert_eq!(seconds("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777));
        assert_eq!(seconds("Thu, 29 Feb 2024 00:00:00 GMT"), Some(1_709_164_800));
        for wrong in
            ["now", "Sun, 06 Nov 2094 08:49:9999999999999999999 GMT", "Sun, 06 Nov 2094 08:49:61 GMT"]
        {
            assert_eq!(seconds(wrong), None, "{wrong}");
        }
    }
}
