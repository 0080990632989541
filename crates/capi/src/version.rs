//! Versions of the library.

use std::ffi::c_char;

use crate::{guard, handle};

/// The version of the interface that this header describes. It grows when a function or a structure changes or goes away, and is part of
/// the shared library's name and of its symbols' versions.
pub const QD_ABI_VERSION: u32 = 1;

/// The version of the interface of the library that is linked: compare it with QD_ABI_VERSION.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_abi_version() -> u32 {
    QD_ABI_VERSION
}

/// The version of Quadriga, such as "0.1.0".
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The number of handles that were not freed yet: 0 at the end of a program without leaks.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_live_handles() -> usize {
    guard::value(0, || Ok(handle::count()))
}
