//! Prints a grammar in Lark: terminals in capitals, rules in small letters. Each expression has a line of its own.

use std::fmt::Write;

use super::characters::CharacterSet;
use super::flow::Flow;
use super::nodes::{GbnfGrammar, Node, NodeId};

/// The grammar in Lark.
pub(super) fn print(grammar: &GbnfGrammar, flow: &Flow, terminals: &[bool]) -> String {
    let mut printer = Printer {
        grammar,
        flow,
        terminals,
        text: String::new(),
        rules: vec![false; grammar.nodes.len()],
        parts: vec![false; grammar.nodes.len()],
        waiting: Vec::new(),
    };
    let root = printer.rule_item(grammar.rules.first().copied().unwrap_or(0));
    let _ = writeln!(printer.text, "start: {root}");
    while let Some(line) = printer.waiting.pop() {
        match line {
            Line::Rule(id) => printer.print_rule(id),
            Line::Terminal(id) => printer.print_terminal(id),
        }
    }
    printer.text
}

/// A line to print.
enum Line {
    Rule(NodeId),
    Terminal(NodeId),
}

struct Printer<'g> {
    grammar: &'g GbnfGrammar,
    flow: &'g Flow,
    terminals: &'g [bool],
    text: String,
    /// Rules and terminals that have a line, or are waiting for it.
    rules: Vec<bool>,
    parts: Vec<bool>,
    waiting: Vec<Line>,
}

impl Printer<'_> {
    /// An expression within a rule.
    fn rule_item(&mut self, id: NodeId) -> String {
        if self.terminals.get(id) == Some(&true) {
            let item = self.terminal_item(id);
            // A terminal is never empty: its expression is optional instead.
            return match self.flow.of(id).nullable {
                true => {
                    let name = format!("FULL{id}");
                    if mark(&mut self.rules, id) {
                        let _ = writeln!(self.text, "{name}: {item} & /(?s:.+)/");
                    }
                    format!("{name}?")
                }
                false => item,
            };
        }
        if let Node::Token { name, negated } = self.grammar.node(id) {
            return match name.strip_prefix('[') {
                Some(number) if *negated => format!("<[^{number}>"),
                _ => format!("<{name}>"),
            };
        }
        if mark(&mut self.rules, id) {
            self.waiting.push(Line::Rule(id));
        }
        format!("rule{id}")
    }

    fn print_rule(&mut self, id: NodeId) {
        let line = match self.grammar.node(id) {
            Node::Repeat { inner, min, max } => {
                format!("{}{}", self.rule_group(*inner), repetitions(*min, *max))
            }
            Node::Choice(options) => self.joined(options, " | ", Self::rule_item),
            _ => self.joined(self.grammar.children(id), " ", Self::rule_item),
        };
        let _ = writeln!(self.text, "rule{id}: {line}");
    }

    /// An expression to repeat: one item.
    fn rule_group(&mut self, id: NodeId) -> String {
        let item = self.rule_item(id);
        if item.ends_with('?') { format!("({item})") } else { item }
    }

    /// An expression within a terminal.
    fn terminal_item(&mut self, id: NodeId) -> String {
        if let Node::Character(set) = self.grammar.node(id) {
            return class(set);
        }
        if mark(&mut self.parts, id) {
            self.waiting.push(Line::Terminal(id));
        }
        format!("TEXT{id}")
    }

    fn print_terminal(&mut self, id: NodeId) {
        let line = match self.grammar.node(id) {
            Node::Repeat { inner, min, max } => {
                format!("{}{}", self.terminal_item(*inner), repetitions(*min, *max))
            }
            Node::Choice(options) => self.joined(options, " | ", Self::terminal_item),
            _ => self.joined(self.grammar.children(id), " ", Self::terminal_item),
        };
        let _ = writeln!(self.text, "TEXT{id}: {line}");
    }

    fn joined(&mut self, ids: &[NodeId], separator: &str, item: fn(&mut Self, NodeId) -> String) -> String {
        if ids.is_empty() {
            return "\"\"".to_owned();
        }
        let items: Vec<String> = ids.iter().map(|id| item(self, *id)).collect();
        items.join(separator)
    }
}

/// Marks an expression; whether it was not before.
fn mark(marks: &mut [bool], id: NodeId) -> bool {
    marks.get_mut(id).is_some_and(|mark| !std::mem::replace(mark, true))
}

fn repetitions(min: u32, max: Option<u32>) -> String {
    match (min, max) {
        (0, None) => "*".to_owned(),
        (1, None) => "+".to_owned(),
        (0, Some(1)) => "?".to_owned(),
        (min, None) => format!("{{{min},}}"),
        (min, Some(max)) => format!("{{{min},{max}}}"),
    }
}

/// One character of a set, as a regular expression.
fn class(set: &CharacterSet) -> String {
    if set.is_empty() {
        return r"/[^\s\S]/".to_owned();
    }
    let mut text = String::from("/[");
    for &(first, last) in set.ranges() {
        let _ = match first == last {
            true => write!(text, r"\u{{{:x}}}", u32::from(first)),
            false => write!(text, r"\u{{{:x}}}-\u{{{:x}}}", u32::from(first), u32::from(last)),
        };
    }
    text + "]/"
}
