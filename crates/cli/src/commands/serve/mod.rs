//! `quadriga serve`: answers requests over HTTP, with the interfaces of OpenAI, Anthropic, Ollama and llama-server.

mod descriptors;
mod loader;
mod logs;
mod memory;
mod signals;
#[cfg_attr(not(feature = "otel"), path = "traces_absent.rs")]
mod traces;

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use quadriga_llm::Pooling;
use quadriga_server::{
    App, Hosts, Interface, Keys, Limits, ListenAddress, ModelPolicy, ModelRegistry, Origins, ReasoningOutput,
    Server, TlsFiles,
};
use quadriga_view::format::plural;

use self::loader::Loader;
use self::logs::{LogFormat, LogLevel};
pub(crate) use self::memory::use_one_arena;
use super::embed;
use crate::answer::AnswerOptions;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::model_options::ModelOptions;
use crate::serving_options::ServingOptions;
use crate::{llama_environment, model_argument, notes, ranks, size, values};

/// Headings of the help text.
const SERVER: &str = "Server options";
const MODELS: &str = "Several models";
const LIMITS: &str = "Limits";

/// Threads that serve connections. The engine has its own.
const CONNECTION_THREADS: usize = 2;

/// Threads that render and tokenize prompts, parse large bodies and load models.
const BLOCKING_THREADS: usize = 16;

/// The time that threads have to end after the server has.
const LAST_THREADS: Duration = Duration::from_secs(5);

