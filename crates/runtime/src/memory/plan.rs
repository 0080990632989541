//! The answer: where every tensor goes, how much memory that takes, and who takes it.

use quadriga_graph::{Fingerprint, Graph, TensorId};
use std::fmt;

use super::lifetimes::Lifetime;
use super::packing::Strategy;
use super::request::Extra;
use super::sharing::Sharing;

/// Where a tensor is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Spot {
    /// Nowhere: nobody uses it.
    #[default]
    Unused,
    /// In memory that is not the planner's: weights, constants, state, and what was placed beforehand.
    Placed {
        /// The number of its backend.
        backend: u16,
    },
    /// In a backend's arena.
    Arena {
        /// The number of its backend.
        backend: u16,
        /// The number of the chunk.
        chunk: u32,
        /// Bytes from the start of the chunk to the tensor's first byte.
        offset: u64,
    },
}

/// What a plan takes of one backend.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BackendPlan {
    /// The backend's name.
    pub name: String,
    /// Bytes of each chunk of the arena.
    pub chunks: Vec<u64>,
    /// The most bytes of the arena that are in use in one step, all but the last rounded up to the alignment: no plan
    /// with this sharing can do with less.
    pub lower_bound: u64,
    /// What found the packing.
    pub strategy: Strategy,
    /// Whether no packing is smaller.
    pub proved_optimal: bool,
    /// Bytes of the weights in use, outside the arena.
    pub weights: u64,
    /// Bytes of the constants in use, outside the arena.
    pub constants: u64,
    /// Bytes of the state in use, outside the arena.
    pub state: u64,
    /// Bytes of the inputs in use, all together.
    pub inputs: u64,
    /// Bytes of all storages of results, were each to have its own memory.
    pub results: u64,
    /// Bytes of all extras, were each to have its own memory.
    pub extras: u64,
}

impl BackendPlan {
    /// Bytes of the arena.
    pub fn arena_bytes(&self) -> u64 {
        self.chunks.iter().sum()
    }
}

/// Where every tensor of one graph goes. Made by a [`Planner`](super::Planner); plain data.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct MemoryPlan {
    /// The graph it is for.
    pub graph: Fingerprint,
    /// Who shares a storage.
    pub sharing: Sharing,
    /// For each tensor that is the root of a planned storage, its lifetime; for others it is empty.
    pub lifetimes: Vec<Lifetime>,
    /// For each tensor that is the root of a planned storage, the bytes of the storage; for others 0.
    pub bytes: Vec<u64>,
    /// For each tensor where it is.
    pub spots: Vec<Spot>,
    /// The extras, as they were asked for.
    pub extras: Vec<Extra>,
    /// For each extra where it is.
    pub extra_spots: Vec<Spot>,
    /// For each backend what it must give.
    pub backends: Vec<BackendPlan>,
    /// One past the last step.
    pub horizon: u32,
}

impl MemoryPlan {
    /// Where a tensor is.
    pub fn spot(&self, tensor: TensorId) -> Spot {
        self.spots.get(tensor.index()).copied().unwrap_or_default()
    }

    /// Where an extra is.
    pub fn extra_spot(&self, extra: usize) -> Spot {
        self.extra_spots.get(extra).copied().unwrap_or_default()
    }

    /// Bytes of a backend's arena.
    pub fn arena_bytes(&self, backend: usize) -> u64 {
        self.backends.get(backend).map_or(0, BackendPlan::arena_bytes)
    }

