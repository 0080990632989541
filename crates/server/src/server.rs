//! Listens, and serves connections.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::app::App;
use crate::memory_keeper::MemoryKeeper;
use crate::operation::awaited_body::AwaitedBody;
use crate::operation::client_watch::watched;
use crate::operation::exchange::Exchange;
use crate::operation::listener::{ListenAddress, Listener};
use crate::operation::timed_io::TimedIo;
use crate::routes;

/// The time that a connection without a request has to send one, once the server is told to stop.
const LAST_REQUEST: Duration = Duration::from_secs(1);

/// How often connections that have ended are forgotten when no other one comes: until then their tasks have their memory.
const REAP: Duration = Duration::from_secs(1);

/// The time that answers that were cut have to say so.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The time after which connections are accepted again if that failed, for want of descriptors for example.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A server that listens.
pub struct Server {
    app: Arc<App>,
    listener: Listener,
}

/// How urgently a server is to stop.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
enum Stop {
    #[default]
    No,
    /// When its answers are finished.
    Drain,
    /// At once.
    Now,
}

/// Stops a server.
#[derive(Clone, Debug)]
pub struct StopHandle {
    stop: watch::Sender<Stop>,
}

/// Tells a server when to stop.
#[derive(Clone, Debug)]
pub struct StopSignal(watch::Receiver<Stop>);

impl StopHandle {
    /// The server is not ready any more, takes no more requests, finishes its answers, and ends.
    pub fn stop(&self) {
        self.stop.send_if_modified(|stop| {
            let modified = *stop < Stop::Drain;
            *stop = (*stop).max(Stop::Drain);
            modified
        });
    }

    /// The server ends at once; answers are cut.
    pub fn stop_now(&self) {
        self.stop.send_replace(Stop::Now);
    }
}

impl StopSignal {
    /// Waits until the server is told to stop so urgently. If nobody can tell it any more, it stops when its answers are finished.
    async fn wait(&mut self, urgency: Stop) {
        if self.0.wait_for(|stop| *stop >= urgency).await.is_err() && urgency > Stop::Drain {
            std::future::pending::<()>().await;
        }
    }
}

impl Server {
    /// Listens at an address.
    ///
    /// # Errors
    /// The address cannot be used.
    pub async fn bind(app: App, address: impl Into<ListenAddress>) -> io::Result<Server> {
        let listener = Listener::bind(&address.into()).await?;
        app.set_local(listener.local_addr().is_ok_and(|address| address.ip().is_loopback()));
        Ok(Server { app: Arc::new(app), listener })
    }

    /// The address and port at which it listens.
    ///
    /// # Errors
    /// It listens at a Unix socket.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The state that requests share.
    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// What stops a server that is given the signal.
    pub fn stop_handle() -> (StopHandle, StopSignal) {
        let (stop, stopped) = watch::channel(Stop::No);
        (StopHandle { stop }, StopSignal(stopped))
    }

    /// Serves until it is told to stop, and until all answers are finished or the time for that is over. Meanwhile it answers that
    /// it is not ready.
    pub async fn run(self, mut stopped: StopSignal) {
        let limits = self.app.limits().clone();
        let acceptor = Acceptor {
            router: routes::router(&self.app),
            places: Arc::new(Semaphore::new(limits.connections)),
            app: Arc::clone(&self.app),
            stopped: stopped.clone(),
            failing: AtomicBool::new(false),
        };
        let sweeping = tokio::spawn(sweep(Arc::clone(&self.app)));
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                () = acceptor.accept(&self.listener, &mut connections) => {}
                () = tokio::time::sleep(REAP), if !connections.is_empty() => {}
                () = stopped.wait(Stop::Drain) => break,
            }
            while connections.try_join_next().is_some() {}
        }
        self.app.stop();
        let mut late = JoinSet::new();
        let drain = async {
            loop {
                tokio::select! {
                    () = acceptor.accept(&self.listener, &mut late) => {}
                    ended = connections.join_next() => if ended.is_none() { break },
                }
                while late.try_join_next().is_some() {}
            }
        };
        let mut drain = std::pin::pin!(drain);
        tokio::select! {
            drained = tokio::time::timeout(limits.drain, drain.as_mut()) => if drained.is_err() {
                tracing::warn!(answers = self.app.requests().active(), "not finished in time, and cut");
                // They end with an error that says so, if their clients read it.
                for served in self.app.models().in_use() {
                    if let Ok(service) = served.service() {
                        service.fail_all();
                    }
                }
                let _ = tokio::time::timeout(LAST_WORDS, drain).await;
            },
            () = stopped.wait(Stop::Now) => tracing::warn!("told to stop at once"),
        }
        sweeping.abort();
    }
}