/// Arguments of `quadriga serve`.
#[derive(Clone, clap::Args)]
pub(crate) struct ServeArgs {
    /// Model file, or ORG/REPO-GGUF of the hub; the same as -m and -hf
    #[arg(value_name = "MODEL")]
    file: Option<String>,
    /// Address to listen at, or the path of a Unix socket, which has a slash or ends in .sock
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", help_heading = SERVER)]
    host: String,
    /// Port to listen at, 0 for any free one
    #[arg(long, value_name = "N", default_value_t = 8080, help_heading = SERVER)]
    port: u16,
    /// Who may connect to a Unix socket, as the mode of its file
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = octal, help_heading = SERVER)]
    socket_mode: u32,
    /// Keys, one of which requests must have, separated by commas; may be repeated
    #[arg(long, value_name = "KEY", value_delimiter = ',', value_parser = values::not_empty, help_heading = SERVER)]
    api_key: Vec<String>,
    /// File with a key in each line, which tokens-per-minute=N and concurrent=N may follow; read again on SIGHUP
    #[arg(long, value_name = "FILE", help_heading = SERVER)]
    api_key_file: Option<PathBuf>,
    /// Certificate in PEM form for TLS, with those that certify it; read again when it changes
    #[arg(long, alias = "ssl-cert-file", value_name = "FILE", requires = "tls_key", help_heading = SERVER)]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate in PEM form
    #[arg(long, alias = "ssl-key-file", value_name = "FILE", requires = "tls_cert", help_heading = SERVER)]
    tls_key: Option<PathBuf>,
    /// Origins whose web pages may use the server, separated by commas, * for all [default: its own]
    #[arg(long, value_name = "LIST", help_heading = SERVER)]
    cors_origins: Option<String>,
    /// Host names under which a server without keys may be asked on the loopback interface, separated by commas, * for all [default: localhost and addresses]
    #[arg(long, value_name = "LIST", help_heading = SERVER)]
    allowed_hosts: Option<String>,
    /// Name of the model in answers, further names that it answers to, and NAME=MODEL for other models, separated by commas [default: the file's name without .gguf]
    #[arg(long, short = 'a', value_name = "NAMES", value_delimiter = ',', value_parser = values::not_empty, help_heading = SERVER)]
    alias: Vec<String>,
    /// How the vectors of a text's tokens become its embedding: none, mean, cls, last or rank [default: as the file says]
    #[arg(long, value_name = "KIND", value_parser = embed::pooling, help_heading = SERVER)]
    pooling: Option<Pooling>,
    /// Where reasoning is in answers: none (in the content), auto and deepseek (in reasoning_content), deepseek-legacy (in both)
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = reasoning_output, help_heading = SERVER)]
    reasoning_format: ReasoningOutput,
    /// Form of the log on stderr: text or json
    #[arg(long, value_name = "FORMAT", value_enum, default_value = "text", help_heading = SERVER)]
    log_format: LogFormat,
    /// Least important messages to log: off, error, warn, info or debug
    #[arg(long, value_name = "LEVEL", value_enum, default_value = "info", help_heading = SERVER)]
    log_level: LogLevel,
    /// Log the bodies of requests, with the prompts in them
    #[arg(long, help_heading = SERVER)]
    log_prompts: bool,
    /// Collector of OpenTelemetry traces, such as http://127.0.0.1:4318 [default: that of OTEL_EXPORTER_OTLP_ENDPOINT]
    #[arg(long, value_name = "URL", help_heading = SERVER)]
    otlp_endpoint: Option<String>,
    /// Folder of GGUF files, each of which is loaded when a request names it
    #[arg(long, value_name = "FOLDER", help_heading = MODELS)]
    models_dir: Option<PathBuf>,
    /// Most models that are loaded at a time; an idle one makes room for another
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = values::at_least_one, help_heading = MODELS)]
    models_max: usize,
    /// Unload a model after so many seconds without a request, -1 for never
    #[arg(
        long,
        alias = "keep-alive",
        value_name = "N",
        default_value_t = -1,
        allow_negative_numbers = true,
        help_heading = MODELS
    )]
    sleep_idle_seconds: i64,
    /// Most requests that wait; another one is refused with status 429
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = values::at_least_one, help_heading = LIMITS)]
    queue: usize,
    /// Most open connections; others wait to be accepted
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = values::at_least_one, help_heading = LIMITS)]
    max_connections: usize,
    /// Most bytes of a request's body
    #[arg(long, value_name = "BYTES", default_value = "32M", value_parser = size::parse, help_heading = LIMITS)]
    max_body: u64,
    /// Seconds after which a client is dropped that sends or reads nothing
    #[arg(
        long,
        value_name = "N",
        default_value_t = 60,
        value_parser = values::at_least_one,
        help_heading = LIMITS
    )]
    timeout: usize,
    /// Seconds after which a stream without anything to say sends a comment, 0 for never
    #[arg(
        long,
        value_name = "N",
        default_value_t = 15,
        allow_negative_numbers = true,
        help_heading = LIMITS
    )]
    sse_ping_interval: i64,
    /// Seconds that answers have to be finished after SIGTERM
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = values::whole, help_heading = LIMITS)]
    drain_timeout: usize,
    #[command(flatten)]
    foreign: ForeignFlags,
    #[command(flatten)]
    serving: ServingOptions,
    #[command(flatten)]
    answer: AnswerOptions,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
}

/// llama-server's flags for routes, and for what is always so here.
#[derive(Clone, clap::Args)]
struct ForeignFlags {
    /// No effect: metrics are always at /metrics
    #[arg(long, hide = true)]
    metrics: bool,
    /// No effect: /slots is always there
    #[arg(long, hide = true)]
    slots: bool,
    /// No effect: /props is always there
    #[arg(long, hide = true)]
    props: bool,
    /// No effect: requests are always computed together
    #[arg(long, hide = true)]
    cont_batching: bool,
    /// No page at / for browsers
    #[arg(long, alias = "no-ui", help_heading = SERVER)]
    no_webui: bool,
    /// No effect: the page is there unless --no-webui is given
    #[arg(long, alias = "ui", hide = true)]
    webui: bool,
    /// No /slots, which tells what is being computed
    #[arg(long, help_heading = SERVER)]
    no_slots: bool,
    /// What all paths begin with, such as /llm
    #[arg(long, value_name = "PATH", default_value = "", hide_default_value = true, value_parser = Interface::parse_prefix, help_heading = SERVER)]
    api_prefix: String,
    /// No effect: a prompt that begins like an earlier one is always found
    #[arg(long, value_name = "N", hide = true)]
    cache_reuse: Option<usize>,
    /// No effect: prefixes are kept by --cache-ram and --cache-file
    #[arg(long, value_name = "PATH", hide = true)]
    slot_save_path: Option<PathBuf>,
    /// No effect: every model embeds
    #[arg(long, alias = "embeddings", hide = true)]
    embedding: bool,
    /// No effect: every reranker ranks
    #[arg(long, alias = "reranking", hide = true)]
    rerank: bool,
}

