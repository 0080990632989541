//! A blocking HTTP/1.1 client that does what it is told, also what is wrong.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// One connection.
pub struct Client {
    address: SocketAddr,
    headers: Vec<(String, String)>,
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

/// An answer that is being read.
pub struct Stream {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    reader: BufReader<TcpStream>,
    chunked: bool,
    length: Option<usize>,
}

impl Client {
    pub fn new(address: SocketAddr) -> Client {
        Client { address, headers: Vec::new() }
    }

    pub fn header(mut self, name: &str, value: &str) -> Client {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        // A server that hangs fails the test.
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send("GET", path, b"").answer()
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, body.to_string().as_bytes()).answer()
    }

    pub fn stream(&self, path: &str, body: &Value) -> Stream {
        self.send("POST", path, body.to_string().as_bytes())
    }

    pub fn send(&self, method: &str, path: &str, body: &[u8]) -> Stream {
        let mut stream = self.connect();
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("content-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len()));
        stream.write_all(head.as_bytes()).unwrap();
        // The server may refuse the body before it has it all.
        let _ = stream.write_all(body);
        Stream::of(stream)
    }

    /// Sends bytes, and returns everything that comes back.
    pub fn raw(&self, bytes: &[u8]) -> Vec<u8> {
        let mut stream = self.connect();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all);
        all
    }
}

impl Stream {
    /// Reads the header of an answer.
    pub fn of(stream: TcpStream) -> Stream {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let status =
            line.split(' ').nth(1).unwrap_or_else(|| panic!("status line {line:?}")).parse().unwrap();
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim_end().split_once(':') else { break };
            headers.push((name.to_lowercase(), value.trim().to_owned()));
        }
        let find = |name: &str| headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
        let chunked = find("transfer-encoding").is_some_and(|value| value == "chunked");
        let length = find("content-length").map(|length| length.parse().unwrap());
        Stream { status, headers, reader, chunked, length }
    }

    /// The next part of the body; `None` at its end.
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        if !self.chunked {
            let length = self.length.take().filter(|length| *length > 0)?;
            let mut bytes = vec![0; length];
            self.reader.read_exact(&mut bytes).unwrap();
            return Some(bytes);
        }
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        let length = usize::from_str_radix(line.trim(), 16).unwrap_or_else(|_| panic!("chunk size {line:?}"));
        let mut bytes = vec![0; length + 2];
        self.reader.read_exact(&mut bytes).unwrap();
        bytes.truncate(length);
        (length > 0).then_some(bytes)
    }

    pub fn answer(mut self) -> Answer {
        let mut body = Vec::new();
        while let Some(chunk) = self.chunk() {
            body.extend(chunk);
        }
        Answer { status: self.status, headers: self.headers, body }
    }
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// Asserts success, and returns the body.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    /// Server-sent events: the name, if there is one, and the data.
    pub fn events(&self) -> Vec<(Option<String>, String)> {
        let text = self.text();
        let blocks = text.split_terminator("\n\n").filter(|block| !block.starts_with(':'));
        blocks
            .map(|block| {
                let (mut name, mut data) = (None, None);
                for line in block.lines() {
                    match line.split_once(": ") {
                        Some(("event", value)) => name = Some(value.to_owned()),
                        Some(("data", value)) => data = Some(value.to_owned()),
                        _ => panic!("line {line:?}"),
                    }
                }
                (name, data.expect("an event without data"))
            })
            .collect()
    }

    /// The data of events that are JSON; `[DONE]` must be the last, and is left out.
    #[track_caller]
    pub fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        let last = events.pop().expect("no events");
        assert_eq!(last.1, "[DONE]", "{}", self.text());
        events.iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect()
    }

    /// One JSON object a line.
    pub fn lines(&self) -> Vec<Value> {
        self.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}
