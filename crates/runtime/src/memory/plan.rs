//! The memory plan: the location of every tensor, and the memory that each backend must allocate.

use quadriga_graph::{Fingerprint, Graph, TensorId};
use std::fmt;

use super::lifetime::Lifetime;
use super::packing::Strategy;
use super::request::Extra;
use super::sharing::Sharing;

/// The location of a tensor or extra.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum TensorLocation {
    /// No memory: nothing uses it.
    #[default]
    Unused,
    /// In memory that the planner does not manage: weights, constants, state, and
    /// [external](super::MemoryRequest::external) tensors.
    External {
        /// The index of its backend.
        backend: u16,
    },
    /// In a backend's arena.
    Arena {
        /// The index of its backend.
        backend: u16,
        /// The index of the chunk.
        chunk: u32,
        /// Bytes from the start of the chunk to the tensor's first byte.
        offset: u64,
    },
}

/// The memory that a plan needs on one backend.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BackendPlan {
    /// The backend's name.
    pub name: String,
    /// Bytes of each chunk of the arena.
    pub chunks: Vec<u64>,
    /// The peak of live bytes over all steps, all storages but the last rounded up to the alignment: no packing with
    /// this sharing needs less.
    pub lower_bound: u64,
    /// The strategy that found the packing.
    pub strategy: Strategy,
    /// Whether the packing is proved optimal.
    pub proved_optimal: bool,
    /// Bytes of the weights that are read, outside the arena.
    pub weights: u64,
    /// Bytes of the constants that are read, outside the arena.
    pub constants: u64,
    /// Bytes of the state that is used, outside the arena.
    pub state: u64,
    /// Sum of the bytes of all inputs that are read.
    pub inputs: u64,
    /// Sum of the bytes of all storages of results, without reuse.
    pub results: u64,
    /// Sum of the bytes of all extras, without reuse.
    pub extras: u64,
}

impl BackendPlan {
    /// Bytes of the arena.
    pub fn arena_bytes(&self) -> u64 {
        self.chunks.iter().sum()
    }
}

/// The memory of one graph, as plain data. Made by a [`Planner`](super::Planner).
#[derive(Clone, PartialEq, Debug, Default)]
pub struct MemoryPlan {
    /// The fingerprint of the graph.
    pub graph: Fingerprint,
    /// Which tensors share a storage.
    pub sharing: Sharing,
    /// For each tensor that is the root of a planned storage, its lifetime; for others it is empty.
    pub lifetimes: Vec<Lifetime>,
    /// For each tensor that is the root of a planned storage, the bytes of the storage; for others 0.
    pub bytes: Vec<u64>,
    /// For each tensor its location.
    pub locations: Vec<TensorLocation>,
    /// The extras of the request.
    pub extras: Vec<Extra>,
    /// For each extra its location.
    pub extra_locations: Vec<TensorLocation>,
    /// For each backend its memory.
    pub backends: Vec<BackendPlan>,
    /// One past the last step.
    pub horizon: u32,
}

impl MemoryPlan {
    /// The location of a tensor.
    pub fn location(&self, tensor: TensorId) -> TensorLocation {
        self.locations.get(tensor.index()).copied().unwrap_or_default()
    }

    /// The location of an extra.
    pub fn extra_location(&self, extra: usize) -> TensorLocation {
        self.extra_locations.get(extra).copied().unwrap_or_default()
    }

    /// Bytes of a backend's arena.
    pub fn arena_bytes(&self, backend: usize) -> u64 {
        self.backends.get(backend).map_or(0, BackendPlan::arena_bytes)
    }

