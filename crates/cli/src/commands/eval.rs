//! `quadriga eval`: evaluates test cases, to be compared with exact results.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use quadriga_llm::EngineOptions;
use quadriga_llm::evaluate::{CaseResult, evaluate};
use quadriga_llm::judge::{ExactCase, Judgement};

use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::ranks;

/// Arguments of `quadriga eval`.
#[derive(clap::Args)]
#[command(after_help = CASE_FORMAT)]
pub(crate) struct EvalArgs {
    /// File with one case per line as a JSON object (see below), - for stdin
    cases: PathBuf,
    /// Compare with the exact results in the file; fail if they differ too much
    #[arg(long)]
    judge: bool,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
}

/// The format of cases, for the help text.
const CASE_FORMAT: &str = r#"Cases, one JSON object per line; "special" parses special tokens in the text [default: false]:
  {"name": "a", "kind": "tokenize", "text": "Hi!", "special": true}   tokens of the text
  {"name": "b", "kind": "greedy", "text": "Hi!", "n": 48}             greedy continuation, top 5 of each step
  {"name": "c", "kind": "next", "text": "The sky is"}                 top 5 of the next token
  {"name": "d", "kind": "nll", "text": "…", "ctx": 128}               negative log-likelihood, in chunks of ctx tokens
No beginning-of-text token is added: give it in the text, with "special".
Results have the same name and kind, one JSON object per line. With --judge, cases also have exact results under the
names that results have (tokens, top5, nll)."#;

/// Prints one JSON object per line.
pub(crate) fn eval(arguments: &EvalArgs) -> Outcome {
    // Only the first rank has files and standard input, and so knows the cases.
    let cases = if ranks::follows() { Vec::new() } else { read(&arguments.cases)? };
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
    let options = EngineOptions { output_rows: usize::MAX, ..model.engine() };
    let prepared = model.prepare(&options)?;
    let (mut engine, _) = prepared.engine()?;
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
    if cases.is_empty() {
        return Err(Failure::Usage(format!("{} has no cases; see `quadriga eval --help`", path.display())));
    }
    Ok(cases)
}
