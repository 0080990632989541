//! Each kind of mutant over a small source: its name, and a schema that compiles and behaves as the mutant says.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

use crate::mutate::{Found, find};
use crate::render::{Numbered, Schema, render};

const SOURCE: &str = r#"
#[derive(Clone, Debug, PartialEq)]
struct Shape { rows: usize, columns: usize }
impl Shape {
    fn cells(&self) -> usize { self.rows * self.columns }
}
impl Iterator for Shape {
    type Item = usize;
    fn next(&mut self) -> Option<usize> { self.rows -= 1; Some(self.rows) }
}
const LIMIT: usize = 2 + 3;
const fn twice(x: usize) -> usize { x + x }
fn nested(a: i32, b: i32, c: i32) -> bool { !(a + b * c > 7) && a != -b }
fn arm(x: Option<usize>) -> &'static str {
    match x {
        None => "none",
        Some(n) if n > LIMIT || n == 1 => "guarded",
        _ => "rest",
    }
}
fn base(shape: &Shape) -> Shape { Shape { rows: 1, ..shape.clone() } }
fn chain(x: Option<usize>) -> bool { if let Some(n) = x && n > 2 { true } else { false } }
fn lengths() -> [u8; 2 + 1] { [0; 1 + 2] }
fn text(x: &str) -> String { x.to_string() + "!" }
fn uncalled(x: i32) -> i32 { x + 1 }
unsafe fn left_alone(x: i32) -> i32 { x + 1 }
#[cfg(test)]
mod tests { fn f(x: i32) -> i32 { x + 1 } }
"#;

fn found() -> Found {
    find("src/x.rs", SOURCE).expect("the source is valid")
}

fn numbered(found: Found) -> Vec<Numbered> {
    let mut first = 0;
    let number = |site: crate::mutate::Site| {
        first += site.mutants.len();
        Numbered { first: first - site.mutants.len(), site }
    };
    found.sites.into_iter().map(number).collect()
}

fn names(sites: &[Numbered]) -> Vec<String> {
    sites.iter().flat_map(|site| site.site.mutants.iter().map(|(mutant, _)| mutant.name.clone())).collect()
}

fn id(names: &[String], what: &str) -> usize {
    names
        .iter()
        .position(|name| name.contains(what))
        .unwrap_or_else(|| panic!("no mutant \"{what}\" in {names:#?}"))
}

#[test]
fn every_kind_has_the_name_cargo_mutants_gives_it() {
    let names = names(&numbered(found()));
    for name in [
        "src/x.rs:5:32: replace Shape::cells -> usize with 0",
        "src/x.rs:5:42: replace * with + in Shape::cells",
        ": replace <impl Iterator for Shape>::next -> Option<usize> with Some(1)",
        ": replace -= with /= in <impl Iterator for Shape>::next",
        ": replace > with >= in nested",
        ": delete ! in nested",
        ": delete - in nested",
        ": delete match arm None in arm",
        ": delete match arm Some(n) in arm",
        ": replace match guard n > LIMIT || n == 1 with false in arm",
        ": delete field rows from struct Shape expression in base",
        ": replace text -> String with \"xyzzy\".into()",
        ": replace arm -> &'static str with \"\"",
    ] {
        id(&names, name);
    }
}

#[test]
fn constants_tests_and_unsafe_functions_have_none() {
    let found = found();
    // `2 + 3`, the two values and the sum of `twice`, and `1 + 2`; types are not counted.
    assert_eq!(found.constant, 2 + 4 + 2);
    let names = names(&numbered(found));
    assert!(!names.iter().any(|name| name.contains("left_alone")
        || name.contains("in f")
        || name.contains("&& with || in chain")));
}

