//! Reads any header of a safetensors file: 8 bytes for the number of bytes behind it, then its JSON.

use quadriga_models::convert::parse_header;

/// Checks one input.
pub fn run(bytes: &[u8]) {
    let Some((data, header)) = bytes.split_first_chunk::<8>() else { return };
    let length = (header.len() as u64 + 8).saturating_add(u64::from_le_bytes(*data) % (1 << 40));
    match parse_header(header, length, "model.safetensors") {
        Ok(tensors) => {
            for (name, tensor) in tensors {
                let elements: u64 = tensor.shape.iter().map(|dim| *dim as u64).product();
                assert_eq!(elements * tensor.dtype.bytes() as u64, tensor.bytes, "{name}");
                assert!(tensor.start + tensor.bytes <= length, "{name}");
            }
        }
        Err(error) => assert!(error.to_string().contains("model.safetensors")),
    }
}
