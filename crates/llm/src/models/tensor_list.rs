//! The tensors that a model's graph uses, found by building it without a file's tensors.

use quadriga_gguf::File;
use quadriga_graph::GraphBuilder;

use super::builder::{ModelBuilder, Recorder, TensorSpec};
use super::{GraphShape, find};
use crate::Result;
use crate::hyperparameters::Keys;

/// The tensors of the model that a file's metadata describes, in the order in which its graph uses them. The file needs no
/// tensors; its vocabulary's size is the key `vocab_size`. `optional` decides about each tensor that a model may lack,
/// such as biases and the output matrix.
pub fn tensors(metadata: &File, optional: &dyn Fn(&str) -> bool) -> Result<Vec<TensorSpec>> {
    let architecture = find(metadata.get::<&str>("general.architecture")?)?;
    let hyper = architecture.hyperparameters(&Keys::without_tensors(metadata, architecture.name))?;
    let recorder = Recorder::new(optional);
    let g = GraphBuilder::new();
    let shape = GraphShape::new(1, hyper.context.min(8));
    (architecture.build)(&ModelBuilder::recording(&g, metadata, &hyper, shape, &recorder)?)?;
    Ok(recorder.into_tensors())
}
