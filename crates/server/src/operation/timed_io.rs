//! A socket on which a write that makes no progress is an error after some time, and whose client may have ended its side.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::exchange::{Exchange, Reply};
use super::socket::{Notice, Socket};

/// An answer before the answer, which clients of HTTP/1.1 skip. The system of one that is gone refuses it, and then the socket has
/// an error: that tells a client that has only ended its side from one that has closed the connection.
const PROBE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// When it is looked at whether a handler waits for the rest of a body that will not come, at first and later on. Systems that
/// do not tell when a connection is lost are asked then.
const FIRST_LOOK: Duration = Duration::from_millis(20);
const LATER_LOOKS: Duration = Duration::from_millis(200);

/// A connection whose client has ended its side.
struct HalfClosed {
    /// Until the connection is lost.
    loss: Option<Notice>,
    is_lost: bool,
    /// Until the next look.
    look: Pin<Box<Sleep>>,
}

/// Whether the client has ended its side, as far as that is known without reading.
enum ReadSide {
    Unwatched,
    /// Until it ends, if the system tells.
    Watched(Option<Notice>),
    Ended,
}

/// A socket whose peer must take some of what is written within a time. A client that stops reading would otherwise keep its
/// answer, and the memory behind it, for ever.
pub(crate) struct TimedIo {
    socket: Box<dyn Socket>,
    time: Duration,
    /// Runs while a write waits.
    waiting: Option<Pin<Box<Sleep>>>,
    /// What the connection is doing, if its client may end its side before it has the answer.
    exchange: Option<Arc<Exchange>>,
    /// Once the client has ended its side.
    half_closed: Option<HalfClosed>,
    /// Whether the end of what the client sent was read.
    at_end: bool,
    /// Whether a read waits since [`TimedIo::poll_gone`] was asked.
    read_waits: bool,
    /// While an answer is computed and nobody reads.
    read_side: ReadSide,
}

impl TimedIo {
    pub(crate) fn new(socket: Box<dyn Socket>, time: Duration) -> TimedIo {
        TimedIo {
            socket,
            time,
            waiting: None,
            exchange: None,
            half_closed: None,
            at_end: false,
            read_waits: false,
            read_side: ReadSide::Unwatched,
        }
    }

    /// The same socket, whose client gets its answers although it has ended its own side.
    pub(crate) fn with_exchange(self, exchange: Arc<Exchange>) -> TimedIo {
        TimedIo { exchange: Some(exchange), ..self }
    }

    /// Whether a client that has ended its side may still be there. Something is sent to it that tells: a probe before an answer,
    /// whatever a stream has to say within it.
    fn may_be_there(&mut self, context: &mut Context<'_>) -> bool {
        let Some(exchange) = self.exchange.as_ref().filter(|exchange| exchange.is_answering()) else {
            return false;
        };
        match exchange.reply() {
            Reply::Whole => true,
            Reply::Stream(probe) => {
                probe.notify_one();
                true
            }
            // Not between the bytes of another answer.
            Reply::None if !exchange.has_interim() || self.waiting.is_some() => false,
            Reply::None => {
                let sent = Pin::new(&mut self.socket).poll_write(context, PROBE);
                matches!(sent, Poll::Ready(Ok(bytes)) if bytes == PROBE.len())
            }
        }
    }

    /// Begins to wait for a client that has ended its side. False if there is nobody to wait for.
    fn half_close(&mut self, context: &mut Context<'_>) -> bool {
        if self.half_closed.is_none() && self.may_be_there(context) {
            let look = Box::pin(tokio::time::sleep(FIRST_LOOK));
            self.half_closed = Some(HalfClosed { loss: self.socket.loss(), is_lost: false, look });
        }
        self.half_closed.is_some()
    }

    /// Waits until a client that has ended its side is gone.
    fn poll_lost(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        let Some(closed) = &mut self.half_closed else { return Poll::Pending };
        if let Some(error) = self.socket.error() {
            closed.is_lost = true;
            return Poll::Ready(error);
        }
        if !closed.is_lost {
            let Some(loss) = &mut closed.loss else { return Poll::Pending };
            ready!(loss.as_mut().poll(context));
            // It must not be asked again.
            (closed.loss, closed.is_lost) = (None, true);
        }
        Poll::Ready(io::ErrorKind::ConnectionReset.into())
    }

