//! The file's tensors as weights of the graph. Shape and type of each are checked before it is declared.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use quadriga_gguf::File;
use quadriga_graph::{DType, Data, GraphBuilder, Shape, Value, Weight};

use super::encoder::TOKEN_TYPE_COUNT;
use super::recorder::Recorder;
use crate::adapter::Adapter;
use crate::ranks::{Cut, RankShare};
use crate::{Error, Result};

/// The name of the slots for slices of a tensor.
pub(super) fn slots_of(tensor: &str) -> String {
    format!("{tensor}{SLOTS_SUFFIX}")
}

/// What the names of slots end with, after the name of the tensor whose slices they hold.
pub(crate) const SLOTS_SUFFIX: &str = ".slots";

/// The tensors of a model file.
pub(in crate::models) struct FileWeights<'g> {
    g: &'g GraphBuilder,
    file: &'g File,
    /// In place of the file's tensors.
    recorder: Option<&'g Recorder<'g>>,
    adapters: &'g [Adapter],
    /// Which parts of tensors this rank has.
    ranks: Option<&'g RankShare>,
    /// The matrices to whose products adapters have added theirs.
    adapted: RefCell<BTreeSet<String>>,
    /// The tensors that the graph has asked for.
    known: RefCell<HashSet<String>>,
}

/// A low-rank product that is added to one with a matrix of the file, or to those with consecutive rows of one.
pub(super) struct LowRank<'g, const N: usize = 1> {
    a: Value<'g>,
    b: [Value<'g>; N],
    factor: f32,
}

impl<'g, const N: usize> LowRank<'g, N> {
    /// The products with `x`, one for each range of rows.
    pub(super) fn products(&self, x: Value<'g>) -> [Value<'g>; N] {
        let inner = self.a.mul_mat(x);
        self.b.map(|b| b.mul_mat(inner).scale(self.factor))
    }
}

impl<'g> LowRank<'g> {
    /// The product with `x`.
    pub(super) fn product(&self, x: Value<'g>) -> Value<'g> {
        let [product] = self.products(x);
        product
    }
}

/// A tensor of the file, checked.
pub(super) struct FoundTensor {
    name: String,
    dtype: DType,
    dims: Vec<usize>,
    /// Absent when tensors are recorded.
    data: Option<Data>,
}

impl FoundTensor {
    /// The tensor as a weight of another shape with as many elements.
    pub(super) fn reshaped(self, shape: impl Into<Shape>) -> Weight {
        match self.data {
            Some(data) => Weight::with_data(self.dtype, shape, data),
            None => Weight::new(self.dtype, shape),
        }
    }

    fn weight(self) -> Weight {
        let shape = Shape::new(&self.dims).unwrap_or(Shape::from([0]));
        self.reshaped(shape)
    }

    /// Some of the rows, or of what the outermost dimension counts.
    pub(super) fn rows(&self, rows: Range<usize>) -> Result<FoundTensor> {
        let mut dims = self.dims.clone();
        let Some(first) = dims.first_mut() else { return Err(self.wrong_shape(&[rows.len()])) };
        let whole = std::mem::replace(first, rows.len()).max(1);
        let data = match &self.data {
            None => None,
            Some(data) => {
                let row = data.len() / whole;
                // Of what was cut into pieces, one.
                let piece = data.piece(rows.start * row, rows.len() * row);
                let part = piece.and_then(|(piece, start)| piece.slice(start, rows.len() * row));
                Some(part.ok_or_else(|| self.wrong_shape(&dims))?)
            }
        };
        Ok(FoundTensor { name: self.name.clone(), dtype: self.dtype, dims, data })
    }

