//! Limits of requests and connections.

use std::time::Duration;

/// Limits of requests and connections.
#[derive(Clone, PartialEq, Debug)]
pub struct Limits {
    /// The most bytes of a body.
    pub body_bytes: usize,
    /// The most bytes of all bodies that are being read, or whose answers have not begun, with what their values take once they are
    /// parsed. One body may take a quarter of them.
    pub body_memory: usize,
    /// The most bytes of all answers that are being collected, or that wait for their clients. One request may take half of them; a
    /// quarter is for streams, of which one may take half of that.
    pub answer_memory: usize,
    /// The time within which a body must arrive.
    pub body_time: Duration,
    /// The time within which the header of a request must arrive, and after which an idle connection is closed.
    pub header_time: Duration,
    /// The most bytes of a request's header.
    pub header_bytes: usize,
    /// The time within which a client must take some of an answer that waits to be sent.
    pub write_time: Duration,
    /// The most open connections; others wait to be accepted.
    pub connections: usize,
    /// The time between two signs of life on a stream on which nothing happens.
    pub ping: Duration,
    /// The time that answers have to be finished after the server was told to stop.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            body_bytes: 32 << 20,
            body_memory: 512 << 20,
            answer_memory: 1 << 30,
            body_time: Duration::from_secs(60),
            header_time: Duration::from_secs(60),
            header_bytes: 64 << 10,
            write_time: Duration::from_secs(60),
            connections: 4096,
            ping: Duration::from_secs(15),
            drain: Duration::from_secs(30),
        }
    }
}
