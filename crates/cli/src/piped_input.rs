//! Text that is piped or redirected into the command.

#[cfg(not(unix))]
use std::io::IsTerminal;
use std::io::{self, Read};
use std::sync::mpsc;
use std::time::Duration;

use crate::failure::{Failure, Outcome};

/// The time after which the user is told that the command waits for input.
const PATIENCE: Duration = Duration::from_secs(2);

/// Reads stdin to its end; `None` if it is a terminal or another device, such as `/dev/null`.
///
/// A program that starts the command may leave an open pipe as its stdin: with `explain`, a note says so when nothing
/// has come for a while.
pub(crate) fn read(explain: bool) -> Outcome<Option<String>> {
    if !is_readable() {
        return Ok(None);
    }
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = io::stdin().lock().read_to_end(&mut bytes).map(|_| bytes);
        // The receiver waits.
        let _ = sender.send(read);
    });
    let read = match receiver.recv_timeout(PATIENCE) {
        Err(mpsc::RecvTimeoutError::Timeout) => {
            if explain {
                note!("quadriga: reading more of the prompt from stdin … (`< /dev/null` if there is none)");
            }
            receiver.recv()
        }
        read => read.map_err(|_| mpsc::RecvError),
    };
    let failed = |reason: String| Failure::Message(format!("cannot read stdin: {reason}"));
    let bytes =
        read.map_err(|error| failed(error.to_string()))?.map_err(|error| failed(error.to_string()))?;
    text(bytes, "stdin").map(Some)
}

/// Whether stdin is a file, a pipe or a socket.
#[cfg(unix)]
fn is_readable() -> bool {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileTypeExt;
    let file = io::stdin().as_fd().try_clone_to_owned().map(std::fs::File::from);
    let kind = file.and_then(|file| file.metadata()).map(|metadata| metadata.file_type());
    kind.is_ok_and(|kind| kind.is_file() || kind.is_fifo() || kind.is_socket())
}

#[cfg(not(unix))]
fn is_readable() -> bool {
    !io::stdin().is_terminal()
}

/// The text of these bytes from a file or stdin.
pub(crate) fn text(bytes: Vec<u8>, from: &str) -> Outcome<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::Message(format!("{from} is not valid UTF-8 (byte {at}); convert it, for example with iconv"))
    })
}
