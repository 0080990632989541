//! Writes out the expressions of a template, with their operands metered.

use std::fmt::Write as _;

use minijinja::machinery::ast::{self, BinOpKind, Call, CallArg, CompareOpKind, Expr, Filter, UnaryOpKind};
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::{Rewriter, Written};

/// A chain of `+` or `~` is metered after this many operands.
const CHAIN: usize = 16;

/// Filters that neither copy nor walk their input.
const FREE_FILTERS: &[&str] = &["first", "default", "d", "bool", "abs", "attr", "round"];
/// Filters that walk texts, but not lists.
const COUNTING_FILTERS: &[&str] = &["length", "count"];
/// Tests of the type or of a number, which do not walk texts.
const FREE_TESTS: &[&str] = &[
    "defined",
    "undefined",
    "none",
    "boolean",
    "true",
    "false",
    "string",
    "number",
    "integer",
    "int",
    "float",
    "mapping",
    "sequence",
    "odd",
    "even",
];
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

impl Rewriter<'_> {
    /// The filters of a block, without its input.
    pub(super) fn filter_chain(&mut self, filters: &Expr<'_>) -> Written {
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

    /// An expression to which a filter can be appended: in parentheses if it needs them.
    pub(super) fn operand(&mut self, expr: &Expr<'_>, mark: bool) -> Written {
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
    pub(super) fn base(&mut self, expr: &Expr<'_>) -> Written {
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

    pub(super) fn expr(&mut self, expr: &Expr<'_>, mark: bool) -> Written {
        match expr {
            Expr::Var(variable) => self.text(variable.id),
            Expr::Const(constant) => self.constant(&constant.value, mark)?,
            Expr::Slice(slice) => {
                self.operand(&slice.expr, mark)?;
                self.text("|slice__(");
                for (i, bound) in [&slice.start, &slice.stop, &slice.step].into_iter().enumerate() {
                    self.text(if i > 0 { ", " } else { "" });
                    match bound {
                        Some(bound) => self.operand(bound, false)?,
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
                self.operand(&unary.expr, mark)?;
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
                self.operand(&choice.true_expr, mark)?;
                self.text(" if ");
                self.operand(&choice.test_expr, true)?;
                if let Some(other) = &choice.false_expr {
                    self.text(" else ");
                    self.operand(other, mark)?;
                }
            }
            Expr::Filter(filter) => self.filter(filter, mark)?,
            Expr::Test(test) => {
                self.operand(&test.expr, mark && test.args.is_empty())?;
                if !test.args.is_empty() {
                    self.text("|weighed__");
                } else if !FREE_TESTS.contains(&test.name) {
                    self.text("|item__");
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

    pub(super) fn binary(&mut self, binary: &ast::BinOp<'_>, mark: bool) -> Written {
        let operator = match binary.op {
            BinOpKind::Mul => {
                self.operand(&binary.left, mark)?;
                self.text("|multiplied__(");
                self.operand(&binary.right, mark)?;
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
    pub(super) fn compared(&mut self, expr: &Expr<'_>) -> Written {
        self.operand(expr, false)?;
        if !matches!(expr, Expr::Const(_)) {
            self.text("|weighed__");
        }
        Ok(())
    }

    pub(super) fn items(&mut self, items: &[Expr<'_>], mark: bool) -> Written {
        for (i, item) in items.iter().enumerate() {
            self.text(if i > 0 { ", " } else { "" });
            self.nested(item, mark)?;
        }
        Ok(())
    }

    /// A value that becomes part of another one.
    pub(super) fn nested(&mut self, expr: &Expr<'_>, mark: bool) -> Written {
        self.operand(expr, mark)?;
        if !matches!(expr, Expr::Const(_)) {
            self.text("|nested__");
        }
        Ok(())
    }

    pub(super) fn filter(&mut self, filter: &Filter<'_>, mark: bool) -> Written {
        if let Some(input) = &filter.expr {
            self.operand(input, mark)?;
            if COUNTING_FILTERS.contains(&filter.name) {
                self.text("|item__");
            } else if !FREE_FILTERS.contains(&filter.name) {
                self.text(if SHALLOW_FILTERS.contains(&filter.name) { "|added__" } else { "|text__" });
            }
            self.text("|");
        }
        self.text(filter.name);
        self.arguments(&filter.args, "|weighed__", inserted_by(filter.name))
    }

    pub(super) fn call(&mut self, call: &Call<'_>) -> Written {
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
    pub(super) fn arguments(
        &mut self,
        arguments: &[CallArg<'_>],
        meter: &str,
        mark: impl Fn(usize) -> bool,
    ) -> Written {
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

    pub(super) fn constant(&mut self, value: &Value, mark: bool) -> Written {
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

    pub(super) fn string(&mut self, text: &str, mark: bool) {
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
