//! Runs as trace events in Chrome's format, which Perfetto opens, too; written one run at a time.
//!
//! Each queue is a thread of the trace: the host with its runs, and per backend its splits (with operations nested in
//! them) and its copies in and out. Flow arrows connect a copy with the split that produces its data and the split that
//! reads it. Memory in use is a counter per backend, as are figures of an expert cache; a token is an instant event.

use std::io::{self, Write};
use std::sync::Arc;

use quadriga_graph::{Fingerprint, NodeId};
use quadriga_runtime::{Backend, CopyTime, Explanation, OperationTime, Plan, Stream, Trace};
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

/// The thread id of the host.
const HOST: usize = 1;

/// A traced run.
pub struct TracedRun<'a> {
    /// The plan that ran.
    pub plan: &'a Plan,
    /// The measured times.
    pub trace: &'a Trace,
    /// Seconds from the start of the recording to the start of the run.
    pub start: f64,
    /// The name of its slice: `prompt, 12 tokens`.
    pub name: &'a str,
}

/// Writes trace events. The file is valid JSON only after [`finish`](ChromeTrace::finish).
pub struct ChromeTrace<W: Write> {
    out: W,
    events: u64,
    flows: u64,
    /// Memory in use by each plan seen so far.
    plans: FxHashMap<Fingerprint, Arc<MemoryInUse>>,
    /// JSON of the names of operations and of their nodes.
    names: FxHashMap<(Fingerprint, usize, usize), Arc<(String, String)>>,
    /// The end of the last slice of each lane, in microseconds.
    ends: FxHashMap<usize, f64>,
    /// The last counter value of each backend: kept and compute bytes.
    counted: FxHashMap<usize, (u64, u64)>,
}

/// Memory in use by a plan.
struct MemoryInUse {
    /// Per backend: bytes of weights and state, and bytes of the arena in use at each step.
    backends: Vec<(u64, Vec<u64>)>,
    /// The name of each backend's counter, quoted.
    names: Vec<String>,
}

impl MemoryInUse {
    fn of(plan: &Explanation) -> MemoryInUse {
        let steps = plan.steps as usize + 1;
        let of = |(number, backend): (usize, &quadriga_runtime::BackendLine)| {
            let mut change = vec![0i128; steps + 1];
            for s in plan.storages.iter().filter(|s| s.backend == number && s.chunk.is_some()) {
                for (step, bytes) in [(s.start, i128::from(s.bytes)), (s.end, -i128::from(s.bytes))] {
                    if let Some(change) = change.get_mut(step as usize) {
                        *change += bytes;
                    }
                }
            }
            let mut now = 0;
            let sum = |change: &i128| {
                now += change;
                now.max(0) as u64
            };
            (backend.bytes.weights + backend.bytes.state, change.iter().map(sum).collect())
        };
        let backends = plan.backends.iter().enumerate().map(of).collect();
        let name = |b: &quadriga_runtime::BackendLine| quoted(&format!("memory of {}", b.bytes.backend));
        MemoryInUse { backends, names: plan.backends.iter().map(name).collect() }
    }

    fn at(&self, backend: usize, step: usize) -> u64 {
        self.backends.get(backend).and_then(|(_, steps)| steps.get(step)).copied().unwrap_or(0)
    }
}

/// A string as JSON.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// JSON of an operation's name, and of its nodes' names.
fn names(plan: &Plan, operation: &OperationTime) -> (String, String) {
    let name = |node: &usize| plan.graph().node_name(NodeId::from_index(*node));
    let nodes = Value::from(operation.nodes.iter().map(name).collect::<Vec<_>>());
    (quoted(&operation.operation), format!("\"nodes\":{nodes}"))
}

/// The splits of a run: lane, start and end.
type Spans = FxHashMap<usize, (usize, f64, f64)>;

/// The thread id of a backend's queue.
fn lane(backend: usize, stream: Stream) -> usize {
    HOST + 1
        + backend * 4
        + match stream {
            Stream::Compute => 0,
            Stream::Upload => 1,
            Stream::Prefetch => 2,
            Stream::Download => 3,
        }
}

/// Seconds as microseconds, rounded to the nanosecond.
fn micros(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}

