//! Sockets of all kinds, and how they tell that nobody is at the other end any more.

use std::future::Future;
use std::io;
use std::pin::Pin;

#[cfg(unix)]
use tokio::io::Interest;
use tokio::io::{AsyncRead, AsyncWrite};

/// Waits until the system knows that a connection is lost.
pub(crate) type Loss = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A socket of any kind.
pub(crate) trait Socket: AsyncRead + AsyncWrite + Send + Unpin {
    /// The error by which the system knows that nobody is there any more.
    fn error(&self) -> Option<io::Error>;

    /// Waits until the connection is lost; `None` if the system does not tell.
    fn loss(&self) -> Option<Loss>;
}

impl Socket for tokio::net::TcpStream {
    fn error(&self) -> Option<io::Error> {
        self.take_error().unwrap_or_else(Some)
    }

    #[cfg(unix)]
    fn loss(&self) -> Option<Loss> {
        let own = std::os::fd::AsFd::as_fd(self).try_clone_to_owned().ok()?;
        let own = tokio::net::TcpStream::from_std(own.into()).ok()?;
        Some(Box::pin(async move {
            // An error: the runtime ends.
            while let Ok(state) = own.ready(Interest::WRITABLE).await {
                if state.is_write_closed() {
                    return;
                }
                let _ = own.try_io(Interest::WRITABLE, blocked);
            }
        }))
    }

    #[cfg(not(unix))]
    fn loss(&self) -> Option<Loss> {
        None
    }
}

#[cfg(unix)]
impl Socket for tokio::net::UnixStream {
    fn error(&self) -> Option<io::Error> {
        self.take_error().unwrap_or_else(Some)
    }

    fn loss(&self) -> Option<Loss> {
        let own = std::os::fd::AsFd::as_fd(self).try_clone_to_owned().ok()?;
        let own = tokio::net::UnixStream::from_std(own.into()).ok()?;
        Some(Box::pin(async move {
            while let Ok(state) = own.ready(Interest::WRITABLE).await {
                if state.is_write_closed() {
                    return;
                }
                let _ = own.try_io(Interest::WRITABLE, blocked);
            }
        }))
    }
}

/// Makes a socket forget that it can be written, so that it is waited for the next change of its state. That must not disturb whoever
/// writes: the descriptor that forgets is one of its own.
#[cfg(unix)]
fn blocked() -> io::Result<()> {
    Err(io::ErrorKind::WouldBlock.into())
}

#[cfg(all(test, unix))]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream, UnixStream};

    use super::*;

    /// A runtime without a clock.
    fn block_on(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap().block_on(test);
    }

    #[test]
    fn a_client_that_ends_its_side_is_lost_when_it_leaves() {
        block_on(async {
            let (mut client, mut server) = UnixStream::pair().unwrap();
            let loss = tokio::spawn(server.loss().unwrap());
            client.shutdown().await.unwrap();
            assert_eq!(server.read(&mut [0; 8]).await.unwrap(), 0);
            server.write_all(b"answer").await.unwrap();
            client.read_exact(&mut [0; 6]).await.unwrap();
            assert!(!loss.is_finished());
            // Nothing that nobody has read is left, so that there is no error.
            drop(client);
            loss.await.unwrap();
            assert!(server.error().is_none());
        });
    }

    #[test]
    fn a_client_that_refuses_what_is_sent_is_lost() {
        block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (mut server, _) = listener.accept().await.unwrap();
            let loss = tokio::spawn(server.loss().unwrap());
            drop(client);
            // As if it had ended its side only.
            assert_eq!(server.read(&mut [0; 8]).await.unwrap(), 0);
            assert!(!loss.is_finished());
            server.write_all(b"probe").await.unwrap();
            loss.await.unwrap();
            assert!(server.error().is_some());
        });
    }
}
