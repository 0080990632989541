//! A model file, open for reading: one file, or all parts of a split model.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use quadriga_graph::Data;

use crate::{
    error::{Error, FieldError, FormatErrorKind, Result},
    from_value::FromValue,
    known,
    map::{Access, FileBytes, load},
    on_demand::DemandReader,
    parse::{self, MetadataEntry, Records, TensorRecord},
    split::SplitName,
    tensor::Tensor,
    value::Value,
};

/// A model file, validated when it is opened.
///
/// Later calls fail only if a requested key or tensor is missing or has another type. Keys, strings and tensor data
/// stay in the file map.
///
/// ```
/// use quadriga_gguf::{File, Writer};
/// use quadriga_graph::DType;
///
/// let mut bytes = Vec::new();
/// let mut writer = Writer::new();
/// writer.set("llama.context_length", 2048u32)?;
/// writer.tensor_bytes("output_norm.weight", DType::F32, [2], &[0; 8])?;
/// writer.write_to(&mut bytes)?;
///
/// // `File::open` does the same for a path.
/// let file = File::from_bytes(bytes)?;
/// assert_eq!(file.get::<usize>("llama.context_length")?, 2048);
/// for tensor in file.tensors() {
///     println!("{} {} {}", tensor.name(), tensor.dtype(), tensor.shape());
/// }
/// assert!(file.find_tensor("rope_freqs.weight").is_none());
/// # Ok::<(), quadriga_gguf::Error>(())
/// ```
#[derive(Debug)]
pub struct File {
    parts: Vec<FilePart>,
    /// In the order of the files.
    tensors: Vec<FileLocation>,
    /// The order of `tensors` by name.
    tensors_by_name: Vec<usize>,
}

/// Where a tensor is: its part, its index in that part, and its bytes.
#[derive(Debug)]
struct FileLocation {
    part: usize,
    index: usize,
    data: Data,
}

/// One file of a model.
#[derive(Debug)]
struct FilePart {
    path: Option<PathBuf>,
    data: Data,
    /// The open file, if `data` is mapped.
    mapped: Option<std::fs::File>,
    /// The file that tensors are read from when they are used; `data` is then only what is before them.
    reader: Option<DemandReader>,
    records: Records,
    /// Bytes of the file.
    length: usize,
}

impl FilePart {
    fn new(path: Option<PathBuf>, FileBytes { data, mapped }: FileBytes) -> Result<FilePart> {
        match parse::parse(data.as_slice().unwrap_or_default()) {
            Ok(records) => {
                let length = data.len();
                Ok(FilePart { path, data, mapped, reader: None, records, length })
            }
            Err(error) => Err(Error::Format { path, error }),
        }
    }

    /// The same with its names and values in memory: of the map, only the places of tensors are used from now on.
    fn on_demand(mut self) -> FilePart {
        let Some(file) = self.mapped.take() else { return self };
        let first = self.records.tensors.iter().map(|tensor| tensor.data.start).min();
        let header = self.data.slice(0, first.unwrap_or(self.data.len()));
        self.data = Data::from(header.as_ref().map_or_else(Vec::new, |header| header.bytes().into_owned()));
        self.reader = Some(DemandReader::new(file));
        self
    }

    fn bytes(&self) -> &[u8] {
        self.data.as_slice().unwrap_or_default()
    }

    fn open(path: &Path, access: Access) -> Result<FilePart> {
        FilePart::new(Some(path.to_owned()), load(path, access)?)
    }

    /// An error if a tensor could not be read.
    fn check_read(&self) -> Result<()> {
        match (&self.reader, &self.path) {
            (Some(reader), Some(path)) => reader.check(path),
            _ => Ok(()),
        }
    }

    /// An error if the file has become shorter than its map.
    fn check_mapped(&self) -> Result<()> {
        let (Some(file), Some(path)) = (&self.mapped, &self.path) else { return Ok(()) };
        let failed = |source| Error::Io { action: "check", path: path.clone(), source };
        let (mapped, found) = (self.bytes().len() as u64, file.metadata().map_err(failed)?.len());
        if found < mapped { Err(Error::Shrunk { path: path.clone(), mapped, found }) } else { Ok(()) }
    }

