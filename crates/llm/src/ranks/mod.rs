//! A model that several ranks compute together: which part of it this rank has.

mod cache_parts;
mod commands;
mod comparison;
mod cuts;
mod division;
mod experts;
mod layer_parts;
mod layer_units;
mod link;
mod parallelism;
mod resources;
mod stage_results;
mod stages;
mod step_load;
mod vocabulary;
mod whole_model;

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use quadriga_cluster::{Collectives, Communicator, Operation, Reduction};
use quadriga_graph::{CustomOp, Ranks};
use quadriga_runtime::{DeviceKind, RankGroup, Rates, Scheduler};
use sha2::{Digest, Sha256};

pub(crate) use self::commands::CommandChannel;
pub use self::comparison::within_share;
use self::comparison::{StageWork, TokenWork, regrets};
use self::division::TensorDivision;
use self::experts::local_experts;
pub use self::link::Link;
pub(crate) use self::parallelism::MicroBatches;
pub use self::parallelism::{Grid, Parallelism, RequestLoad};
pub use self::resources::RankResources;
use self::resources::within_memory;
pub(crate) use self::stage_results::StageResult;
pub use self::stages::MOST_HELD;
use self::step_load::{StepLoad, mean_rates, slot_bytes};
use self::vocabulary::{local_rows, own_rows};
use self::whole_model::LayerWeights;
pub(crate) use self::whole_model::WholeModel;
use crate::hyperparameters::Hyperparameters;
use crate::{Error, Result};

/// The part of a model that this rank computes, and the communicators that it needs.
pub struct RankShare {
    /// Of all ranks.
    world: Collectives,
    /// Of the ranks that divide the layers of this rank's stage, where there are several stages of several ranks.
    stage_ranks: Option<Collectives>,
    grid: Grid,
    /// The speeds of all ranks, by which it was divided.
    speeds: Vec<f64>,
    /// The layers of each stage.
    stages: Vec<Range<usize>>,
    /// Whether the output matrix is the embedding.
    is_tied: bool,
    /// What this rank has of each layer, where several divide them.
    division: Option<TensorDivision>,
    /// The hyperparameters of this rank's part.
    hyper: Hyperparameters,
    /// Whether an engine has been made: the ranks follow one.
    used: AtomicBool,
    /// Threads of this process that follow this rank's engine.
    followers: Mutex<Vec<JoinHandle<()>>>,
    /// How many there will be.
    expected_followers: AtomicUsize,
}

/// What a mixture of experts needs where ranks have some of them each.
pub(crate) struct DividedExperts {
    /// This rank's experts.
    pub(crate) count: usize,
    /// Makes numbers among them of experts' numbers.
    pub(crate) local: CustomOp,
    /// The ranks whose results are summed.
    pub(crate) ranks: Ranks,
}

/// A message to or from another rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Message {
    pub(crate) ranks: Ranks,
    /// The rank at the other end.
    pub(crate) peer: usize,
    /// What is sent.
    pub(crate) tag: u16,
}

/// A part of a tensor of the file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Cut {
    /// Of the outermost dimension.
    Rows(Vec<Range<usize>>),
    /// Of the elements of each row.
    Columns(Vec<Range<usize>>),
}

/// The numbers of groups in graphs: all ranks, and those of a stage.
const WORLD: u32 = 0;
const STAGE: u32 = 1;

/// What ranks wait for before the first step.
const LOADING: &str = "loading the weights";

/// The tag of activations on their way from stage to stage; those of results are in [`StageResult`].
const ACTIVATIONS: u16 = 1;
/// The tag of messages that say what the other ranks compute.
const COMMAND: u16 = 7;
/// The tag of parts of the KV cache.
const CACHE: u16 = 8;

