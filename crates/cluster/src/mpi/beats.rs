//! Heartbeats: words in shared memory, or messages between all pairs of ranks.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Instant;

use super::abi::Handle;
use super::library::Api;
use super::setup::constant;
use crate::error::ClusterError;
use crate::shared_memory::Segment;

/// Bytes of a heartbeat: its number, how many collectives of all ranks its rank has begun, the length of an error text plus one or zero,
/// the text.
const MESSAGE: usize = 1024;
const HEAD: usize = 20;

/// How this rank's heartbeats reach others, and theirs this rank.
pub(super) enum Beats<H> {
    Shared(Arc<Segment>),
    /// Kept for ever unless they are freed: MPI may write to their buffers until then, also after a panic of the communication thread.
    Messages(ManuallyDrop<Vec<Peer<H>>>),
}

/// Persistent requests to and from another rank. Their buffers stay in place until the requests are freed.
pub(super) struct Peer<H> {
    rank: usize,
    outgoing: Box<[u8; MESSAGE]>,
    incoming: Box<[u8; MESSAGE]>,
    send: H,
    receive: H,
    sending: bool,
    number: u64,
    /// The collectives of all ranks that it has begun.
    collectives: u64,
}

impl<H: Handle> Beats<H> {
    /// Persistent requests with all other ranks.
    pub(super) fn messages(
        api: &Api<H>,
        communicator: H,
        rank: usize,
        size: usize,
    ) -> Result<Beats<H>, ClusterError> {
        let mut peers = Vec::new();
        for other in (0..size).filter(|other| *other != rank) {
            let (f, c) = (&api.functions, &api.constants);
            let mut peer = Peer {
                rank: other,
                outgoing: Box::new([0; MESSAGE]),
                incoming: Box::new([0; MESSAGE]),
                send: communicator,
                receive: communicator,
                sending: false,
                number: 0,
                collectives: 0,
            };
            let (count, other) = (MESSAGE as c_int, other as c_int);
            // SAFETY: the buffers are boxed and live until the requests are freed, or for ever.
            unsafe {
                let (from, to) = (peer.outgoing.as_ptr().cast(), peer.incoming.as_mut_ptr().cast());
                let code = (f.send_init)(from, count, c.byte, other, 0, communicator, &mut peer.send);
                api.check("MPI_Send_init", code)?;
                let code = (f.recv_init)(to, count, c.byte, other, 0, communicator, &mut peer.receive);
                api.check("MPI_Recv_init", code)?;
                api.check("MPI_Start", (f.start)(&mut peer.receive))?;
            }
            peers.push(peer);
        }
        Ok(Beats::Messages(ManuallyDrop::new(peers)))
    }

    /// Sends a heartbeat, and an error of this rank with it.
    pub(super) fn send(
        &mut self,
        api: &Api<H>,
        failed: Option<&str>,
        collectives: u64,
    ) -> Result<(), ClusterError> {
        match self {
            Beats::Shared(segment) => {
                if let Some(text) = failed {
                    segment.publish_failure(text);
                }
                segment.beat();
            }
            Beats::Messages(peers) => {
                for peer in &mut **peers {
                    peer.send(api, failed, collectives)?;
                }
            }
        }
        Ok(())
    }

    /// Receives what has arrived. Returns the first error that another rank reports.
    pub(super) fn receive(&mut self, api: &Api<H>) -> Result<Option<(usize, String)>, ClusterError> {
        match self {
            Beats::Shared(segment) => Ok(segment.published_failure()),
            Beats::Messages(peers) => {
                let mut failed = None;
                for peer in &mut **peers {
                    while let Some(message) = peer.receive(api)? {
                        failed = failed.or(message.map(|text| (peer.rank, text)));
                    }
                }
                Ok(failed)
            }
        }
    }

    /// The latest heartbeat of each rank, as far as it has arrived.
    pub(super) fn numbers(&self, size: usize) -> Vec<u64> {
        match self {
            Beats::Shared(segment) => segment.beats().collect(),
            Beats::Messages(peers) => {
                let mut numbers = vec![0; size];
                for peer in &**peers {
                    if let Some(number) = numbers.get_mut(peer.rank) {
                        *number = peer.number;
                    }
                }
                numbers
            }
        }
    }

    /// The ranks whose latest heartbeat says that they have not begun so many collectives of all ranks.
    pub(super) fn behind(&self, collectives: u64) -> Vec<usize> {
        match self {
            Beats::Shared(_) => Vec::new(),
            Beats::Messages(peers) => {
                peers.iter().filter(|peer| peer.collectives < collectives).map(|peer| peer.rank).collect()
            }
        }
    }

