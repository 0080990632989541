//! Memory use: hostile counts and lengths allocate no more than the file's size justifies, and writing is streamed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    io,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use quadriga_gguf::{File, Writer};
use quadriga_graph::DType;
use support::{Raw, small_file};

/// The system's allocator, counting current and peak bytes in use.
struct Counting;

static USED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator, which keeps the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(USED.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`, and the memory came from the same allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Serializes the tests: a concurrent one would allocate, too.
static ALONE: Mutex<()> = Mutex::new(());

/// The peak of bytes that `work` allocates.
fn peak_of(work: impl FnOnce()) -> usize {
    PEAK.store(USED.load(Relaxed), Relaxed);
    let before = USED.load(Relaxed);
    work();
    PEAK.load(Relaxed) - before
}

/// The peak of bytes allocated to read a file, beyond the file itself.
fn peak_of_reading(bytes: Vec<u8>) -> usize {
    peak_of(|| drop(File::from_bytes(bytes)))
}

#[test]
fn writing_a_large_tensor_takes_little_memory() {
    let _alone = ALONE.lock();
    let peak = peak_of(|| {
        let mut writer = Writer::new();
        writer
            .tensor("large", DType::F32, [1 << 12, 1 << 16], |out| {
                let row = [0; 1 << 18];
                (0..1 << 12).try_for_each(|_| out.write_all(&row))
            })
            .unwrap();
        writer.write_to(&mut io::sink()).unwrap();
    });
    assert!(peak < 16 << 10, "writing 1 GiB took {peak} bytes");
}

#[test]
fn reading_takes_memory_in_proportion_to_the_file() {
    let _alone = ALONE.lock();
    let large = [1u64 << 20, 1 << 32, 1 << 40, 1 << 60, u64::MAX];
    let body = || Raw::default().put(&[0; 4096]).bytes;
    for count in large {
        let hostile = [
            Raw::default().put(b"GGUF").u32(3).u64(count).u64(0).put(&body()),
            Raw::default().put(b"GGUF").u32(3).u64(0).u64(count).put(&body()),
            Raw::file(0, 1).u64(count).put(&body()),
            Raw::file(0, 1).key("s", 8).u64(count).put(&body()),
            Raw::file(0, 1).key("a", 9).u32(0).u64(count).put(&body()),
            Raw::file(0, 1).key("a", 9).u32(8).u64(count).put(&body()),
            Raw::file(0, 1).key("a", 9).u32(9).u64(count).put(&body()),
            Raw::file(1, 0).u64(count).put(&body()),
            Raw::file(1, 0).tensor("t", &[count], 0, 0).data(32, 4096),
            Raw::file(1, 0).tensor("t", &[32], 0, count).data(32, 4096),
        ];
        for (index, raw) in hostile.into_iter().enumerate() {
            let peak = peak_of_reading(raw.bytes);
            assert!(peak < 16 << 10, "file {index} with count {count:#x} took {peak} bytes");
        }
    }
    let peak = peak_of_reading(small_file());
    assert!(peak < 16 << 10, "a small file took {peak} bytes");

    // A vocabulary allocates nothing.
    let tokens = (0..150_000)
        .fold(Raw::file(0, 1).key("tokenizer.ggml.tokens", 9).u32(8).u64(150_000), |raw, id| {
            raw.text(format!("token {id}"))
        });
    let len = tokens.bytes.len();
    let peak = peak_of_reading(tokens.bytes);
    assert!(peak < 16 << 10, "a vocabulary of {len} bytes took {peak} bytes");
}
