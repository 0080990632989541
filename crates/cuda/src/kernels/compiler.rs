//! Compilers: NVRTC from source, the driver from PTX. Both give machine code that a later driver loads, too.

use std::ffi::CString;

use cudarc::driver::sys::{self, CUresult};
use cudarc::nvrtc::sys as nvrtc;

use super::sources::KernelFile;
use crate::error::Error;

/// Whether NVRTC is installed.
pub(super) fn has_nvrtc() -> bool {
    // SAFETY: looks the library up and calls nothing in it.
    unsafe { nvrtc::is_culib_present() }
}

/// NVRTC's version.
pub(super) fn nvrtc_version() -> String {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is present; writes two integers.
    let _ = unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) };
    format!("{major}.{minor}")
}

/// NVRTC's name of the architecture of a device: with its own instructions on Hopper.
pub(super) fn architecture(compute_capability: (i32, i32)) -> String {
    match compute_capability {
        (9, 0) => "sm_90a".into(),
        (major, minor) => format!("sm_{major}{minor}"),
    }
}

/// Compiles a file with NVRTC.
pub(super) fn compile(file: KernelFile, architecture: &str) -> Result<Vec<u8>, Error> {
    let fail = |log: String| Error::Compile { file: file.name(), log };
    compile_text(file.name(), &file.text(), architecture, &file.options()).map_err(fail)
}

/// Compiles the source of a custom operation with NVRTC.
pub(super) fn compile_custom(source: &str, architecture: &str) -> Result<Vec<u8>, Error> {
    if !has_nvrtc() {
        return Err(Error::NoCompiler);
    }
    let compiled = compile_text("custom operation", source, architecture, &["--std=c++17"]);
    compiled.map_err(|log| Error::CustomCode { log })
}

/// Compiles a text with NVRTC; the error is its log.
fn compile_text(title: &str, source: &str, architecture: &str, options: &[&str]) -> Result<Vec<u8>, String> {
    let c_text = |text: &str| CString::new(text).map_err(|_| "a zero byte in the source".to_owned());
    let (source, title) = (c_text(source)?, c_text(title)?);
    let architecture = format!("--gpu-architecture={architecture}");
    let options = [architecture.as_str()].into_iter().chain(options.iter().copied());
    let options = options.map(c_text).collect::<Result<Vec<_>, _>>()?;
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
            return Err(format!("{created:?}"));
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
            if code == ok { Ok(image) } else { Err(format!("{code:?}")) }
        } else {
            let mut size = 0;
            let mut log = Vec::new();
            if nvrtc::nvrtcGetProgramLogSize(program, &mut size) == ok {
                log.resize(size, 0u8);
                let _ = nvrtc::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
            }
            Err(String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned())
        };
        let _ = nvrtc::nvrtcDestroyProgram(&mut program);
        result
    }
}

/// Compiles PTX with the driver, for the device whose context is current on this thread.
pub(super) fn compile_ptx(file: KernelFile, ptx: Vec<u8>) -> Result<Vec<u8>, Error> {
    let fail = |what: &str, code: CUresult| Error::Compile {
        file: file.name(),
        log: format!("{what} of the driver returned {code:?}"),
    };
    let text = CString::new(ptx)
        .map_err(|_| Error::Compile { file: file.name(), log: "a zero byte in the PTX".into() })?;
    let bytes = text.as_bytes_with_nul();
    let name = CString::new(file.name()).unwrap_or_default();
    let mut state = std::ptr::null_mut();
    // SAFETY: a context is current; text and name end with a zero and outlive the calls; the image belongs to the
    // state and is copied before that is destroyed, on every path.
    unsafe {
        let (no_options, no_values) = (std::ptr::null_mut(), std::ptr::null_mut());
        let created = sys::cuLinkCreate_v2(0, no_options, no_values, &mut state);
        if created != CUresult::CUDA_SUCCESS {
            return Err(fail("cuLinkCreate", created));
        }
        let added = sys::cuLinkAddData_v2(
            state,
            sys::CUjitInputType_enum::CU_JIT_INPUT_PTX,
            bytes.as_ptr().cast_mut().cast(),
            bytes.len(),
            name.as_ptr(),
            0,
            no_options,
            no_values,
        );
        let (mut image, mut size) = (std::ptr::null_mut(), 0);
        let result = if added != CUresult::CUDA_SUCCESS {
            Err(fail("cuLinkAddData", added))
        } else {
            match sys::cuLinkComplete(state, &mut image, &mut size) {
                CUresult::CUDA_SUCCESS => {
                    Ok(std::slice::from_raw_parts(image.cast::<u8>().cast_const(), size).to_vec())
                }
                code => Err(fail("cuLinkComplete", code)),
            }
        };
        let _ = sys::cuLinkDestroy(state);
        result
    }
}
