//! Prefixes in a file: pages of the KV cache that are kept after their place in memory was needed, and after the process ended.
//!
//! A file has a header and records of one size. All numbers are little-endian:
//!
//! | bytes | header |
//! |---|---|
//! | 8 | magic: `QDRG-PGS` |
//! | 4 | version of this format: 1 |
//! | 4 each | element types of the KV cache's keys and values, as in GGUF |
//! | 4 | slots of a page |
//! | 32 | [identity](crate::Model::identity) of the model |
//! | 8 | bytes of a page |
//!
//! | bytes | record |
//! |---|---|
//! | 8 | checksum of what follows, up to the page; a record with another one is empty |
//! | 8 | checksum of the page |
//! | 8 | the number of the prefix that ends with the page |
//! | 8, 8 | what comes before: 0 and a salt, or 1 and the number of a prefix |
//! | 4 each | the tokens of the page |
//! | … | the page's rows in each state |
//!
//! A record that was being written when the process ended fails its checksum. Pages whose predecessor is lost are not found
//! any more, and are overwritten in the end.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use quadriga_graph::PAGE_SLOTS;

use super::page_pool::{PrefixId, PrefixKey};
use crate::engine::EngineOptions;
use crate::state_error::StateError;
use crate::{Error, Model, Result};

const MAGIC: [u8; 8] = *b"QDRG-PGS";
const VERSION: u32 = 1;
const HEADER: usize = 8 + 4 + 4 + 4 + 4 + 32 + 8;
/// Bytes of a record before the page.
const RECORD_HEADER: usize = 8 + 8 + 8 + 16 + 4 * PAGE_SLOTS;

/// Pages in a file, up to a number of bytes; the least recently used is overwritten first.
pub(super) struct PageFile {
    file: File,
    page_bytes: usize,
    records: HashMap<PrefixKey, Record>,
    /// By the time of their latest use.
    order: BTreeMap<u64, PrefixKey>,
    /// Places without a valid record, the last one first.
    free: Vec<u64>,
    clock: u64,
}

struct Record {
    place: u64,
    prefix: PrefixId,
    used: u64,
}

impl PageFile {
    /// Opens a file, or creates it, for the pages of an engine. Returns it with the largest number of a prefix in it.
    ///
    /// # Errors
    /// The file cannot be used, belongs to another model or cache type, another process uses it, or not one page fits into
    /// `bytes`.
    pub(super) fn open(
        path: &Path,
        bytes: u64,
        model: &Model,
        options: &EngineOptions,
        page_bytes: usize,
    ) -> Result<(PageFile, u64)> {
        let failed = |source| Error::SavedState { name: format!(" {}", path.display()), source };
        let places = bytes.saturating_sub(HEADER as u64) / (RECORD_HEADER + page_bytes) as u64;
        if places == 0 {
            let (name, value) = ("the size of the cache file", bytes.to_string());
            return Err(Error::Option { name, value, wanted: "enough for a page of the KV cache" });
        }
        let mut open = OpenOptions::new();
        open.read(true).write(true).create(true).truncate(false);
        let mut file = open.open(path).map_err(|error| failed(StateError::write(error)))?;
        if !file.metadata().map_err(|error| failed(StateError::read(error)))?.is_file() {
            return Err(failed(StateError::write(io::Error::other("it is not a file"))));
        }
        if file.try_lock().is_err() {
            return Err(failed(StateError::write(io::Error::other("another process uses it"))));
        }
        let header = header(model, options, page_bytes);
        let length = file.metadata().map_err(|error| failed(StateError::read(error)))?.len();
        if length == 0 {
            file.write_all(&header).map_err(|error| failed(StateError::write(error)))?;
        } else {
            check_header(&mut file, &header, options).map_err(failed)?;
        }
        let mut pages = PageFile {
            file,
            page_bytes,
            records: HashMap::new(),
            order: BTreeMap::new(),
            free: (0..places).rev().collect(),
            clock: 0,
        };
        let last = pages.read_records(length).map_err(|error| failed(StateError::read(error)))?;
        // Records beyond the limit would never be read or overwritten.
        let longest = HEADER as u64 + places * (RECORD_HEADER + page_bytes) as u64;
        if length > longest {
            pages.file.set_len(longest).map_err(|error| failed(StateError::write(error)))?;
        }
        Ok((pages, last))
    }

