//! Rectified feed-forward networks, and predictors of their active neurons.

use quadriga_graph::DType;

use super::Hyperparameters;
use super::activation::Activation;
use super::keys::Keys;
use crate::{Error, Result};

/// The key of the score above which a neuron is predicted to be active.
const THRESHOLD: &str = "powerinfer.sparse_threshold";

impl Hyperparameters {
    /// Reads whether the gates of feed-forward networks are rectified, in architectures whose gates usually are not: the file
    /// says so, or is one of PowerInfer's, which have no others.
    pub(crate) fn read_rectified(&mut self, keys: &Keys<'_>, usual: Activation) -> Result<()> {
        let file = keys.file();
        let of_powerinfer = file.is_powerinfer()
            || file.find::<f32>(THRESHOLD)?.is_some()
            || file.find_tensor("blk.0.ffn_down_t.weight").is_some();
        let (relu, usual) = (Activation::Relu.names(), usual.names());
        self.rectified = match keys.find_text("hidden_activation")? {
            Some(name) if relu.contains(&name) => true,
            Some(name) if usual.contains(&name) => false,
            Some(other) => {
                let wanted = format!("{} or {}", relu.join(" or "), usual.join(" or "));
                return Err(keys.wrong("hidden_activation", other, &wanted));
            }
            None => of_powerinfer,
        };
        Ok(())
    }

    /// Reads and checks the layers' predictors, of which there is one in each layer or in none.
    pub(crate) fn read_predictors(&mut self, keys: &Keys<'_>) -> Result<()> {
        let file = keys.file();
        let has =
            |layer: usize, part: &str| file.find_tensor(&format!("blk.{layer}.{part}.weight")).is_some();
        let layers = 0..self.layers.len();
        if !layers.clone().any(|layer| has(layer, "fc1") || has(layer, "fc2")) {
            return Ok(());
        }
        let threshold = file.find::<f32>(THRESHOLD)?.unwrap_or(0.0);
        if !threshold.is_finite() {
            let (key, wanted) = (THRESHOLD.to_owned(), "finite".to_owned());
            return Err(Error::Hyperparameter { key, value: threshold.to_string(), wanted });
        }
        for (layer, shape) in layers.zip(&self.layers) {
            let rank = self.check_matrix(keys, layer, "fc1", [None, Some(self.width)])?;
            self.check_matrix(keys, layer, "fc2", [Some(shape.feed_forward), Some(rank)])?;
        }
        self.predictor_threshold = Some(threshold);
        Ok(())
    }

    /// Checks the extents of a matrix as far as they are given, and returns its rows.
    fn check_matrix(
        &self,
        keys: &Keys<'_>,
        layer: usize,
        part: &str,
        wanted: [Option<usize>; 2],
    ) -> Result<usize> {
        let name = format!("blk.{layer}.{part}.weight");
        let tensor = keys.file().tensor(&name)?;
        let found = tensor.shape().dims().to_vec();
        if !DType::is_computable(tensor.dtype()) {
            return Err(Error::TensorType { name, dtype: tensor.dtype() });
        }
        match (found.as_slice(), wanted) {
            (&[rows, columns], [need_rows, need_columns])
                if rows > 0
                    && need_rows.is_none_or(|need| need == rows)
                    && need_columns.is_none_or(|need| need == columns) =>
            {
                Ok(rows)
            }
            _ => {
                let of_file = found.first().copied().unwrap_or(1).max(1);
                let wanted = wanted.map(|extent| extent.unwrap_or(of_file)).to_vec();
                Err(Error::TensorShape { name, found, wanted })
            }
        }
    }
}