    /// Waits until the client of an answer is gone, while nobody reads: whoever has bytes behind the request does not read on before
    /// the answer is complete. To be asked by the task that reads and writes, after it has done so. `exchange` is what the
    /// connection is doing.
    pub(crate) fn poll_gone(&mut self, exchange: &Exchange, context: &mut Context<'_>) -> Poll<io::Error> {
        let read_waits = std::mem::take(&mut self.read_waits);
        if read_waits || !exchange.is_answering() {
            // A reader notices the end, and wakes the task.
            self.read_side = ReadSide::Unwatched;
            return Poll::Pending;
        }
        if self.half_closed.is_none() {
            if matches!(self.read_side, ReadSide::Unwatched) {
                self.read_side = ReadSide::Watched(self.socket.end());
            }
            if let ReadSide::Watched(end) = &mut self.read_side {
                let Some(end) = end else { return Poll::Pending };
                ready!(end.as_mut().poll(context));
                self.read_side = ReadSide::Ended;
            }
            // A write that waits, and an answer that is being written, end by themselves if nobody takes them.
            if self.waiting.is_some() || matches!(exchange.reply(), Reply::Whole) {
                return Poll::Pending;
            }
            if !self.half_close(context) {
                return Poll::Ready(io::ErrorKind::ConnectionReset.into());
            }
        }
        self.poll_lost(context)
    }

    /// Waits until the client is gone, or has its answer: then the connection ends. Nor is there anything to wait for if the rest of
    /// a body is missing. That is looked at after a moment, when the handler has had all that came before the end.
    fn poll_half_closed(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if let Poll::Ready(error) = self.poll_lost(context) {
                return Poll::Ready(Err(error));
            }
            let Some(closed) = &mut self.half_closed else { break };
            if !self.exchange.as_ref().is_some_and(|exchange| exchange.is_answering()) {
                break;
            }
            ready!(closed.look.as_mut().poll(context));
            if self.exchange.as_ref().is_some_and(|exchange| exchange.awaits_body()) {
                break;
            }
            closed.look.as_mut().reset(Instant::now() + LATER_LOOKS);
        }
        Poll::Ready(Ok(()))
    }

    /// The outcome of a write: an error if it has been waiting for too long.
    fn timed<T>(&mut self, outcome: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.waiting = None;
            return outcome;
        }
        let time = self.time;
        let Some(deadline) = Instant::now().checked_add(time) else { return Poll::Pending };
        let sleep = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        match sleep.as_mut().poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => {
                let message = format!("the client has read nothing for {time:?}");
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)))
            }
        }
    }
}

impl AsyncRead for TimedIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = match self.at_end {
            true => self.poll_half_closed(context),
            false => Pin::new(&mut self.socket).poll_read(context, buffer),
        };
        let is_end = matches!(outcome, Poll::Ready(Ok(()))) && buffer.filled().len() == before;
        let outcome = match is_end && !self.at_end && buffer.remaining() > 0 && self.half_close(context) {
            true => {
                self.at_end = true;
                self.poll_half_closed(context)
            }
            false => outcome,
        };
        self.read_waits = outcome.is_pending();
        outcome
    }
}

impl AsyncWrite for TimedIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.socket).poll_write(context, bytes);
        self.timed(outcome, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.socket).poll_write_vectored(context, bytes);
        self.timed(outcome, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.socket).poll_flush(context);
        self.timed(outcome, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.socket).poll_shutdown(context);
        self.timed(outcome, context)
    }
}

#[cfg(all(test, unix))]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use axum::http::Version;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixStream;

    use super::*;

    /// Whoever reads may ask again after an error.
    #[test]
    fn a_client_that_is_lost_stays_lost() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (mut client, server) = UnixStream::pair().unwrap();
            let exchange = Arc::new(Exchange::default());
            let _answer = exchange.begin(Version::HTTP_11);
            let mut server =
                TimedIo::new(Box::new(server), Duration::MAX).with_exchange(Arc::clone(&exchange));
            client.shutdown().await.unwrap();
            let reading = tokio::spawn(async move {
                let mut errors = Vec::new();
                for _ in 0..3 {
                    errors.push(server.read(&mut [0; 8]).await.unwrap_err().kind());
                }
                errors
            });
            // All that was sent: there is no error then but the loss itself.
            client.read_exact(&mut [0; PROBE.len()]).await.unwrap();
            drop(client);
            assert_eq!(reading.await.unwrap(), [io::ErrorKind::ConnectionReset; 3]);
        });
    }
}
