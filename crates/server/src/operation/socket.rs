//! Sockets of all kinds, and how they tell that nobody is at the other end any more.

use std::future::Future;
use std::io;
use std::pin::Pin;

use tokio::io::{AsyncRead, AsyncWrite, Interest, Ready};

/// Waits until the system knows something of a connection.
pub(crate) type Notice = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A socket of any kind.
pub(crate) trait Socket: AsyncRead + AsyncWrite + Send + Unpin {
    /// The error by which the system knows that nobody is there any more.
    fn error(&self) -> Option<io::Error>;

    /// Waits until the connection is in a state; `None` if the system does not tell.
    fn wait(&self, interest: Interest, is_reached: fn(Ready) -> bool) -> Option<Notice>;

    /// Waits until the connection is lost; `None` if the system does not tell.
    fn loss(&self) -> Option<Notice> {
        self.wait(Interest::WRITABLE, Ready::is_write_closed)
    }

    /// Waits until the other end sends no more, though nobody reads what it has sent; `None` if the system does not tell.
    fn end(&self) -> Option<Notice> {
        self.wait(Interest::READABLE, Ready::is_read_closed)
    }
}

/// What sockets of every kind do alike.
macro_rules! socket {
    ($kind:ty) => {
        impl Socket for $kind {
            fn error(&self) -> Option<io::Error> {
                self.take_error().unwrap_or_else(Some)
            }

            #[cfg(unix)]
            fn wait(&self, interest: Interest, is_reached: fn(Ready) -> bool) -> Option<Notice> {
                // The descriptor is one of its own: what it forgets must not disturb whoever reads and writes.
                let own = std::os::fd::AsFd::as_fd(self).try_clone_to_owned().ok()?;
                let own = <$kind>::from_std(own.into()).ok()?;
                Some(Box::pin(async move {
                    // An error: the runtime ends.
                    while let Ok(state) = own.ready(interest).await {
                        if is_reached(state) {
                            return;
                        }
                        let _ = own.try_io(interest, blocked);
                    }
                }))
            }

            #[cfg(not(unix))]
            fn wait(&self, _: Interest, _: fn(Ready) -> bool) -> Option<Notice> {
                None
            }
        }
    };
}

socket!(tokio::net::TcpStream);
#[cfg(unix)]
socket!(tokio::net::UnixStream);

/// Makes a socket forget that it can be read or written, so that it is waited for the next change of its state.
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

    #[test]
    fn an_end_is_noticed_behind_bytes_that_nobody_has_read() {
        block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (mut server, _) = listener.accept().await.unwrap();
            let end = tokio::spawn(server.end().unwrap());
            client.write_all(b"request").await.unwrap();
            server.readable().await.unwrap();
            assert!(!end.is_finished());
            client.shutdown().await.unwrap();
            end.await.unwrap();
            // What was sent before is still there, and the client, too.
            server.read_exact(&mut [0; 7]).await.unwrap();
            server.write_all(b"answer").await.unwrap();
            client.read_exact(&mut [0; 6]).await.unwrap();
        });
    }
}