    /// Pages in the file.
    pub(super) fn pages(&self) -> usize {
        self.records.len()
    }

    /// Whether there is a page, without using it.
    pub(super) fn has(&self, key: &PrefixKey) -> bool {
        self.records.contains_key(key)
    }

    /// Reads a page; `None` if it is not there, or damaged.
    pub(super) fn read(&mut self, key: &PrefixKey) -> io::Result<Option<(PrefixId, Vec<u8>)>> {
        let Some(record) = self.records.get(key) else { return Ok(None) };
        let (place, prefix) = (record.place, record.prefix);
        let mut bytes = vec![0; RECORD_HEADER + self.page_bytes];
        self.seek(place)?;
        self.file.read_exact(&mut bytes)?;
        let head = parse(&bytes);
        let sum = bytes.get(8..16).map(<[u8]>::to_vec);
        bytes.drain(..RECORD_HEADER);
        let whole = sum.is_some_and(|sum| sum == checksum(&bytes).to_le_bytes());
        if !whole || head.is_none_or(|(found, of)| found != *key || of != prefix) {
            self.forget(key);
            return Ok(None);
        }
        self.touch(key);
        Ok(Some((prefix, bytes)))
    }

    /// Keeps a page; one that is there already is not written again.
    pub(super) fn insert(&mut self, key: PrefixKey, prefix: PrefixId, content: &[u8]) -> io::Result<()> {
        if content.len() != self.page_bytes {
            return Ok(());
        }
        if self.records.get(&key).is_some_and(|record| record.prefix == prefix) {
            self.touch(&key);
            return Ok(());
        }
        self.forget(&key);
        let place = match self.free.pop() {
            Some(place) => place,
            None => match self.order.first_key_value().map(|(_, oldest)| oldest.clone()) {
                Some(oldest) => {
                    self.forget(&oldest);
                    self.free.pop().unwrap_or_default()
                }
                None => return Ok(()),
            },
        };
        let Some(bytes) = record(&key, prefix, content) else { return Ok(()) };
        let written = self.seek(place).and_then(|()| self.file.write_all(&bytes));
        if let Err(error) = written {
            self.free.push(place);
            return Err(error);
        }
        self.clock += 1;
        self.order.insert(self.clock, key.clone());
        self.records.insert(key, Record { place, prefix, used: self.clock });
        Ok(())
    }

    /// Forgets all pages, and gives back their room.
    pub(super) fn clear(&mut self) -> io::Result<()> {
        self.file.set_len(HEADER as u64)?;
        self.free.extend(self.records.drain().map(|(_, record)| record.place));
        self.free.sort_unstable_by_key(|place| std::cmp::Reverse(*place));
        self.order.clear();
        Ok(())
    }

    fn seek(&mut self, place: u64) -> io::Result<()> {
        let at = HEADER as u64 + place * (RECORD_HEADER + self.page_bytes) as u64;
        self.file.seek(SeekFrom::Start(at)).map(drop)
    }

    fn touch(&mut self, key: &PrefixKey) {
        self.clock += 1;
        if let Some(record) = self.records.get_mut(key) {
            self.order.remove(&record.used);
            record.used = self.clock;
            self.order.insert(self.clock, key.clone());
        }
    }

    fn forget(&mut self, key: &PrefixKey) {
        if let Some(record) = self.records.remove(key) {
            self.order.remove(&record.used);
            self.free.push(record.place);
        }
    }

