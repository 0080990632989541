//! Where a server listens: a TCP port, or a Unix socket.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use tokio::net::{TcpListener, TcpSocket};

use super::socket::Socket;

/// Bytes of an answer that the system keeps until the client takes them.
const SEND_BUFFER: u32 = 256 << 10;

/// Connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// Where a server listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ListenAddress {
    /// An address and a port; port 0 is any free one.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix {
        /// Its path. A socket that is there already and on which nobody listens is replaced.
        path: PathBuf,
        /// Who may connect, as the mode of the file.
        mode: u32,
    },
}

impl From<SocketAddr> for ListenAddress {
    fn from(address: SocketAddr) -> ListenAddress {
        ListenAddress::Tcp(address)
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Tcp(address) => address.fmt(formatter),
            ListenAddress::Unix { path, .. } => write!(formatter, "unix:{}", path.display()),
        }
    }
}

/// A socket that listens.
pub(crate) enum Listener {
    Tcp(TcpListener),
    #[cfg(unix)]
    Unix(unix::SocketFile),
}

impl Listener {
    pub(crate) async fn bind(address: &ListenAddress) -> io::Result<Listener> {
        match address {
            ListenAddress::Tcp(address) => Ok(Listener::Tcp(listen(*address)?)),
            #[cfg(unix)]
            ListenAddress::Unix { path, mode } => Ok(Listener::Unix(unix::SocketFile::bind(path, *mode)?)),
            #[cfg(not(unix))]
            ListenAddress::Unix { .. } => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// The address of a TCP port.
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Listener::Tcp(listener) => listener.local_addr(),
            #[cfg(unix)]
            Listener::Unix(_) => Err(io::Error::new(io::ErrorKind::Unsupported, "it is a Unix socket")),
        }
    }

    /// The next connection, and who made it.
    pub(crate) async fn accept(&self) -> io::Result<(Box<dyn Socket>, Option<SocketAddr>)> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                // Tokens are sent at once, each in a packet of its own if need be.
                let _ = stream.set_nodelay(true);
                Ok((Box::new(stream), Some(peer)))
            }
            #[cfg(unix)]
            Listener::Unix(file) => Ok((Box::new(file.accept().await?), None)),
        }
    }
}

/// Listens at a port. What the system keeps of an answer that its client does not read is limited for every connection.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    // A system that knows better is asked for no more.
    let _ = socket.set_send_buffer_size(SEND_BUFFER);
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(unix)]
mod unix {
    use std::io;
    use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
    use std::path::{Path, PathBuf};

    use tokio::net::{UnixListener, UnixStream};

    /// Names of folders that are tried.
    const FOLDERS: usize = 100;

    /// A Unix socket that listens; its file is removed when it is dropped.
    pub(crate) struct SocketFile {
        listener: UnixListener,
        path: PathBuf,
        /// Device and inode of the file, by which it is told from that of a later server.
        identity: Option<(u64, u64)>,
    }

    fn identity(path: &Path) -> Option<(u64, u64)> {
        std::fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
    }

    /// A folder that nobody else can enter, beside the place of a socket: its mode is set there, before anybody can connect. It is
    /// removed when it is dropped.
    struct PrivateFolder(PathBuf);

    impl PrivateFolder {
        /// Makes a folder, and binds a socket in it. The path is no longer than most, as those of sockets are short.
        fn bind(path: &Path) -> io::Result<(PrivateFolder, UnixListener)> {
            let parent = path.parent().unwrap_or(Path::new(""));
            let mut taken = io::Error::from(io::ErrorKind::AlreadyExists);
            for number in 0..FOLDERS {
                let folder = parent.join(format!(".q{number}"));
                match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
                    Ok(()) => {
                        let folder = PrivateFolder(folder);
                        let listener = UnixListener::bind(folder.socket())?;
                        return Ok((folder, listener));
                    }
                    // That of another server that is starting, or was killed then.
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => taken = error,
                    Err(error) => return Err(error),
                }
            }
            Err(taken)
        }

        fn socket(&self) -> PathBuf {
            self.0.join("s")
        }
    }

    impl Drop for PrivateFolder {
        fn drop(&mut self) {
            // If somebody else has removed them, nothing is left to do.
            let _ = std::fs::remove_file(self.socket());
            let _ = std::fs::remove_dir(&self.0);
        }
    }

    /// Gives a socket its place, where nothing may be.
    fn place(socket: &Path, path: &Path) -> io::Result<()> {
        match std::fs::hard_link(socket, path) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(io::ErrorKind::AddrInUse.into())
            }
            // Not every file system has links.
            Err(_) if std::fs::symlink_metadata(path).is_err() => std::fs::rename(socket, path),
            Err(_) => Err(io::ErrorKind::AddrInUse.into()),
        }
    }

    impl SocketFile {
        pub(super) fn bind(path: &Path, mode: u32) -> io::Result<SocketFile> {
            let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
            if is_socket && std::os::unix::net::UnixStream::connect(path).is_err() {
                // Left behind by a server that was killed.
                std::fs::remove_file(path)?;
            }
            let (folder, listener) = PrivateFolder::bind(path)?;
            std::fs::set_permissions(folder.socket(), std::fs::Permissions::from_mode(mode))?;
            place(&folder.socket(), path)?;
            Ok(SocketFile { listener, path: path.to_owned(), identity: identity(path) })
        }

        pub(super) async fn accept(&self) -> io::Result<UnixStream> {
            self.listener.accept().await.map(|(stream, _)| stream)
        }
    }

    impl Drop for SocketFile {
        fn drop(&mut self) {
            // If somebody has removed or replaced it, nothing is left to do.
            if self.identity.is_some() && identity(&self.path) == self.identity {
                let _ = std::fs::remove_file(&self.path);
            }
        }
    }
}
