//! Where the time of runs went: by backend, split and kind of operation, beside what the machine could do.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use quadriga_graph::{DType, Fingerprint, NodeId, Op};
use quadriga_runtime::{Backend, Cost, Plan, Trace};
use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::Limits;
use crate::words::{bytes, count, plural, seconds};

/// Time and work, added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Totals {
    /// How often it was done.
    pub count: u64,
    /// Seconds in all.
    pub seconds: f64,
    /// Arithmetic operations in all.
    pub operations: f64,
    /// Bytes read and written in all.
    pub traffic: f64,
    /// Seconds that the operations alone would take at the machine's limits.
    pub least_computing: f64,
    /// Seconds that moving the bytes alone would take at the machine's limits.
    pub least_moving: f64,
}

impl Totals {
    fn add(&mut self, seconds: f64, work: Work, limits: &Limits) {
        self.count += 1;
        self.seconds += seconds;
        self.operations += work.operations;
        self.traffic += work.traffic;
        self.least_computing += work.computing;
        self.least_moving += work.traffic / limits.read.max(1.0);
    }

    /// Bytes a second.
    pub fn bandwidth(&self) -> f64 {
        self.traffic / self.seconds.max(1e-12)
    }

    /// Operations a second.
    pub fn speed(&self) -> f64 {
        self.operations / self.seconds.max(1e-12)
    }
}

/// The work of some nodes.
#[derive(Clone, Copy, Default)]
struct Work {
    operations: f64,
    traffic: f64,
    /// Seconds at the limits of the backend.
    computing: f64,
}

/// What is known of a node.
struct NodeWork {
    cost: Cost,
    /// What its peak speed depends on.
    weights: DType,
    /// Whether only the visible part of the cache counts.
    attends: bool,
}

/// What a backend did.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct BackendTotals {
    name: String,
    compute: f64,
    copy: f64,
}

/// Where the time of runs went. Prints as tables; serialises as data.
#[derive(Serialize)]
pub struct Statistics {
    /// How many runs.
    pub runs: u64,
    /// Seconds of all runs.
    pub seconds: f64,
    backends: Vec<BackendTotals>,
    /// By name of the kind of run and number of the split.
    splits: BTreeMap<String, Totals>,
    /// By backend and operation.
    operations: BTreeMap<String, Totals>,
    copies: Totals,
    limits: Vec<Limits>,
    #[serde(skip)]
    known: FxHashMap<Fingerprint, Arc<Vec<NodeWork>>>,
}

impl Statistics {
    /// Nothing yet, on these backends; the limits of each, as far as they were measured.
    pub fn new(backends: &[Arc<dyn Backend>], measured: &[Limits]) -> Statistics {
        let limits: Vec<Limits> = backends.iter().map(|backend| Limits::of(&**backend, measured)).collect();
        let named = |l: &Limits| BackendTotals { name: l.backend.clone(), ..BackendTotals::default() };
        Statistics {
            runs: 0,
            seconds: 0.0,
            backends: limits.iter().map(named).collect(),
            splits: BTreeMap::new(),
            operations: BTreeMap::new(),
            copies: Totals::default(),
            limits,
            known: FxHashMap::default(),
        }
    }

    /// Adds a run of a kind, such as `prompt`. Of what attention can look at it saw a part only: `visible`, 0 to 1.
    pub fn add(&mut self, kind: &str, plan: &Plan, trace: &Trace, visible: f64) {
        self.runs += 1;
        self.seconds += trace.seconds;
        let known = self.nodes(plan);
        for (total, time) in self.backends.iter_mut().zip(&trace.backends) {
            total.compute += time.compute;
            total.copy += time.copy;
        }
        for split in &trace.splits {
            let Some(limits) = self.limits.get(split.backend) else { continue };
            let nodes = plan.splits().nodes_of(split.split).iter().map(|node| node.index());
            let work = work(&known, nodes, limits, visible);
            let name = format!("{kind}: split {} on {}", split.split, limits.backend);
            self.splits.entry(name).or_default().add(split.seconds, work, limits);
        }
        for operation in &trace.operations {
            let Some(limits) = self.limits.get(operation.backend) else { continue };
            let work = work(&known, operation.nodes.iter().copied(), limits, visible);
            let name = format!("{} on {}", operation.operation, limits.backend);
            self.operations.entry(name).or_default().add(operation.seconds, work, limits);
        }
        for copy in &trace.copies {
            let Some(limits) = self.limits.get(copy.backend) else { continue };
            let work = Work { traffic: copy.bytes as f64, ..Work::default() };
            self.copies.add(copy.seconds, work, limits);
        }
    }

    fn nodes(&mut self, plan: &Plan) -> Arc<Vec<NodeWork>> {
        let make = || {
            let graph = plan.graph();
            let of = |node: NodeId| {
                let op = graph.get_node(node).map(|n| n.op());
                let first = graph.inputs(node).first().and_then(|id| graph.get(*id));
                let product = matches!(op, Some(Op::MulMat | Op::MulMatId));
                NodeWork {
                    cost: Cost::of(graph, node),
                    weights: first.filter(|_| product).map_or(DType::F32, |t| t.dtype()),
                    attends: matches!(op, Some(Op::Attention(_))),
                }
            };
            Arc::new(graph.node_ids().map(of).collect())
        };
        Arc::clone(self.known.entry(plan.graph().fingerprint()).or_insert_with(make))
    }

