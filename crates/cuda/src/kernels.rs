//! The kernels: compiled by NVRTC for the device at hand when first used, and kept in the user's cache folder.
//!
//! Compiling on the spot, rather than shipping PTX, lets one source serve every generation with its own machine code
//! and needs no CUDA toolkit when Quadriga itself is built; the cache makes it cost a few seconds once.

use std::ffi::{CStr, CString};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use cudarc::nvrtc::sys as nvrtc;
use quadriga_runtime::BackendError;

use crate::CudaError;
use crate::context::Context;

/// The kernel files, in the order of [`File`].
const SOURCES: [(&str, &str); 10] = [
    ("elementwise.cu", include_str!("../kernels/elementwise.cu")),
    ("norm.cu", include_str!("../kernels/norm.cu")),
    ("rope.cu", include_str!("../kernels/rope.cu")),
    ("rows.cu", include_str!("../kernels/rows.cu")),
    ("reduce.cu", include_str!("../kernels/reduce.cu")),
    ("matmul.cu", include_str!("../kernels/matmul.cu")),
    ("pack.cu", include_str!("../kernels/pack.cu")),
    (
        "attention.cu",
        concat!(include_str!("../kernels/attention.cuh"), include_str!("../kernels/attention.cu")),
    ),
    ("tiles.cu", concat!(include_str!("../kernels/attention.cuh"), include_str!("../kernels/tiles.cu"))),
    ("stream.cu", include_str!("../kernels/stream.cu")),
];

const COMMON: &str = include_str!("../kernels/common.cuh");

/// A kernel file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum File {
    Elementwise,
    Norm,
    Rope,
    Rows,
    Reduce,
    Matmul,
    Pack,
    Attention,
    Tiles,
    Stream,
}

impl File {
    /// Its name, its text with what it shares with others, and how it is compiled for a compute capability.
    fn source(self, (major, minor): (i32, i32)) -> (&'static str, String, [String; 3]) {
        let (name, text) = SOURCES.get(self as usize).copied().unwrap_or(("", ""));
        // Values taken out of blocks are the same everywhere, bit for bit: no fused multiply-add there.
        let fused = if matches!(self, File::Rows | File::Pack) { "--fmad=false" } else { "--fmad=true" };
        let options = [format!("--gpu-architecture=sm_{major}{minor}"), "--std=c++17".into(), fused.into()];
        (name, format!("{COMMON}\n#line 1 \"{name}\"\n{text}"), options)
    }
}

/// A function on the device. It lives as long as the [`Kernels`] it came from.
#[derive(Clone, Copy)]
pub(crate) struct Function(pub(crate) sys::CUfunction);

// SAFETY: a function handle is only passed back to the driver, which takes it from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

struct Module(sys::CUmodule);

// SAFETY: a module handle is only passed back to the driver, which takes it from any thread.
unsafe impl Send for Module {}

pub(crate) struct Kernels {
    context: Arc<Context>,
    cache: Option<PathBuf>,
    modules: Mutex<[Option<Module>; SOURCES.len()]>,
}

impl Kernels {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Kernels, CudaError> {
        // SAFETY: looks for the library and calls nothing in it.
        if !unsafe { nvrtc::is_culib_present() } {
            return Err(CudaError::NoCompiler);
        }
        Ok(Kernels { context: Arc::clone(context), cache: cache_folder(), modules: Mutex::default() })
    }

    /// The function of this name in a kernel file, which is compiled if this is its first use.
    pub(crate) fn function(&self, file: File, name: &CStr) -> Result<Function, BackendError> {
        self.context.bind()?;
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = modules.get_mut(file as usize).ok_or_else(|| self.failed("no such kernel file".into()))?;
        let module = match slot {
            Some(module) => module.0,
            None => {
                let module = self.load(file)?;
                slot.insert(Module(module)).0
            }
        };
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded and stays so; the name ends with a zero; writes one handle.
        let code = unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) };
        self.context.check("cuModuleGetFunction", code)?;
        Ok(Function(function))
    }

    /// As [`function`](Kernels::function), for a kernel that asks for more shared memory than all may have.
    pub(crate) fn large_function(
        &self,
        file: File,
        name: &CStr,
        bytes: u32,
    ) -> Result<Function, BackendError> {
        let function = self.function(file, name)?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        // SAFETY: the function is loaded; no pointer is passed.
        let code = unsafe { sys::cuFuncSetAttribute(function.0, attribute, bytes) };
        self.context.check("cuFuncSetAttribute", code)?;
        Ok(function)
    }

    fn failed(&self, reason: String) -> BackendError {
        BackendError::Failed { backend: self.context.name.clone(), what: "compiling kernels", reason }
    }

    fn load(&self, file: File) -> Result<sys::CUmodule, BackendError> {
        let (name, source, options) = file.source(self.context.compute_capability);
        let key =
            key(&[&source, &options.join(" "), &self.context.driver_version.to_string(), &nvrtc_version()]);
        let path = self.cache.as_ref().map(|folder| folder.join(format!("{name}.{key:016x}.cubin")));
        // A cached file that is cut short or damaged does not load: it is compiled anew and replaced.
        if let Some(path) = &path
            && let Ok(image) = fs::read(path)
            && let Ok(module) = self.load_image(&image)
        {
            return Ok(module);
        }
        let image = compile(name, &source, &options).map_err(|error| self.failed(error.to_string()))?;
        let module = self.load_image(&image)?;
        if let Some(path) = path {
            // Without a cache everything works, more slowly at the next start.
            let _ = store(&path, &image);
        }
        Ok(module)
    }

    fn load_image(&self, image: &[u8]) -> Result<sys::CUmodule, BackendError> {
        // The driver reads the image up to the end that its own header states: only whole files are handed over.
        if !is_whole_elf(image) {
            return Err(self.failed("the image is cut short".into()));
        }
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is a whole object file in memory; the driver copies what it needs.
        let code = unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) };
        self.context.check("cuModuleLoadData", code)?;
        Ok(module)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            let modules = self.modules.get_mut().unwrap_or_else(PoisonError::into_inner);
            for module in modules.iter().flatten() {
                // SAFETY: loaded by `load`, unloaded only here; programs hold an `Arc` of the backend's parts.
                let _ = unsafe { sys::cuModuleUnload(module.0) };
            }
        }
    }
}

