//! A parsed grammar: rules whose expressions are nodes in one list.

use super::characters::CharacterSet;

/// The number of a node.
pub(super) type NodeId = usize;

/// An expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Node {
    /// One character of a set.
    Character(CharacterSet),
    /// A token, or any token but this: its number or name in Lark.
    Token { name: String, negated: bool },
    /// A rule, by number.
    Rule(usize),
    /// One after another.
    Sequence(Vec<NodeId>),
    /// One of several.
    Choice(Vec<NodeId>),
    /// An expression so many times.
    Repeat { inner: NodeId, min: u32, max: Option<u32> },
}

/// A grammar whose rules are all defined. Rule 0 is the start.
#[derive(Clone, Debug, Default)]
pub(super) struct GbnfGrammar {
    pub(super) nodes: Vec<Node>,
    /// The expression of each rule.
    pub(super) rules: Vec<NodeId>,
}

impl GbnfGrammar {
    /// The node; of a number that is none, an empty sequence.
    pub(super) fn node(&self, id: NodeId) -> &Node {
        const EMPTY: &Node = &Node::Sequence(Vec::new());
        self.nodes.get(id).unwrap_or(EMPTY)
    }

    /// The nodes that an expression is made of; of a rule, its expression.
    pub(super) fn children(&self, id: NodeId) -> &[NodeId] {
        match self.node(id) {
            Node::Character(_) | Node::Token { .. } => &[],
            Node::Rule(rule) => self.rules.get(*rule).map_or(&[], std::slice::from_ref),
            Node::Sequence(parts) | Node::Choice(parts) => parts,
            Node::Repeat { inner, .. } => std::slice::from_ref(inner),
        }
    }
}
