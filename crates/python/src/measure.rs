//! The time that requests take without Python: what `bench/python-overhead` compares with.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Event, Request, Service};

use crate::failure::{Failure, Outcome};

/// Streams greedy answers to prompts, of so many tokens each, from so many threads. Returns the seconds, and the number of tokens.
pub(crate) fn stream_requests(
    service: &Service,
    requests: &[(Vec<u32>, usize)],
    threads: usize,
) -> Outcome<(f64, usize)> {
    let (next, count) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let one = || -> quadriga_llm::Result<()> {
        while let Some((prompt, tokens)) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
            let request = Request {
                sampling: SamplingOptions {
                    temperature: 0.0,
                    ignore_eos: true,
                    ..SamplingOptions::default()
                },
                max_tokens: Some(*tokens),
                ..Request::new(prompt.clone())
            };
            for event in service.submit(request)? {
                match event {
                    Event::Token { .. } => count.fetch_add(1, Ordering::Relaxed),
                    Event::Failed(_) => return Err(quadriga_llm::Error::ServiceStopped),
                    _ => continue,
                };
            }
        }
        Ok(())
    };
    let started = Instant::now();
    let done = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    for thread in done {
        thread.map_err(|_| Failure::new("Error", "a thread panicked"))??;
    }
    Ok((started.elapsed().as_secs_f64(), count.load(Ordering::Relaxed)))
}