    /// Several ranges of the rows, one after the other. The bytes are joined when a backend loads them.
    fn row_ranges(&self, ranges: &[Range<usize>]) -> Result<FoundTensor> {
        if let [rows] = ranges {
            return self.rows(rows.clone());
        }
        let (mut dims, mut pieces) = (self.dims.clone(), Vec::new());
        for rows in ranges {
            pieces.extend(self.rows(rows.clone())?.data);
        }
        if let Some(first) = dims.first_mut() {
            *first = ranges.iter().map(ExactSizeIterator::len).sum();
        }
        let data = self.data.is_some().then(|| Data::joined(pieces));
        Ok(FoundTensor { name: self.name.clone(), dtype: self.dtype, dims, data })
    }

    /// Ranges of the columns of a matrix, whole blocks. The bytes are joined when a backend loads them.
    fn column_ranges(&self, ranges: &[Range<usize>]) -> Result<FoundTensor> {
        let own = ranges.iter().map(ExactSizeIterator::len).sum();
        let [rows, all] = *self.dims.as_slice() else { return Err(self.wrong_shape(&[0, own])) };
        let dims = vec![rows, own];
        let wrong = || self.wrong_shape(&dims);
        let bytes = |columns: usize| self.dtype.row_bytes(columns).ok_or_else(wrong);
        let whole = bytes(all)?;
        let mut own = Vec::new();
        for columns in ranges {
            own.push((bytes(columns.start)?, bytes(columns.len())?));
        }
        let data = match &self.data {
            None => None,
            Some(data) => {
                let of_row =
                    |row: usize| own.iter().map(move |(start, len)| data.slice(row * whole + start, *len));
                let pieces = (0..rows).flat_map(of_row).collect::<Option<Vec<Data>>>();
                Some(Data::joined(pieces.ok_or_else(wrong)?))
            }
        };
        Ok(FoundTensor { name: self.name.clone(), dtype: self.dtype, dims, data })
    }

    /// Rows `part` of every `each` rows, of the repetitions `which`: `[which · part, columns]`.
    pub(super) fn repeated_rows(
        &self,
        which: Range<usize>,
        each: usize,
        part: Range<usize>,
    ) -> Result<FoundTensor> {
        let mut pieces = Vec::new();
        for repetition in which.clone() {
            let first = repetition * each;
            pieces.extend(self.rows(first + part.start..first + part.end)?.data);
        }
        let mut dims = self.dims.clone();
        if let Some(first) = dims.first_mut() {
            *first = which.len() * part.len();
        }
        let data = self.data.is_some().then(|| Data::joined(pieces));
        Ok(FoundTensor { name: self.name.clone(), dtype: self.dtype, dims, data })
    }

    /// Consecutive matrices of `rows` × `columns` elements, each transposed, as one of all their columns:
    /// `[count · columns, rows]`.
    pub(super) fn transposed(self, rows: usize, columns: usize) -> Result<FoundTensor> {
        let elements: usize = self.dims.iter().product();
        let dims = vec![elements / rows.max(1), rows];
        let (dtype, data) = match self.data.clone() {
            None => (self.dtype, None),
            Some(data) => {
                let turned = data.transposed(self.dtype, rows, columns);
                let (dtype, data) = turned.ok_or_else(|| self.wrong_shape(&[rows, columns]))?;
                (dtype, Some(data))
            }
        };
        Ok(FoundTensor { name: self.name, dtype, dims, data })
    }

    fn wrong_shape(&self, wanted: &[usize]) -> Error {
        Error::TensorShape { name: self.name.clone(), found: self.dims.clone(), wanted: wanted.to_vec() }
    }
}

impl<'g> FileWeights<'g> {
    pub(super) fn new(
        g: &'g GraphBuilder,
        file: &'g File,
        recorder: Option<&'g Recorder<'g>>,
        adapters: &'g [Adapter],
        ranks: Option<&'g RankShare>,
    ) -> FileWeights<'g> {
        FileWeights {
            g,
            file,
            recorder,
            adapters,
            ranks,
            adapted: RefCell::default(),
            known: RefCell::default(),
        }
    }

