//! Split GGUF files and merge them, with the names and keys of llama.cpp.
//!
//! The parts of a model are `PREFIX-00001-of-00003.gguf` and so on. The first has all keys; each has `split.no`, `split.count`
//! and `split.tensors.count`. Merging gives the file that was split.

mod work_folder;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use quadriga_gguf::{File, SplitName, Tensor, Writer};
pub(crate) use work_folder::{FolderError, WorkFolder};

/// The keys that only the parts of a split model have.
const SPLIT_KEYS: [&str; 3] = ["split.no", "split.count", "split.tensors.count"];
/// Bytes that are written between two looks at whether the user gave up.
const PIECE: usize = 4 << 20;
/// The most parts that names can number.
const MAX_PARTS: usize = u16::MAX as usize;

/// The result of functions of this module.
pub type ShardResult<T> = Result<T, ShardError>;

/// Why a file could not be split or merged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum ShardError {
    #[error(transparent)]
    Gguf(#[from] quadriga_gguf::Error),
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is already split into {parts} parts; merge them first", path.display())]
    AlreadySplit { path: PathBuf, parts: usize },
    #[error("{} is one file; there is nothing to merge", path.display())]
    NotSplit { path: PathBuf },
    #[error("{count} parts are too many; allow more tensors or bytes in each")]
    TooManyParts { count: usize },
    #[error("cancelled")]
    Cancelled,
    #[error(transparent)]
    Output(#[from] crate::OutputIsInput),
}

impl From<FolderError> for ShardError {
    fn from(FolderError { action, path, source }: FolderError) -> ShardError {
        ShardError::Io { action, path, source }
    }
}

/// Where to cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitLimits {
    /// The most tensors in a part.
    pub tensors: usize,
    /// The most bytes of tensors in a part; a tensor of more has a part of its own.
    pub bytes: u64,
    /// Whether the first part has keys only.
    pub keys_apart: bool,
}

impl Default for SplitLimits {
    fn default() -> SplitLimits {
        SplitLimits { tensors: 128, bytes: u64::MAX, keys_apart: false }
    }
}

/// The tensors of each part, as ranges of the file's tensors.
fn parts(file: &File, limits: &SplitLimits) -> ShardResult<Vec<(usize, usize)>> {
    let mut parts = Vec::new();
    if limits.keys_apart {
        parts.push((0, 0));
    }
    let (mut start, mut bytes) = (0, 0);
    for (index, tensor) in file.tensors().enumerate() {
        let own = (tensor.byte_len() as u64).next_multiple_of(u64::from(file.alignment()));
        if index > start && (index - start >= limits.tensors.max(1) || bytes + own > limits.bytes) {
            parts.push((start, index));
            (start, bytes) = (index, 0);
        }
        bytes += own;
    }
    parts.push((start, file.tensor_count()));
    match parts.len() {
        count if count > MAX_PARTS => Err(ShardError::TooManyParts { count }),
        _ => Ok(parts),
    }
}

/// The sizes of the parts that [`split`] would write: tensors and their bytes.
pub fn plan_split(input: &Path, limits: &SplitLimits) -> ShardResult<Vec<(usize, u64)>> {
    let file = File::open(input)?;
    let sizes: Vec<u64> = file.tensors().map(|tensor| tensor.byte_len() as u64).collect();
    let parts = parts(&file, limits)?;
    Ok(parts
        .into_iter()
        .map(|(from, to)| (to - from, sizes.get(from..to).unwrap_or_default().iter().sum()))
        .collect())
}

/// Splits a file into parts whose names begin with `prefix`; their paths. All parts are complete before the first gets its name, which is the
/// last to get one.
/// Once `cancelled` returns true, what was written is removed.
pub fn split(
    input: &Path,
    prefix: &Path,
    limits: &SplitLimits,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> ShardResult<Vec<PathBuf>> {
    let file = File::open(input)?;
    if file.part_count() > 1 {
        return Err(ShardError::AlreadySplit { path: input.to_owned(), parts: file.part_count() });
    }
    let parts = parts(&file, limits)?;
    let folder = WorkFolder::parent(prefix);
    let name = prefix.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let count = u32::try_from(parts.len()).unwrap_or(u32::MAX);
    let paths: Vec<PathBuf> = (1..=count)
        .map(|number| {
            SplitName { folder: folder.to_owned(), prefix: name.clone(), number, count }.path_of(number)
        })
        .collect();
    paths.iter().try_for_each(|path| crate::check_output(path, [input]))?;
    let work = WorkFolder::create(folder, &name)?;
    for ((number, path), (from, to)) in (1..).zip(&paths).zip(&parts) {
        let mut writer = writer_like(&file);
        if number == 1 {
            for (key, value) in file.metadata().filter(|(key, _)| !SPLIT_KEYS.contains(key)) {
                writer.set(key, value)?;
            }
        } else if file.value("general.alignment").is_some() {
            writer.set("general.alignment", file.alignment())?;
        }
        let [no, all] = [number - 1, count].map(|number| u16::try_from(number).unwrap_or(u16::MAX));
        writer.set("split.no", no)?;
        writer.set("split.count", all)?;
        writer.set("split.tensors.count", i32::try_from(file.tensor_count()).unwrap_or(i32::MAX))?;
        for tensor in file.tensors().skip(*from).take(to - from) {
            copy(&mut writer, tensor, cancelled)?;
        }
        let written = writer.write(work.part(path));
        if cancelled() {
            return Err(ShardError::Cancelled);
        }
        written?;
    }
    work.publish(&paths)?;
    Ok(paths)
}

/// Merges the parts of a model, any of which is `input`, into one file. Once `cancelled` returns true, what was written is
/// removed.
pub fn merge(input: &Path, output: &Path, cancelled: &(dyn Fn() -> bool + Sync)) -> ShardResult<()> {
    let file = File::open(input)?;
    if file.part_count() == 1 && file.value("split.count").is_none() {
        return Err(ShardError::NotSplit { path: input.to_owned() });
    }
    crate::check_output(output, file.paths())?;
    let mut writer = writer_like(&file);
    for (key, value) in file.metadata().filter(|(key, _)| !SPLIT_KEYS.contains(key)) {
        writer.set(key, value)?;
    }
    for tensor in file.tensors() {
        copy(&mut writer, tensor, cancelled)?;
    }
    let written = writer.write(output);
    if cancelled() { Err(ShardError::Cancelled) } else { Ok(written?) }
}

/// A writer of the container that a file has.
pub(crate) fn writer_like<'a>(file: &File) -> Writer<'a> {
    if file.is_powerinfer() { Writer::powerinfer() } else { Writer::new() }
}

/// Adds a tensor as it is; writing it fails once it is cancelled.
fn copy<'a>(
    writer: &mut Writer<'a>,
    tensor: Tensor<'a>,
    cancelled: &'a (dyn Fn() -> bool + Sync),
) -> quadriga_gguf::Result<()> {
    let bytes = tensor.bytes();
    let write = move |out: &mut dyn Write| {
        for piece in bytes.chunks(PIECE) {
            if cancelled() {
                return Err(io::Error::other("cancelled"));
            }
            out.write_all(piece)?;
        }
        Ok(())
    };
    writer.tensor(tensor.name(), tensor.dtype(), tensor.shape(), write).map(|_| ())
}
