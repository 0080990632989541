//! All states of a session as bytes: saved to a writer or file, and restored.
//!
//! The format, with numbers in little-endian order:
//!
//! | | |
//! |---|---|
//! | magic | 8 bytes, `QDRGSTAT` |
//! | version | u32, 1 |
//! | states | u32 |
//! | per state, ordered by name | name (u32 length, UTF-8), type (u32, as in GGUF), rank (u32), extents (u64 each), number of ranges (u32), ranges (u64 first byte, u64 bytes each, at least 1) |
//! | checksum | u64, of everything before it |
//! | bytes of all ranges | in the same order |
//! | checksum | u64, of those bytes |
//!
//! Restoring reads and checks everything before the first state is written. Nothing is allocated for a number in the file
//! that the session's own states do not bound, and little more than the file has.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use quadriga_graph::{DType, MAX_DIMS};

use super::checksum::Checksum;
use super::session::Session;

use super::state_access::StateInfo;
use crate::{RuntimeError, SnapshotError};

const MAGIC: [u8; 8] = *b"QDRGSTAT";
const VERSION: u32 = 1;
/// Bytes that are transferred from a device at once.
const CHUNK_BYTES: usize = 4 << 20;

/// Saving and restoring all states.
impl Session {
    /// All states as bytes, for [`Session::restore_state`].
    pub fn state_bytes(&mut self) -> Result<Vec<u8>, RuntimeError> {
        let mut bytes = Vec::new();
        self.save_state(&mut bytes)?;
        Ok(bytes)
    }

    /// Writes all states to a writer. The bytes do not depend on where the states are: what was saved on one device can
    /// be restored on another.
    pub fn save_state(&mut self, writer: impl Write) -> Result<(), RuntimeError> {
        self.save_state_parts(writer, |state| Some(0..state.bytes))
    }

    /// Writes parts of the states to a writer: of each state the ranges of bytes that `parts` returns, in order and
    /// without overlaps; empty ones are left out. Restoring leaves the rest of each state as it is.
    pub fn save_state_parts<R: IntoIterator<Item = Range<usize>>>(
        &mut self,
        writer: impl Write,
        mut parts: impl FnMut(&StateInfo) -> R,
    ) -> Result<(), RuntimeError> {
        self.wait()?;
        let mut saved: Vec<SavedState> = self
            .states()
            .into_iter()
            .map(|state| SavedState { ranges: parts(&state).into_iter().collect(), state })
            .collect();
        for saved in &mut saved {
            saved.check_ranges()?;
            saved.ranges.retain(|range| !range.is_empty());
        }
        let mut out = Output { writer, checksum: Checksum::default() };
        out.header(&saved)?;
        let mut chunk = Vec::new();
        for SavedState { state, ranges } in &saved {
            for range in ranges {
                let mut start = range.start;
                while start < range.end {
                    let bytes = (range.end - start).min(CHUNK_BYTES);
                    chunk.resize(bytes, 0);
                    self.read_state_at(&state.name, start, &mut chunk)?;
                    out.put(&chunk)?;
                    start += bytes;
                }
            }
        }
        Ok(out.put_checksum()?)
    }

    /// Restores states from a reader, which is left after their last byte. The saved states must be exactly the session's: the
    /// same names, types and shapes. On an error, that of a device included, all states are as they were.
    pub fn restore_state(&mut self, mut reader: impl Read) -> Result<(), RuntimeError> {
        self.wait()?;
        let states = read_states(&mut reader, &self.states())?;
        self.restore_all(states)
    }

