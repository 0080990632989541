//! The parser of GBNF.

use std::collections::HashMap;

use super::GbnfError;
use super::characters::CharacterSet;
use super::nodes::{GbnfGrammar, Node, NodeId};

/// Groups within groups.
const MAX_DEPTH: usize = 100;
/// Expressions of a grammar.
const MAX_NODES: usize = 100_000;
/// The largest number of repetitions.
const MAX_REPETITIONS: u32 = 10_000;

/// Parses a grammar and checks that all rules are defined and that the start rule can be completed.
pub(super) fn parse(source: &str, token: &dyn Fn(&str) -> Option<u32>) -> Result<GbnfGrammar, GbnfError> {
    let mut parser = Parser {
        source,
        token,
        at: 0,
        nodes: Vec::new(),
        names: HashMap::from([("root", (0, 0))]),
        bodies: vec![None],
        depth: 0,
    };
    parser.space(true);
    while !parser.rest().is_empty() {
        parser.rule()?;
        parser.space(true);
    }
    parser.finish()
}

struct Parser<'s> {
    source: &'s str,
    /// The number of a token by its text.
    token: &'s dyn Fn(&str) -> Option<u32>,
    at: usize,
    nodes: Vec<Node>,
    /// The rules by name, with the place where each was first named.
    names: HashMap<&'s str, (usize, usize)>,
    /// The expressions of the rules, where they are defined.
    bodies: Vec<Option<NodeId>>,
    depth: usize,
}

impl<'s> Parser<'s> {
    fn rest(&self) -> &'s str {
        self.source.get(self.at..).unwrap_or_default()
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn take(&mut self) -> Option<char> {
        let letter = self.peek()?;
        self.at += letter.len_utf8();
        Some(letter)
    }

    fn eat(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        self.at += if found { text.len() } else { 0 };
        found
    }

    fn error<T>(&self, reason: impl Into<String>) -> Result<T, GbnfError> {
        self.error_at(self.at, reason)
    }

    fn error_at<T>(&self, at: usize, reason: impl Into<String>) -> Result<T, GbnfError> {
        let before = self.source.get(..at).unwrap_or_default();
        let line_start = before.rfind('\n').map_or(0, |end| end + 1);
        let column = before.get(line_start..).unwrap_or_default().chars().count() + 1;
        let line = before.matches('\n').count() + 1;
        Err(GbnfError { line, column, reason: reason.into() })
    }

