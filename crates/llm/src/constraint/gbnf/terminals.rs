//! Which expressions of a grammar become terminals of the lexer.
//!
//! The lexer takes the longest text that matches a terminal. That is right where a text that could go on as a longer terminal
//! cannot be followed by the same character in another way: neither by the terminal itself nor by another one that begins
//! alike.

use super::flow::{Classes, Facts, Flow};
use super::nodes::{GbnfGrammar, NodeId};

/// How often terminals are taken apart before all of them are.
const MAX_ROUNDS: usize = 50;

/// Terminals that are compared with each other one by one.
const MAX_COMPARED: usize = 2000;

/// The expressions that are terminals: for each one, whether it is.
pub(super) fn choose(grammar: &GbnfGrammar, flow: &Flow) -> Vec<bool> {
    let count = grammar.nodes.len();
    // Expressions that must be taken apart.
    let mut apart: Vec<bool> = (0..count)
        .map(|id| {
            let facts = flow.of(id);
            facts.irregular || facts.more.meets(facts.follow)
        })
        .collect();
    for _ in 0..MAX_ROUNDS {
        let terminals = reached(grammar, &apart);
        let conflicts = conflicts(flow, &terminals);
        if conflicts.is_empty() {
            let mut chosen = vec![false; count];
            for id in terminals {
                if let Some(slot) = chosen.get_mut(id) {
                    *slot = true;
                }
            }
            return chosen;
        }
        for id in conflicts {
            if let Some(slot) = apart.get_mut(id) {
                *slot = true;
            }
        }
    }
    (0..count).map(|id| grammar.children(id).is_empty() && !flow.of(id).irregular).collect()
}

/// The expressions that are not to be taken apart, on the way down from the start.
fn reached(grammar: &GbnfGrammar, apart: &[bool]) -> Vec<NodeId> {
    let mut seen = vec![false; grammar.nodes.len()];
    let mut terminals = Vec::new();
    let mut left: Vec<NodeId> = grammar.rules.first().copied().into_iter().collect();
    while let Some(id) = left.pop() {
        let Some(seen) = seen.get_mut(id).filter(|seen| !**seen) else { continue };
        *seen = true;
        match apart.get(id) {
            Some(false) => terminals.push(id),
            _ => left.extend(grammar.children(id)),
        }
    }
    terminals
}

/// Terminals that go on where another one that begins alike can end.
fn conflicts(flow: &Flow, terminals: &[NodeId]) -> Vec<NodeId> {
    let all: Vec<(NodeId, Facts)> = terminals.iter().map(|id| (*id, flow.of(*id))).collect();
    if all.len() > MAX_COMPARED {
        let follow = all.iter().fold(Classes::default(), |follow, (_, facts)| follow.union(facts.follow));
        return all.iter().filter(|(_, facts)| facts.inner.meets(follow)).map(|(id, _)| *id).collect();
    }
    let conflict = |(id, facts): &(NodeId, Facts)| {
        let goes_on = |(other, ends): &(NodeId, Facts)| {
            other != id && facts.first.meets(ends.first) && facts.inner.meets(ends.follow)
        };
        facts.inner != Classes::default() && all.iter().any(goes_on)
    };
    all.iter().filter(|one| conflict(one)).map(|(id, _)| *id).collect()
}