    fn entry(&self, key: &str) -> Option<(&MetadataEntry, Value<'_>)> {
        let bytes = self.bytes();
        let entry = self.records.entry(bytes, key)?;
        Some((entry, Value::decode(entry.kind, parse::bytes_at(bytes, &entry.value))))
    }

    /// A non-negative integer and its offset in the file.
    fn number(&self, key: &str) -> Result<Option<(u64, usize)>> {
        let Some((entry, value)) = self.entry(key) else { return Ok(None) };
        match value.integer().map(u64::try_from) {
            Some(Ok(number)) => Ok(Some((number, entry.value.start))),
            _ => {
                let kind = FormatErrorKind::WrongType {
                    expected: "a non-negative integer",
                    found: value.describe(),
                };
                Err(self.error(key, entry.value.start, kind))
            }
        }
    }

    fn error(&self, key: &str, offset: usize, kind: FormatErrorKind) -> Error {
        let error = FieldError::new(format_args!("value of key {key:?}"), offset, kind);
        Error::Format { path: self.path.clone(), error }
    }

    /// The number of parts that this part declares: 1 unless the model is split.
    fn split_count(&self) -> Result<u64> {
        // Tools that merge the parts of a model leave the key with the value 0.
        Ok(self.number(known::SPLIT_COUNT)?.map_or(1, |(count, _)| count.max(1)))
    }
}

impl File {
    /// Whether the file is in PowerInfer's container.
    pub fn is_powerinfer(&self) -> bool {
        self.parts.first().is_some_and(|part| part.records.is_powerinfer)
    }

    /// Opens a model file. Given one part of a split model (`NAME-00002-of-00003.gguf`), opens all parts.
    ///
    /// The file is memory-mapped: opening takes time and memory for names and metadata only. It must not be modified in
    /// place while it is open: reading bytes that were cut off ends the process (`SIGBUS`).
    /// [`check_mapped`](File::check_mapped) notices a file that has become shorter, and [`read`](File::read) does not
    /// depend on the file any more. Replacing it by renaming, as [`Writer`](crate::Writer) does, is safe.
    pub fn open(path: impl AsRef<Path>) -> Result<File> {
        File::load(path.as_ref(), Access::Map)
    }

    /// As [`open`](File::open), but reads the whole file into memory instead of mapping it.
    pub fn read(path: impl AsRef<Path>) -> Result<File> {
        File::load(path.as_ref(), Access::Read)
    }

    /// As [`open`](File::open), but [`on_demand`](File::on_demand) reads tensors, or parts of them, into memory when they are used:
    /// none that is not. Once they are read, the file may change on disk.
    pub fn read_on_demand(path: impl AsRef<Path>) -> Result<File> {
        File::load(path.as_ref(), Access::OnDemand)
    }

    /// Bytes of a tensor, as they are to be used: `data` is made of slices of [`Tensor::data`], which are returned as they are. Of a
    /// file that is [read on demand](File::read_on_demand), they are read when they are first asked for, and in memory then.
    pub fn on_demand(&self, tensor: &Tensor<'_>, data: Data) -> Data {
        let reader = self.parts.get(tensor.part()).and_then(|part| part.reader.as_ref());
        reader.and_then(|reader| Some(reader.part(data.ranges()?))).unwrap_or(data)
    }

    /// Bytes of tensors that were read on demand.
    pub fn bytes_read(&self) -> u64 {
        self.parts.iter().filter_map(|part| part.reader.as_ref()).map(DemandReader::bytes_read).sum()
    }

