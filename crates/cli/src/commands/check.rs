//! `quadriga check`: runs the conformance suite on a device, through scheduler and session, then compares the default
//! model with its exact results.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use indicatif::{ProgressBar, ProgressStyle};
use quadriga_conformance::{
    BackendTarget, CASE_GROUP, Case, Outputs, RankPart, Suite, Target, TargetError, on_rank_threads,
    run_cases,
};
use quadriga_graph::TensorKind;
use quadriga_llm::judge;
use quadriga_runtime::{Backend, RuntimeError, Scheduler, Session};
use quadriga_view::format::plural;

use crate::backends;
use crate::commands::{check_random, eval, faults};
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::similar::{nearest, normalized};
use crate::values;

/// Arguments of `quadriga check`.
#[derive(clap::Args)]
pub(crate) struct CheckArgs {
    /// Device: cpu, cuda:N or sim
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    device: String,
    /// Run only the cases of this operation, or those whose name contains this text; * stands for any text, as in '*add*'.
    /// Case, _ and - are ignored if nothing matches exactly
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
    /// Run N random cases of those that FILTER selects, spread over their operations
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::at_least_one)]
    sample: Option<usize>,
    /// Compute N random graphs in planned memory instead of running cases
    #[arg(long, value_name = "N", conflicts_with_all = ["sample", "filter", "guarded", "faults"], allow_negative_numbers = true, value_parser = values::at_least_one)]
    random: Option<usize>,
    /// Random seed of --sample and --random
    #[arg(short, long, value_name = "N", default_value_t = 1, allow_negative_numbers = true, value_parser = values::fixed_seed)]
    seed: u64,
    /// Run only part I of N, such as 2/8: all parts together are all cases, for several processes at once
    #[arg(long, value_name = "I/N", conflicts_with_all = ["random", "faults"], value_parser = part)]
    part: Option<(usize, usize)>,
    /// Run on the backend directly, each tensor in guarded memory, without scheduler and session
    #[arg(long)]
    guarded: bool,
    /// As --guarded, with results in the memory of inputs where the operation allows it
    #[arg(long)]
    in_place: bool,
    /// Test recovery from exhausted device memory and from a lost CUDA device instead of running cases
    #[arg(long)]
    faults: bool,
    /// Number of CPU threads [default: number of cores]
    #[arg(short, long, value_name = "N", allow_negative_numbers = true, value_parser = values::threads)]
    threads: Option<usize>,
    /// File of the default model, which a full check compares with exact results [default: downloaded]
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Skip the comparison of the default model
    #[arg(long)]
    no_model: bool,
    /// Folder of the default model and compiled kernels [default: QUADRIGA_CACHE, or the user's cache folder]
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
}

/// Prints a table of results by operation; fails if any case fails.
pub(crate) fn check(arguments: &CheckArgs) -> Outcome {
    if arguments.faults {
        return faults::check(&arguments.device, arguments.threads);
    }
    if let Some(count) = arguments.random {
        return check_random::check(&arguments.device, arguments.threads, count, arguments.seed);
    }
    let backend = backends::open_one(&arguments.device, arguments.threads)?;
    let suite = Suite::new();
    let mut selected: Vec<usize> = (0..suite.len()).collect();
    if let Some(filter) = &arguments.filter {
        selected = select(&suite, &selected, filter)?;
    }
    if let Some(count) = arguments.sample {
        selected = suite.sample_of(&selected, count, arguments.seed);
    }
    if let Some((number, parts)) = arguments.part {
        // In turn, so that parts are alike.
        selected = selected.into_iter().skip(number - 1).step_by(parts).collect();
    }
    let bar = ProgressBar::new(selected.len() as u64);
    let style = ProgressStyle::with_template("checking [{wide_bar}] {pos}/{len} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let cases = selected.iter().filter_map(|case| {
        bar.inc(1);
        suite.case(*case)
    });
    // Ranks wait for each other, so each has a backend of its own.
    let ranks = selected.iter().filter_map(|case| suite.ranks(*case)).max().unwrap_or(1);
    let others = open_ranks(&arguments.device, arguments.threads, ranks - 1)?;
    let guarded = || others.iter().map(|backend| &**backend);
    let report = if arguments.in_place {
        run_cases(cases, &mut BackendTarget::in_place(&*backend).with_ranks(guarded()))
    } else if arguments.guarded {
        run_cases(cases, &mut BackendTarget::new(&*backend).with_ranks(guarded()))
    } else {
        run_cases(cases, &mut ScheduledTarget::new(&backend, &others, arguments.threads)?)
    };
    bar.finish_and_clear();
    let mut out = io::stdout().lock();
    write!(out, "{report}")?;
    let full = arguments.sample.is_none()
        && arguments.filter.is_none()
        && arguments.part.is_none_or(|(number, _)| number == 1)
        && !arguments.guarded
        && !arguments.in_place;
    if report.is_clean() {
        return if full && !arguments.no_model { exact_results(arguments, &mut out) } else { Ok(()) };
    }
    Err(Failure::Message(format!(
        "{} of {} failed on {}",
        report.failures.len(),
        plural(selected.len(), "case", "cases"),
        backend.name()
    )))
}

