//! The memory map of a file: the only `unsafe` code of this crate.

use std::{fs, path::Path, sync::Arc};

use quadriga_graph::Data;

use crate::error::{Error, Result};

/// Maps a regular file into memory, read-only.
pub(crate) fn map(path: &Path) -> Result<Data> {
    let failed = |action| move |source| Error::Io { action, path: path.to_owned(), source };
    // Checked before opening: opening a pipe would block until it has a writer.
    let regular = |metadata: fs::Metadata| match metadata.is_file() {
        true => Ok(metadata.len()),
        false => Err(Error::NotAFile { path: path.to_owned() }),
    };
    regular(fs::metadata(path).map_err(failed("open"))?)?;
    let file = fs::File::open(path).map_err(failed("open"))?;
    if regular(file.metadata().map_err(failed("open"))?)? == 0 {
        return Ok(Data::new(Arc::new([0u8; 0])));
    }
    // SAFETY: the map is read-only, owned by the `Mmap` that the returned handle keeps alive, and only ever viewed as
    // bytes, for which every content is valid. Another process can still modify or truncate the file while it is
    // mapped; no reader of mapped files can prevent that, and `File::open` documents that it must not happen. All text
    // is validated again when it is read, so modified bytes cannot become invalid strings.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(failed("map"))?;
    Ok(Data::new(Arc::new(map)))
}
