//! What keeps a server in service: keys and limits, metrics, TLS, shutdown.

pub mod auth;
pub mod caller;
pub mod limits;
pub mod metrics;
