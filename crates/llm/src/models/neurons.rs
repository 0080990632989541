//! How feed-forward networks with few active neurons are computed.

use std::str::FromStr;

use crate::Error;

/// Which rows of a feed-forward network are read, in models whose neurons are often inactive.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum NeuronMode {
    /// With gates that are rectified, all gates are computed, and after them only the rows of neurons that are active. The
    /// results are those of [`NeuronMode::Dense`], apart from rounding.
    #[default]
    Exact,
    /// Only the rows of neurons that the file's predictors expect to be active. Those that they miss are lost.
    Predicted,
    /// All rows.
    Dense,
}

impl FromStr for NeuronMode {
    type Err = Error;

    /// Reads `exact`, `predicted` or `dense`.
    fn from_str(text: &str) -> Result<NeuronMode, Error> {
        match text {
            "exact" => Ok(NeuronMode::Exact),
            "predicted" => Ok(NeuronMode::Predicted),
            "dense" => Ok(NeuronMode::Dense),
            _ => Err(Error::Option {
                name: "the neurons that are computed",
                value: text.to_owned(),
                wanted: "exact, predicted or dense",
            }),
        }
    }
}

/// How the neurons of feed-forward networks are computed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Neurons {
    /// Which rows are read.
    pub mode: NeuronMode,
    /// The bits of the least magnitude of an activated gate that counts, as f32; see [`Neurons::cut`].
    pub threshold: u32,
    /// Rows of neurons on devices, in all layers together: a neuron in a slot is computed there, while the host computes the
    /// others. They are spread evenly. With 0, neurons are computed where their tensors are.
    pub slots: usize,
    /// Whether the activations are outputs, so that active neurons can be counted.
    pub observe: bool,
}

impl Neurons {
    /// All rows.
    pub const DENSE: Neurons = Neurons { mode: NeuronMode::Dense, threshold: 0, slots: 0, observe: false };

    /// The same, with gates of smaller magnitude than `threshold` taken for 0: also models whose gates are never quite 0
    /// then skip rows, and compute something else.
    #[must_use]
    pub fn cut(self, threshold: f32) -> Neurons {
        Neurons { threshold: threshold.max(0.0).to_bits(), ..self }
    }

    /// The least magnitude of an activated gate that counts; 0 if all do.
    pub fn gate_threshold(&self) -> f32 {
        f32::from_bits(self.threshold)
    }
}
