//! Signals: SIGTERM and Ctrl-C stop the server when its answers are finished, the second one at once; SIGHUP reads keys again.

use std::sync::Arc;

use quadriga_server::{App, StopHandle};

/// Handles signals for as long as the server runs.
#[cfg(unix)]
pub(super) async fn handle(app: Arc<App>, stop: StopHandle) {
    use tokio::signal::unix::{SignalKind, signal};
    let signals = || {
        let of = |kind| signal(kind);
        std::io::Result::Ok((
            of(SignalKind::terminate())?,
            of(SignalKind::interrupt())?,
            of(SignalKind::hangup())?,
        ))
    };
    let Ok((mut terminate, mut interrupt, mut hangup)) = signals() else {
        tracing::warn!("signals cannot be handled: they end the server at once");
        return std::future::pending().await;
    };
    let mut told = false;
    loop {
        tokio::select! {
            _ = terminate.recv() => told = tell(&stop, told),
            _ = interrupt.recv() => told = tell(&stop, told),
            _ = hangup.recv() => match app.keys().reload() {
                Ok(()) => tracing::info!(keys = app.keys().count(), "keys were read again"),
                Err(error) => tracing::warn!(error, "keys are as before"),
            },
        }
    }
}

/// Handles Ctrl-C for as long as the server runs.
#[cfg(not(unix))]
pub(super) async fn handle(_app: Arc<App>, stop: StopHandle) {
    let mut told = false;
    while tokio::signal::ctrl_c().await.is_ok() {
        told = tell(&stop, told);
    }
    std::future::pending().await
}

fn tell(stop: &StopHandle, told: bool) -> bool {
    match told {
        false => {
            tracing::info!("stopping: answers are finished first");
            stop.stop();
        }
        true => stop.stop_now(),
    }
    true
}
