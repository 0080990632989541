//! How many ranks divide each layer, and how many divide the layers.

use std::fmt;
use std::str::FromStr;

use super::Link;
use crate::hyperparameters::CacheRows;

/// How ranks divide a model. What is `None` is chosen: the ranks are the product of both.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Parallelism {
    /// The ranks that divide every layer: heads, feed-forward columns, experts and vocabulary rows.
    pub tensor: Option<usize>,
    /// The stages that have layers of their own.
    pub pipeline: Option<usize>,
    /// The requests by which divisions are compared.
    pub load: RequestLoad,
    /// The link by which divisions are compared; `None` for memory where all ranks are on one machine, else an ordinary network.
    pub link: Option<Link>,
    /// The KV cache and states that ranks hold beside their weights; `None` for those of one sequence with the default context. All
    /// ranks give the same.
    pub cache: Option<CacheRows>,
}

/// How many requests are answered at once. The stages of a pipeline compute different ones, and take turns for a single one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestLoad {
    /// In quiet times.
    pub fewest: usize,
    /// At most.
    pub most: usize,
}

impl RequestLoad {
    /// One request.
    pub const ONE: RequestLoad = RequestLoad { fewest: 1, most: 1 };

    /// Always so many requests.
    pub fn constant(requests: usize) -> RequestLoad {
        RequestLoad { fewest: requests, most: requests }
    }

    /// From one request up to so many.
    pub fn up_to(requests: usize) -> RequestLoad {
        RequestLoad { fewest: 1, most: requests }
    }
}

impl Default for RequestLoad {
    fn default() -> RequestLoad {
        RequestLoad::ONE
    }
}

/// A round of micro-batches through the stages of a pipeline, in which each of some requests gets a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MicroBatches {
    /// The stages that compute at once, at most: as many as there are micro-batches.
    pub(crate) count: usize,
    /// Requests of the largest.
    pub(crate) requests: usize,
}

impl MicroBatches {
    pub(crate) fn new(requests: usize, stages: usize) -> MicroBatches {
        let count = requests.clamp(1, stages.max(1));
        MicroBatches { count, requests: requests.max(1).div_ceil(count) }
    }

    /// Seconds of a round, of those that stages take for a micro-batch: each stage computes all of them, and each of them passes all stages.
    pub(crate) fn seconds(self, stages: impl Iterator<Item = f64> + Clone) -> f64 {
        let slowest = stages.clone().fold(0.0, f64::max);
        (self.count as f64 * slowest).max(stages.sum())
    }
}

impl Parallelism {
    /// What is expected to be fastest, of what the model allows.
    pub const AUTO: Parallelism =
        Parallelism { tensor: None, pipeline: None, load: RequestLoad::ONE, link: None, cache: None };
    /// Every rank has a part of each layer.
    pub const TENSOR: Parallelism = Parallelism { pipeline: Some(1), ..Parallelism::AUTO };
    /// Every rank has layers of its own.
    pub const PIPELINE: Parallelism = Parallelism { tensor: Some(1), ..Parallelism::AUTO };

    /// The grids of so many ranks that this allows, the widest first.
    pub fn grids(self, ranks: usize) -> Vec<Grid> {
        let grid = |tensor: usize| Grid { tensor, pipeline: ranks / tensor };
        let allowed = |grid: &Grid| {
            self.tensor.is_none_or(|tensor| tensor == grid.tensor)
                && self.pipeline.is_none_or(|pipeline| pipeline == grid.pipeline)
        };
        (1..=ranks).rev().filter(|tensor| ranks.is_multiple_of(*tensor)).map(grid).filter(allowed).collect()
    }
}

impl FromStr for Parallelism {
    type Err = String;

