//! Saving the KV cache of a sequence, and restoring it.
//!
//! All numbers are little-endian:
//!
//! | bytes | contents |
//! |---|---|
//! | 8 | magic: `QDRG-KVC` |
//! | 4 | version of this format: 2 |
//! | 32 | [identity](crate::Model::identity) of the model |
//! | 4 each | element types of the KV cache's keys and values, as in GGUF |
//! | 4 | number of tensors of the KV cache |
//! | 8 | number of tokens |
//! | 4 each | the tokens |
//! | 32 | SHA-256 of everything before |
//! | … | each tensor, by name: its name's length (4), the name, bytes of a row (8), number of rows (8), and the rows |
//! | 32 | SHA-256 of the tensors |
//!
//! On several ranks, this is the first one's part. Those of the others follow, each with its length (8) before it, in the same form. The
//! identity says how the ranks divide the model.
//!
//! A tensor has a row for each token, those of a layer with a sliding window for as many of the latest tokens as the engine
//! had. Recurrent states have one row, unless there are no tokens.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;

use quadriga_graph::DType;
use quadriga_runtime::StateInfo;
use sha2::{Digest, Sha256};

use super::Engine;
use super::rank_state::write_states;
use super::temporary_file;
use crate::models::StateKind;
use crate::state_error::StateError;
use crate::{Error, Result};

const MAGIC: [u8; 8] = *b"QDRG-KVC";
const VERSION: u32 = 2;

/// The most bytes that are read or written at once.
const CHUNK: usize = 1 << 20;

/// The name of a KV-cache tensor is much shorter.
const MAX_NAME: usize = 256;

/// The KV cache as bytes: to continue later, in another process, or on other devices.
impl Engine {
    /// Writes a sequence's tokens and their part of the KV cache. [`Engine::load_state`] restores them, in an engine with
    /// the same model and cache type: the context size, the devices and the sequence may be others.
    ///
    /// ```no_run
    /// # fn example(engine: &mut quadriga_llm::Engine) -> Result<(), quadriga_llm::Error> {
    /// let mut saved = Vec::new();
    /// engine.save_state(0, &mut saved)?;
    /// engine.truncate(0, 0);
    /// engine.load_state(0, &mut saved.as_slice())?; // as if nothing had happened
    /// # Ok(())
    /// # }
    /// ```
    pub fn save_state(&mut self, sequence: usize, writer: &mut dyn Write) -> Result<()> {
        self.check_sequence(sequence)?;
        // Before this rank's own: whatever happens to the writer, none is left on its way.
        let others = self.collect_states(sequence)?;
        self.save_own_state(sequence, writer)?;
        write_states(&others, writer)
    }

    /// The same for this rank's part of the KV cache.
    pub(super) fn save_own_state(&mut self, sequence: usize, writer: &mut dyn Write) -> Result<()> {
        self.wait()?;
        self.decode.discard_run_ahead();
        self.restore_rows()?;
        let tokens = self.tokens(sequence).to_vec();
        let states = self.cache_tensors();
        let mut output = Output { writer, sum: Sha256::new() };
        output.put(&MAGIC)?;
        output.put(&VERSION.to_le_bytes())?;
        output.put(&self.model.identity())?;
        output.put(&self.options.cache_keys.id().to_le_bytes())?;
        output.put(&self.options.cache_values.id().to_le_bytes())?;
        output.put(&(states.len() as u32).to_le_bytes())?;
        output.put(&(tokens.len() as u64).to_le_bytes())?;
        for token in &tokens {
            output.put(&token.to_le_bytes())?;
        }
        output.put_sum()?;
        let mut chunk = Vec::new();
        for state in &states {
            output.put(&(state.name.len() as u32).to_le_bytes())?;
            output.put(state.name.as_bytes())?;
            let (first, rows) = self.rows_of(state, sequence, tokens.len());
            output.put(&(row_bytes(state) as u64).to_le_bytes())?;
            output.put(&(rows as u64).to_le_bytes())?;
            for (start, bytes) in chunks(state, first, rows) {
                chunk.resize(bytes, 0);
                self.session.read_state_at(&state.name, start, &mut chunk)?;
                output.put(&chunk)?;
            }
        }
        output.put_sum()?;
        output.writer.flush().map_err(StateError::write)?;
        Ok(())
    }

