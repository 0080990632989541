//! A connection that two share: whoever reads and writes, and whoever watches its client meanwhile.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::exchange::Exchange;
use super::timed_io::TimedIo;

/// A socket for whoever reads and writes.
pub(crate) struct WatchedIo(Arc<Mutex<TimedIo>>);

/// Watches the client of a [`WatchedIo`].
pub(crate) struct ClientWatch {
    io: Arc<Mutex<TimedIo>>,
    exchange: Arc<Exchange>,
}

/// Divides a socket. `exchange` is what its connection is doing.
pub(crate) fn watched(io: TimedIo, exchange: Arc<Exchange>) -> (WatchedIo, ClientWatch) {
    let io = Arc::new(Mutex::new(io));
    (WatchedIo(Arc::clone(&io)), ClientWatch { io, exchange })
}

impl ClientWatch {
    /// Waits until a client is gone whose answer is being computed, while nobody reads from its socket. It belongs to the task that reads
    /// and writes, and is polled after that.
    pub(crate) async fn gone(self) -> io::Error {
        std::future::poll_fn(|context| lock(&self.io).poll_gone(&self.exchange, context)).await
    }
}

/// Both are of one task: nobody waits.
fn lock(io: &Mutex<TimedIo>) -> MutexGuard<'_, TimedIo> {
    io.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AsyncRead for WatchedIo {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *lock(&self.0)).poll_read(context, buffer)
    }
}

impl AsyncWrite for WatchedIo {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *lock(&self.0)).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *lock(&self.0)).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        lock(&self.0).is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *lock(&self.0)).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *lock(&self.0)).poll_shutdown(context)
    }
}