    /// An error if a mapped file has become shorter since it was opened, or if tensors could not be read on demand. Costs one system
    /// call per part.
    pub fn check_mapped(&self) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.check_mapped().and_then(|()| part.check_read()))
    }

    fn load(path: &Path, access: Access) -> Result<File> {
        let part = FilePart::open(path, access)?;
        let count = part.split_count()?;
        if count == 1 {
            return File::from_checked_parts(vec![part], access);
        }
        let name = SplitName::of(path).filter(|name| u64::from(name.count) == count);
        let Some(name) = name else {
            let number = part.number(known::SPLIT_NUMBER)?.map_or(1, |(number, _)| number.saturating_add(1));
            return Err(Error::SplitName { path: path.to_owned(), number, count });
        };
        let mut opened = Some(part);
        let parts = (1..=name.count).map(|number| match opened.take_if(|_| number == name.number) {
            Some(part) => Ok(part),
            None => FilePart::open(&name.path_of(number), access),
        });
        File::from_checked_parts(parts.collect::<Result<_>>()?, access)
    }

    /// Reads a model from memory.
    pub fn from_bytes(bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Result<File> {
        File::from_parts([bytes])
    }

    /// Reads a split model from memory, given its parts in order.
    pub fn from_parts<B: AsRef<[u8]> + Send + Sync + 'static>(
        parts: impl IntoIterator<Item = B>,
    ) -> Result<File> {
        let parts = parts
            .into_iter()
            .map(|bytes| FilePart::new(None, FileBytes { data: Data::new(Arc::new(bytes)), mapped: None }));
        File::from_checked_parts(parts.collect::<Result<_>>()?, Access::Read)
    }

    fn from_checked_parts(parts: Vec<FilePart>, access: Access) -> Result<File> {
        check_split(&parts)?;
        let mut tensors = Vec::new();
        for (index, part) in parts.iter().enumerate() {
            let slices = part.records.tensors.iter().map(|tensor| {
                // The parser has checked that every range is inside the file.
                part.data.slice(tensor.data.start, tensor.data.len())
            });
            let slices = slices.flatten().enumerate();
            tensors.extend(slices.map(|(place, data)| FileLocation { part: index, index: place, data }));
        }
        let parts = match access {
            Access::OnDemand => parts.into_iter().map(FilePart::on_demand).collect(),
            Access::Map | Access::Read => parts,
        };
        let mut file = File { parts, tensors_by_name: (0..tensors.len()).collect(), tensors };
        let mut order = std::mem::take(&mut file.tensors_by_name);
        order.sort_by_key(|index| file.tensor_name(*index));
        for (first, second) in order.iter().zip(order.iter().skip(1)) {
            if file.tensor_name(*first) == file.tensor_name(*second) {
                return Err(file.duplicate(*first, *second));
            }
        }
        file.tensors_by_name = order;
        Ok(file)
    }

    fn duplicate(&self, first: usize, second: usize) -> Error {
        let offset = |index| self.record(index).map_or(0, |(_, record)| record.name.start);
        let name = String::from_utf8_lossy(self.tensor_name(second).unwrap_or_default());
        let kind = FormatErrorKind::Duplicate { first: offset(first) as u64 };
        Error::Format {
            path: self.record(second).and_then(|(part, _)| part.path.clone()),
            error: FieldError::new(format_args!("tensor {name:?}"), offset(second), kind),
        }
    }

    fn record(&self, index: usize) -> Option<(&FilePart, &TensorRecord)> {
        let location = self.tensors.get(index)?;
        let part = self.parts.get(location.part)?;
        Some((part, part.records.tensors.get(location.index)?))
    }

    fn tensor_name(&self, index: usize) -> Option<&[u8]> {
        self.record(index).map(|(part, record)| parse::bytes_at(part.bytes(), &record.name))
    }

    fn tensor_at(&self, index: usize) -> Option<Tensor<'_>> {
        let location = self.tensors.get(index)?;
        let (part, record) = self.record(index)?;
        let name = parse::text_at(part.bytes(), &record.name);
        Some(Tensor::new(name, location.part, record, &location.data))
    }

    /// The version of the format, 2 or 3.
    pub fn version(&self) -> u32 {
        self.parts.first().map_or(0, |part| part.records.version)
    }

    /// The alignment of tensor data in the file.
    pub fn alignment(&self) -> u32 {
        self.parts.first().map_or(known::DEFAULT_ALIGNMENT, |part| part.records.alignment)
    }

    /// The number of files: 1 unless the model is split.
    pub fn part_count(&self) -> usize {
        self.parts.len()
    }

    /// The files of the model, in order; none if it was read from memory.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().filter_map(|part| part.path.as_deref())
    }

    /// The total size of all files.
    pub fn byte_len(&self) -> u64 {
        self.parts.iter().map(|part| part.length as u64).sum()
    }

    /// Keys and values in the order of the file; of a split model, those of the first part.
    pub fn metadata(&self) -> impl ExactSizeIterator<Item = (&str, Value<'_>)> {
        let (bytes, entries): (&[u8], &[MetadataEntry]) = match self.parts.first() {
            Some(part) => (part.bytes(), &part.records.entries),
            None => (&[], &[]),
        };
        entries.iter().map(move |entry| {
            (
                parse::text_at(bytes, &entry.key),
                Value::decode(entry.kind, parse::bytes_at(bytes, &entry.value)),
            )
        })
    }

    /// The value of a key, whatever its type.
    pub fn value(&self, key: &str) -> Option<Value<'_>> {
        self.parts.first()?.entry(key).map(|(_, value)| value)
    }

    /// The value of a required key: `file.get::<u32>("llama.block_count")?`.
    ///
    /// An integer can be read as any integer type it fits in, a float as either float type.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T> {
        self.find(key)?.ok_or_else(|| Error::MissingKey { key: key.to_owned() })
    }

    /// The value of an optional key. A value of another type is an error.
    pub fn find<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match T::from_value(value) {
            Some(value) => Ok(Some(value)),
            None => Err(Error::WrongType {
                key: key.to_owned(),
                expected: T::expected(),
                found: value.describe(),
            }),
        }
    }

    /// The tensors, in the order of the file.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        (0..self.tensors.len()).filter_map(|index| self.tensor_at(index))
    }

    /// How many tensors there are.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// The tensor with this name; an error if there is none.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>> {
        self.find_tensor(name)
            .ok_or_else(|| Error::MissingTensor { name: name.to_owned(), count: self.tensors.len() })
    }

    /// The tensor with this name, if there is one.
    pub fn find_tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let name = Some(name.as_bytes());
        let place =
            self.tensors_by_name.binary_search_by(|index| self.tensor_name(*index).cmp(&name)).ok()?;
        self.tensor_at(*self.tensors_by_name.get(place)?)
    }
}