    /// Replaces a sequence by one that [`Engine::save_state`] has written. Bytes after it are not read.
    ///
    /// # Errors
    /// [`Error::SavedState`] if the bytes are not those of a sequence that was saved with this model and cache type, or
    /// have more tokens than the context. If they are damaged only after the list of tokens, the sequence is empty
    /// afterwards; in all other cases it is unchanged.
    pub fn load_state(&mut self, sequence: usize, reader: &mut dyn Read) -> Result<()> {
        self.check_sequence(sequence)?;
        let window_rows = self.load_own_state(sequence, reader)?;
        self.distribute_states(sequence, window_rows, reader)
    }

    /// The same for this rank's part of the KV cache. Returns the rows that layers with a window have.
    pub(super) fn load_own_state(&mut self, sequence: usize, reader: &mut dyn Read) -> Result<usize> {
        self.wait()?;
        let mut input = Input { reader, sum: Sha256::new() };
        let states = self.cache_tensors();
        let tokens = self.load_header(&mut input, states.len())?;
        self.truncate(sequence, 0);
        if let Some(rows) = self.recurrent.as_mut().filter(|_| !tokens.is_empty()) {
            rows.restore(sequence, tokens.len());
        }
        let window_rows = self.load_tensors(&mut input, &states, sequence, tokens.len())?;
        self.windows.replace(sequence, tokens.len(), window_rows);
        self.sequences.replace(sequence, tokens);
        Ok(window_rows)
    }

    /// [Writes](Engine::save_state) a sequence to a file, which appears under its name when it is complete. Files that processes
    /// which were killed meanwhile left beside it are removed.
    pub fn save_state_file(&mut self, sequence: usize, path: impl AsRef<Path>) -> Result<()> {
        // The file that a link names is replaced, not the link; what is no file is not replaced.
        let path = &fs::canonicalize(path.as_ref()).unwrap_or_else(|_| path.as_ref().to_owned());
        is_file(path).map_err(|error| at(path, StateError::write(error)))?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let created = temporary_file::create(folder.unwrap_or(Path::new(".")));
        let mut file = created.map_err(|error| at(path, StateError::write(without_path(&error))))?;
        let mut writer = BufWriter::with_capacity(CHUNK, &mut file);
        self.save_state(sequence, &mut writer).map_err(|error| at(path, error))?;
        drop(writer);
        file.as_file().sync_all().map_err(|error| at(path, StateError::write(error)))?;
        file.persist(path).map_err(|error| at(path, StateError::write(error.error)))?;
        Ok(())
    }

    /// [Restores](Engine::load_state) a sequence from a file, which must have nothing after it.
    pub fn load_state_file(&mut self, sequence: usize, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let file = is_file(path).and_then(|()| File::open(path));
        let file = file.map_err(|error| at(path, StateError::read(error)))?;
        let mut reader = BufReader::with_capacity(CHUNK, file);
        self.load_state(sequence, &mut reader).map_err(|error| at(path, error))?;
        if reader.read(&mut [0]).map_err(|error| at(path, StateError::read(error)))? > 0 {
            self.truncate(sequence, 0);
            return Err(at(path, StateError::Damaged { what: "there are bytes after the end" }));
        }
        Ok(())
    }

