//! A model that several ranks compute together: which part of it this rank has.

mod division;
mod vocabulary;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use quadriga_cluster::{Collectives, Communicator};
use quadriga_gguf::File;
use quadriga_graph::CustomOp;

use self::division::{TensorDivision, layer_ranges};
use self::vocabulary::{local_rows, own_rows};
use crate::hyperparameters::Hyperparameters;
use crate::{Error, Result};

/// How ranks divide a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Parallelism {
    /// Tensor parallel where the model can be divided in that way, otherwise a pipeline.
    #[default]
    Auto,
    /// Every rank has some heads, feed-forward columns and vocabulary rows of each layer.
    Tensor,
    /// Every rank has some of the layers.
    Pipeline,
}

impl FromStr for Parallelism {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Parallelism, String> {
        match text {
            "auto" => Ok(Parallelism::Auto),
            "tensor" => Ok(Parallelism::Tensor),
            "pipeline" => Ok(Parallelism::Pipeline),
            _ => Err("auto, tensor or pipeline is needed".to_owned()),
        }
    }
}

/// The part of a model that this rank computes, and the communicator of all ranks.
pub struct RankShare {
    collectives: Collectives,
    /// The hyperparameters of this rank's part.
    hyper: Hyperparameters,
    part: Part,
    /// Whether an engine has been made: the ranks follow one.
    used: AtomicBool,
}

enum Part {
    Tensor(TensorDivision),
    /// The layers of each rank.
    Pipeline(Vec<Range<usize>>),
}

/// A part of a tensor of the file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Cut {
    /// Of the outermost dimension.
    Rows(Range<usize>),
    /// Of the elements of each row.
    Columns(Range<usize>),
}

/// Tags of messages between ranks of a pipeline.
const ACTIVATIONS: u16 = 1;
const LOGITS: u16 = 2;

impl RankShare {
    /// Divides a model among the ranks of a communicator.
    ///
    /// # Errors
    /// It cannot be divided in that way, with the numbers.
    pub(crate) fn new(
        file: &File,
        hyper: &Hyperparameters,
        communicator: Arc<dyn Communicator>,
        parallelism: Parallelism,
    ) -> Result<RankShare> {
        let (rank, size) = (communicator.rank(), communicator.size());
        let tensor = || TensorDivision::new(file, hyper, rank, size);
        let pipeline = || layer_ranges(file, hyper, size);
        let part = match parallelism {
            Parallelism::Tensor => Part::Tensor(tensor()?),
            Parallelism::Pipeline => Part::Pipeline(pipeline()?),
            Parallelism::Auto => match tensor() {
                Ok(division) => Part::Tensor(division),
                Err(_) => Part::Pipeline(pipeline()?),
            },
        };
        let hyper = match &part {
            Part::Tensor(division) => division.hyperparameters(hyper),
            Part::Pipeline(_) => hyper.clone(),
        };
        let (collectives, used) = (Collectives::new(communicator), AtomicBool::new(false));
        Ok(RankShare { collectives, hyper, part, used })
    }

