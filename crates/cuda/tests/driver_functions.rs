//! The functions of the driver that this crate calls: all of them are in driver 525, the oldest that is taken (CUDA 12.0).
//! The bindings are those of CUDA 13, and look a function up when it is first called, so that a newer one would fail only then, and
//! only with an older driver.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::BTreeSet;
use std::path::Path;

/// Reviewed: each is in the header `cuda.h` of CUDA 12.0, under this name.
const IN_CUDA_12_0: &[&str] = &[
    "cuCtxCreate_v2",
    "cuCtxDestroy_v2",
    "cuCtxEnablePeerAccess",
    "cuCtxGetStreamPriorityRange",
    "cuCtxSetCurrent",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernelEx",
    "cuLinkAddData_v2",
    "cuLinkComplete",
    "cuLinkCreate_v2",
    "cuLinkDestroy",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyHtoD_v2",
    "cuMemcpyPeerAsync",
    "cuMemsetD8_v2",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
];

/// The driver's functions that a line names in code, or looks up by a byte string. Those in other texts are what errors say.
fn functions(line: &str) -> Vec<&str> {
    let code = line.split("//").next().unwrap_or_default();
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for (at, _) in code.match_indices("cu") {
        let (before, rest) = code.split_at(at);
        let name = rest.split(|c| !is_word(c)).next().unwrap_or_default();
        let is_function = name.as_bytes().get(2).is_some_and(u8::is_ascii_uppercase);
        let is_text = before.ends_with('"') && !before.ends_with("b\"") && !before.ends_with("c\"");
        if is_function && !is_text && !before.ends_with(is_word) {
            found.push(name);
        }
    }
    found
}

/// Adds the functions in all sources of a folder.
fn collect(folder: &Path, into: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let words = text.lines().flat_map(functions).filter(|name| !name.starts_with("cuBLAS"));
            into.extend(words.map(str::to_owned));
        }
    }
}

#[test]
fn functions_are_found_in_code_and_look_ups_and_not_in_texts() {
    for (line, expected) in [
        ("let code = unsafe { sys::cuEventRecord(event, stream) };", vec!["cuEventRecord"]),
        ("use sys::{cuInit, cuEventElapsedTime_v2};", vec!["cuInit", "cuEventElapsedTime_v2"]),
        ("sys::culib().get::<Create>(b\"cuCtxCreate_v4\\0\")", vec!["cuCtxCreate_v4"]),
        ("context.check(\"cuMemAlloc\", code)?; // cuMemAlloc", vec![]),
        ("let cu = accumulate(recuA); cublas::cublasCreate_v2(); cudarc::CUresult", vec![]),
    ] {
        assert_eq!(functions(line), expected, "{line}");
    }
}

#[test]
fn all_functions_of_the_driver_are_those_of_cuda_12_0() {
    let mut called = BTreeSet::new();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut called);
    let reviewed: BTreeSet<String> = IN_CUDA_12_0.iter().map(|name| (*name).to_owned()).collect();
    let newer: Vec<_> = called.difference(&reviewed).collect();
    assert!(newer.is_empty(), "is this in cuda.h of CUDA 12.0? then add it to the list: {newer:?}");
    let unused: Vec<_> = reviewed.difference(&called).collect();
    assert!(unused.is_empty(), "no longer called: {unused:?}");
}
