//! Runs the suite, or the cases whose names contain a text, on the oracle with rounding, and prints the totals.
//!
//! `cargo run --release -p quadriga-conformance --example suite [-- TEXT]`

use quadriga_conformance::{RoundingOracle, Suite, run_cases};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let text = std::env::args().nth(1).unwrap_or_default();
    let suite = Suite::new();
    let chosen = (0..suite.len()).filter(|i| suite.name(*i).is_some_and(|name| name.contains(&text)));
    let report = run_cases(chosen.filter_map(|i| suite.case(i)), &mut RoundingOracle);
    println!("{report}");
    if report.is_clean() { Ok(()) } else { Err("some cases failed".into()) }
}
