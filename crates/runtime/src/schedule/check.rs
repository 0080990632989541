//! Checks a schedule independently of the code that makes it, as the sessions execute it.
//!
//! The steps are followed in the order in which they are issued. What a split or copy *knows* is everything that is done
//! when it starts: the earlier splits of its lane, what it waits for, and what those knew. Every read must find the
//! bytes of the version that the graph means, on its backend, and know of their write; every write must know of the
//! copies that still read the old bytes, and so must everything that gets the memory of a released tensor.
#![expect(clippy::indexing_slicing, reason = "indices are checked before anything is followed")]

use std::collections::{HashMap, HashSet};

use quadriga_graph::{Graph, NodeId, Op, TensorId, TensorKind};

use super::knowledge::{Knowledge, steps, versions};
use super::order::ScheduleStep;
use super::plan::Plan;
use super::splits::{Copy, Splits};
use crate::ScheduleError;
use crate::memory::MemoryPlan;

impl Plan {
    /// Checks splits, copies, waits and the order of everything that is issued, independently of the code that made the
    /// plan. Plans are checked when they are made in debug builds, and where
    /// [`Scheduler::check_plans`](crate::Scheduler::check_plans) asks for it.
    pub fn check(&self) -> Result<(), ScheduleError> {
        check_schedule(self, self.splits(), self.order(), self.memory())
    }
}

/// [Checks](Plan::check) another schedule for a plan's graph and placements, for tests of the checker itself.
pub fn check_schedule(
    plan: &Plan,
    splits: &Splits,
    order: &[ScheduleStep],
    memory: &MemoryPlan,
) -> Result<(), ScheduleError> {
    let graph = plan.graph();
    let backends = plan.backends().len();
    check_structure(plan, splits)?;
    let mut checker = Checker {
        plan,
        graph,
        splits,
        memory,
        needed: versions(graph),
        step: steps(graph),
        version: vec![0; graph.tensors().len()],
        copy_version: vec![None; splits.copies.len()],
        writers: HashMap::new(),
        copies_of: HashMap::new(),
        leaves: splits.leaves.iter().map(|leaf| (leaf.tensor, leaf.backend)).collect(),
        releases: releases(graph, splits, memory),
        after_split: vec![None; splits.splits.len()],
        after_copy: vec![None; splits.copies.len()],
        prefetched: vec![false; splits.copies.len()],
        lane: vec![Knowledge::new(backends, splits.copies.len()); backends],
        ran: vec![false; graph.nodes().len()],
        last_collective: None,
    };
    for step in order {
        match *step {
            ScheduleStep::Copy(copy) => checker.copy(copy)?,
            ScheduleStep::Prefetch(copy) => checker.prefetch(copy)?,
            ScheduleStep::Split(split) => checker.split(split)?,
        }
    }
    checker.finish()
}

/// Names a step in messages.
fn name(step: ScheduleStep) -> String {
    match step {
        ScheduleStep::Copy(copy) => format!("copy {copy}"),
        ScheduleStep::Prefetch(copy) => format!("the prefetch of copy {copy}"),
        ScheduleStep::Split(split) => format!("split {split}"),
    }
}

/// For each backend the copies of results that live there, with the step from which other tensors may have the memory.
fn releases(graph: &Graph, splits: &Splits, memory: &MemoryPlan) -> Vec<Vec<(u32, usize)>> {
    let mut all = vec![Vec::new(); splits.lanes.len()];
    for (number, copy) in splits.copies.iter().enumerate() {
        let storage = TensorId::from_index(copy.storage);
        // A copy of selected slices reads the indices, too.
        let ids =
            copy.selected_by.map(|selection| (graph[TensorId::from_index(selection.ids)].storage(), copy.to));
        for (storage, backend) in [(storage, copy.from)].into_iter().chain(ids) {
            if matches!(graph[storage].kind(), TensorKind::Computed(_)) {
                let root = memory.sharing.root(storage).unwrap_or(storage);
                if let Some(life) = memory.lifetimes.get(root.index()) {
                    all[backend].push((life.end, number));
                }
            }
        }
    }
    // Nearest release last, where it can be taken off.
    all.iter_mut().for_each(|copies| copies.sort_unstable_by(|a, b| b.cmp(a)));
    all
}

