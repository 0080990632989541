//! A model file, open for reading: one file, or all parts of a split one.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use quadriga_graph::Data;

use crate::{
    error::{Error, Fault, FormatErrorKind, Result},
    from_value::FromValue,
    known,
    map::map,
    parse::{self, Entry, Records, TensorRecord},
    split::SplitName,
    tensor::Tensor,
    value::Value,
};

/// A checked model file.
///
/// Everything in it has been checked when it is opened: asking it afterwards cannot fail because of what the file
/// contains, only because it lacks what is asked for. Keys, strings and tensor data stay in the file map.
#[derive(Debug)]
pub struct File {
    parts: Vec<Part>,
    /// In the order of the files.
    tensors: Vec<Placed>,
    /// The order of `tensors` by name.
    tensors_by_name: Vec<usize>,
}

/// A tensor: its part, its place among the tensors of that part, and its bytes.
#[derive(Debug)]
struct Placed {
    part: usize,
    index: usize,
    data: Data,
}

#[derive(Debug)]
struct Part {
    path: Option<PathBuf>,
    data: Data,
    records: Records,
}

impl Part {
    fn new(path: Option<PathBuf>, data: Data) -> Result<Part> {
        match parse::parse(data.bytes()) {
            Ok(records) => Ok(Part { path, data, records }),
            Err(fault) => Err(Error::Format { path, fault }),
        }
    }

    fn open(path: &Path) -> Result<Part> {
        Part::new(Some(path.to_owned()), map(path)?)
    }

    fn entry(&self, key: &str) -> Option<(&Entry, Value<'_>)> {
        let bytes = self.data.bytes();
        let entry = self.records.entry(bytes, key)?;
        Some((entry, Value::decode(entry.kind, parse::at(bytes, &entry.value))))
    }

    /// A whole number that is not negative, and where it is in the file.
    fn number(&self, key: &str) -> Result<Option<(u64, usize)>> {
        let Some((entry, value)) = self.entry(key) else { return Ok(None) };
        match value.integer().map(u64::try_from) {
            Some(Ok(number)) => Ok(Some((number, entry.value.start))),
            _ => {
                let problem = FormatErrorKind::Kind { wanted: "an integer from 0", found: value.describe() };
                Err(self.fault(key, entry.value.start, problem))
            }
        }
    }

    fn fault(&self, key: &str, offset: usize, problem: FormatErrorKind) -> Error {
        let fault = Fault::new(format_args!("value of key {key:?}"), offset, problem);
        Error::Format { path: self.path.clone(), fault }
    }

    /// How many parts the model has, by this part's word: 1 unless it is split.
    fn split_count(&self) -> Result<u64> {
        // Tools that join the parts of a model leave the key with the value 0.
        Ok(self.number(known::SPLIT_COUNT)?.map_or(1, |(count, _)| count.max(1)))
    }
}

impl File {
    /// Opens a model file. For one part of a split model (`NAME-00002-of-00003.gguf`), opens all of them.
    ///
    /// The file is mapped, not read: opening costs time and memory for its names and metadata only. It must not be
    /// changed in place while it is open; replacing it by renaming, as [`Writer`](crate::Writer) does, is harmless.
    pub fn open(path: impl AsRef<Path>) -> Result<File> {
        let path = path.as_ref();
        let part = Part::open(path)?;
        let count = part.split_count()?;
        if count == 1 {
            return File::from_checked_parts(vec![part]);
        }
        let name = SplitName::of(path).filter(|name| u64::from(name.count) == count);
        let Some(name) = name else {
            let number = part.number(known::SPLIT_NUMBER)?.map_or(1, |(number, _)| number.saturating_add(1));
            return Err(Error::SplitName { path: path.to_owned(), number, count });
        };
        let mut opened = Some(part);
        let parts = (1..=name.count).map(|number| match opened.take_if(|_| number == name.number) {
            Some(part) => Ok(part),
            None => Part::open(&name.path_of(number)),
        });
        File::from_checked_parts(parts.collect::<Result<_>>()?)
    }

    /// Reads a model from memory.
    pub fn from_bytes(bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Result<File> {
        File::from_parts([bytes])
    }

    /// Reads a model from memory whose parts are given in order.
    pub fn from_parts<B: AsRef<[u8]> + Send + Sync + 'static>(
        parts: impl IntoIterator<Item = B>,
    ) -> Result<File> {
        let parts = parts.into_iter().map(|bytes| Part::new(None, Data::new(Arc::new(bytes))));
        File::from_checked_parts(parts.collect::<Result<_>>()?)
    }