impl RankShare {
    /// Divides a model among the ranks of a communicator, in proportion to their speeds as far as each has memory; all of them call
    /// this with the same ones.
    ///
    /// # Errors
    /// It cannot be divided in that way, with the numbers.
    pub(crate) fn new(
        whole: &WholeModel<'_>,
        communicator: Arc<dyn Communicator>,
        parallelism: Parallelism,
        resources: &[RankResources],
    ) -> Result<RankShare> {
        let (rank, size) = (communicator.rank(), communicator.size());
        let speeds: Vec<f64> = resources.iter().map(|rank| rank.speed).collect();
        if speeds.len() != size || !speeds.iter().all(|speed| speed.is_finite() && *speed > 0.0) {
            let reason = format!("{size} ranks need as many positive speeds, not {speeds:?}");
            return Err(Error::Ranks { reason });
        }
        let same = (0..size).all(|other| communicator.host(other) == communicator.host(0));
        let link = parallelism.link.unwrap_or(if same { Link::MEMORY } else { Link::NETWORK });
        let ((grid, stages, division), speeds) = divide(whole, parallelism, (rank, resources), link)?;
        let world = Collectives::new(Arc::clone(&communicator));
        let stage_ranks = match grid.tensor > 1 && grid.pipeline > 1 {
            true => Some(Collectives::new(communicator.split(grid.place(rank).0 as u32)?)),
            false => None,
        };
        let part = |division: &TensorDivision| division.hyperparameters(whole.hyper);
        let hyper = division.as_ref().map_or_else(|| whole.hyper.clone(), part);
        Ok(RankShare {
            world,
            stage_ranks,
            grid,
            speeds,
            stages,
            is_tied: whole.is_tied(),
            division,
            hyper,
            used: AtomicBool::new(false),
            followers: Mutex::default(),
            expected_followers: AtomicUsize::new(0),
        })
    }

