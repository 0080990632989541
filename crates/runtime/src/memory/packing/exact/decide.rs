//! Decisions: trying one possibility after the other, and taking them back.
#![expect(
    clippy::indexing_slicing,
    reason = "frames hold ranges of the stacks in the state, which only grow above them"
)]

use super::Answer;
use super::state::State;
use super::valley::Site;

/// A link in the chain of decisions.
#[derive(Clone, Copy, Debug)]
pub(super) enum Frame {
    /// A list of items that falls into parts, each of which has to be solved.
    Parts { begin: u32, end: u32, parts: u32 },
    /// A component: items that hang together.
    Component(Component),
}

/// A component and how far its possibilities have been tried.
#[derive(Clone, Copy, Debug)]
pub(super) struct Component {
    /// Its items are `lists[begin..end]`.
    begin: u32,
    end: u32,
    fingerprint: u128,
    site: Site,
    /// Where the stacks stood before it.
    saved: u32,
    moves: u32,
    /// Where the stacks stood before the present decision.
    lists: u32,
    parts: u32,
    now: Now,
}

/// The possibility that is being tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Now {
    Nothing,
    Placed(u32),
    Empty,
}

/// What happened to the top of the chain.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// It is new.
    Begin,
    /// The link above it ended.
    Ended(Answer),
}

/// What to do next.
pub(super) enum Action {
    /// Go deeper.
    Push(Frame),
    /// The top of the chain has ended.
    Done(Answer),
}

impl State {
    /// The first frame: all items.
    pub(super) fn whole(&self) -> Frame {
        Frame::Parts { begin: 0, end: self.items.len() as u32, parts: 0 }
    }

    /// Goes on with the top of the chain.
    pub(super) fn decide(&mut self, frame: &mut Frame, event: Event) -> Action {
        match (frame, event) {
            (&mut Frame::Parts { begin, end, parts }, event) => self.decide_parts(begin, end, parts, event),
            (Frame::Component(component), Event::Begin) => match self.open(component) {
                Some(answer) => Action::Done(answer),
                None => self.next(component),
            },
            (Frame::Component(component), Event::Ended(Answer::Impossible)) => {
                self.take_back(component);
                self.next(component)
            }
            (Frame::Component(component), Event::Ended(answer)) => {
                self.take_back(component);
                self.close(component);
                Action::Done(answer)
            }
        }
    }

    /// Solves the parts of a list one after the other, small ones first: they are the soonest to fail.
    fn decide_parts(&mut self, begin: u32, end: u32, parts: u32, event: Event) -> Action {
        match event {
            Event::Begin => {
                let mut at = begin;
                while at < end {
                    let (from, mut right) = (at, u32::MAX);
                    while at < end {
                        let piece = self.items[self.lists[at as usize] as usize];
                        if at > from && piece.left >= right {
                            break;
                        }
                        right = if at > from { right.max(piece.right) } else { piece.right };
                        at += 1;
                    }
                    self.parts.push((from, at));
                }
                self.parts[parts as usize..].sort_unstable_by_key(|(from, to)| (from.abs_diff(*to), *from));
                self.parts[parts as usize..].reverse();
            }
            Event::Ended(Answer::Fits) => {}
            Event::Ended(answer) => {
                self.parts.truncate(parts as usize);
                return Action::Done(answer);
            }
        }
        if self.parts.len() == parts as usize {
            return Action::Done(Answer::Fits);
        }
        let (begin, end) = self.parts.pop().unwrap_or_default();
        Action::Push(Frame::Component(Component {
            begin,
            end,
            fingerprint: 0,
            site: Site::default(),
            saved: self.saved.len() as u32,
            moves: self.moves.len() as u32,
            lists: self.lists.len() as u32,
            parts: self.parts.len() as u32,
            now: Now::Nothing,
        }))
    }

    /// Looks at a component for the first time; an answer when there is nothing to decide.
    fn open(&mut self, component: &mut Component) -> Option<Answer> {
        let (begin, end) = (component.begin as usize, component.end as usize);
        self.spent += (end - begin) as u64;
        if self.spent >= self.limit {
            return Some(Answer::Unknown);
        }
        let list = &self.lists[begin..end];
        let first = self.items[list[0] as usize].left as usize;
        let last = list.iter().map(|&item| self.items[item as usize].right).max().unwrap_or(0) as usize;
        if !self.find_floors(begin, end, first, last) {
            return Some(Answer::Impossible);
        }
        component.fingerprint = self.fingerprint(&self.lists[begin..end]);
        if self.has_failed(component.fingerprint) {
            return Some(Answer::Impossible);
        }
        component.site = self.choose_site(begin, end, first, last);
        self.list_moves(begin, end, component.site);
        self.saved.extend(self.lists[begin..end].iter().map(|&item| self.lowest[item as usize]));
        None
    }

    /// Tries the next possibility.
    fn next(&mut self, component: &mut Component) -> Action {
        let (begin, end) = (component.begin as usize, component.end as usize);
        if component.now != Now::Empty && self.moves.len() > component.moves as usize {
            let item = self.moves.pop().unwrap_or_default();
            self.place(component, item);
            let (from, to) = (component.lists, self.lists.len() as u32);
            return Action::Push(Frame::Parts { begin: from, end: to, parts: component.parts });
        }
        if component.now != Now::Empty && component.site.slack > 0 {
            component.now = Now::Empty;
            if self.leave_empty(begin, end, component.site, component.saved as usize) {
                return Action::Push(Frame::Component(Component {
                    saved: self.saved.len() as u32,
                    moves: self.moves.len() as u32,
                    now: Now::Nothing,
                    ..*component
                }));
            }
            self.take_back(component);
        }
        self.remember_failure(component.fingerprint);
        self.close(component);
        Action::Done(Answer::Impossible)
    }

    /// Puts an item on the floor of the site; the others of the component become a new list.
    fn place(&mut self, component: &mut Component, item: u32) {
        component.now = Now::Placed(item);
        let piece = self.items[item as usize];
        let top = component.site.height + piece.size;
        self.offset[item as usize] = component.site.height;
        for rest in &mut self.rest[piece.sections()] {
            *rest -= piece.size;
        }
        for index in component.begin as usize..component.end as usize {
            let other = self.lists[index];
            if other == item {
                continue;
            }
            self.lists.push(other);
            let beside = self.items[other as usize];
            if beside.meets(&piece) && self.lowest[other as usize] < top {
                self.lowest[other as usize] = self.walls.fit(top, beside.size);
            }
        }
    }

    /// Takes the present decision back.
    fn take_back(&mut self, component: &mut Component) {
        if let Now::Placed(item) = component.now {
            let piece = self.items[item as usize];
            for rest in &mut self.rest[piece.sections()] {
                *rest += piece.size;
            }
            component.now = Now::Nothing;
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
        self.moves.truncate(component.moves as usize);
    }
}