/// Whether the bytes are a 64-bit ELF file whose section headers end inside them.
fn is_whole_elf(image: &[u8]) -> bool {
    let field = |at: usize, len: usize| {
        image.get(at..at + len).map(|b| b.iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte)))
    };
    let (Some(sections), Some(size), Some(count)) = (field(40, 8), field(58, 2), field(60, 2)) else {
        return false;
    };
    image.starts_with(b"\x7fELF\x02")
        && sections.checked_add(size * count).is_some_and(|end| end <= image.len() as u64)
}

/// `$QUADRIGA_CACHE/kernels`, or `quadriga/kernels` in the user's cache folder.
fn cache_folder() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = variable("QUADRIGA_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|p| p.join("quadriga")))
        .or_else(|| variable("HOME").map(|p| p.join(".cache").join("quadriga")))?;
    Some(base.join("kernels"))
}

/// Writes a file so that another process sees all of it or nothing.
fn store(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let written = fs::File::create(&temporary).and_then(|mut file| {
        std::io::Write::write_all(&mut file, bytes)?;
        file.sync_all()
    });
    let moved = written.and_then(|()| fs::rename(&temporary, path));
    if moved.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    moved
}

/// A hash of some texts, for a file name.
fn key(texts: &[&str]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in texts.iter().flat_map(|t| t.bytes().chain([0])) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash
}

fn nvrtc_version() -> String {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is present; writes two integers.
    let _ = unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) };
    format!("{major}.{minor}")
}

fn compile(name: &'static str, source: &str, options: &[String]) -> Result<Vec<u8>, CudaError> {
    let fail = |log: String| CudaError::Compile { file: name, log };
    let c_text = |text: &str| CString::new(text).map_err(|_| fail("a zero byte in the source".into()));
    let (source, title) = (c_text(source)?, c_text(name)?);
    let options = options.iter().map(|o| c_text(o)).collect::<Result<Vec<_>, _>>()?;
    let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
    let ok = nvrtc::nvrtcResult::NVRTC_SUCCESS;
    let mut program = std::ptr::null_mut();
    // SAFETY: all strings end with a zero and outlive the calls; sizes are asked for before buffers are handed over;
    // the program is destroyed on every path.
    unsafe {
        let created = nvrtc::nvrtcCreateProgram(
            &mut program,
            source.as_ptr(),
            title.as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        );
        if created != ok {
            return Err(fail(format!("{created:?}")));
        }
        let compiled = nvrtc::nvrtcCompileProgram(program, pointers.len() as i32, pointers.as_ptr());
        let result = if compiled == ok {
            let mut size = 0;
            let mut image = Vec::new();
            let mut code = nvrtc::nvrtcGetCUBINSize(program, &mut size);
            if code == ok {
                image.resize(size, 0u8);
                code = nvrtc::nvrtcGetCUBIN(program, image.as_mut_ptr().cast());
            }
            if code == ok { Ok(image) } else { Err(fail(format!("{code:?}"))) }
        } else {
            let mut size = 0;
            let mut log = Vec::new();
            if nvrtc::nvrtcGetProgramLogSize(program, &mut size) == ok {
                log.resize(size, 0u8);
                let _ = nvrtc::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
            }
            Err(fail(String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()))
        };
        let _ = nvrtc::nvrtcDestroyProgram(&mut program);
        result
    }
}

// Where PyPI has the compiler.
#[cfg(test)]
#[cfg(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu"))]
mod compiled;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_has_its_source() {
        assert_eq!(SOURCES[File::Attention as usize].0, "attention.cu");
        assert_eq!(SOURCES[File::Rows as usize].0, "rows.cu");
        assert!(SOURCES.iter().all(|(_, text)| text.contains("__global__")));
    }

    #[test]
    fn damaged_images_are_told_from_whole_ones() {
        let mut elf = vec![0u8; 256];
        elf[..5].copy_from_slice(b"\x7fELF\x02");
        elf[40..48].copy_from_slice(&128u64.to_le_bytes());
        elf[58..60].copy_from_slice(&64u16.to_le_bytes());
        elf[60..62].copy_from_slice(&2u16.to_le_bytes());
        assert!(is_whole_elf(&elf));
        assert!(!is_whole_elf(&elf[..255]));
        assert!(!is_whole_elf(b""));
        assert!(!is_whole_elf(&[0; 256]));
    }

    #[test]
    fn keys_tell_sources_and_options_apart() {
        assert_ne!(key(&["a", "b"]), key(&["ab", ""]));
        assert_eq!(key(&["a", "b"]), key(&["a", "b"]));
    }

    #[test]
    fn a_stored_image_is_whole_or_absent() {
        let folder = std::env::temp_dir().join(format!("quadriga-kernels-{}", std::process::id()));
        let path = folder.join("x.cubin");
        store(&path, b"image").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"image");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        fs::remove_dir_all(folder).unwrap();
    }
}
