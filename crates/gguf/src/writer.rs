//! The writer of model files: streams tensor data, and replaces the target only by a complete file.

use std::{
    collections::{HashMap, HashSet},
    io::{self, BufWriter, Write},
    path::Path,
};

use quadriga_graph::{DType, MAX_DIMS, Shape};

use crate::{
    atomic_file::AtomicFile,
    cursor::check_name,
    error::{Error, FormatErrorKind, Result},
    from_value::FromValue,
    known,
    owned::{OwnedValue, push_string},
    parse::byte_len,
    value::Value,
};

/// Writes the bytes of one tensor.
type TensorWriter<'a> = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + 'a>;

/// Writes a model file: metadata and tensors in the order they are added.
///
/// Invalid keys and tensors are errors when they are added, so [`Writer::write`] fails only if the disk or a tensor's
/// source does. [`File`](crate::File) reads every file that a writer writes.
///
/// ```
/// use quadriga_gguf::{File, Writer};
/// use quadriga_graph::DType;
///
/// let mut bytes = Vec::new();
/// let mut writer = Writer::new();
/// writer.set("general.architecture", "llama")?.set("llama.block_count", 2u32)?;
/// writer.tensor("output_norm.weight", DType::F32, [4], |out| {
///     [1.0f32; 4].iter().try_for_each(|value| out.write_all(&value.to_ne_bytes()))
/// })?;
/// // `Writer::write` does the same to a file.
/// writer.write_to(&mut bytes)?;
/// assert_eq!(File::from_bytes(bytes)?.tensor("output_norm.weight")?.byte_len(), 16);
/// # Ok::<(), quadriga_gguf::Error>(())
/// ```
#[derive(Default)]
pub struct Writer<'a> {
    metadata: Vec<(String, OwnedValue)>,
    tensors: Vec<PendingTensor<'a>>,
    /// The index of each key in `metadata`.
    keys: HashMap<String, usize>,
    names: HashSet<String>,
    powerinfer: bool,
}

/// A tensor that has been added and not yet written.
struct PendingTensor<'a> {
    name: String,
    dtype: DType,
    shape: Shape,
    bytes: usize,
    source: TensorWriter<'a>,
}

impl<'a> Writer<'a> {
    /// A writer with no metadata and no tensors.
    pub fn new() -> Self {
        Writer::default()
    }

    /// A writer of PowerInfer's container, which differs in its first bytes.
    pub fn powerinfer() -> Self {
        Writer { powerinfer: true, ..Writer::default() }
    }

    /// Adds a key with its value.
    ///
    /// The key must be new. A key that the format defines (`general.architecture`, `tokenizer.ggml.tokens`) must have a
    /// value of its defined type. `general.alignment` sets the alignment of tensor data [default: 32].
    pub fn set(&mut self, key: &str, value: impl Into<OwnedValue>) -> Result<&mut Self> {
        let value = value.into();
        check_name(key)
            .and_then(|()| known::check(key, &value.value(), self.architecture()))
            .and_then(|()| if self.keys.contains_key(key) { Err(FormatErrorKind::NameInUse) } else { Ok(()) })
            .map_err(|kind| unwritable("key", key, kind))?;
        self.keys.insert(key.to_owned(), self.metadata.len());
        self.metadata.push((key.to_owned(), value));
        Ok(self)
    }

    /// Adds a tensor whose bytes `source` writes when the file is written.
    ///
    /// Dimensions are given outermost first. The source must write exactly as many bytes as type and shape require, in
    /// any number of calls; they are streamed to the file.
    pub fn tensor(
        &mut self,
        name: &str,
        dtype: DType,
        shape: impl Into<Shape>,
        source: impl FnOnce(&mut dyn Write) -> io::Result<()> + 'a,
    ) -> Result<&mut Self> {
        let shape = shape.into();
        let bytes = check_name(name)
            .and_then(|()| check_shape(dtype, &shape))
            .and_then(
                |bytes| if self.names.contains(name) { Err(FormatErrorKind::NameInUse) } else { Ok(bytes) },
            )
            .map_err(|kind| unwritable("tensor", name, kind))?;
        self.names.insert(name.to_owned());
        let (name, source) = (name.to_owned(), Box::new(source));
        self.tensors.push(PendingTensor { name, dtype, shape, bytes, source });
        Ok(self)
    }

    /// Adds a tensor with its bytes.
    pub fn tensor_bytes(
        &mut self,
        name: &str,
        dtype: DType,
        shape: impl Into<Shape>,
        bytes: &'a [u8],
    ) -> Result<&mut Self> {
        self.tensor(name, dtype, shape, move |out| out.write_all(bytes))
    }