    /// Reads and checks everything before the tensors; the tokens.
    fn load_header(&self, input: &mut Input<'_>, states: usize) -> Result<Vec<u32>, StateError> {
        if input.array().map_err(|_| StateError::Unknown)? != MAGIC {
            return Err(StateError::Unknown);
        }
        let found = input.number()?;
        if found != VERSION {
            return Err(StateError::Version { found, known: VERSION });
        }
        if input.array::<32>()? != self.model.identity() {
            return Err(StateError::OtherModel);
        }
        for wanted in [self.options.cache_keys, self.options.cache_values] {
            let cache = input.number()?;
            if cache != wanted.id() {
                let found = DType::from_id(cache).map_or_else(|| format!("type {cache}"), |t| t.to_string());
                return Err(StateError::CacheType { found, wanted });
            }
        }
        if input.number()? as usize != states {
            return Err(StateError::Damaged { what: "the number of tensors is wrong" });
        }
        let (count, context) = (u64::from_le_bytes(input.array()?), self.options.context);
        let Some(count) = usize::try_from(count).ok().filter(|count| *count <= context) else {
            return Err(StateError::TooLong { tokens: count, context });
        };
        let vocabulary = self.model.hyperparameters().vocabulary;
        let mut tokens = Vec::new();
        for _ in 0..count {
            let token = input.number()?;
            if token as usize >= vocabulary {
                return Err(StateError::Damaged { what: "a token is not in the vocabulary" });
            }
            tokens.push(token);
        }
        input.check_sum()?;
        Ok(tokens)
    }

    /// Reads all tensors into their states; the number of rows that window layers have. What the tensors contain is checked
    /// at the end.
    fn load_tensors(
        &mut self,
        input: &mut Input<'_>,
        states: &[StateInfo],
        sequence: usize,
        tokens: usize,
    ) -> Result<usize> {
        let mut chunk = Vec::new();
        let mut window_rows = tokens;
        for state in states {
            let length = input.number()? as usize;
            let mut name = vec![0; length.min(MAX_NAME)];
            input.fill(&mut name)?;
            let (row, rows) = (u64::from_le_bytes(input.array()?), u64::from_le_bytes(input.array()?));
            if name != state.name.as_bytes() || row != row_bytes(state) as u64 {
                return Err(StateError::Damaged { what: "a tensor has another name or size" }.into());
            }
            let Some(place) = self.place_rows(state, sequence, tokens, rows) else {
                return Err(StateError::Damaged { what: "a tensor has a wrong number of rows" }.into());
            };
            for (_, bytes) in chunks(state, 0, place.skipped) {
                chunk.resize(bytes, 0);
                input.fill(&mut chunk)?;
            }
            for (start, bytes) in chunks(state, place.first, place.rows) {
                chunk.resize(bytes, 0);
                input.fill(&mut chunk)?;
                self.session.write_state_at(&state.name, start, &chunk)?;
            }
            if self.is_windowed(&state.name) {
                window_rows = window_rows.min(place.rows);
            }
        }
        input.check_sum()?;
        Ok(window_rows)
    }

    /// The tensors of the KV cache, by name.
    fn cache_tensors(&self) -> Vec<StateInfo> {
        self.session.states()
    }

    /// The first row and the number of rows of a tensor that belong to a sequence of so many tokens.
    fn rows_of(&self, state: &StateInfo, sequence: usize, tokens: usize) -> (usize, usize) {
        let first = if self.is_windowed(&state.name) { self.windows.first(sequence).min(tokens) } else { 0 };
        match self.state_kind(&state.name) {
            StateKind::Recurrent => (self.recurrent_row(sequence, tokens), tokens.min(1)),
            StateKind::Window => (self.windows.slot(sequence, first).unwrap_or(0), tokens - first),
            StateKind::Full => (sequence * self.options.context + first, tokens - first),
        }
    }

    /// Where the saved rows of a tensor go, which belong to the latest tokens; `None` if they cannot be right.
    fn place_rows(&self, state: &StateInfo, sequence: usize, tokens: usize, rows: u64) -> Option<RowPlace> {
        let rows = usize::try_from(rows).ok().filter(|rows| *rows <= tokens)?;
        let needed = tokens.min(self.windows.needed());
        let place = |first: usize, kept: usize| RowPlace { first, rows: kept, skipped: rows - kept };
        match self.state_kind(&state.name) {
            StateKind::Recurrent => {
                (rows == tokens.min(1)).then(|| place(self.recurrent_row(sequence, tokens), rows))
            }
            StateKind::Window if (needed..=tokens).contains(&rows) => {
                Some(place(sequence * self.options.window_slots, needed))
            }
            StateKind::Full if self.is_windowed(&state.name) && (needed..=tokens).contains(&rows) => {
                Some(place(sequence * self.options.context + tokens - rows, rows))
            }
            StateKind::Full if rows == tokens => Some(place(sequence * self.options.context, rows)),
            StateKind::Window | StateKind::Full => None,
        }
    }

