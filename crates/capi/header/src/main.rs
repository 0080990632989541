//! Writes `include/quadriga.h` from the sources of the C library, or with `--check` compares it with them.
//!
//! It is a package of its own: cbindgen needs other features of crates that the workspace has, too.

use std::path::Path;
use std::process::ExitCode;

/// The modules, in the order in which their functions appear: text, then graphs, then what runs them.
const ORDER: &[&str] = &[
    "status",
    "version",
    "dtype",
    "tensor",
    "model",
    "request",
    "answer",
    "engine_params",
    "generator",
    "kv_cache",
    "service",
    "embedder",
    "backend",
    "buffer",
    "builder",
    "gguf",
    "ops_elementwise",
    "ops_matrix",
    "ops_attention",
    "ops_layout",
    "ops_conv",
    "custom",
    "graph",
    "scheduler",
    "plan",
    "session",
    "session_overlap",
    "session_state",
    "observe",
    "allocator",
    "own_backend",
    "conformance",
];

fn generated(root: &Path) -> Result<String, String> {
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml"))?;
    let mut builder = cbindgen::Builder::new().with_config(config);
    for module in ORDER {
        let folder = root.join("src").join(module).join("mod.rs");
        if !folder.exists() {
            builder = builder.with_src(root.join(format!("src/{module}.rs")));
            continue;
        }
        for part in modules(&folder)? {
            builder = builder.with_src(root.join(format!("src/{module}/{part}.rs")));
        }
    }
    let mut header = Vec::new();
    builder.generate().map_err(|error| error.to_string())?.write(&mut header);
    String::from_utf8(header).map_err(|error| error.to_string())
}

/// The public modules of a file.
fn modules(file: &Path) -> Result<Vec<String>, String> {
    let source = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let public = |line: &str| Some(line.strip_prefix("pub use ")?.strip_suffix("::*;")?.to_owned());
    Ok(source.lines().filter_map(public).collect())
}

fn run(check: bool) -> Result<(), String> {
    let root = &Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut ordered = ORDER.to_vec();
    ordered.sort_unstable();
    if ordered != modules(&root.join("src/lib.rs"))? {
        return Err("the modules of src/lib.rs and those listed here differ".to_owned());
    }
    let (path, header) = (root.join("include/quadriga.h"), generated(root)?);
    if !check {
        return std::fs::write(&path, header).map_err(|error| format!("{}: {error}", path.display()));
    }
    match std::fs::read_to_string(&path) {
        Ok(committed) if committed == header => Ok(()),
        _ => {
            Err("crates/capi/include/quadriga.h is not that of the sources: run scripts/c-header".to_owned())
        }
    }
}

fn main() -> ExitCode {
    match run(std::env::args().any(|argument| argument == "--check")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