/// A part of the cases: its number, from 1, and how many parts there are.
fn part(text: &str) -> Result<(usize, usize), String> {
    let numbers =
        text.split_once('/').and_then(|(number, parts)| Some((number.parse().ok()?, parts.parse().ok()?)));
    numbers
        .filter(|(number, parts)| (1..=*parts).contains(number))
        .ok_or_else(|| "a number and the number of parts are expected, such as 2/8".to_owned())
}

/// The cases that a filter selects: of the operation of this name, else those whose name contains it. In either, case and
/// separators count, unless nothing is found then. A filter with `*` is a pattern of the whole name.
fn select(suite: &Suite, cases: &[usize], filter: &str) -> Outcome<Vec<usize>> {
    let matching = |matches: &dyn Fn(&str) -> bool| -> Option<Vec<usize>> {
        let selected = cases.iter().copied().filter(|case| suite.name(*case).is_some_and(matches));
        Some(selected.collect()).filter(|selected: &Vec<usize>| !selected.is_empty())
    };
    let wanted = normalized(filter);
    let selected = if filter.contains('*') {
        matching(&|name| matches_pattern(name, filter))
            .or_else(|| matching(&|name| matches_pattern(&normalized(name), &wanted)))
    } else {
        matching(&|name| operation_of(name) == filter)
            .or_else(|| matching(&|name| normalized(operation_of(name)) == wanted))
            .or_else(|| matching(&|name| name.contains(filter)))
            .or_else(|| matching(&|name| normalized(name).contains(&wanted)))
    };
    selected.ok_or_else(|| {
        let names = cases.iter().filter_map(|case| suite.name(*case));
        let near = nearest(names.map(operation_of), filter);
        let advice = if near.is_empty() { String::new() } else { format!("; similar: {}", near.join(", ")) };
        Failure::Usage(format!("no case matches \"{filter}\"{advice}"))
    })
}

/// Whether a text is the parts of a pattern in order, with any text for each `*` between them.
fn matches_pattern(text: &str, pattern: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return text == pattern };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        match text.split_once(part) {
            Some((_, after)) => text = after,
            None => return false,
        }
    }
    text.ends_with(last)
}

/// The operation at the start of a case's name.
fn operation_of(name: &str) -> &str {
    name.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(name)
}

/// Compares the default model with its exact results, all layers on the device.
fn exact_results(arguments: &CheckArgs, out: &mut dyn Write) -> Outcome {
    let cases = judge::read_cases(judge::DEFAULT_MODEL_CASES)?;
    let CheckArgs { device, threads, model, cache_dir, .. } = arguments;
    let model = ModelOptions::on(device, *threads, model.clone(), cache_dir.clone());
    let bar = ProgressBar::new(cases.len() as u64);
    let verdict = eval::compute(&model, &cases, &mut |_| {
        bar.inc(1);
        Ok(())
    })?;
    bar.finish_and_clear();
    let line = verdict.holds(true).map_err(Failure::Message)?;
    Ok(writeln!(out, "default model against exact results: {line}")?)
}

/// The most threads of a rank: ranks of one machine compute at the same time.
const RANK_THREADS: usize = 2;

/// Opens a device as often as there are ranks after the first.
fn open_ranks(device: &str, threads: Option<usize>, count: usize) -> Outcome<Vec<Arc<dyn Backend>>> {
    let threads = threads.unwrap_or(RANK_THREADS).min(RANK_THREADS);
    (0..count).map(|_| backends::open_one(device, Some(threads))).collect()
}

