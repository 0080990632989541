//! The tensors of the converted file: which elements of which source tensors they consist of.

use std::io;
use std::sync::Arc;

use super::error::ConvertResult;
use super::source::{Source, TensorStore, wrong_shape};

/// Where a row of a tensor comes from: elements of one source, from `start` on, `step` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowSource {
    pub(super) source: usize,
    pub(super) start: usize,
    pub(super) step: usize,
}

/// The row of a source for each row of a tensor.
type RowMap = Arc<dyn Fn(usize) -> RowSource + Send + Sync>;

/// What is done to each element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ElementMap {
    Keep,
    /// Norms of models that add 1 to their weights.
    AddOne,
    /// Decays that are stored as logarithms.
    NegativeExponential,
}

#[derive(Clone)]
enum OutputData {
    Rows { sources: Vec<Source>, rows: RowMap, columns: Option<Arc<[u32]>>, map: ElementMap },
    Constant(Arc<[f32]>),
}

/// A tensor of the converted file.
#[derive(Clone)]
pub(super) struct OutputTensor {
    pub(super) name: String,
    /// The dimensions, outermost first.
    pub(super) dims: Vec<usize>,
    data: OutputData,
}

/// The matrix that a tensor is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TensorOrigin {
    /// The name of the source.
    pub(super) source: String,
    /// The row of the source for each row.
    pub(super) rows: Vec<usize>,
    /// The column of the source for each column, unless they are in the same order.
    pub(super) columns: Option<Arc<[u32]>>,
}

/// Memory that reading a piece of a tensor needs, kept for the next one.
#[derive(Default)]
pub(super) struct ReadBuffers {
    bytes: Vec<u8>,
    row: Vec<f32>,
    /// The source, the first element and the elements of a part of a tensor that is read across.
    slab: Option<(usize, usize, Vec<f32>)>,
}

impl OutputTensor {
    /// A tensor as it is.
    pub(super) fn whole(name: &str, source: Source) -> OutputTensor {
        let columns = source.columns();
        let dims = source.shape.clone();
        OutputTensor::rows(name, dims, vec![source], move |row| RowSource {
            source: 0,
            start: row * columns,
            step: 1,
        })
    }

    /// The tensor with its rows in another order: `from` gives the row of the source for each row.
    pub(super) fn permuted(
        name: &str,
        source: Source,
        from: impl Fn(usize) -> usize + Send + Sync + 'static,
    ) -> OutputTensor {
        // A bias is one row; its elements are permuted like the rows of its matrix.
        let columns = source.columns();
        if source.shape.len() == 1 {
            let order: Arc<[u32]> = (0..columns).map(|column| from(column) as u32).collect();
            let mut tensor = OutputTensor::whole(name, source);
            tensor.set_columns(order);
            return tensor;
        }
        let dims = source.shape.clone();
        OutputTensor::rows(name, dims, vec![source], move |row| RowSource {
            source: 0,
            start: from(row) * columns,
            step: 1,
        })
    }

    /// Tensors of one shape behind each other, in a new outermost dimension.
    pub(super) fn stacked(name: &str, sources: Vec<Source>) -> ConvertResult<OutputTensor> {
        let shape = sources.first().map(|source| source.shape.clone()).unwrap_or_default();
        if let Some(other) = sources.iter().find(|source| source.shape != shape) {
            return Err(wrong_shape(other, &format!("{shape:?}, as the others of its kind")));
        }
        let (rows, columns) =
            sources.first().map_or((1, 1), |source| (source.rows().max(1), source.columns()));
        let dims = [&[sources.len()], shape.as_slice()].concat();
        Ok(OutputTensor::rows(name, dims, sources, move |row| RowSource {
            source: row / rows,
            start: row % rows * columns,
            step: 1,
        }))
    }

    /// A tensor of rows from anywhere.
    pub(super) fn rows(
        name: &str,
        dims: Vec<usize>,
        sources: Vec<Source>,
        rows: impl Fn(usize) -> RowSource + Send + Sync + 'static,
    ) -> OutputTensor {
        let data = OutputData::Rows { sources, rows: Arc::new(rows), columns: None, map: ElementMap::Keep };
        OutputTensor { name: name.to_owned(), dims, data }
    }

    /// Values that no file has.
    pub(super) fn constant(name: &str, values: Vec<f32>) -> OutputTensor {
        OutputTensor {
            name: name.to_owned(),
            dims: vec![values.len()],
            data: OutputData::Constant(values.into()),
        }
    }

    /// Applies a function to each element.
    pub(super) fn mapped(mut self, new: ElementMap) -> OutputTensor {
        if let OutputData::Rows { map, .. } = &mut self.data {
            *map = new;
        }
        self
    }

    /// Takes the elements of each row in another order.
    pub(super) fn set_columns(&mut self, order: Arc<[u32]>) {
        if let OutputData::Rows { columns, .. } = &mut self.data {
            *columns = Some(order);
        }
    }

    /// The same elements with other dimensions that have the same last one.
    pub(super) fn with_dims(mut self, dims: Vec<usize>) -> OutputTensor {
        self.dims = dims;
        self
    }

