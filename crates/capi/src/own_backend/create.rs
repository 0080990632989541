//! Makes backends of tables.

use std::sync::Arc;

use quadriga::runtime::Backend;

use super::device::OwnBackend;
use super::table::qd_backend_table;
use crate::arguments::parameters;
use crate::backend::{BackendObject, qd_backend};
use crate::guard;
use crate::status::{Failure, qd_error};

/// Makes a backend of a table, which is copied. It is used like any other: in schedulers, for buffers, for models.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_backend_new(
    table: *const qd_backend_table,
    error: Option<&mut qd_error>,
) -> *mut qd_backend {
    guard::handle(error, || {
        if table.is_null() {
            return Err(Failure::null("table"));
        }
        // SAFETY: the rules of the header for parameters and texts.
        let backend = unsafe { OwnBackend::new(parameters(table)?) }?;
        Ok(BackendObject { backend: Arc::new(backend) as Arc<dyn Backend>, cpu: None })
    })
}
