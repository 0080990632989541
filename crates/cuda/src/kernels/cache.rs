//! The cache of machine code that was compiled on this machine. What is in it runs on the GPU in this process, so it is
//! used only where nobody else can have written it: the folder and each file belong to this user, no one else may
//! write to them, and links are not followed. A file holds a hash of its content, which shows damage.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

const HASH_BYTES: usize = 32;
/// No image is larger.
const MAX_BYTES: u64 = 64 << 20;

pub(super) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// The cache in a folder, which is made if it does not exist; an error where others can write to it.
    pub(super) fn open(folder: &Path) -> io::Result<Cache> {
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(folder)?;
        let metadata = fs::symlink_metadata(folder)?;
        if !metadata.is_dir() || !is_private(&metadata) {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("{} is not a folder that only this user can write to", folder.display()),
            ));
        }
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            if metadata.permissions().mode() & 0o777 != 0o700 {
                fs::set_permissions(folder, fs::Permissions::from_mode(0o700))?;
            }
        }
        Ok(Cache { folder: folder.to_owned() })
    }

    /// An image; `None` where there is none, where others could have written it, or where it is damaged.
    pub(super) fn read(&self, name: &str) -> Option<Vec<u8>> {
        let mut options = OpenOptions::new();
        options.read(true);
        // A pipe of this name must not block.
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = options.open(self.folder.join(name)).ok()?;
        let metadata = file.metadata().ok()?;
        if !metadata.is_file() || !is_private(&metadata) || metadata.len() > MAX_BYTES {
            return None;
        }
        read_checked(file)
    }

    /// Stores an image. Another process sees all of it or nothing.
    pub(super) fn write(&self, name: &str, image: &[u8]) -> io::Result<()> {
        // Made anew (`create_new`), with mode 0600.
        let mut file = tempfile::NamedTempFile::new_in(&self.folder)?;
        file.write_all(&Sha256::digest(image))?;
        file.write_all(image)?;
        file.as_file().sync_all()?;
        file.persist(self.folder.join(name)).map_err(|error| error.error)?;
        Ok(())
    }
}

/// The image in a file, if its hash is right.
fn read_checked(file: File) -> Option<Vec<u8>> {
    let mut content = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut content).ok()?;
    let (hash, image) = content.split_at_checked(HASH_BYTES)?;
    (Sha256::digest(image).as_slice() == hash).then(|| image.to_vec())
}

/// Whether a file or folder belongs to this user, and no one else may write to it.
#[cfg(unix)]
fn is_private(metadata: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    // SAFETY: takes nothing, cannot fail.
    let user = unsafe { libc::geteuid() };
    metadata.uid() == user && metadata.mode() & 0o022 == 0
}

#[cfg(not(unix))]
fn is_private(_: &Metadata) -> bool {
    true
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn what_is_written_is_read_in_a_private_folder_without_leftovers() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("a/kernels");
        let cache = Cache::open(&folder).unwrap();
        assert_eq!(cache.read("x"), None);
        cache.write("x", b"image").unwrap();
        cache.write("x", b"another image").unwrap();
        assert_eq!(cache.read("x").as_deref(), Some(b"another image".as_slice()));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        assert_eq!((mode(&folder), mode(&folder.join("x"))), (0o700, 0o600));
    }

    #[test]
    fn a_folder_that_others_may_read_becomes_private_and_one_they_may_write_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("kernels");
        fs::create_dir(&folder).unwrap();
        set_mode(&folder, 0o755);
        Cache::open(&folder).unwrap();
        assert_eq!(mode(&folder), 0o700);
        for open in [0o770, 0o702] {
            set_mode(&folder, open);
            let error = Cache::open(&folder).err().unwrap().to_string();
            assert!(error.contains("only this user"), "{error}");
        }
        set_mode(&folder, 0o700);
        let link = base.path().join("link");
        symlink(&folder, &link).unwrap();
        assert!(Cache::open(&link).is_err());
    }

    #[test]
    fn damaged_linked_and_writable_files_are_not_used() {
        let base = tempfile::tempdir().unwrap();
        let cache = Cache::open(base.path()).unwrap();
        let path = base.path().join("x");
        cache.write("x", b"image").unwrap();
        let whole = fs::read(&path).unwrap();
        for length in [0, HASH_BYTES - 1, HASH_BYTES, whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(cache.read("x"), None, "{length} bytes");
        }
        let mut changed = whole.clone();
        *changed.last_mut().unwrap() ^= 1;
        fs::write(&path, &changed).unwrap();
        assert_eq!(cache.read("x"), None);
        fs::write(&path, &whole).unwrap();
        assert!(cache.read("x").is_some());
        set_mode(&path, 0o620);
        assert_eq!(cache.read("x"), None);
        set_mode(&path, 0o600);
        symlink(&path, base.path().join("y")).unwrap();
        assert_eq!(cache.read("y"), None);
        fs::create_dir(base.path().join("z")).unwrap();
        assert_eq!(cache.read("z"), None);
    }

    #[test]
    fn a_file_of_another_user_is_not_used() {
        let base = tempfile::tempdir().unwrap();
        let cache = Cache::open(base.path()).unwrap();
        cache.write("x", b"image").unwrap();
        // Only root can give a file away.
        if std::os::unix::fs::chown(base.path().join("x"), Some(12345), None).is_ok() {
            assert_eq!(cache.read("x"), None);
        }
    }
}
