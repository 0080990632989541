//! Arguments: texts, arrays, structures of parameters, and buffers of the caller.

use std::ffi::{CStr, CString, c_char};

use crate::status::{Failure, Outcome, QD_STATUS_BUFFER_TOO_SMALL};

/// A text.
///
/// # Safety
/// `pointer` is NULL, or points to bytes that end with NUL and stay as they are for `'a`.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Outcome<&'a str> {
    // SAFETY: as of this function.
    match unsafe { optional_text(pointer, name) }? {
        Some(text) => Ok(text),
        None => Err(Failure::null(name)),
    }
}

/// A text, or `None` for NULL.
///
/// # Safety
/// As of [`text`].
pub(crate) unsafe fn optional_text<'a>(pointer: *const c_char, name: &str) -> Outcome<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, and the caller's promise.
    let bytes = unsafe { CStr::from_ptr(pointer) };
    bytes.to_str().map(Some).map_err(|error| Failure::argument(format!("{name} is not UTF-8: {error}")))
}

/// An array.
///
/// # Safety
/// `pointer` is NULL, or points to `len` initialized elements that stay as they are for `'a`.
pub(crate) unsafe fn array<'a, T>(pointer: *const T, len: usize, name: &str) -> Outcome<&'a [T]> {
    check_array(pointer, len, name)?;
    // SAFETY: not NULL, aligned, not too long, and the caller's promise.
    Ok(if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(pointer, len) } })
}

/// An array of the caller to write to.
///
/// # Safety
/// `pointer` is NULL, or points to `len` elements that nothing else uses for `'a`.
pub(crate) unsafe fn array_mut<'a, T>(pointer: *mut T, len: usize, name: &str) -> Outcome<&'a mut [T]> {
    check_array(pointer, len, name)?;
    // SAFETY: not NULL, aligned, not too long, and the caller's promise.
    Ok(if len == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(pointer, len) } })
}

fn check_array<T>(pointer: *const T, len: usize, name: &str) -> Outcome<()> {
    if len == 0 {
        return Ok(());
    }
    if pointer.is_null() {
        return Err(Failure::null(name));
    }
    if !pointer.is_aligned() {
        return Err(Failure::argument(format!("{name} is not aligned to {} bytes", align_of::<T>())));
    }
    if len.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Failure::argument(format!("{name} cannot have {len} elements")));
    }
    Ok(())
}

/// A structure that the library fills, or reads: it must be there.
pub(crate) fn required<T>(value: Option<T>, name: &str) -> Outcome<T> {
    value.ok_or_else(|| Failure::null(name))
}

/// A structure of parameters that begins with its size.
///
/// # Safety
/// Any bytes are a value of the type, and its first field is a `usize` that holds the size in the program's version.
pub(crate) unsafe trait Parameters: Copy {
    /// The name in messages.
    const NAME: &'static str;

    /// The defaults.
    fn defaults() -> Self;
}

/// The caller's parameters over the defaults; those of an older version of the structure are shorter.
///
/// # Safety
/// `pointer` is NULL, or points to as many bytes as its first field says.
pub(crate) unsafe fn parameters<P: Parameters>(pointer: *const P) -> Outcome<P> {
    let mut own = P::defaults();
    if pointer.is_null() {
        return Ok(own);
    }
    if !pointer.is_aligned() {
        return Err(Failure::argument(format!("the {} are not aligned", P::NAME)));
    }
    // SAFETY: not NULL and aligned; the first field of every such structure is its size.
    let size = unsafe { pointer.cast::<usize>().read() };
    if size < size_of::<usize>() || size > size_of::<P>() {
        return Err(Failure::argument(format!(
            "the {} have a size of {size} bytes, but this library knows {}: begin with the function *_default_params, \
             and use a library that is not older than the header",
            P::NAME,
            size_of::<P>()
        )));
    }
    // SAFETY: both have `size` bytes, by the caller's promise and the check above, and any bytes are a value of the type.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), (&raw mut own).cast::<u8>(), size) };
    Ok(own)
}

/// A buffer of the caller has no room for all elements.
pub(crate) fn too_small(needed: usize, capacity: usize) -> Failure {
    let message = format!("the buffer has room for {capacity} elements, but {needed} are needed");
    Failure::new(QD_STATUS_BUFFER_TOO_SMALL, message)
}

/// Gives elements to a buffer of the caller, or says how many there are.
///
/// # Safety
/// `to` is NULL, or points to `capacity` elements.
pub(crate) unsafe fn give<T: Copy>(
    from: &[T],
    to: *mut T,
    capacity: usize,
    needed: Option<&mut usize>,
) -> Outcome<()> {
    if let Some(needed) = needed {
        *needed = from.len();
    }
    if from.len() > capacity {
        return Err(too_small(from.len(), capacity));
    }
    if !from.is_empty() {
        if to.is_null() {
            return Err(Failure::null("the buffer"));
        }
        // SAFETY: not NULL, and there is room by the caller's promise; `from` is the library's own memory.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr().cast::<u8>(), to.cast::<u8>(), size_of_val(from))
        };
    }
    Ok(())
}

/// Gives a text, with NUL at its end, to a buffer of the caller.
///
/// # Safety
/// As of [`give`].
pub(crate) unsafe fn give_text(
    from: &str,
    to: *mut c_char,
    capacity: usize,
    needed: Option<&mut usize>,
) -> Outcome<()> {
    let bytes: Vec<c_char> =
        from.bytes().filter(|byte| *byte != 0).chain([0]).map(|byte| byte as c_char).collect();
    // SAFETY: as of this function.
    unsafe { give(&bytes, to, capacity, needed) }
}

/// A text with NUL at its end, for callbacks. NULs within it are left out.
pub(crate) fn c_text(text: &str) -> CString {
    let bytes: Vec<u8> = text.bytes().filter(|byte| *byte != 0).collect();
    CString::new(bytes).unwrap_or_default()
}

/// An address of the caller that is only given back to its callbacks.
#[derive(Clone, Copy)]
pub(crate) struct UserData(pub(crate) *mut std::ffi::c_void);

impl UserData {
    /// The address, for a callback.
    pub(crate) fn pointer(self) -> *mut std::ffi::c_void {
        self.0
    }
}

// SAFETY: the library never follows it; the header says which threads call a callback.
unsafe impl Send for UserData {}
// SAFETY: as above.
unsafe impl Sync for UserData {}