impl<W: Write> ChromeTrace<W> {
    /// Starts a trace with a named lane for each queue.
    pub fn new(mut out: W, backends: &[Arc<dyn Backend>]) -> io::Result<ChromeTrace<W>> {
        write!(out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        let mut trace = ChromeTrace {
            out,
            events: 0,
            flows: 0,
            plans: FxHashMap::default(),
            names: FxHashMap::default(),
            ends: FxHashMap::default(),
            counted: FxHashMap::default(),
        };
        trace.meta("process_name", HOST, &json!({ "name": "quadriga" }))?;
        trace.name(HOST, "host")?;
        for (number, backend) in backends.iter().enumerate() {
            let name = backend.name();
            trace.name(lane(number, Stream::Compute), name)?;
            trace.name(lane(number, Stream::Upload), &format!("{name} copies in"))?;
            trace.name(lane(number, Stream::Prefetch), &format!("{name} streamed weights and state in"))?;
            trace.name(lane(number, Stream::Download), &format!("{name} copies out"))?;
        }
        Ok(trace)
    }

    /// Starts an event with phase and process id. The caller writes the other fields and the closing brace.
    fn open(&mut self, phase: &str) -> io::Result<&mut W> {
        let comma = if self.events > 0 { "," } else { "" };
        self.events += 1;
        write!(self.out, "{comma}\n{{\"ph\":\"{phase}\",\"pid\":1")?;
        Ok(&mut self.out)
    }

    fn meta(&mut self, what: &str, lane: usize, arguments: &Value) -> io::Result<()> {
        write!(self.open("M")?, ",\"tid\":{lane},\"name\":\"{what}\",\"args\":{arguments}}}")
    }

    fn name(&mut self, lane: usize, name: &str) -> io::Result<()> {
        self.meta("thread_name", lane, &json!({ "name": name }))?;
        self.meta("thread_sort_index", lane, &json!({ "sort_index": lane }))
    }

    /// Writes a slice. Slices of a lane must not overlap, but the clocks of device and host agree only to microseconds: the
    /// start is moved to the end of the previous slice if it is earlier.
    fn slice(
        &mut self,
        lane: usize,
        name: &str,
        span: (f64, f64),
        arguments: &str,
    ) -> io::Result<(f64, f64)> {
        let previous = self.ends.get(&lane).copied().unwrap_or(0.0);
        let end = micros(span.0 + span.1).max(previous);
        let start = micros(span.0).max(previous);
        self.ends.insert(lane, end);
        self.complete(lane, &quoted(name), (start, end), arguments)?;
        Ok((start, end))
    }

    /// Writes a complete event; the name is JSON already.
    fn complete(
        &mut self,
        lane: usize,
        name: &str,
        (start, end): (f64, f64),
        arguments: &str,
    ) -> io::Result<()> {
        let length = ((end - start) * 1e3).round() / 1e3;
        let out = self.open("X")?;
        write!(
            out,
            ",\"tid\":{lane},\"name\":{name},\"ts\":{start},\"dur\":{length},\"args\":{{{arguments}}}}}"
        )
    }

    /// Writes a backend's memory in use, unless it is unchanged.
    fn counter(&mut self, in_use: &MemoryInUse, backend: usize, at: f64, compute: u64) -> io::Result<()> {
        let Some(((kept, _), name)) = in_use.backends.get(backend).zip(in_use.names.get(backend)) else {
            return Ok(());
        };
        if self.counted.insert(backend, (*kept, compute)) == Some((*kept, compute)) {
            return Ok(());
        }
        let arguments = format!("\"weights and state\":{kept},\"compute\":{compute}");
        write!(self.open("C")?, ",\"name\":{name},\"ts\":{at},\"args\":{{{arguments}}}}}")
    }

    fn flow(&mut self, phase: &str, id: u64, lane: usize, at: f64) -> io::Result<()> {
        let binding = if phase == "f" { ",\"bp\":\"e\"" } else { "" };
        let out = self.open(phase)?;
        write!(out, ",\"tid\":{lane},\"id\":{id},\"name\":\"copy\",\"cat\":\"copy\",\"ts\":{at}{binding}}}")
    }

    /// Writes values at a time; each name has a track.
    pub fn counters(&mut self, name: &str, at: f64, values: &[(&str, u64)]) -> io::Result<()> {
        let (name, at) = (quoted(name), micros(at));
        let values: Vec<String> =
            values.iter().map(|(name, value)| format!("{}:{value}", quoted(name))).collect();
        write!(self.open("C")?, ",\"name\":{name},\"ts\":{at},\"args\":{{{}}}}}", values.join(","))
    }

    /// Writes an instant event for a token.
    pub fn token(&mut self, name: &str, at: f64) -> io::Result<()> {
        let (name, at) = (quoted(name), micros(at));
        let out = self.open("i")?;
        write!(out, ",\"tid\":{HOST},\"s\":\"p\",\"name\":{name},\"cat\":\"token\",\"ts\":{at}}}")
    }

    /// Writes a slice of the host outside of runs.
    pub fn host(&mut self, name: &str, start: f64, seconds: f64) -> io::Result<()> {
        self.slice(HOST, name, (start, seconds), "").map(|_| ())
    }

    /// Writes a run with its splits, operations and copies.
    pub fn run(&mut self, run: &TracedRun<'_>) -> io::Result<()> {
        let TracedRun { plan, trace, start, name } = *run;
        let fingerprint = plan.graph().fingerprint();
        let in_use = match self.plans.get(&fingerprint) {
            Some(known) => Arc::clone(known),
            None => {
                let made = Arc::new(MemoryInUse::of(&plan.explain()));
                self.plans.insert(fingerprint, Arc::clone(&made));
                made
            }
        };
        let seconds = format!("\"seconds\":{}", trace.seconds);
        self.slice(HOST, name, (start, trace.seconds), &seconds)?;
        let mut splits = Spans::default();
        let mut operations = trace.operations.as_slice();
        for split in &trace.splits {
            let lane = lane(split.backend, Stream::Compute);
            let arguments = format!("\"split\":{},\"nodes\":{}", split.split, split.nodes);
            let span = (start + split.start, split.seconds);
            let (from, to) = self.slice(lane, &format!("split {}", split.split), span, &arguments)?;
            splits.insert(split.split, (lane, from, to));
            // Operations are grouped by split.
            let count = operations.iter().take_while(|operation| operation.split == split.split).count();
            let (own, rest) = operations.split_at(count);
            operations = rest;
            let nodes = plan.splits().nodes_of(split.split);
            if own.is_empty() {
                // Without operations: the peak of the split.
                let peak = nodes.iter().map(|node| in_use.at(split.backend, node.index())).max();
                self.counter(&in_use, split.backend, from, peak.unwrap_or(0))?;
            }
            let mut previous_end = from;
            for operation in own {
                let begin = start + operation.start;
                let from = micros(begin).clamp(previous_end, to.max(previous_end));
                previous_end = micros(begin + operation.seconds).clamp(from, to.max(from));
                self.operation(plan, operation, (lane, from, previous_end), &in_use)?;
            }
            let after = nodes.last().map_or(0, |node| in_use.at(split.backend, node.index() + 1));
            self.counter(&in_use, split.backend, to, after)?;
        }
        for copy in &trace.copies {
            self.copy(plan, copy, start, &splits)?;
        }
        Ok(())
    }

    /// Writes an operation, nested in its split.
    fn operation(
        &mut self,
        plan: &Plan,
        operation: &OperationTime,
        (lane, from, to): (usize, f64, f64),
        in_use: &MemoryInUse,
    ) -> io::Result<()> {
        let node = operation.nodes.first().copied();
        let key = (plan.graph().fingerprint(), node.unwrap_or(usize::MAX), operation.nodes.len());
        let named = match self.names.get(&key) {
            Some(known) => Arc::clone(known),
            None => {
                let made = Arc::new(names(plan, operation));
                self.names.insert(key, Arc::clone(&made));
                made
            }
        };
        let (name, arguments) = &*named;
        self.complete(lane, name, (from, to), arguments)?;
        match node {
            Some(node) => self.counter(in_use, operation.backend, from, in_use.at(operation.backend, node)),
            None => Ok(()),
        }
    }

    fn copy(&mut self, plan: &Plan, copy: &CopyTime, start: f64, splits: &Spans) -> io::Result<()> {
        let lane = lane(copy.backend, copy.stream);
        let name = plan.copy_name(copy.copy);
        let bytes = if copy.exact { "bytes" } else { "bytes at most" };
        let arguments = format!("\"copy\":{},\"{bytes}\":{}", copy.copy, copy.bytes);
        let (from, to) = self.slice(lane, &name, (start + copy.start, copy.seconds), &arguments)?;
        let Some(planned) = plan.splits().copies.get(copy.copy) else { return Ok(()) };
        self.flows += 1;
        let id = self.flows;
        if let Some((source, begin, end)) = planned.source.and_then(|source| splits.get(&source)).copied() {
            // A flow must start inside a slice: a nanosecond before its end.
            self.flow("s", id, source, (end - 0.001).max(begin))?;
            self.flow("t", id, lane, from)?;
        } else {
            self.flow("s", id, lane, from)?;
        }
        match splits.get(&planned.reader).copied() {
            Some((lane, begin, _)) => self.flow("f", id, lane, begin),
            None => self.flow("f", id, lane, to),
        }
    }

    /// Writes the end of the file with the total seconds, and returns the writer.
    pub fn finish(mut self, seconds: f64) -> io::Result<W> {
        writeln!(self.out, "\n],\"otherData\":{}}}", json!({ "writer": "quadriga", "seconds": seconds }))?;
        self.out.flush()?;
        Ok(self.out)
    }
}
