//! Reads any bytes as a model file of one part or two: an error, or a file whose accessors all work.

use quadriga_gguf::File;

#[path = "../../gguf/tests/support/walk.rs"]
mod walk;

/// Checks one input.
pub fn run(bytes: &[u8]) {
    if let Ok(file) = File::from_bytes(bytes.to_vec()) {
        walk::walk(&file);
        // With a larger alignment the copy of a small file takes megabytes.
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
}
