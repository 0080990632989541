//! Copies, shapes and views.

use crate::arguments::array;
use crate::builder::{add, qd_builder, shape};
use crate::dtype::{self, qd_dtype};
use crate::status::Failure;
use crate::tensor::{QD_MAX_DIMS, qd_tensor};

/// A contiguous copy in another type.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_cast(builder: *mut qd_builder, x: qd_tensor, dtype: qd_dtype) -> qd_tensor {
    add(builder, "cast", |c| Ok(c.value(x)?.cast(dtype::from_id(dtype)?)))
}

/// A contiguous copy.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_cont(builder: *mut qd_builder, x: qd_tensor) -> qd_tensor {
    add(builder, "cont", |c| Ok(c.value(x)?.cont()))
}

/// Copies the elements of `x` to `target`, a state or result, cast to its type; returns the target after the write.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_copy_into(builder: *mut qd_builder, x: qd_tensor, target: qd_tensor) -> qd_tensor {
    add(builder, "copy_into", |c| Ok(c.value(x)?.copy_into(c.value(target)?)))
}

/// Tensors concatenated along dimension `axis`, counted from the outermost.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_concat(
    builder: *mut qd_builder,
    tensors: *const qd_tensor,
    tensor_count: usize,
    axis: usize,
) -> qd_tensor {
    add(builder, "concat", |c| {
        // SAFETY: the rules of the header for arrays.
        let tensors = c.values(unsafe { array(tensors, tensor_count, "tensors") }?)?;
        match tensors.split_first() {
            Some((first, others)) => Ok(first.concat(axis, others)),
            None => Err(Failure::argument("there are no tensors")),
        }
    })
}

/// The tensor repeated along every dimension to fill a shape.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_repeat(
    builder: *mut qd_builder,
    x: qd_tensor,
    dims: *const usize,
    rank: usize,
) -> qd_tensor {
    add(builder, "repeat", |c| {
        // SAFETY: the rules of the header for arrays.
        Ok(c.value(x)?.repeat(unsafe { shape(dims, rank) }?))
    })
}

/// Zeros appended along the innermost dimensions; `after` has their numbers, outermost dimension first.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_pad(
    builder: *mut qd_builder,
    x: qd_tensor,
    after: *const usize,
    count: usize,
) -> qd_tensor {
    add(builder, "pad", |c| {
        // SAFETY: the rules of the header for arrays.
        let after = unsafe { array(after, count, "after") }?;
        let mut all = [0; QD_MAX_DIMS];
        let skip =
            QD_MAX_DIMS.checked_sub(after.len()).ok_or_else(|| Failure::argument("at most 4 dimensions"))?;
        all.iter_mut().skip(skip).zip(after).for_each(|(to, from)| *to = *from);
        Ok(c.value(x)?.pad(all))
    })
}

/// The same elements under another shape.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_reshape(
    builder: *mut qd_builder,
    x: qd_tensor,
    dims: *const usize,
    rank: usize,
) -> qd_tensor {
    add(builder, "reshape", |c| {
        // SAFETY: the rules of the header for arrays.
        Ok(c.value(x)?.reshape(unsafe { shape(dims, rank) }?))
    })
}

/// A view with any shape, byte strides (of four dimensions, outermost first) and byte offset.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_view(
    builder: *mut qd_builder,
    x: qd_tensor,
    dims: *const usize,
    rank: usize,
    strides: *const usize,
    offset: usize,
) -> qd_tensor {
    add(builder, "view", |c| {
        // SAFETY: the rules of the header for arrays; there are four strides.
        let (shape, strides) = unsafe { (shape(dims, rank)?, array(strides, QD_MAX_DIMS, "strides")?) };
        let strides = strides.try_into().map_err(|_| Failure::argument("four strides are needed"))?;
        Ok(c.value(x)?.view(shape, strides, offset))
    })
}

/// Elements `start` … `start + len` along dimension `axis`, as a view.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_slice(
    builder: *mut qd_builder,
    x: qd_tensor,
    axis: usize,
    start: usize,
    len: usize,
) -> qd_tensor {
    add(builder, "slice", |c| Ok(c.value(x)?.slice(axis, start, len)))
}

/// The dimensions reordered, as a view: dimension `i` of the result is dimension `axes[i]` of `x`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_permute(
    builder: *mut qd_builder,
    x: qd_tensor,
    axes: *const usize,
    count: usize,
) -> qd_tensor {
    add(builder, "permute", |c| {
        // SAFETY: the rules of the header for arrays.
        let axes = unsafe { array(axes, count, "axes") }?;
        let x = c.value(x)?;
        Ok(match *axes {
            [a] => x.permute([a]),
            [a, b] => x.permute([a, b]),
            [a, b, d] => x.permute([a, b, d]),
            [a, b, d, e] => x.permute([a, b, d, e]),
            _ => return Err(Failure::argument(format!("{count} axes"))),
        })
    })
}

/// The two innermost dimensions swapped, as a view.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_transpose(builder: *mut qd_builder, x: qd_tensor) -> qd_tensor {
    add(builder, "transpose", |c| Ok(c.value(x)?.transpose()))
}
