//! The operators `+ - * /` on values, and on a value and an `f32`.

use std::ops::{Add, Div, Mul, Neg, Sub};

use crate::value::Value;

/// `value ⊕ value`, by the method of the same name.
macro_rules! between_values {
    ($($trait:ident $method:ident,)*) => {$(
        impl<'g> $trait for Value<'g> {
            type Output = Value<'g>;

            #[track_caller]
            fn $method(self, other: Value<'g>) -> Value<'g> {
                Value::$method(self, other)
            }
        }
    )*};
}

between_values! {
    Add add,
    Sub sub,
    Mul mul,
    Div div,
}

/// An operator with an `f32` on one side, as one [`Op::Scale`](crate::Op::Scale).
macro_rules! with_scalars {
    ($($trait:ident $method:ident $left:ty, $right:ty: |$a:ident, $b:ident| $result:expr;)*) => {$(
        impl<'g> $trait<$right> for $left {
            type Output = Value<'g>;

            #[track_caller]
            fn $method(self, other: $right) -> Value<'g> {
                let ($a, $b) = (self, other);
                $result
            }
        }
    )*};
}

with_scalars! {
    Add add Value<'g>, f32: |x, bias| x.scale_bias(1.0, bias);
    Sub sub Value<'g>, f32: |x, bias| x.scale_bias(1.0, -bias);
    Mul mul Value<'g>, f32: |x, factor| x.scale(factor);
    Div div Value<'g>, f32: |x, divisor| x.scale(divisor.recip());
    Add add f32, Value<'g>: |bias, x| x.scale_bias(1.0, bias);
    Sub sub f32, Value<'g>: |bias, x| x.scale_bias(-1.0, bias);
    Mul mul f32, Value<'g>: |factor, x| x.scale(factor);
}

impl<'g> Neg for Value<'g> {
    type Output = Value<'g>;

    #[track_caller]
    fn neg(self) -> Value<'g> {
        Value::neg(self)
    }
}