    fn add(&mut self, node: Node) -> Result<NodeId, GbnfError> {
        if self.nodes.len() >= MAX_NODES {
            return self.error(format!("the grammar has more than {MAX_NODES} expressions"));
        }
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    /// Skips white space and comments; line ends only with `lines`.
    fn space(&mut self, lines: bool) {
        loop {
            match self.peek() {
                Some(' ' | '\t') => self.at += 1,
                Some('\r' | '\n') if lines => self.at += 1,
                Some('#') => self.at += self.rest().find(['\r', '\n']).unwrap_or(self.rest().len()),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Option<&'s str> {
        let is_name = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_');
        let rest = self.rest();
        let end = rest.find(|letter| !is_name(letter)).unwrap_or(rest.len());
        let name = rest.get(..end).filter(|name| !name.is_empty())?;
        self.at += end;
        Some(name)
    }

    /// The number of the rule of a name, which begins at a place.
    fn rule_number(&mut self, name: &'s str, at: usize) -> usize {
        let number = self.bodies.len();
        let (rule, _) = *self.names.entry(name).or_insert((number, at));
        if rule == number {
            self.bodies.push(None);
        }
        rule
    }

    fn rule(&mut self) -> Result<(), GbnfError> {
        let at = self.at;
        let Some(name) = self.name() else {
            return self.error("the name of a rule is missing");
        };
        let rule = self.rule_number(name, at);
        self.space(false);
        if !self.eat("::=") {
            return self.error(format!("::= is missing after {name}"));
        }
        self.space(true);
        let body = self.choice(false)?;
        // A rule that is defined again replaces the one before, as in llama.cpp.
        if let Some(slot) = self.bodies.get_mut(rule) {
            *slot = Some(body);
        }
        match self.peek() {
            None | Some('\r' | '\n') => Ok(()),
            Some(letter) => self.error(format!("{letter:?} is not expected here")),
        }
    }

    /// Alternatives, up to the end of the rule or of a group.
    fn choice(&mut self, nested: bool) -> Result<NodeId, GbnfError> {
        let mut options = vec![self.sequence(nested)?];
        while self.eat("|") {
            self.space(true);
            options.push(self.sequence(nested)?);
        }
        match options.as_slice() {
            [only] => Ok(*only),
            _ => self.add(Node::Choice(options)),
        }
    }

    fn sequence(&mut self, nested: bool) -> Result<NodeId, GbnfError> {
        let mut parts = Vec::new();
        while let Some(part) = self.item()? {
            self.space(nested);
            let mut part = part;
            while let Some((min, max)) = self.repetitions()? {
                part = self.add(Node::Repeat { inner: part, min, max })?;
                self.space(nested);
            }
            parts.push(part);
        }
        match parts.as_slice() {
            [only] => Ok(*only),
            _ => self.add(Node::Sequence(parts)),
        }
    }

    /// An expression without what says how often; `None` at the end of a sequence.
    fn item(&mut self) -> Result<Option<NodeId>, GbnfError> {
        let at = self.at;
        let node = match self.peek() {
            Some('"') => return self.literal().map(Some),
            Some('[') => Node::Character(self.class()?),
            Some('.') => {
                self.at += 1;
                Node::Character(CharacterSet::any())
            }
            Some('(') => return self.group().map(Some),
            Some('<' | '!') => self.token()?,
            _ => match self.name() {
                Some(name) => Node::Rule(self.rule_number(name, at)),
                None => return Ok(None),
            },
        };
        self.add(node).map(Some)
    }

    fn literal(&mut self) -> Result<NodeId, GbnfError> {
        let start = self.at;
        self.at += 1;
        let mut letters = Vec::new();
        while !self.eat("\"") {
            if matches!(self.peek(), None | Some('\n')) {
                return self.error_at(start, "the text has no closing quote");
            }
            let letter = self.letter()?;
            letters.push(self.add(Node::Character(CharacterSet::new(vec![(letter, letter)])))?);
        }
        match letters.as_slice() {
            [only] => Ok(*only),
            _ => self.add(Node::Sequence(letters)),
        }
    }

    fn class(&mut self) -> Result<CharacterSet, GbnfError> {
        self.at += 1;
        let negated = self.eat("^");
        let mut ranges = Vec::new();
        while !self.eat("]") {
            let first = self.class_letter()?;
            let is_range = self.peek() == Some('-') && !self.rest().starts_with("-]");
            let mut last = first;
            if is_range {
                self.at += 1;
                let at = self.at;
                last = self.class_letter()?;
                if last < first {
                    return self.error_at(at, format!("the range ends before it begins, at {first:?}"));
                }
            }
            ranges.push((first, last));
        }
        let set = CharacterSet::new(ranges);
        Ok(if negated { set.complement() } else { set })
    }

    fn class_letter(&mut self) -> Result<char, GbnfError> {
        match self.peek() {
            None | Some('\n') => self.error("the character class has no closing ]"),
            Some(_) => self.letter(),
        }
    }

    /// A character of a text or a class, which may be escaped.
    fn letter(&mut self) -> Result<char, GbnfError> {
        let at = self.at;
        let digits = match self.take() {
            Some('\\') => match self.take() {
                Some('x') => 2,
                Some('u') => 4,
                Some('U') => 8,
                Some('n') => return Ok('\n'),
                Some('r') => return Ok('\r'),
                Some('t') => return Ok('\t'),
                Some(letter @ ('\\' | '"' | '[' | ']')) => return Ok(letter),
                Some(letter) => return self.error_at(at, format!("there is no escape \\{letter}")),
                None => return self.error_at(at, "the escape is incomplete"),
            },
            Some(letter) => return Ok(letter),
            None => return self.error_at(at, "a character is missing"),
        };
        let number =
            self.rest().get(..digits).filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let Some(number) = number else {
            return self.error_at(at, format!("the escape needs {digits} hexadecimal digits"));
        };
        self.at += digits;
        let letter = u32::from_str_radix(number, 16).ok().and_then(char::from_u32);
        letter.map_or_else(|| self.error_at(at, format!("there is no character {number}")), Ok)
    }

    fn group(&mut self) -> Result<NodeId, GbnfError> {
        let start = self.at;
        self.at += 1;
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return self.error_at(start, format!("more than {MAX_DEPTH} groups are within each other"));
        }
        self.space(true);
        let group = self.choice(true)?;
        self.depth -= 1;
        match self.peek() {
            Some(')') => self.at += 1,
            None => return self.error_at(start, "the group has no closing )"),
            Some(letter) => return self.error(format!("{letter:?} is not expected here")),
        }
        Ok(group)
    }

    /// A token by its text or number: `<think>`, `<[1000]>`, and with `!` any other token.
    fn token(&mut self) -> Result<Node, GbnfError> {
        let start = self.at;
        let negated = self.eat("!");
        if !self.eat("<") {
            return self.error("a token in <> is missing after !");
        }
        let rest = self.rest();
        let end = rest.find('>').filter(|end| {
            rest.get(..*end).is_some_and(|name| {
                !name.is_empty() && !name.contains(|c: char| c == '<' || c.is_whitespace())
            })
        });
        let Some(name) = end.and_then(|end| rest.get(..end)) else {
            return self.error_at(start, "the token has no closing >");
        };
        let end = self.at + name.len() + 1;
        let number = match name.strip_prefix('[') {
            Some(number) => match number.strip_suffix(']').and_then(|number| number.parse().ok()) {
                Some(number) => Some(number),
                None => return self.error_at(start, "a token in <[]> is a number"),
            },
            None => (self.token)(&format!("<{name}>")),
        };
        let name = match number {
            Some(number) => format!("[{number}]"),
            None if negated => return self.error_at(start, format!("there is no token <{name}>")),
            None => name.to_owned(),
        };
        self.at = end;
        Ok(Node::Token { name, negated })
    }

    fn repetitions(&mut self) -> Result<Option<(u32, Option<u32>)>, GbnfError> {
        let start = self.at;
        let repetitions = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => {
                self.at += 1;
                self.space(false);
                let min = self.number()?;
                self.space(false);
                let mut max = Some(min);
                if self.eat(",") {
                    self.space(false);
                    max = if self.peek() == Some('}') { None } else { Some(self.number()?) };
                    self.space(false);
                }
                if self.peek() != Some('}') {
                    return self.error("the number of repetitions has no closing }");
                }
                if max.is_some_and(|max| max < min) {
                    return self.error_at(start, "the largest number of repetitions is below the smallest");
                }
                (min, max)
            }
            _ => return Ok(None),
        };
        self.at += 1;
        Ok(Some(repetitions))
    }

    fn number(&mut self) -> Result<u32, GbnfError> {
        let rest = self.rest();
        let end = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
        let digits = rest.get(..end).unwrap_or_default();
        if digits.is_empty() {
            return self.error("a number of repetitions is missing");
        }
        match digits.parse::<u32>().ok().filter(|number| *number <= MAX_REPETITIONS) {
            Some(number) => {
                self.at += end;
                Ok(number)
            }
            None => self.error(format!("there are more than {MAX_REPETITIONS} repetitions")),
        }
    }

    fn finish(self) -> Result<GbnfGrammar, GbnfError> {
        if self.bodies.first().is_none_or(Option::is_none) {
            return self.error("the rule root is missing");
        }
        let undefined =
            self.names.iter().filter(|(_, (rule, _))| !self.bodies.get(*rule).is_some_and(Option::is_some));
        if let Some((name, (_, at))) = undefined.min_by_key(|(_, (_, at))| *at) {
            return self.error_at(*at, format!("the rule {name} is not defined"));
        }
        let grammar =
            GbnfGrammar { rules: self.bodies.iter().flatten().copied().collect(), nodes: self.nodes };
        if !can_end(&grammar) {
            let end = GbnfError {
                line: 1,
                column: 1,
                reason: "no text is complete under the rule root".to_owned(),
            };
            return Err(end);
        }
        Ok(grammar)
    }
}

/// Whether some text is complete under the start rule.
fn can_end(grammar: &GbnfGrammar) -> bool {
    let ends = |ends: &[bool], id: NodeId| {
        let of = |id: &NodeId| ends.get(*id).copied().unwrap_or(false);
        match grammar.node(id) {
            Node::Character(set) => !set.is_empty(),
            Node::Token { .. } => true,
            Node::Rule(_) | Node::Sequence(_) => grammar.children(id).iter().all(of),
            Node::Choice(options) => options.iter().any(of),
            Node::Repeat { inner, min, .. } => *min == 0 || of(inner),
        }
    };
    let mut known = vec![false; grammar.nodes.len()];
    super::flow::until_stable(grammar, |id| {
        let now = ends(&known, id);
        known.get_mut(id).is_some_and(|slot| !std::mem::replace(slot, now) && now)
    });
    grammar.rules.first().and_then(|root| known.get(*root)).copied().unwrap_or(false)
}
