//! The bytes of a file, mapped or read into memory. The map is the only `unsafe` code of this crate.

use std::{
    fs,
    io::{self, Read},
    path::Path,
    sync::Arc,
};

use quadriga_graph::Data;

use crate::error::{Error, Result};

/// The bytes of a file.
pub(crate) struct FileBytes {
    pub(crate) data: Data,
    /// The open file, if its bytes are mapped.
    pub(crate) mapped: Option<fs::File>,
}

/// How the bytes of a file get into memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    /// They are mapped, read-only.
    Map,
    /// They are read.
    Read,
    /// They are mapped to parse them, and tensors are read when they are used.
    OnDemand,
}

/// The bytes of a regular file.
pub(crate) fn load(path: &Path, access: Access) -> Result<FileBytes> {
    let failed = |action| move |source| Error::Io { action, path: path.to_owned(), source };
    // Checked before opening: opening a pipe would block until it has a writer.
    let regular = |metadata: fs::Metadata| match metadata.is_file() {
        true => Ok(metadata.len()),
        false => Err(Error::NotAFile { path: path.to_owned() }),
    };
    regular(fs::metadata(path).map_err(failed("open"))?)?;
    let mut file = fs::File::open(path).map_err(failed("open"))?;
    let size = regular(file.metadata().map_err(failed("open"))?)?;
    if access == Access::Read {
        let mut bytes = Vec::new();
        // Reserved in one piece: a vector that grows would take twice the size of the file.
        let reserved = usize::try_from(size).ok().and_then(|size| bytes.try_reserve_exact(size).ok());
        reserved.ok_or_else(|| failed("read")(io::ErrorKind::OutOfMemory.into()))?;
        file.read_to_end(&mut bytes).map_err(failed("read"))?;
        return Ok(FileBytes { data: Data::new(Arc::new(bytes)), mapped: None });
    }
    if size == 0 {
        return Ok(FileBytes { data: Data::new(Arc::new([0u8; 0])), mapped: None });
    }
    // SAFETY: the map is read-only, owned by the `Mmap` that the returned handle keeps alive, and only ever viewed as
    // bytes, for which every content is valid. Another process can still modify or truncate the file while it is
    // mapped; no reader of mapped files can prevent that, and `File::open` documents that it must not happen. All text
    // is validated again when it is read, so modified bytes cannot become invalid strings.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(failed("map"))?;
    Ok(FileBytes { data: Data::new(Arc::new(map)), mapped: Some(file) })
}
