//! The graph that Python is building.
//!
//! Values of a graph builder borrow it, and Python's objects cannot: the builder and all values live on a thread, which Python's
//! calls send commands to. It ends with the graph.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use pyo3::prelude::*;
use quadriga_graph::{DType, Data, Graph, GraphBuilder, Scope, Shape, Value, Weight};

use super::array::{ArrayView, dtype, shape};
use super::custom::{CustomOperation, original};
use super::operation::Operation;
use super::plan::PlanCore;
use crate::callback::{Caller, busy, is_called_by};
use crate::detached::detached;
use crate::failure::{Failure, Outcome};
use crate::process::ProcessMark;

/// A value as Python knows it: its number, type and shape.
type BuiltValue = (usize, String, Vec<usize>);

#[derive(Clone)]
enum BuildCommand {
    Input { name: String, dtype: DType, shape: Shape },
    State { name: String, dtype: DType, shape: Shape },
    Constant { name: String, dtype: DType, shape: Shape, data: Data },
    Weight { name: String, weight: Weight },
    Apply { operation: Operation, inputs: Vec<usize> },
    Output { name: String, value: usize },
    Label { value: usize, label: String },
    OpenScope { name: String },
    CloseScope,
    Barrier,
    Finish,
}

enum BuildReply {
    Value(BuiltValue),
    Graph(Box<Graph>),
    Done,
}

type Call = (BuildCommand, Sender<Outcome<BuildReply>>);

/// A graph that is being built.
#[pyclass(frozen, module = "quadriga._quadriga")]
pub(crate) struct GraphCore {
    process: ProcessMark,
    state: Mutex<GraphState>,
}

enum GraphState {
    Open(Sender<Call>),
    Finished(Box<Graph>),
    /// With the first error.
    Failed(String),
}

impl GraphCore {
    /// The state, for this call alone; waits for calls of other threads.
    fn state(&self) -> Outcome<MutexGuard<'_, GraphState>> {
        match self.state.try_lock() {
            Ok(state) => Ok(state),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if is_called_by(Caller::Graph) => Err(busy("graph")),
            Err(TryLockError::WouldBlock) => Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Sends a command and waits without the GIL, which rules of custom operations need.
    fn call(&self, py: Python<'_>, command: BuildCommand) -> Outcome<BuildReply> {
        self.process.check("graph")?;
        let called = detached(py, || {
            let mut state = self.state()?;
            let calls = match &*state {
                GraphState::Open(calls) => calls,
                GraphState::Finished(_) => {
                    return Err(Failure::new("GraphError", "the graph is finished: it was planned already"));
                }
                GraphState::Failed(reason) => {
                    return Err(Failure::new("GraphError", format!("the graph has an error: {reason}")));
                }
            };
            let (reply, answer) = channel();
            let ended = || Failure::new("Error", "the graph's thread has ended");
            calls.send((command, reply)).map_err(|_| ended())?;
            let answer = answer.recv().map_err(|_| ended())?;
            match answer {
                Ok(BuildReply::Graph(graph)) => {
                    *state = GraphState::Finished(graph);
                    Ok(BuildReply::Done)
                }
                Err(Failure::Library { class: BROKEN, message }) => {
                    *state = GraphState::Failed(message.clone());
                    Err(Failure::new("GraphError", message))
                }
                answer => answer,
            }
        });
        called.map_err(original)
    }

    fn value(&self, py: Python<'_>, command: BuildCommand) -> PyResult<BuiltValue> {
        match self.call(py, command)? {
            BuildReply::Value(value) => Ok(value),
            _ => Err(Failure::new("Error", "the graph has no value").into()),
        }
    }
}

/// Marks an error of the builder, after which nothing can be added.
const BROKEN: &str = "broken";

#[pymethods]
impl GraphCore {
    /// An empty graph.
    #[new]
    fn new() -> PyResult<GraphCore> {
        let (calls, inbox) = channel();
        let started =
            std::thread::Builder::new().name("quadriga-graph".to_owned()).spawn(move || build(&inbox));
        started.map_err(|error| Failure::new("Error", format!("a thread could not be started: {error}")))?;
        Ok(GraphCore { process: ProcessMark::new(), state: Mutex::new(GraphState::Open(calls)) })
    }

