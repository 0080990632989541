//! Low-rank adapters (LoRA) in GGUF files: what is added to the products with some of a model's matrices.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use quadriga_gguf::{File, Tensor};
use quadriga_graph::{DType, Data, blocks};

use crate::{Error, Result};

/// A low-rank adapter with its scale. Cheap to clone.
///
/// An adapter has, for some matrices `W`, matrices `A` of few rows and `B` of few columns. The model computes
/// `W·x + scale · alpha / rank · B·(A·x)`.
///
/// ```no_run
/// use quadriga_llm::{Adapter, Model};
///
/// let model = Model::open("model.gguf")?.with_adapters(&[Adapter::open("adapter.gguf", 1.0)?])?;
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Adapter {
    inner: Arc<AdapterFile>,
    scale: f32,
}

#[derive(Debug)]
struct AdapterFile {
    architecture: String,
    alpha: f32,
    /// By the names of the matrices that they belong to.
    pairs: BTreeMap<String, LowRankPair>,
}

/// The two matrices of an adapter that belong to one of the model's.
#[derive(Clone, Debug)]
pub struct LowRankPair {
    /// `[rank, inputs]`.
    pub a: AdapterMatrix,
    /// `[outputs, rank]`.
    pub b: AdapterMatrix,
    /// Of the token embedding, `A` as it is multiplied with rows of `B`: `[inputs, rank]`.
    pub(crate) of_rows: Option<AdapterMatrix>,
}

/// A matrix of an adapter.
#[derive(Clone, Debug)]
pub struct AdapterMatrix {
    /// The type of the elements.
    pub dtype: DType,
    /// The number of matrices, one after another: those of experts, or 1.
    pub count: usize,
    /// Rows and columns of each.
    pub dims: [usize; 2],
    /// The elements.
    pub data: Data,
}

/// The tensor of the token embedding. Rows of it are looked up, and so are those of its adapter: files have the two matrices
/// there the other way round.
const EMBEDDING: &str = "token_embd.weight";

impl AdapterMatrix {
    fn transposed(&self) -> Option<AdapterMatrix> {
        let [rows, columns] = self.dims;
        let (dtype, data) = self.data.clone().transposed(self.dtype, rows, columns)?;
        Some(AdapterMatrix { dtype, count: self.count, dims: [columns, rows], data })
    }
}

impl LowRankPair {
    /// The pair of the token embedding: `A` is `[tokens, rank]` and `B` `[width, rank]`, or as of other matrices.
    fn of_embedding(a: AdapterMatrix, b: AdapterMatrix) -> Option<LowRankPair> {
        if a.dims[1] == b.dims[1] {
            return Some(LowRankPair { a: b.transposed()?, b: a, of_rows: Some(b) });
        }
        let of_rows = Some(a.transposed()?);
        Some(LowRankPair { a, b, of_rows })
    }

    /// The number of experts, if the matrices are those of experts.
    pub fn experts(&self) -> Option<usize> {
        (self.a.count > 1).then_some(self.a.count)
    }

    /// Columns of `B`.
    pub fn rank(&self) -> usize {
        self.b.dims[1]
    }
}

impl Adapter {
    /// Opens an adapter and checks it: NaN and infinities in its matrices are errors.
    pub fn open(path: impl AsRef<Path>, scale: f32) -> Result<Adapter> {
        Adapter::from_file(&File::open(path)?, scale)
    }

