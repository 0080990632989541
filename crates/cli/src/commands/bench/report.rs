//! The results of `quadriga bench` as a table, Markdown, CSV or JSON.

use std::io::Write;

use quadriga_view::format::plural;
use serde_json::{Value, json};

use super::subject::{Test, TestKind};
use crate::failure::Outcome;
use crate::{size, terminal};

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum ReportFormat {
    /// A table for a terminal
    Table,
    /// A Markdown table
    Md,
    /// Comma-separated values
    Csv,
    /// A JSON object, or an array of them for lists of values
    Json,
}

/// The results of one way to run the model.
pub(super) struct Report {
    pub(super) tests: Vec<Test>,
    pub(super) gpu_layers: String,
    pub(super) model: ModelFacts,
    /// What else is in the JSON objects.
    pub(super) facts: Value,
    pub(super) load_seconds: f64,
    pub(super) threads: usize,
    pub(super) isa: String,
    pub(super) devices: Vec<String>,
}

/// The model that was measured.
pub(super) struct ModelFacts {
    pub(super) title: String,
    pub(super) bytes: u64,
}

/// Prints the results; `header` adds the model and its devices to the table. With `lists`, JSON is an array of one object
/// for each test.
pub(super) fn print(
    reports: &[Report],
    format: ReportFormat,
    header: bool,
    lists: bool,
    out: &mut dyn Write,
) -> Outcome {
    match format {
        ReportFormat::Table => table(reports, header, out),
        ReportFormat::Md => markdown(reports, out),
        ReportFormat::Csv => csv(reports, out),
        ReportFormat::Json => json(reports, lists, out),
    }
}

fn table(reports: &[Report], header: bool, out: &mut dyn Write) -> Outcome {
    for (number, report) in reports.iter().enumerate() {
        if number > 0 {
            writeln!(out)?;
        }
        if header {
            let (name, threads) = (&report.model.title, plural(report.threads, "thread", "threads"));
            let layers =
                if reports.len() > 1 { format!(", -ngl {}", report.gpu_layers) } else { String::new() };
            writeln!(out, "model    {} ({})", terminal::escaped(name), size::text(report.model.bytes))?;
            writeln!(out, "devices  {} ({threads}, {}{layers})", report.devices.join(", "), report.isa)?;
            writeln!(out, "load     {:.2} s\n", report.load_seconds)?;
        }
        writeln!(out, "{:14} {:>10} {:>8}", "test", "tok/s", "spread")?;
        for test in &report.tests {
            let (title, speed) = (test.title(), test.samples.median());
            writeln!(out, "{title:14} {speed:>10.2} {:>8}", spread(test))?;
        }
    }
    Ok(())
}

/// The columns of Markdown and CSV.
const COLUMNS: [&str; 8] = ["model", "size", "devices", "threads", "ngl", "test", "tok/s", "spread"];

fn row(report: &Report, test: &Test) -> [String; 8] {
    [
        report.model.title.clone(),
        size::text(report.model.bytes),
        report.devices.join("+"),
        report.threads.to_string(),
        report.gpu_layers.clone(),
        test.title(),
        format!("{:.2}", test.samples.median()),
        spread(test),
    ]
}

fn rows(reports: &[Report]) -> impl Iterator<Item = [String; 8]> {
    reports.iter().flat_map(|report| report.tests.iter().map(|test| row(report, test)))
}

fn markdown(reports: &[Report], out: &mut dyn Write) -> Outcome {
    writeln!(out, "| {} |", COLUMNS.join(" | "))?;
    writeln!(out, "|{}", "---|".repeat(COLUMNS.len()))?;
    for row in rows(reports) {
        writeln!(out, "| {} |", terminal::escaped(&row.join(" | ")))?;
    }
    Ok(())
}

fn csv(reports: &[Report], out: &mut dyn Write) -> Outcome {
    writeln!(out, "{}", COLUMNS.join(","))?;
    for row in rows(reports) {
        let quoted = row.map(|cell| format!("\"{}\"", cell.replace('"', "\"\"")));
        writeln!(out, "{}", terminal::escaped(&quoted.join(",")))?;
    }
    Ok(())
}

fn json(reports: &[Report], lists: bool, out: &mut dyn Write) -> Outcome {
    let object = |report: &Report, tests: &[&Test]| {
        let mut object = report.facts.clone();
        let find = |kind| tests.iter().find(|test| test.kind == kind).map(|test| test.samples.json());
        let depth = tests.first().map_or(0, |test| test.depth);
        for (key, value) in [
            ("pp", find(TestKind::Prompt).unwrap_or_default()),
            ("tg", find(TestKind::Generation).unwrap_or_default()),
            ("depth", json!(depth)),
            ("gpu_layers", json!(report.gpu_layers)),
        ] {
            if let Some(object) = object.as_object_mut() {
                object.insert(key.to_owned(), value);
            }
        }
        object
    };
    let printed = match reports {
        [report] if !lists => object(report, &report.tests.iter().collect::<Vec<_>>()),
        _ => reports
            .iter()
            .flat_map(|report| report.tests.iter().map(|test| object(report, &[test])))
            .collect::<Vec<_>>()
            .into(),
    };
    Ok(writeln!(out, "{}", terminal::json(&printed))?)
}

fn spread(test: &Test) -> String {
    test.samples.spread().map_or_else(|| "-".to_owned(), |spread| format!("{:.1} %", spread * 100.0))
}
