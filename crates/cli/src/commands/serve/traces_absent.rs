//! In place of traces in builds without the feature `otel`.

use tracing_subscriber::layer::Identity;

use crate::failure::{Failure, Outcome};

/// Nothing is sent.
pub(super) struct Traces;

/// No layer; an error if there is a collector that wants one.
pub(super) fn layer(endpoint: Option<&str>) -> Outcome<(Option<Identity>, Traces)> {
    match endpoint {
        None => Ok((None, Traces)),
        Some(endpoint) => Err(Failure::Usage(format!(
            "--otlp-endpoint {endpoint}: this build sends no traces; one with the feature otel does"
        ))),
    }
}
