//! The lines of a batch, read on a thread of their own: requests are computed while more are waited for.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

use crate::failure::{Failure, Outcome};

/// The longest line. A longer one is no request.
const MAX_LINE: u64 = 64 << 20;

/// Lines that are read ahead.
const LINES_AHEAD: usize = 64;

/// A line that is not empty.
pub(super) struct InputLine {
    /// Its number in the file, from 1.
    pub(super) number: usize,
    /// The text, or why it cannot be used.
    pub(super) text: Result<String, String>,
}

/// What there is to be read.
pub(super) enum Next {
    Line(InputLine),
    /// Nothing yet.
    Waiting,
    End,
}

/// The lines of a file or of standard input.
pub(super) struct BatchInput {
    lines: Receiver<io::Result<InputLine>>,
}

impl BatchInput {
    /// Begins to read; `-` is standard input.
    pub(super) fn open(path: &Path) -> Outcome<BatchInput> {
        let reader: Box<dyn BufRead + Send> = if path.as_os_str() == "-" {
            Box::new(BufReader::new(io::stdin()))
        } else {
            let file = File::open(path).map_err(|error| Failure::file("read", path, &error))?;
            Box::new(BufReader::new(file))
        };
        let (sender, lines) = sync_channel(LINES_AHEAD);
        // It ends with the process at the latest: a read from a terminal cannot be interrupted.
        let thread = std::thread::Builder::new().name("quadriga-lines".to_owned());
        thread
            .spawn(move || read(reader, &sender))
            .map_err(|error| Failure::Message(format!("cannot start a thread: {error}")))?;
        Ok(BatchInput { lines })
    }

    /// The next line, if it is there. With `wait`, waits a moment for it.
    pub(super) fn next(&self, wait: Option<Duration>) -> io::Result<Next> {
        let received = match wait {
            None => self.lines.try_recv().map_err(|error| error == TryRecvError::Empty),
            Some(time) => self.lines.recv_timeout(time).map_err(|error| error == RecvTimeoutError::Timeout),
        };
        match received {
            Ok(line) => Ok(Next::Line(line?)),
            Err(true) => Ok(Next::Waiting),
            Err(false) => Ok(Next::End),
        }
    }
}

/// Sends all lines, until nobody wants them.
fn read(mut reader: Box<dyn BufRead + Send>, lines: &SyncSender<io::Result<InputLine>>) {
    let mut number = 0;
    loop {
        number += 1;
        let line = match read_line(&mut *reader, MAX_LINE) {
            Ok(None) => return,
            Ok(Some(text)) if text.as_ref().is_ok_and(|text| text.trim().is_empty()) => continue,
            Ok(Some(text)) => Ok(InputLine { number, text }),
            Err(error) => Err(error),
        };
        let failed = line.is_err();
        if lines.send(line).is_err() || failed {
            return;
        }
    }
}

/// The next line, or what makes it unusable; `None` at the end.
fn read_line(reader: &mut dyn BufRead, most: u64) -> io::Result<Option<Result<String, String>>> {
    let mut bytes = Vec::new();
    if reader.take(most).read_until(b'\n', &mut bytes)? == 0 {
        return Ok(None);
    }
    if bytes.last() != Some(&b'\n') && bytes.len() as u64 == most {
        skip_line(reader)?;
        return Ok(Some(Err(format!("longer than {} MiB", most >> 20))));
    }
    Ok(Some(String::from_utf8(bytes).map_err(|_| "not UTF-8".to_owned())))
}

/// Skips the rest of a line.
fn skip_line(reader: &mut dyn BufRead) -> io::Result<()> {
    loop {
        let mut part = Vec::new();
        if reader.take(1 << 16).read_until(b'\n', &mut part)? == 0 || part.last() == Some(&b'\n') {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_are_too_long_or_not_utf8_are_told_from_the_others() {
        let mut input: &[u8] = b"one\n\xff\xfe\nlonger than ten bytes\n\nlast";
        let mut next = || read_line(&mut input, 10).unwrap();
        assert_eq!(next(), Some(Ok("one\n".to_owned())));
        assert_eq!(next(), Some(Err("not UTF-8".to_owned())));
        assert!(next().is_some_and(|line| line.is_err_and(|error| error.starts_with("longer"))));
        assert_eq!(next(), Some(Ok("\n".to_owned())));
        assert_eq!(next(), Some(Ok("last".to_owned())));
        assert_eq!(next(), None);
    }
}
