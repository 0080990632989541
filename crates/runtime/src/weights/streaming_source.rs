//! Where a streamed weight is copied from.

use std::sync::Arc;

use quadriga_graph::Data;

use crate::{Backend, BackendError, Region};

/// The bytes of a weight as its file has them (where it is resident it may be packed): mapped for the backend that
/// reads the copy, else mapped by the owner, else copied to staging memory of the reader.
pub(crate) fn streaming_source(
    data: &Data,
    owner: &Arc<dyn Backend>,
    reader: &Arc<dyn Backend>,
) -> Result<Region, BackendError> {
    let buffer = match reader.map(data).or_else(|| owner.map(data)) {
        Some(buffer) => buffer,
        None => {
            let buffer = reader.staging(data.len())?;
            buffer.write(0, &data.bytes())?;
            buffer
        }
    };
    Region::new(buffer, 0, data.len())
}
