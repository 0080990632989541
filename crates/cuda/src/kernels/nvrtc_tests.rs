//! Compiles all kernels with NVRTC as a developer does; no device is needed.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// Loads NVRTC as scripts/python-env installs it, so that looking it up by name finds it.
fn load_compiler() {
    unsafe extern "C" {
        fn dlopen(path: *const std::ffi::c_char, flags: std::ffi::c_int) -> *mut std::ffi::c_void;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/python-env");
    let made = Command::new(&script).output().expect("scripts/python-env runs");
    let log = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "scripts/python-env could not install NVRTC:\n{log}");
    let python = String::from_utf8(made.stdout).unwrap();
    let print_path = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let printed = Command::new(python.trim()).args(["-c", print_path]).output().unwrap();
    let folder = Path::new(String::from_utf8(printed.stdout).unwrap().trim()).join("nvidia/cu13/lib");
    let mut libraries: Vec<PathBuf> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    // Its built-in functions first: "libnvrtc-builtins" comes before "libnvrtc.so".
    libraries.sort();
    for library in libraries {
        let path = CString::new(library.as_os_str().as_bytes()).unwrap();
        // RTLD_NOW and RTLD_GLOBAL.
        let flags = 0x2 | 0x100;
        // SAFETY: a path that ends with a zero; the library is NVIDIA's, whose loading has no conditions.
        let handle = unsafe { dlopen(path.as_ptr(), flags) };
        assert!(!handle.is_null(), "{} does not load", library.display());
    }
}

/// The images are made by NVRTC 12 for all targets (scripts/cuda-images); this is NVRTC 13, for the one that compiles most of the sources.
#[test]
fn all_kernels_compile_with_nvrtc_13() {
    load_compiler();
    let device = (9, 0);
    let next = AtomicUsize::new(0);
    let compile_some = || {
        while let Some(file) = KernelFile::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
            match compiler::compile(*file, &compiler::architecture(device)) {
                Ok(image) => assert!(is_complete_elf(&image), "{} for {device:?}", file.name()),
                Err(error) => panic!("{} for {device:?}: {error}", file.name()),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get().min(4)) {
            scope.spawn(compile_some);
        }
    });
}