/// Checks everything that does not depend on the order.
fn check_structure(plan: &Plan, splits: &Splits) -> Result<(), ScheduleError> {
    let (graph, backends) = (plan.graph(), plan.backends().len());
    for (number, split) in splits.splits.iter().enumerate() {
        let nodes = splits.nodes_of(number);
        let known = nodes.iter().all(|node| node.index() < graph.nodes().len());
        if split.node_count == 0 || nodes.len() != split.node_count || !known || split.backend >= backends {
            return Err(ScheduleError::SplitNodes { split: number });
        }
        let copies = split.inputs.iter().chain(&split.after_copies);
        if let Some(copy) = copies.into_iter().find(|copy| **copy >= splits.copies.len()) {
            return Err(ScheduleError::UnknownStep { step: format!("copy {copy}") });
        }
        if let Some(before) = split.after_splits.iter().find(|before| **before >= splits.splits.len()) {
            return Err(ScheduleError::UnknownStep { step: format!("split {before}") });
        }
        let side = |node: &NodeId| graph.barriers().partition_point(|barrier| barrier <= node);
        if nodes.first().map(side) != nodes.last().map(side) {
            return Err(ScheduleError::AcrossBarrier { split: number });
        }
    }
    for backend in 0..backends {
        let own = (0..splits.splits.len()).filter(|split| splits.splits[*split].backend == backend);
        let lane = splits.lanes.get(backend).into_iter().flatten().map(|split| *split as usize);
        if !own.eq(lane) {
            return Err(ScheduleError::Lane { backend });
        }
    }
    for (number, copy) in splits.copies.iter().enumerate() {
        check_copy(plan, splits, number, copy)?;
    }
    Ok(())
}

fn check_copy(plan: &Plan, splits: &Splits, number: usize, copy: &Copy) -> Result<(), ScheduleError> {
    let (graph, backends) = (plan.graph(), plan.backends().len());
    if copy.from == copy.to || copy.from >= backends || copy.to >= backends {
        return Err(ScheduleError::CopyTarget { copy: number });
    }
    let storage = TensorId::from_index(copy.storage);
    let ids = copy.selected_by.map(|selection| selection.computed_by);
    let mut waits = copy.source.iter().chain(&copy.after).chain(&ids);
    let unknown = waits.find(|split| **split >= splits.splits.len());
    if let Some(split) = unknown {
        return Err(ScheduleError::UnknownStep { step: format!("split {split}") });
    }
    if let Some(selection) = copy.selected_by {
        let ids = graph.get(TensorId::from_index(selection.ids)).map(|ids| ids.storage());
        if ids.and_then(|ids| plan.placement(ids)) != Some(copy.to) {
            return Err(ScheduleError::SelectionElsewhere { copy: number });
        }
    }
    let tensor = || graph.name(storage);
    let is_leaf =
        || splits.leaves.iter().any(|leaf| leaf.tensor == copy.storage && leaf.backend == copy.from);
    if plan.placement(storage) != Some(copy.from) && !is_leaf() {
        return Err(ScheduleError::CopySource { copy: number, tensor: tensor() });
    }
    let end = copy.offset.checked_add(copy.bytes);
    if end.is_none_or(|end| graph.get(storage).is_none_or(|storage| end > storage.bytes())) {
        return Err(ScheduleError::CopyRange { copy: number, tensor: tensor() });
    }
    Ok(())
}

struct Checker<'a> {
    plan: &'a Plan,
    graph: &'a Graph,
    splits: &'a Splits,
    memory: &'a MemoryPlan,
    needed: Vec<Vec<(TensorId, u32)>>,
    step: Vec<u32>,
    /// For each storage how often it was written on its own backend.
    version: Vec<u32>,
    /// For each copy that was issued the version of its bytes.
    copy_version: Vec<Option<u32>>,
    /// For each storage the splits that wrote it on its own backend, in order.
    writers: HashMap<TensorId, Vec<usize>>,
    /// Leaves, each with a backend that has it.
    leaves: HashSet<(usize, usize)>,
    /// The copies that were issued, by the root of their storage's memory.
    copies_of: HashMap<TensorId, Vec<usize>>,
    /// For each backend the copies out of memory that is still to be released.
    releases: Vec<Vec<(u32, usize)>>,
    /// What is known after a split or copy; `None` before it is issued.
    after_split: Vec<Option<Knowledge>>,
    after_copy: Vec<Option<Knowledge>>,
    /// For each copy whether its prefetch was issued.
    prefetched: Vec<bool>,
    /// What each lane knows.
    lane: Vec<Knowledge>,
    ran: Vec<bool>,
    /// The latest collective in the order of issue, with its split.
    last_collective: Option<(NodeId, usize)>,
}