    /// All storages in a backend's arena: owner, lifetime, bytes and offset.
    fn storages(&self, backend: usize) -> impl Iterator<Item = (StorageOwner, Lifetime, u64, u64)> + '_ {
        let here = move |location: &TensorLocation| match location {
            TensorLocation::Arena { backend: on, offset, .. } if usize::from(*on) == backend => Some(*offset),
            _ => None,
        };
        let tensors = self.locations.iter().zip(&self.lifetimes).zip(&self.bytes).enumerate().filter_map(
            move |(index, ((location, life), bytes))| {
                let offset = here(location).filter(|_| !life.is_empty())?;
                Some((StorageOwner::Tensor(TensorId::from_index(index)), *life, *bytes, offset))
            },
        );
        let extras = self.extra_locations.iter().zip(&self.extras).enumerate().filter_map(
            move |(index, (location, extra))| {
                let end = extra.lifetime.end.min(self.horizon);
                let life = Lifetime { start: extra.lifetime.start, end };
                Some((StorageOwner::Extra(index), life, extra.bytes, here(location)?))
            },
        );
        tensors.chain(extras)
    }

    /// The largest storage in a chunk.
    pub fn largest_in(&self, backend: usize, chunk: usize) -> Option<StorageOwner> {
        let in_chunk = |owner: &StorageOwner| {
            let location = match owner {
                StorageOwner::Tensor(tensor) => self.location(*tensor),
                StorageOwner::Extra(extra) => self.extra_location(*extra),
            };
            matches!(location, TensorLocation::Arena { chunk: of, .. } if of as usize == chunk)
        };
        let here = self.storages(backend).filter(|(owner, ..)| in_chunk(owner));
        here.max_by_key(|(_, _, bytes, _)| *bytes).map(|(owner, ..)| owner)
    }

    /// The first step at which the live bytes of a backend's arena reach their peak.
    pub fn peak_step(&self, backend: usize) -> u32 {
        let mut changes: Vec<(u32, i128)> = Vec::new();
        for (_, life, bytes, _) in self.storages(backend) {
            changes.extend([(life.start, i128::from(bytes)), (life.end, -i128::from(bytes))]);
        }
        // Of the changes at one step, frees sort first.
        changes.sort_unstable();
        let (mut now, mut peak, mut at) = (0, 0, 0);
        for (step, change) in changes {
            now += change;
            if now > peak {
                (peak, at) = (now, step);
            }
        }
        at
    }

    /// The live storages of a backend's arena at a step, largest first.
    pub fn live_at(&self, backend: usize, step: u32) -> Vec<LiveStorage> {
        let mut live: Vec<LiveStorage> = self
            .storages(backend)
            .filter(|(_, life, ..)| life.contains(step))
            .map(|(owner, lifetime, bytes, offset)| LiveStorage { owner, lifetime, bytes, offset })
            .collect();
        live.sort_by_key(|storage| (std::cmp::Reverse(storage.bytes), storage.offset));
        live
    }

    /// The memory that the plan needs, with the storages that are live at the peak.
    pub fn forecast(&self, graph: &Graph) -> Forecast {
        let of = |(index, plan): (usize, &BackendPlan)| {
            let peak_step = self.peak_step(index);
            let live = self
                .live_at(index, peak_step)
                .into_iter()
                .map(|storage| match storage.owner {
                    StorageOwner::Tensor(tensor) => (graph.name(tensor), storage),
                    StorageOwner::Extra(extra) => (format!("extra {extra}"), storage),
                })
                .collect();
            BackendForecast { plan: plan.clone(), peak_step, live }
        };
        Forecast { backends: self.backends.iter().enumerate().map(of).collect() }
    }

    /// Empties the plan but keeps its capacity.
    pub(crate) fn clear(&mut self) {
        self.graph = Fingerprint::default();
        self.sharing.roots.clear();
        self.sharing.external.clear();
        self.lifetimes.clear();
        self.bytes.clear();
        self.locations.clear();
        self.extras.clear();
        self.extra_locations.clear();
        self.backends.iter_mut().for_each(|backend| backend.chunks.clear());
        self.horizon = 0;
    }
}

/// The owner of a storage in an arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StorageOwner {
    /// A tensor: the root of the storage.
    Tensor(TensorId),
    /// The extra with this index.
    Extra(usize),
}

/// A storage that is live at some step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LiveStorage {
    /// Its owner.
    pub owner: StorageOwner,
    /// Its lifetime.
    pub lifetime: Lifetime,
    /// Its bytes.
    pub bytes: u64,
    /// Bytes from the start of its chunk.
    pub offset: u64,
}

/// The memory that a plan needs on one backend, and its peak.
#[derive(Clone, PartialEq, Debug)]
pub struct BackendForecast {
    /// Its memory.
    pub plan: BackendPlan,
    /// The first step at which the live bytes reach their peak.
    pub peak_step: u32,
    /// The storages that are live at that step, with names, largest first.
    pub live: Vec<(String, LiveStorage)>,
}

impl BackendForecast {
    /// Bytes of the arena beyond the peak of live bytes.
    pub fn waste(&self) -> u64 {
        self.plan.arena_bytes().saturating_sub(self.plan.lower_bound)
    }
}

/// The memory that a plan needs on each backend: exactly what a session then allocates.
#[derive(Clone, PartialEq, Debug)]
pub struct Forecast {
    /// The backends, by index.
    pub backends: Vec<BackendForecast>,
}

impl fmt::Display for BackendPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} bytes in {} chunk{} (lower bound {}, {}{})",
            self.name,
            self.arena_bytes(),
            self.chunks.len(),
            if self.chunks.len() == 1 { "" } else { "s" },
            self.lower_bound,
            self.strategy,
            if self.proved_optimal { ", optimal" } else { "" },
        )?;
        let outside = [("weights", self.weights), ("constants", self.constants), ("state", self.state)];
        let inside = [("inputs", self.inputs), ("results", self.results), ("extras", self.extras)];
        for (what, bytes) in inside.into_iter().chain(outside).filter(|(_, bytes)| *bytes > 0) {
            write!(f, "; {what} {bytes}")?;
        }
        Ok(())
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, {} steps", self.sharing, self.horizon)?;
        self.backends.iter().try_for_each(|backend| writeln!(f, "{backend}"))
    }
}

impl fmt::Display for Forecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for backend in &self.backends {
            writeln!(f, "{}", backend.plan)?;
            if !backend.live.is_empty() {
                writeln!(
                    f,
                    "  {} bytes wasted; live at the peak in step {}:",
                    backend.waste(),
                    backend.peak_step
                )?;
            }
            for (name, storage) in &backend.live {
                writeln!(
                    f,
                    "  {:>12} at {:>12}  {:<12} {name}",
                    storage.bytes,
                    storage.offset,
                    storage.lifetime.to_string()
                )?;
            }
        }
        Ok(())
    }
}
