//! Activations of feed-forward networks, by the names that files have for them.

/// The activation of feed-forward networks, of a gate or by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Activation {
    /// The sigmoid linear unit.
    Silu,
    /// GELU by the error function.
    Gelu,
    /// GELU by the hyperbolic tangent.
    GeluTanh,
    /// Rectified.
    Relu,
}

impl Activation {
    /// Its names.
    pub(crate) const fn names(self) -> &'static [&'static str] {
        match self {
            Activation::Silu => &["silu", "swish", "swiglu"],
            Activation::Gelu => &["gelu", "gelu_erf", "gelu_python"],
            Activation::GeluTanh => {
                &["gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast", "gelu_tanh", "geglu"]
            }
            Activation::Relu => &["relu"],
        }
    }
}