    /// The communicator of all ranks.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        self.world.communicator()
    }

    /// How the ranks divide the model.
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// This rank's part in words.
    pub fn describe(&self) -> String {
        let stage = self.layers();
        let layers = format!("layers {} to {}", stage.start, stage.end.saturating_sub(1));
        match &self.division {
            None => layers,
            Some(division) => format!("{layers} with {}", division.describe(&stage)),
        }
    }

    /// Whether several ranks have the same KV heads, because there are fewer than ranks: their KV cache is more than a share each.
    pub fn shares_keys(&self) -> bool {
        self.division.as_ref().is_some_and(TensorDivision::shares_keys)
    }

    /// Why ranks cannot hold equal parts of the weights and the KV cache, as far as the model is the reason.
    pub fn why_uneven(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.grid.pipeline > 1 && self.is_tied {
            reasons.push(
                "the embedding is the output matrix, too: the first and the last stage both have it".into(),
            );
        }
        reasons.extend(self.division.as_ref().and_then(|division| division.why_uneven(&self.layers())));
        reasons
    }

    /// How the first rank tells the others what to compute.
    pub(crate) fn commands(&self) -> CommandChannel {
        CommandChannel::new(Arc::clone(self.communicator()), (self.grid.pipeline > 1).then_some(COMMAND))
    }

    /// How all ranks divide a KV cache, in words; `None` where one has all of it.
    pub(crate) fn layout(&self) -> Option<String> {
        let (Grid { tensor, pipeline }, stages) = (self.grid, &self.stages);
        (self.grid.ranks() > 1).then(|| format!("{tensor} {pipeline} {stages:?} {:?}", self.speeds))
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

    /// The result of a step. Where one rank fails, none can go on: the others wait in the middle of the same step.
    pub(crate) fn together<T>(&self, result: Result<T>) -> Result<T> {
        let Err(error) = &result else { return result };
        let communicator = self.communicator();
        if communicator.failure().is_none() {
            communicator.fail(&error.to_string());
        }
        communicator.failure().map_or(result, |failure| Err(failure.into()))
    }

    /// So many ranks are of this process: without their threads, an engine of this one would wait for them for ever.
    pub(crate) fn expect_followers(&self, count: usize) {
        self.expected_followers.store(count, Ordering::Relaxed);
    }

    /// The threads of this process that follow are waited for when this rank's engine ends: their memory is free then.
    pub(crate) fn add_follower(&self, thread: JoinHandle<()>) {
        self.followers.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
    }

    /// The threads that follow this rank's engine.
    pub(crate) fn take_followers(&self) -> Vec<JoinHandle<()>> {
        std::mem::take(&mut *self.followers.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Before an engine is made, which waits for those of all other ranks.
    ///
    /// # Errors
    /// One has been made already, or a rank of this process does not follow yet: nobody would answer it.
    pub(crate) fn claim(&self) -> Result<()> {
        let there = self.followers.lock().unwrap_or_else(PoisonError::into_inner).len();
        let expected = self.expected_followers.load(Ordering::Relaxed);
        let reason = if self.used.load(Ordering::Relaxed) {
            "ranks follow one engine, and there was one already".to_owned()
        } else if there < expected {
            format!(
                "{there} of {expected} further devices follow the first one: DeviceRank::follow comes before an engine"
            )
        } else if self.used.swap(true, Ordering::Relaxed) {
            "ranks follow one engine, and another one is being made".to_owned()
        } else {
            return Ok(());
        };
        Err(Error::Ranks { reason })
    }

    /// This rank's layers.
    pub(crate) fn layers(&self) -> Range<usize> {
        let (stage, _) = self.grid.place(self.rank());
        self.stages.get(stage).cloned().unwrap_or_default()
    }

    /// The part of a tensor that this rank has; `None` if it has all of it.
    pub(crate) fn cut(&self, name: &str) -> Option<Cut> {
        self.division.as_ref().and_then(|division| division.cut(name))
    }

    /// The rows of the embedding and of the output matrix that this rank has.
    pub(crate) fn vocabulary(&self) -> usize {
        self.division.as_ref().map_or(self.hyper.vocabulary, |division| division.vocabulary().len())
    }

    /// A scheduler that executes the collectives of this rank's graphs; all ranks call this. Where each has a GPU, and NCCL is asked
    /// for, the GPUs exchange data themselves.
    ///
    /// # Errors
    /// The ranks do not reach each other, or not through NCCL.
    pub(crate) fn scheduler(&self, scheduler: &Scheduler) -> Result<Scheduler> {
        let gpu = scheduler.backends().iter().find(|backend| backend.device().kind == DeviceKind::Gpu);
        let wishes = nccl_is_enabled();
        let gpu = gpu.filter(|_| wishes);
        let mut counts = [gpu.is_some(), wishes].map(|counts| if counts { 1.0 } else { 0.0 });
        self.sum_after("opening the devices", &mut counts)?;
        let ([with_gpu, wishing], ranks) = (counts, self.grid.ranks() as f32);
        if wishing > 0.0 && wishing < ranks {
            let reason = format!(
                "QUADRIGA_NCCL is set on {wishing} of {ranks} ranks: set it on all (mpirun of Open MPI: -x QUADRIGA_NCCL), or on none"
            );
            return Err(Error::Ranks { reason });
        }
        let gpu = gpu.filter(|_| with_gpu == ranks);
        let join = |collectives: &Collectives| -> Result<Arc<dyn RankGroup>> {
            let host: Arc<dyn RankGroup> = Arc::new(collectives.clone());
            let joined = gpu.map(|gpu| gpu.join_ranks(&host)).transpose();
            let joined = joined.map_err(|error| Error::Ranks { reason: error.to_string() })?;
            Ok(joined.flatten().unwrap_or(host))
        };
        let world = scheduler.clone().ranks(WORLD, join(&self.world)?);
        Ok(match &self.stage_ranks {
            Some(ranks) => world.ranks(STAGE, join(ranks)?),
            None => world,
        })
    }

    /// Waits until all ranks have loaded their weights.
    pub(crate) fn meet(&self) -> Result<()> {
        self.sum_after(LOADING, &mut [0.0])
    }

    /// Whether all ranks have the same bytes as this one; each learns it.
    pub(crate) fn is_same_on_all(&self, own: &[u8]) -> Result<bool> {
        let mut first: [u8; 32] = Sha256::digest(own).into();
        let hash = first;
        // The sender of a broadcast need not wait for the others: all meet before.
        self.sum_after("planning the model", &mut [0.0])?;
        self.communicator().broadcast(&mut first, 0)?;
        let mut different = [if first == hash { 0.0 } else { 1.0 }];
        self.communicator().all_reduce(&mut different)?;
        Ok(different == [0.0])
    }

    fn sum_after(&self, what: &'static str, values: &mut [f32]) -> Result<()> {
        let sum = Operation::AllReduce { values, reduction: Reduction::Sum };
        Ok(self.communicator().run_loading(sum, what)?)
    }

    /// The ranks that divide the layers of this rank's stage.
    fn stage_ranks(&self) -> Ranks {
        self.stage_ranks.as_ref().map_or_else(|| self.world.ranks(WORLD), |ranks| ranks.ranks(STAGE))
    }

    /// The ranks whose products with one of the layers' matrices are summed, if they have parts of the sum.
    pub(crate) fn after_product(&self, name: &str) -> Option<Ranks> {
        let division = self.division.as_ref()?;
        division.is_summed(name).then(|| self.stage_ranks())
    }

    /// The ranks that have parts of every token's queries and keys, where several do.
    pub(crate) fn divided_heads(&self) -> Option<Ranks> {
        self.division.as_ref().map(|_| self.stage_ranks())
    }

    /// What a layer's mixture of experts needs, if ranks have some of its experts each.
    pub(crate) fn divided_experts(&self, layer: usize) -> Option<DividedExperts> {
        let experts = self.division.as_ref()?.experts(layer)?;
        let (count, local) = (experts.len(), local_experts(experts));
        Some(DividedExperts { count, local, ranks: self.stage_ranks() })
    }

    /// The first of a layer's experts that this rank has.
    pub(crate) fn first_expert(&self, layer: usize) -> usize {
        self.division.as_ref().and_then(|division| division.experts(layer)).map_or(0, |experts| experts.start)
    }

    /// What embedding needs where ranks have rows of it: the tokens' rows of this rank's part, the rows that are its own, and the ranks
    /// to sum over.
    pub(crate) fn embedding(&self) -> Option<(CustomOp, CustomOp, Ranks)> {
        let rows = self.division.as_ref()?.vocabulary();
        Some((local_rows(rows.clone()), own_rows(rows), self.stage_ranks()))
    }

    /// The ranks that have columns of the logits, and how many each has, where they are divided.
    pub(crate) fn gather_logits(&self) -> Option<(Ranks, Vec<usize>)> {
        let division = self.division.as_ref()?;
        Some((self.stage_ranks(), division.vocabulary_lengths()))
    }

    /// The sender of the previous stage's activations.
    pub(crate) fn receive_activations(&self) -> Option<Message> {
        let previous = self.rank().checked_sub(self.grid.tensor)?;
        Some(self.message(previous, ACTIVATIONS))
    }

    /// The receiver of activations in the next stage: each rank sends to the one in its place.
    pub(crate) fn send_activations(&self) -> Option<Message> {
        let next = self.rank() + self.grid.tensor;
        (next < self.grid.ranks()).then(|| self.message(next, ACTIVATIONS))
    }

    fn message(&self, peer: usize, tag: u16) -> Message {
        Message { ranks: self.world.ranks(WORLD), peer, tag }
    }
}

/// Whether GPUs of several ranks exchange data through NCCL.
fn nccl_is_enabled() -> bool {
    #[cfg(feature = "cuda")]
    let enabled = quadriga_cuda::nccl_is_enabled();
    #[cfg(not(feature = "cuda"))]
    let enabled = false;
    enabled
}

/// A grid, the layers of its stages, and what a rank has of them.
type Division = (Grid, Vec<Range<usize>>, Option<TensorDivision>);

/// Of the grids that the parallelism and the model allow, the one that is expected to answer fastest over a link, of those where each
/// rank has KV heads of its own, if there are any; or one that is nearly as fast and in which no rank holds more than its share and
/// 5 %. All ranks choose the same, since they know the same.
fn divide(
    whole: &WholeModel<'_>,
    parallelism: Parallelism,
    (rank, resources): (usize, &[RankResources]),
    link: Link,
) -> Result<(Division, Vec<f64>)> {
    let rates = mean_rates(resources);
    let work = TokenWork::new(whole.file, whole.hyper, link, rates);
    let (mut found, mut refusal) = (Vec::new(), None);
    for grid in parallelism.grids(resources.len()) {
        let of_speeds = |speeds: &[f64]| {
            let planned = division_of(whole, (grid, parallelism.load, rates), (rank, speeds))?;
            let held = planned.held.clone();
            Ok((planned, held))
        };
        match within_memory(resources, of_speeds) {
            Ok((planned, speeds)) => {
                let PlannedDivision { division, stages, most_held, .. } = planned;
                let seconds = work.seconds(grid, &stages, parallelism.load);
                found.push(((division, speeds), seconds, most_held));
            }
            Err(error) => {
                refusal.get_or_insert(error);
            }
        }
    }
    let shares_keys = |((division, _), ..): &((Division, Vec<f64>), [f64; 2], f64)| {
        division.2.as_ref().is_some_and(TensorDivision::shares_keys)
    };
    if !found.iter().all(shares_keys) {
        found.retain(|one| !shares_keys(one));
    }
    let seconds: Vec<[f64; 2]> = found.iter().map(|(_, seconds, _)| *seconds).collect();
    let held = found.iter().map(|(.., held)| *held);
    let choices: Vec<(f64, f64)> = regrets(&seconds).into_iter().zip(held).collect();
    let none = || {
        let reason = format!("{parallelism} is not a division of {} ranks", resources.len());
        refusal.unwrap_or(Error::Ranks { reason })
    };
    let best = within_share(&choices).filter(|best| *best < found.len()).ok_or_else(none)?;
    Ok(found.swap_remove(best).0)
}

/// The grid that ranks with these resources choose for themselves.
pub(crate) fn chosen_grid(
    whole: &WholeModel<'_>,
    parallelism: Parallelism,
    resources: &[RankResources],
    link: Link,
) -> Result<Grid> {
    let ((grid, ..), _) = divide(whole, parallelism, (0, resources), link)?;
    Ok(grid)
}

/// What a rank has in a grid, and what is known of all of them.
struct PlannedDivision {
    division: Division,
    /// What each stage does for a token.
    stages: Vec<StageWork>,
    /// Bytes of weights and KV cache that each rank holds.
    held: Vec<f64>,
    /// The most that a rank holds, as a multiple of its share.
    most_held: f64,
}

/// Divides a model among the ranks of a grid in proportion to these speeds, for a load and the rates of a rank of mean speed.
fn division_of(
    whole: &WholeModel<'_>,
    (grid, load, rates): (Grid, RequestLoad, Rates),
    (rank, speeds): (usize, &[f64]),
) -> Result<PlannedDivision> {
    let mean = speeds.iter().sum::<f64>() / speeds.len().max(1) as f64;
    let ranks: Vec<&[f64]> = speeds.chunks(grid.tensor.max(1)).collect();
    let stage_speeds: Vec<f64> = ranks.iter().map(|ranks| ranks.iter().sum()).collect();
    let stages = whole.layer_ranges(&stage_speeds, &StepLoad::new(load, grid.pipeline, rates))?;
    let (own_stage, place) = grid.place(rank);
    let (mut own, mut all, mut most_held) = (None, Vec::new(), 0.0_f64);
    let mut held_by_ranks = Vec::new();
    for (stage, (range, ranks)) in stages.iter().zip(&ranks).enumerate() {
        let shapes = whole.hyper.layers.get(range.clone()).unwrap_or_default();
        let (bytes, slot, held) = match grid.tensor {
            1 => {
                let weights = whole.weights.get(range.clone()).unwrap_or_default();
                let matrices = whole.held_matrices(stage == 0, stage + 1 == stages.len());
                held_by_ranks.push(whole.held(range) + matrices);
                (
                    weights.iter().map(LayerWeights::read).sum(),
                    shapes.iter().map(slot_bytes).sum(),
                    whole.held(range) + matrices,
                )
            }
            _ => {
                let division = TensorDivision::new(whole, range, place, ranks)?;
                held_by_ranks.extend_from_slice(division.held());
                let heaviest = (division.heaviest(), division.heaviest_slot(range), division.most_held());
                if stage == own_stage {
                    own = Some(division);
                }
                heaviest
            }
        };
        let speed = ranks.iter().sum::<f64>() / ranks.len().max(1) as f64 / mean;
        most_held = most_held.max(held / speed.max(f64::MIN_POSITIVE));
        let tokens = [load.fewest, load.most]
            .map(|requests| MicroBatches::new(requests, grid.pipeline).requests as f64);
        let growth = tokens.map(|tokens| whole.growth(range, tokens));
        let slowness = tokens.map(|tokens| whole.slowness(range, tokens));
        all.push(StageWork { layers: range.len(), bytes, growth, slowness, slot, speed });
    }
    let share = whole.all_held() / speeds.len().max(1) as f64;
    Ok(PlannedDivision {
        division: (grid, stages, own),
        stages: all,
        held: held_by_ranks,
        most_held: most_held / share.max(f64::MIN_POSITIVE),
    })
}

impl fmt::Debug for RankShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RankShare(rank {} of {}: {})", self.rank(), self.communicator().size(), self.describe())
    }
}
