//! Kernels: their files, loaded at the first use.
//!
//! The binary has machine code for common generations of devices, and PTX, which the driver compiles, for all others:
//! a driver is all that a machine needs. NVRTC compiles the sources where they have changed since the images were made,
//! or on request. What is compiled on this machine is kept in a cache, whatever driver comes next.

mod cache;
mod compiler;
mod images;
mod progress;
mod sources;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::CStr;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;
use quadriga_runtime::BackendError;

use self::cache::Cache;
use self::images::Target;
pub use self::progress::{KernelCompilation, observe_compilation};
use self::sources::FILES;
pub(crate) use self::sources::KernelFile;
use crate::context::Context;
use crate::custom::{CustomCode, KernelText};
use crate::error::Error;
use crate::options::KernelOrigin;

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

/// Where the code of a file comes from.
enum Code {
    /// From the binary, as machine code.
    Machine(Vec<u8>),
    /// From the binary, for the driver to compile.
    Ptx(Vec<u8>),
    /// From NVRTC.
    Source,
}

pub(crate) struct Kernels {
    context: Arc<Context>,
    cache: Option<Cache>,
    origin: KernelOrigin,
    modules: [Mutex<Option<Module>>; FILES],
    /// Whether the kernels of gemm_wgmma.cu could be loaded.
    wgmma: OnceLock<bool>,
    /// The modules of custom operations, by the code's key. They stay as long as the backend.
    custom: Mutex<HashMap<[u8; 32], Module>>,
}

impl Kernels {
    /// `cache_dir` is the folder above that of compiled kernels.
    pub(crate) fn new(
        context: &Arc<Context>,
        cache_dir: Option<&Path>,
        origin: KernelOrigin,
    ) -> Result<Kernels, Error> {
        if origin == KernelOrigin::Compiled && !compiler::has_nvrtc() {
            return Err(Error::NoCompiler);
        }
        Ok(Kernels {
            context: Arc::clone(context),
            // Without a cache, every process compiles again.
            cache: cache_dir.and_then(|folder| Cache::open(&folder.join("kernels")).ok()),
            origin,
            modules: Default::default(),
            wgmma: OnceLock::new(),
            custom: Mutex::default(),
        })
    }

    /// Whether the kernels of gemm_wgmma.cu should run: they need Hopper's own instructions, which PTX for later devices
    /// has not.
    pub(crate) fn expects_wgmma(&self) -> bool {
        self.context.compute_capability == (9, 0) && self.origin != KernelOrigin::Ptx
    }

    /// Whether they do run: a driver that does not take the machine code has only the PTX. Loads them.
    pub(crate) fn has_wgmma(&self) -> bool {
        let loads = || self.function(KernelFile::GemmWgmma, c"k_gemm_bf16_wgmma").is_ok();
        self.expects_wgmma() && *self.wgmma.get_or_init(loads)
    }

