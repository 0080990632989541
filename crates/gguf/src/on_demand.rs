//! Parts of a file that are read into memory when they are first used.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use quadriga_graph::Data;

use crate::error::{Error, Result};

/// An open file whose parts are read on demand. Parts that were read stay in memory, and each is read once.
#[derive(Debug)]
pub(crate) struct DemandReader {
    file: Arc<OpenFile>,
    parts: Mutex<HashMap<FileRanges, Arc<ReadPart>>>,
}

/// Ranges of a file, in the order in which their bytes are used.
type FileRanges = Box<[Range<usize>]>;

#[derive(Debug)]
struct OpenFile {
    file: fs::File,
    /// Bytes that were read.
    read: AtomicU64,
    /// The first error.
    failure: OnceLock<io::Error>,
}

/// Ranges of a file, one after the other.
#[derive(Debug)]
struct ReadPart {
    file: Arc<OpenFile>,
    ranges: FileRanges,
    bytes: OnceLock<Vec<u8>>,
}

impl DemandReader {
    pub(crate) fn new(file: fs::File) -> DemandReader {
        let file = OpenFile { file, read: AtomicU64::new(0), failure: OnceLock::new() };
        DemandReader { file: Arc::new(file), parts: Mutex::default() }
    }

    /// Data of these ranges of the file, one after the other, which is read when its bytes are first asked for.
    pub(crate) fn part(&self, ranges: impl IntoIterator<Item = Range<usize>>) -> Data {
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in ranges {
            match joined.last_mut().filter(|last| last.end == range.start) {
                Some(last) => last.end = range.end,
                None => joined.push(range),
            }
        }
        let ranges: FileRanges = joined.into();
        let length = ranges.iter().map(ExactSizeIterator::len).sum();
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let part = parts.entry(ranges).or_insert_with_key(|ranges| {
            Arc::new(ReadPart {
                file: Arc::clone(&self.file),
                ranges: ranges.clone(),
                bytes: OnceLock::new(),
            })
        });
        Data::deferred(Arc::<ReadPart>::clone(part), length)
    }

    /// Bytes that were read on demand.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.file.read.load(Ordering::Relaxed)
    }

    /// An error if something could not be read.
    pub(crate) fn check(&self, path: &Path) -> Result<()> {
        let Some(error) = self.file.failure.get() else { return Ok(()) };
        let source = io::Error::new(error.kind(), error.to_string());
        Err(Error::Io { action: "read", path: path.to_owned(), source })
    }
}

impl ReadPart {
    fn read(&self) -> io::Result<Vec<u8>> {
        let length: usize = self.ranges.iter().map(ExactSizeIterator::len).sum();
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        bytes.resize(length, 0);
        let mut rest = bytes.as_mut_slice();
        for range in &self.ranges {
            let Some((part, after)) = rest.split_at_mut_checked(range.len()) else { break };
            self.file.file.read_exact_at(part, range.start as u64)?;
            self.file.read.fetch_add(range.len() as u64, Ordering::Relaxed);
            rest = after;
        }
        Ok(bytes)
    }
}

impl AsRef<[u8]> for ReadPart {
    /// Nothing if the bytes cannot be read; [`DemandReader::check`] has the reason.
    fn as_ref(&self) -> &[u8] {
        self.bytes.get_or_init(|| {
            self.read().unwrap_or_else(|error| {
                // Of several errors, the first is told.
                drop(self.file.failure.set(error));
                Vec::new()
            })
        })
    }
}