    /// Declares an input.
    fn input(&self, py: Python<'_>, name: String, of: &str, dims: Vec<usize>) -> PyResult<BuiltValue> {
        let (dtype, shape) = (dtype(of)?, shape(&dims)?);
        self.value(py, BuildCommand::Input { name, dtype, shape })
    }

    /// Declares a state.
    fn state_tensor(&self, py: Python<'_>, name: String, of: &str, dims: Vec<usize>) -> PyResult<BuiltValue> {
        let (dtype, shape) = (dtype(of)?, shape(&dims)?);
        self.value(py, BuildCommand::State { name, dtype, shape })
    }

    /// Declares a weight or a constant with data. Bytes need a type and a shape; other arrays have them.
    #[pyo3(signature = (name, array, constant, of=None, dims=None))]
    fn data(
        &self,
        py: Python<'_>,
        name: String,
        array: &Bound<'_, PyAny>,
        constant: bool,
        of: Option<&str>,
        dims: Option<Vec<usize>>,
    ) -> PyResult<BuiltValue> {
        let view = ArrayView::new(array)?;
        let given = of.map(dtype).transpose()?;
        let missing = || Failure::new("GraphError", format!("{name}: bytes need a dtype and a shape"));
        let dtype = given.or(view.element_type()).ok_or_else(missing)?;
        view.check_type(&name, dtype)?;
        let shape = match dims {
            Some(dims) => shape(&dims)?,
            None if view.element_type().is_none() => return Err(missing().into()),
            None => view.shape()?,
        };
        let data = Data::from(view.as_bytes().to_vec());
        drop(view);
        self.value(
            py,
            match constant {
                true => BuildCommand::Constant { name, dtype, shape, data },
                false => BuildCommand::Weight { name, weight: Weight::with_data(dtype, shape, data) },
            },
        )
    }

    /// Declares a weight whose data is set in the session.
    fn empty_weight(&self, py: Python<'_>, name: String, of: &str, dims: Vec<usize>) -> PyResult<BuiltValue> {
        let weight = Weight::new(dtype(of)?, shape(&dims)?);
        self.value(py, BuildCommand::Weight { name, weight })
    }

    /// Applies an operation to values, with parameters as JSON.
    #[pyo3(signature = (name, inputs, parameters, custom=None))]
    fn apply(
        &self,
        py: Python<'_>,
        name: String,
        inputs: Vec<usize>,
        parameters: &str,
        custom: Option<&CustomOperation>,
    ) -> PyResult<BuiltValue> {
        let parameters =
            serde_json::from_str(parameters).map_err(|error| Failure::invalid(error.to_string()))?;
        let operation = Operation { name, parameters, custom: custom.map(|custom| custom.op.clone()) };
        self.value(py, BuildCommand::Apply { operation, inputs })
    }

    /// Makes a value an output.
    fn output(&self, py: Python<'_>, name: String, value: usize) -> PyResult<()> {
        Ok(self.call(py, BuildCommand::Output { name, value }).map(drop)?)
    }

    /// Labels a value.
    fn label(&self, py: Python<'_>, value: usize, label: String) -> PyResult<()> {
        Ok(self.call(py, BuildCommand::Label { value, label }).map(drop)?)
    }

    /// Opens a scope of names.
    fn open_scope(&self, py: Python<'_>, name: String) -> PyResult<()> {
        Ok(self.call(py, BuildCommand::OpenScope { name }).map(drop)?)
    }

    /// Closes the scope that was opened last.
    fn close_scope(&self, py: Python<'_>) -> PyResult<()> {
        Ok(self.call(py, BuildCommand::CloseScope).map(drop)?)
    }

    /// Ends a group of nodes.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        Ok(self.call(py, BuildCommand::Barrier).map(drop)?)
    }

    /// Finishes the graph and plans it: JSON with devices, threads, pins, budgets.
    fn plan(&self, py: Python<'_>, options: &str) -> PyResult<PlanCore> {
        if !detached(py, || self.state().map(|state| matches!(*state, GraphState::Finished(_))))? {
            self.call(py, BuildCommand::Finish)?;
        }
        let plan = || {
            let graph = match &*self.state()? {
                GraphState::Finished(graph) => Graph::clone(graph),
                _ => return Err(Failure::new("Error", "the graph is not finished")),
            };
            PlanCore::new(graph, options)
        };
        Ok(detached(py, plan)?)
    }

