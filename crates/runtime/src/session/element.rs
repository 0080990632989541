//! Values that go in and out of a session as bytes.

use quadriga_graph::DType;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for i32 {}
    impl Sealed for u8 {}
}

/// An element that inputs are given in and outputs are read as: `f32`, `i32`, or `u8` for the bytes of any type.
pub trait Element: sealed::Sealed + bytemuck::Pod + Default {
    /// The type of tensor it fits; `None` fits any.
    const DTYPE: Option<DType>;
}

impl Element for f32 {
    const DTYPE: Option<DType> = Some(DType::F32);
}

impl Element for i32 {
    const DTYPE: Option<DType> = Some(DType::I32);
}

impl Element for u8 {
    const DTYPE: Option<DType> = None;
}

/// Something that can be the value of an input: a slice, array or vector of [`Element`]s.
pub trait Values {
    /// Its bytes.
    fn bytes(&self) -> &[u8];

    /// The type of tensor it fits; `None` fits any.
    fn dtype(&self) -> Option<DType>;
}

impl<T: Element> Values for [T] {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn dtype(&self) -> Option<DType> {
        T::DTYPE
    }
}

impl<T: Element, const N: usize> Values for [T; N] {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn dtype(&self) -> Option<DType> {
        T::DTYPE
    }
}

impl<T: Element> Values for Vec<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }

    fn dtype(&self) -> Option<DType> {
        T::DTYPE
    }
}

impl<V: Values + ?Sized> Values for &V {
    fn bytes(&self) -> &[u8] {
        (**self).bytes()
    }

    fn dtype(&self) -> Option<DType> {
        (**self).dtype()
    }
}
