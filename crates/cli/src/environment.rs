//! Environment variables that are either on or off. The libraries take any value but `0` for on; here another value than
//! 0 or 1 is an error, since it is most likely a mistake.

use crate::failure::{Failure, Outcome};

const SWITCHES: &[&str] =
    &["QUADRIGA_FUSE", "QUADRIGA_CUDA_FUSE", "QUADRIGA_CUDA_BLAS", "QUADRIGA_CUDA_GAPS"];

/// An error if a switch has a value other than 0 or 1; empty counts as not set.
pub(crate) fn check() -> Outcome {
    for name in SWITCHES {
        match std::env::var_os(name) {
            Some(value) if !value.is_empty() && value != "0" && value != "1" => {
                let value = value.to_string_lossy();
                return Err(Failure::Usage(format!("{name} is {value:?}; it must be 0 or 1")));
            }
            _ => {}
        }
    }
    Ok(())
}
