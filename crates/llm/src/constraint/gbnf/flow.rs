//! Which characters can begin, continue and follow each expression of a grammar.
//!
//! Characters are put into at most 256 classes. Where a grammar tells more apart, some share a class, and the sets here are
//! larger than they must be: fewer expressions become terminals then, but none wrongly.

use super::characters::{CharacterSet, next};
use super::nodes::{GbnfGrammar, Node, NodeId};

/// A set of character classes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Classes([u64; 4]);

impl Classes {
    fn insert(&mut self, class: usize) {
        if let Some(word) = self.0.get_mut(class / 64 % 4) {
            *word |= 1 << (class % 64);
        }
    }

    pub(super) fn union(self, other: Classes) -> Classes {
        let mut all = self;
        all.0.iter_mut().zip(other.0).for_each(|(word, other)| *word |= other);
        all
    }

    fn common(self, other: Classes) -> Classes {
        let mut common = self;
        common.0.iter_mut().zip(other.0).for_each(|(word, other)| *word &= other);
        common
    }

    pub(super) fn meets(self, other: Classes) -> bool {
        self.common(other) != Classes::default()
    }
}

/// What is known of an expression.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// Whether it can be empty.
    pub(super) nullable: bool,
    /// Characters that it can begin with.
    pub(super) first: Classes,
    /// Characters that it can have after its first.
    pub(super) inner: Classes,
    /// Characters with which a whole text of it can go on to be a longer one.
    pub(super) more: Classes,
    /// Characters that can come after it in the grammar.
    pub(super) follow: Classes,
    /// Whether it can reach itself, or has a token in it.
    pub(super) irregular: bool,
}

/// The facts of all expressions.
pub(super) struct Flow {
    facts: Vec<Facts>,
}

impl Flow {
    pub(super) fn new(grammar: &GbnfGrammar) -> Flow {
        let classes = CharacterClasses::new(grammar);
        let sets: Vec<Classes> = grammar
            .nodes
            .iter()
            .map(|node| match node {
                Node::Character(set) => classes.of(set),
                _ => Classes::default(),
            })
            .collect();
        let mut flow = Flow { facts: vec![Facts::default(); grammar.nodes.len()] };
        flow.mark_irregular(grammar);
        until_stable(grammar, |id| {
            let own = sets.get(id).copied().unwrap_or_default();
            let now = flow.facts_of(grammar, id, own);
            flow.facts.get_mut(id).is_some_and(|facts| std::mem::replace(facts, now) != now)
        });
        flow.add_follow(grammar);
        flow
    }

    /// The facts of an expression.
    pub(super) fn of(&self, id: NodeId) -> Facts {
        self.facts.get(id).copied().unwrap_or_default()
    }

    /// An expression's facts, from those of its parts.
    fn facts_of(&self, grammar: &GbnfGrammar, id: NodeId, own: Classes) -> Facts {
        let before = self.of(id);
        let (nullable, first, inner, more) = match grammar.node(id) {
            Node::Character(_) => (false, own, Classes::default(), Classes::default()),
            // A token begins no text.
            Node::Token { .. } => (false, Classes::default(), Classes::default(), Classes::default()),
            Node::Rule(_) => {
                let body = grammar.children(id).first().map_or(Facts::default(), |body| self.of(*body));
                (body.nullable, body.first, body.inner, body.more)
            }
            Node::Sequence(parts) => self.of_sequence(parts),
            Node::Choice(options) => self.of_choice(options),
            Node::Repeat { inner, min, max } => {
                let part = self.of(*inner);
                let again = max.is_none_or(|max| max > 1);
                let inner = if again { part.inner.union(part.first) } else { part.inner };
                let is_ambiguous = again && part.more.meets(part.first);
                let more = match () {
                    () if is_ambiguous => inner,
                    () if *max == Some(*min) => part.more,
                    () => part.more.union(part.first),
                };
                (part.nullable || *min == 0, part.first, inner, more)
            }
        };
        // Once more facts of its parts are known, there are never fewer of it.
        Facts {
            nullable: before.nullable || nullable,
            first: before.first.union(first),
            inner: before.inner.union(inner),
            more: before.more.union(more),
            ..before
        }
    }

    fn of_sequence(&self, parts: &[NodeId]) -> (bool, Classes, Classes, Classes) {
        let (mut nullable, mut first, mut inner, mut more) =
            (true, Classes::default(), Classes::default(), Classes::default());
        let mut is_ambiguous = false;
        for (at, part) in parts.iter().map(|part| self.of(*part)).enumerate() {
            is_ambiguous |= more.meets(part.first);
            if nullable {
                first = first.union(part.first);
            }
            inner = inner.union(part.inner);
            if at > 0 {
                inner = inner.union(part.first);
            }
            more = match part.nullable {
                true => more.union(part.first).union(part.more),
                false => part.more,
            };
            nullable &= part.nullable;
        }
        (nullable, first, inner, if is_ambiguous { inner } else { more })
    }