    fn from_checked_parts(parts: Vec<Part>) -> Result<File> {
        check_split(&parts)?;
        let mut tensors = Vec::new();
        for (index, part) in parts.iter().enumerate() {
            let slices = part.records.tensors.iter().map(|tensor| {
                // Parsing has made sure that every range is inside the file.
                part.data.slice(tensor.data.start, tensor.data.len())
            });
            let placed = slices.flatten().enumerate();
            tensors.extend(placed.map(|(place, data)| Placed { part: index, index: place, data }));
        }
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
        let problem = FormatErrorKind::Duplicate { first: offset(first) as u64 };
        Error::Format {
            path: self.record(second).and_then(|(part, _)| part.path.clone()),
            fault: Fault::new(format_args!("tensor {name:?}"), offset(second), problem),
        }
    }

    fn record(&self, index: usize) -> Option<(&Part, &TensorRecord)> {
        let placed = self.tensors.get(index)?;
        let part = self.parts.get(placed.part)?;
        Some((part, part.records.tensors.get(placed.index)?))
    }

    fn tensor_name(&self, index: usize) -> Option<&[u8]> {
        self.record(index).map(|(part, record)| parse::at(part.data.bytes(), &record.name))
    }

    fn tensor_at(&self, index: usize) -> Option<Tensor<'_>> {
        let placed = self.tensors.get(index)?;
        let (part, record) = self.record(index)?;
        let name = parse::text_at(part.data.bytes(), &record.name);
        Some(Tensor::new(name, placed.part, record, &placed.data))
    }

    /// The version of the format, 2 or 3.
    pub fn version(&self) -> u32 {
        self.parts.first().map_or(0, |part| part.records.version)
    }

    /// What every tensor's place in the file is a multiple of.
    pub fn alignment(&self) -> u32 {
        self.parts.first().map_or(known::DEFAULT_ALIGNMENT, |part| part.records.alignment)
    }

    /// How many files the model is in: 1 unless it is split.
    pub fn part_count(&self) -> usize {
        self.parts.len()
    }

    /// The files of the model, in order; none if it was read from memory.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().filter_map(|part| part.path.as_deref())
    }

    /// The bytes of all files of the model together.
    pub fn byte_len(&self) -> u64 {
        self.parts.iter().map(|part| part.data.bytes().len() as u64).sum()
    }

    /// Keys and values in the order of the file; of a split model, those of the first part.
    pub fn metadata(&self) -> impl ExactSizeIterator<Item = (&str, Value<'_>)> {
        let (bytes, entries): (&[u8], &[Entry]) = match self.parts.first() {
            Some(part) => (part.data.bytes(), &part.records.entries),
            None => (&[], &[]),
        };
        entries.iter().map(move |entry| {
            (parse::text_at(bytes, &entry.key), Value::decode(entry.kind, parse::at(bytes, &entry.value)))
        })
    }

    /// The value of a key, whatever its type.
    pub fn value(&self, key: &str) -> Option<Value<'_>> {
        self.parts.first()?.entry(key).map(|(_, value)| value)
    }

    /// The value of a key that must be there: `file.get::<u32>("llama.block_count")?`.
    ///
    /// Any integer type will do for an integer, as long as the value fits; either float type for a float.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T> {
        self.find(key)?.ok_or_else(|| Error::MissingKey { key: key.to_owned() })
    }

    /// The value of a key that may be absent. A value of another type is an error nevertheless.
    pub fn find<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match T::from_value(value) {
            Some(value) => Ok(Some(value)),
            None => {
                Err(Error::WrongType { key: key.to_owned(), wanted: T::wanted(), found: value.describe() })
            }
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

    /// The tensor with this name, which must be there.
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

/// Checks that the parts of a split model are all there, in order, and belong together.
fn check_split(parts: &[Part]) -> Result<()> {
    let tensors: usize = parts.iter().map(|part| part.records.tensors.len()).sum();
    let [first, ..] = parts else {
        let fault = Fault::new("model", 0, FormatErrorKind::SplitCount { found: 1, wanted: 0 });
        return Err(Error::Format { path: None, fault });
    };
    if parts.len() == 1 && first.split_count()? == 1 {
        return Ok(());
    }
    let have = parts.len() as u64;
    for (index, part) in parts.iter().enumerate() {
        let number = |key: &'static str| {
            part.number(key)?.ok_or_else(|| part.fault(key, 0, FormatErrorKind::SplitKey))
        };
        let (found, offset) = number(known::SPLIT_COUNT)?;
        if found != have {
            let problem = FormatErrorKind::SplitCount { found, wanted: have };
            return Err(part.fault(known::SPLIT_COUNT, offset, problem));
        }
        let (found, offset) = number(known::SPLIT_NUMBER)?;
        if found != index as u64 {
            let problem = FormatErrorKind::SplitNumber { found, wanted: index as u64 };
            return Err(part.fault(known::SPLIT_NUMBER, offset, problem));
        }
        let (wanted, offset) = number(known::SPLIT_TENSORS)?;
        if wanted != tensors as u64 {
            let problem = FormatErrorKind::SplitTensors { found: tensors as u64, wanted };
            return Err(part.fault(known::SPLIT_TENSORS, offset, problem));
        }
    }
    Ok(())
}