    /// Writes all states, or none.
    fn restore_all(&mut self, mut states: Vec<ReadState>) -> Result<(), RuntimeError> {
        // So many ranges have been exchanged: their old bytes are in `states`.
        let mut exchanged = 0;
        let mut restored = Ok(());
        'all: for state in &mut states {
            let name = state.saved.state.name.clone();
            for (start, bytes) in state.parts_mut() {
                restored = self.exchange(&name, start, bytes, &mut exchanged);
                if restored.is_err() {
                    break 'all;
                }
            }
        }
        if restored.is_err() {
            for state in &mut states {
                let name = state.saved.state.name.clone();
                for (start, bytes) in state.parts_mut() {
                    if exchanged == 0 {
                        return restored;
                    }
                    exchanged -= 1;
                    // The first failure is the one to report.
                    let _ = self.write_state_at(&name, start, bytes);
                }
            }
        }
        restored
    }

    /// Writes a part of a state; `bytes` then has the state's old bytes, and the part is counted, even if writing failed.
    fn exchange(
        &mut self,
        name: &str,
        start: usize,
        bytes: &mut [u8],
        exchanged: &mut usize,
    ) -> Result<(), RuntimeError> {
        let mut other = vec![0; bytes.len()];
        self.read_state_at(name, start, &mut other)?;
        other.swap_with_slice(bytes);
        *exchanged += 1;
        self.write_state_at(name, start, &other)
    }

    /// [Saves](Session::save_state) all states to a file, which replaces an older one only when it is complete. A symbolic
    /// link stays: the file that it leads to is replaced. What is no file, such as a pipe or a device, is written to.
    pub fn save_state_file(&mut self, path: impl AsRef<Path>) -> Result<(), RuntimeError> {
        let path = path.as_ref();
        let failed = |action| move |error: io::Error| SnapshotError::io(action, Some(path), &error);
        let target = target_of(path).map_err(failed("create"))?;
        if fs::metadata(&target).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
            let pipe = OpenOptions::new().write(true).open(&target).map_err(failed("open"))?;
            return self.save_state(BufWriter::new(pipe));
        }
        let temporary = temporary_beside(&target);
        let file = OpenOptions::new().write(true).create_new(true).open(&temporary);
        let file = file.map_err(failed("create"))?;
        let saved = self.save_state(BufWriter::new(&file)).and_then(|()| {
            file.sync_all().map_err(failed("write"))?;
            Ok(fs::rename(&temporary, &target).map_err(failed("rename"))?)
        });
        if saved.is_err() {
            // The first failure is the one to report.
            let _ = fs::remove_file(&temporary);
        }
        saved
    }

    /// [Restores](Session::restore_state) states from a file, which must have nothing after them.
    pub fn restore_state_file(&mut self, path: impl AsRef<Path>) -> Result<(), RuntimeError> {
        let path = path.as_ref();
        let failed = |action| move |error: io::Error| SnapshotError::io(action, Some(path), &error);
        self.wait()?;
        let mut reader = BufReader::new(File::open(path).map_err(failed("open"))?);
        let states = read_states(&mut reader, &self.states())?;
        if !reader.fill_buf().map_err(failed("read"))?.is_empty() {
            return Err(SnapshotError::TrailingBytes.into());
        }
        self.restore_all(states)
    }
}

/// Where a path leads to, through symbolic links; there need not be a file yet.
fn target_of(path: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => match fs::read_link(path) {
            // The chain of links ends, or the system would have reported a loop.
            Ok(link) => target_of(&path.parent().unwrap_or(Path::new("")).join(link)),
            Err(_) => Ok(path.to_owned()),
        },
        found => found,
    }
}

/// A name that no other save uses, in the folder of the file that will replace `path`.
fn temporary_beside(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.{number}.tmp", std::process::id()));
    path.with_file_name(name)
}

/// A state that was read, with the bytes of its ranges, one after the other.
struct ReadState {
    saved: SavedState,
    bytes: Vec<u8>,
}

impl ReadState {
    /// The first byte and the bytes of each range.
    fn parts_mut(&mut self) -> impl Iterator<Item = (usize, &mut [u8])> {
        let mut rest = self.bytes.as_mut_slice();
        self.saved.ranges.iter().map(move |range| {
            let all = std::mem::take(&mut rest);
            let (part, others) = all.split_at_mut_checked(range.len()).unwrap_or_default();
            rest = others;
            (range.start, part)
        })
    }
}

/// A state, and the ranges of its bytes that are saved.
struct SavedState {
    state: StateInfo,
    ranges: Vec<Range<usize>>,
}

impl SavedState {
    /// An error unless the ranges are inside the state, in order and without overlaps.
    fn check_ranges(&self) -> Result<(), SnapshotError> {
        let mut free = 0;
        for Range { start, end } in &self.ranges {
            if *start < free || end < start || *end > self.state.bytes {
                let (name, bytes) = (self.state.name.clone(), self.state.bytes);
                return Err(SnapshotError::Range { name, start: *start, end: *end, bytes });
            }
            free = *end;
        }
        Ok(())
    }
}

/// Writes saved states, and sums them up.
struct Output<W> {
    writer: W,
    checksum: Checksum,
}

impl<W: Write> Output<W> {
    fn header(&mut self, saved: &[SavedState]) -> Result<(), SnapshotError> {
        self.put(&MAGIC)?;
        self.number(VERSION)?;
        self.number(saved.len() as u32)?;
        for SavedState { state, ranges } in saved {
            self.number(state.name.len() as u32)?;
            self.put(state.name.as_bytes())?;
            self.number(state.dtype.id())?;
            self.number(state.shape.dims().len() as u32)?;
            for extent in state.shape.dims() {
                self.put(&(*extent as u64).to_le_bytes())?;
            }
            self.number(ranges.len() as u32)?;
            for range in ranges {
                self.put(&(range.start as u64).to_le_bytes())?;
                self.put(&(range.len() as u64).to_le_bytes())?;
            }
        }
        self.put_checksum()
    }

    fn number(&mut self, number: u32) -> Result<(), SnapshotError> {
        self.put(&number.to_le_bytes())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), SnapshotError> {
        self.checksum.add(bytes);
        self.writer.write_all(bytes).map_err(|error| SnapshotError::io("write", None, &error))
    }

    fn put_checksum(&mut self) -> Result<(), SnapshotError> {
        let sum = std::mem::take(&mut self.checksum).finish();
        let written = self.writer.write_all(&sum.to_le_bytes()).and_then(|()| self.writer.flush());
        written.map_err(|error| SnapshotError::io("write", None, &error))
    }
}

