//! Kernels: NVRTC compiles a kernel file for the device at its first use, and the cubin is kept in the cache folder.
//!
//! Unlike shipped PTX this needs no CUDA toolkit when Quadriga is built, and gives every compute capability its own
//! code; it costs a few seconds once.

use std::ffi::{CStr, CString};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use cudarc::nvrtc::sys as nvrtc;
use quadriga_runtime::BackendError;

use crate::context::Context;
use crate::error::Error;

/// A kernel file with the headers of its own.
struct KernelSource {
    name: &'static str,
    text: &'static str,
    headers: &'static [(&'static str, &'static str)],
}

/// A kernel file or header: its name and text.
macro_rules! kernel_text {
    ($name:literal) => {
        ($name, include_str!(concat!("../kernels/", $name)))
    };
}

const ATTENTION: (&str, &str) = kernel_text!("attention.cuh");
const ROPE: (&str, &str) = kernel_text!("rope.cuh");

/// Headers of all kernel files.
const HEADERS: [(&str, &str); 4] = [
    kernel_text!("common.cuh"),
    kernel_text!("op_codes.cuh"),
    kernel_text!("formats.cuh"),
    kernel_text!("tensor.cuh"),
];

const fn source(
    (name, text): (&'static str, &'static str),
    headers: &'static [(&'static str, &'static str)],
) -> KernelSource {
    KernelSource { name, text, headers }
}

/// The kernel files, in the order of [`KernelFile`].
const SOURCES: [KernelSource; 10] = [
    source(kernel_text!("elementwise.cu"), &[]),
    source(kernel_text!("norm.cu"), &[]),
    source(kernel_text!("rope.cu"), &[ROPE]),
    source(kernel_text!("rows.cu"), &[]),
    source(kernel_text!("reduce.cu"), &[]),
    source(kernel_text!("matmul.cu"), &[]),
    source(kernel_text!("pack.cu"), &[]),
    source(kernel_text!("attention.cu"), &[ROPE, ATTENTION]),
    source(kernel_text!("attention_mma.cu"), &[ATTENTION]),
    source(kernel_text!("gemv_streamed.cu"), &[]),
];

/// A kernel file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum KernelFile {
    Elementwise,
    Norm,
    Rope,
    Rows,
    Reduce,
    Matmul,
    Pack,
    Attention,
    AttentionMma,
    GemvStreamed,
}

