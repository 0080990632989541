//! Runs the conformance suite on a CUDA device: `conformance [ordinal] [cases] [share]`. `cases` is a number of random
//! ones, the names of operations with commas between them, or `all`; a `share` like `2/8` is the part of them that one of
//! eight processes runs. Where there is no such device it says so and fails.
use std::process::ExitCode;

use quadriga_conformance::{BackendTarget, Suite, run_cases};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let ordinal = arguments.first().and_then(|a| a.parse().ok()).unwrap_or(0);
    let backend = match quadriga_cuda::Backend::new(ordinal) {
        Ok(backend) => backend,
        Err(error) => {
            eprintln!("no device to check: {error}");
            return ExitCode::FAILURE;
        }
    };
    let suite = Suite::new();
    let wanted = arguments.get(1).map_or("all", String::as_str);
    let chosen: Vec<usize> = match wanted.parse() {
        Ok(count) => suite.sample(count, 1),
        Err(_) => (0..suite.len()).filter(|case| is_of(&suite, *case, wanted)).collect(),
    };
    let share = arguments.get(2).and_then(|share| share.split_once('/'));
    let (part, parts) =
        share.and_then(|(part, parts)| Some((part.parse().ok()?, parts.parse().ok()?))).unwrap_or((0, 1));
    let ours = chosen.into_iter().enumerate().filter(|(at, _)| at % parts == part % parts);
    let cases = ours.filter_map(|(_, case)| suite.case(case));
    let report = run_cases(cases, &mut BackendTarget::new(&backend));
    println!("{report}");
    if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether a case is one of these operations'.
fn is_of(suite: &Suite, case: usize, operations: &str) -> bool {
    operations == "all"
        || suite.operation(case).is_some_and(|operation| operations.split(',').any(|one| one == operation))
}
