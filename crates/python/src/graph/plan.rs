//! A planned graph.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use quadriga::Registry;
use quadriga_graph::Graph;
use quadriga_runtime::{Plan, Scheduler};
use quadriga_view::Picture;
use serde_json::json;

use super::session::SessionCore;
use crate::detached::detached;
use crate::failure::{Failure, Outcome};
use crate::process::ProcessMark;

/// How a graph is planned, as JSON.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanOptions {
    /// Devices in order of preference.
    devices: Vec<String>,
    threads: Option<usize>,
    /// Devices of nodes and leaves, by name.
    pins: BTreeMap<String, String>,
    /// Bytes that may be used of devices.
    budgets: BTreeMap<String, u64>,
}

/// A planned graph: which device computes what, which copies that takes, and where every byte is.
#[pyclass(frozen, module = "quadriga._quadriga")]
pub(crate) struct PlanCore {
    process: ProcessMark,
    plan: Plan,
}

impl PlanCore {
    /// Plans a graph.
    pub(crate) fn new(graph: Graph, options: &str) -> Outcome<PlanCore> {
        let options: PlanOptions =
            serde_json::from_str(options).map_err(|error| Failure::invalid(error.to_string()))?;
        let registry = Registry::with_threads(options.threads);
        let backends = options.devices.iter().map(|name| registry.open(name));
        let backends = backends.collect::<Result<Vec<_>, _>>()?;
        let names: Vec<String> = backends.iter().map(|backend| backend.name().to_owned()).collect();
        let number = |device: &String| {
            let found = names.iter().position(|name| name.eq_ignore_ascii_case(device));
            found.ok_or_else(|| {
                Failure::new("GraphError", format!("{device} is none of the devices: {}", names.join(", ")))
            })
        };
        let mut scheduler = Scheduler::new(backends);
        for (name, device) in &options.pins {
            if graph.tensor(name).is_none() {
                let message = format!("pins: the graph has no leaf or result {name:?}");
                return Err(Failure::new("GraphError", message));
            }
            scheduler = scheduler.pin_name(name.clone(), number(device)?);
        }
        for (device, bytes) in &options.budgets {
            scheduler = scheduler.budget(number(device)?, *bytes);
        }
        Ok(PlanCore { process: ProcessMark::new(), plan: scheduler.plan(graph)? })
    }
}

#[pymethods]
impl PlanCore {
    fn __str__(&self) -> String {
        self.plan.to_string()
    }

    /// All nodes, one line for each.
    fn details(&self) -> String {
        format!("{:#}", self.plan)
    }

    /// The plan as data.
    fn json(&self) -> String {
        self.plan.to_json()
    }

    /// The bytes of each device, as JSON.
    fn memory(&self) -> String {
        let bytes: Vec<_> = self.plan.bytes().iter().map(|bytes| json!(bytes)).collect();
        serde_json::Value::Array(bytes).to_string()
    }

    /// The plan in Graphviz's language.
    fn dot(&self) -> String {
        self.plan.to_dot()
    }

    /// The plan as a page, or as a drawing.
    fn picture(&self, py: Python<'_>, title: &str, svg: bool) -> PyResult<String> {
        Ok(detached(py, || {
            let picture = Picture::new(title, self.plan.explain());
            Ok(if svg { picture.svg() } else { picture.html() })
        })?)
    }

    /// Allocates memory and loads the weights.
    fn session(&self, py: Python<'_>) -> PyResult<SessionCore> {
        self.process.check("plan")?;
        let session = detached(py, || self.plan.session().map_err(Failure::from))?;
        Ok(SessionCore::new(session))
    }
}
