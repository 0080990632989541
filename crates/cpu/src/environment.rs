//! The environment variables that the crate reads; each has an equivalent in [`BackendBuilder`](crate::BackendBuilder).

use crate::isa::{Isa, IsaError};

/// Environment variable with the instruction set to use instead of the best one: `scalar`, `avx2`, `avxvnni`, `avx512`
/// or `amx`.
/// [`BackendBuilder::isa`](crate::BackendBuilder::isa) overrides it.
pub const ISA_VARIABLE: &str = "QUADRIGA_ISA";

/// Environment variable that turns fusion off with the value `0`: every operation then runs as a step of its own.
/// [`BackendBuilder::fuse`](crate::BackendBuilder::fuse) overrides it.
pub const FUSE_VARIABLE: &str = "QUADRIGA_FUSE";

/// Environment variable that turns the skipping of inactive neurons off with the value `0`.
/// [`BackendBuilder::skip`](crate::BackendBuilder::skip) overrides it.
pub const SKIP_VARIABLE: &str = "QUADRIGA_SKIP";

impl Isa {
    /// The instruction set that the environment variable [`ISA_VARIABLE`] names, or the best one if it is not set.
    ///
    /// # Errors
    /// The name is unknown, or the CPU lacks the instruction set.
    pub fn from_environment() -> Result<Isa, IsaError> {
        match std::env::var(ISA_VARIABLE) {
            Ok(name) if !name.is_empty() => Isa::named(&name),
            _ => Ok(Isa::detect()),
        }
    }
}

/// Whether to fuse operations, as far as the environment says.
pub(crate) fn fuse() -> bool {
    std::env::var(FUSE_VARIABLE).map_or(true, |value| value != "0")
}

/// Whether to skip the rows of inactive neurons, as far as the environment says.
pub(crate) fn skip() -> bool {
    std::env::var(SKIP_VARIABLE).map_or(true, |value| value != "0")
}
