//! A request's body, which tells its connection whether a handler waits for more of it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::exchange::Exchange;

/// A body as it arrives.
pub(crate) struct AwaitedBody {
    body: Incoming,
    exchange: Arc<Exchange>,
}

impl AwaitedBody {
    pub(crate) fn new(body: Incoming, exchange: Arc<Exchange>) -> AwaitedBody {
        AwaitedBody { body, exchange }
    }
}

impl Body for AwaitedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        self.exchange.note_awaits_body(frame.is_pending());
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for AwaitedBody {
    fn drop(&mut self) {
        self.exchange.note_awaits_body(false);
    }
}
