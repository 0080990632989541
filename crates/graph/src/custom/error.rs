//! The error of a caller's code.

/// Why a custom operation refuses its inputs or fails: any error, or a text.
pub type CustomError = Box<dyn std::error::Error + Send + Sync>;
