//! Writing model files: tensor data is streamed, and a file appears under its name only when it is whole.

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

/// What produces the bytes of one tensor.
type Source<'a> = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + 'a>;

/// A model file to be written: metadata and tensors in the order they are added.
///
/// Mistakes are found when they are made, so that [`Writer::write`] fails only for reasons outside: the disk, or a
/// tensor's source. What it writes, [`File`](crate::File) reads.
#[derive(Default)]
pub struct Writer<'a> {
    metadata: Vec<(String, OwnedValue)>,
    tensors: Vec<Tensor<'a>>,
    /// Where each key is in `metadata`.
    keys: HashMap<String, usize>,
    names: HashSet<String>,
}

struct Tensor<'a> {
    name: String,
    dtype: DType,
    shape: Shape,
    bytes: usize,
    source: Source<'a>,
}

impl<'a> Writer<'a> {
    /// A writer with no metadata and no tensors.
    pub fn new() -> Self {
        Writer::default()
    }

    /// Adds a key with its value.
    ///
    /// The key must be new, and a value of a key with a fixed meaning (`general.architecture`,
    /// `tokenizer.ggml.tokens`) of the type that everybody expects. `general.alignment` sets the alignment, which is
    /// 32 otherwise.
    pub fn set(&mut self, key: &str, value: impl Into<OwnedValue>) -> Result<&mut Self> {
        let value = value.into();
        check_name(key)
            .and_then(|()| known::check(key, &value.value(), self.architecture()))
            .and_then(|()| if self.keys.contains_key(key) { Err(FormatErrorKind::Twice) } else { Ok(()) })
            .map_err(|problem| unwritable("key", key, problem))?;
        self.keys.insert(key.to_owned(), self.metadata.len());
        self.metadata.push((key.to_owned(), value));
        Ok(self)
    }

    /// Adds a tensor whose bytes `source` will write when the file is written.
    ///
    /// Dimensions are given outermost first; the file lists them the other way round. The source must write exactly
    /// the bytes that type and dimensions call for; it may write them in pieces, and they are not kept.
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
            .and_then(|bytes| if self.names.contains(name) { Err(FormatErrorKind::Twice) } else { Ok(bytes) })
            .map_err(|problem| unwritable("tensor", name, problem))?;
        self.names.insert(name.to_owned());
        let (name, source) = (name.to_owned(), Box::new(source));
        self.tensors.push(Tensor { name, dtype, shape, bytes, source });
        Ok(self)
    }

    /// Adds a tensor whose bytes are at hand.
    pub fn tensor_bytes(
        &mut self,
        name: &str,
        dtype: DType,
        shape: impl Into<Shape>,
        bytes: &'a [u8],
    ) -> Result<&mut Self> {
        self.tensor(name, dtype, shape, move |out| out.write_all(bytes))
    }

    /// Writes the file: to a temporary name beside `path`, synced, then renamed.
    ///
    /// Whatever was at `path` stays whole until it is replaced by a whole file; on an error, and when a source
    /// panics, the temporary file is removed.
    pub fn write(self, path: impl AsRef<Path>) -> Result<()> {
        let file = AtomicFile::create(path.as_ref())?;
        let mut out = BufWriter::with_capacity(1 << 20, file.file());
        self.write_to(&mut out)?;
        drop(out);
        file.publish()
    }

    /// Writes the file's bytes to any stream.
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
            let wanted = tensor.bytes as u64;
            let mut metered = Metered { out, left: wanted, exceeded: false };
            let result = (tensor.source)(&mut metered);
            let found = wanted - metered.left;
            if metered.exceeded {
                return Err(Error::DataLength { name, wanted, found: found.saturating_add(1) });
            }
            result.map_err(failed(what.clone()))?;
            if found != wanted {
                return Err(Error::DataLength { name, wanted, found });
            }
            out.write_all(&padding(wanted)).map_err(failed(what))?;
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

    /// Everything before the padding that precedes the data.
    fn header(&self, alignment: u64) -> Result<Vec<u8>> {
        let mut out = b"GGUF".to_vec();
        out.extend_from_slice(&3u32.to_ne_bytes());
        out.extend_from_slice(&(self.tensors.len() as u64).to_ne_bytes());
        out.extend_from_slice(&(self.metadata.len() as u64).to_ne_bytes());
        let architecture = self.architecture();
        for (key, value) in &self.metadata {
            // Once more, for keys that were set before the architecture that gives them their meaning.
            known::check(key, &value.value(), architecture)
                .map_err(|problem| unwritable("key", key, problem))?;
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

fn unwritable(what: &str, name: &str, problem: FormatErrorKind) -> Error {
    Error::Unwritable { field: format!("{what} {name:?}"), problem }
}

fn check_shape(dtype: DType, shape: &Shape) -> Result<usize, FormatErrorKind> {
    if shape.rank() == 0 {
        return Err(FormatErrorKind::DimensionCount { found: 0, most: MAX_DIMS as u64 });
    }
    if shape.dims().contains(&0) {
        return Err(FormatErrorKind::Dimension { found: 0 });
    }
    byte_len(dtype, shape)
}

/// Passes on the bytes of one tensor, and not one more.
struct Metered<'w> {
    out: &'w mut dyn Write,
    left: u64,
    exceeded: bool,
}

impl Write for Metered<'_> {
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
