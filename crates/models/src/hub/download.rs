//! The download of one file: parts at once, resumed where they ended, in a file beside its final name.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::{HubError, HubResult, io_error};
use super::http::{AttemptError, Http, HttpAnswer, cut, plain};

/// How often progress is reported.
const REPORT: Duration = Duration::from_millis(100);
/// The bytes of all parts after which the state is saved, or those of a part if that has less.
const SAVE_AFTER: u64 = 8 << 20;
/// The most parts of a file.
const MAX_PARTS: u64 = 1 << 16;

/// What to download, and where to.
pub(super) struct Download<'a> {
    pub(super) http: &'a Http,
    pub(super) url: &'a str,
    /// The file's path in its repository, for messages.
    pub(super) name: &'a str,
    /// The size by the hub.
    pub(super) bytes: u64,
    /// The incomplete file.
    pub(super) path: &'a Path,
    pub(super) connections: usize,
    pub(super) part_bytes: u64,
}

/// The state of an incomplete file, saved beside it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct PartialState {
    bytes: u64,
    part_bytes: u64,
    /// The server's tag of the content, if it has one.
    etag: Option<String>,
    /// The bytes of each part that are written.
    done: Vec<u64>,
}

impl PartialState {
    /// Parts of this size, or of a larger one if there were too many.
    fn new(bytes: u64, part_bytes: u64) -> PartialState {
        let part_bytes = part_bytes.max(bytes.div_ceil(MAX_PARTS)).max(1);
        let parts = PartialState::part_count(bytes, part_bytes).unwrap_or(0);
        PartialState { bytes, part_bytes, etag: None, done: vec![0; parts] }
    }

    fn part_count(bytes: u64, part_bytes: u64) -> Option<usize> {
        usize::try_from(bytes.div_ceil(part_bytes.max(1))).ok()
    }

    /// First byte and length of a part.
    fn part(&self, index: usize) -> (u64, u64) {
        let start = index as u64 * self.part_bytes;
        (start, self.part_bytes.min(self.bytes.saturating_sub(start)))
    }

    fn is_valid(&self, bytes: u64) -> bool {
        self.bytes == bytes
            && self.part_bytes > 0
            && PartialState::part_count(bytes, self.part_bytes) == Some(self.done.len())
            && self.done.iter().enumerate().all(|(index, done)| *done <= self.part(index).1)
    }
}

/// The state, shared by the threads.
struct Shared {
    state: Mutex<PartialState>,
    next: Mutex<usize>,
    /// Bytes written in all.
    total: AtomicU64,
    stop: AtomicBool,
    /// Whether the server sends the whole file whatever part is asked for.
    no_ranges: AtomicBool,
    state_path: PathBuf,
    /// Bytes written since the state was saved.
    unsaved: AtomicU64,
    /// Held by the thread that saves.
    saving: Mutex<()>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, PartialState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next part that is not complete.
    fn next_part(&self) -> Option<usize> {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self.state();
        let part = (*next..state.done.len())
            .find(|index| state.done.get(*index).is_some_and(|done| *done < state.part(*index).1))?;
        *next = part + 1;
        Some(part)
    }

    /// Saves the state after the data that it is about, so that a process that is killed loses no more than a little; failing
    /// to is no error, since the download would only start anew.
    fn save(&self, output: &File) {
        let _saving = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        self.save_locked(output);
    }

    /// The same, unless another thread is about it.
    fn save_sometimes(&self, output: &File, added: u64, after: u64) {
        if self.unsaved.fetch_add(added, Ordering::Relaxed) + added < after {
            return;
        }
        if let Ok(_saving) = self.saving.try_lock() {
            self.unsaved.store(0, Ordering::Relaxed);
            self.save_locked(output);
        }
    }

    fn save_locked(&self, output: &File) {
        // What is written while the data are synced is not part of it.
        let text = serde_json::to_string(&*self.state()).unwrap_or_default();
        if output.sync_data().is_err() {
            return;
        }
        let temporary = self.state_path.with_extension("state.tmp");
        if fs::write(&temporary, text).is_ok() {
            let _ = fs::rename(&temporary, &self.state_path);
        }
    }
}

