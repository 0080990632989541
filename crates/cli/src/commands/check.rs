//! `quadriga check`: runs the conformance suite on a device, by way of scheduler and session; then the default model, whose
//! exact results are known.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use indicatif::{ProgressBar, ProgressStyle};
use quadriga_conformance::{BackendTarget, Case, Outputs, Suite, Target, TargetError, run_cases};
use quadriga_llm::judge;
use quadriga_runtime::{Backend, RuntimeError, Scheduler, Session};

use crate::backends;
use crate::commands::{eval, faults};
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;

/// What to check.
#[derive(clap::Args)]
pub(crate) struct Check {
    /// The device: cpu, sim, cuda:0 …
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    device: String,
    /// Only cases whose names contain this text
    #[arg(value_name = "TEXT")]
    text: Option<String>,
    /// Only about so many cases, spread over all operations
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// Which cases a sample has
    #[arg(short, long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// On the backend alone, each tensor in guarded memory, instead of by way of scheduler and session
    #[arg(long)]
    guarded: bool,
    /// Instead of cases: what happens when the device's memory runs out, and when a CUDA device is lost
    #[arg(long)]
    faults: bool,
    /// Threads of the CPU [one for each core]
    #[arg(short, long, value_name = "N")]
    threads: Option<usize>,
    /// The default model's file, with whose exact results a check of all cases ends [fetched]
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// No model at the end
    #[arg(long)]
    no_model: bool,
}

/// Prints a table of operations, and fails if a case does.
pub(crate) fn check(arguments: &Check) -> Outcome {
    if arguments.faults {
        return faults::check(&arguments.device, arguments.threads);
    }
    let backend = backends::open_one(&arguments.device, arguments.threads)?;
    let suite = Suite::new();
    let mut chosen: Vec<usize> = match arguments.sample {
        Some(count) => suite.sample(count, arguments.seed),
        None => (0..suite.len()).collect(),
    };
    if let Some(text) = &arguments.text {
        chosen.retain(|case| suite.name(*case).is_some_and(|name| name.contains(text.as_str())));
    }
    if chosen.is_empty() {
        return Err(Failure::Usage("no case has such a name".into()));
    }
    let bar = ProgressBar::new(chosen.len() as u64);
    let style = ProgressStyle::with_template("checking [{wide_bar}] {pos}/{len} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let cases = chosen.iter().filter_map(|case| {
        bar.inc(1);
        suite.case(*case)
    });
    let report = if arguments.guarded {
        run_cases(cases, &mut BackendTarget::new(&*backend))
    } else {
        run_cases(cases, &mut Scheduled { backend: Arc::clone(&backend) })
    };
    bar.finish_and_clear();
    let mut out = io::stdout().lock();
    write!(out, "{report}")?;
    let whole = arguments.sample.is_none() && arguments.text.is_none() && !arguments.guarded;
    if report.is_clean() {
        return if whole && !arguments.no_model { exact_results(arguments, &mut out) } else { Ok(()) };
    }
    Err(Failure::Message(format!(
        "{} of {} cases failed on {}",
        report.failures.len(),
        chosen.len(),
        backend.name()
    )))
}

/// The default model's cases with known results, all layers on the device.
fn exact_results(arguments: &Check, out: &mut dyn Write) -> Outcome {
    let cases = judge::read_cases(judge::DEFAULT_MODEL_CASES)?;
    let model = ModelOptions::on(&arguments.device, arguments.threads, arguments.model.clone());
    let bar = ProgressBar::new(cases.len() as u64);
    let verdict = eval::compute(&model, &cases, &mut |_| {
        bar.inc(1);
        Ok(())
    })?;
    bar.finish_and_clear();
    let line = verdict.holds(true).map_err(Failure::Message)?;
    Ok(writeln!(out, "exact results of the default model: {line}")?)
}

/// A backend that is planned for and run as any user's graph is.
struct Scheduled {
    backend: Arc<dyn Backend>,
}

impl Target for Scheduled {
    fn name(&self) -> String {
        format!("{} ({})", self.backend.name(), self.backend.device().description)
    }

    fn run(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        self.compute(case).map_err(|error| match error {
            RuntimeError::NoBackendSupports { operation, refusals, .. } => {
                let reason = refusals.into_iter().next().map_or(operation, |(_, reason)| reason);
                TargetError::Unsupported(reason)
            }
            other => TargetError::Failed(other.to_string()),
        })
    }

    fn command(&self, case: &str) -> String {
        format!("quadriga check --device {} \"{case}\"", self.backend.name())
    }
}

impl Scheduled {
    fn compute(&self, case: &Case) -> Result<Outputs, RuntimeError> {
        let plan = Scheduler::new([Arc::clone(&self.backend)]).plan(&case.graph)?;
        let mut session: Session = plan.session()?;
        for (name, bytes) in &case.inputs {
            session.set(name, bytes)?;
        }
        session.run(&[])?;
        case.graph.outputs().iter().map(|(name, _)| session.read::<u8>(name)).collect()
    }
}
