//! Conversion of metadata values to Rust types.

use crate::value::{Array, Value};

/// A type that a metadata value can be converted to, for [`File::get`](crate::File::get) and
/// [`File::find`](crate::File::find).
pub trait FromValue<'a>: Sized {
    /// The value, or `None` if it is of another type or does not fit.
    fn from_value(value: Value<'a>) -> Option<Self>;

    /// The name of the type in error messages.
    fn expected() -> String;
}

macro_rules! integers {
    ($($integer:ident)*) => {$(
        impl FromValue<'_> for $integer {
            fn from_value(value: Value<'_>) -> Option<Self> {
                value.integer()?.try_into().ok()
            }

            fn expected() -> String {
                stringify!($integer).to_owned()
            }
        }
    )*};
}

integers!(u8 i8 u16 i16 u32 i32 u64 i64 usize);

impl FromValue<'_> for f32 {
    fn from_value(value: Value<'_>) -> Option<Self> {
        f64::from_value(value).map(|number| number as f32)
    }

    fn expected() -> String {
        "f32".to_owned()
    }
}

impl FromValue<'_> for f64 {
    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::F32(number) => Some(number.into()),
            Value::F64(number) => Some(number),
            _ => None,
        }
    }

    fn expected() -> String {
        "f64".to_owned()
    }
}

impl FromValue<'_> for bool {
    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::Bool(truth) => Some(truth),
            _ => None,
        }
    }

    fn expected() -> String {
        "bool".to_owned()
    }
}

impl<'a> FromValue<'a> for &'a str {
    fn from_value(value: Value<'a>) -> Option<Self> {
        match value {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    fn expected() -> String {
        "string".to_owned()
    }
}

impl<'a> FromValue<'a> for Array<'a> {
    fn from_value(value: Value<'a>) -> Option<Self> {
        match value {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }

    fn expected() -> String {
        "array".to_owned()
    }
}

impl<'a, T: FromValue<'a>> FromValue<'a> for Vec<T> {
    fn from_value(value: Value<'a>) -> Option<Self> {
        Array::from_value(value)?.iter().map(T::from_value).collect()
    }

    fn expected() -> String {
        format!("array of {}", T::expected())
    }
}
