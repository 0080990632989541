//! Blocks behind the layers that predict more than one token at once, as some models are trained with. They are not computed.

use super::Hyperparameters;
use super::keys::Keys;
use crate::Result;

const KEY: &str = "nextn_predict_layers";

impl Hyperparameters {
    /// Takes the blocks that predict further tokens from the layers, in architectures that may have some.
    pub(crate) fn skip_predicting_blocks(&mut self, keys: &Keys<'_>) -> Result<()> {
        let skipped = keys.find_count_or_zero(KEY)?.unwrap_or(0);
        keys.check(KEY, skipped, skipped < self.blocks, "smaller than the number of blocks")?;
        let layers = self.blocks - skipped;
        // A block without the matrix that joins a token with the state before it is a layer of the model.
        for block in layers..self.blocks {
            let name = format!("blk.{block}.nextn.eh_proj.weight");
            if keys.has_tensors() && keys.file().find_tensor(&name).is_none() {
                let wanted =
                    format!("smaller: block {block} lacks {name:?}, and is thus a layer of the model");
                return Err(keys.wrong(KEY, skipped, &wanted));
            }
        }
        self.layers.truncate(layers);
        Ok(())
    }

    /// An error if a file names such blocks whose architecture has none: they would be taken for layers.
    pub(super) fn check_predicting_blocks(&self, keys: &Keys<'_>) -> Result<()> {
        let named = keys.find_count_or_zero(KEY)?.unwrap_or(0);
        let holds = named == self.blocks - self.layers.len();
        let wanted = "absent or 0: models of this architecture have no blocks that predict further tokens";
        keys.check(KEY, named, holds, wanted)
    }
}
