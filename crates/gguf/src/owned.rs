//! Owned metadata values, for writing.

use crate::{
    cursor::Cursor,
    error::FormatErrorKind,
    value::{self, Array, Value, ValueType},
};

/// An owned metadata value in the encoding of the file.
///
/// `From` converts numbers, bools, strings, slices and vectors of those, and any [`Value`] of another file;
/// [`OwnedValue::array`] makes arrays of arrays.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnedValue {
    kind: ValueType,
    bytes: Vec<u8>,
}

impl OwnedValue {
    /// The value's type.
    pub fn kind(&self) -> ValueType {
        self.kind
    }

    /// The value, borrowed.
    pub fn value(&self) -> Value<'_> {
        Value::decode(self.kind, &self.bytes)
    }

    /// An array of values of type `element`, nested at most as deep as [`File`](crate::File) accepts.
    pub fn array(element: ValueType, values: &[OwnedValue]) -> Result<OwnedValue, FormatErrorKind> {
        let mut array = OwnedValue::array_of(element, values.len());
        for value in values {
            if value.kind != element {
                return Err(FormatErrorKind::WrongType {
                    expected: element.name(),
                    found: value.value().describe(),
                });
            }
            array.bytes.extend_from_slice(&value.bytes);
        }
        let field = format_args!("array");
        match value::check(ValueType::Array, &mut Cursor::new(&array.bytes), 0, field) {
            Ok(()) => Ok(array),
            Err(error) => Err(error.kind),
        }
    }

    /// The encoding of the value.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn array_of(element: ValueType, len: usize) -> OwnedValue {
        let mut bytes = element.id().to_ne_bytes().to_vec();
        bytes.extend_from_slice(&(len as u64).to_ne_bytes());
        OwnedValue { kind: ValueType::Array, bytes }
    }
}

/// Appends the encoding of a string: its length, then its bytes.
pub(crate) fn push_string(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u64).to_ne_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// Conversions from one type, and from slices, arrays and vectors of it.
macro_rules! from {
    ($($kind:ident $type:ty: |$out:ident, $value:ident| $push:expr;)*) => {$(
        impl From<$type> for OwnedValue {
            fn from($value: $type) -> OwnedValue {
                let mut bytes = Vec::new();
                let $out = &mut bytes;
                $push;
                OwnedValue { kind: ValueType::$kind, bytes }
            }
        }

        impl From<&[$type]> for OwnedValue {
            fn from(values: &[$type]) -> OwnedValue {
                let mut array = OwnedValue::array_of(ValueType::$kind, values.len());
                for $value in values {
                    let $out = &mut array.bytes;
                    $push;
                }
                array
            }
        }

        impl From<Vec<$type>> for OwnedValue {
            fn from(values: Vec<$type>) -> OwnedValue {
                values.as_slice().into()
            }
        }

        impl<const N: usize> From<[$type; N]> for OwnedValue {
            fn from(values: [$type; N]) -> OwnedValue {
                values.as_slice().into()
            }
        }
    )*};
}

from! {
    U8 u8: |out, value| out.extend_from_slice(&value.to_ne_bytes());
    I8 i8: |out, value| out.extend_from_slice(&value.to_ne_bytes());
    U16 u16: |out, value| out.extend_from_slice(&value.to_ne_bytes());
    I16 i16: |out, value| out.extend_from_slice(&value.to_ne_bytes());
    U32 u32: |out, value| out.extend_from_slice(&value.to_ne_bytes());
    I32 i32: |out, value| out.extend_from_slice(&value.to_ne_bytes());
    U64 u64: |out, value| out.extend_from_slice(&value.to_ne_bytes());
    I64 i64: |out, value| out.extend_from_slice(&value.to_ne_bytes());
    F32 f32: |out, value| out.extend_from_slice(&value.to_ne_bytes());
    F64 f64: |out, value| out.extend_from_slice(&value.to_ne_bytes());
    Bool bool: |out, value| out.push(u8::from(value.to_owned()));
    String &str: |out, value| push_string(out, value);
    String String: |out, value| push_string(out, value.as_str());
}

impl From<Value<'_>> for OwnedValue {
    fn from(value: Value<'_>) -> OwnedValue {
        match value {
            Value::U8(value) => value.into(),
            Value::I8(value) => value.into(),
            Value::U16(value) => value.into(),
            Value::I16(value) => value.into(),
            Value::U32(value) => value.into(),
            Value::I32(value) => value.into(),
            Value::F32(value) => value.into(),
            Value::Bool(value) => value.into(),
            Value::String(value) => value.into(),
            Value::Array(value) => value.into(),
            Value::U64(value) => value.into(),
            Value::I64(value) => value.into(),
            Value::F64(value) => value.into(),
        }
    }
}

impl From<Array<'_>> for OwnedValue {
    fn from(array: Array<'_>) -> OwnedValue {
        let mut owned = OwnedValue::array_of(array.element_type(), array.len());
        owned.bytes.extend_from_slice(array.encoded());
        owned
    }
}
