//! A server on loopback that behaves like Hugging Face's hub, with the faults that a test asks for.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use sha1::Digest;

/// The commit of every repository.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What the server does wrong.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// So many answers with content end after so many bytes.
    pub cut: (u32, usize),
    /// So many answers with content stop after so many bytes, and the connection stays open.
    pub stall: (u32, usize),
    /// Answers that have stopped end.
    pub release: bool,
    /// So many requests for content get this status and this `Retry-After`.
    pub status: (u32, u16, &'static str),
    /// Ranges are ignored: every answer has the whole file.
    pub no_ranges: bool,
    /// The total size that `Content-Range` and `Content-Length` claim is off by this.
    pub lie: u64,
    /// The content has a wrong byte.
    pub corrupt: bool,
    /// The token that requests must have.
    pub token: Option<&'static str>,
    /// Another `ETag` than before.
    pub etag: Option<&'static str>,
    /// The size of every large file in the list, in place of the true one.
    pub size: Option<u64>,
    /// Redirects lead to this address instead.
    pub redirect: Option<String>,
}

/// A request as the server got it.
#[derive(Clone, Debug)]
pub struct Request {
    pub path: String,
    pub headers: BTreeMap<String, String>,
    /// Whether the storage server got it, to which the hub redirects.
    pub storage: bool,
}

#[derive(Default)]
struct State {
    /// Repository, file name, content.
    files: Vec<(String, String, Vec<u8>)>,
    /// Sizes of files, by name, of which only the beginning is there; the rest is zeros.
    sparse: BTreeMap<String, u64>,
    /// Repository, revision, commit, and the repository whose files it has.
    revisions: Vec<(String, String, String, String)>,
    faults: Faults,
    log: Vec<Request>,
    /// Answers that have stopped and wait.
    stalled: u32,
}

/// The hub, and the storage server with another address that it redirects to.
pub struct FakeHub {
    state: Arc<Mutex<State>>,
    pub endpoint: String,
    storage: String,
    stop: Arc<AtomicBool>,
}

impl FakeHub {
    /// A hub with these files of repositories.
    pub fn new(files: &[(&str, &str, &[u8])]) -> FakeHub {
        let files = files.iter().map(|(repository, name, content)| {
            ((*repository).to_owned(), (*name).to_owned(), content.to_vec())
        });
        let state = Arc::new(Mutex::new(State { files: files.collect(), ..State::default() }));
        let stop = Arc::new(AtomicBool::new(false));
        let storage = serve(&state, &stop, None);
        let endpoint = serve(&state, &stop, Some(storage.clone()));
        FakeHub { state, endpoint, storage, stop }
    }

    pub fn set_faults(&self, faults: Faults) {
        self.state.lock().unwrap().faults = faults;
    }

    pub fn add(&self, repository: &str, name: &str, content: &[u8]) {
        self.state.lock().unwrap().files.push((repository.to_owned(), name.to_owned(), content.to_vec()));
    }

    /// Adds a revision of a repository, at a commit of its own, with the files of another one.
    pub fn add_revision(&self, repository: &str, revision: &str, commit: &str, files_of: &str) {
        let entry = [repository, revision, commit, files_of].map(str::to_owned).into();
        self.state.lock().unwrap().revisions.push(entry);
    }

    /// Adds a file of this size of which only the beginning is kept.
    pub fn add_sparse(&self, repository: &str, name: &str, beginning: &[u8], bytes: u64) {
        self.add(repository, name, beginning);
        self.state.lock().unwrap().sparse.insert(name.to_owned(), bytes);
    }

    /// Answers that have stopped, whose clients wait for the rest.
    pub fn stalled(&self) -> u32 {
        self.state.lock().unwrap().stalled
    }

    /// The requests since the last call.
    pub fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.lock().unwrap().log)
    }
}

impl Drop for FakeHub {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for address in [&self.endpoint, &self.storage] {
            let _ = TcpStream::connect(address.trim_start_matches("http://"));
        }
    }
}

