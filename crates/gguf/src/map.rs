//! The bytes of a file, mapped or read into memory. The map is the only `unsafe` code of this crate.

use std::{
    fs,
    io::{self, Read},
    ops::Range,
    path::Path,
    sync::Arc,
};

use quadriga_graph::{Data, PagedBytes};

use crate::error::{Error, Result};

/// The bytes of a file.
pub(crate) struct FileBytes {
    pub(crate) data: Data,
    /// The open file, if its bytes are mapped.
    pub(crate) mapped: Option<fs::File>,
}

/// A mapped file.
struct FileMap(memmap2::Mmap);

/// The most that systems map around a byte that is read, if they have it in memory: 64 KiB by default, and a large page where files have
/// some.
#[cfg(unix)]
const AROUND: usize = 2 << 20;

impl AsRef<[u8]> for FileMap {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl PagedBytes for FileMap {
    /// Unmaps pages, which stay in the system's cache as long as there is room.
    fn release(&self, bytes: Range<usize>) {
        #[cfg(unix)]
        {
            let start = bytes.start / AROUND * AROUND;
            let end = bytes.end.next_multiple_of(AROUND).min(self.0.len());
            if start < end {
                let given_up = memmap2::UncheckedAdvice::DontNeed;
                // SAFETY: the map is read-only and shared: a page that is read again has the file's bytes, as before. A refusal changes
                // nothing.
                drop(unsafe { self.0.unchecked_advise_range(given_up, start, end - start) });
            }
        }
        #[cfg(not(unix))]
        let _ = bytes;
    }
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
    Ok(FileBytes { data: Data::paged(Arc::new(FileMap(map))), mapped: Some(file) })
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;

    /// Bytes of a file that this process has mapped and in memory.
    fn resident(path: &Path) -> usize {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
        let rss = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
        rss.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    #[test]
    fn released_bytes_take_no_memory_until_they_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bytes");
        let bytes: Vec<u8> = (0..8 << 20).map(|index: u32| (index / 999) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        let data = load(&path, Access::Map).unwrap().data;
        assert_eq!(*data.bytes(), bytes);
        assert_eq!(resident(&path), bytes.len());
        let (start, len) = (2 << 20, 4 << 20);
        let middle = data.slice(start + 5, len - 10).unwrap();
        middle.release();
        assert_eq!(resident(&path), bytes.len() - len, "whole steps of what is mapped around a byte");
        assert_eq!(*middle.bytes(), bytes[start + 5..start + len - 5]);
        assert_eq!(resident(&path), bytes.len());
        data.slice(bytes.len() - 3, 3).unwrap().release();
        data.slice(9, 0).unwrap().release();
        assert_eq!(*data.bytes(), bytes);
    }
}
