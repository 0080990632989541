//! Environment variables whose values are few. The libraries ignore an unknown value, or take it for on; here it is an
//! error, since it is most likely a mistake.

use crate::failure::{Failure, Outcome};

const SWITCHES: &[&str] = &[
    "QUADRIGA_FUSE",
    "QUADRIGA_CHECK_PLANS",
    "QUADRIGA_CUDA_FUSE",
    "QUADRIGA_CUDA_BLAS",
    "QUADRIGA_CUDA_GAPS",
];

/// Where the CUDA backend's kernels come from.
const KERNELS: (&str, [&str; 2]) = ("QUADRIGA_CUDA_KERNELS", ["ptx", "compile"]);

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
    let (name, known) = KERNELS;
    match std::env::var_os(name) {
        Some(value) if !value.is_empty() && !known.iter().any(|known| value == *known) => {
            let value = value.to_string_lossy();
            Err(Failure::Usage(format!("{name} is {value:?}; it must be {}", known.join(" or "))))
        }
        _ => Ok(()),
    }
}
