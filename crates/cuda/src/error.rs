//! Why a CUDA device cannot be used.

use quadriga_runtime::BackendError;

/// Why a CUDA device cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver's library is not on this machine.
    #[error("no NVIDIA driver is installed (libcuda was not found)")]
    NoDriver,
    /// The driver is older than CUDA 12.0.
    #[error("the NVIDIA driver is too old: driver 525 or newer is needed (CUDA 12.0)")]
    OldDriver,
    /// Kernels must be compiled, and the compiler's library is not on this machine.
    #[error(
        "kernels must be compiled, and NVRTC, CUDA's run-time compiler, is not installed (libnvrtc was not found); it comes with the CUDA toolkit, or in the PyPI package nvidia-cuda-nvrtc"
    )]
    NoCompiler,
    /// The driver answered with an error.
    #[error("the NVIDIA driver reports: {reason}")]
    Driver {
        /// The driver's message.
        reason: String,
    },
    /// There is no device of that number.
    #[error("there is no device cuda:{ordinal}; the driver reports {count}")]
    NoDevice {
        /// The number that was requested.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// The device's compute capability is too low.
    #[error("{name} has compute capability {major}.{minor}; 7.5 or newer is needed")]
    OldDevice {
        /// The device's name.
        name: String,
        /// Major version.
        major: i32,
        /// Minor version.
        minor: i32,
    },
    /// A kernel file did not compile.
    #[error("the kernels in {file} do not compile:\n{log}")]
    Compile {
        /// The file.
        file: &'static str,
        /// The compiler's log.
        log: String,
    },
    /// The code of a custom operation cannot be used.
    #[error("the code of a custom operation for CUDA cannot be used: {log}")]
    CustomCode {
        /// The compiler's log, or the reason.
        log: String,
    },
    /// An operation on the device failed while it was set up.
    #[error(transparent)]
    Backend(#[from] BackendError),
}
