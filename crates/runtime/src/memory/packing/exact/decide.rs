//! Branching and backtracking.
#![expect(
    clippy::indexing_slicing,
    reason = "frames hold ranges of the stacks in the state, which only grow above them"
)]

use super::Outcome;
use super::branch_point::BranchPoint;
use super::search_state::SearchState;

/// A node of the search tree on the path to the current one.
#[derive(Clone, Copy, Debug)]
pub(super) enum Frame {
    /// A list of items that splits into components, each of which has to be solved.
    Parts { begin: u32, end: u32, parts: u32 },
    /// Items that their lifetimes connect.
    Component(Component),
}

/// A component and its current branch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Component {
    /// Its items are `lists[begin..end]`.
    begin: u32,
    end: u32,
    fingerprint: u128,
    point: BranchPoint,
    /// Lengths of the stacks before it was opened.
    saved: u32,
    candidates: u32,
    /// Lengths of the stacks before the current branch.
    lists: u32,
    parts: u32,
    branch: Branch,
}

/// The branch that is being tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Branch {
    None,
    /// This item is placed at the branch point.
    Placed(u32),
    /// No item is placed at the branch point.
    Empty,
}

/// What happened to the top frame.
#[derive(Clone, Copy, Debug)]
pub(super) enum FrameEvent {
    /// It was pushed.
    Begin,
    /// The frame above it ended.
    Ended(Outcome),
}

/// What to do with the stack of frames.
pub(super) enum FrameAction {
    /// Push a frame.
    Push(Frame),
    /// Pop the top frame, which has ended.
    Done(Outcome),
}

impl SearchState {
    /// The first frame: all items.
    pub(super) fn whole(&self) -> Frame {
        Frame::Parts { begin: 0, end: self.items.len() as u32, parts: 0 }
    }

    /// Continues with the top frame.
    pub(super) fn decide(&mut self, frame: &mut Frame, event: FrameEvent) -> FrameAction {
        match (frame, event) {
            (&mut Frame::Parts { begin, end, parts }, event) => self.decide_parts(begin, end, parts, event),
            (Frame::Component(component), FrameEvent::Begin) => match self.open(component) {
                Some(outcome) => FrameAction::Done(outcome),
                None => self.next(component),
            },
            (Frame::Component(component), FrameEvent::Ended(Outcome::Infeasible)) => {
                self.undo(component);
                self.next(component)
            }
            (Frame::Component(component), FrameEvent::Ended(outcome)) => {
                self.undo(component);
                self.close(component);
                FrameAction::Done(outcome)
            }
        }
    }

    /// Solves the components of a list one after the other, small ones first, as they fail soonest.
    fn decide_parts(&mut self, begin: u32, end: u32, parts: u32, event: FrameEvent) -> FrameAction {
        match event {
            FrameEvent::Begin => {
                let mut at = begin;
                while at < end {
                    let (from, mut right) = (at, u32::MAX);
                    while at < end {
                        let item = self.items[self.lists[at as usize] as usize];
                        if at > from && item.left >= right {
                            break;
                        }
                        right = if at > from { right.max(item.right) } else { item.right };
                        at += 1;
                    }
                    self.parts.push((from, at));
                }
                self.parts[parts as usize..].sort_unstable_by_key(|(from, to)| (from.abs_diff(*to), *from));
                self.parts[parts as usize..].reverse();
            }
            FrameEvent::Ended(Outcome::Feasible) => {}
            FrameEvent::Ended(outcome) => {
                self.parts.truncate(parts as usize);
                return FrameAction::Done(outcome);
            }
        }
        if self.parts.len() == parts as usize {
            return FrameAction::Done(Outcome::Feasible);
        }
        let (begin, end) = self.parts.pop().unwrap_or_default();
        FrameAction::Push(Frame::Component(Component {
            begin,
            end,
            fingerprint: 0,
            point: BranchPoint::default(),
            saved: self.saved.len() as u32,
            candidates: self.candidates.len() as u32,
            lists: self.lists.len() as u32,
            parts: self.parts.len() as u32,
            branch: Branch::None,
        }))
    }