    /// Writes the file atomically: to a temporary file in the same folder, which is synced, then renamed to `path`.
    ///
    /// A file at `path` stays intact until the complete new file replaces it. On an error, and when a source panics,
    /// the temporary file is removed.
    pub fn write(self, path: impl AsRef<Path>) -> Result<()> {
        let file = AtomicFile::create(path.as_ref())?;
        let mut out = BufWriter::with_capacity(1 << 20, file.file());
        self.write_to(&mut out)?;
        drop(out);
        file.publish()
    }

    /// Writes the file's bytes to a stream.
    pub fn write_to(self, out: &mut dyn Write) -> Result<()> {
        let alignment = self.alignment() as u64;
        let header = self.header(alignment)?;
        let failed = |what: String| move |source| Error::Stream { what, source };
        let padding = |len: u64| vec![0; (len.next_multiple_of(alignment) - len) as usize];
        out.write_all(&header).map_err(failed("the metadata".to_owned()))?;
        if !self.tensors.is_empty() {
            out.write_all(&padding(header.len() as u64)).map_err(failed("the metadata".to_owned()))?;
        }
        for tensor in self.tensors {
            let name = tensor.name;
            let what = format!("the data of tensor {name:?}");
            let expected = tensor.bytes as u64;
            let mut bounded = BoundedWriter { out, left: expected, exceeded: false };
            let result = (tensor.source)(&mut bounded);
            let found = expected - bounded.left;
            if bounded.exceeded {
                return Err(Error::DataLength { name, expected, found: found.saturating_add(1) });
            }
            result.map_err(failed(what.clone()))?;
            if found != expected {
                return Err(Error::DataLength { name, expected, found });
            }
            out.write_all(&padding(expected)).map_err(failed(what))?;
        }
        out.flush().map_err(failed("the file".to_owned()))
    }

    fn value(&self, key: &str) -> Option<Value<'_>> {
        self.metadata.get(*self.keys.get(key)?).map(|(_, value)| value.value())
    }

    fn architecture(&self) -> Option<&str> {
        self.value(known::ARCHITECTURE).and_then(FromValue::from_value)
    }

    fn alignment(&self) -> u32 {
        self.value(known::ALIGNMENT).and_then(FromValue::from_value).unwrap_or(known::DEFAULT_ALIGNMENT)
    }

    /// Magic, version, counts, metadata and tensor records.
    fn header(&self, alignment: u64) -> Result<Vec<u8>> {
        let mut out = if self.powerinfer { known::POWERINFER_MAGIC } else { known::MAGIC }.to_vec();
        out.extend_from_slice(&3u32.to_ne_bytes());
        out.extend_from_slice(&(self.tensors.len() as u64).to_ne_bytes());
        out.extend_from_slice(&(self.metadata.len() as u64).to_ne_bytes());
        let architecture = self.architecture();
        for (key, value) in &self.metadata {
            // Checked again: the architecture, which defines some keys, may have been set after them.
            known::check(key, &value.value(), architecture).map_err(|kind| unwritable("key", key, kind))?;
            push_string(&mut out, key);
            out.extend_from_slice(&value.kind().id().to_ne_bytes());
            out.extend_from_slice(value.bytes());
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            push_string(&mut out, &tensor.name);
            out.extend_from_slice(&(tensor.shape.rank() as u32).to_ne_bytes());
            for dim in tensor.shape.dims().iter().rev() {
                out.extend_from_slice(&(*dim as u64).to_ne_bytes());
            }
            out.extend_from_slice(&tensor.dtype.id().to_ne_bytes());
            out.extend_from_slice(&offset.to_ne_bytes());
            offset = offset
                .checked_add(tensor.bytes as u64)
                .and_then(|end| end.checked_next_multiple_of(alignment))
                .ok_or_else(|| unwritable("tensor", &tensor.name, FormatErrorKind::TooLarge))?;
        }
        Ok(out)
    }
}

fn unwritable(what: &str, name: &str, kind: FormatErrorKind) -> Error {
    Error::Unwritable { field: format!("{what} {name:?}"), kind }
}

fn check_shape(dtype: DType, shape: &Shape) -> Result<usize, FormatErrorKind> {
    if shape.rank() == 0 {
        return Err(FormatErrorKind::DimensionCount { found: 0, max: MAX_DIMS as u64 });
    }
    if shape.dims().contains(&0) {
        return Err(FormatErrorKind::Dimension { found: 0 });
    }
    byte_len(dtype, shape)
}

/// Forwards at most the bytes of one tensor.
struct BoundedWriter<'w> {
    out: &'w mut dyn Write,
    left: u64,
    exceeded: bool,
}

impl Write for BoundedWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
        if len < bytes.len() && len == 0 {
            self.exceeded = true;
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "more bytes than the tensor has"));
        }
        let written = self.out.write(bytes.get(..len).unwrap_or_default())?;
        self.left -= (written as u64).min(self.left);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
