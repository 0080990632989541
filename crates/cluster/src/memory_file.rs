//! A file in memory that processes of one machine map.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use memmap2::{MmapOptions, MmapRaw};

/// An open file in memory. The process that made it removes its name when it drops this; maps stay.
pub(crate) struct MemoryFile {
    pub(crate) path: PathBuf,
    file: File,
    own: bool,
}

impl MemoryFile {
    /// A file of zeros, which only this user can open.
    pub(crate) fn create(bytes: usize) -> io::Result<MemoryFile> {
        let shm = Path::new("/dev/shm");
        let folder = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let path = folder.join(format!("quadriga-{}-{now:x}", std::process::id()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        let mut created = MemoryFile { path, file, own: true };
        // Written, not only made longer: if there is no room, that is an error here, and not a signal later.
        let zeros = vec![0; 1 << 16];
        let mut left = bytes;
        while left > 0 {
            let part = zeros.get(..left.min(zeros.len())).unwrap_or_default();
            created.file.write_all(part)?;
            left -= part.len();
        }
        Ok(created)
    }

    /// The file that another process made.
    pub(crate) fn open(path: &str) -> io::Result<MemoryFile> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(MemoryFile { path: path.into(), file, own: false })
    }

    /// Its memory; an error if it has not exactly so many bytes.
    pub(crate) fn map(&self, bytes: usize) -> io::Result<MmapRaw> {
        if self.file.metadata()?.len() != bytes as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        MmapOptions::new().len(bytes).map_raw(&self.file)
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        if self.own {
            // Somebody else removed it.
            drop(fs::remove_file(&self.path));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_maps_are_the_same_memory_and_the_name_does_not_stay() {
        let file = MemoryFile::create(100_000).unwrap();
        let path = file.path.to_str().unwrap().to_owned();
        let (first, second) =
            (file.map(100_000).unwrap(), MemoryFile::open(&path).unwrap().map(100_000).unwrap());
        assert!(file.map(99_999).is_err());
        // SAFETY: both maps have 100,000 bytes, and nobody else knows them.
        unsafe {
            first.as_mut_ptr().add(99_999).write_volatile(7);
            assert_eq!(second.as_mut_ptr().add(99_999).read_volatile(), 7);
        }
        drop(file);
        assert!(!Path::new(&path).exists());
    }
}
