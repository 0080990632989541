//! Builds the tests of a scratch folder, and finds the mutants that do not compile.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::instrument::Package;
use crate::render::Schema;
use crate::{Outcome, fail};

/// A program with tests.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct TestProgram {
    /// Package and target, which name it across builds.
    pub name: String,
    pub executable: PathBuf,
    /// The folder of its package, where its tests run.
    pub folder: PathBuf,
}

/// More rounds than this would mean that errors are attributed to mutants that are not at fault.
const ROUNDS: usize = 12;

/// Writes the schemata and builds the tests of the packages `judges`, without the mutants that do not compile, which are
/// added to `dropped`.
pub fn build(
    package: &Package,
    source: &Path,
    scratch: &Path,
    judges: &[String],
    dropped: &mut BTreeSet<String>,
) -> Outcome<Vec<TestProgram>> {
    for round in 0..ROUNDS {
        let schemata = package.schemata(dropped);
        package.write(source, scratch, &schemata)?;
        let mut command = Command::new("cargo");
        command.args(["test", "--no-run", "--lib", "--bins", "--tests", "--message-format=json"]);
        judges.iter().for_each(|judge| _ = command.args(["-p", judge]));
        let output = command.current_dir(scratch).stderr(Stdio::inherit()).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let messages: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        if output.status.success() {
            return Ok(messages.iter().filter_map(test_program).collect());
        }
        let errors: Vec<&Value> = messages
            .iter()
            .map(|message| &message["message"])
            .filter(|error| error["level"] == "error")
            .collect();
        let mut faults = faults(package, &schemata, &errors, false);
        if faults.is_subset(dropped) {
            faults = self::faults(package, &schemata, &errors, true);
        }
        if faults.is_subset(dropped) {
            for error in &errors {
                eprintln!("{}", error["rendered"].as_str().unwrap_or_default());
            }
            return fail("the build fails, and no mutant is at fault");
        }
        eprintln!("round {round}: {} errors, {} mutants do not compile", errors.len(), faults.len());
        dropped.extend(faults);
    }
    fail("the build still fails after the last round")
}

fn test_program(message: &Value) -> Option<TestProgram> {
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_path_buf();
    let kind = message["target"]["kind"][0].as_str()?;
    let name =
        format!("{}/{kind}/{}", folder.file_name()?.to_string_lossy(), message["target"]["name"].as_str()?);
    Some(TestProgram { name, executable: message["executable"].as_str()?.into(), folder })
}

fn faults(
    package: &Package,
    schemata: &BTreeMap<String, Schema>,
    errors: &[&Value],
    desperate: bool,
) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for error in errors {
        let mut spans = Vec::new();
        collect_spans(error, &mut spans);
        let Some((file, _)) = spans.first() else { continue };
        let ranges: Vec<Range<usize>> =
            spans.iter().filter(|(other, _)| other == file).map(|(_, range)| range.clone()).collect();
        let Some(schema) = schemata.get(file) else { continue };
        let ids = schema.at_fault(&ranges, desperate);
        names.extend(ids.iter().filter_map(|id| package.mutants.get(*id)).map(|mutant| mutant.name.clone()));
    }
    names
}

/// The places of an error: primary ones, labels, then those of its notes. A place in a macro is the macro's call.
fn collect_spans(error: &Value, spans: &mut Vec<(String, Range<usize>)>) {
    let mut own: Vec<&Value> = error["spans"].as_array().into_iter().flatten().collect();
    own.sort_by_key(|span| span["is_primary"] != true);
    for mut span in own {
        while span["expansion"]["span"].is_object() {
            span = &span["expansion"]["span"];
        }
        let at = |key: &str| span[key].as_u64().unwrap_or(0) as usize;
        spans.push((
            span["file_name"].as_str().unwrap_or_default().to_string(),
            at("byte_start")..at("byte_end"),
        ));
    }
    for child in error["children"].as_array().into_iter().flatten() {
        collect_spans(child, spans);
    }
}