    /// The matrix that the tensor is made of; `None` if there are several, or if it is not made of whole rows.
    pub(super) fn origin(&self) -> Option<TensorOrigin> {
        let OutputData::Rows { sources, rows, columns, map: ElementMap::Keep } = &self.data else {
            return None;
        };
        let ([source], [count, length]) = (sources.as_slice(), self.dims.as_slice()) else { return None };
        let whole = |row: usize| {
            let from = rows(row);
            let is_row = from.step == 1 && from.start.is_multiple_of(*length) && source.columns() == *length;
            is_row.then(|| from.start / length)
        };
        let rows = (0..*count).map(whole).collect::<Option<Vec<usize>>>()?;
        Some(TensorOrigin { source: source.name().to_owned(), rows, columns: columns.clone() })
    }

    /// The matrices that a tensor of experts is made of, one behind another and as they are; `None` for any other tensor.
    pub(super) fn stacked_sources(&self) -> Option<Vec<&str>> {
        let OutputData::Rows { sources, rows, columns: None, map: ElementMap::Keep } = &self.data else {
            return None;
        };
        let [count, own, length] = *self.dims.as_slice() else { return None };
        let is_stacked = |row: usize| {
            rows(row) == RowSource { source: row / own.max(1), start: row % own.max(1) * length, step: 1 }
        };
        let whole = sources.len() == count && sources.iter().all(|source| source.columns() == length);
        (whole && (0..count * own).all(is_stacked)).then(|| sources.iter().map(Source::name).collect())
    }

    /// Elements of a row.
    pub(super) fn row_len(&self) -> usize {
        self.dims.last().copied().unwrap_or(1)
    }

    /// How many rows there are.
    pub(super) fn row_count(&self) -> usize {
        self.dims.iter().product::<usize>().checked_div(self.row_len()).unwrap_or(0)
    }

    /// The elements of the largest matrix that is read as a whole because the rows are its columns; 0 where rows are rows.
    pub(super) fn matrix_read_across(&self) -> usize {
        match &self.data {
            OutputData::Rows { sources, rows, .. } if self.row_count() > 0 && rows(0).step != 1 => {
                sources.iter().map(matrix_elements).max().unwrap_or(0)
            }
            _ => 0,
        }
    }

    /// Whether all of it comes from packed 4-bit weights, rows as they are.
    pub(super) fn is_mxfp4(&self) -> bool {
        match &self.data {
            OutputData::Rows { sources, columns, map, .. } => {
                columns.is_none()
                    && *map == ElementMap::Keep
                    && !sources.is_empty()
                    && sources.iter().all(Source::is_mxfp4)
            }
            OutputData::Constant(_) => false,
        }
    }

    /// Computes rows from `first` on, as many as fill `out`.
    pub(super) fn read_rows(
        &self,
        store: &TensorStore,
        first: usize,
        out: &mut [f32],
        buffers: &mut ReadBuffers,
    ) -> io::Result<()> {
        let length = self.row_len().max(1);
        let (sources, rows, columns, map) = match &self.data {
            OutputData::Constant(values) => {
                let start = first * length;
                let values = values.get(start..start + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
                out.copy_from_slice(values);
                return Ok(());
            }
            OutputData::Rows { sources, rows, columns, map } => (sources, rows, columns, *map),
        };
        let mut row = first;
        let mut rest = &mut *out;
        while !rest.is_empty() {
            let from = rows(row);
            let source = sources.get(from.source).ok_or(io::ErrorKind::NotFound)?;
            // Rows that follow each other in the source are read at once.
            let mut count = 1;
            if from.step == 1 {
                while (count + 1) * length <= rest.len()
                    && rows(row + count) == (RowSource { start: from.start + count * length, ..from })
                {
                    count += 1;
                }
            }
            let (now, later) = rest.split_at_mut((count * length).min(rest.len()));
            if from.step == 1 {
                store.read(source, from.start, now, &mut buffers.bytes)?;
            } else {
                across(store, from, source, now, buffers)?;
            }
            row += count;
            rest = later;
        }
        if let Some(order) = columns {
            for values in out.chunks_exact_mut(length) {
                buffers.row.clear();
                buffers.row.extend_from_slice(values);
                for (value, column) in values.iter_mut().zip(order.iter()) {
                    *value = buffers.row.get(*column as usize).copied().unwrap_or(0.0);
                }
            }
        }
        match map {
            ElementMap::Keep => {}
            ElementMap::AddOne => out.iter_mut().for_each(|value| *value += 1.0),
            ElementMap::NegativeExponential => out.iter_mut().for_each(|value| *value = -value.exp()),
        }
        Ok(())
    }
}

/// The elements of one of the matrices that a source consists of.
fn matrix_elements(source: &Source) -> usize {
    match source.shape.as_slice() {
        [.., rows, columns] => rows * columns,
        _ => source.elements(),
    }
}

/// Reads a row whose elements are apart: the matrix that they are in is read once for all of its rows.
fn across(
    store: &TensorStore,
    from: RowSource,
    source: &Source,
    out: &mut [f32],
    buffers: &mut ReadBuffers,
) -> io::Result<()> {
    let matrix = matrix_elements(source);
    let start = from.start / matrix.max(1) * matrix;
    if buffers.slab.as_ref().is_none_or(|(known, at, _)| (*known, *at) != (from.source, start)) {
        let mut values = vec![0.0; matrix];
        store.read(source, start, &mut values, &mut buffers.bytes)?;
        buffers.slab = Some((from.source, start, values));
    }
    let Some((_, _, values)) = &buffers.slab else { return Ok(()) };
    for (index, value) in out.iter_mut().enumerate() {
        *value = values.get(from.start - start + index * from.step).copied().unwrap_or(0.0);
    }
    Ok(())
}
