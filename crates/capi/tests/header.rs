//! What the header promises.
#![allow(clippy::expect_used, clippy::indexing_slicing, reason = "tests")]

use std::collections::BTreeSet;
use std::path::Path;

fn header() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/quadriga.h");
    std::fs::read_to_string(path).expect("the header")
}

/// The functions that the header declares.
fn functions(header: &str) -> Vec<(&str, bool)> {
    let mut found = Vec::new();
    let mut threads = false;
    for line in header.lines() {
        if let Some(comment) = line.strip_prefix("//") {
            threads |= comment.trim().starts_with("Threads:");
            continue;
        }
        let declared = line.split_once('(').map(|(before, _)| before);
        let name = declared.and_then(|before| before.rsplit([' ', '*']).next()).unwrap_or_default();
        let outside = !line.starts_with([' ', '#', '/', '}']) && !line.starts_with("typedef");
        if outside && name.starts_with("qd_") {
            found.push((name, threads));
        }
        threads = false;
    }
    found
}

#[test]
fn every_function_says_which_threads_may_call_it() {
    let header = header();
    let functions = functions(&header);
    assert!(functions.len() > 150, "only {} functions were found", functions.len());
    let silent: Vec<&str> = functions.iter().filter(|(_, threads)| !threads).map(|(name, _)| *name).collect();
    assert!(silent.is_empty(), "no threads: {silent:?}");
}

#[test]
fn every_exported_function_is_in_the_header() {
    let header = header();
    let declared: BTreeSet<&str> = functions(&header).into_iter().map(|(name, _)| name).collect();
    let mut exported = BTreeSet::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("the sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let source = std::fs::read_to_string(&path).expect("a source");
            let mut after = source.split("extern \"C\" fn qd_");
            after.next();
            for rest in after {
                let end = rest.find('(').expect("a parameter list");
                exported.insert(format!("qd_{}", &rest[..end]));
            }
        }
    }
    let exported: BTreeSet<&str> = exported.iter().map(String::as_str).collect();
    assert_eq!(exported, declared);
}

/// Whether a program calls a function with something else than NULL as its first argument.
fn calls(program: &str, name: &str) -> bool {
    program.match_indices(name).any(|(at, _)| {
        let begins = !program[..at].ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
        let after = &program[at + name.len()..];
        begins && after.starts_with('(') && !after.starts_with("(NULL")
    })
}

#[test]
fn programs_in_c_call_every_function() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut programs = String::new();
    for folder in [folder.join("examples"), folder.join("tests/c")] {
        for entry in std::fs::read_dir(folder).expect("the programs") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|extension| extension == "c" || extension == "cpp") {
                programs += &std::fs::read_to_string(&path).expect("a program");
            }
        }
    }
    let header = header();
    let functions = functions(&header);
    let idle: Vec<&str> =
        functions.iter().map(|(name, _)| *name).filter(|name| !calls(&programs, name)).collect();
    assert!(idle.is_empty(), "no C program of examples/ and tests/c calls {idle:?} with a handle");
}

#[test]
fn every_name_that_the_guide_for_ggml_has_is_in_the_header() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/from-ggml.md");
    let guide = std::fs::read_to_string(guide).expect("the guide");
    let header = header();
    let words = |text: &str| -> BTreeSet<String> {
        text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').map(str::to_owned).collect()
    };
    let known = words(&header);
    let named: BTreeSet<String> = words(&guide)
        .into_iter()
        .filter(|word| word.starts_with("qd_") || word.starts_with("QD_"))
        .filter(|word| word.trim_end_matches('_').len() > 2)
        .collect();
    assert!(named.len() > 50, "{named:?}");
    let unknown: Vec<&String> = named.iter().filter(|name| !known.contains(*name)).collect();
    assert!(unknown.is_empty(), "not in quadriga.h: {unknown:?}");
}

/// The functions of ggml-alloc.h, ggml-backend.h and ggml-backend-impl.h, by name.
const GGML_FUNCTIONS: &str = include_str!("ggml_functions.txt");

#[test]
fn every_function_of_ggml_has_a_row_in_the_guide() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/from-ggml.md");
    let guide = std::fs::read_to_string(guide).expect("the guide");
    // What is on the left of a row, as whole words.
    let rows = guide.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    let mapped: BTreeSet<&str> =
        rows.flat_map(|left| left.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')).collect();
    let absent: Vec<&str> = GGML_FUNCTIONS.lines().filter(|name| !mapped.contains(name)).collect();
    assert!(GGML_FUNCTIONS.lines().count() > 60);
    assert!(absent.is_empty(), "docs/from-ggml.md does not say what became of {absent:?}");
}