/// The path of the state of an incomplete file.
pub(super) fn state_path(path: &Path) -> PathBuf {
    path.with_extension("state")
}

impl Download<'_> {
    /// Downloads what is missing. `progress` is told of the bytes that are there; its error ends the download, which can be
    /// resumed.
    pub(super) fn run(&self, progress: &mut dyn FnMut(u64) -> HubResult<()>) -> HubResult<()> {
        let output = File::options().create(true).truncate(false).write(true).open(self.path);
        let output = output.map_err(io_error("create", self.path))?;
        let length = output.metadata().map_err(io_error("read", self.path))?.len();
        let saved = fs::read(state_path(self.path)).ok();
        let saved = saved.and_then(|text| serde_json::from_slice::<PartialState>(&text).ok());
        let state = saved.filter(|state| length == self.bytes && state.is_valid(self.bytes));
        let state = state.unwrap_or_else(|| PartialState::new(self.bytes, self.part_bytes));
        output.set_len(self.bytes).map_err(io_error("write", self.path))?;
        let shared = Shared {
            total: AtomicU64::new(state.done.iter().sum()),
            state: Mutex::new(state),
            next: Mutex::new(0),
            stop: AtomicBool::new(false),
            no_ranges: AtomicBool::new(false),
            state_path: state_path(self.path),
            unsaved: AtomicU64::new(0),
            saving: Mutex::new(()),
        };
        let parts = shared.state().done.len();
        let result = self.in_parallel(&shared, self.connections.clamp(1, parts.max(1)), progress);
        let result = match result {
            Err(_) if shared.no_ranges.load(Ordering::Relaxed) => {
                *shared.state() = PartialState::new(self.bytes, self.bytes.max(1));
                *shared.next.lock().unwrap_or_else(PoisonError::into_inner) = 0;
                shared.total.store(0, Ordering::Relaxed);
                shared.stop.store(false, Ordering::Relaxed);
                self.in_parallel(&shared, 1, progress)
            }
            result => result,
        };
        if matches!(result, Err(HubError::Changed { .. })) {
            let _ = fs::remove_file(&shared.state_path); // What is there is of another content.
        } else {
            shared.save(&output);
        }
        result?;
        output.sync_all().map_err(io_error("sync", self.path))
    }

    /// Downloads parts on several threads, while this one reports progress.
    fn in_parallel(
        &self,
        shared: &Shared,
        threads: usize,
        progress: &mut dyn FnMut(u64) -> HubResult<()>,
    ) -> HubResult<()> {
        let (sender, ended) = mpsc::channel();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                let sender = sender.clone();
                scope.spawn(move || {
                    let result = self.worker(shared);
                    if result.is_err() {
                        shared.stop.store(true, Ordering::Relaxed);
                    }
                    let _ = sender.send(result);
                });
            }
            drop(sender);
            let mut first_error = None;
            loop {
                match ended.recv_timeout(REPORT) {
                    Ok(Ok(())) => {}
                    Ok(Err(HubError::Cancelled)) if first_error.is_some() => {}
                    Ok(Err(error)) => first_error = Some(first_error.unwrap_or(error)),
                    Err(mpsc::RecvTimeoutError::Disconnected) => break,
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                }
                if first_error.is_none()
                    && let Err(error) = progress(shared.total.load(Ordering::Relaxed))
                {
                    shared.stop.store(true, Ordering::Relaxed);
                    first_error = Some(error);
                }
            }
            first_error.map_or(Ok(()), Err)
        })
    }

    fn worker(&self, shared: &Shared) -> HubResult<()> {
        let mut output = File::options().write(true).open(self.path).map_err(io_error("open", self.path))?;
        while let Some(part) = shared.next_part() {
            let mut failures = 0;
            loop {
                let before = shared.total.load(Ordering::Relaxed);
                match self.part(shared, part, &mut output) {
                    Ok(()) => break,
                    Err(AttemptError::Final(error)) => return Err(error),
                    Err(AttemptError::Retry { error, wait }) => {
                        shared.save(&output);
                        // A server that sends something each time gets as many attempts as it needs.
                        failures =
                            if shared.total.load(Ordering::Relaxed) > before { 1 } else { failures + 1 };
                        self.http.pause(failures, wait, error)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// One request for the rest of a part.
    fn part(&self, shared: &Shared, part: usize, output: &mut File) -> Result<(), AttemptError> {
        let (start, length, done, whole) = {
            let state = shared.state();
            let (start, length) = state.part(part);
            (start, length, state.done.get(part).copied().unwrap_or(0), state.done.len() == 1)
        };
        if done == length {
            return Ok(());
        }
        let no_ranges = shared.no_ranges.load(Ordering::Relaxed);
        let range = (!no_ranges).then_some((start + done, start + length - 1));
        let mut answer = self.http.get(self.url, range, self.name)?;
        let mut at = done;
        match answer.status {
            206 => self.check_range(&answer, range, shared)?,
            _ if whole => {
                self.check_length(&answer)?;
                at = 0;
                let old = shared.state().done.first_mut().map(std::mem::take).unwrap_or(0);
                shared.total.fetch_sub(old, Ordering::Relaxed);
            }
            _ => {
                shared.no_ranges.store(true, Ordering::Relaxed);
                return Err(HubError::Cancelled.into());
            }
        }
        output.seek(SeekFrom::Start(start + at)).map_err(io_error("write", self.path))?;
        let mut buffer = vec![0; 256 << 10];
        while at < length {
            if shared.stop.load(Ordering::Relaxed) {
                return Err(HubError::Cancelled.into());
            }
            let most = usize::try_from(length - at).unwrap_or(usize::MAX).min(buffer.len());
            let count = match answer.body.read(buffer.get_mut(..most).unwrap_or_default()) {
                Ok(0) => {
                    let reason = std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "it ended too early");
                    return Err(cut(&answer.url, &reason));
                }
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(cut(&answer.url, &error)),
            };
            let written = output.write_all(buffer.get(..count).unwrap_or_default());
            written.map_err(io_error("write", self.path))?;
            at += count as u64;
            if let Some(done) = shared.state().done.get_mut(part) {
                *done = at;
            }
            shared.total.fetch_add(count as u64, Ordering::Relaxed);
            shared.save_sometimes(output, count as u64, SAVE_AFTER.min(self.part_bytes));
        }
        Ok(())
    }

    /// Checks that an answer is the part that was asked for, of the content that the other parts are of.
    fn check_range(
        &self,
        answer: &HttpAnswer,
        range: Option<(u64, u64)>,
        shared: &Shared,
    ) -> Result<(), AttemptError> {
        let (first, last, total) = answer.content_range().ok_or_else(|| HubError::Answer {
            url: plain(&answer.url),
            reason: "a part without a valid Content-Range".to_owned(),
        })?;
        if total != self.bytes {
            return Err(self.length(total).into());
        }
        if range.is_some_and(|range| range != (first, last)) {
            let reason = format!("bytes {first} to {last} were not asked for");
            return Err(HubError::Answer { url: plain(&answer.url), reason }.into());
        }
        let Some(etag) = answer.header("etag").map(str::to_owned) else { return Ok(()) };
        let mut state = shared.state();
        if state.etag.as_ref().is_some_and(|known| *known != etag) {
            return Err(HubError::Changed { file: self.name.to_owned() }.into());
        }
        state.etag = Some(etag);
        Ok(())
    }

    fn check_length(&self, answer: &HttpAnswer) -> HubResult<()> {
        let length: Option<u64> = answer.header("content-length").and_then(|text| text.parse().ok());
        match length {
            Some(length) if length != self.bytes => Err(self.length(length)),
            _ => Ok(()),
        }
    }

    fn length(&self, found: u64) -> HubError {
        HubError::Length { file: self.name.to_owned(), expected: self.bytes, found }
    }
}
