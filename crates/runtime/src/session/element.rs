//! Values that go in and out of a session as bytes.

use half::{bf16, f16};
use quadriga_graph::DType;

mod sealed {
    pub trait Sealed {}
}

/// An element that inputs are given in and outputs are read as: a number of the tensor's own type, or `u8` for the bytes
/// of any type. Nothing is converted; [`Session::set_from_f32`](crate::Session::set_from_f32) and
/// [`Session::read_as_f32`](crate::Session::read_as_f32) convert.
pub trait Element: sealed::Sealed + bytemuck::Pod + Default {
    /// The type of tensor it fits; `None` fits any.
    const DTYPE: Option<DType>;
}

macro_rules! elements {
    ($($element:ty: $dtype:expr),* $(,)?) => {
        $(
            impl sealed::Sealed for $element {}

            impl Element for $element {
                const DTYPE: Option<DType> = $dtype;
            }
        )*
    };
}

elements! {
    f32: Some(DType::F32),
    f16: Some(DType::F16),
    bf16: Some(DType::BF16),
    f64: Some(DType::F64),
    i8: Some(DType::I8),
    i16: Some(DType::I16),
    i32: Some(DType::I32),
    i64: Some(DType::I64),
    u8: None,
}

/// Something that can be the value of an input: a slice, array or vector of [`Element`]s.
pub trait Values {
    /// Its bytes.
    fn bytes(&self) -> &[u8];

    /// The type of tensor it fits; `None` fits any.
    fn dtype(&self) -> Option<DType>;

    /// Bytes of one element.
    fn element_bytes(&self) -> usize;
}

impl<T: Element> Values for [T] {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn dtype(&self) -> Option<DType> {
        T::DTYPE
    }

    fn element_bytes(&self) -> usize {
        size_of::<T>()
    }
}

impl<T: Element, const N: usize> Values for [T; N] {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn dtype(&self) -> Option<DType> {
        T::DTYPE
    }

    fn element_bytes(&self) -> usize {
        size_of::<T>()
    }
}

impl<T: Element> Values for Vec<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn dtype(&self) -> Option<DType> {
        T::DTYPE
    }

    fn element_bytes(&self) -> usize {
        size_of::<T>()
    }
}

impl<V: Values + ?Sized> Values for &V {
    fn bytes(&self) -> &[u8] {
        (**self).bytes()
    }

    fn dtype(&self) -> Option<DType> {
        (**self).dtype()
    }

    fn element_bytes(&self) -> usize {
        (**self).element_bytes()
    }
}