    /// All that has a place in a backend's arena: tensors that are roots, and extras, with lifetime and bytes.
    fn tenants(&self, backend: usize) -> impl Iterator<Item = (Tenant, Lifetime, u64, u64)> + '_ {
        let here = move |spot: &Spot| match spot {
            Spot::Arena { backend: home, offset, .. } if usize::from(*home) == backend => Some(*offset),
            _ => None,
        };
        let tensors = self.spots.iter().zip(&self.lifetimes).zip(&self.bytes).enumerate().filter_map(
            move |(index, ((spot, life), bytes))| {
                let offset = here(spot).filter(|_| !life.is_empty())?;
                Some((Tenant::Tensor(TensorId::from_index(index)), *life, *bytes, offset))
            },
        );
        let extras = self.extra_spots.iter().zip(&self.extras).enumerate().filter_map(
            move |(index, (spot, extra))| {
                let end = extra.lifetime.end.min(self.horizon);
                let life = Lifetime { start: extra.lifetime.start, end };
                Some((Tenant::Extra(index), life, extra.bytes, here(spot)?))
            },
        );
        tensors.chain(extras)
    }

    /// The largest of all that lies in a chunk.
    pub fn largest_in(&self, backend: usize, chunk: usize) -> Option<Tenant> {
        let in_chunk = |tenant: &Tenant| {
            let spot = match tenant {
                Tenant::Tensor(tensor) => self.spot(*tensor),
                Tenant::Extra(extra) => self.extra_spot(*extra),
            };
            matches!(spot, Spot::Arena { chunk: home, .. } if home as usize == chunk)
        };
        let here = self.tenants(backend).filter(|(tenant, ..)| in_chunk(tenant));
        here.max_by_key(|(_, _, bytes, _)| *bytes).map(|(tenant, ..)| tenant)
    }

    /// The first step in which most bytes of a backend's arena are in use.
    pub fn peak_step(&self, backend: usize) -> u32 {
        let mut changes: Vec<(u32, i128)> = Vec::new();
        for (_, life, bytes, _) in self.tenants(backend) {
            changes.extend([(life.start, i128::from(bytes)), (life.end, -i128::from(bytes))]);
        }
        // Of the changes at one step, losses come first.
        changes.sort_unstable();
        let (mut now, mut most, mut at) = (0, 0, 0);
        for (step, change) in changes {
            now += change;
            if now > most {
                (most, at) = (now, step);
            }
        }
        at
    }

    /// What is in use in a step of a backend's arena, largest first.
    pub fn alive_at(&self, backend: usize, step: u32) -> Vec<Alive> {
        let mut alive: Vec<Alive> = self
            .tenants(backend)
            .filter(|(_, life, ..)| life.contains(step))
            .map(|(tenant, lifetime, bytes, offset)| Alive { tenant, lifetime, bytes, offset })
            .collect();
        alive.sort_by_key(|a| (std::cmp::Reverse(a.bytes), a.offset));
        alive
    }

    /// What the plan will take, before anything is allocated.
    pub fn forecast(&self, graph: &Graph) -> Forecast {
        let of = |(index, plan): (usize, &BackendPlan)| {
            let peak_step = self.peak_step(index);
            let alive = self
                .alive_at(index, peak_step)
                .into_iter()
                .map(|alive| match alive.tenant {
                    Tenant::Tensor(tensor) => (graph.name(tensor), alive),
                    Tenant::Extra(extra) => (format!("extra {extra}"), alive),
                })
                .collect();
            BackendForecast { plan: plan.clone(), peak_step, alive }
        };
        Forecast { backends: self.backends.iter().enumerate().map(of).collect() }
    }

    /// Empties the plan and keeps its memory.
    pub(crate) fn clear(&mut self) {
        self.graph = Fingerprint::default();
        self.sharing.roots.clear();
        self.sharing.placed.clear();
        self.lifetimes.clear();
        self.bytes.clear();
        self.spots.clear();
        self.extras.clear();
        self.extra_spots.clear();
        self.backends.iter_mut().for_each(|backend| backend.chunks.clear());
        self.horizon = 0;
    }
}

/// Who has memory in an arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tenant {
    /// The storage of a tensor.
    Tensor(TensorId),
    /// The extra with this number.
    Extra(usize),
}

/// Something that is in use in some step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Alive {
    /// What it is.
    pub tenant: Tenant,
    /// From when to when.
    pub lifetime: Lifetime,
    /// Its bytes.
    pub bytes: u64,
    /// Where in its chunk it starts.
    pub offset: u64,
}

/// What a plan takes of one backend, and when it takes most.
#[derive(Clone, PartialEq, Debug)]
pub struct BackendForecast {
    /// The figures.
    pub plan: BackendPlan,
    /// The first step in which most bytes of the arena are in use.
    pub peak_step: u32,
    /// What is in use then, with names, largest first.
    pub alive: Vec<(String, Alive)>,
}

impl BackendForecast {
    /// Bytes of the arena beyond what is ever in use in one step.
    pub fn waste(&self) -> u64 {
        self.plan.arena_bytes().saturating_sub(self.plan.lower_bound)
    }
}

/// What a plan will take, backend by backend: exactly what is then allocated.
#[derive(Clone, PartialEq, Debug)]
pub struct Forecast {
    /// The backends, by number.
    pub backends: Vec<BackendForecast>,
}

impl fmt::Display for BackendPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} bytes in {} chunk{} ({} at least, {}{})",
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
            if !backend.alive.is_empty() {
                writeln!(
                    f,
                    "  {} bytes wasted; most in use in step {}:",
                    backend.waste(),
                    backend.peak_step
                )?;
            }
            for (name, alive) in &backend.alive {
                writeln!(
                    f,
                    "  {:>12} at {:>12}  {:<12} {name}",
                    alive.bytes,
                    alive.offset,
                    alive.lifetime.to_string()
                )?;
            }
        }
        Ok(())
    }
}
