//! Graphs as callers have them: by value, by reference or shared.

use std::sync::Arc;

use quadriga_graph::Graph;

/// A graph, given by value, by reference or shared.
pub trait IntoGraph {
    /// The graph, shared.
    fn into_graph(self) -> Arc<Graph>;
}

impl IntoGraph for Arc<Graph> {
    fn into_graph(self) -> Arc<Graph> {
        self
    }
}

impl IntoGraph for &Arc<Graph> {
    fn into_graph(self) -> Arc<Graph> {
        Arc::clone(self)
    }
}

impl IntoGraph for Graph {
    fn into_graph(self) -> Arc<Graph> {
        Arc::new(self)
    }
}

impl IntoGraph for &Graph {
    fn into_graph(self) -> Arc<Graph> {
        Arc::new(self.clone())
    }
}
