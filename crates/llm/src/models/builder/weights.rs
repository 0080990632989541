//! The file's tensors as weights of the graph. Shape and type of each are checked before it is declared.

use std::ops::Range;

use quadriga_gguf::{File, Tensor};
use quadriga_graph::{DType, GraphBuilder, Value, Weight};

use crate::{Error, Result};

/// The tensors of a model file.
pub(in crate::models) struct FileWeights<'g> {
    g: &'g GraphBuilder,
    file: &'g File,
}

impl<'g> FileWeights<'g> {
    pub(super) fn new(g: &'g GraphBuilder, file: &'g File) -> FileWeights<'g> {
        FileWeights { g, file }
    }

    /// Whether the file has a tensor.
    pub(in crate::models) fn has(&self, name: &str) -> bool {
        self.file.find_tensor(name).is_some()
    }

    /// The number of rows of a matrix, if the file has it.
    pub(in crate::models) fn rows(&self, name: &str) -> Option<usize> {
        self.file.find_tensor(name)?.shape().dims().first().copied()
    }

    /// The weight of this name.
    pub(in crate::models) fn get(&self, name: &str, dims: &[usize]) -> Result<Value<'g>> {
        Ok(self.g.weight(name, self.tensor(name, dims)?))
    }

    /// The weight of this name, if the file has it.
    pub(in crate::models) fn find(&self, name: &str, dims: &[usize]) -> Result<Option<Value<'g>>> {
        self.has(name).then(|| self.get(name, dims)).transpose()
    }

    /// A weight of an element-wise operation; all backends compute those in F32 only.
    pub(in crate::models) fn elements(&self, name: &str, dims: &[usize]) -> Result<Value<'g>> {
        Ok(self.g.weight(name, self.f32_tensor(name, dims)?))
    }

    /// A vector as weight of an element-wise operation.
    pub(in crate::models) fn vector(&self, name: &str, len: usize) -> Result<Value<'g>> {
        self.elements(name, &[len])
    }

    /// The vector of this name, if the file has it.
    pub(in crate::models) fn find_vector(&self, name: &str, len: usize) -> Result<Option<Value<'g>>> {
        self.has(name).then(|| self.vector(name, len)).transpose()
    }

    /// A matrix of an operation that backends compute in F32 only.
    pub(in crate::models) fn f32_matrix(&self, name: &str, dims: [usize; 2]) -> Result<Value<'g>> {
        Ok(self.g.weight(name, self.f32_tensor(name, &dims)?))
    }

    /// Rows of a matrix that several fused ones share, as a weight of its own: so backends pack it and choose kernels for it
    /// as for any other. `dims` are those of the whole; `part` distinguishes the name.
    pub(super) fn matrix_rows(
        &self,
        name: &str,
        part: &str,
        dims: [usize; 2],
        rows: Range<usize>,
    ) -> Result<Value<'g>> {
        let tensor = self.tensor(name, &dims)?;
        self.part(&tensor, part, rows.clone(), vec![rows.len(), dims[1]])
    }

    /// As [`FileWeights::matrix_rows`], for the bias of the fused matrix.
    pub(super) fn find_vector_rows(
        &self,
        name: &str,
        part: &str,
        len: usize,
        rows: Range<usize>,
    ) -> Result<Option<Value<'g>>> {
        if !self.has(name) {
            return Ok(None);
        }
        let tensor = self.f32_tensor(name, &[len])?;
        self.part(&tensor, part, rows.clone(), vec![rows.len()]).map(Some)
    }

    /// An error unless the file has this vector, or nothing if it is absent.
    pub(super) fn check_vector(&self, name: &str, len: usize) -> Result<()> {
        self.has(name).then(|| self.f32_tensor(name, &[len])).transpose().map(|_| ())
    }

    fn part(
        &self,
        tensor: &Tensor<'g>,
        part: &str,
        rows: Range<usize>,
        dims: Vec<usize>,
    ) -> Result<Value<'g>> {
        let whole = tensor.shape().dims().first().copied().unwrap_or(0).max(1);
        let row_bytes = tensor.byte_len() / whole;
        let wrong = || Error::TensorShape {
            name: tensor.name().to_owned(),
            found: tensor.shape().dims().to_vec(),
            wanted: dims.clone(),
        };
        let data = tensor.data().slice(rows.start * row_bytes, rows.len() * row_bytes).ok_or_else(wrong)?;
        let weight = match dims[..] {
            [rows] => Weight::with_data(tensor.dtype(), [rows], data),
            [rows, columns] => Weight::with_data(tensor.dtype(), [rows, columns], data),
            _ => return Err(wrong()),
        };
        Ok(self.g.weight(&format!("{}.{part}", tensor.name()), weight))
    }

    fn f32_tensor(&self, name: &str, dims: &[usize]) -> Result<Tensor<'g>> {
        let dtype = self.file.tensor(name)?.dtype();
        if dtype != DType::F32 {
            return Err(Error::TensorType { name: name.to_owned(), dtype });
        }
        self.tensor(name, dims)
    }

    fn tensor(&self, name: &str, dims: &[usize]) -> Result<Tensor<'g>> {
        let tensor = self.file.tensor(name)?;
        if tensor.shape().dims() != dims {
            return Err(Error::TensorShape {
                name: name.to_owned(),
                found: tensor.shape().dims().to_vec(),
                wanted: dims.to_vec(),
            });
        }
        if !tensor.dtype().is_computable() {
            return Err(Error::TensorType { name: name.to_owned(), dtype: tensor.dtype() });
        }
        Ok(tensor)
    }
}
