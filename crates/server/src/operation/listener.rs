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
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    use std::path::{Path, PathBuf};

    use tokio::net::{UnixListener, UnixStream};

    /// A Unix socket that listens; its file is removed when it is dropped.
    pub(crate) struct SocketFile {
        listener: UnixListener,
        path: PathBuf,
    }

    impl SocketFile {
        pub(super) fn bind(path: &Path, mode: u32) -> io::Result<SocketFile> {
            let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
            if is_socket && std::os::unix::net::UnixStream::connect(path).is_err() {
                // Left behind by a server that was killed.
                std::fs::remove_file(path)?;
            }
            let listener = UnixListener::bind(path)?;
            let file = SocketFile { listener, path: path.to_owned() };
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
            Ok(file)
        }

        pub(super) async fn accept(&self) -> io::Result<UnixStream> {
            self.listener.accept().await.map(|(stream, _)| stream)
        }
    }

    impl Drop for SocketFile {
        fn drop(&mut self) {
            // If somebody has removed it already, nothing is left to do.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
