//! The inputs and outputs of the current graph, for callers that do not have the graph itself.

use quadriga_graph::{DType, Graph, Shape, TensorId, TensorKind};

use super::session::Session;
use super::tensor_ref::TensorRef;
use crate::RuntimeError;

/// An input or output of the current graph.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorInfo {
    /// Its name as an input or output.
    pub name: String,
    /// The name of its tensor, which is another one where an output was given a name of its own.
    pub tensor_name: String,
    /// The id of its tensor.
    pub id: TensorId,
    /// Its element type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Shape,
    /// Its bytes, gaps of a strided view included.
    pub bytes: usize,
}

/// Inputs and outputs of the current graph.
impl Session {
    /// The inputs, in the order they were declared.
    pub fn inputs(&self) -> Result<Vec<TensorInfo>, RuntimeError> {
        let graph = self.graph()?;
        let infos = graph.of_kind(TensorKind::Input).filter_map(|id| info(graph, graph.leaf_name(id)?, id));
        Ok(infos.collect())
    }

    /// The outputs, in the order they were declared.
    pub fn outputs(&self) -> Result<Vec<TensorInfo>, RuntimeError> {
        let graph = self.graph()?;
        Ok(graph.outputs().iter().filter_map(|(name, id)| info(graph, name, *id)).collect())
    }

    /// An output, found as [`Session::read`] finds it: by the name it was given as an output, by its tensor's name, or by
    /// id.
    pub fn output<'n>(&self, output: impl Into<TensorRef<'n>>) -> Result<TensorInfo, RuntimeError> {
        let prepared = self.plans.get(self.plans.current()?)?;
        let place = prepared.output(output.into())?;
        let found = info(prepared.plan.graph(), &place.name, place.id);
        found.ok_or_else(|| RuntimeError::internal("an output has no tensor"))
    }

    fn graph(&self) -> Result<&Graph, RuntimeError> {
        Ok(self.plans.get(self.plans.current()?)?.plan.graph())
    }
}

fn info(graph: &Graph, name: &str, id: TensorId) -> Option<TensorInfo> {
    let tensor = graph.get(id)?;
    Some(TensorInfo {
        name: name.to_owned(),
        tensor_name: graph.name(id),
        id,
        dtype: tensor.dtype(),
        shape: *tensor.shape(),
        bytes: tensor.bytes(),
    })
}