impl ForeignFlags {
    /// For each option that was given and has no effect although a user may count on one, the reason.
    fn without_effect(&self) -> impl Iterator<Item = &'static str> {
        let all = [
            (
                self.cache_reuse.is_some_and(|tokens| tokens > 0),
                "--cache-reuse has no effect: prompts that begin alike share a prefix, and text after a change is computed again",
            ),
            (
                self.slot_save_path.is_some(),
                "--slot-save-path has no effect: slots are not saved one by one; --cache-file FILE keeps prefixes",
            ),
        ];
        all.into_iter().filter_map(|(is_given, reason)| is_given.then_some(reason))
    }
}

fn reasoning_output(name: &str) -> Result<ReasoningOutput, String> {
    let known = || format!("must be {}", ReasoningOutput::NAMES.join(", "));
    ReasoningOutput::named(name).ok_or_else(known)
}

/// Of the addresses of a name, the first of IPv4: who asks for 127.0.0.1 finds a server at localhost, whatever comes first.
fn preferred(addresses: impl Iterator<Item = SocketAddr>) -> Option<SocketAddr> {
    addresses.min_by_key(SocketAddr::is_ipv6)
}

fn octal(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| "must be an octal number up to 777, such as 660".to_owned())
}

/// Serves until it is told to stop.
pub(crate) fn serve(arguments: &ServeArgs) -> Outcome {
    if arguments.answer.single_turn {
        let reason = "--single-turn is for `quadriga chat`: a server answers each request by itself";
        return Err(Failure::Usage(reason.to_owned()));
    }
    let mut own = arguments.clone();
    if let Some(file) = own.file.take() {
        let texts = [file];
        let (model, rest) = model_argument::split(&own.model, &texts)?;
        if let Some(other) = rest.first() {
            let reason =
                format!("{other} is not a model: name a .gguf file, or a repository by -hf ORG/REPO");
            return Err(Failure::Usage(reason));
        }
        own.model = model;
    }
    // They have an effect here.
    let (verbose, verbosity) =
        (std::mem::take(&mut own.model.llama.verbose), std::mem::take(&mut own.model.llama.verbosity));
    let level = match (verbosity.and_then(LogLevel::of_verbosity), verbose) {
        (Some(level), _) => level,
        (None, true) => LogLevel::Debug,
        (None, false) if arguments.model.quiet => LogLevel::Warn,
        (None, false) => arguments.log_level,
    };
    serve_at(&own, level)
}

