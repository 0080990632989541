//! Listens, and serves connections.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::app::App;
use crate::routes;

/// A server that listens.
pub struct Server {
    app: Arc<App>,
    listener: TcpListener,
}

/// Stops a server.
#[derive(Clone, Debug)]
pub struct StopHandle {
    stop: watch::Sender<bool>,
}

impl StopHandle {
    /// The server takes no more requests, finishes its answers, and ends.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }
}

impl Server {
    /// Listens at an address; port 0 is any free one.
    ///
    /// # Errors
    /// The address cannot be used.
    pub async fn bind(app: App, address: SocketAddr) -> std::io::Result<Server> {
        Ok(Server { app: Arc::new(app), listener: TcpListener::bind(address).await? })
    }

    /// The address at which it listens.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The state that requests share.
    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// What stops a server that is given the receiver.
    pub fn stop_handle() -> (StopHandle, watch::Receiver<bool>) {
        let (stop, stopped) = watch::channel(false);
        (StopHandle { stop }, stopped)
    }

    /// Serves until it is told to stop, and until all answers are finished or the time for that is over.
    pub async fn run(self, mut stopped: watch::Receiver<bool>) {
        let router = routes::router(&self.app);
        let limits = self.app.limits().clone();
        let places = Arc::new(Semaphore::new(limits.connections));
        let mut connections = JoinSet::new();
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { break };
            tokio::select! {
                accepted = self.listener.accept() => {
                    let Ok((stream, _)) = accepted else { continue };
                    let _ = stream.set_nodelay(true);
                    let serving = connection(stream, router.clone(), Arc::clone(&self.app), stopped.clone());
                    connections.spawn(async move {
                        serving.await;
                        drop(place);
                    });
                }
                () = stop_of(&mut stopped) => break,
            }
            while connections.try_join_next().is_some() {}
        }
        self.app.stop();
        let drained = async { while connections.join_next().await.is_some() {} };
        if tokio::time::timeout(limits.drain, drained).await.is_err() {
            tracing::warn!("some answers were not finished in time");
        }
    }
}

/// Waits until the server is told to stop, or until nobody can tell it any more.
async fn stop_of(stopped: &mut watch::Receiver<bool>) {
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

/// Serves the requests of one connection.
async fn connection(
    stream: tokio::net::TcpStream,
    router: Router,
    app: Arc<App>,
    mut stopped: watch::Receiver<bool>,
) {
    let limits = app.limits();
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_time)
        .max_buf_size(limits.header_bytes.max(8192));
    let serving = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut serving = std::pin::pin!(serving);
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = stop_of(&mut stopped) => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection");
    }
}
