//! The results of a batch: appended line by line, so that an interrupted batch goes on where it was.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::failure::{Failure, Outcome};
use crate::terminal;

/// Where results go.
pub(super) struct BatchOutput {
    target: Target,
    done: usize,
}

enum Target {
    Stdout,
    File(File, PathBuf),
}

impl BatchOutput {
    /// A file, or standard output. A line that is not complete is cut off.
    pub(super) fn open(path: Option<&Path>, overwrite: bool) -> Outcome<BatchOutput> {
        let Some(path) = path else { return Ok(BatchOutput { target: Target::Stdout, done: 0 }) };
        let failed = |action: &str, error: &io::Error| Failure::file(action, path, error);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(path).map_err(|error| failed("open", &error))?;
        let (mut done, mut bytes) = (0, 0);
        if !overwrite {
            let mut reader = BufReader::new(&file);
            let mut line = Vec::new();
            loop {
                line.clear();
                let read = reader.read_until(b'\n', &mut line).map_err(|error| failed("read", &error))?;
                if read == 0 || line.last() != Some(&b'\n') {
                    break;
                }
                let result: Option<Value> = serde_json::from_slice(&line).ok();
                if result.and_then(|result| result.get("index")?.as_u64()) != Some(done as u64) {
                    return Err(Failure::Message(format!(
                        "{}: line {} is not result {done} of a batch; use --overwrite to replace the file",
                        path.display(),
                        done + 1
                    )));
                }
                done += 1;
                bytes += read as u64;
            }
        }
        if bytes < file.metadata().map_err(|error| failed("read", &error))?.len() {
            file.set_len(bytes).map_err(|error| failed("write", &error))?;
        }
        let mut file = file;
        io::Seek::seek(&mut file, io::SeekFrom::End(0)).map_err(|error| failed("write", &error))?;
        Ok(BatchOutput { target: Target::File(file, path.to_owned()), done })
    }

    /// Results that are there already.
    pub(super) fn done(&self) -> usize {
        self.done
    }

    /// Adds a result.
    pub(super) fn write(&mut self, result: &Value) -> Outcome {
        match &mut self.target {
            Target::Stdout => Ok(writeln!(io::stdout().lock(), "{}", terminal::json(result))?),
            Target::File(file, path) => {
                // One call for the whole line: what is there after a crash is complete or cut off.
                let line = format!("{result}\n");
                file.write_all(line.as_bytes()).map_err(|error| Failure::file("write", path, &error))
            }
        }
    }

    /// Makes sure that all results are on disk.
    pub(super) fn finish(self) -> Outcome {
        match self.target {
            Target::Stdout => Ok(()),
            Target::File(file, path) => {
                file.sync_all().map_err(|error| Failure::file("write", &path, &error))
            }
        }
    }
}
