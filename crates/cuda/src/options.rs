//! Settings of a backend. This is the only place where the crate reads environment variables.

use std::path::PathBuf;

use crate::context::ContextOwner;

/// `0` turns fused kernels off: each operation becomes a launch of its own.
const FUSE_VARIABLE: &str = "QUADRIGA_CUDA_FUSE";
/// `0` computes the rows of inactive neurons, too.
const SKIP_VARIABLE: &str = "QUADRIGA_CUDA_SKIP";
/// `0` disables cuBLAS, as if it were not installed.
const BLAS_VARIABLE: &str = "QUADRIGA_CUDA_BLAS";
/// `ptx` or `compile`: where kernels come from.
const KERNELS_VARIABLE: &str = "QUADRIGA_CUDA_KERNELS";
/// `1`, or any other value but `0`, measures idle gaps between programs.
const GAPS_VARIABLE: &str = "QUADRIGA_CUDA_GAPS";
/// The folder for all of Quadriga's cached files.
const CACHE_VARIABLE: &str = "QUADRIGA_CACHE";

/// Where kernels come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KernelOrigin {
    /// From the binary: machine code for common generations of devices, PTX that the driver compiles for others. Where
    /// the sources have changed since, NVRTC compiles them.
    #[default]
    Shipped,
    /// From the binary, as PTX, which the driver compiles (compute capability 9.0 and newer).
    Ptx,
    /// From the sources, which NVRTC compiles.
    Compiled,
}

/// The settings of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// Whether operations are fused, and kernels use programmatic dependent launch.
    pub(crate) fusion: bool,
    /// Whether rows of inactive neurons are skipped.
    pub(crate) skip: bool,
    /// Whether cuBLAS is used where it is installed.
    pub(crate) cublas: bool,
    pub(crate) kernels: KernelOrigin,
    /// Whether the GPU's idle time between programs is measured.
    pub(crate) idle_gaps: bool,
    pub(crate) context: ContextOwner,
    /// The folder above that of compiled kernels; `None` keeps no compiled kernels.
    pub(crate) cache_dir: Option<PathBuf>,
}

impl Options {
    /// The settings that the environment variables request.
    pub(crate) fn from_environment() -> Options {
        Options::from_variables(|name| std::env::var_os(name).map(PathBuf::from))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<PathBuf>) -> Options {
        let is_on = |name| variable(name).is_none_or(|value| value.as_os_str() != "0");
        let is_requested = |name| variable(name).is_some_and(|value| value.as_os_str() != "0");
        let folder = |name| variable(name).filter(|value| !value.as_os_str().is_empty());
        Options {
            fusion: is_on(FUSE_VARIABLE),
            skip: is_on(SKIP_VARIABLE),
            cublas: is_on(BLAS_VARIABLE),
            kernels: match variable(KERNELS_VARIABLE).as_deref().and_then(|value| value.to_str()) {
                Some("ptx") => KernelOrigin::Ptx,
                Some("compile") => KernelOrigin::Compiled,
                _ => KernelOrigin::Shipped,
            },
            idle_gaps: is_requested(GAPS_VARIABLE),
            context: ContextOwner::Process,
            cache_dir: folder(CACHE_VARIABLE)
                // The XDG specification has relative paths ignored.
                .or_else(|| {
                    folder("XDG_CACHE_HOME")
                        .filter(|base| base.is_absolute())
                        .map(|base| base.join("quadriga"))
                })
                .or_else(|| folder("HOME").map(|home| home.join(".cache").join("quadriga"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(set: &[(&str, &str)]) -> Options {
        Options::from_variables(|name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn without_variables_everything_is_on_and_nothing_is_cached() {
        let plain = Options {
            fusion: true,
            skip: true,
            cublas: true,
            kernels: KernelOrigin::Shipped,
            idle_gaps: false,
            context: ContextOwner::Process,
            cache_dir: None,
        };
        assert_eq!(options(&[]), plain);
    }

    #[test]
    fn zero_turns_off_and_any_other_value_on() {
        assert!(!options(&[(GAPS_VARIABLE, "0")]).idle_gaps);
        let set = [(FUSE_VARIABLE, "0"), (BLAS_VARIABLE, "1"), (GAPS_VARIABLE, "")];
        let options = options(&set);
        assert!(!options.fusion && options.cublas && options.idle_gaps);
    }

    #[test]
    fn kernels_come_from_the_binary_unless_requested_otherwise() {
        let origin = |value| options(&[(KERNELS_VARIABLE, value)]).kernels;
        assert_eq!(origin("ptx"), KernelOrigin::Ptx);
        assert_eq!(origin("compile"), KernelOrigin::Compiled);
        assert_eq!(origin(""), KernelOrigin::Shipped);
    }

    #[test]
    fn the_cache_folder_is_the_most_specific_one_that_is_set() {
        let home = ("HOME", "/home/a");
        assert_eq!(options(&[home]).cache_dir, Some("/home/a/.cache/quadriga".into()));
        let xdg = ("XDG_CACHE_HOME", "/cache");
        assert_eq!(options(&[home, xdg]).cache_dir, Some("/cache/quadriga".into()));
        assert_eq!(options(&[home, xdg, (CACHE_VARIABLE, "/q")]).cache_dir, Some("/q".into()));
        assert_eq!(
            options(&[home, ("XDG_CACHE_HOME", "cache")]).cache_dir,
            Some("/home/a/.cache/quadriga".into())
        );
        assert_eq!(options(&[home, (CACHE_VARIABLE, "")]).cache_dir, Some("/home/a/.cache/quadriga".into()));
    }
}