    /// `auto`, `tensor`, `pipeline`, or numbers of either or both: `tensor=2,pipeline=4`.
    fn from_str(text: &str) -> Result<Parallelism, String> {
        match text {
            "auto" => return Ok(Parallelism::AUTO),
            "tensor" => return Ok(Parallelism::TENSOR),
            "pipeline" => return Ok(Parallelism::PIPELINE),
            _ => {}
        }
        let mut found = Parallelism::AUTO;
        for part in text.split(',') {
            let (kind, count) = part.split_once('=').unwrap_or((part, ""));
            let count = count.parse::<usize>().ok().filter(|count| *count > 0);
            let place = match kind {
                "tensor" => &mut found.tensor,
                "pipeline" => &mut found.pipeline,
                _ => &mut None,
            };
            if count.is_none() || place.is_some() || !["tensor", "pipeline"].contains(&kind) {
                return Err("auto, tensor, pipeline or tensor=N,pipeline=M is needed".to_owned());
            }
            *place = count;
        }
        Ok(found)
    }
}

impl fmt::Display for Parallelism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.tensor, self.pipeline) {
            (None, None) => f.write_str("auto"),
            (Some(tensor), None) => write!(f, "tensor={tensor}"),
            (None, Some(pipeline)) => write!(f, "pipeline={pipeline}"),
            (Some(tensor), Some(pipeline)) => Grid { tensor, pipeline }.fmt(f),
        }
    }
}

/// Ranks as stages of equally many: neighbours divide the layers of a stage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// The ranks of a stage.
    pub tensor: usize,
    /// The stages.
    pub pipeline: usize,
}

impl Grid {
    /// All ranks.
    pub fn ranks(self) -> usize {
        self.tensor * self.pipeline
    }

    /// The stage of a rank, and its place there.
    pub fn place(self, rank: usize) -> (usize, usize) {
        (rank / self.tensor.max(1), rank % self.tensor.max(1))
    }
}

impl fmt::Display for Grid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor={},pipeline={}", self.tensor, self.pipeline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_name_what_is_fixed() {
        for (text, tensor, pipeline) in [
            ("auto", None, None),
            ("tensor", None, Some(1)),
            ("pipeline", Some(1), None),
            ("tensor=4", Some(4), None),
            ("pipeline=2,tensor=8", Some(8), Some(2)),
        ] {
            assert_eq!(text.parse(), Ok(Parallelism { tensor, pipeline, ..Parallelism::AUTO }), "{text}");
        }
        for text in
            ["", "tensors", "tensor=0", "tensor=2,tensor=2", "tensor=2,", "pipeline=-1", "tensor=2,expert=2"]
        {
            assert!(text.parse::<Parallelism>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_round_is_bound_by_the_slowest_stage_or_by_the_way_of_one_micro_batch() {
        let of = |requests, stages| MicroBatches::new(requests, stages);
        assert_eq!(of(1, 4), MicroBatches { count: 1, requests: 1 });
        assert_eq!(of(9, 4), MicroBatches { count: 4, requests: 3 });
        assert_eq!(of(0, 0), MicroBatches { count: 1, requests: 1 });
        let seconds = [1.0, 3.0, 2.0];
        assert_eq!(of(1, 3).seconds(seconds.into_iter()), 6.0, "stages take turns");
        assert_eq!(of(3, 3).seconds(seconds.into_iter()), 9.0, "others wait for the second stage");
        assert_eq!(of(2, 3).seconds(seconds.into_iter()), 6.0);
    }

    #[test]
    fn grids_have_as_many_ranks_as_there_are() {
        let grids = |parallelism: Parallelism, ranks| -> Vec<String> {
            parallelism.grids(ranks).iter().map(ToString::to_string).collect()
        };
        assert_eq!(
            grids(Parallelism::AUTO, 4),
            ["tensor=4,pipeline=1", "tensor=2,pipeline=2", "tensor=1,pipeline=4"]
        );
        assert_eq!(grids(Parallelism::TENSOR, 6), ["tensor=6,pipeline=1"]);
        assert_eq!(grids("tensor=3".parse().unwrap(), 6), ["tensor=3,pipeline=2"]);
        assert!(grids("tensor=4".parse().unwrap(), 6).is_empty());
        assert_eq!(Grid { tensor: 2, pipeline: 3 }.place(5), (2, 1));
    }
}
