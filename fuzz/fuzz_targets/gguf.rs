//! Any bytes, read as a model file of one part or of two: an error, or a file that stands every question.
#![no_main]

use libfuzzer_sys::fuzz_target;
use quadriga_gguf::File;

#[path = "../../crates/gguf/tests/support/walk.rs"]
mod walk;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(file) = File::from_bytes(bytes.to_vec()) {
        walk::walk(&file);
        // A larger alignment makes a copy of a small file megabytes long.
        if file.alignment() <= 4096 {
            walk::rewrite(&file);
        }
    }
    // The same bytes as two parts, where they hold a second header.
    let second = bytes.windows(4).skip(1).position(|window| window == b"GGUF");
    if let Some((first, second)) = second.and_then(|place| bytes.split_at_checked(place + 1))
        && let Ok(file) = File::from_parts([first.to_vec(), second.to_vec()])
    {
        walk::walk(&file);
    }
});
