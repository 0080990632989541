//! Compiles all kernels for three compute capabilities; no device is needed.

use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// All files, in their order.
const FILES: [KernelFile; SOURCES.len()] = [
    KernelFile::Elementwise,
    KernelFile::Norm,
    KernelFile::Rope,
    KernelFile::Rows,
    KernelFile::Reduce,
    KernelFile::Matmul,
    KernelFile::Pack,
    KernelFile::Attention,
    KernelFile::AttentionMma,
    KernelFile::GemvStreamed,
];

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

/// The names of all kernels that this crate launches, from its source text.
fn launched() -> Vec<String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let folders = [source.join("lower"), source];
    let files =
        folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap()).map(|entry| entry.unwrap().path());
    let texts = files.filter(|path| path.is_file()).map(|path| fs::read_to_string(path).unwrap());
    let names = |text: String| -> Vec<String> {
        let starts = text.split("c\"k_").skip(1).filter_map(|rest| rest.split_once('"'));
        starts.map(|(name, _)| format!("k_{name}")).collect()
    };
    texts
        .flat_map(names)
        .filter(|name| name.bytes().all(|b| b == b'_' || b.is_ascii_alphanumeric()))
        .collect()
}

#[test]
fn all_kernels_compile_and_every_launched_name_exists() {
    load_compiler();
    let work: Vec<(KernelFile, (i32, i32))> =
        [(7, 5), (8, 0), (9, 0)].into_iter().flat_map(|device| FILES.map(|file| (file, device))).collect();
    let next = AtomicUsize::new(0);
    let newest = Mutex::new(Vec::new());
    let compile_some = || {
        while let Some((file, device)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (name, source, options) = file.source(*device);
            match compile(name, &source, &options) {
                Ok(image) => {
                    assert!(is_complete_elf(&image), "{name} for {device:?}");
                    if device.0 >= 9 {
                        newest.lock().unwrap().extend(image);
                    }
                }
                Err(error) => panic!("{name} for {device:?}: {error}"),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get().min(4)) {
            scope.spawn(compile_some);
        }
    });
    let (images, launched) = (newest.into_inner().unwrap(), launched());
    assert!(launched.len() > 50, "{launched:?}");
    for name in launched {
        // A symbol's name in the image ends with a zero.
        let symbol = format!("\0{name}\0");
        let found = images.windows(symbol.len()).any(|bytes| bytes == symbol.as_bytes());
        assert!(found, "no kernel is called {name}");
    }
}