/// Unloads models whose time is over, and gives memory back.
async fn sweep(app: Arc<App>) {
    let mut memory = MemoryKeeper::default();
    loop {
        let next = app.models().sweep();
        memory.look(&app).await;
        tokio::time::sleep(next).await;
    }
}

/// What a connection needs.
struct Acceptor {
    router: Router,
    places: Arc<Semaphore>,
    app: Arc<App>,
    stopped: StopSignal,
    /// Whether the last connection was not accepted, which is in the log then.
    failing: AtomicBool,
}

impl Acceptor {
    /// Accepts a connection, and serves it in a task of its own.
    async fn accept(&self, listener: &Listener, connections: &mut JoinSet<()>) {
        // It is closed by nobody.
        let Ok(place) = Arc::clone(&self.places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((socket, peer)) => {
                self.failing.store(false, Ordering::Relaxed);
                let socket = TimedIo::new(socket, self.app.limits().write_time);
                let (router, app, stopped) =
                    (self.router.clone(), Arc::clone(&self.app), self.stopped.clone());
                let open = OpenConnection::new(&self.app);
                connections.spawn(async move {
                    let _open = (place, open);
                    if let Err(error) = connection(socket, router, app, stopped).await {
                        tracing::debug!(error, peer = peer.map(tracing::field::display), "connection");
                    }
                });
            }
            Err(error) => {
                if !self.failing.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "connections are not accepted");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Counts a connection while it is open.
struct OpenConnection(Arc<App>);

impl OpenConnection {
    fn new(app: &Arc<App>) -> OpenConnection {
        app.requests().connect();
        OpenConnection(Arc::clone(app))
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.requests().disconnect();
    }
}

/// Serves the requests of one connection, encrypted or not.
async fn connection(
    socket: TimedIo,
    router: Router,
    app: Arc<App>,
    stopped: StopSignal,
) -> Result<(), String> {
    let exchange = Arc::new(Exchange::default());
    let tls = app.tls();
    let socket = match tls {
        None => socket.with_exchange(Arc::clone(&exchange)),
        Some(_) => socket,
    };
    let (socket, watch) = watched(socket, Arc::clone(&exchange));
    let serving = async {
        let Some(tls) = tls else { return serve(socket, exchange, router, &app, stopped).await };
        let accepting = tokio_rustls::TlsAcceptor::from(tls.config()).accept(socket);
        let time = app.limits().header_time;
        let accepted = tokio::time::timeout(time, accepting).await.map_err(|_| "no TLS handshake in time")?;
        serve(accepted.map_err(|error| error.to_string())?, exchange, router, &app, stopped).await
    };
    tokio::select! {
        biased;
        ended = serving => ended,
        // Behind bytes that follow a request, its end is not read before the answer is complete.
        error = watch.gone() => Err(error.to_string()),
    }
}

async fn serve(
    socket: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    exchange: Arc<Exchange>,
    router: Router,
    app: &App,
    mut stopped: StopSignal,
) -> Result<(), String> {
    let limits = app.limits();
    let service =
        ConnectionService { routes: TowerToHyperService::new(router), exchange: Arc::clone(&exchange) };
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_time)
        .max_buf_size(limits.header_bytes.max(8192));
    let serving = builder.serve_connection(TokioIo::new(socket), service);
    let mut serving = std::pin::pin!(serving);
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = stopped.wait(Stop::Drain) => {
            let has_begun = || exchange.has_begun();
            // A request may be on its way: it is told that the server stops.
            let first = async {
                if !has_begun() {
                    tokio::time::sleep(LAST_REQUEST).await;
                }
            };
            tokio::select! {
                ended = serving.as_mut() => ended,
                () = first => match has_begun() {
                    true => {
                        serving.as_mut().graceful_shutdown();
                        serving.await
                    }
                    false => Ok(()),
                },
            }
        }
    };
    ended.map_err(|error| error.to_string())
}

/// The routes, and what the connection is doing.
struct ConnectionService {
    routes: TowerToHyperService<Router>,
    exchange: Arc<Exchange>,
}

type RouteFuture = <TowerToHyperService<Router> as Service<Request<AwaitedBody>>>::Future;

impl Service<Request<Incoming>> for ConnectionService {
    type Response = Response<axum::body::Body>;
    type Error = std::convert::Infallible;
    type Future = RouteFuture;

    fn call(&self, mut request: Request<Incoming>) -> RouteFuture {
        // It goes with the request until its answer is complete.
        let answer = Arc::new(self.exchange.begin(request.version()));
        request.extensions_mut().insert(answer);
        self.routes.call(request.map(|body| AwaitedBody::new(body, Arc::clone(&self.exchange))))
    }
}
