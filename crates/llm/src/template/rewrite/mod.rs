//! Rewrites a template so that everything that allocates or compares is metered.
//!
//! The template engine counts instructions, but one instruction can double a string. The parsed template is therefore
//! written out again with filters of [`limits`](super::limits) around each operand: templates can shadow variables and
//! functions, but not filters. String constants can be marked on the way, see [`provenance`](super::provenance).

mod expressions;

use minijinja::machinery::ast::{self, Expr, Stmt};
use minijinja::machinery::{Span, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind};

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
                    self.operand(value, true)?;
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
                    self.operand(&set.expr, true)?;
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
            self.operand(condition, true)?;
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
        self.operand(&condition.expr, true)?;
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
                self.operand(default, true)?;
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
}

fn unsupported(tag: &str) -> Error {
    Error::new(ErrorKind::SyntaxError, format!("chat templates cannot use the tag \"{tag}\""))
}