/// Reads saved states and checks them against those of a session.
fn read_states(reader: &mut dyn Read, states: &[StateInfo]) -> Result<Vec<ReadState>, SnapshotError> {
    let mut input = Input { reader, checksum: Checksum::default() };
    let mut read = Vec::new();
    for saved in input.header(states)? {
        // The ranges do not overlap: together they have no more bytes than the state.
        let bytes = input.bytes(saved.ranges.iter().map(ExactSizeIterator::len).sum())?;
        read.push(ReadState { saved, bytes });
    }
    input.check("the checksum of the contents is wrong")?;
    Ok(read)
}

/// Reads bytes and sums them up.
struct Input<'r> {
    reader: &'r mut dyn Read,
    checksum: Checksum,
}

impl Input<'_> {
    fn header(&mut self, states: &[StateInfo]) -> Result<Vec<SavedState>, SnapshotError> {
        if self.array()? != MAGIC {
            return Err(SnapshotError::NotSavedStates);
        }
        let found = self.number()?;
        if found != VERSION {
            return Err(SnapshotError::Version { found, known: VERSION });
        }
        let count = self.number()?;
        let mut names = states.iter();
        let mut saved = Vec::new();
        for _ in 0..count {
            let name = self.name()?;
            // Both are ordered by name.
            let here = names.next().filter(|state| state.name <= name);
            match here {
                Some(state) if state.name == name => saved.push(self.state(state)?),
                Some(state) => return Err(SnapshotError::Missing { name: state.name.clone() }),
                None => return Err(SnapshotError::Unknown { name }),
            }
        }
        if let Some(state) = names.next() {
            return Err(SnapshotError::Missing { name: state.name.clone() });
        }
        self.check("the checksum of the header is wrong")?;
        Ok(saved)
    }

    fn name(&mut self) -> Result<String, SnapshotError> {
        let length = self.number()? as usize;
        let name = String::from_utf8(self.bytes(length)?);
        name.map_err(|_| SnapshotError::Damaged { what: "a name is not UTF-8" })
    }

    /// Type, shape and ranges of a state, which must be as in the session.
    fn state(&mut self, here: &StateInfo) -> Result<SavedState, SnapshotError> {
        let dtype = self.number()?;
        let rank = self.number()? as usize;
        if rank > MAX_DIMS {
            return Err(SnapshotError::Damaged { what: "a shape has too many dimensions" });
        }
        let extents = (0..rank).map(|_| self.long()).collect::<Result<Vec<usize>, _>>()?;
        if dtype != here.dtype.id() || extents != here.shape.dims() {
            let type_name = DType::from_id(dtype).map_or_else(|| format!("type {dtype}"), |t| t.to_string());
            return Err(SnapshotError::Differs {
                name: here.name.clone(),
                here: format!("{} {:?}", here.dtype, here.shape.dims()),
                saved: format!("{type_name} {extents:?}"),
            });
        }
        let mut saved = SavedState { state: here.clone(), ranges: Vec::new() };
        let mut free = 0;
        for _ in 0..self.number()? {
            let (start, bytes) = (self.long()?, self.long()?);
            let end = start.checked_add(bytes).filter(|end| start >= free && *end <= here.bytes);
            let Some(end) = end else {
                return Err(SnapshotError::Damaged { what: "a range is outside its state" });
            };
            if bytes == 0 {
                return Err(SnapshotError::Damaged { what: "a range is empty" });
            }
            saved.ranges.push(start..end);
            free = end;
        }
        Ok(saved)
    }

    fn number(&mut self) -> Result<u32, SnapshotError> {
        self.array().map(u32::from_le_bytes)
    }

    fn long(&mut self) -> Result<usize, SnapshotError> {
        let number = u64::from_le_bytes(self.array()?);
        usize::try_from(number).map_err(|_| SnapshotError::Damaged { what: "a number is too large" })
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes).map_err(|error| SnapshotError::io("read", None, &error))?;
        self.checksum.add(&bytes);
        Ok(bytes)
    }

    /// The next bytes. Memory grows with what is there, not with what was promised.
    fn bytes(&mut self, count: usize) -> Result<Vec<u8>, SnapshotError> {
        let mut bytes = Vec::new();
        let read = Read::take(&mut *self.reader, count as u64).read_to_end(&mut bytes);
        read.map_err(|error| SnapshotError::io("read", None, &error))?;
        if bytes.len() != count {
            return Err(SnapshotError::Truncated);
        }
        self.checksum.add(&bytes);
        Ok(bytes)
    }

    /// An error unless the checksum of everything since the last one follows.
    fn check(&mut self, what: &'static str) -> Result<(), SnapshotError> {
        let sum = std::mem::take(&mut self.checksum).finish();
        if u64::from_le_bytes(self.array()?) != sum {
            return Err(SnapshotError::Damaged { what });
        }
        self.checksum = Checksum::default();
        Ok(())
    }
}