    /// The adapter in an opened file.
    pub fn from_file(file: &File, scale: f32) -> Result<Adapter> {
        let wrong = |reason: String| Error::Adapter { reason };
        for (key, expected) in [("general.type", "adapter"), ("adapter.type", "lora")] {
            let found: Option<&str> = file.find(key)?;
            if found != Some(expected) {
                let found = found.unwrap_or("missing");
                return Err(wrong(format!("{key} is {found}, not {expected}: the file is no LoRA adapter")));
            }
        }
        if !scale.is_finite() {
            return Err(wrong(format!("the scale is {scale}")));
        }
        let alpha: f32 = file.find("adapter.lora.alpha")?.unwrap_or(0.0);
        let mut pairs = BTreeMap::new();
        for tensor in file.tensors() {
            let Some(name) = tensor.name().strip_suffix(".lora_a") else {
                let other = tensor.name().strip_suffix(".lora_b");
                match other.map(|name| format!("{name}.lora_a")) {
                    Some(first) if file.find_tensor(&first).is_some() => continue,
                    Some(first) => return Err(wrong(format!("{} has no {first}", tensor.name()))),
                    None => {
                        return Err(wrong(format!(
                            "tensor {:?} is not part of a low-rank product",
                            tensor.name()
                        )));
                    }
                }
            };
            let second = file.tensor(&format!("{name}.lora_b"))?;
            let matrix = |tensor: Tensor<'_>| match *tensor.shape().dims() {
                [rows, columns] if tensor.dtype().is_computable() => {
                    let dims = [rows, columns];
                    Ok(AdapterMatrix { dtype: tensor.dtype(), count: 1, dims, data: tensor.data() })
                }
                [count, rows, columns] if tensor.dtype().is_computable() && count > 0 => {
                    let dims = [rows, columns];
                    Ok(AdapterMatrix { dtype: tensor.dtype(), count, dims, data: tensor.data() })
                }
                _ => Err(wrong(format!(
                    "tensor {:?} is {} {}, not a matrix",
                    tensor.name(),
                    tensor.dtype(),
                    tensor.shape()
                ))),
            };
            let (a, b) = (matrix(tensor)?, matrix(second)?);
            for tensor in [tensor, second] {
                check_finite(&tensor)?;
            }
            if a.count != b.count {
                return Err(wrong(format!("{name}: {} matrices A, but {} B", a.count, b.count)));
            }
            let pair = match name {
                EMBEDDING => LowRankPair::of_embedding(a, b)
                    .ok_or_else(|| wrong(format!("the matrices of {name} cannot be transposed")))?,
                _ => LowRankPair { a, b, of_rows: None },
            };
            if pair.a.dims[0] != pair.rank() {
                return Err(wrong(format!(
                    "{name}: {} rows of A, but {} columns of B",
                    pair.a.dims[0],
                    pair.rank()
                )));
            }
            pairs.insert(name.to_owned(), pair);
        }
        if pairs.is_empty() {
            return Err(wrong("the file has no tensors".to_owned()));
        }
        let architecture = file.get::<&str>("general.architecture")?.to_owned();
        Ok(Adapter { inner: Arc::new(AdapterFile { architecture, alpha, pairs }), scale })
    }

    /// The architecture of the model that it belongs to.
    pub fn architecture(&self) -> &str {
        &self.inner.architecture
    }

    /// The scale.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The matrices, by the names of the model's that they belong to.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &LowRankPair)> {
        self.inner.pairs.iter().map(|(name, pair)| (name.as_str(), pair))
    }

    /// The matrices for one of the model's.
    pub fn pair(&self, name: &str) -> Option<&LowRankPair> {
        self.inner.pairs.get(name)
    }

    /// The factor of a product: the scale, times alpha over the rank where the file names alpha.
    pub fn factor(&self, pair: &LowRankPair) -> f32 {
        match self.inner.alpha {
            0.0 => self.scale,
            alpha => self.scale * alpha / pair.rank().max(1) as f32,
        }
    }
}

/// Elements of a matrix that are checked at once.
const AT_ONCE: usize = 64 << 10;

/// An error if an element of a matrix is NaN or infinite: it would make all logits NaN.
fn check_finite(tensor: &Tensor<'_>) -> Result<()> {
    let wrong = |reason: String| Error::Adapter { reason: format!("tensor {:?} {reason}", tensor.name()) };
    let columns = tensor.shape().cols().max(1);
    let row_bytes = tensor.dtype().row_bytes(columns).unwrap_or(1).max(1);
    let at_once = (AT_ONCE / columns).max(1);
    let mut values = Vec::new();
    for (chunk, bytes) in tensor.bytes().chunks(at_once * row_bytes).enumerate() {
        values.resize(bytes.len() / row_bytes * columns, 0.0f32);
        blocks::dequantize(tensor.dtype(), bytes, &mut values).map_err(|error| wrong(error.to_string()))?;
        if let Some(place) = values.iter().position(|value| !value.is_finite()) {
            let row = chunk * at_once + place / columns;
            let value = values.get(place).copied().unwrap_or(f32::NAN);
            return Err(wrong(format!("has the value {value} in row {row}: the file is damaged")));
        }
    }
    Ok(())
}
