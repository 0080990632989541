//! Runs the conformance suite on a CUDA device: `conformance [ordinal] [cases]`, all cases without a number.
//! Where there is no such device it says so and fails.
use std::process::ExitCode;

use quadriga_conformance::{BackendTarget, Suite, run_cases};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).map(|a| a.parse::<usize>().unwrap_or(0));
    let ordinal = arguments.next().unwrap_or(0) as u32;
    let backend = match quadriga_cuda::Backend::new(ordinal) {
        Ok(backend) => backend,
        Err(error) => {
            eprintln!("no device to check: {error}");
            return ExitCode::FAILURE;
        }
    };
    let suite = Suite::new();
    let chosen = match arguments.next() {
        Some(count) => suite.sample(count, 1),
        None => (0..suite.len()).collect(),
    };
    let cases = chosen.into_iter().filter_map(|i| suite.case(i));
    let report = run_cases(cases, &mut BackendTarget::new(&backend));
    println!("{report}");
    if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