    /// Which parts of tensors this rank has, where there are several.
    pub(super) fn ranks(&self) -> Option<&'g RankShare> {
        self.ranks
    }

    /// What adapters add to the product with a matrix.
    pub(super) fn low_rank(&self, name: &str, dims: [usize; 2]) -> Result<Vec<LowRank<'g>>> {
        let all = 0..dims[0];
        self.low_rank_parts(name, dims, [all])
    }

    /// What adapters add to the products with ranges of rows of a fused matrix, whose dimensions are those of the whole.
    pub(super) fn low_rank_parts<const N: usize>(
        &self,
        name: &str,
        dims: [usize; 2],
        parts: [Range<usize>; N],
    ) -> Result<Vec<LowRank<'g, N>>> {
        let mut found = Vec::new();
        for (index, adapter) in self.adapters.iter().enumerate() {
            let Some(pair) = adapter.pair(name).filter(|pair| pair.of_rows.is_none()) else { continue };
            let [outputs, inputs] = dims;
            if (pair.a.dims[1], pair.b.dims[0]) != (inputs, outputs) {
                let reason = format!(
                    "{name} is {outputs} × {inputs}, but the product of B and A is {} × {}",
                    pair.b.dims[0], pair.a.dims[1]
                );
                return Err(Error::Adapter { reason });
            }
            self.adapted.borrow_mut().insert(name.to_owned());
            let declare = |part: &str, matrix: &crate::adapter::AdapterMatrix, dims: &[usize]| FoundTensor {
                name: format!("{name}.{part}.{index}"),
                dtype: matrix.dtype,
                dims: dims.to_vec(),
                data: Some(matrix.data.clone()),
            };
            let a = declare("lora_a", &pair.a, &pair.a.dims);
            let a = self.g.weight(&a.name.clone(), a.weight());
            // All parts have the same `A`, of which a graph has one.
            let mut b = [a; N];
            for (b, rows) in b.iter_mut().zip(&parts) {
                let whole = declare("lora_b", &pair.b, &pair.b.dims);
                *b = if rows.len() == outputs {
                    self.g.weight(&whole.name.clone(), whole.weight())
                } else {
                    let name = format!("{}.{}", whole.name, rows.start);
                    self.g.weight(&name, whole.rows(rows.clone())?.weight())
                };
            }
            found.push(LowRank { a, b, factor: adapter.factor(pair) });
        }
        Ok(found)
    }

    /// What adapters add to rows `ids` of a matrix that is looked up.
    pub(super) fn low_rank_rows(
        &self,
        name: &str,
        dims: [usize; 2],
        ids: Value<'g>,
    ) -> Result<Vec<Value<'g>>> {
        let mut found = Vec::new();
        for (index, adapter) in self.adapters.iter().enumerate() {
            let Some(pair) = adapter.pair(name) else { continue };
            let Some(second) = &pair.of_rows else { continue };
            if [pair.b.dims[0], second.dims[0]] != dims {
                let [rows, columns] = dims;
                let reason = format!(
                    "{name} is {rows} × {columns}, but the adapter's product is {} × {}",
                    pair.b.dims[0], second.dims[0]
                );
                return Err(Error::Adapter { reason });
            }
            self.adapted.borrow_mut().insert(name.to_owned());
            let declare = |part: &str, matrix: &crate::adapter::AdapterMatrix| {
                let name = format!("{name}.{part}.{index}");
                let (dtype, dims, data) = (matrix.dtype, matrix.dims.to_vec(), Some(matrix.data.clone()));
                self.g.weight(&name.clone(), FoundTensor { name, dtype, dims, data }.weight())
            };
            let rows = declare("lora_a", &pair.b).get_rows(ids);
            found.push(declare("lora_b", second).mul_mat(rows).scale(adapter.factor(pair)));
        }
        Ok(found)
    }

    /// What adapters add to the products of rows `[t, used or 1, k]` with matrices of experts.
    pub(super) fn low_rank_experts(
        &self,
        name: &str,
        dims: [usize; 3],
        x: Value<'g>,
        ids: Value<'g>,
    ) -> Result<Vec<Value<'g>>> {
        let mut found = Vec::new();
        for (index, adapter) in self.adapters.iter().enumerate() {
            let Some(pair) = adapter.pair(name) else { continue };
            if [pair.a.count, pair.b.dims[0], pair.a.dims[1]] != dims {
                let [count, outputs, inputs] = dims;
                let reason = format!(
                    "{name} is {count} × {outputs} × {inputs}, but the products of B and A are {} × {} × {}",
                    pair.a.count, pair.b.dims[0], pair.a.dims[1]
                );
                return Err(Error::Adapter { reason });
            }
            self.adapted.borrow_mut().insert(name.to_owned());
            let declare = |part: &str, matrix: &crate::adapter::AdapterMatrix| {
                let name = format!("{name}.{part}.{index}");
                let [rows, columns] = matrix.dims;
                let (dtype, dims, data) =
                    (matrix.dtype, vec![matrix.count, rows, columns], Some(matrix.data.clone()));
                self.g.weight(&name.clone(), FoundTensor { name, dtype, dims, data }.weight())
            };
            let inner = declare("lora_a", &pair.a).mul_mat_id(x, ids);
            found.push(declare("lora_b", &pair.b).mul_mat_id(inner, ids).scale(adapter.factor(pair)));
        }
        Ok(found)
    }

    /// An error if an adapter has matrices that nothing in the graph has used.
    pub(in crate::models) fn check_adapters(&self) -> Result<()> {
        let adapted = self.adapted.borrow();
        let names = self.adapters.iter().flat_map(Adapter::pairs).map(|(name, _)| name);
        match names.into_iter().find(|name| !adapted.contains(*name)) {
            None => Ok(()),
            Some(name) if self.file.find_tensor(name).is_none() => {
                Err(Error::Adapter { reason: format!("the model has no tensor {name:?}") })
            }
            Some(name) => Err(Error::Adapter {
                reason: format!(
                    "tensor {name:?} is not one that adapters can change while the model runs; merge it into the model file"
                ),
            }),
        }
    }

    /// The tensors of the file that nothing in the graph has asked for.
    pub(in crate::models) fn unknown(&self) -> Vec<&'g str> {
        let known = self.known.borrow();
        self.file.tensors().map(|tensor| tensor.name()).filter(|name| !known.contains(*name)).collect()
    }

    /// Notes that the graph knows a tensor.
    fn note(&self, name: &str) {
        if !self.known.borrow().contains(name) {
            self.known.borrow_mut().insert(name.to_owned());
        }
    }

    /// Whether the file has a tensor.
    pub(in crate::models) fn has(&self, name: &str) -> bool {
        self.note(name);
        match self.recorder {
            Some(recorder) => recorder.has(name),
            None => self.file.find_tensor(name).is_some(),
        }
    }

    /// The number of types of tokens that the file's metadata names.
    pub(super) fn token_type_count(&self) -> Result<usize> {
        let count = self.file.find::<u64>(TOKEN_TYPE_COUNT)?.unwrap_or(1);
        Ok(usize::try_from(count).unwrap_or(usize::MAX))
    }

    /// The number of rows of a matrix that this rank has, if the file has it.
    pub(in crate::models) fn rows(&self, name: &str) -> Option<usize> {
        let all = self.all_rows(name)?;
        Some(match self.ranks.and_then(|ranks| ranks.cut(name)) {
            Some(Cut::Rows(ranges)) => ranges.iter().map(ExactSizeIterator::len).sum(),
            _ => all,
        })
    }

    /// The number of rows of a matrix, or of elements of a vector, on all ranks together.
    pub(super) fn all_rows(&self, name: &str) -> Option<usize> {
        self.file.find_tensor(name)?.shape().dims().first().copied()
    }

    /// A weight that is made of a tensor of the file; `part` distinguishes its name from that of the tensor.
    pub(super) fn made_of(&self, tensor: FoundTensor, part: &str, shape: impl Into<Shape>) -> Value<'g> {
        let name = format!("{}.{part}", tensor.name);
        self.g.weight(&name, tensor.reshaped(shape))
    }

    /// The weight of this name.
    pub(in crate::models) fn get(&self, name: &str, dims: &[usize]) -> Result<Value<'g>> {
        Ok(self.g.weight(name, self.tensor(name, dims)?.weight()))
    }

    /// The weight of this name, if the file has it.
    pub(in crate::models) fn find(&self, name: &str, dims: &[usize]) -> Result<Option<Value<'g>>> {
        self.has(name).then(|| self.get(name, dims)).transpose()
    }

    /// A weight of an element-wise operation; all backends compute those in F32 only.
    pub(in crate::models) fn elements(&self, name: &str, dims: &[usize]) -> Result<Value<'g>> {
        Ok(self.g.weight(name, self.f32_tensor(name, dims)?.weight()))
    }

    /// A vector as weight of an element-wise operation.
    pub(in crate::models) fn vector(&self, name: &str, len: usize) -> Result<Value<'g>> {
        self.elements(name, &[len])
    }

    /// A vector of the file, as a weight of another name.
    pub(super) fn renamed_vector(&self, name: &str, weight: &str, len: usize) -> Result<Value<'g>> {
        Ok(self.g.weight(weight, self.f32_tensor(name, &[len])?.weight()))
    }

    /// The vector of this name, if the file has it.
    pub(in crate::models) fn find_vector(&self, name: &str, len: usize) -> Result<Option<Value<'g>>> {
        self.has(name).then(|| self.vector(name, len)).transpose()
    }

    /// As [`FileWeights::find_vector`]; an error if an element is not finite. For vectors that only decide between others:
    /// their NaN would not reach the result.
    pub(super) fn find_finite_vector(&self, name: &str, len: usize) -> Result<Option<Value<'g>>> {
        if !self.has(name) {
            return Ok(None);
        }
        let tensor = self.f32_tensor(name, &[len])?;
        let bytes = tensor.data.as_ref().map_or_else(Default::default, Data::bytes);
        let values = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        if let Some((index, value)) = values.enumerate().find(|(_, value)| !value.is_finite()) {
            return Err(Error::TensorValue { name: name.to_owned(), index, value });
        }
        Ok(Some(self.g.weight(name, tensor.weight())))
    }

    /// The matrices `[count, rows, columns]` of a layer's experts from `first_expert` on: one tensor, or, in the oldest files, one
    /// for each expert. Those are joined only while a backend loads them.
    pub(super) fn experts(
        &self,
        layer: &str,
        part: &str,
        first_expert: usize,
        dims: [usize; 3],
    ) -> Result<Value<'g>> {
        let name = format!("{layer}.{part}_exps.weight");
        let of = |expert: usize| format!("{layer}.{part}.{}.weight", first_expert + expert);
        if self.has(&name) || !self.has(&of(0)) {
            return self.get(&name, &dims);
        }
        let [count, rows, columns] = dims;
        let first = self.tensor(&of(0), &[rows, columns])?;
        let mut matrices = Vec::new();
        for expert in 0..count {
            let FoundTensor { name, dtype, data, .. } = self.tensor(&of(expert), &[rows, columns])?;
            if dtype != first.dtype {
                return Err(Error::TensorType { name, dtype });
            }
            matrices.extend(data);
        }
        let data = first.data.is_some().then(|| Data::joined(matrices));
        let joined = FoundTensor { name: name.clone(), dims: dims.to_vec(), data, ..first };
        Ok(self.g.weight(&name, joined.weight()))
    }

    /// Slots `[slots, rows, columns]` for matrices of a layer's experts, which the engine fills with some of those that
    /// [`FileWeights::experts`] has.
    pub(super) fn expert_slots(
        &self,
        layer: &str,
        part: &str,
        [count, rows, columns]: [usize; 3],
        slots: usize,
    ) -> Result<Value<'g>> {
        let name = format!("{layer}.{part}_exps.weight");
        let dtype = match self.has(&name) {
            true => self.tensor(&name, &[count, rows, columns])?.dtype,
            false => self.tensor(&format!("{layer}.{part}.0.weight"), &[rows, columns])?.dtype,
        };
        Ok(self.g.weight(&slots_of(&name), Weight::new(dtype, [slots, rows, columns])))
    }

    /// Slots for rows of a matrix, which the engine fills with some of those that the file has.
    pub(super) fn row_slots(&self, name: &str, dims: [usize; 2], slots: usize) -> Result<Value<'g>> {
        let dtype = self.tensor(name, &dims)?.dtype;
        Ok(self.g.weight(&slots_of(name), Weight::new(dtype, [slots, dims[1]])))
    }

    /// Slots for vectors of experts, as [`FileWeights::expert_slots`], if the file has vectors.
    pub(super) fn find_vector_slots(
        &self,
        name: &str,
        [count, len]: [usize; 2],
        slots: usize,
    ) -> Result<Option<Value<'g>>> {
        if !self.has(name) {
            return Ok(None);
        }
        let dtype = self.f32_tensor(name, &[count, len])?.dtype;
        Ok(Some(self.g.weight(&slots_of(name), Weight::new(dtype, [slots, len]))))
    }

    /// A vector for each of several experts `[count, len]`, if the file has them.
    pub(super) fn find_vectors(&self, name: &str, dims: [usize; 2]) -> Result<Option<Value<'g>>> {
        self.has(name).then(|| self.elements(name, &dims)).transpose()
    }

    /// A matrix `[1, len]` that files may have as a vector.
    pub(super) fn row(&self, name: &str, len: usize) -> Result<Value<'g>> {
        let dims: &[usize] = if self.rows(name) == Some(1) { &[1, len] } else { &[len] };
        Ok(self.g.weight(name, self.tensor(name, dims)?.reshaped([1, len])))
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
        let rows = self.tensor(name, &dims)?.rows(rows)?;
        Ok(self.g.weight(&format!("{name}.{part}"), rows.weight()))
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
        let rows = self.f32_tensor(name, &[len])?.rows(rows)?;
        Ok(Some(self.g.weight(&format!("{name}.{part}"), rows.weight())))
    }

    /// An error unless the file has this vector, or nothing if it is absent.
    pub(super) fn check_vector(&self, name: &str, len: usize) -> Result<()> {
        self.has(name).then(|| self.f32_tensor(name, &[len])).transpose().map(|_| ())
    }

    fn f32_tensor(&self, name: &str, dims: &[usize]) -> Result<FoundTensor> {
        if let Some(recorder) = self.recorder {
            recorder.add(name, dims, true);
        } else {
            let dtype = self.file.tensor(name)?.dtype();
            if dtype != DType::F32 {
                return Err(Error::TensorType { name: name.to_owned(), dtype });
            }
        }
        self.tensor(name, dims)
    }

    /// The tensor of this name and shape.
    pub(super) fn tensor(&self, name: &str, dims: &[usize]) -> Result<FoundTensor> {
        self.note(name);
        let found = |dtype, dims: &[usize], data| FoundTensor {
            name: name.to_owned(),
            dtype,
            dims: dims.to_vec(),
            data,
        };
        if let Some(recorder) = self.recorder {
            recorder.add(name, dims, false);
            return Ok(found(DType::F32, dims, None));
        }
        let tensor = self.file.tensor(name)?;
        let found = found(tensor.dtype(), tensor.shape().dims(), Some(tensor.data()));
        let found = match self.ranks.and_then(|ranks| ranks.cut(name)) {
            None => found,
            Some(Cut::Rows(rows)) => found.row_ranges(&rows)?,
            Some(Cut::Columns(columns)) => found.column_ranges(&columns)?,
        };
        if found.dims != dims {
            return Err(found.wrong_shape(dims));
        }
        let data = found.data.map(|data| self.file.on_demand(&tensor, data));
        let found = FoundTensor { data, ..found };
        if !found.dtype.is_computable() {
            return Err(Error::TensorType { name: name.to_owned(), dtype: found.dtype });
        }
        Ok(found)
    }
}
