//! Copies a workspace to a scratch folder, with a schema in place of each source file of one package.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use regex::RegexSet;
use serde::Deserialize;

use crate::mutate::{self, Mutant};
use crate::render::{self, Numbered, Schema};
use crate::{Outcome, fail};

/// Settings shared with cargo-mutants.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Settings {
    exclude_re: Vec<String>,
}

/// A source file of the package.
struct SourceFile {
    text: String,
    sites: Vec<Numbered>,
    functions: Vec<std::ops::Range<usize>>,
    /// Where the module that chooses mutants is declared, in the root of a crate.
    header: Option<usize>,
}

/// The mutants of a package.
pub struct Package {
    files: BTreeMap<String, SourceFile>,
    roots: Vec<PathBuf>,
    pub mutants: Vec<Mutant>,
    pub excluded: usize,
    pub constant: usize,
    pub macros: usize,
}

impl Package {
    /// Finds the mutants of `package` in the workspace `source`.
    pub fn read(source: &Path, package: &str) -> Outcome<Package> {
        let settings = match fs::read_to_string(source.join(".cargo/mutants.toml")) {
            Ok(text) => toml::from_str(&text)?,
            Err(_) => Settings::default(),
        };
        let excluded = RegexSet::new(&settings.exclude_re)?;
        let roots = crate_roots(source, package)?;
        let mut this = Package {
            files: BTreeMap::new(),
            roots,
            mutants: Vec::new(),
            excluded: 0,
            constant: 0,
            macros: 0,
        };
        let mut waiting: VecDeque<(PathBuf, bool)> =
            this.roots.iter().map(|path| (path.clone(), true)).collect();
        let mut seen = BTreeSet::new();
        while let Some((path, is_root)) = waiting.pop_front() {
            if !seen.insert(path.clone()) {
                continue;
            }
            let name = path.to_string_lossy().into_owned();
            let text = fs::read_to_string(source.join(&path))?;
            let found = mutate::find(&name, &text).map_err(|error| format!("{name}: {error}"))?;
            waiting.extend(
                module_files(source, &path, is_root, &found.modules).into_iter().map(|path| (path, false)),
            );
            let mut sites = Vec::new();
            for mut site in found.sites {
                let before = site.mutants.len();
                site.mutants.retain(|(mutant, _)| !excluded.is_match(&mutant.name));
                this.excluded += before - site.mutants.len();
                let first = this.mutants.len();
                this.mutants.extend(site.mutants.iter().map(|(mutant, _)| mutant.clone()));
                sites.push(Numbered { site, first });
            }
            this.constant += found.constant;
            this.macros += found.macros;
            let header = is_root.then_some(found.first_item);
            this.files.insert(name, SourceFile { text, sites, functions: found.functions, header });
        }
        Ok(this)
    }

    /// The schema of each file, by its path in the workspace.
    pub fn schemata(&self, dropped: &BTreeSet<String>) -> BTreeMap<String, Schema> {
        let is_dropped =
            |id: usize| self.mutants.get(id).is_some_and(|mutant| dropped.contains(&mutant.name));
        let schema = |(name, file): (&String, &SourceFile)| {
            let header = file.header.map(|at| (at, "#![allow(warnings)]\nmod __mutants;\n"));
            (name.clone(), render::render(&file.text, &file.sites, &file.functions, header, &is_dropped))
        };
        self.files.iter().map(schema).collect()
    }

    /// Makes `scratch` a copy of `source` with `schemata`. Files that are the same already keep their time, so that
    /// cargo builds no more than what changed.
    pub fn write(&self, source: &Path, scratch: &Path, schemata: &BTreeMap<String, Schema>) -> Outcome<()> {
        let listed = Command::new("git")
            .args(["ls-files", "-co", "--exclude-standard", "-z"])
            .current_dir(source)
            .output()?;
        if !listed.status.success() {
            return fail("git ls-files failed: the source is not a checkout");
        }
        let listed = String::from_utf8(listed.stdout)?;
        let names: BTreeSet<&str> = listed.split('\0').filter(|name| !name.is_empty()).collect();
        for name in &names {
            let from = source.join(name);
            match schemata.get(*name) {
                Some(schema) => update(&scratch.join(name), schema.text.as_bytes())?,
                None if from.is_symlink() || !from.is_file() => {}
                None => {
                    update(&scratch.join(name), &fs::read(&from)?)?;
                    fs::set_permissions(scratch.join(name), fs::metadata(&from)?.permissions())?;
                }
            }
        }
        // Files that are no longer in the source, as far as the last copy put them there.
        let list = scratch.join(".mutants/files");
        for old in fs::read_to_string(&list).unwrap_or_default().lines().filter(|old| !names.contains(old)) {
            let _ = fs::remove_file(scratch.join(old));
        }
        update(&list, names.into_iter().collect::<Vec<_>>().join("\n").as_bytes())?;
        let runtime = include_str!("runtime.rs.in").replace("COUNT", &self.mutants.len().max(1).to_string());
        for root in &self.roots {
            update(&scratch.join(root).with_file_name("__mutants.rs"), runtime.as_bytes())?;
        }
        Ok(())
    }
}

/// Writes a file unless it has these bytes.
pub fn update(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, bytes)
}

/// The roots of the package's library and programs, relative to the workspace.
fn crate_roots(source: &Path, package: &str) -> Outcome<Vec<PathBuf>> {
    let output = Command::new("cargo")
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(source)
        .output()?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let targets = packages
        .filter(|entry| entry["name"] == package)
        .flat_map(|entry| entry["targets"].as_array().into_iter().flatten());
    let code = targets.filter(|target| {
        target["kind"]
            .as_array()
            .into_iter()
            .flatten()
            .any(|kind| matches!(kind.as_str(), Some("lib" | "rlib" | "cdylib" | "bin")))
    });
    let base = fs::canonicalize(source)?;
    let paths = code.filter_map(|target| {
        Path::new(target["src_path"].as_str()?).strip_prefix(&base).ok().map(Path::to_path_buf)
    });
    let paths: Vec<PathBuf> = paths.collect();
    if paths.is_empty() { fail(&format!("no package {package} in {}", source.display())) } else { Ok(paths) }
}

/// The files of the modules that `path` declares.
fn module_files(
    source: &Path,
    path: &Path,
    is_root: bool,
    modules: &[(Vec<String>, Option<String>)],
) -> Vec<PathBuf> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let stem = path.file_stem().unwrap_or_default();
    let base = if is_root || stem == "mod" { folder.to_path_buf() } else { folder.join(stem) };
    let candidates = |(names, attribute): &(Vec<String>, Option<String>)| -> Vec<PathBuf> {
        match attribute {
            Some(file) => vec![normalized(&folder.join(file))],
            None => {
                let module =
                    names.iter().fold(base.clone(), |path, name| path.join(name.trim_start_matches("r#")));
                vec![module.with_extension("rs"), module.join("mod.rs")]
            }
        }
    };
    let files = modules
        .iter()
        .filter_map(|module| candidates(module).into_iter().find(|path| source.join(path).is_file()));
    files.collect()
}

fn normalized(path: &Path) -> PathBuf {
    let mut result = PathBuf::new();
    for part in path.components() {
        if part == Component::ParentDir {
            result.pop();
        } else {
            result.push(part);
        }
    }
    result
}