/// The schema as a program that prints what the functions return, compiled with rustc.
fn program(schema: &Schema, count: usize, folder: &Path) -> Result<(), String> {
    let main = r#"
mod __mutants;
fn main() {
    let shape = Shape { rows: 3, columns: 4 };
    println!("cells {}", shape.cells());
    println!("next {:?}", shape.clone().next());
    println!("nested {} {}", nested(1, 2, 3), nested(1, 2, 4));
    println!("arm {} {} {}", arm(None), arm(Some(1)), arm(Some(2)));
    println!("base {:?}", base(&shape));
    println!("chain {} {:?} {}", chain(Some(3)), lengths(), text("a"));
}
"#;
    fs::write(
        folder.join("__mutants.rs"),
        include_str!("runtime.rs.in").replace("COUNT", &count.to_string()),
    )
    .map_err(|e| e.to_string())?;
    fs::write(folder.join("main.rs"), format!("{}{main}", schema.text)).map_err(|e| e.to_string())?;
    let arguments = ["--edition=2024", "-Awarnings", "--error-format=json", "-o", "program", "main.rs"];
    let output =
        Command::new("rustc").args(arguments).current_dir(folder).output().map_err(|e| e.to_string())?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

fn output(folder: &Path, variable: (&str, &str)) -> String {
    let output =
        Command::new(folder.join("program")).env(variable.0, variable.1).output().expect("the program runs");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn one_program_is_every_mutant() {
    let folder = env::temp_dir().join(format!("mutants-test-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let found = found();
    let functions = found.functions.clone();
    let sites = numbered(found);
    let names = names(&sites);

    // Strings cannot be subtracted or multiplied: those two, and no others, are at fault.
    let mut dropped = BTreeSet::new();
    for _ in 0..3 {
        let schema = render(SOURCE, &sites, &functions, None, &|id| dropped.contains(&id));
        let Err(errors) = program(&schema, names.len(), &folder) else { break };
        for line in errors.lines() {
            let error: serde_json::Value = serde_json::from_str(line).expect("JSON");
            let span = &error["spans"][0];
            if let (Some(start), Some(end)) = (span["byte_start"].as_u64(), span["byte_end"].as_u64()) {
                let place = start as usize..end as usize;
                dropped.extend(schema.at_fault(std::slice::from_ref(&place), false));
            }
        }
    }
    let invalid: Vec<&str> =
        dropped.iter().map(|id| names[*id].split_once(": ").map_or("", |(_, what)| what)).collect();
    assert_eq!(
        invalid,
        [
            "replace base -> Shape with Default::default()",
            "replace + with - in text",
            "replace + with * in text"
        ]
    );

    let original = "cells 12\nnext Some(2)\nnested true false\narm none guarded rest\n\
                    base Shape { rows: 1, columns: 4 }\nchain true [0, 0, 0] a!\n";
    assert_eq!(output(&folder, ("OTHER", "")), original);
    for (what, line) in [
        ("replace * with + in Shape::cells", "cells 7\n"),
        ("<impl Iterator for Shape>::next -> Option<usize> with None", "next None\n"),
        ("replace -= with += in", "next Some(4)\n"),
        ("delete ! in nested", "nested false true\n"),
        ("replace + with - in nested", "nested true true\n"),
        ("delete match arm None in arm", "arm rest guarded rest\n"),
        ("delete match arm Some(n) in arm", "arm none rest rest\n"),
        ("match guard n > LIMIT || n == 1 with true", "arm none guarded guarded\n"),
        ("delete field rows", "base Shape { rows: 3, columns: 4 }\n"),
        ("replace > with < in chain", "chain false [0, 0, 0] a!\n"),
        ("replace lengths -> [u8; 2 + 1] with [1; 2 + 1]", "chain true [1, 1, 1] a!\n"),
        ("replace text -> String with String::new()", "chain true [0, 0, 0] \n"),
    ] {
        let changed = output(&folder, ("QUADRIGA_MUTANT", &id(&names, what).to_string()));
        let word = line.split(' ').next().unwrap_or_default();
        let expected: String = original
            .split_inclusive('\n')
            .map(|old| if old.starts_with(word) { line } else { old })
            .collect();
        assert_eq!(changed, expected, "{what}");
    }

    let record = folder.join("reached");
    assert_eq!(output(&folder, ("QUADRIGA_MUTANT_RECORD", &record.to_string_lossy())), original);
    let reached = fs::read(&record).expect("a recording");
    assert_eq!(reached[id(&names, "replace * with + in Shape::cells")], 1);
    assert_eq!(reached.get(id(&names, "replace + with - in uncalled")).copied().unwrap_or(0), 0);
    fs::remove_dir_all(&folder).expect("the folder is removed");
}