impl Checker<'_> {
    fn copy(&mut self, number: usize) -> Result<(), ScheduleError> {
        let step = name(ScheduleStep::Copy(number));
        let Some(copy) = self.splits.copies.get(number) else {
            return Err(ScheduleError::UnknownStep { step });
        };
        if self.after_copy[number].is_some() {
            return Err(ScheduleError::IssuedTwice { step });
        }
        let ids = copy.selected_by.map(|selection| selection.computed_by);
        let mut known = self.known_after(&step, copy.source.iter().chain(&copy.after).chain(&ids))?;
        if copy.is_prefetched() && !self.prefetched[number] {
            let before = name(ScheduleStep::Prefetch(number));
            return Err(ScheduleError::IssuedEarly { step, before });
        }
        self.check_target(number, copy, &known)?;
        // The bytes are those that the last known write has left; a write that is not known may come in between.
        let storage = TensorId::from_index(copy.storage);
        let writers = self.writers.get(&storage).map_or(&[][..], Vec::as_slice);
        if let Some(split) = writers.iter().find(|split| !known.has_split(copy.from, **split)) {
            return Err(ScheduleError::SourceNotAwaited { copy: number, split: *split });
        }
        self.copy_version[number] = Some(writers.len() as u32);
        let root = self.root(storage);
        self.copies_of.entry(root).or_default().push(number);
        if let Some(selection) = copy.selected_by {
            let ids = self.graph[TensorId::from_index(selection.ids)].storage();
            let writers = self.writers.get(&ids).map_or(&[][..], Vec::as_slice);
            let unknown = writers.iter().find(|split| !known.has_split(copy.to, **split));
            if writers.is_empty() || unknown.is_some() {
                return Err(ScheduleError::SelectionNotAwaited { copy: number });
            }
            self.copies_of.entry(self.root(ids)).or_default().push(number);
        }
        known.add_copy(number);
        self.after_copy[number] = Some(known);
        Ok(())
    }

    fn prefetch(&mut self, number: usize) -> Result<(), ScheduleError> {
        let step = name(ScheduleStep::Prefetch(number));
        let copy = self.splits.copies.get(number).filter(|copy| copy.is_prefetched());
        let Some(copy) = copy else { return Err(ScheduleError::UnknownStep { step }) };
        if std::mem::replace(&mut self.prefetched[number], true) || self.after_copy[number].is_some() {
            return Err(ScheduleError::IssuedTwice { step });
        }
        let known = self.known_after(&step, copy.after.iter())?;
        self.check_target(number, copy, &known)
    }

    /// What is known after some splits, which must have been issued.
    fn known_after<'s>(
        &self,
        step: &str,
        splits: impl Iterator<Item = &'s usize>,
    ) -> Result<Knowledge, ScheduleError> {
        let mut known = Knowledge::new(self.lane.len(), self.splits.copies.len());
        for before in splits {
            match &self.after_split[*before] {
                Some(after) => known.join(after),
                None => {
                    let before = name(ScheduleStep::Split(*before));
                    return Err(ScheduleError::IssuedEarly { step: step.to_owned(), before });
                }
            }
        }
        Ok(known)
    }

    /// A copy's memory must not be in use any more when the copy starts.
    fn check_target(&self, number: usize, copy: &Copy, known: &Knowledge) -> Result<(), ScheduleError> {
        let extra = self.memory.extras.get(self.plan.space().first_copy + number);
        let start = extra.map_or(0, |extra| extra.lifetime.start);
        let lane = &self.splits.lanes[copy.to];
        let earlier = lane.partition_point(|split| {
            let nodes = self.splits.nodes_of(*split as usize);
            nodes.first().is_some_and(|first| self.step[first.index()] < start)
        });
        match earlier.checked_sub(1).map(|last| lane[last] as usize) {
            Some(split) if !known.has_split(copy.to, split) => {
                Err(ScheduleError::CopyTargetInUse { split, copy: number })
            }
            _ => Ok(()),
        }
    }

    /// The tensor whose memory a storage has: its own, or that of an input it is computed in.
    fn root(&self, storage: TensorId) -> TensorId {
        self.memory.sharing.root(storage).unwrap_or(storage)
    }

    fn split(&mut self, number: usize) -> Result<(), ScheduleError> {
        let step = name(ScheduleStep::Split(number));
        let Some(split) = self.splits.splits.get(number) else {
            return Err(ScheduleError::UnknownStep { step });
        };
        if self.after_split[number].is_some() {
            return Err(ScheduleError::IssuedTwice { step });
        }
        let lane = &self.splits.lanes[split.backend];
        let place = lane.partition_point(|split| (*split as usize) < number);
        let earlier = place.checked_sub(1).map(|before| lane[before] as usize);
        if let Some(before) = earlier.filter(|before| self.after_split[*before].is_none()) {
            return Err(ScheduleError::IssuedEarly { step, before: name(ScheduleStep::Split(before)) });
        }
        let mut known = self.lane[split.backend].clone();
        for copy in split.inputs.iter().chain(&split.after_copies) {
            match &self.after_copy[*copy] {
                Some(after) => known.join(after),
                None => {
                    return Err(ScheduleError::IssuedEarly { step, before: name(ScheduleStep::Copy(*copy)) });
                }
            }
        }
        for before in &split.after_splits {
            match &self.after_split[*before] {
                Some(after) => known.join(after),
                None => {
                    return Err(ScheduleError::IssuedEarly {
                        step,
                        before: name(ScheduleStep::Split(*before)),
                    });
                }
            }
        }
        self.check_barriers(number, &known)?;
        for node in self.splits.nodes_of(number) {
            self.node(*node, number, &known)?;
        }
        known.splits[split.backend] = number + 1;
        self.lane[split.backend] = known.clone();
        self.after_split[number] = Some(known);
        Ok(())
    }

    /// A split must know of every split on the other side of the barrier before it.
    fn check_barriers(&self, number: usize, known: &Knowledge) -> Result<(), ScheduleError> {
        if self.graph.barriers().is_empty() {
            return Ok(());
        }
        let side = |split: usize| self.splits.nodes_of(split).first().map(|node| self.step[node.index()]);
        for (backend, lane) in self.splits.lanes.iter().enumerate() {
            let own = backend == self.splits.splits[number].backend;
            let before = lane.partition_point(|split| side(*split as usize) < side(number));
            let before = before.checked_sub(1).map(|before| lane[before] as usize);
            if let Some(before) = before.filter(|before| !own && !known.has_split(backend, *before)) {
                return Err(ScheduleError::BarrierIgnored { split: number, before });
            }
        }
        Ok(())
    }

    fn node(&mut self, node: NodeId, split: usize, known: &Knowledge) -> Result<(), ScheduleError> {
        let backend = self.splits.splits[split].backend;
        let output = self.graph[node].output();
        let storage = self.graph[output].storage();
        let name = || self.graph.node_name(node);
        let mirrored = self.splits.is_mirrored_write(node, split);
        if !mirrored && self.plan.placement(storage) != Some(backend) {
            return Err(ScheduleError::WrongBackend { node: name(), split });
        }
        if !mirrored && self.ran[node.index()] {
            return Err(ScheduleError::NodeTwice { node: name() });
        }
        for input in self.graph.inputs(node) {
            self.read(node, split, *input, known)?;
        }
        if matches!(self.graph[node].op(), Op::Collective(_)) {
            self.check_collective(node, split, known)?;
        }
        if mirrored {
            let copy = self.copy_for(output, backend).filter(|copy| self.after_copy[*copy].is_some());
            let Some(copy) = copy else { return Err(ScheduleError::NoMirror { node: name(), split }) };
            self.copy_version[copy] = self.copy_version[copy].map(|version| version + 1);
            return Ok(());
        }
        self.check_overwrite(node, storage, split, known)?;
        self.ran[node.index()] = true;
        self.version[storage.index()] += 1;
        self.writers.entry(storage).or_default().push(split);
        Ok(())
    }

    /// Collectives run in the graph's order: each knows that the one before it is done.
    fn check_collective(
        &mut self,
        node: NodeId,
        split: usize,
        known: &Knowledge,
    ) -> Result<(), ScheduleError> {
        let Some((last, before)) = self.last_collective.replace((node, split)) else { return Ok(()) };
        let backend = self.splits.splits[before].backend;
        let same_lane = backend == self.splits.splits[split].backend;
        if last > node || !(same_lane || known.has_split(backend, before)) {
            let (node, last) = (self.graph.node_name(node), self.graph.node_name(last));
            return Err(ScheduleError::CollectiveOrder { node, last });
        }
        Ok(())
    }

    fn copy_for(&self, tensor: TensorId, backend: usize) -> Option<usize> {
        let key = (tensor.index() as u32, backend as u16);
        let copy = self.splits.copy_of.get(&key).map(|copy| *copy as usize);
        copy.filter(|copy| *copy < self.splits.copies.len())
    }

    fn read(
        &self,
        node: NodeId,
        split: usize,
        input: TensorId,
        known: &Knowledge,
    ) -> Result<(), ScheduleError> {
        let backend = self.splits.splits[split].backend;
        let tensor = &self.graph[input];
        let storage = tensor.storage();
        let (name, input_name) = (|| self.graph.node_name(node), || self.graph.name(input));
        let needed = self.needed[node.index()].iter().find(|(used, _)| *used == storage);
        let needed = needed.map_or(0, |(_, version)| *version);
        let here = match self.graph[storage].kind() {
            TensorKind::Weight | TensorKind::Constant | TensorKind::Input => {
                self.leaves.contains(&(storage.index(), backend))
            }
            TensorKind::Computed(_) | TensorKind::State => self.plan.placement(storage) == Some(backend),
        };
        if here {
            let version = self.version[storage.index()];
            return match version.cmp(&needed) {
                std::cmp::Ordering::Equal => Ok(()),
                std::cmp::Ordering::Less => {
                    Err(ScheduleError::NotComputed { node: name(), split, input: input_name() })
                }
                std::cmp::Ordering::Greater => {
                    Err(ScheduleError::Overwritten { node: name(), split, input: input_name() })
                }
            };
        }
        let Some(number) = self.copy_for(input, backend) else {
            return Err(ScheduleError::NotOnBackend { node: name(), split, input: input_name() });
        };
        let copy = &self.splits.copies[number];
        let start = copy.offset;
        let covers = copy.storage == storage.index()
            && start <= tensor.offset()
            && tensor.offset() + tensor.bytes() <= start + copy.bytes;
        if !covers || copy.to != backend {
            return Err(ScheduleError::NotOnBackend { node: name(), split, input: input_name() });
        }
        if !known.has_copy(number) {
            return Err(ScheduleError::CopyNotAwaited { split, copy: number });
        }
        if let Some(selection) = copy.selected_by {
            let inputs = self.graph.inputs(node);
            let reads = *self.graph[node].op() == Op::MulMatId
                && inputs.iter().filter(|other| **other == input).count() == 1
                && inputs.first() == Some(&input)
                && inputs.get(2).is_some_and(|ids| ids.index() == selection.ids);
            if !reads {
                return Err(ScheduleError::OtherSlices { node: name(), split, copy: number });
            }
        }
        if self.copy_version[number] != Some(needed) {
            let input = input_name();
            return Err(ScheduleError::StaleCopy { node: name(), split, copy: number, input });
        }
        Ok(())
    }

    /// A write must know of all copies that read the bytes it replaces: older versions of its storage, tensors whose
    /// memory it is computed in, and released tensors whose memory it may have.
    fn check_overwrite(
        &mut self,
        node: NodeId,
        storage: TensorId,
        split: usize,
        known: &Knowledge,
    ) -> Result<(), ScheduleError> {
        let same = self.copies_of.get(&self.root(storage)).into_iter().flatten();
        if let Some(copy) = same.copied().find(|copy| !known.has_copy(*copy)) {
            return Err(ScheduleError::OverwrittenWhileCopied { split, copy });
        }
        let backend = self.splits.splits[split].backend;
        let step = self.step[node.index()];
        // What a lane knows once, it knows for ever.
        while let Some((_, copy)) = self.releases[backend].pop_if(|(end, _)| *end <= step) {
            if !known.has_copy(copy) {
                return Err(ScheduleError::ReleasedWhileCopied { split, copy });
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<(), ScheduleError> {
        let copies = self.after_copy.iter().position(Option::is_none).map(ScheduleStep::Copy);
        let splits = self.after_split.iter().position(Option::is_none).map(ScheduleStep::Split);
        if let Some(step) = copies.or(splits) {
            return Err(ScheduleError::NeverIssued { step: name(step) });
        }
        let missing = |node: &NodeId| !self.graph[*node].op().is_view() && !self.ran[node.index()];
        match self.graph.node_ids().find(missing) {
            Some(node) => Err(ScheduleError::NeverRuns { node: self.graph.node_name(node) }),
            None => Ok(()),
        }
    }
}