    fn of_choice(&self, options: &[NodeId]) -> (bool, Classes, Classes, Classes) {
        let (mut nullable, mut first, mut inner, mut more, mut shared) =
            (false, Classes::default(), Classes::default(), Classes::default(), Classes::default());
        let facts = || options.iter().map(|option| self.of(*option));
        for option in facts() {
            shared = shared.union(first.common(option.first));
            nullable |= option.nullable;
            first = first.union(option.first);
            inner = inner.union(option.inner);
            more = more.union(option.more);
        }
        // A text of one option can be the beginning of a text of another one.
        for option in facts().filter(|option| option.first.meets(shared)) {
            more = more.union(option.inner);
        }
        (nullable, first, inner, if nullable { more.union(first) } else { more })
    }

    /// Passes on what can follow, from expressions to their parts.
    fn add_follow(&mut self, grammar: &GbnfGrammar) {
        let mut changed: Vec<NodeId> = (0..grammar.nodes.len()).collect();
        while let Some(id) = changed.pop() {
            let mut follow = self.of(id).follow;
            match grammar.node(id) {
                Node::Sequence(parts) => {
                    for part in parts.iter().rev() {
                        self.follow_with(*part, follow, &mut changed);
                        let facts = self.of(*part);
                        follow = if facts.nullable { follow.union(facts.first) } else { facts.first };
                    }
                }
                Node::Repeat { inner, max, .. } => {
                    if max.is_none_or(|max| max > 1) {
                        follow = follow.union(self.of(*inner).first);
                    }
                    self.follow_with(*inner, follow, &mut changed);
                }
                Node::Choice(_) | Node::Rule(_) => {
                    for part in grammar.children(id) {
                        self.follow_with(*part, follow, &mut changed);
                    }
                }
                Node::Character(_) | Node::Token { .. } => {}
            }
        }
    }

    fn follow_with(&mut self, id: NodeId, follow: Classes, changed: &mut Vec<NodeId>) {
        if let Some(facts) = self.facts.get_mut(id) {
            let all = facts.follow.union(follow);
            if all != facts.follow {
                facts.follow = all;
                changed.push(id);
            }
        }
    }

    /// Marks the expressions that contain a token, or a rule that is part of itself. The others are regular.
    fn mark_irregular(&mut self, grammar: &GbnfGrammar) {
        // Expressions all of whose parts are regular are so; those in a circle never become it.
        let mut missing: Vec<usize> = (0..grammar.nodes.len()).map(|id| grammar.children(id).len()).collect();
        let mut users: Vec<Vec<NodeId>> = vec![Vec::new(); grammar.nodes.len()];
        for id in 0..grammar.nodes.len() {
            for part in grammar.children(id) {
                if let Some(users) = users.get_mut(*part) {
                    users.push(id);
                }
            }
        }
        self.facts.iter_mut().for_each(|facts| facts.irregular = true);
        let is_token = |id: &NodeId| matches!(grammar.node(*id), Node::Token { .. });
        let mut ready: Vec<NodeId> =
            (0..grammar.nodes.len()).filter(|id| missing.get(*id) == Some(&0) && !is_token(id)).collect();
        while let Some(id) = ready.pop() {
            if let Some(facts) = self.facts.get_mut(id) {
                facts.irregular = false;
            }
            for user in users.get(id).into_iter().flatten() {
                if let Some(missing) = missing.get_mut(*user) {
                    *missing = missing.saturating_sub(1);
                    if *missing == 0 {
                        ready.push(*user);
                    }
                }
            }
        }
    }
}

/// Calls a function for all expressions, and again for those with a part for which it returned true.
pub(super) fn until_stable(grammar: &GbnfGrammar, mut changes: impl FnMut(NodeId) -> bool) {
    let count = grammar.nodes.len();
    let mut users: Vec<Vec<NodeId>> = vec![Vec::new(); count];
    for id in 0..count {
        for part in grammar.children(id) {
            if let Some(users) = users.get_mut(*part) {
                users.push(id);
            }
        }
    }
    let mut waiting = vec![true; count];
    // Parts are parsed before the expressions that they are part of.
    let mut queue: std::collections::VecDeque<NodeId> = (0..count).collect();
    while let Some(id) = queue.pop_front() {
        if let Some(waiting) = waiting.get_mut(id) {
            *waiting = false;
        }
        if changes(id) {
            for user in users.get(id).into_iter().flatten() {
                if let Some(waiting) = waiting.get_mut(*user).filter(|waiting| !**waiting) {
                    *waiting = true;
                    queue.push_back(*user);
                }
            }
        }
    }
}

/// The classes of characters that no set of the grammar tells apart.
struct CharacterClasses {
    /// The first character of each class.
    starts: Vec<char>,
}

impl CharacterClasses {
    fn new(grammar: &GbnfGrammar) -> CharacterClasses {
        let mut starts = vec!['\0'];
        for node in &grammar.nodes {
            if let Node::Character(set) = node {
                for &(first, last) in set.ranges() {
                    starts.push(first);
                    starts.extend(next(last));
                }
            }
        }
        starts.sort_unstable();
        starts.dedup();
        CharacterClasses { starts }
    }

    fn of(&self, set: &CharacterSet) -> Classes {
        let mut classes = Classes::default();
        for &(first, last) in set.ranges() {
            let from = self.starts.partition_point(|start| *start < first);
            let to = self.starts.partition_point(|start| *start <= last);
            (from..to).take(256).for_each(|class| classes.insert(class % 256));
        }
        classes
    }
}