impl KernelFile {
    /// Its name, its text with all headers, and the compiler's options for a compute capability.
    fn source(self, (major, minor): (i32, i32)) -> (&'static str, String, [String; 3]) {
        let Some(source) = SOURCES.get(self as usize) else { return Default::default() };
        // Conversions from and to block formats give the same bits on host and device: no fused multiply-add there.
        let fused =
            if matches!(self, KernelFile::Rows | KernelFile::Pack) { "--fmad=false" } else { "--fmad=true" };
        let options = [format!("--gpu-architecture=sm_{major}{minor}"), "--std=c++17".into(), fused.into()];
        let own = (source.name, source.text);
        let texts = HEADERS.iter().chain(source.headers).chain([&own]);
        let text = texts.map(|(name, text)| format!("#line 1 \"{name}\"\n{text}\n")).collect();
        (source.name, text, options)
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
    /// `cache_dir` is the folder above that of cubins.
    pub(crate) fn new(context: &Arc<Context>, cache_dir: Option<&Path>) -> Result<Kernels, Error> {
        // SAFETY: looks the library up and calls nothing in it.
        if !unsafe { nvrtc::is_culib_present() } {
            return Err(Error::NoCompiler);
        }
        Ok(Kernels {
            context: Arc::clone(context),
            cache: cache_dir.map(|folder| folder.join("kernels")),
            modules: Mutex::default(),
        })
    }

    /// A kernel by name; its file is compiled at its first use.
    pub(crate) fn function(&self, file: KernelFile, name: &CStr) -> Result<Function, BackendError> {
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

    /// As [`function`](Kernels::function), for a kernel that needs more dynamic shared memory than the default limit.
    pub(crate) fn function_with_shared_memory(
        &self,
        file: KernelFile,
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

    fn load(&self, file: KernelFile) -> Result<sys::CUmodule, BackendError> {
        let (name, source, options) = file.source(self.context.compute_capability);
        let key =
            key(&[&source, &options.join(" "), &self.context.driver_version.to_string(), &nvrtc_version()]);
        let path = self.cache.as_ref().map(|folder| folder.join(format!("{name}.{key:016x}.cubin")));
        // A cached file that is truncated or damaged does not load: the kernels are compiled again and the file
        // replaced.
        if let Some(path) = &path
            && let Ok(image) = fs::read(path)
            && let Ok(module) = self.load_image(&image)
        {
            return Ok(module);
        }
        let image = compile(name, &source, &options).map_err(|error| self.failed(error.to_string()))?;
        let module = self.load_image(&image)?;
        if let Some(path) = path {
            // Without the cached file, the next process compiles again.
            let _ = store(&path, &image);
        }
        Ok(module)
    }

    fn load_image(&self, image: &[u8]) -> Result<sys::CUmodule, BackendError> {
        // The driver reads as far as the image's own header says, so the image must be complete.
        if !is_complete_elf(image) {
            return Err(self.failed("the image is truncated".into()));
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
fn is_complete_elf(image: &[u8]) -> bool {
    let field = |at: usize, len: usize| {
        image.get(at..at + len).map(|b| b.iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte)))
    };
    let (Some(sections), Some(size), Some(count)) = (field(40, 8), field(58, 2), field(60, 2)) else {
        return false;
    };
    image.starts_with(b"\x7fELF\x02")
        && sections.checked_add(size * count).is_some_and(|end| end <= image.len() as u64)
}

/// Writes a file atomically: another process sees all of it or nothing.
fn store(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().ok_or(std::io::ErrorKind::InvalidInput)?;
    fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    std::io::Write::write_all(&mut file, bytes)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// A hash (FNV-1a) of some texts, for a file name.
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

fn compile(name: &'static str, source: &str, options: &[String]) -> Result<Vec<u8>, Error> {
    let fail = |log: String| Error::Compile { file: name, log };
    let c_text = |text: &str| CString::new(text).map_err(|_| fail("a zero byte in the source".into()));
    let (source, title) = (c_text(source)?, c_text(name)?);
    let options = options.iter().map(|o| c_text(o)).collect::<Result<Vec<_>, _>>()?;
    let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
    let ok = nvrtc::nvrtcResult::NVRTC_SUCCESS;
    let mut program = std::ptr::null_mut();
    // SAFETY: all strings end with a zero and outlive the calls; buffers have the sizes that the library returned;
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

// PyPI has NVRTC for these systems.
#[cfg(test)]
#[cfg(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu"))]
mod nvrtc_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_has_its_source() {
        assert_eq!(SOURCES[KernelFile::Attention as usize].name, "attention.cu");
        assert_eq!(SOURCES[KernelFile::Rows as usize].name, "rows.cu");
        assert!(SOURCES.iter().all(|source| source.text.contains("__global__")));
    }

    #[test]
    fn truncated_images_are_recognised() {
        let mut elf = vec![0u8; 256];
        elf[..5].copy_from_slice(b"\x7fELF\x02");
        elf[40..48].copy_from_slice(&128u64.to_le_bytes());
        elf[58..60].copy_from_slice(&64u16.to_le_bytes());
        elf[60..62].copy_from_slice(&2u16.to_le_bytes());
        assert!(is_complete_elf(&elf));
        assert!(!is_complete_elf(&elf[..255]));
        assert!(!is_complete_elf(b""));
        assert!(!is_complete_elf(&[0; 256]));
    }

    #[test]
    fn keys_differ_by_source_and_options() {
        assert_ne!(key(&["a", "b"]), key(&["ab", ""]));
        assert_eq!(key(&["a", "b"]), key(&["a", "b"]));
    }

    #[test]
    fn storing_an_image_leaves_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.cubin");
        store(&path, b"image").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"image");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    }
}