/// Starts a server; with `storage` it is the hub, without the storage. Its address.
fn serve(state: &Arc<Mutex<State>>, stop: &Arc<AtomicBool>, storage: Option<String>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (state, stop) = (Arc::clone(state), Arc::clone(stop));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let (state, storage) = (Arc::clone(&state), storage.clone());
            if let Ok(stream) = stream {
                std::thread::spawn(move || connection(&stream, &state, storage.as_deref()));
            }
        }
    });
    address
}

/// Answers the requests of one connection until it ends.
fn connection(stream: &TcpStream, state: &Mutex<State>, storage: Option<&str>) {
    let mut input = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if input.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            if input.read_line(&mut line).unwrap_or(0) == 0 || line == "\r\n" {
                break;
            }
            if let Some((name, value)) = line.split_once(':') {
                headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
            }
        }
        let request = Request { path, headers, storage: storage.is_none() };
        state.lock().unwrap().log.push(request.clone());
        let goes_on = match storage {
            Some(storage) => hub(stream, state, &request, storage),
            None => content(stream, state, &request),
        };
        if !goes_on {
            return;
        }
    }
}

/// An answer without content.
fn plain(mut stream: &TcpStream, status: u16, headers: &str, body: &str) -> bool {
    let length = body.len();
    write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n{headers}\r\n{body}").is_ok()
}

/// The hub's own answers: the list of files, and redirects to the storage.
fn hub(stream: &TcpStream, state: &Mutex<State>, request: &Request, storage: &str) -> bool {
    let state = state.lock().unwrap();
    if let Some(token) = state.faults.token {
        let given = request.headers.get("authorization").map_or("", String::as_str);
        if given != format!("Bearer {token}") {
            return plain(stream, 401, "", "{\"error\":\"Invalid credentials\"}");
        }
    }
    if let Some(rest) = request.path.strip_prefix("/api/models/") {
        let (repository, revision) = rest.split_once("/revision/").unwrap_or((rest, "main"));
        let revision = revision.split('?').next().unwrap_or_default().replace("%2F", "/");
        let own =
            state.revisions.iter().rev().find(|(own, name, commit, _)| {
                own == repository && (*name == revision || *commit == revision)
            });
        let (commit, repository) =
            own.map_or((COMMIT, repository), |(.., commit, files_of)| (commit, files_of));
        if own.is_none() && revision != "main" && revision != COMMIT {
            let code = "X-Error-Code: RevisionNotFound\r\n";
            return plain(stream, 404, code, "{\"error\":\"Revision not found\"}");
        }
        let files: Vec<String> = state
            .files
            .iter()
            .filter(|(own, ..)| own == repository)
            .map(|(_, name, content)| {
                listed(name, content, state.faults.size.or(state.sparse.get(name).copied()))
            })
            .collect();
        if files.is_empty() {
            let code = "X-Error-Code: RepoNotFound\r\n";
            return plain(stream, 404, code, "{\"error\":\"Repository not found\"}");
        }
        let body =
            format!("{{\"id\":\"{repository}\",\"sha\":\"{commit}\",\"siblings\":[{}]}}", files.join(","));
        return plain(stream, 200, "Content-Type: application/json\r\n", &body);
    }
    let location = match &state.faults.redirect {
        Some(location) => location.clone(),
        None => format!("{storage}{}?signature=secret", request.path),
    };
    plain(stream, 302, &format!("Location: {location}\r\n"), "")
}

