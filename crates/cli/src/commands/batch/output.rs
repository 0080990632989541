//! The results of a batch: appended line by line, so that an interrupted batch goes on where it was.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::atomic_file;
use crate::failure::{Failure, Outcome};
use crate::terminal;

/// The longest result that is read back.
const MAX_LINE: u64 = 1 << 30;

/// Where results go.
pub(super) struct BatchOutput {
    target: Target,
    done: Vec<DoneResult>,
}

/// A result that was there already.
pub(super) struct DoneResult {
    /// The id of its request.
    pub(super) id: Option<Value>,
    /// Whether the request failed.
    pub(super) failed: bool,
}

enum Target {
    Stdout,
    /// A pipe or a device: it is only written.
    Stream(File, PathBuf),
    /// With the bytes of its complete results.
    File(File, PathBuf, u64),
}

impl BatchOutput {
    /// A file, or standard output. Results that a file has are read; nothing is changed before [`BatchOutput::begin`].
    pub(super) fn open(path: Option<&Path>, input: &Path, overwrite: bool) -> Outcome<BatchOutput> {
        let Some(path) = path.filter(|path| path.as_os_str() != "-") else {
            return Ok(BatchOutput { target: Target::Stdout, done: Vec::new() });
        };
        let failed = |action: &str, error: &io::Error| Failure::file(action, path, error);
        if std::fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
            let file = OpenOptions::new().write(true).open(path).map_err(|error| failed("open", &error))?;
            return Ok(BatchOutput { target: Target::Stream(file, path.to_owned()), done: Vec::new() });
        }
        let same = |a: &Path, b: &Path| {
            let [a, b] = [a, b].map(|path| std::fs::canonicalize(path).ok());
            a.is_some() && a == b
        };
        if same(path, input) {
            let text = format!("{}: requests and results are the same file", path.display());
            return Err(Failure::Usage(text));
        }
        if atomic_file::is_model(path) {
            let text = format!("{}: it is a model (GGUF); choose another name", path.display());
            return Err(Failure::Message(text));
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(path).map_err(|error| failed("open", &error))?;
        let (done, bytes) = if overwrite { (Vec::new(), 0) } else { read_results(&file, path)? };
        Ok(BatchOutput { target: Target::File(file, path.to_owned(), bytes), done })
    }

    /// Results that are there already.
    pub(super) fn done(&self) -> &[DoneResult] {
        &self.done
    }

    /// Cuts off what is not a complete result: from now on, results are appended.
    pub(super) fn begin(&mut self) -> Outcome {
        let Target::File(file, path, bytes) = &mut self.target else { return Ok(()) };
        let cut = |file: &mut File, bytes: u64| {
            if file.metadata()?.len() > bytes {
                file.set_len(bytes)?;
            }
            file.seek(SeekFrom::Start(bytes)).map(drop)
        };
        cut(file, *bytes).map_err(|error| Failure::file("write", path, &error))
    }

    /// Adds a result.
    pub(super) fn write(&mut self, result: &Value) -> Outcome {
        match &mut self.target {
            Target::Stdout => Ok(writeln!(io::stdout().lock(), "{}", terminal::json(result))?),
            Target::Stream(file, path) | Target::File(file, path, _) => {
                // One call for the whole line: what is there after a crash is complete or cut off.
                let line = format!("{result}\n");
                file.write_all(line.as_bytes()).map_err(|error| Failure::file("write", path, &error))
            }
        }
    }

    /// Makes sure that all results are on disk.
    pub(super) fn finish(self) -> Outcome {
        match self.target {
            Target::Stdout | Target::Stream(..) => Ok(()),
            Target::File(file, path, _) => {
                file.sync_all().map_err(|error| Failure::file("write", &path, &error))
            }
        }
    }
}

/// The complete results of a file and their bytes.
fn read_results(file: &File, path: &Path) -> Outcome<(Vec<DoneResult>, u64)> {
    let mut reader = BufReader::new(file);
    let (mut done, mut bytes) = (Vec::new(), 0);
    loop {
        let mut line = Vec::new();
        let read = (&mut reader).take(MAX_LINE).read_until(b'\n', &mut line);
        let read = read.map_err(|error| Failure::file("read", path, &error))?;
        if line.last() != Some(&b'\n') {
            // The tail of an interrupted batch begins as results do; anything else is somebody's text.
            if line.is_empty() || !done.is_empty() || starts_as_result(&line) {
                return Ok((done, bytes));
            }
            return Err(foreign(path, done.len()));
        }
        let result: Option<Value> = serde_json::from_slice(&line).ok();
        let Some(result) = result.filter(|result| {
            result.get("index").and_then(Value::as_u64) == Some(done.len() as u64)
                && (result.get("error").is_some() || result.get("finish").is_some())
        }) else {
            return Err(foreign(path, done.len()));
        };
        done.push(DoneResult { id: result.get("id").cloned(), failed: result.get("error").is_some() });
        bytes += read as u64;
    }
}

fn starts_as_result(line: &[u8]) -> bool {
    let starts: [&[u8]; 2] = [b"{\"error\":", b"{\"text\":"];
    starts.iter().any(|start| line.starts_with(start) || start.starts_with(line))
}

fn foreign(path: &Path, index: usize) -> Failure {
    Failure::Message(format!(
        "{}: line {} is not result {index} of a batch; use --overwrite to replace the file",
        path.display(),
        index + 1
    ))
}