    /// What was done, by kind of run and split.
    pub fn splits(&self) -> &BTreeMap<String, Totals> {
        &self.splits
    }

    /// What was done, by operation and backend; steps that compute several nodes as one have a name made of theirs.
    pub fn operations(&self) -> &BTreeMap<String, Totals> {
        &self.operations
    }
}

fn work(known: &[NodeWork], nodes: impl Iterator<Item = usize>, limits: &Limits, visible: f64) -> Work {
    let mut sum = Work::default();
    for node in nodes.filter_map(|node| known.get(node)) {
        let part = if node.attends { visible.clamp(0.0, 1.0) } else { 1.0 };
        let operations = node.cost.operations as f64 * part;
        sum.operations += operations;
        sum.traffic += node.cost.traffic as f64 * part;
        sum.computing += operations / limits.operations(node.weights).max(1.0);
    }
    sum
}

/// How many lines of a table are printed.
const LINES: usize = 14;

impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.seconds.max(1e-12);
        let percent = |part: f64| 100.0 * part / total;
        writeln!(f, "{}, {}", plural(self.runs as usize, "run", "runs"), seconds(self.seconds))?;
        writeln!(f, "\n{:24} {:>18} {:>18} {:>18}", "device", "computing", "copying", "waiting")?;
        for backend in &self.backends {
            let waiting = (total - backend.compute - backend.copy).max(0.0);
            write!(f, "{:24}", backend.name)?;
            for part in [backend.compute, backend.copy, waiting] {
                write!(f, " {:>10} {:5.1} %", seconds(part), percent(part))?;
            }
            writeln!(f)?;
        }
        let measured = self.limits.iter().all(|limits| limits.measured);
        table(f, "split", &self.splits, total, measured)?;
        if !self.operations.is_empty() {
            table(f, "operation", &self.operations, total, measured)?;
        }
        if self.copies.count > 0 {
            let Totals { count, traffic, seconds: time, .. } = self.copies;
            let each = bytes((traffic / count as f64) as u64);
            let speed = if time > 0.0 {
                format!(", {}B/s", crate::words::count(traffic / time))
            } else {
                String::new()
            };
            writeln!(f, "\n{count} copies of {each} on average in {}{speed}", seconds(time))?;
        }
        for limits in &self.limits {
            let Limits { backend, read, int8, bf16, f32, measured, .. } = limits;
            let kind = if *measured {
                "measured limits"
            } else {
                "round figures, not measured (quadriga devices --measure)"
            };
            writeln!(
                f,
                "\n{backend}: {kind}: reads {}B/s; products of 8-bit weights {}op/s, 16-bit {}op/s, f32 {}op/s",
                count(*read),
                count(*int8),
                count(*bf16),
                count(*f32)
            )?;
        }
        Ok(())
    }
}

fn table(
    f: &mut fmt::Formatter<'_>,
    what: &str,
    rows: &BTreeMap<String, Totals>,
    total: f64,
    measured: bool,
) -> fmt::Result {
    let mut lines: Vec<(&String, &Totals)> = rows.iter().collect();
    lines.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    writeln!(
        f,
        "\n{what:36} {:>7} {:>10} {:>7} {:>11} {:>7} {:>12} {:>7}",
        "times", "time", "", "B/s", "limit", "op/s", "limit"
    )?;
    let of_limit = |least: f64, totals: &Totals| match measured {
        true => format!("{:.0} %", 100.0 * least / totals.seconds.max(1e-12)),
        false => "–".to_owned(),
    };
    let line = |f: &mut fmt::Formatter<'_>, name: &str, totals: &Totals| {
        let name: String = if name.chars().count() > 36 {
            name.chars().take(35).chain(['…']).collect()
        } else {
            name.to_owned()
        };
        writeln!(
            f,
            "{name:36} {:>7} {:>10} {:>5.1} % {:>11} {:>7} {:>12} {:>7}",
            totals.count,
            seconds(totals.seconds),
            100.0 * totals.seconds / total,
            count(totals.bandwidth()),
            of_limit(totals.least_moving, totals),
            count(totals.speed()),
            of_limit(totals.least_computing, totals)
        )
    };
    for (name, totals) in lines.iter().take(LINES) {
        line(f, name, totals)?;
    }
    let mut rest = Totals::default();
    for (_, totals) in lines.iter().skip(LINES) {
        rest.count += totals.count;
        rest.seconds += totals.seconds;
        rest.operations += totals.operations;
        rest.traffic += totals.traffic;
        rest.least_computing += totals.least_computing;
        rest.least_moving += totals.least_moving;
    }
    if lines.len() > LINES {
        line(f, &format!("{} others", lines.len() - LINES), &rest)?;
    }
    Ok(())
}