/// Runs cases on a backend through scheduler and session, as users do.
struct ScheduledTarget {
    backend: Arc<dyn Backend>,
    /// The backends of each rank. A device that leaves collectives to the host has a CPU beside it.
    ranks: Vec<Vec<Arc<dyn Backend>>>,
}

impl Target for ScheduledTarget {
    fn name(&self) -> String {
        format!("{} ({})", self.backend.name(), self.backend.device().description)
    }

    fn run(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        let part = RankPart { graph: &case.graph, inputs: &case.inputs };
        compute(&Scheduler::new([Arc::clone(&self.backend)]), part).map_err(target_error)
    }

    fn run_ranks(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        on_rank_threads(case, |rank, part, group| {
            let backends = self.ranks.get(rank).cloned().unwrap_or_default();
            compute(&Scheduler::new(backends).ranks(CASE_GROUP, group), part).map_err(target_error)
        })
    }

    fn command(&self, case: &str) -> String {
        format!("quadriga check --device {} \"{case}\"", self.backend.name())
    }
}

impl ScheduledTarget {
    fn new(
        backend: &Arc<dyn Backend>,
        others: &[Arc<dyn Backend>],
        threads: Option<usize>,
    ) -> Outcome<ScheduledTarget> {
        let mut ranks = Vec::new();
        for device in std::iter::once(backend).chain(others) {
            let mut own = vec![Arc::clone(device)];
            if device.exchanges(None).is_err() {
                own.extend(open_ranks("cpu", threads, 1)?);
            }
            ranks.push(own);
        }
        Ok(ScheduledTarget { backend: Arc::clone(backend), ranks })
    }
}

fn compute(scheduler: &Scheduler, part: RankPart<'_>) -> Result<Outputs, RuntimeError> {
    let mut session: Session = scheduler.plan(part.graph)?.session()?;
    let is_state = |name: &str| {
        let leaf = part.graph.leaf(name).and_then(|leaf| part.graph.get(leaf));
        leaf.is_some_and(|tensor| tensor.kind() == TensorKind::State)
    };
    for (name, bytes) in part.inputs {
        if is_state(name) { session.write_state(name, bytes)? } else { session.set(name, bytes)? }
    }
    session.run(&[])?;
    part.graph.outputs().iter().map(|(name, _)| session.read::<u8>(name)).collect()
}

fn target_error(error: RuntimeError) -> TargetError {
    match error {
        RuntimeError::NoBackendSupports { operation, refusals, .. } => {
            let reason = refusals.into_iter().next().map_or(operation, |(_, reason)| reason);
            TargetError::Unsupported(reason)
        }
        other => TargetError::Failed(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_ignore_case_and_separators_only_if_needed() {
        let suite = Suite::new();
        let all: Vec<usize> = (0..suite.len()).collect();
        let select = |filter: &str| select(&suite, &all, filter);
        assert!(!select("softmax").unwrap().is_empty());
        for spelling in ["softmax", "SOFT-MAX"] {
            assert!(select(spelling).unwrap() == select("soft_max").unwrap(), "{spelling}");
        }
        let names = |filter: &str| -> Vec<&str> {
            select(filter).unwrap().into_iter().filter_map(|case| suite.name(case)).collect()
        };
        assert!(names("add").iter().all(|name| operation_of(name) == "add"), "{:?}", names("add"));
        assert!(names("*pad*").iter().any(|name| operation_of(name) != "pad"));
        assert_eq!(names("mul_mat"), names("Mul-Mat"));
        let Err(Failure::Usage(text)) = select("sofmax") else { panic!("no usage error") };
        assert!(text.contains("soft_max"), "{text}");
    }

    #[test]
    fn parts_have_numbers_from_one() {
        assert_eq!([part("1/1"), part("2/8"), part("8/8")], [Ok((1, 1)), Ok((2, 8)), Ok((8, 8))]);
        for wrong in ["", "1", "0/8", "9/8", "1/0", "-1/2", "1/2/3", "a/b"] {
            assert!(part(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn stars_stand_for_any_text() {
        for (text, pattern, matches) in [
            ("add f32", "add*", true),
            ("padding", "*add*", true),
            ("padding", "add*", false),
            ("add", "*", true),
            ("abcb", "*b", true),
            ("aba", "aba*aba", false),
            ("axbxc", "a*b*c", true),
            ("axcxb", "a*b*c", false),
            ("add", "add", true),
        ] {
            assert_eq!(matches_pattern(text, pattern), matches, "{text} {pattern}");
        }
    }
}
