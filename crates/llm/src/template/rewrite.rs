//! Rewrites a template so that everything that allocates or compares is metered.
//!
//! The template engine counts instructions, but one instruction can double a string. The parsed template is therefore
//! written out again with filters of [`limits`](super::limits) around each operand: templates can shadow variables and
//! functions, but not filters. String constants can be marked on the way, see [`provenance`](super::provenance).

use std::fmt::Write as _;

use minijinja::machinery::ast::{
    self, BinOpKind, Call, CallArg, CompareOpKind, Expr, Filter, Stmt, UnaryOpKind,
};
use minijinja::machinery::{Span, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// A chain of `+` or `~` is metered after this many operands.
const CHAIN: usize = 16;

/// Filters that neither copy nor walk their input.
const FREE_FILTERS: &[&str] =
    &["length", "count", "first", "default", "d", "bool", "abs", "attr", "round", "safe"];
/// Filters that copy the references to the elements of their input, but not the elements.
const SHALLOW_FILTERS: &[&str] = &[
    "list",
    "select",
    "selectattr",
    "reject",
    "rejectattr",
    "sort",
    "reverse",
    "unique",
    "batch",
    "slice",
    "groupby",
    "dictsort",
    "items",
    "min",
    "max",
    "last",
];
/// Filters and methods whose arguments become part of the result; those of all others are compared with text.
const INSERTING: &[&str] =
    &["default", "d", "join", "format", "indent", "batch", "slice", "append", "get", "sum"];

/// Tokens of one tag. Each can be a level of nesting, which the parser does not limit for operators.
const MAX_TAG: usize = 1500;
/// All `elif` tags, which are levels of nesting, too.
const MAX_ELIF: usize = 500;

/// Marks the control tokens in a string constant.
pub(super) type MarkText<'m> = &'m dyn Fn(&str) -> String;

/// An error if a template has expressions that are too deep for the stack.
pub(super) fn check_nesting(source: &str, syntax: &SyntaxConfig) -> Written {
    let (mut length, mut conditions) = (0, 0);
    for token in tokenize(source, false, syntax.clone()) {
        match token?.0 {
            Token::VariableStart | Token::BlockStart | Token::TemplateData(_) => length = 0,
            Token::Ident("elif") => conditions += 1,
            _ => length += 1,
        }
        if length > MAX_TAG || conditions > MAX_ELIF {
            let reason =
                format!("a tag has more than {MAX_TAG} words, or there are more than {MAX_ELIF} elif tags");
            return Err(Error::new(ErrorKind::SyntaxError, reason));
        }
    }
    Ok(())
}

/// The metered source of a template. Its lines are those of the original.
pub(super) fn rewrite(
    source: &str,
    syntax: SyntaxConfig,
    mark: Option<MarkText<'_>>,
) -> Result<String, Error> {
    let mut rewriter = Rewriter { out: String::with_capacity(source.len() * 2), line: 1, mark };
    match parse(source, "chat", syntax)? {
        Stmt::Template(template) => rewriter.body(&template.children)?,
        other => rewriter.statement(&other)?,
    }
    Ok(rewriter.out)
}

struct Rewriter<'m> {
    out: String,
    /// The line that is written.
    line: u32,
    mark: Option<MarkText<'m>>,
}

type Written = Result<(), Error>;