    /// Opens a component; returns its outcome if there is nothing to branch on.
    fn open(&mut self, component: &mut Component) -> Option<Outcome> {
        let (begin, end) = (component.begin as usize, component.end as usize);
        self.spent += (end - begin) as u64;
        if self.spent >= self.limit {
            return Some(Outcome::Unknown);
        }
        let list = &self.lists[begin..end];
        let first = self.items[list[0] as usize].left as usize;
        let last = list.iter().map(|&item| self.items[item as usize].right).max().unwrap_or(0) as usize;
        if !self.find_skyline(begin, end, first, last) {
            return Some(Outcome::Infeasible);
        }
        component.fingerprint = self.fingerprint(&self.lists[begin..end]);
        if self.has_failed(component.fingerprint) {
            return Some(Outcome::Infeasible);
        }
        component.point = self.choose_branch_point(begin, end, first, last);
        self.list_candidates(begin, end, component.point);
        self.saved.extend(self.lists[begin..end].iter().map(|&item| self.lowest[item as usize]));
        None
    }

    /// Tries the next branch.
    fn next(&mut self, component: &mut Component) -> FrameAction {
        let (begin, end) = (component.begin as usize, component.end as usize);
        if component.branch != Branch::Empty && self.candidates.len() > component.candidates as usize {
            let item = self.candidates.pop().unwrap_or_default();
            self.place(component, item);
            let (from, to) = (component.lists, self.lists.len() as u32);
            return FrameAction::Push(Frame::Parts { begin: from, end: to, parts: component.parts });
        }
        if component.branch != Branch::Empty && component.point.slack > 0 {
            component.branch = Branch::Empty;
            if self.leave_empty(begin, end, component.point, component.saved as usize) {
                return FrameAction::Push(Frame::Component(Component {
                    saved: self.saved.len() as u32,
                    candidates: self.candidates.len() as u32,
                    branch: Branch::None,
                    ..*component
                }));
            }
            self.undo(component);
        }
        self.remember_failure(component.fingerprint);
        self.close(component);
        FrameAction::Done(Outcome::Infeasible)
    }

    /// Places an item at the branch point; the others of the component become a new list.
    fn place(&mut self, component: &mut Component, item: u32) {
        component.branch = Branch::Placed(item);
        let placed = self.items[item as usize];
        let top = component.point.height + placed.size;
        self.offset[item as usize] = component.point.height;
        for unplaced in &mut self.unplaced[placed.sections()] {
            *unplaced -= placed.size;
        }
        for index in component.begin as usize..component.end as usize {
            let other = self.lists[index];
            if other == item {
                continue;
            }
            self.lists.push(other);
            let beside = self.items[other as usize];
            if beside.overlaps(&placed) && self.lowest[other as usize] < top {
                self.lowest[other as usize] = self.boundaries.fit(top, beside.size);
            }
        }
    }

    /// Undoes the current branch.
    fn undo(&mut self, component: &mut Component) {
        if let Branch::Placed(item) = component.branch {
            let placed = self.items[item as usize];
            for unplaced in &mut self.unplaced[placed.sections()] {
                *unplaced += placed.size;
            }
            component.branch = Branch::None;
        }
        self.lists.truncate(component.lists as usize);
        self.parts.truncate(component.parts as usize);
        let list = &self.lists[component.begin as usize..component.end as usize];
        for (&item, &lowest) in list.iter().zip(&self.saved[component.saved as usize..]) {
            self.lowest[item as usize] = lowest;
        }
    }

    fn close(&mut self, component: &Component) {
        self.saved.truncate(component.saved as usize);
        self.candidates.truncate(component.candidates as usize);
    }
}
