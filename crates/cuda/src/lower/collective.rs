//! Collectives through NCCL.

use quadriga_graph::{Collective, NodeId, TensorId};
use quadriga_runtime::BackendError;

use super::lowering::Lowering;
use crate::nccl::{Connection, DeviceExchange, ExchangePlaces, scratch_bytes};
use crate::program::ProgramStep;

impl Lowering<'_> {
    /// A collective with the ranks of its group.
    pub(super) fn collective(&mut self, node: NodeId, collective: &Collective) -> Result<(), BackendError> {
        let ranks = self.split.ranks.of(&collective.ranks);
        let ranks = ranks.map_err(|reason| self.failed(node, reason))?;
        let connection = Connection::of(&**ranks).filter(|found| found.is_of(&self.inner.context));
        let Some(connection) = connection else {
            return Err(self.failed(node, "its ranks are not connected by NCCL on this device"));
        };
        let graph = self.graph;
        let Some(first) = graph.inputs(node).first().copied() else {
            return Err(self.failed(node, "it has no input"));
        };
        let output = graph[node].output();
        let (rows, element) = (graph[first].dims4()[2], graph[output].dtype().block_bytes());
        let scratch = scratch_bytes(&collective.kind, rows, element);
        let [scratch] = if scratch == 0 { [0] } else { self.scratch(node, [scratch])? };
        let places = ExchangePlaces {
            input: self.address(node, first)?,
            output: self.address(node, output)?,
            bytes: graph[output].bytes(),
            rows,
            element,
            scratch,
        };
        let exchange = DeviceExchange::of(collective, places);
        let name = graph.node_name(node);
        self.faults.watch_ranks(&name, ranks);
        self.push_step(ProgramStep::Exchange { name, connection, exchange });
        Ok(())
    }

    /// The address of a tensor; a tensor without elements has none.
    fn address(&mut self, node: NodeId, id: TensorId) -> Result<u64, BackendError> {
        if self.graph[id].bytes() == 0 { Ok(0) } else { Ok(self.tensor_arg(node, id)?.address) }
    }
}