/// Checks that the parts of a split model are complete, in order and consistent.
fn check_split(parts: &[FilePart]) -> Result<()> {
    let tensors: usize = parts.iter().map(|part| part.records.tensors.len()).sum();
    let [first, ..] = parts else {
        let error = FieldError::new("model", 0, FormatErrorKind::SplitCount { found: 1, expected: 0 });
        return Err(Error::Format { path: None, error });
    };
    if parts.len() == 1 && first.split_count()? == 1 {
        return Ok(());
    }
    let have = parts.len() as u64;
    for (index, part) in parts.iter().enumerate() {
        let number = |key: &'static str| {
            part.number(key)?.ok_or_else(|| part.error(key, 0, FormatErrorKind::SplitKey))
        };
        let (found, offset) = number(known::SPLIT_COUNT)?;
        if found != have {
            let kind = FormatErrorKind::SplitCount { found, expected: have };
            return Err(part.error(known::SPLIT_COUNT, offset, kind));
        }
        let (found, offset) = number(known::SPLIT_NUMBER)?;
        if found != index as u64 {
            let kind = FormatErrorKind::SplitNumber { found, expected: index as u64 };
            return Err(part.error(known::SPLIT_NUMBER, offset, kind));
        }
        let (expected, offset) = number(known::SPLIT_TENSORS)?;
        if expected != tensors as u64 {
            let kind = FormatErrorKind::SplitTensors { found: tensors as u64, expected };
            return Err(part.error(known::SPLIT_TENSORS, offset, kind));
        }
    }
    Ok(())
}
