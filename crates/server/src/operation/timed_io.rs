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
use super::socket::{Loss, Socket};

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
    loss: Option<Loss>,
    /// Until the next look.
    look: Pin<Box<Sleep>>,
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
}

impl TimedIo {
    pub(crate) fn new(socket: Box<dyn Socket>, time: Duration) -> TimedIo {
        TimedIo { socket, time, waiting: None, exchange: None, half_closed: None }
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

    /// Waits until the client is gone, or has its answer: then the connection ends. Nor is there anything to wait for if the rest of
    /// a body is missing. That is looked at after a moment, when the handler has had all that came before the end.
    fn poll_half_closed(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some(closed) = &mut self.half_closed {
            if let Some(error) = self.socket.error() {
                return Poll::Ready(Err(error));
            }
            if closed.loss.as_mut().is_some_and(|loss| loss.as_mut().poll(context).is_ready()) {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
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
        if self.half_closed.is_some() {
            return self.poll_half_closed(context);
        }
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.socket).poll_read(context, buffer);
        let is_end = matches!(outcome, Poll::Ready(Ok(()))) && buffer.filled().len() == before;
        if is_end && buffer.remaining() > 0 && self.may_be_there(context) {
            let look = Box::pin(tokio::time::sleep(FIRST_LOOK));
            self.half_closed = Some(HalfClosed { loss: self.socket.loss(), look });
            return self.poll_half_closed(context);
        }
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
