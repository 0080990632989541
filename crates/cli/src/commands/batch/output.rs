//! The results of a batch: appended line by line, so that an interrupted batch goes on where it was.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::results::has_failed;
use crate::atomic_file::{self, AtomicFile};
use crate::failure::{Failure, Outcome};
use crate::terminal;

/// The longest result that is read back.
const MAX_LINE: u64 = 1 << 30;

/// Where results go.
pub(super) struct BatchOutput {
    target: Target,
    done: Vec<DoneResult>,
    /// Whether results that are errors are computed again.
    retry: bool,
}

/// A line of results.
pub(super) enum ResultLine {
    New(Value),
    /// One that was there already, as it was.
    Kept(String),
}

impl ResultLine {
    /// As it is in files.
    fn text(&self) -> String {
        match self {
            ResultLine::New(value) => format!("{value}\n"),
            ResultLine::Kept(line) => format!("{line}\n"),
        }
    }
}

/// A result that was there already.
pub(super) struct DoneResult {
    /// The id of its request.
    pub(super) id: Option<Value>,
    /// Digests of its request and of the model, if it has them.
    pub(super) request: Option<String>,
    pub(super) model: Option<String>,
    /// Whether the request failed.
    pub(super) failed: bool,
    /// Where its line begins, and its bytes.
    place: (u64, usize),
}

enum Target {
    Stdout,
    /// A pipe or a device: it is only written.
    Stream(File, PathBuf),
    /// With the bytes of its complete results.
    File(File, PathBuf, u64),
    /// A new file with old results that are no errors and new ones in place of the others, until there are as many as were there.
    Retried {
        new: AtomicFile,
        old: File,
        path: PathBuf,
        missing: usize,
    },
}

impl BatchOutput {
    /// A file, or standard output. Results that a file has are read; nothing is changed before [`BatchOutput::begin`].
    pub(super) fn open(
        path: Option<&Path>,
        input: &Path,
        overwrite: bool,
        retry: bool,
    ) -> Outcome<BatchOutput> {
        let new = |target: Target| BatchOutput { target, done: Vec::new(), retry: false };
        let Some(path) = path.filter(|path| path.as_os_str() != "-") else {
            return Ok(new(Target::Stdout));
        };
        let failed = |action: &str, error: &io::Error| Failure::file(action, path, error);
        if std::fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
            let file = OpenOptions::new().write(true).open(path).map_err(|error| failed("open", &error))?;
            return Ok(new(Target::Stream(file, path.to_owned())));
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
        let retry = retry && done.iter().any(|result| result.failed);
        Ok(BatchOutput { target: Target::File(file, path.to_owned(), bytes), done, retry })
    }

    /// Whether results that are errors are computed again, and all others written again.
    pub(super) fn retries(&self) -> bool {
        self.retry
    }

    /// The line of a result that was there already.
    pub(super) fn kept(&mut self, index: usize) -> Outcome<ResultLine> {
        let place = self.done.get(index).map(|done| done.place);
        let (Target::Retried { old, path, .. }, Some((start, length))) = (&mut self.target, place) else {
            return Err(Failure::Message(format!("result {index} was not read")));
        };
        let mut line = vec![0; length];
        let read = old.seek(SeekFrom::Start(start)).and_then(|_| old.read_exact(&mut line));
        read.map_err(|error| Failure::file("read", path, &error))?;
        let line = String::from_utf8(line).map_err(|_| foreign(path, index))?;
        Ok(ResultLine::Kept(line.trim_end().to_owned()))
    }

    /// Results that are there already.
    pub(super) fn done(&self) -> &[DoneResult] {
        &self.done
    }

    /// Cuts off what is not a complete result: from now on, results are appended, or written to a new file if some are computed again.
    pub(super) fn begin(&mut self) -> Outcome {
        let Target::File(file, path, bytes) = &mut self.target else { return Ok(()) };
        if self.retry {
            let old = file.try_clone().map_err(|error| Failure::file("read", path, &error))?;
            let (new, path) = (AtomicFile::create(path)?, path.clone());
            self.target = Target::Retried { new, old, path, missing: self.done.len() };
            return Ok(());
        }
        let cut = |file: &mut File, bytes: u64| {
            if file.metadata()?.len() > bytes {
                file.set_len(bytes)?;
            }
            file.seek(SeekFrom::Start(bytes)).map(drop)
        };
        cut(file, *bytes).map_err(|error| Failure::file("write", path, &error))
    }

    /// Adds a result.
    pub(super) fn write(&mut self, result: &ResultLine) -> Outcome {
        match &mut self.target {
            Target::Stdout => match result {
                ResultLine::New(value) => Ok(writeln!(io::stdout().lock(), "{}", terminal::json(value))?),
                ResultLine::Kept(_) => Ok(()),
            },
            Target::Stream(file, path) | Target::File(file, path, _) => {
                // One call for the whole line: what is there after a crash is complete or cut off.
                let line = result.text();
                file.write_all(line.as_bytes()).map_err(|error| Failure::file("write", path, &error))
            }
            Target::Retried { new, path, missing, .. } => {
                let line = result.text();
                new.write_all(line.as_bytes()).map_err(|error| Failure::file("write", path, &error))?;
                *missing = missing.saturating_sub(1);
                if *missing == 0 { self.replace() } else { Ok(()) }
            }
        }
    }

    /// Puts the new file in place of the old one, of which it has all results. More are appended to it.
    fn replace(&mut self) -> Outcome {
        let Target::Retried { new, path, .. } = std::mem::replace(&mut self.target, Target::Stdout) else {
            return Ok(());
        };
        new.publish()?;
        let failed = |error: &io::Error| Failure::file("open", &path, error);
        let mut file = OpenOptions::new().write(true).open(&path).map_err(|error| failed(&error))?;
        let bytes = file.seek(SeekFrom::End(0)).map_err(|error| failed(&error))?;
        self.target = Target::File(file, path, bytes);
        Ok(())
    }

    /// Makes sure that all results are on disk.
    pub(super) fn finish(self) -> Outcome {
        match self.target {
            // A file with some of the results does not replace one with all.
            Target::Stdout | Target::Stream(..) | Target::Retried { .. } => Ok(()),
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
                && ["error", "finish"].iter().any(|name| result.get(name).is_some())
        }) else {
            return Err(foreign(path, done.len()));
        };
        let text = |name: &str| result.get(name).and_then(Value::as_str).map(str::to_owned);
        let is_openai = result.get("response").is_some();
        done.push(DoneResult {
            id: match is_openai {
                true => result.get("custom_id").filter(|id| !id.is_null()).cloned(),
                false => result.get("id").cloned(),
            },
            request: text("request"),
            model: text("model"),
            failed: has_failed(&result),
            place: (bytes, read),
        });
        bytes += read as u64;
    }
}

fn starts_as_result(line: &[u8]) -> bool {
    let starts: [&[u8]; 3] = [b"{\"error\":", b"{\"text\":", b"{\"id\":\"batch_req_"];
    starts.iter().any(|start| line.starts_with(start) || start.starts_with(line))
}

fn foreign(path: &Path, index: usize) -> Failure {
    Failure::Message(format!(
        "{}: line {} is not result {index} of a batch; use --overwrite to replace the file",
        path.display(),
        index + 1
    ))
}
