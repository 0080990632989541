//! The tensors that a graph under construction asks for, in place of a file that has them.

use std::cell::RefCell;
use std::collections::HashSet;

/// A tensor that a model file has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorSpec {
    /// The name.
    pub name: String,
    /// The dimensions, outermost first.
    pub dims: Vec<usize>,
    /// Whether it must be F32: norms, biases and others that are not the matrix of a product.
    pub f32_only: bool,
}

/// Collects the tensors that a graph asks for.
pub(in crate::models) struct Recorder<'o> {
    optional: &'o dyn Fn(&str) -> bool,
    tensors: RefCell<Vec<TensorSpec>>,
    names: RefCell<HashSet<String>>,
}

impl<'o> Recorder<'o> {
    /// A recorder; `optional` decides about tensors that a model may lack.
    pub(in crate::models) fn new(optional: &'o dyn Fn(&str) -> bool) -> Recorder<'o> {
        Recorder { optional, tensors: RefCell::default(), names: RefCell::default() }
    }

    /// What was recorded.
    pub(in crate::models) fn into_tensors(self) -> Vec<TensorSpec> {
        self.tensors.into_inner()
    }

    /// Whether the model is to have an optional tensor.
    pub(super) fn has(&self, name: &str) -> bool {
        (self.optional)(name)
    }

    /// Notes that the graph uses a tensor.
    pub(super) fn add(&self, name: &str, dims: &[usize], f32_only: bool) {
        if self.names.borrow_mut().insert(name.to_owned()) {
            let spec = TensorSpec { name: name.to_owned(), dims: dims.to_vec(), f32_only };
            self.tensors.borrow_mut().push(spec);
        }
    }
}