    /// Finds the records that a file of this length has in places within its limit. Returns the largest number of a prefix in any
    /// place: given to another prefix, a page that followed the first one would be taken for one that follows the second.
    fn read_records(&mut self, length: u64) -> io::Result<u64> {
        let size = (RECORD_HEADER + self.page_bytes) as u64;
        let there = length.saturating_sub(HEADER as u64) / size;
        let places = self.free.len() as u64;
        let mut last = 0;
        let mut bytes = [0; RECORD_HEADER];
        let mut used = Vec::new();
        for place in 0..there {
            self.seek(place)?;
            self.file.read_exact(&mut bytes)?;
            let Some((key, prefix)) = parse(&bytes) else { continue };
            for number in [key.parent(), prefix].into_iter().filter_map(PrefixId::number) {
                last = last.max(number);
            }
            if place >= places {
                continue;
            }
            self.clock += 1;
            if let Some(twin) = self.records.insert(key.clone(), Record { place, prefix, used: self.clock }) {
                self.order.remove(&twin.used);
                used.retain(|place| *place != twin.place);
            }
            self.order.insert(self.clock, key);
            used.push(place);
        }
        self.free.retain(|place| used.binary_search(place).is_err());
        Ok(last)
    }
}

fn header(model: &Model, options: &EngineOptions, page_bytes: usize) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    for number in [VERSION, options.cache_keys.id(), options.cache_values.id(), PAGE_SLOTS as u32] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(model.identity());
    bytes.extend((page_bytes as u64).to_le_bytes());
    bytes
}

/// Compares the header of a file with the one that it should have.
fn check_header(file: &mut File, wanted: &[u8], options: &EngineOptions) -> Result<(), StateError> {
    let mut found = vec![0; wanted.len()];
    file.read_exact(&mut found).map_err(|_| StateError::Unknown)?;
    let part = |range: std::ops::Range<usize>| (found.get(range.clone()), wanted.get(range));
    let same = |range| {
        let (found, wanted) = part(range);
        found == wanted
    };
    if !same(0..8) {
        return Err(StateError::Unknown);
    }
    let number = |at: usize| {
        let bytes = found.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u32::from_le_bytes)
    };
    if !same(8..12) {
        return Err(StateError::Version { found: number(8), known: VERSION });
    }
    for (at, wanted) in [(12, options.cache_keys), (16, options.cache_values)] {
        if number(at) != wanted.id() {
            let name = quadriga_graph::DType::from_id(number(at));
            let found = name.map_or_else(|| format!("number {}", number(at)), |dtype| dtype.to_string());
            return Err(StateError::CacheType { found, wanted });
        }
    }
    if !same(24..56) {
        return Err(StateError::OtherModel);
    }
    if !same(0..HEADER) {
        return Err(StateError::Damaged { what: "the size of its pages" });
    }
    Ok(())
}

/// The bytes of a record.
fn record(key: &PrefixKey, prefix: PrefixId, content: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 8];
    bytes.extend(checksum(content).to_le_bytes());
    bytes.extend(prefix.number()?.to_le_bytes());
    let (kind, before) = match key.parent() {
        PrefixId::Root { salt } => (0_u64, salt),
        PrefixId::Page(number) => (1, number),
    };
    bytes.extend(kind.to_le_bytes());
    bytes.extend(before.to_le_bytes());
    key.tokens().iter().for_each(|token| bytes.extend(token.to_le_bytes()));
    let sum = checksum(bytes.get(8..)?).to_le_bytes();
    bytes.get_mut(..8)?.copy_from_slice(&sum);
    bytes.extend_from_slice(content);
    Some(bytes)
}

/// What a record is about; `None` if it is empty or damaged.
fn parse(bytes: &[u8]) -> Option<(PrefixKey, PrefixId)> {
    let number = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    if number(0)? != checksum(bytes.get(8..RECORD_HEADER)?) {
        return None;
    }
    let prefix = PrefixId::Page(number(16)?);
    let parent = match number(24)? {
        0 => PrefixId::Root { salt: number(32)? },
        1 => PrefixId::Page(number(32)?),
        _ => return None,
    };
    let (tokens, _) = bytes.get(40..RECORD_HEADER)?.as_chunks::<4>();
    let tokens: Vec<u32> = tokens.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    Some((PrefixKey::new(parent, &tokens)?, prefix))
}

/// A sum that changes with every bit, for accidents: not against forgery.
fn checksum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mix = |sum: u64, word: u64| {
        (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_add(0x1656_67b1)
    };
    let sum = words.iter().fold(bytes.len() as u64, |sum, word| mix(sum, u64::from_le_bytes(*word)));
    rest.iter().fold(sum, |sum, byte| mix(sum, u64::from(*byte)))
}
