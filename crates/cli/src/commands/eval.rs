//! `quadriga eval`: evaluates test cases, to be compared with exact results.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use quadriga_llm::evaluate::{CaseResult, evaluate};
use quadriga_llm::judge::{ExactCase, Judgement};

use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;

/// Arguments of `quadriga eval`.
#[derive(clap::Args)]
pub(crate) struct EvalArgs {
    /// File with one case per line as a JSON object, - for stdin
    cases: PathBuf,
    /// Compare with the exact results in the file; fail if they differ too much
    #[arg(long)]
    judge: bool,
    #[command(flatten)]
    model: ModelOptions,
}

/// Prints one JSON object per line.
pub(crate) fn eval(arguments: &EvalArgs) -> Outcome {
    let cases = read(&arguments.cases)?;
    let mut out = io::stdout().lock();
    let verdict = compute(&arguments.model, &cases, &mut |result| {
        serde_json::to_writer(&mut out, result)?;
        writeln!(out)?;
        Ok(out.flush()?)
    })?;
    if arguments.judge {
        let line = verdict.holds(cases.len() >= 20).map_err(Failure::Message)?;
        note!("quadriga: {line}");
    }
    Ok(())
}

/// Evaluates cases with a model, passes each result to `each`, and compares it with the exact one.
pub(crate) fn compute(
    model: &ModelOptions,
    cases: &[ExactCase],
    each: &mut dyn FnMut(&CaseResult) -> Outcome,
) -> Outcome<Judgement> {
    let options = model.engine()?;
    let prepared = model.prepare(&options)?;
    let (mut engine, _) = prepared.engine(options)?;
    let mut verdict = Judgement::default();
    for exact in cases {
        let result = evaluate(&mut engine, &exact.case)
            .map_err(|error| Failure::Message(format!("case \"{}\": {error}", exact.case.name)))?;
        verdict.add(exact, &result);
        each(&result)?;
    }
    Ok(verdict)
}

fn read(path: &Path) -> Outcome<Vec<ExactCase>> {
    let input: Box<dyn BufRead> = if path.as_os_str() == "-" {
        Box::new(io::stdin().lock())
    } else {
        Box::new(BufReader::new(File::open(path).map_err(|error| Failure::file("open", path, &error))?))
    };
    let mut cases = Vec::new();
    for (number, line) in (1..).zip(input.lines()) {
        let line = line.map_err(|error| Failure::file("read", path, &error))?;
        if !line.trim().is_empty() {
            let case = serde_json::from_str(&line).map_err(|error| {
                Failure::Message(format!("{}, line {number}: not a case: {error}", path.display()))
            })?;
            cases.push(case);
        }
    }
    Ok(cases)
}