impl Rewriter<'_> {
    fn text(&mut self, text: &str) {
        self.out.push_str(text);
    }

    /// Begins a tag on the line that it has in the original.
    fn open(&mut self, tag: &str, span: Span) {
        self.text(tag);
        let line = u32::from(span.start_line);
        while self.line < line {
            self.out.push('\n');
            self.line += 1;
        }
    }

    fn body(&mut self, statements: &[Stmt<'_>]) -> Written {
        statements.iter().try_for_each(|statement| self.statement(statement))
    }

    fn statement(&mut self, statement: &Stmt<'_>) -> Written {
        match statement {
            Stmt::Template(template) => self.body(&template.children),
            Stmt::EmitExpr(emit) => {
                self.open("{{ ", emit.span());
                self.operand(&emit.expr, true)?;
                self.text("|text__ }}");
                Ok(())
            }
            Stmt::EmitRaw(emit) => {
                self.open("{{ ", emit.span());
                self.string(emit.raw, true);
                self.text("|text__ }}");
                Ok(())
            }
            Stmt::ForLoop(each) => self.for_loop(each),
            Stmt::IfCond(condition) => {
                self.open("{% if ", condition.span());
                self.condition(condition)?;
                self.text("{% endif %}");
                Ok(())
            }
            Stmt::WithBlock(with) => {
                self.open("{% with ", with.span());
                for (i, (target, value)) in with.assignments.iter().enumerate() {
                    self.text(if i > 0 { ", " } else { "" });
                    if matches!(target, Expr::List(_)) {
                        self.text("(");
                        self.target(target)?;
                        self.text(")");
                    } else {
                        self.target(target)?;
                    }
                    self.text(" = ");
                    self.grouped(value, true)?;
                }
                self.text(" %}");
                self.body(&with.body)?;
                self.text("{% endwith %}");
                Ok(())
            }
            Stmt::Set(set) => {
                self.open("{% set ", set.span());
                self.target(&set.target)?;
                self.text(" = ");
                if matches!(set.target, Expr::GetAttr(_)) {
                    self.operand(&set.expr, true)?;
                    self.text("|nested__ %}");
                } else {
                    self.grouped(&set.expr, true)?;
                    self.text(" %}");
                }
                Ok(())
            }
            Stmt::SetBlock(set) => {
                self.open("{% set ", set.span());
                self.target(&set.target)?;
                if let Some(filter) = &set.filter {
                    self.text(" | ");
                    self.filter_chain(filter)?;
                }
                self.text(" %}");
                self.body(&set.body)?;
                self.text("{% endset %}");
                Ok(())
            }
            Stmt::FilterBlock(block) => {
                self.open("{% filter ", block.span());
                self.filter_chain(&block.filter)?;
                self.text(" %}");
                self.body(&block.body)?;
                self.text("{% endfilter %}");
                Ok(())
            }
            Stmt::Macro(declared) => {
                self.open("{% macro ", declared.span());
                self.text(declared.name);
                self.parameters(declared)?;
                self.text(" %}");
                self.body(&declared.body)?;
                self.text("{% endmacro %}");
                Ok(())
            }
            Stmt::CallBlock(block) => {
                self.open("{% call", block.span());
                self.parameters(&block.macro_decl)?;
                self.text(" ");
                self.call(&block.call)?;
                self.text(" %}");
                self.body(&block.macro_decl.body)?;
                self.text("{% endcall %}");
                Ok(())
            }
            Stmt::Continue(at) => {
                self.open("{% continue %}", at.span());
                Ok(())
            }
            Stmt::Break(at) => {
                self.open("{% break %}", at.span());
                Ok(())
            }
            Stmt::Do(action) => {
                self.open("{% do ", action.span());
                self.call(&action.call)?;
                self.text(" %}");
                Ok(())
            }
            Stmt::AutoEscape(_) => Err(unsupported("autoescape")),
            Stmt::Block(_) => Err(unsupported("block")),
            Stmt::Import(_) | Stmt::FromImport(_) => Err(unsupported("import")),
            Stmt::Extends(_) => Err(unsupported("extends")),
            Stmt::Include(_) => Err(unsupported("include")),
        }
    }

    fn for_loop(&mut self, each: &ast::Spanned<ast::ForLoop<'_>>) -> Written {
        self.open("{% for ", each.span());
        self.target(&each.target)?;
        self.text(" in ");
        self.operand(&each.iter, true)?;
        self.text("|item__");
        if let Some(condition) = &each.filter_expr {
            self.text(" if ");
            self.grouped(condition, true)?;
        }
        self.text(if each.recursive { " recursive %}" } else { " %}" });
        self.body(&each.body)?;
        if !each.else_body.is_empty() {
            self.text("{% else %}");
            self.body(&each.else_body)?;
        }
        self.text("{% endfor %}");
        Ok(())
    }

    /// A condition and its bodies; further conditions as `elif`, which does not nest.
    fn condition(&mut self, condition: &ast::IfCond<'_>) -> Written {
        self.grouped(&condition.expr, true)?;
        self.text(" %}");
        self.body(&condition.true_body)?;
        match condition.false_body.as_slice() {
            [] => Ok(()),
            [Stmt::IfCond(next)] => {
                self.open("{% elif ", next.span());
                self.condition(next)
            }
            other => {
                self.text("{% else %}");
                self.body(other)
            }
        }
    }

    fn parameters(&mut self, declared: &ast::Macro<'_>) -> Written {
        let first_default = declared.args.len().saturating_sub(declared.defaults.len());
        self.text("(");
        for (i, name) in declared.args.iter().enumerate() {
            self.text(if i > 0 { ", " } else { "" });
            self.target(name)?;
            if let Some(default) = i.checked_sub(first_default).and_then(|i| declared.defaults.get(i)) {
                self.text("=");
                self.grouped(default, true)?;
            }
        }
        self.text(")");
        Ok(())
    }

    /// The target of an assignment.
    fn target(&mut self, target: &Expr<'_>) -> Written {
        match target {
            Expr::Var(variable) => self.text(variable.id),
            Expr::GetAttr(attribute) => {
                self.target(&attribute.expr)?;
                self.text(".");
                self.text(attribute.name);
            }
            Expr::List(list) => {
                for item in &list.items {
                    let nested = matches!(item, Expr::List(_));
                    self.text(if nested { "(" } else { "" });
                    self.target(item)?;
                    self.text(if nested { ")," } else { "," });
                }
            }
            other => {
                return Err(Error::new(
                    ErrorKind::SyntaxError,
                    format!("cannot assign to a {}", other.description()),
                ));
            }
        }
        Ok(())
    }

    /// The filters of a block, without its input.
    fn filter_chain(&mut self, filters: &Expr<'_>) -> Written {
        let Expr::Filter(filter) = filters else { return Err(Error::from(ErrorKind::SyntaxError)) };
        match &filter.expr {
            Some(inner) => {
                self.filter_chain(inner)?;
                self.text("|");
            }
            None => self.text("text__|"),
        }
        self.text(filter.name);
        self.arguments(&filter.args, "|weighed__", inserted_by(filter.name))
    }

    /// An expression in parentheses if it needs them.
    fn grouped(&mut self, expr: &Expr<'_>, mark: bool) -> Written {
        match expr {
            Expr::Filter(_) | Expr::Slice(_) => self.expr(expr, mark),
            _ => self.operand(expr, mark),
        }
    }

    /// An expression to which a filter can be appended.
    fn operand(&mut self, expr: &Expr<'_>, mark: bool) -> Written {
        let primary = matches!(
            expr,
            Expr::Var(_)
                | Expr::Const(_)
                | Expr::GetAttr(_)
                | Expr::GetItem(_)
                | Expr::Call(_)
                | Expr::List(_)
                | Expr::Map(_)
                | Expr::Tuple(_)
                | Expr::Filter(_)
                | Expr::Slice(_)
        );
        if primary {
            return self.expr(expr, mark);
        }
        self.text("(");
        self.expr(expr, mark)?;
        self.text(")");
        Ok(())
    }

    /// An expression to which an attribute or a call can be appended.
    fn base(&mut self, expr: &Expr<'_>) -> Written {
        if matches!(expr, Expr::Filter(_) | Expr::Slice(_))
            || matches!(expr, Expr::Const(c) if c.value.kind() != ValueKind::String)
        {
            self.text("(");
            self.expr(expr, true)?;
            self.text(")");
            return Ok(());
        }
        self.operand(expr, true)
    }

    fn expr(&mut self, expr: &Expr<'_>, mark: bool) -> Written {
        match expr {
            Expr::Var(variable) => self.text(variable.id),
            Expr::Const(constant) => self.constant(&constant.value, mark)?,
            Expr::Slice(slice) => {
                self.operand(&slice.expr, mark)?;
                self.text("|slice__(");
                for (i, bound) in [&slice.start, &slice.stop, &slice.step].into_iter().enumerate() {
                    self.text(if i > 0 { ", " } else { "" });
                    match bound {
                        Some(bound) => self.grouped(bound, false)?,
                        None => self.text("none"),
                    }
                }
                self.text(")");
            }
            Expr::UnaryOp(unary) => {
                // A sign is applied before filters.
                self.text(match unary.op {
                    UnaryOpKind::Not => "not (",
                    UnaryOpKind::Neg => "-(",
                });
                self.grouped(&unary.expr, mark)?;
                self.text(")");
            }
            Expr::BinOp(binary) => self.binary(binary, mark)?,
            Expr::Compare(compare) => {
                self.compared(&compare.expr)?;
                for next in &compare.ops {
                    self.text(match next.op {
                        CompareOpKind::Eq => " == ",
                        CompareOpKind::Ne => " != ",
                        CompareOpKind::Lt => " < ",
                        CompareOpKind::Lte => " <= ",
                        CompareOpKind::Gt => " > ",
                        CompareOpKind::Gte => " >= ",
                        CompareOpKind::In => " in ",
                        CompareOpKind::NotIn => " not in ",
                    });
                    self.compared(&next.expr)?;
                }
            }
            Expr::IfExpr(choice) => {
                self.grouped(&choice.true_expr, mark)?;
                self.text(" if ");
                self.grouped(&choice.test_expr, true)?;
                if let Some(other) = &choice.false_expr {
                    self.text(" else ");
                    self.grouped(other, mark)?;
                }
            }
            Expr::Filter(filter) => self.filter(filter, mark)?,
            Expr::Test(test) => {
                self.operand(&test.expr, mark && test.args.is_empty())?;
                if !test.args.is_empty() {
                    self.text("|weighed__");
                }
                self.text(" is ");
                self.text(test.name);
                if !test.args.is_empty() {
                    self.arguments(&test.args, "|weighed__", |_| false)?;
                }
            }
            Expr::GetAttr(attribute) => {
                self.base(&attribute.expr)?;
                self.text(".");
                self.text(attribute.name);
            }
            Expr::GetItem(item) => {
                let key = &item.subscript_expr;
                if matches!(key, Expr::Const(key) if key.value.kind() == ValueKind::String) {
                    self.base(&item.expr)?;
                    self.text("[");
                    self.expr(key, false)?;
                } else {
                    self.text("(");
                    self.operand(&item.expr, true)?;
                    self.text("|item__)[");
                    self.compared(key)?;
                }
                self.text("]");
            }
            Expr::Call(call) => self.call(call)?,
            Expr::List(list) => {
                self.text("[");
                self.items(&list.items, mark)?;
                self.text("]");
            }
            Expr::Tuple(tuple) => {
                self.text("(");
                self.items(&tuple.items, mark)?;
                self.text(if tuple.items.len() == 1 { ",)" } else { ")" });
            }
            Expr::Map(map) => {
                self.text("{");
                for (i, (key, value)) in map.keys.iter().zip(&map.values).enumerate() {
                    self.text(if i > 0 { ", " } else { "" });
                    self.compared(key)?;
                    self.text(": ");
                    self.nested(value, mark)?;
                }
                self.text("}");
            }
        }
        Ok(())
    }

    fn binary(&mut self, binary: &ast::BinOp<'_>, mark: bool) -> Written {
        let operator = match binary.op {
            BinOpKind::Mul => {
                self.operand(&binary.left, mark)?;
                self.text("|multiplied__(");
                self.grouped(&binary.right, mark)?;
                self.text(")");
                return Ok(());
            }
            BinOpKind::Add => " + ",
            BinOpKind::Concat => " ~ ",
            BinOpKind::ScAnd => " and ",
            BinOpKind::ScOr => " or ",
            BinOpKind::Sub => " - ",
            BinOpKind::Div => " / ",
            BinOpKind::FloorDiv => " // ",
            BinOpKind::Rem => " % ",
            BinOpKind::Pow => " ** ",
            BinOpKind::Eq => " == ",
            BinOpKind::Ne => " != ",
            BinOpKind::Lt => " < ",
            BinOpKind::Lte => " <= ",
            BinOpKind::Gt => " > ",
            BinOpKind::Gte => " >= ",
            BinOpKind::In => " in ",
        };
        match binary.op {
            BinOpKind::Add | BinOpKind::Concat | BinOpKind::ScAnd | BinOpKind::ScOr => {
                // Without parentheses for the left side: the parser's nesting is limited.
                let mut chain = vec![&binary.right];
                let mut left = &binary.left;
                while let Expr::BinOp(inner) = left
                    && std::mem::discriminant(&inner.op) == std::mem::discriminant(&binary.op)
                    && (chain.len() < CHAIN || matches!(binary.op, BinOpKind::ScAnd | BinOpKind::ScOr))
                {
                    chain.push(&inner.right);
                    left = &inner.left;
                }
                chain.push(left);
                let meter = match binary.op {
                    BinOpKind::Add => "|added__",
                    BinOpKind::Concat => "|text__",
                    _ => "",
                };
                for (i, part) in chain.into_iter().rev().enumerate() {
                    self.text(if i > 0 { operator } else { "" });
                    self.operand(part, mark)?;
                    self.text(meter);
                }
                Ok(())
            }
            BinOpKind::Sub | BinOpKind::Div | BinOpKind::FloorDiv | BinOpKind::Rem | BinOpKind::Pow => {
                self.operand(&binary.left, mark)?;
                self.text(operator);
                self.operand(&binary.right, mark)
            }
            _ => {
                self.compared(&binary.left)?;
                self.text(operator);
                self.compared(&binary.right)
            }
        }
    }

    /// An operand of a comparison: not marked, because contents are not.
    fn compared(&mut self, expr: &Expr<'_>) -> Written {
        self.operand(expr, false)?;
        if !matches!(expr, Expr::Const(_)) {
            self.text("|weighed__");
        }
        Ok(())
    }

    fn items(&mut self, items: &[Expr<'_>], mark: bool) -> Written {
        for (i, item) in items.iter().enumerate() {
            self.text(if i > 0 { ", " } else { "" });
            self.nested(item, mark)?;
        }
        Ok(())
    }

    /// A value that becomes part of another one.
    fn nested(&mut self, expr: &Expr<'_>, mark: bool) -> Written {
        self.operand(expr, mark)?;
        if !matches!(expr, Expr::Const(_)) {
            self.text("|nested__");
        }
        Ok(())
    }

    fn filter(&mut self, filter: &Filter<'_>, mark: bool) -> Written {
        if let Some(input) = &filter.expr {
            self.operand(input, mark)?;
            if !FREE_FILTERS.contains(&filter.name) {
                self.text(if SHALLOW_FILTERS.contains(&filter.name) { "|added__" } else { "|text__" });
            }
            self.text("|");
        }
        self.text(filter.name);
        self.arguments(&filter.args, "|weighed__", inserted_by(filter.name))
    }

    fn call(&mut self, call: &Call<'_>) -> Written {
        match &call.expr {
            Expr::GetAttr(method) => {
                self.base(&method.expr)?;
                self.text(".");
                self.text(method.name);
                self.arguments(&call.args, "", inserted_by(method.name))?;
            }
            callee => {
                self.base(callee)?;
                self.arguments(&call.args, "", |_| true)?;
            }
        }
        if call.args.is_empty() {
            self.text("()");
        }
        Ok(())
    }

    /// Metered arguments in parentheses; nothing if there are none. `mark` says which become part of the result.
    fn arguments(&mut self, arguments: &[CallArg<'_>], meter: &str, mark: impl Fn(usize) -> bool) -> Written {
        if arguments.is_empty() {
            return Ok(());
        }
        self.text("(");
        for (i, argument) in arguments.iter().enumerate() {
            self.text(if i > 0 { ", " } else { "" });
            let value = match argument {
                CallArg::Pos(value) => value,
                CallArg::Kwarg(name, value) => {
                    self.text(name);
                    self.text("=");
                    value
                }
                CallArg::PosSplat(value) => {
                    self.text("*");
                    value
                }
                CallArg::KwargSplat(value) => {
                    self.text("**");
                    value
                }
            };
            self.operand(value, mark(i))?;
            if !matches!(value, Expr::Const(_)) {
                self.text(meter);
            }
        }
        self.text(")");
        Ok(())
    }

    fn constant(&mut self, value: &Value, mark: bool) -> Written {
        match value.kind() {
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), mark),
            ValueKind::Bool => self.text(if value.is_true() { "true" } else { "false" }),
            ValueKind::None => self.text("none"),
            ValueKind::Number => {
                let digits = value.to_string();
                // Without a point or an exponent, it would be read as an integer.
                let float = !value.is_integer() && !digits.contains(['.', 'e', 'E']);
                self.text(&digits);
                self.text(if float { ".0" } else { "" });
            }
            other => return Err(Error::new(ErrorKind::SyntaxError, format!("a constant of type {other}"))),
        }
        Ok(())
    }

    fn string(&mut self, text: &str, mark: bool) {
        let marked = match self.mark.filter(|_| mark) {
            Some(mark) => mark(text),
            None => text.to_owned(),
        };
        self.out.push('"');
        for letter in marked.chars() {
            match letter {
                '"' => self.text("\\\""),
                '\\' => self.text("\\\\"),
                '\n' => self.text("\\n"),
                '\r' => self.text("\\r"),
                '\t' => self.text("\\t"),
                letter if letter.is_control() => {
                    let _ = write!(self.out, "\\u{:04x}", u32::from(letter));
                }
                letter => self.out.push(letter),
            }
        }
        self.out.push('"');
    }
}

/// Which arguments of a filter or method become part of its result.
fn inserted_by(name: &str) -> impl Fn(usize) -> bool {
    let (all, second) = (INSERTING.contains(&name), name == "replace");
    move |i| all || (second && i == 1)
}

fn unsupported(tag: &str) -> Error {
    Error::new(ErrorKind::SyntaxError, format!("chat templates cannot use the tag \"{tag}\""))
}