    /// A kernel by name; its file is loaded at its first use.
    pub(crate) fn function(&self, file: KernelFile, name: &CStr) -> Result<Function, BackendError> {
        self.context.bind()?;
        let module = self.module(file)?;
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

    /// The kernel of a custom operation, compiled and loaded at its first use.
    pub(crate) fn custom(&self, code: &CustomCode) -> Result<Function, BackendError> {
        self.context.bind()?;
        let mut modules = self.custom.lock().unwrap_or_else(PoisonError::into_inner);
        let module = match modules.entry(code.key()) {
            Entry::Occupied(loaded) => loaded.get().0,
            Entry::Vacant(slot) => slot.insert(Module(self.load_custom(code)?)).0,
        };
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded and stays so; the name ends with a zero; writes one handle.
        let found = unsafe { sys::cuModuleGetFunction(&mut function, module, code.entry().as_ptr()) };
        if found != sys::CUresult::CUDA_SUCCESS {
            let log = format!("the driver finds no kernel {:?} in it ({found:?})", code.entry());
            return Err(self.failed(Error::CustomCode { log }.to_string()));
        }
        Ok(Function(function))
    }

    fn load_custom(&self, code: &CustomCode) -> Result<sys::CUmodule, BackendError> {
        match code.text() {
            KernelText::Source(source) => {
                let architecture = compiler::architecture(self.context.compute_capability);
                let image = compiler::compile_custom(source, &architecture);
                self.load_image(&image.map_err(|error| self.failed(error.to_string()))?)
            }
            KernelText::Ptx(ptx) => {
                let mut module = std::ptr::null_mut();
                // SAFETY: the text ends with a zero; the driver copies what it needs.
                let loaded = unsafe { sys::cuModuleLoadData(&mut module, ptx.as_ptr().cast()) };
                if loaded != sys::CUresult::CUDA_SUCCESS {
                    let log = format!("the driver does not take the PTX ({loaded:?})");
                    return Err(self.failed(Error::CustomCode { log }.to_string()));
                }
                Ok(module)
            }
        }
    }

    /// Compiles those of these files that are not loaded and not shipped as machine code, all at once. An error shows
    /// when a kernel of the file is used.
    pub(crate) fn prepare(&self, files: &[KernelFile]) {
        let missing: Vec<KernelFile> =
            files.iter().copied().filter(|file| self.must_compile(*file)).collect();
        if missing.len() < 2 {
            return;
        }
        progress::expect(missing.len());
        std::thread::scope(|scope| {
            for file in missing {
                scope.spawn(move || {
                    let _ = self.context.bind().and_then(|()| self.module(file));
                });
            }
        });
    }

    fn must_compile(&self, file: KernelFile) -> bool {
        let target = Target::of(self.context.compute_capability);
        let shipped = self.origin == KernelOrigin::Shipped && matches!(target, Target::Machine(_));
        if shipped && images::has_current(file, target) {
            return false;
        }
        let loaded =
            |slot: &Mutex<Option<Module>>| slot.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        !self.modules.get(file as usize).is_some_and(loaded)
            && match self.code(file) {
                Ok(Code::Machine(_)) | Err(_) => false,
                Ok(code @ (Code::Ptx(_) | Code::Source)) => self.cached(file, &code).is_none(),
            }
    }

    fn module(&self, file: KernelFile) -> Result<sys::CUmodule, BackendError> {
        let slot = self.modules.get(file as usize);
        let slot = slot.ok_or_else(|| self.failed("no such kernel file".into()))?;
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = &*slot {
            return Ok(module.0);
        }
        let module = self.load(file)?;
        Ok(slot.insert(Module(module)).0)
    }

    fn failed(&self, reason: String) -> BackendError {
        BackendError::Failed { backend: self.context.name.clone(), what: "loading kernels", reason }
    }

    /// Where a file's code comes from on this device.
    fn code(&self, file: KernelFile) -> Result<Code, Error> {
        let device = self.context.compute_capability;
        let target = match self.origin {
            KernelOrigin::Shipped => Some(Target::of(device)),
            KernelOrigin::Ptx => Target::ptx_for(device),
            KernelOrigin::Compiled => None,
        };
        match target.map(|target| (target, images::image(file, target))) {
            Some((Target::Machine(_), Some(image))) => Ok(Code::Machine(image)),
            Some((Target::Ptx(_), Some(image))) => Ok(Code::Ptx(image)),
            _ if compiler::has_nvrtc() => Ok(Code::Source),
            _ => Err(Error::NoCompiler),
        }
    }

    /// The name of a file's compiled code in the cache. It does not depend on the driver: a later one loads it, too.
    fn cache_name(&self, file: KernelFile, code: &Code) -> String {
        let (major, minor) = self.context.compute_capability;
        let key = match code {
            Code::Source => file.hash(&compiler::architecture((major, minor)), &compiler::nvrtc_version()),
            Code::Machine(_) | Code::Ptx(_) => file.hash(&format!("sm_{major}{minor}"), "driver"),
        };
        format!("{}.{key}", file.name())
    }

    fn cached(&self, file: KernelFile, code: &Code) -> Option<Vec<u8>> {
        self.cache.as_ref()?.read(&self.cache_name(file, code))
    }

    fn load(&self, file: KernelFile) -> Result<sys::CUmodule, BackendError> {
        let failed = |error: Error| self.failed(error.to_string());
        let code = self.code(file).map_err(failed)?;
        if let Code::Machine(image) = &code {
            match (self.load_image(image), Target::ptx_for(self.context.compute_capability)) {
                (Ok(module), _) => return Ok(module),
                // A driver that does not take this machine code compiles the PTX.
                (Err(error), Some(ptx)) => match images::image(file, ptx) {
                    Some(ptx) => return self.compile_and_load(file, Code::Ptx(ptx)),
                    None => return Err(error),
                },
                (Err(error), None) => return Err(error),
            }
        }
        self.compile_and_load(file, code)
    }

    /// Loads a file's compiled code from the cache, or compiles it and keeps it there.
    fn compile_and_load(&self, file: KernelFile, code: Code) -> Result<sys::CUmodule, BackendError> {
        // A cached image that the driver does not take is compiled again and replaced.
        if let Some(image) = self.cached(file, &code)
            && let Ok(module) = self.load_image(&image)
        {
            return Ok(module);
        }
        let name = self.cache_name(file, &code);
        let compiled = progress::report(file.name(), || match code {
            Code::Machine(image) => Ok(image),
            Code::Ptx(ptx) => compiler::compile_ptx(file, ptx),
            Code::Source => compiler::compile(file, &compiler::architecture(self.context.compute_capability)),
        });
        let image = compiled.map_err(|error| self.failed(error.to_string()))?;
        let module = self.load_image(&image)?;
        if let Some(cache) = &self.cache {
            // Without the cached file, the next process compiles again.
            let _ = cache.write(&name, &image);
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
            for module in self.custom.get_mut().unwrap_or_else(PoisonError::into_inner).values() {
                // SAFETY: as below.
                let _ = unsafe { sys::cuModuleUnload(module.0) };
            }
            for slot in &mut self.modules {
                if let Some(module) = slot.get_mut().unwrap_or_else(PoisonError::into_inner) {
                    // SAFETY: loaded by `load`, unloaded only here; programs hold an `Arc` of the backend's parts.
                    let _ = unsafe { sys::cuModuleUnload(module.0) };
                }
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

// PyPI has NVRTC for these systems.
#[cfg(test)]
#[cfg(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu"))]
mod nvrtc_tests;

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The names of all kernels that this crate launches, from its source text.
    pub(super) fn launched() -> Vec<String> {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let folders = [source.join("lower"), source];
        let files = folders
            .iter()
            .flat_map(|folder| fs::read_dir(folder).unwrap())
            .map(|entry| entry.unwrap().path());
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
}