fn serve_at(arguments: &ServeArgs, level: LogLevel) -> Outcome {
    if !arguments.model.quiet {
        arguments.foreign.without_effect().for_each(|reason| note!("quadriga: {reason}"));
    }
    descriptors::raise_limit();
    let collector = arguments.otlp_endpoint.as_deref();
    let _traces = logs::install(arguments.log_format, level, arguments.log_prompts, collector)?;
    llama_environment::warn();
    tracing::debug!(host = arguments.host, port = arguments.port, "starting");
    let loader = Loader::new(arguments);
    loader.check_aliases()?;
    if ranks::are_several() && arguments.models_dir.is_some() {
        return Err(Failure::Usage(
            "--models-dir: ranks serve one model; name it with -m, and start a server for each other one"
                .to_owned(),
        ));
    }
    if ranks::follows() {
        return loader.follow();
    }
    let app = Arguments(arguments).app()?;
    let (first, failure) = (loader.first(), loader.failure());
    let app = app(ModelRegistry::loading(loader, Arguments(arguments).policy()));
    app.set_starting(first.is_some());
    let address = Arguments(arguments).address()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(CONNECTION_THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_name("quadriga-http")
        .build();
    let runtime = runtime.map_err(|error| Failure::Message(format!("cannot start threads: {error}")))?;
    // The first Ctrl-C is ours to handle, the second ends the process.
    interrupt::catch_to_the_end();
    let mut served = None;
    let outcome = runtime.block_on(async {
        let secure = app.tls().is_some();
        let server = Server::bind(app, address.clone()).await.map_err(|error| {
            let hint = match error.kind() {
                std::io::ErrorKind::AddrInUse => {
                    "; another port is chosen by --port N, a free one by --port 0"
                }
                _ => "",
            };
            Failure::Message(format!("cannot listen at {address}: {error}{hint}"))
        })?;
        let address = server.address().map_or(address, ListenAddress::Tcp);
        let (app, (stop, stopped)) = (Arc::clone(server.app()), Server::stop_handle());
        tokio::spawn(signals::handle(Arc::clone(&app), stop.clone()));
        let mut running = tokio::spawn(server.run(stopped));
        if let Some(name) = &first {
            let loaded = tokio::select! {
                loaded = app.models().load(name) => loaded,
                // A signal came first.
                _ = &mut running => return Ok(()),
            };
            if let Err(error) = loaded {
                let failure = failure.lock().unwrap_or_else(PoisonError::into_inner).take();
                return Err(failure.unwrap_or(Failure::Message(error.message)));
            }
            app.set_starting(false);
        }
        if !arguments.model.quiet {
            let name = first.unwrap_or_else(|| Arguments(arguments).folder_text(&app));
            let url = match &address {
                ListenAddress::Tcp(address) if secure => format!("https://{address}"),
                ListenAddress::Tcp(address) => format!("http://{address}"),
                unix => unix.to_string(),
            };
            note!("quadriga: {name} is served at {url} (Ctrl-C ends it)");
        }
        let lost = tokio::select! {
            _ = &mut running => None,
            lost = loss() => Some(lost),
        };
        if let Some(reason) = lost {
            tracing::error!(reason, "a rank is lost: the server stops");
            // Answers that are waited for fail with status 503, and so does what still comes.
            stop.stop();
            let _ = running.await;
            return Err(Failure::Lost(reason));
        }
        drop(stop);
        served = Some(app);
        Ok(())
    });
    runtime.shutdown_timeout(LAST_THREADS);
    // Its models write prefixes to the cache file, however long that takes.
    drop(served);
    outcome
}

/// How often it is looked whether a rank is lost.
const LOOK: Duration = Duration::from_millis(100);

/// Waits until ranks can no longer exchange data; for ever where there is one.
async fn loss() -> String {
    if !ranks::are_several() {
        return std::future::pending().await;
    }
    loop {
        if let Some(reason) = ranks::lost() {
            return reason;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// What the arguments mean.
struct Arguments<'a>(&'a ServeArgs);

impl Arguments<'_> {
    /// The state of the server, once there are models.
    fn app(&self) -> Outcome<impl FnOnce(ModelRegistry) -> App + use<>> {
        let arguments = self.0;
        let keys = Keys::new(arguments.api_key.clone(), arguments.api_key_file.clone());
        let keys = keys.map_err(Failure::Usage)?;
        if let Some(folder) = &arguments.models_dir {
            loader::check_folder(folder)?;
        }
        if let ListenAddress::Tcp(address) = self.address()?
            && !address.ip().is_loopback()
            && keys.count() == 0
        {
            notes::warning(&format!(
                "everybody who reaches {} can use this server; --api-key KEY or --api-key-file FILE asks for a key",
                address.ip()
            ));
        }
        let tls = match (&arguments.tls_cert, &arguments.tls_key) {
            (Some(certificate), Some(key)) => {
                let named = |reason| Failure::Usage(format!("--tls-cert, --tls-key: {reason}"));
                Some(TlsFiles::open(certificate.clone(), key.clone()).map_err(named)?)
            }
            _ => None,
        };
        let origins = arguments.cors_origins.as_deref().map(Origins::parse).unwrap_or_default();
        let hosts = arguments.allowed_hosts.as_deref().map(Hosts::parse).unwrap_or_default();
        let (limits, foreign) = (self.limits(), &arguments.foreign);
        let interface = Interface {
            prefix: foreign.api_prefix.clone(),
            page: !foreign.no_webui,
            slots: !foreign.no_slots,
        };
        Ok(move |models| {
            let app = App::new(models, keys, limits).with_origins(origins).with_hosts(hosts);
            let app = app.with_interface(interface);
            let app = app.with_memory_release(Box::new(memory::release));
            match tls {
                Some(tls) => app.with_tls(tls),
                None => app,
            }
        })
    }

    fn limits(&self) -> Limits {
        let arguments = self.0;
        let time = Duration::from_secs(arguments.timeout as u64);
        let defaults = Limits::default();
        let body_bytes = usize::try_from(arguments.max_body).unwrap_or(usize::MAX);
        Limits {
            body_bytes,
            // One body takes a quarter of it at most, with its values.
            body_memory: defaults.body_memory.max(body_bytes.saturating_mul(8)),
            body_time: time,
            header_time: time,
            write_time: time,
            connections: arguments.max_connections,
            drain: Duration::from_secs(arguments.drain_timeout as u64),
            ping: match u32::try_from(arguments.sse_ping_interval) {
                Ok(seconds @ 1..) => Duration::from_secs(seconds.into()),
                // Longer than any connection lives.
                Ok(0) | Err(_) => Duration::from_secs(u32::MAX.into()),
            },
            ..defaults
        }
    }

    fn policy(&self) -> ModelPolicy {
        let seconds = u64::try_from(self.0.sleep_idle_seconds).ok();
        let stays = ranks::are_several()
            .then_some("ranks follow the engine that they started with; end the server to free their memory");
        ModelPolicy { most: self.0.models_max, keep_alive: seconds.map(Duration::from_secs), stays }
    }

    /// The folder of models, with the names of the first of them.
    fn folder_text(&self, app: &App) -> String {
        const SHOWN: usize = 8;
        let names: Vec<String> = app.models().list().into_iter().map(|listed| listed.name).collect();
        let folder = self.0.models_dir.as_deref().unwrap_or(std::path::Path::new("")).display();
        if names.is_empty() {
            notes::warning(&format!(
                "--models-dir {folder} has no GGUF file; files that are added are found"
            ));
        }
        let shown: Vec<&str> = names.iter().take(SHOWN).map(String::as_str).collect();
        let more = if names.len() > SHOWN { ", …" } else { "" };
        format!("{folder} with {} ({}{more})", plural(names.len(), "model", "models"), shown.join(", "))
    }

    /// The address of a host's name or number, or a Unix socket.
    fn address(&self) -> Outcome<ListenAddress> {
        let (host, port) = (self.0.host.as_str(), self.0.port);
        if host.ends_with(".sock") || host.contains('/') {
            return Ok(ListenAddress::Unix { path: host.into(), mode: self.0.socket_mode });
        }
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(SocketAddr::new(ip, port).into());
        }
        let found = (host, port).to_socket_addrs();
        let found = found.map_err(|error| Failure::Usage(format!("--host {host:?}: {error}")))?;
        preferred(found)
            .map(Into::into)
            .ok_or_else(|| Failure::Usage(format!("--host {host:?} has no address")))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_for_its_first_address_of_ipv4() {
        let address = |text: &str| -> SocketAddr { text.parse().unwrap() };
        let all = ["[::1]:80", "127.0.0.1:80", "127.0.0.2:80"].map(address);
        assert_eq!(preferred(all.into_iter()), Some(all[1]));
        assert_eq!(preferred([all[0]].into_iter()), Some(all[0]));
        assert_eq!(preferred([].into_iter()), None);
    }
}