    /// Completes sends that others can still receive, until a time.
    pub(super) fn drain(&mut self, api: &Api<H>, until: Instant) {
        let Beats::Messages(peers) = self else { return };
        while Instant::now() < until {
            let busy =
                peers.iter_mut().map(|peer| !matches!(peer.sent(api), Ok(true))).filter(|busy| *busy).count();
            if busy == 0 {
                return;
            }
            for peer in &mut **peers {
                drop(peer.receive(api));
            }
            std::thread::yield_now();
        }
    }

    /// Frees the requests; returns whether none is left that could still write to its buffer.
    pub(super) fn free(&mut self, api: &Api<H>) -> bool {
        let Beats::Messages(peers) = self else { return true };
        let f = &api.functions;
        for peer in &mut **peers {
            // SAFETY: requests of this rank; a receive that is cancelled completes at once or with its message.
            unsafe {
                (f.cancel)(&mut peer.receive);
                let until = Instant::now() + std::time::Duration::from_secs(1);
                let mut complete = 0;
                while complete == 0 {
                    let code =
                        (f.test)(&mut peer.receive, &mut complete, constant(api.constants.status_ignore));
                    if code != 0 || Instant::now() > until {
                        return false;
                    }
                }
                (f.request_free)(&mut peer.receive);
                (f.request_free)(&mut peer.send);
            }
        }
        peers.clear();
        true
    }
}

impl<H: Handle> Peer<H> {
    /// Whether the last heartbeat is on its way, so that the buffer can be written again.
    fn sent(&mut self, api: &Api<H>) -> Result<bool, ClusterError> {
        if self.sending {
            let mut complete = 0;
            // SAFETY: a request of this rank.
            let code = unsafe {
                (api.functions.test)(&mut self.send, &mut complete, constant(api.constants.status_ignore))
            };
            api.check("MPI_Test", code)?;
            self.sending = complete == 0;
        }
        Ok(!self.sending)
    }

    fn send(&mut self, api: &Api<H>, failed: Option<&str>, collectives: u64) -> Result<(), ClusterError> {
        // A rank that does not receive is found by its own silence.
        if !self.sent(api)? {
            return Ok(());
        }
        let text = failed.unwrap_or_default().as_bytes();
        let text = text.get(..text.len().min(MESSAGE - HEAD)).unwrap_or_default();
        let length = failed.map_or(0, |_| text.len() as u32 + 1);
        let number = u64::from_le_bytes(head(&self.outgoing)).wrapping_add(1);
        let numbers = number.to_le_bytes().into_iter().chain(collectives.to_le_bytes());
        let message = numbers.chain(length.to_le_bytes()).chain(text.iter().copied());
        self.outgoing.iter_mut().zip(message).for_each(|(to, from)| *to = from);
        // SAFETY: the request is inactive, and its buffer lives as long.
        api.check("MPI_Start", unsafe { (api.functions.start)(&mut self.send) })?;
        self.sending = true;
        Ok(())
    }

    /// A heartbeat, if one has arrived, with the error that it reports.
    fn receive(&mut self, api: &Api<H>) -> Result<Option<Option<String>>, ClusterError> {
        let mut complete = 0;
        // SAFETY: an active request of this rank; its buffer is read only after it is complete, and before it is started again.
        let code = unsafe {
            (api.functions.test)(&mut self.receive, &mut complete, constant(api.constants.status_ignore))
        };
        api.check("MPI_Test", code)?;
        if complete == 0 {
            return Ok(None);
        }
        let (numbers, _) = self.incoming.as_chunks::<8>();
        let mut numbers = numbers.iter().map(|number| u64::from_le_bytes(*number));
        (self.number, self.collectives) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        let length =
            self.incoming.get(16..HEAD).and_then(|bytes| Some(u32::from_le_bytes(bytes.try_into().ok()?)));
        let failed = length.and_then(|length| length.checked_sub(1)).map(|length| {
            let text = self.incoming.get(HEAD..HEAD + length as usize).unwrap_or_default();
            String::from_utf8_lossy(text).into_owned()
        });
        // SAFETY: the request is inactive, and its buffer lives as long.
        api.check("MPI_Start", unsafe { (api.functions.start)(&mut self.receive) })?;
        Ok(Some(failed))
    }
}

fn head(message: &[u8; MESSAGE]) -> [u8; 8] {
    message.first_chunk().copied().unwrap_or_default()
}