    /// The communicator of all ranks.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        self.collectives.communicator()
    }

    /// How the model is divided.
    pub fn parallelism(&self) -> Parallelism {
        match self.part {
            Part::Tensor(_) => Parallelism::Tensor,
            Part::Pipeline(_) => Parallelism::Pipeline,
        }
    }

    /// This rank's part in words.
    pub fn describe(&self) -> String {
        match &self.part {
            Part::Tensor(division) => division.describe(),
            Part::Pipeline(_) => {
                let layers = self.layers();
                format!("layers {} to {}", layers.start, layers.end.saturating_sub(1))
            }
        }
    }

    /// The hyperparameters of this rank's part.
    pub(crate) fn hyper(&self) -> &Hyperparameters {
        &self.hyper
    }

    fn rank(&self) -> usize {
        self.communicator().rank()
    }

    /// Whether this rank decides what is computed.
    pub(crate) fn leads(&self) -> bool {
        self.rank() == 0
    }

    /// An error if an engine has been made already.
    pub(crate) fn claim(&self) -> Result<()> {
        match self.used.swap(true, Ordering::Relaxed) {
            false => Ok(()),
            true => {
                Err(Error::Ranks { reason: "ranks follow one engine, and there was one already".to_owned() })
            }
        }
    }

    /// This rank's layers.
    pub(crate) fn layers(&self) -> Range<usize> {
        match &self.part {
            Part::Tensor(_) => 0..self.hyper.layers.len(),
            Part::Pipeline(ranges) => ranges.get(self.rank()).cloned().unwrap_or_default(),
        }
    }

    /// The part of a tensor that this rank has; `None` if it has all of it.
    pub(crate) fn cut(&self, name: &str) -> Option<Cut> {
        match &self.part {
            Part::Tensor(division) => division.cut(name),
            Part::Pipeline(_) => None,
        }
    }

    /// The rows of the embedding and of the output matrix that this rank has.
    pub(crate) fn vocabulary(&self) -> usize {
        match &self.part {
            Part::Tensor(division) => division.vocabulary().len(),
            Part::Pipeline(_) => self.hyper.vocabulary,
        }
    }

    /// The operation after a product with one of the layers' matrices, if ranks have parts of its sum.
    pub(crate) fn after_product(&self, name: &str) -> Option<CustomOp> {
        match self.cut(&format!("{name}.weight")) {
            Some(Cut::Columns(_)) => Some(self.collectives.all_reduce()),
            _ => None,
        }
    }

    /// What embedding needs where ranks have rows of it: the tokens' rows of this rank's part, the rows that are its own, and the sum.
    pub(crate) fn embedding(&self) -> Option<[CustomOp; 3]> {
        let Part::Tensor(division) = &self.part else { return None };
        let rows = division.vocabulary();
        Some([local_rows(rows.clone()), own_rows(rows), self.collectives.all_reduce()])
    }

    /// The operation that makes whole logits of this rank's, where ranks have columns of them.
    pub(crate) fn gather_logits(&self) -> Option<CustomOp> {
        let Part::Tensor(division) = &self.part else { return None };
        Some(self.collectives.all_gather(division.vocabulary_lengths()))
    }

    /// The operation that receives the activations of the previous rank's layers, in a pipeline's later ranks.
    pub(crate) fn receive_activations(&self, tokens: usize) -> Option<CustomOp> {
        let Part::Pipeline(_) = &self.part else { return None };
        let previous = self.rank().checked_sub(1)?;
        Some(self.collectives.receive(previous, ACTIVATIONS, [tokens, self.hyper.width]))
    }

    /// The operation that sends activations to the next rank, in a pipeline's earlier ranks.
    pub(crate) fn send_activations(&self) -> Option<CustomOp> {
        let (Part::Pipeline(ranges), next) = (&self.part, self.rank() + 1) else { return None };
        (next < ranges.len()).then(|| self.collectives.send(next, ACTIVATIONS))
    }

    /// In a pipeline, the operation by which the first rank receives the logits.
    pub(crate) fn receive_logits(&self, rows: usize) -> Option<CustomOp> {
        let Part::Pipeline(ranges) = &self.part else { return None };
        let last = ranges.len().checked_sub(1).filter(|last| self.leads() && *last > 0)?;
        Some(self.collectives.receive(last, LOGITS, [rows, self.hyper.vocabulary]))
    }

    /// In a pipeline, the operation by which the last rank sends the logits to the first.
    pub(crate) fn send_logits(&self) -> Option<CustomOp> {
        let Part::Pipeline(ranges) = &self.part else { return None };
        (self.rank() > 0 && self.rank() + 1 == ranges.len()).then(|| self.collectives.send(0, LOGITS))
    }
}

impl fmt::Debug for RankShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RankShare(rank {} of {}: {})", self.rank(), self.communicator().size(), self.describe())
    }
}
