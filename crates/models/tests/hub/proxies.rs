//! Proxies: which requests go through one, and what users learn of one that refuses.

use quadriga_models::hub::{Hub, HubError, HubSettings, ProxySettings};

use super::fake_hub::FakeHub;
use super::fake_proxy::FakeProxy;
use super::{MODEL, bytes, open, pull, settings};

fn through(proxy: &FakeProxy) -> ProxySettings {
    ProxySettings { http: Some(format!("http://{}", proxy.address)), ..ProxySettings::default() }
}

#[test]
fn a_repository_is_pulled_through_a_proxy() {
    let (model, folder) = (bytes(3_000), tempfile::tempdir().unwrap());
    let (fake, proxy) = (FakeHub::new(&[(MODEL, "m.gguf", &model)]), FakeProxy::new(200));
    let with = |proxy: ProxySettings, cache: &str| {
        let own = HubSettings { proxy, ..settings(&fake, &folder.path().join(cache)) };
        let paths = pull(&open(own), MODEL).unwrap();
        assert_eq!(std::fs::read(&paths[0]).unwrap(), model);
    };
    with(through(&proxy), "proxied");
    let targets: Vec<String> = proxy.tunnels().into_iter().map(|tunnel| tunnel.target).collect();
    let hub = fake.endpoint.trim_start_matches("http://");
    // The storage has another port.
    assert!(
        targets.iter().any(|target| target == hub) && targets.iter().any(|target| target != hub),
        "{targets:?}"
    );
    // Without a scheme in its address.
    with(ProxySettings { http: Some(proxy.address.clone()), ..ProxySettings::default() }, "plain");
    assert!(!proxy.tunnels().is_empty());
    for (name, direct) in [
        ("exception", ProxySettings { exceptions: "localhost, 127.0.0.1".to_owned(), ..through(&proxy) }),
        ("network", ProxySettings { exceptions: "127.0.0.0/8".to_owned(), ..through(&proxy) }),
        ("all", ProxySettings { exceptions: "*".to_owned(), ..through(&proxy) }),
        ("scheme", ProxySettings { https: through(&proxy).http, ..ProxySettings::default() }),
    ] {
        with(direct, name);
        assert!(proxy.tunnels().is_empty(), "{name}");
    }
    // Another port of the same host is not an exception.
    with(ProxySettings { exceptions: "127.0.0.1:1".to_owned(), ..through(&proxy) }, "port");
    assert!(!proxy.tunnels().is_empty());
}

#[test]
fn what_a_proxy_refuses_is_not_asked_again() {
    let folder = tempfile::tempdir().unwrap();
    let (fake, proxy) = (FakeHub::new(&[(MODEL, "m.gguf", &bytes(100))]), FakeProxy::new(407));
    let address = Some(format!("http://user:secret@{}", proxy.address));
    let own = HubSettings {
        pause: |_| panic!("waited"),
        proxy: ProxySettings { http: address.clone(), https: address, exceptions: String::new() },
        ..settings(&fake, folder.path())
    };
    let error = pull(&open(own.clone()), MODEL).unwrap_err();
    assert!(matches!(&error, HubError::Proxy { proxy: name, .. } if *name == proxy.address), "{error}");
    let text = error.to_string();
    assert!(["407", "HTTPS_PROXY", "NO_PROXY"].iter().all(|part| text.contains(part)), "{text}");
    assert!(!text.contains("secret"), "{text}");
    let tunnels = proxy.tunnels();
    assert_eq!(tunnels.len(), 1);
    assert!(tunnels[0].headers["proxy-authorization"].starts_with("Basic "), "{tunnels:?}");
    // The proxy finds the host of an address by https.
    let https = HubSettings { endpoint: "https://hub.invalid".to_owned(), ..own };
    assert!(matches!(pull(&open(https), MODEL), Err(HubError::Proxy { .. })));
    assert_eq!(proxy.tunnels()[0].target, "hub.invalid:443");
    assert!(fake.requests().is_empty());
}

#[test]
fn a_proxy_that_is_not_there_or_not_known_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeHub::new(&[(MODEL, "m.gguf", &bytes(100))]);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let with = |http: &str| HubSettings {
        attempts: 1,
        proxy: ProxySettings { http: Some(http.to_owned()), ..ProxySettings::default() },
        ..settings(&fake, folder.path())
    };
    let error = pull(&open(with(&format!("http://{address}"))), MODEL).unwrap_err();
    assert!(matches!(error, HubError::Transport { .. }) && error.to_string().contains(&address), "{error}");
    for (wrong, reason) in
        [("socks5://127.0.0.1:1", "SOCKS"), ("gopher://x", "http://HOST:PORT"), ("http://", "http://HOST")]
    {
        let error = Hub::new(with(wrong)).err().unwrap();
        assert!(matches!(error, HubError::Setting { .. }) && error.to_string().contains(reason), "{error}");
        assert!(error.to_string().contains("HTTP_PROXY"), "{error}");
    }
}
