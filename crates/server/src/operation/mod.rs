//! What keeps a server in service: keys and limits, metrics, TLS, sockets.

pub mod auth;
pub(crate) mod awaited_body;
pub mod caller;
pub(crate) mod client_watch;
pub(crate) mod exchange;
pub(crate) mod exposition;
pub mod hosts;
pub mod limits;
pub mod listener;
pub(crate) mod memory_room;
pub mod metrics;
pub mod origins;
pub mod process;
pub mod request_counts;
pub(crate) mod socket;
pub(crate) mod timed_io;
pub mod tls;
