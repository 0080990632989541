//! A proxy on loopback that makes tunnels, or refuses them.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// A request for a tunnel, as the proxy got it.
#[derive(Clone, Debug)]
pub struct Tunnel {
    /// Host and port.
    pub target: String,
    pub headers: BTreeMap<String, String>,
}

pub struct FakeProxy {
    /// Host and port.
    pub address: String,
    log: Arc<Mutex<Vec<Tunnel>>>,
    stop: Arc<AtomicBool>,
}

impl FakeProxy {
    /// A proxy that answers with this status: 200 makes a tunnel.
    pub fn new(status: u16) -> FakeProxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (log, stop) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let (own_log, own_stop): (Arc<Mutex<Vec<Tunnel>>>, _) = (Arc::clone(&log), Arc::clone(&stop));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if own_stop.load(Ordering::Relaxed) {
                    break;
                }
                let log = Arc::clone(&own_log);
                if let Ok(stream) = stream {
                    std::thread::spawn(move || connection(&stream, &log, status));
                }
            }
        });
        FakeProxy { address, log, stop }
    }

    /// The tunnels since the last call.
    pub fn tunnels(&self) -> Vec<Tunnel> {
        std::mem::take(&mut self.log.lock().unwrap())
    }
}

impl Drop for FakeProxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(&self.address);
    }
}

fn connection(stream: &TcpStream, log: &Mutex<Vec<Tunnel>>, status: u16) {
    let mut input = BufReader::new(stream);
    let mut line = String::new();
    if input.read_line(&mut line).unwrap_or(0) == 0 {
        return;
    }
    let target = line.strip_prefix("CONNECT ").and_then(|rest| rest.split(' ').next());
    let target = target.unwrap_or_default().to_owned();
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
    log.lock().unwrap().push(Tunnel { target: target.clone(), headers });
    let mut output = stream;
    let server = if status == 200 { TcpStream::connect(&target).ok() } else { None };
    let Some(server) = server else {
        let status = if status == 200 { 502 } else { status };
        let _ = write!(output, "HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n");
        return;
    };
    if write!(output, "HTTP/1.1 200 X\r\n\r\n").is_err() {
        return;
    }
    std::thread::scope(|scope| {
        scope.spawn(|| copy(stream, &server));
        copy(&server, stream);
    });
}

/// Copies to the end of the input, and ends the output then.
fn copy(mut from: &TcpStream, mut to: &TcpStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(std::net::Shutdown::Both);
    let _ = from.shutdown(std::net::Shutdown::Both);
}
