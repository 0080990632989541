//! The error of each tensor: how far a file's weights are from those of another.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use quadriga_gguf::{File, Tensor};
use quadriga_graph::DType;
use serde::Serialize;

use crate::error::{QuantizeError, Result};
use crate::quantize::{RowReader, squared_error};

/// The error of one tensor.
#[derive(Clone, Debug, Serialize)]
pub struct TensorError {
    /// The name.
    pub name: String,
    /// The layer, from `blk.N.`.
    pub layer: Option<usize>,
    /// The type in the reference.
    #[serde(serialize_with = "type_name")]
    pub reference: DType,
    /// The type in the other file.
    #[serde(serialize_with = "type_name")]
    pub other: DType,
    /// Elements.
    pub elements: u64,
    /// The root of the mean squared difference.
    pub rms: f64,
    /// That, over the root of the mean square of the reference.
    pub relative: f64,
}

fn type_name<S: serde::Serializer>(dtype: &DType, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(dtype.name())
}

/// Tensors that cannot be compared, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UnpairedTensors {
    /// Those that only the reference has.
    pub reference: Vec<String>,
    /// Those that only the other file has.
    pub other: Vec<String>,
    /// Those that both have, in different shapes or of types that cannot be read.
    pub different: Vec<String>,
}

impl UnpairedTensors {
    /// Of two files.
    pub fn of(reference: &File, other: &File) -> UnpairedTensors {
        let missing = |own: &File, from: &File| -> Vec<String> {
            let missing = own.tensors().filter(|tensor| from.find_tensor(tensor.name()).is_none());
            missing.map(|tensor| tensor.name().to_owned()).collect()
        };
        let pairs =
            reference.tensors().filter_map(|tensor| Some((tensor, other.find_tensor(tensor.name())?)));
        UnpairedTensors {
            reference: missing(reference, other),
            other: missing(other, reference),
            different: pairs.filter(|(a, b)| !is_pair(a, b)).map(|(a, _)| a.name().to_owned()).collect(),
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.reference.len() + self.other.len() + self.different.len()
    }
}

/// Whether two tensors of one name can be compared.
fn is_pair(a: &Tensor<'_>, b: &Tensor<'_>) -> bool {
    a.shape() == b.shape() && a.dtype().is_computable() && b.dtype().is_computable()
}

/// The errors of all tensors that both files have in the same shape, in the order of the reference.
pub fn compare_tensors(reference: &File, other: &File) -> Result<Vec<TensorError>> {
    let pairs: Vec<(Tensor<'_>, Tensor<'_>)> = reference
        .tensors()
        .filter_map(|tensor| Some((tensor, other.find_tensor(tensor.name())?)))
        .filter(|(a, b)| is_pair(a, b))
        .collect();
    let readers = (RowReader::new(reference)?, RowReader::new(other)?);
    let next = AtomicUsize::new(0);
    let found = Mutex::new(Vec::new());
    let threads: usize = std::thread::available_parallelism().map_or(1, Into::into);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some((a, b)) = pairs.get(index) else { return };
                    let error = compare_tensor(&readers, a, b);
                    if let Ok(mut found) = found.lock() {
                        found.push((index, error));
                    }
                }
            });
        }
    });
    let mut found = found.into_inner().unwrap_or_default();
    found.sort_by_key(|(index, _)| *index);
    Ok(found.into_iter().map(|(_, error)| error).collect::<std::result::Result<_, QuantizeError>>()?)
}

fn compare_tensor(
    readers: &(RowReader, RowReader),
    a: &Tensor<'_>,
    b: &Tensor<'_>,
) -> std::result::Result<TensorError, QuantizeError> {
    let row_len = a.shape().dims().last().copied().unwrap_or(1).max(1);
    let rows = a.shape().elements() / row_len;
    let at_once = (65_536 / row_len).max(1);
    let (mut buffer, mut x, mut y) = (Vec::new(), Vec::new(), Vec::new());
    let (mut error, mut square) = (0.0, 0.0);
    for start in (0..rows).step_by(at_once) {
        let range = start..(start + at_once).min(rows);
        readers.0.values(a, range.clone(), &mut buffer, &mut x)?;
        readers.1.values(b, range, &mut buffer, &mut y)?;
        let (more_error, more_square) = squared_error(&x, &y, None);
        error += more_error;
        square += more_square;
    }
    let elements = a.element_count();
    Ok(TensorError {
        name: a.name().to_owned(),
        layer: a.name().strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok()),
        reference: a.dtype(),
        other: b.dtype(),
        elements,
        rms: (error / elements.max(1) as f64).sqrt(),
        relative: if square > 0.0 { (error / square).sqrt() } else { 0.0 },
    })
}