/// A file as the API lists it: large ones with a SHA-256, small ones with the id of a Git blob.
fn listed(name: &str, content: &[u8], size: Option<u64>) -> String {
    let size = size.unwrap_or(content.len() as u64);
    let name = name.replace('\\', "\\\\");
    if name.ends_with(".gguf") || name.ends_with(".safetensors") {
        let sum = hexadecimal(&sha2::Sha256::digest(content));
        return format!(
            "{{\"rfilename\":\"{name}\",\"size\":{size},\"blobId\":\"{}\",\"lfs\":{{\"sha256\":\"{sum}\",\"size\":{size},\"pointerSize\":134}}}}",
            "f".repeat(40)
        );
    }
    let blob = sha1::Sha1::new_with_prefix(format!("blob {size}\0")).chain_update(content).finalize();
    format!("{{\"rfilename\":\"{name}\",\"size\":{size},\"blobId\":\"{}\"}}", hexadecimal(&blob))
}

pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The storage's answer: a file or a part of it. Whether the connection goes on.
fn content(mut stream: &TcpStream, state: &Mutex<State>, request: &Request) -> bool {
    let mut guard = state.lock().unwrap();
    let faults = guard.faults.clone();
    if faults.status.0 > 0 {
        guard.faults.status.0 -= 1;
        let wait = match faults.status.2 {
            "" => String::new(),
            wait => format!("Retry-After: {wait}\r\n"),
        };
        return plain(stream, faults.status.1, &wait, "");
    }
    let path = request.path.split('?').next().unwrap_or_default().replace("%20", " ");
    let is_at =
        |repository: &str, commit: &str, name: &str| path == format!("/{repository}/resolve/{commit}/{name}");
    let found = guard.files.iter().find(|(repository, name, _)| {
        let mut revisions = guard.revisions.iter().filter(|(.., files_of)| files_of == repository);
        is_at(repository, COMMIT, name) || revisions.any(|(own, _, commit, _)| is_at(own, commit, name))
    });
    let Some((_, name, bytes)) = found else {
        return plain(stream, 404, "X-Error-Code: EntryNotFound\r\n", "");
    };
    let sparse = guard.sparse.get(name).copied();
    let mut bytes = bytes.clone();
    if faults.corrupt
        && let Some(byte) = bytes.last_mut()
    {
        *byte ^= 1;
    }
    let total = sparse.unwrap_or(bytes.len() as u64) + faults.lie;
    let range = request.headers.get("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let range =
        range.and_then(|(first, last)| Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?)));
    let (head, body) = match range.filter(|_| !faults.no_ranges) {
        Some((first, last)) => {
            if sparse.is_some() {
                bytes.resize(bytes.len().max(last + 1), 0);
            }
            let body = bytes[first..=last.min(bytes.len() - 1)].to_vec();
            let length = body.len();
            (
                format!(
                    "HTTP/1.1 206 X\r\nContent-Range: bytes {first}-{last}/{total}\r\nContent-Length: {length}\r\n"
                ),
                body,
            )
        }
        None => (format!("HTTP/1.1 200 X\r\nContent-Length: {total}\r\n"), bytes),
    };
    let etag = faults.etag.unwrap_or("\"tag\"");
    let mut end = body.len();
    let (cut, stall) = (faults.cut.0 > 0, faults.stall.0 > 0);
    if cut {
        guard.faults.cut.0 -= 1;
        end = end.min(faults.cut.1);
    } else if stall {
        guard.faults.stall.0 -= 1;
        end = end.min(faults.stall.1);
    }
    drop(guard);
    if write!(stream, "{head}ETag: {etag}\r\nAccept-Ranges: bytes\r\n\r\n").is_err() {
        return false;
    }
    if stream.write_all(&body[..end]).is_err() || cut {
        return false;
    }
    if stall {
        // Until the client gives up, or the test has seen enough.
        let _ = stream.set_read_timeout(Some(std::time::Duration::from_millis(20)));
        let waits = |result: std::io::Result<usize>| {
            result.is_err_and(|error| {
                matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
            })
        };
        state.lock().unwrap().stalled += 1;
        while waits(stream.read(&mut [0])) && !state.lock().unwrap().faults.release {}
        state.lock().unwrap().stalled -= 1;
        return false;
    }
    true
}
