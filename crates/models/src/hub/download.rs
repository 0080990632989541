//! The download of one file: parts at once, resumed where they ended, in a file beside its final name.
//!
//! Threads own what they use and are not waited for when a download is cancelled: one of them may be in a pause that the server
//! asked for, or wait for a byte.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::{HubError, HubResult, io_error};
use super::http::{AttemptError, Http, HttpAnswer, cut, plain};

/// How often progress is reported.
const REPORT: Duration = Duration::from_millis(100);
/// How often the state is saved at least while something arrives.
const SAVE_EVERY: Duration = Duration::from_secs(1);
/// The bytes of all parts after which the state is saved, or those of a part if that has less.
const SAVE_AFTER: u64 = 8 << 20;
/// The most parts of a file.
const MAX_PARTS: u64 = 1 << 16;

/// What to download, and where to.
#[derive(Clone)]
pub(super) struct Download {
    pub(super) http: Arc<Http>,
    pub(super) url: String,
    /// The file's path in its repository, for messages.
    pub(super) name: String,
    /// The size by the hub.
    pub(super) bytes: u64,
    /// The incomplete file.
    pub(super) path: PathBuf,
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
    download: Download,
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
    fn new(download: &Download, state: PartialState) -> Arc<Shared> {
        Arc::new(Shared {
            download: download.clone(),
            total: AtomicU64::new(state.done.iter().sum()),
            state: Mutex::new(state),
            next: Mutex::new(0),
            stop: AtomicBool::new(false),
            no_ranges: AtomicBool::new(false),
            state_path: state_path(&download.path),
            unsaved: AtomicU64::new(0),
            saving: Mutex::new(()),
        })
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, PartialState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_complete(&self) -> bool {
        let state = self.state();
        state.done.iter().enumerate().all(|(index, done)| *done == state.part(index).1)
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

    /// The same by a thread that downloads, which has no say any more once the download was stopped.
    fn save_running(&self, output: &File) {
        let _saving = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_stopped() {
            self.save_locked(output);
        }
    }

    /// The same, unless another thread is about it.
    fn save_sometimes(&self, output: &File, added: u64, after: u64) {
        if self.unsaved.fetch_add(added, Ordering::Relaxed) + added < after {
            return;
        }
        if let Ok(_saving) = self.saving.try_lock()
            && !self.is_stopped()
        {
            self.save_locked(output);
        }
    }

    fn save_locked(&self, output: &File) {
        self.unsaved.store(0, Ordering::Relaxed);
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

/// Why the download of parts ended.
enum Ended {
    /// The user had enough; threads may still run, and change nothing that counts.
    Cancelled(HubError),
    /// It failed, and no thread runs any more.
    Failed(HubError),
}

impl Shared {
    /// Downloads parts on several threads, while this one reports progress and saves the state.
    fn in_parallel(
        self: &Arc<Shared>,
        threads: usize,
        output: &File,
        progress: &mut dyn FnMut(u64) -> HubResult<()>,
    ) -> Result<(), Ended> {
        let (sender, ended) = mpsc::channel();
        for _ in 0..threads {
            let (sender, shared) = (sender.clone(), Arc::clone(self));
            let thread = std::thread::Builder::new().name("quadriga-download".to_owned());
            let started = thread.spawn(move || {
                let result = shared.worker();
                if result.is_err() {
                    shared.stop.store(true, Ordering::Relaxed);
                }
                let _ = sender.send(result);
            });
            if let Err(error) = started {
                self.stop.store(true, Ordering::Relaxed);
                return Err(Ended::Cancelled(io_error("download", &self.download.path)(error)));
            }
        }
        drop(sender);
        let mut first_error = None;
        let mut saved = Instant::now();
        loop {
            match ended.recv_timeout(REPORT) {
                Ok(Ok(())) => {}
                Ok(Err(HubError::Cancelled)) if first_error.is_some() => {}
                Ok(Err(error)) => first_error = Some(first_error.unwrap_or(error)),
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            if let Err(error) = progress(self.total.load(Ordering::Relaxed)) {
                self.stop.store(true, Ordering::Relaxed);
                return Err(Ended::Cancelled(first_error.unwrap_or(error)));
            }
            if saved.elapsed() >= SAVE_EVERY && self.unsaved.load(Ordering::Relaxed) > 0 {
                self.save_running(output);
                saved = Instant::now();
            }
        }
        match first_error {
            Some(error) => Err(Ended::Failed(error)),
            None if self.is_complete() => Ok(()),
            None => {
                let (url, reason) =
                    (plain(&self.download.url), "a thread of the download has ended".to_owned());
                Err(Ended::Failed(HubError::Transport { url, reason }))
            }
        }
    }

    /// Downloads parts until there are no more.
    fn worker(&self) -> HubResult<()> {
        let path = &self.download.path;
        let mut output = File::options().write(true).open(path).map_err(io_error("open", path))?;
        while let Some(part) = self.next_part() {
            let mut failures = 0;
            loop {
                let before = self.total.load(Ordering::Relaxed);
                match self.download.part(self, part, &mut output) {
                    Ok(()) => break,
                    Err(AttemptError::Final(error)) => return Err(error),
                    Err(AttemptError::Retry { error, wait }) => {
                        self.save_running(&output);
                        // A server that sends something each time gets as many attempts as it needs.
                        failures = if self.total.load(Ordering::Relaxed) > before { 1 } else { failures + 1 };
                        self.download.http.pause(failures, wait, error)?;
                    }
                }
                if self.is_stopped() {
                    return Err(HubError::Cancelled);
                }
            }
        }
        Ok(())
    }
}

/// The path of the state of an incomplete file.
pub(super) fn state_path(path: &Path) -> PathBuf {
    path.with_extension("state")
}

impl Download {
    /// Downloads what is missing. `progress` is told of the bytes that are there; its error ends the download at once, which can
    /// be resumed.
    pub(super) fn run(&self, progress: &mut dyn FnMut(u64) -> HubResult<()>) -> HubResult<()> {
        let output = File::options().create(true).truncate(false).write(true).open(&self.path);
        let output = output.map_err(io_error("create", &self.path))?;
        let length = output.metadata().map_err(io_error("read", &self.path))?.len();
        let saved = fs::read(state_path(&self.path)).ok();
        let saved = saved.and_then(|text| serde_json::from_slice::<PartialState>(&text).ok());
        let state = saved.filter(|state| length == self.bytes && state.is_valid(self.bytes));
        let state = state.unwrap_or_else(|| PartialState::new(self.bytes, self.part_bytes));
        output.set_len(self.bytes).map_err(io_error("write", &self.path))?;
        let mut shared = Shared::new(self, state);
        let parts = shared.state().done.len();
        let mut result = shared.in_parallel(self.connections.clamp(1, parts.max(1)), &output, progress);
        let cancelled = matches!(result, Err(Ended::Cancelled(_)));
        if !cancelled && result.is_err() && shared.no_ranges.load(Ordering::Relaxed) {
            shared = Shared::new(self, PartialState::new(self.bytes, self.bytes.max(1)));
            shared.no_ranges.store(true, Ordering::Relaxed);
            result = shared.in_parallel(1, &output, progress);
        }
        let result = result.map_err(|(Ended::Cancelled(error) | Ended::Failed(error))| error);
        if matches!(result, Err(HubError::Changed { .. })) {
            let _ = fs::remove_file(&shared.state_path); // What is there is of another content.
        } else {
            shared.save(&output);
        }
        result?;
        output.sync_all().map_err(io_error("sync", &self.path))
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
        let mut answer = self.http.get(&self.url, range, &self.name)?;
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
        output.seek(SeekFrom::Start(start + at)).map_err(io_error("write", &self.path))?;
        let mut buffer = vec![0; 256 << 10];
        while at < length {
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
            // Also after a long wait for these bytes: another process may have gone on with the file since.
            if shared.is_stopped() {
                return Err(HubError::Cancelled.into());
            }
            let written = output.write_all(buffer.get(..count).unwrap_or_default());
            written.map_err(io_error("write", &self.path))?;
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
            return Err(HubError::Changed { file: self.name.clone() }.into());
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
        HubError::Length { file: self.name.clone(), expected: self.bytes, found }
    }
}