    /// The row of recurrent states after a sequence's last token.
    fn recurrent_row(&self, sequence: usize, tokens: usize) -> usize {
        self.recurrent.as_ref().and_then(|rows| rows.find(sequence, tokens)).unwrap_or(0)
    }

    /// Whether a state belongs to a layer with a sliding window, wherever its rows are.
    fn is_windowed(&self, name: &str) -> bool {
        StateKind::of(name, self.model.hyperparameters(), true) == StateKind::Window
    }

    fn check_sequence(&self, sequence: usize) -> Result<()> {
        let count = self.options.sequences;
        if sequence < count { Ok(()) } else { Err(Error::Sequence { sequence, count }) }
    }
}

/// Where rows of a saved tensor go.
struct RowPlace {
    /// The first row in the engine's tensor.
    first: usize,
    /// The number of rows that are used.
    rows: usize,
    /// Rows before them that are not.
    skipped: usize,
}

/// The bytes of rows of a tensor, in chunks: start and length of each.
fn chunks(state: &StateInfo, first: usize, rows: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
    let row = row_bytes(state);
    let (start, bytes) = (first * row, rows * row);
    (0..bytes).step_by(CHUNK).map(move |done| (start + done, CHUNK.min(bytes - done)))
}

/// Bytes of a KV-cache slot in a tensor.
fn row_bytes(state: &StateInfo) -> usize {
    let slots = state.shape.dims().first().copied().unwrap_or(1);
    state.bytes / slots.max(1)
}

/// Refuses pipes, devices and folders: opening a pipe may wait for ever, and renaming would replace a device.
fn is_file(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(found) if !found.is_file() => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"))
        }
        _ => Ok(()),
    }
}

/// The error without the name of the temporary file, which means nothing to the caller.
fn without_path(error: &io::Error) -> io::Error {
    let text = error.to_string();
    let reason = text.split_once(" at path ").map_or(text.as_str(), |(reason, _)| reason);
    io::Error::new(error.kind(), reason.to_owned())
}

/// An error about a file.
fn at(path: &Path, error: impl Into<Error>) -> Error {
    match error.into() {
        Error::SavedState { source, .. } => {
            Error::SavedState { name: format!(" {}", path.display()), source }
        }
        other => other,
    }
}

/// Writes bytes and sums them up.
struct Output<'w> {
    writer: &'w mut dyn Write,
    sum: Sha256,
}

impl Output<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<(), StateError> {
        self.sum.update(bytes);
        self.writer.write_all(bytes).map_err(StateError::write)
    }

    fn put_sum(&mut self) -> Result<(), StateError> {
        let sum = std::mem::take(&mut self.sum).finalize();
        self.writer.write_all(&sum).map_err(StateError::write)
    }
}

/// Reads bytes and sums them up.
struct Input<'r> {
    reader: &'r mut dyn Read,
    sum: Sha256,
}

impl Input<'_> {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), StateError> {
        self.reader.read_exact(bytes).map_err(StateError::read)?;
        self.sum.update(&*bytes);
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], StateError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn number(&mut self) -> Result<u32, StateError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// An error unless the sum of everything since the last one follows.
    fn check_sum(&mut self) -> Result<(), StateError> {
        let sum = std::mem::take(&mut self.sum).finalize();
        let mut found = [0; 32];
        self.reader.read_exact(&mut found).map_err(StateError::read)?;
        if found == *sum { Ok(()) } else { Err(StateError::Damaged { what: "a checksum is wrong" }) }
    }
}
