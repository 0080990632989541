//! Why there is no CUDA device to use.

use quadriga_runtime::BackendError;
use thiserror::Error;

/// What keeps a CUDA device from being used.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library is not on this machine.
    #[error("no NVIDIA driver is installed (libcuda was not found)")]
    NoDriver,
    /// The driver lacks functions that are needed.
    #[error("the NVIDIA driver is too old: CUDA 13 is needed (driver 580 or newer)")]
    OldDriver,
    /// The compiler's library is not on this machine.
    #[error(
        "NVRTC, CUDA's run-time compiler, is not installed (libnvrtc was not found); it comes with the CUDA toolkit, or in the PyPI package nvidia-cuda-nvrtc"
    )]
    NoCompiler,
    /// The driver answered with an error.
    #[error("the NVIDIA driver reports: {reason}")]
    Driver {
        /// Its words.
        reason: String,
    },
    /// There is no device of that number.
    #[error("there is no device cuda:{ordinal}; the driver knows {count}")]
    NoDevice {
        /// The number asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// The device is of a generation that the kernels are not written for.
    #[error("{name} has compute capability {major}.{minor}; 7.5 or newer is needed")]
    OldDevice {
        /// The maker's name.
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
        /// The compiler's words.
        log: String,
    },
    /// The device refused something while it was set up.
    #[error(transparent)]
    Backend(#[from] BackendError),
}