    /// The finished graph as text, one line for each node.
    fn text(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(detached(py, || {
            Ok(match &*self.state()? {
                GraphState::Finished(graph) => Some(graph.to_string()),
                _ => None,
            })
        })?)
    }
}

/// The thread of a graph: carries out commands until it is finished or wrong, or Python drops it.
fn build(inbox: &Receiver<Call>) {
    let g = GraphBuilder::new();
    let mut built = Built { values: Vec::new(), scopes: Vec::new(), last: None };
    let mut end = None;
    for (command, reply) in inbox {
        if matches!(command, BuildCommand::Finish) {
            end = Some(reply);
            break;
        }
        if built.last.is_none()
            && let Err(failure) = try_alone(command.clone())
        {
            let _ = reply.send(Err(failure));
            continue;
        }
        match built.carry_out(&g, command) {
            Ok(Some(done)) => {
                let _ = reply.send(Ok(done));
            }
            // The builder has an error, which it says when it is finished.
            Ok(None) => {
                end = Some(reply);
                break;
            }
            Err(failure) => {
                let _ = reply.send(Err(failure));
            }
        }
    }
    drop(built);
    let Some(reply) = end else { return };
    let _ = reply.send(finish(g).map(|graph| BuildReply::Graph(Box::new(graph))));
}

fn finish(g: GraphBuilder) -> Outcome<Graph> {
    g.finish().map_err(|error| match Failure::from(error) {
        Failure::Library { message, .. } => Failure::new(BROKEN, message),
        failure => failure,
    })
}

/// Tries a command in a graph of its own: a builder that refuses its first tensor looks as one that has made it.
fn try_alone(command: BuildCommand) -> Outcome {
    let g = GraphBuilder::new();
    let mut built = Built { values: Vec::new(), scopes: Vec::new(), last: None };
    // Other failures come again when it is carried out.
    let _ = built.carry_out(&g, command);
    drop(built);
    finish(g).map(drop)
}

/// The values and scopes of a builder.
struct Built<'g> {
    values: Vec<Value<'g>>,
    scopes: Vec<Scope<'g>>,
    /// The number of the latest tensor. Tensors are numbered upwards, and a builder with an error makes none.
    last: Option<usize>,
}

impl<'g> Built<'g> {
    /// Carries out a command; `None` if the builder refused it.
    fn carry_out(&mut self, g: &'g GraphBuilder, command: BuildCommand) -> Outcome<Option<BuildReply>> {
        let value = match command {
            BuildCommand::Input { name, dtype, shape } => g.input(&name, dtype, shape),
            BuildCommand::State { name, dtype, shape } => g.state(&name, dtype, shape),
            BuildCommand::Constant { name, dtype, shape, data } => g.constant(&name, dtype, shape, data),
            BuildCommand::Weight { name, weight } => g.weight(&name, weight),
            BuildCommand::Apply { operation, inputs } => {
                let inputs = inputs.iter().map(|number| self.get(*number)).collect::<Outcome<Vec<_>>>()?;
                operation.apply(g, &inputs)?
            }
            BuildCommand::Output { name, value } => {
                let value = self.get(value)?;
                // An array has its elements in order; a transposed view has not.
                g.output(&name, if value.is_contiguous() { value } else { value.cont() });
                return Ok(Some(BuildReply::Done));
            }
            BuildCommand::Label { value, label } => {
                self.get(value)?.named(&label);
                return Ok(Some(BuildReply::Done));
            }
            BuildCommand::OpenScope { name } => {
                self.scopes.push(g.scope(&name));
                return Ok(Some(BuildReply::Done));
            }
            BuildCommand::CloseScope => {
                self.scopes.pop();
                return Ok(Some(BuildReply::Done));
            }
            BuildCommand::Barrier => {
                g.barrier();
                return Ok(Some(BuildReply::Done));
            }
            BuildCommand::Finish => return Ok(None),
        };
        let id = value.id().index();
        if self.last.is_some_and(|last| id <= last) {
            return Ok(None);
        }
        self.last = Some(id);
        self.values.push(value);
        let number = self.values.len() - 1;
        let built = (number, value.dtype().name().to_ascii_lowercase(), value.shape().dims().to_vec());
        Ok(Some(BuildReply::Value(built)))
    }

    fn get(&self, number: usize) -> Outcome<Value<'g>> {
        let found = self.values.get(number).copied();
        found.ok_or_else(|| Failure::new("GraphError", "a value belongs to another graph"))
    }
}
